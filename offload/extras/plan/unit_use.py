"""Measure compute and memory for unit uses on the `meta` device, once per group of identical uses.

Modules able to run over sequence tiles are found by trial runs with small CPU copies of the blocks.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from offload.engine.units.arguments import Arguments, run_over_copies
from offload.engine.units.find import UnitCandidate
from offload.engine.units.offloaded_graph import SMALLEST_BYTES
from offload.engine.units.recompute_policy import PRODUCTS, saved_tensors_dropped, saved_tensors_watched
from offload.engine.units.saved_graph import has_only_torch_nodes, is_number
from offload.engine.units.saved_inputs import KeptOutputs
from offload.engine.units.trial import Trial
from offload.engine.units.use import Use
from offload.extras.large.kept_products import ProductsForward, Recorder
from offload.extras.large.row_trials import RowTrials
from offload.extras.large.tiles import TiledForward, Tiles
from offload.extras.plan.op_counter import OpCounter
from offload.extras.plan.workload import NO_WORK, Cost, PlannedProduct, ProductWork, UnitWork
from offload.planning.settings import Settings
from offload.tiers.counters import Ledger
from offload.tiers.device import CpuDevice

_aten = torch.ops.aten
_PRODUCTS = _aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default
ROWS = 2
"""Batch rows in recorded uses."""


class TiledUses:
    """Finds tileable modules in blocks with the engine's trial runs, and runs uses over tiles of `size` tokens.

    Until `find`, uses run untiled, on a few rows and tokens, and the first of each new kind is recorded for the search.
    """

    def __init__(self, size: int, found: dict[Hashable, Tiles]) -> None:
        """`found`: earlier searches, and the place for new ones. They depend on neither tile size nor rows."""
        self._size, self._is_searched = size, False
        self._samples: dict[Hashable, tuple[nn.Module, Arguments]] = {}
        self._tiles = found

    def find(self) -> None:
        """Run the tile search for every recorded kind. A block unable to run on a few rows has no tiles.

        A backward raises RuntimeError then; other errors are errors of the search, and pass.
        """
        for signature, (block, arguments) in self._samples.items():
            stand_in: Any = _StandIn(block)
            self._tiles[signature] = Tiles(())
            with suppress(RuntimeError), torch.random.fork_rng(()), _ProductsOfOneRow():
                tensors = [_random_like(t).requires_grad_(t.requires_grad) for t in arguments.tensors]
                trials = RowTrials(Trial(stand_in, stand_in, arguments, of_weights=False))
                self._tiles[signature] = trials.find(block.forward, tensors, ROWS)
        self._samples.clear()
        self._is_searched = True

    def forward(
        self, signature: Hashable, unit: UnitCandidate, arguments: Arguments, own: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return the forward function for a use: tiled if the search was successful, else `own`."""
        if not self._is_searched:
            if unit.is_block and signature not in self._samples and signature not in self._tiles:
                self._samples[signature] = _build_stand_in(unit.module), arguments
            return own
        modules, tiles = dict(unit.module.named_modules()), self._tiles.get(signature, Tiles(()))
        tiled_modules = [replace(rows, module=modules[rows.name]) for rows in tiles.modules]
        return TiledForward(own, tiled_modules, self._size, "cpu") if tiled_modules else own


class _StandIn:
    """A CPU copy of a block, as the unit and as the runner in a trial."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.modules, self.mutable_attributes = module, list(module.modules()), ()
        self.device = CpuDevice(Ledger("device", None), copies_aside=False)

    def live(self) -> dict[int, nn.Parameter]:
        """Return all parameters."""
        return dict(enumerate(self.module.parameters()))

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Return True for a weight, so that no trial copies it."""
        return any(tensor is weight for weight in self.module.parameters())

    def run(self, _unit: object, use: Use, forward: Any) -> Arguments:
        """Run `forward` on other tensors. Raises RuntimeError for every error of the block."""
        try:
            return run_over_copies(forward, use.arguments, use.tensors, use.others)
        except Exception as error:
            raise RuntimeError("the block does not run on a few rows") from error

    def installed(self) -> AbstractContextManager[None]:
        """Install nothing: the block has weights."""
        return nullcontext()


