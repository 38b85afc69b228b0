"""Measure compute and memory for unit uses on the `meta` device, once per group of identical uses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.engine.units.arguments import Arguments, run_over_copies
from offload.engine.units.find import UnitCandidate
from offload.engine.units.offloaded_graph import SMALLEST_BYTES
from offload.engine.units.saved_graph import has_only_torch_nodes, is_number
from offload.extras.large.tiles import TiledForward
from offload.extras.plan.op_counter import OpCounter
from offload.extras.plan.tiled_uses import TiledUses
from offload.extras.plan.workload import NO_WORK, UnitWork


@dataclass(frozen=True)
class UnitMeasurement:
    """Measured cost and output layout for a unit use, shared by all identical uses.

    work: cost, without unit name.
    result: output structure, with the tensor list emptied.
    sources: for each result tensor, the index of the identical input tensor, or None.
    differentiable: for each result tensor, True if a gradient is required.
    likes: shape, stride and dtype for each result tensor.
    """

    work: UnitWork
    result: Arguments
    sources: list[int | None]
    differentiable: list[bool]
    likes: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]


class UnitMeasurements:
    """Cache of `UnitMeasurement`. A use with a new signature runs once under the `OpCounter`."""

    def __init__(self, counter: OpCounter, tiles: TiledUses | None = None, *, records_uses: bool = False) -> None:
        """Create an empty cache.

        tiles: modules to run over sequence tiles; None: no tiling.
        records_uses: record uses in `tiles` for a later tile search. The inputs then have only a few rows and tokens.
        """
        self._counter, self._tiles, self._records_uses = counter, tiles, records_uses
        self._measurements: dict[Hashable, UnitMeasurement] = {}

    def measure(self, unit: UnitCandidate, forward: Callable[..., Any], arguments: Arguments) -> UnitMeasurement:
        """Return the `UnitMeasurement` for a unit with these arguments, from the cache or by running the unit."""
        signature = _signature(unit), arguments.structure
        key = signature, _shapes(arguments.tensors), repr(arguments.others)
        if key not in self._measurements:
            if self._tiles is not None and self._records_uses:
                self._tiles.record(signature, unit, arguments)
            elif self._tiles is not None:
                forward = self._tiles.forward(signature, unit, forward)
            self._measurements[key] = self._measure(unit, forward, arguments)
        return self._measurements[key]

    def _measure(self, unit: UnitCandidate, forward: Callable[..., Any], arguments: Arguments) -> UnitMeasurement:
        """Run the use forward without a graph, then as recomputation and backward."""
        counter, inputs = self._counter, arguments.tensors
        cost, before = counter.cost, counter.begin()
        with torch.no_grad():
            result = run_over_copies(forward, arguments, inputs, arguments.others)
        forward_cost, forward_bytes = counter.cost - cost, counter.peak_bytes - before
        numbers = {id(tensor): number for number, tensor in enumerate(inputs)}
        sources = [numbers.get(id(tensor)) for tensor in result.tensors]
        likes = [(t.shape, t.stride(), t.dtype) for t in result.tensors]
        owned = {counter.storage_of(t): t.untyped_storage().nbytes() for t in result.tensors}
        result_bytes = sum(size for key, size in owned.items() if counter.is_own(key))
        result.tensors.clear()
        gradients = [torch.empty_strided(*like[:2], dtype=like[2], device="meta") for like in likes]

        leaves = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        unsaved = {counter.storage_of(t): t.nbytes for t in leaves if t.requires_grad}
        weights = {counter.storage_of(t) for t in unit.module.parameters()}
        known = weights.union(map(counter.storage_of, leaves))
        saved: dict[int, int] = {}
        seen: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = counter.storage_of(tensor)
            unsaved.pop(storage, None)
            seen.add(storage)
            if storage not in known and not is_number(tensor):
                saved[storage] = tensor.untyped_storage().nbytes()
            return tensor

        hooks = [
            p.register_post_accumulate_grad_hook(_drop_gradient) for p in unit.module.parameters() if p.requires_grad
        ]
        before = counter.begin()
        cost = counter.cost
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if isinstance(forward, TiledForward):  # work moves to the backward: subtract one forward instead
                recomputed = run_over_copies(forward.for_recomputation(), arguments, leaves, arguments.others).tensors
                cost += forward_cost
            else:
                recomputed = run_over_copies(forward, arguments, leaves, arguments.others).tensors
                cost = counter.cost
        pairs = [(t, g) for t, g in zip(recomputed, gradients, strict=True) if t.requires_grad]
        differentiable = [t.requires_grad for t in recomputed]
        keeps_graph = not saved and has_only_torch_nodes(recomputed)
        if pairs:  # tiles run again in here; no-op hooks hide their graphs from `pack`
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        for hook in hooks:
            hook.remove()
        work = replace(
            NO_WORK,
            forward=forward_cost,
            backward=counter.cost - cost,
            saved_bytes=sum(saved.values()),
            unsaved_bytes=sum(unsaved.values()),
            leaving_bytes=sum(size for size in saved.values() if size >= SMALLEST_BYTES),
            forward_temporary_bytes=forward_bytes,
            backward_temporary_bytes=counter.peak_bytes - before,
            result_bytes=result_bytes,
            gradient_bytes=sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None),
            keeps_graph=keeps_graph,
            reads_weights=not keeps_graph or not weights.isdisjoint(seen),
        )
        return UnitMeasurement(work, result, sources, differentiable, likes)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None  # already added to the gradient buffer


def _shapes(tensors: Sequence[torch.Tensor]) -> Hashable:
    return tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)


def _signature(unit: UnitCandidate) -> Hashable:
    """Return a key shared by units with identical compute: module classes, plain attributes, parameter shapes."""
    parts: list[Hashable] = []
    for name, module in unit.module.named_modules():
        plain = tuple(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and not key.startswith("layer_i")  # layer_idx differs
        )
        weights = tuple((key, None if p is None else (p.shape, p.dtype)) for key, p in module._parameters.items())
        parts.append((name, type(module), plain, weights))
    return tuple(parts)
