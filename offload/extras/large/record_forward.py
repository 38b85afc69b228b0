"""The forward for the experts in one record: two grouped products, or a loop over experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear

from offload.accelerators import capability_of
from offload.engine.comparison import are_near, same_bits
from offload.engine.units.recompute_policy import saved_tensors_watched
from offload.engine.units.unit import Unit
from offload.extras.large.expert_rows import RecordRows

Stacks = Mapping[int, Tensor]
"""Weights in a record, [experts, ...], by model index."""
Product = Callable[[Tensor, str], Tensor]
"""Rows [rows, width] times the weights with a name, plus the bias, by expert."""
_ROWS = 8
"""Rows for each expert in the trials."""
_GROUPING = 9, 10
"""Major capabilities for which torch has a kernel for grouped products."""


class RecordForward:
    """The forward for the experts in one record.

    A family's own forward for a stack asks the device for the rows, so the host waits some seven times an expert. The
    operations that an experts module describes to transformers (two products with a gate between) run instead, if the
    first use shows the same bits. All experts in a record then share these products, if a trial agrees.
    """

    def __init__(self, unit: Unit, own: Callable[..., Tensor]) -> None:
        self._unit = unit
        self._module: Any = unit.module
        self._own = own
        self._chosen: dict[int, Callable[..., Tensor]] = {}  # by the number of experts in a record

    def __call__(self, rows: Tensor, weights: Tensor, group: RecordRows, stacks: Stacks) -> Tensor:
        """Return results [rows, hidden] from rows [rows, hidden] and choice weights [rows], sorted by expert."""
        num_experts = len(group.counts)
        if num_experts not in self._chosen:
            self._chosen[num_experts] = self._choose(rows, weights, group, stacks)
        return self._chosen[num_experts](rows, weights, group, stacks)

    # -- ways to run -----------------------------------------------------------------------------------------

    def _run_grouped(self, rows: Tensor, weights: Tensor, group: RecordRows, stacks: Stacks) -> Tensor:
        if len(group.counts) == 1 or not _can_group(rows):
            return self._run_described(rows, weights, group, stacks)
        activation = self._activation
        if rows.is_cpu:  # there vector code leaves the last elements to code with other bits
            activation = partial(self._activation_by_expert, group)
        with self._installed(stacks):
            return self._follow(rows, weights, partial(self._grouped_product, group), activation)

    def _run_described(self, rows: Tensor, weights: Tensor, group: RecordRows, stacks: Stacks) -> Tensor:
        forward = partial(self._follow, product=self._single_product, activation=self._activation)
        return self._loop(forward, rows, weights, group, stacks)

    def _run_own(self, rows: Tensor, weights: Tensor, group: RecordRows, stacks: Stacks) -> Tensor:
        return self._loop(self._of_family, rows, weights, group, stacks)

    def _loop(
        self,
        forward: Callable[[Tensor, Tensor], Tensor],
        rows: Tensor,
        weights: Tensor,
        group: RecordRows,
        stacks: Stacks,
    ) -> Tensor:
        """Run `forward` for each expert with rows, with this expert alone in the module."""
        if len(group.counts) == 1:  # without the copies of a split and a concatenation
            with self._installed(stacks):
                return forward(rows, weights)
        by_expert = {index: stack.split(1) for index, stack in stacks.items()}
        results = []
        for expert, span in group.by_expert():
            with self._installed({index: parts[expert] for index, parts in by_expert.items()}):
                results.append(forward(rows[span], weights[span]))
        return torch.cat(results)

    def _of_family(self, rows: Tensor, weights: Tensor) -> Tensor:
        return self._own(self._module, rows, rows.new_zeros((len(rows), 1), dtype=torch.int64), weights[:, None])

    def _follow(
        self, rows: Tensor, weights: Tensor, product: Product, activation: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Run the described operations."""
        module = self._module
        hidden = activation(product(rows, "gate_up_proj" if module.has_gate else "up_proj"))
        result = product(hidden, "down_proj")
        if module.has_post_expert_norm:
            result = module.post_expert_norm(result)
        return (result * weights[:, None]).to(rows.dtype)

    def _activation(self, rows: Tensor) -> Tensor:
        module = self._module
        activation: Callable[[Tensor], Tensor] = module._apply_gate if module.has_gate else module.act_fn
        return activation(rows)

    def _activation_by_expert(self, group: RecordRows, rows: Tensor) -> Tensor:
        return torch.cat([self._activation(part) for part in rows.split(group.counts)])

    def _single_product(self, rows: Tensor, name: str) -> Tensor:
        weight = getattr(self._module, name).squeeze(0)
        result = rows @ weight if self._module.is_transposed else linear(rows, weight)
        if self._module.has_bias:
            result = result + getattr(self._module, f"{name}_bias").squeeze(0)
        return result

    def _grouped_product(self, group: RecordRows, rows: Tensor, name: str) -> Tensor:
        stack = getattr(self._module, name)
        if not self._module.is_transposed:
            stack = stack.transpose(-2, -1)
        result: Tensor = grouped_mm(rows, stack, offs=group.ends)
        if self._module.has_bias:
            result = _AddBias.apply(result, getattr(self._module, f"{name}_bias"), group)
        return result

    @contextmanager
    def _installed(self, stacks: Mapping[int, Any]) -> Iterator[None]:
        unit = self._unit
        unit.install({**unit.placeholders, **stacks})  # a record in place of the layer
        try:
            yield
        finally:
            unit.install(unit.placeholders)

    # -- trials ----------------------------------------------------------------------------------------------

    def _choose(self, rows: Tensor, weights: Tensor, group: RecordRows, stacks: Stacks) -> Callable[..., Tensor]:
        """Compare the ways on a few rows for each expert: results, and gradients for rows and weights.

        Described operations must have the bits from the family's own forward. So must grouped products on a CPU.
        Elsewhere the bits depend on shapes, and grouped products may sum in another order.
        """
        num_experts = len(group.counts)
        numbers = torch.arange(num_experts * _ROWS * rows.shape[1], device=rows.device)
        rows_of_trial = numbers[: num_experts * _ROWS]
        group = group._replace(
            counts=(_ROWS,) * num_experts,
            ends=(rows_of_trial[:num_experts].int() + 1) * _ROWS,
            experts=rows_of_trial // _ROWS + group.first,
        )
        # Fixed numbers: random ones would move the generators of the run.
        given = (
            (numbers * 0.7).sin().view(-1, rows.shape[1]).to(rows.dtype),
            (rows_of_trial * 0.3).cos().to(weights.dtype),
        )
        stacks = {index: stack.detach() for index, stack in stacks.items()}

        def are_alike(one: Callable[..., Tensor], other: Callable[..., Tensor], is_alike: Callable[..., bool]) -> bool:
            # A family, or another version of transformers, may describe itself wrongly, or not at all; a kernel may
            # refuse a width.
            with suppress(AttributeError, RuntimeError):
                pairs = zip(*(_with_gradients(run, *given, group, stacks) for run in (one, other)), strict=True)
                return all(is_alike(*pair) for pair in pairs)
            return False

        if not are_alike(self._run_own, self._run_described, same_bits):
            return self._run_own
        is_exact = same_bits if rows.is_cpu else are_near
        if _can_group(rows) and are_alike(self._run_described, self._run_grouped, is_exact):
            return self._run_grouped
        return self._run_described