class _ProductsOfOneRow(TorchDispatchMode):
    """Multiplies with one row of a matrix whose rows, or columns, are all the same memory, as in a stand-in.

    Without it each product makes a copy with all rows: hundreds of MiB in a block of a 14B model.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and not kwargs:
            *bias, left, right = args
            if right.stride(-1) == 0:
                result = (left @ right[..., :1]).expand(*left.shape[:-1], right.shape[-1]).contiguous()
                return result + bias[0] if bias else result
            if right.stride(-2) == 0:
                result = left.sum(-1, keepdim=True) @ right[..., :1, :]
                return result + bias[0] if bias else result
        return func(*args, **kwargs)


def _build_stand_in(block: nn.Module) -> nn.Module:
    """Copy a block to the CPU with random weights. Each weight is one row, expanded to the full shape.

    Expanded weights are enough for the row trials: only the dependency between input rows and result rows matters.
    """
    stand_in, rng_state = copy.deepcopy(block), torch.get_rng_state()
    for module in stand_in.modules():
        module.__dict__.pop("forward", None)
        for name, weight in module._parameters.items():
            if weight is not None:
                values = _random_like(weight[(0,) * (weight.dim() - 1)] if weight.dim() > 1 else weight) * 0.1
                module._parameters[name] = nn.Parameter(values.expand(weight.shape), weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _random_like(buffer) if buffer.is_meta else buffer
    torch.set_rng_state(rng_state)
    return stand_in


def _random_like(like: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor with the same shape and dtype: random floats, True, or integer zeros.

    One with values, such as the places of documents, stays.
    """
    if not like.is_meta:
        return like.detach().clone()
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=like.dtype, device="cpu")
    return torch.full(like.shape, like.dtype == torch.bool, dtype=like.dtype, device="cpu")


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


FoundUses = dict[Hashable, tuple[UnitMeasurement, object]]
"""Measured uses by signature, with arguments whose addresses may be in the signature: none is taken again."""


