"""Token rows sorted by expert, and the forward of one expert, both without a wait for the device by expert."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from offload.engine.units.recompute_policy import saved_tensors_watched


class ExpertRows:
    """Rows for each expert: one row for each choice of a token, sorted by expert, then choice, then token, the order in
    a family's own forward.
    """

    def __init__(self, index: Tensor, num_experts: int) -> None:
        """Waits for the device once. `index`: expert numbers, integers [tokens, choices]; numbers from `num_experts` on
        are no experts.
        """
        by_expert, self._places = index.t().reshape(-1).sort(stable=True)
        self._shape = index.shape
        self.tokens = self._places % max(len(index), 1)  # transposed: a place is choice * tokens + token
        """Token of each row, int64 [rows]."""
        numbers = torch.arange(num_experts + 1, dtype=index.dtype, device=index.device)
        borders = torch.searchsorted(by_expert, numbers).tolist()  # the one wait
        self.spans = {expert: slice(*span) for expert, span in enumerate(pairwise(borders)) if span[0] < span[1]}
        """Rows of each expert with rows."""

    def sort(self, values: Tensor) -> Tensor:
        """Return values [rows] from values [tokens, choices]."""
        return values.t().reshape(-1)[self._places]

    def unsort(self, values: Tensor) -> Tensor:
        """Return values [tokens, choices] from values [rows]."""
        return torch.empty_like(values).scatter_(0, self._places, values).view(self._shape[::-1]).t().contiguous()


class ExpertForward:
    """The forward of one expert. A family's own forward for a stack asks the device for the rows of each expert, so the
    host waits some seven times. The operations that an experts module describes to transformers (two products with a
    gate between) run instead, if the first use shows the same bits.
    """

    _is_described: bool | None = None

    def __init__(self, module: nn.Module, own: Callable[..., Tensor]) -> None:
        self._module: Any = module
        self._own = own

    def __call__(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return results [rows, hidden] from rows [rows, hidden] and choice weights [rows], with a stack of one expert
        in the module.
        """
        if self._is_described is None:
            self._is_described = self._equals_own(rows, weights)
        if self._is_described:
            return self._run_described(rows, weights)
        return self._run_own(rows, weights)

    def _run_own(self, rows: Tensor, weights: Tensor) -> Tensor:
        return self._own(self._module, rows, rows.new_zeros((len(rows), 1), dtype=torch.int64), weights[:, None])

    def _run_described(self, rows: Tensor, weights: Tensor) -> Tensor:
        module = self._module
        if module.has_gate:
            hidden = module._apply_gate(self._product(rows, "gate_up_proj"))
        else:
            hidden = module.act_fn(self._product(rows, "up_proj"))
        result = self._product(hidden, "down_proj")
        if module.has_post_expert_norm:
            result = module.post_expert_norm(result)
        return (result * weights[:, None]).to(rows.dtype)

    def _product(self, rows: Tensor, name: str) -> Tensor:
        weight = getattr(self._module, name).squeeze(0)
        result = rows @ weight if self._module.is_transposed else linear(rows, weight)
        if self._module.has_bias:
            result = result + getattr(self._module, f"{name}_bias").squeeze(0)
        return result

    def _equals_own(self, rows: Tensor, weights: Tensor) -> bool:
        """Compare both on eight rows: results, and gradients for rows and weights."""
        # Fixed numbers: random ones would move the generators of the run.
        number = torch.arange(8 * rows.shape[1], device=rows.device)
        rows, weights = (number * 0.7).sin().view(8, -1).to(rows.dtype), (number[:8] * 0.3).cos().to(weights.dtype)
        # A family, or another version of transformers, may describe itself wrongly, or not at all.
        with suppress(AttributeError, RuntimeError):
            one, other = (_with_gradients(run, rows, weights) for run in (self._run_own, self._run_described))
            return all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(one, other, strict=True))
        return False


def _with_gradients(run: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    """Return the result of `run`, and the gradients for `given`, hidden from a recording around the use."""
    with torch.enable_grad(), saved_tensors_watched(lambda _: None):
        leaves = [value.clone().requires_grad_() for value in given]
        result = run(*leaves)
        return result, *torch.autograd.grad(result, leaves, given[0])