def _can_group(rows: Tensor) -> bool:
    """True if grouped products need no wait for the device: in bf16 on Hopper, B200 and B300 alone. Elsewhere torch
    reads where groups end, and runs one product after the other. Autocast does not know the operation.
    """
    if rows.is_cpu:
        has_kernel = True
    else:
        capability = capability_of(rows.device)
        has_kernel = rows.dtype == torch.bfloat16 and (capability is None or capability[0] in _GROUPING)
    return has_kernel and not torch.is_autocast_enabled(rows.device.type)


class _AddBias(torch.autograd.Function):
    """Rows [rows, width] plus vectors [experts, width] by expert. A vector's gradient is the sum over its rows, as
    for a single product with a bias.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, vectors: Tensor, group: RecordRows) -> Tensor:
        ctx.group = group
        return rows + vectors[group.experts - group.first]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_vectors = None
        if ctx.needs_input_grad[1]:
            of_vectors = gradient.new_zeros(len(ctx.group.counts), gradient.shape[1])
            for expert, span in ctx.group.by_expert():
                of_vectors[expert] = gradient[span].sum(0)
        return gradient, of_vectors, None


def _with_gradients(
    run: Callable[..., Tensor], rows: Tensor, weights: Tensor, group: RecordRows, stacks: Stacks
) -> tuple[Tensor, ...]:
    """Return the result, and the gradients for rows and weights, hidden from a recording around the use."""
    with torch.enable_grad(), saved_tensors_watched(lambda _: None):
        leaves = [value.clone().requires_grad_() for value in (rows, weights)]
        result = run(*leaves, group, stacks)
        return result, *torch.autograd.grad(result, leaves, rows)