class UnitMeasurements:
    """Cache of `UnitMeasurement`. A use with a new signature runs once under the `OpCounter`."""

    def __init__(self, counter: OpCounter, tiles: TiledUses | None, settings: Settings, found: FoundUses) -> None:
        """`tiles`: modules to run over sequence tiles; None: no tiling. `found`: the cache, with earlier uses."""
        self._counter, self._tiles = counter, tiles
        self._is_compiled = settings.compile == "always"
        self._keeps_products = self._is_compiled or settings.recompute == PRODUCTS
        self._found = found

    def measure(self, unit: UnitCandidate, forward: Callable[..., Any], arguments: Arguments) -> UnitMeasurement:
        """Return the `UnitMeasurement` for a unit with these arguments, from the cache or by running the unit."""
        signature = _signature(unit), arguments.structure
        shapes = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in arguments.tensors)
        # Two attentions over starts alike in shape differ in work by the window, which is a value.
        values = tuple(t.numpy().tobytes() for t in arguments.tensors if not t.is_meta)
        key = signature, shapes, values, repr(arguments.others)
        if key not in self._found:
            if self._tiles is not None:
                forward = self._tiles.forward(signature, unit, arguments, forward)
            self._found[key] = self._measure(unit, forward, arguments), arguments.others
        return self._found[key][0]

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

        def watch(tensor: torch.Tensor) -> None:
            storage = counter.storage_of(tensor)
            unsaved.pop(storage, None)
            seen.add(storage)
            if storage not in known and not is_number(tensor):
                if storage not in saved:  # a part of the graph may be dropped, and its memory used by other tensors
                    weakref.finalize(tensor.untyped_storage(), saved.pop, storage).atexit = False
                saved[storage] = tensor.untyped_storage().nbytes()

        before, cost = counter.begin(), counter.cost
        with torch.enable_grad(), saved_tensors_watched(watch):
            again: Callable[..., Any] = forward.for_recomputation() if isinstance(forward, TiledForward) else forward
            recomputed = run_over_copies(again, arguments, leaves, arguments.others).tensors
            # Tiles move work to the backward: subtract one forward instead.
            cost = cost + forward_cost if isinstance(forward, TiledForward) else counter.cost
        differentiable = [t.requires_grad for t in recomputed]
        keeps_graph = not saved and has_only_torch_nodes(recomputed)
        saved_sizes = list(saved.values())
        _run_backward(unit, recomputed, gradients)
        work = replace(
            NO_WORK,
            forward=forward_cost,
            backward=counter.cost - cost,
            saved_bytes=sum(saved_sizes),
            unsaved_bytes=sum(unsaved.values()),
            leaving_bytes=sum(size for size in saved_sizes if size >= SMALLEST_BYTES),
            forward_temporary_bytes=forward_bytes,
            backward_temporary_bytes=counter.peak_bytes - before,
            result_bytes=result_bytes,
            gradient_bytes=sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None),
            keeps_graph=keeps_graph,
            reads_weights=not keeps_graph or not weights.isdisjoint(seen),
        )
        if self._keeps_products and unit.is_block and not keeps_graph and not isinstance(forward, TiledForward):
            del recomputed, leaves
            products = self._measure_products(unit, forward, arguments, gradients)
            work = work.compiled(products) if self._is_compiled else replace(work, products=products)
        return UnitMeasurement(work, result, sources, differentiable, likes)

    def _measure_products(
        self, unit: UnitCandidate, forward: Callable[..., Any], arguments: Arguments, gradients: Sequence[torch.Tensor]
    ) -> ProductWork:
        """Run the use forward with kept product outputs, then as recomputation over these, and backward."""
        counter, outputs, kept = self._counter, KeptOutputs(), list[torch.Tensor]()
        recorder = _CostRecorder(counter)
        recorded = counter.products = ProductsForward(forward, unit.name, outputs, lambda _: None, lambda: recorder)

        def leaves() -> list[torch.Tensor]:
            return [t.detach().requires_grad_(t.requires_grad) for t in arguments.tensors]

        before = counter.begin()
        with (
            torch.enable_grad(),
            saved_tensors_dropped(),
            outputs.recorded_in(kept),
        ):
            run_over_copies(recorded, arguments, leaves(), arguments.others)
        pairs = zip(recorder.products, recorder.costs, strict=True)
        products = tuple([PlannedProduct(each.num_bytes, each.work, cost) for each, cost in pairs])
        recorder.products.clear()
        kept_bytes = sum(product.num_bytes for product in products)
        forward_bytes = counter.peak_bytes - before - kept_bytes
        before, cost = counter.begin(), counter.cost
        with (
            torch.enable_grad(),
            saved_tensors_watched(lambda _: None),
            outputs.replayed(kept),
        ):  # unseen by the caller's
            again = recorded.for_recomputation(forward)
            recomputed = run_over_copies(again, arguments, leaves(), arguments.others).tensors
        cost, counter.products = counter.cost - cost, None
        _run_backward(unit, recomputed, gradients)
        return ProductWork(kept_bytes, cost, max(0, forward_bytes), counter.peak_bytes - before, products)


class _CostRecorder(Recorder):
    """Notes the cost of each product too."""

    def __init__(self, counter: OpCounter) -> None:
        super().__init__()
        self.costs: list[Cost] = []
        self._counter = counter

    def product(self, operation: Any, compute: Callable[[], Any], inner: float) -> Any:
        before = self._counter.cost
        result = super().product(operation, compute, inner)
        self.costs.append(self._counter.cost - before)
        return result


def _run_backward(unit: UnitCandidate, results: list[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Run a backward, and empty the list of results. Each weight gradient is dropped once complete, as if added to the
    gradient buffer.
    """
    weights = [p for p in unit.module.parameters() if p.requires_grad]
    hooks = [weight.register_post_accumulate_grad_hook(_drop_gradient) for weight in weights]
    pairs = [(get_gradient_edge(t), g) for t, g in zip(results, gradients, strict=True) if t.requires_grad]
    results.clear()  # as in the engine, whose graphs hold no results
    if pairs:  # tiles run again in here; another watcher hides their graphs from the caller's
        with saved_tensors_watched(lambda _tensor: None):
            torch.autograd.backward([root for root, _ in pairs], [g for _, g in pairs])
    for hook in hooks:
        hook.remove()


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


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
