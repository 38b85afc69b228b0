"""Save a unit's autograd graph instead of recomputing.

Saved weights are stored as slot offsets. Other saved tensors stay on the device, or are offloaded and copied back
before the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from offload.engine.units.activation_offload import stretch_of
from offload.engine.units.arguments import Arguments
from offload.engine.units.recompute_policy import DEVICE, OFFLOADED
from offload.engine.units.runner import UnitRunner
from offload.engine.units.saved_inputs import DeviceCopies, SavedInputs
from offload.engine.units.stages import Forward
from offload.engine.units.unit import Unit
from offload.engine.units.uses import Claim
from offload.errors import OffloadError

Root = torch.Tensor | GradientEdge | None
"""Target of an incoming gradient: a result tensor, or a gradient edge if the tensor must be freed. None: no gradient.
"""
_Packed = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
"""dtype, byte offset in the slot, shape, stride"""
SMALLEST_BYTES = 4096
"""Minimum bytes for offload: below one page, a transfer is not worth the time."""


class TooMuchToKeepError(Exception):
    """No memory is left for an optional graph."""


class _OffloadedRange:
    """A memory range saved by a graph and offloaded from forward to backward."""

    def __init__(self, stretch: torch.Tensor, stand_in: torch.Tensor, saved: SavedInputs) -> None:
        self.memory: torch.Tensor | None = stretch
        """The device memory, held during the forward so the address stays unique."""
        self._begin = stretch.data_ptr()
        self._stand_in, self._saved = stand_in, saved
        self._num_uses = 0
        self._copies: DeviceCopies | None = None

    def pack(self, tensor: torch.Tensor) -> _PackedRange:
        """Return the packed form of a tensor in this range."""
        self._num_uses += 1
        offset = (tensor.data_ptr() - self._begin) // tensor.itemsize
        return _PackedRange(self, tensor.dtype, offset, tensor.shape, tensor.stride())

    def prepare(self) -> None:
        """Start the copy to the device, unless all tensors were taken."""
        if self._copies is None and self._num_uses > 0:
            self._copies = self._start_copies()

    def take(self) -> torch.Tensor:
        """Return the bytes on the device.

        The last expected reader becomes the only owner. A backward may read more often than saved (`ctx.saved_tensors`
        unpacks all each time); then the range is copied again.
        """
        copies = self._copies or self._start_copies()
        (memory,) = self._saved.wait(copies)
        self._num_uses -= 1
        self._copies = copies if self._num_uses > 0 else None
        return memory

    def _start_copies(self) -> DeviceCopies:
        return self._saved.start_copies([self._stand_in], of_graph=True)


@dataclass(frozen=True)
class _PackedRange:
    """Packed form of a saved tensor in offloaded memory."""

    stretch: _OffloadedRange
    """The memory range."""
    dtype: torch.dtype
    """Element dtype."""
    offset: int
    """Start of the tensor in the range, in elements."""
    shape: torch.Size
    """Tensor shape."""
    stride: tuple[int, ...]
    """Tensor strides, in elements."""

    def unpack(self) -> torch.Tensor:
        """Return the tensor on the device."""
        flat = self.stretch.take()
        whole = flat[: flat.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


@dataclass
class Graph:
    """Autograd graph of one micro-batch, from forward to backward."""

    leaves: list[torch.Tensor]
    """Leaf tensors that receive the input gradients."""
    roots: list[Root]
    """Targets of the incoming gradients."""
    ranges: list[_OffloadedRange] = field(default_factory=list)
    """Offloaded memory ranges in offload order."""
    has_weights: bool = False
    """True if the backward will read unit weights saved by autograd."""

    def prepare(self) -> None:
        """Start the copies to the device, last offloaded first, in backward order."""
        for stretch in reversed(self.ranges):
            stretch.prepare()


def refuse_changed(unit: Unit, tensor: torch.Tensor, version: int) -> None:
    """Raise OffloadError if an input was changed in place since this version."""
    if tensor._version != version:
        raise OffloadError(
            f"unit {unit.name}: an input of shape {tuple(tensor.shape)} was changed in place, which did not happen in "
            "the recording pass; use an out-of-place operation there."
        )


class _Entrance(torch.autograd.Function):
    """Passes an input into a graph without holding the input memory, except where operations save the tensor."""

    @staticmethod
    def forward(_ctx: Any, _leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def run_with_graph(
    unit: Unit,
    runner: UnitRunner,
    arguments: Arguments,
    inputs: Sequence[torch.Tensor],
    others: Sequence[Any],
    forward: Forward,
    needs: Sequence[bool],
    leaving: Sequence[int] | None = None,
) -> tuple[Graph, Arguments]:
    """Run a unit with a graph.

    Return the graph, and the result for the caller, detached from the graph to avoid a cycle.

    `leaving`: indices of inputs that the graph must not hold; results are not held either. None: hold all.
    """
    leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
    released = leaving or ()
    for i in released:
        leaves[i] = inputs[i].new_empty(()).expand(inputs[i].shape).requires_grad_()
    versions = {i: inputs[i]._version for i in released}
    with torch.enable_grad():
        graph_inputs = [
            _Entrance.apply(leaf, t.detach()) if i in released else leaf
            for i, (leaf, t) in enumerate(zip(leaves, inputs, strict=True))
        ]
        result = runner.run(unit, arguments, graph_inputs, others, forward)
    for i, version in versions.items():  # In-place changes of other inputs are refused by torch, since they are leaves.
        refuse_changed(unit, inputs[i], version)
    roots: list[Root] = [
        None if not t.requires_grad else t if leaving is None else get_gradient_edge(t) for t in result.tensors
    ]
    original = {id(leaf): t for leaf, t in zip(graph_inputs, inputs, strict=True)}
    result.tensors[:] = [original[id(t)] if id(t) in original else t.detach() for t in result.tensors]
    return Graph(leaves, roots), result


def run_keeping_graph(
    unit: Unit,
    runner: UnitRunner,
    arguments: Arguments,
    inputs: Sequence[torch.Tensor],
    others: Sequence[Any],
    forward: Forward,
    needs: Sequence[bool],
    claim: Claim,
    *,
    is_offloaded: bool,
) -> tuple[Graph, Arguments]:
    """Like `run_with_graph`; the micro-batch graph is held from forward to backward.

    With `is_offloaded`, saved tensors are offloaded meanwhile. Raises TooMuchToKeepError.

    A saved tensor in the unit's slot is packed as an offset, and rebuilt over the slot of the next fetch. Any other
    tensor is held and entered in the device ledger, or the whole storage is offloaded once; strides are preserved,
    since kernels depend on them. Tensors are packed detached: returning the tensor itself would create a reference
    cycle through the graph.
    """
    saved, slots, num_before = runner.saved, runner.slots, len(claim.entries)
    may_give_up = saved.policy.may_give_up(OFFLOADED if is_offloaded else DEVICE)
    # Inputs needed by a recomputation anyway are not counted as graph memory.
    counts = may_give_up and saved.inputs_stay and not is_offloaded
    # Fetching weights for a backward must not depend on the free memory of one rank.
    may_give_up = may_give_up and unit.traits.graph((tuple(needs), unit.frozen)).reads_weights
    free = {t.untyped_storage().data_ptr() for t in inputs} if counts else set()
    leaving = _find_leaving(unit, inputs, needs) if is_offloaded and not saved.is_trial else None
    staying = {t.untyped_storage().data_ptr() for i, t in enumerate(inputs) if i not in (leaving or ())}
    ranges: dict[tuple[int, int, int], _OffloadedRange] = {}
    cargo = slots.cargo_of(unit.regions)
    weights = slots.addresses(cargo)
    seen: set[int] = set()
    has_weights = False

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided:  # Sparse tensors: the values may be in the slot.
            return tensor.detach().clone()
        address = tensor.data_ptr()
        if address in weights:
            nonlocal has_weights
            has_weights = True
            return tensor.dtype, address - weights.start, tensor.shape, tensor.stride()
        storage = tensor.untyped_storage().data_ptr()
        if leaving is not None and storage not in staying and _can_leave(tensor, runner):
            if not tensor.numel():
                return torch.empty_like(tensor)  # A view would hold the whole storage.
            stretch = stretch_of(tensor)
            # The version is part of the key: after an in-place change between two operations the bytes differ.
            key = stretch.data_ptr(), stretch.nbytes, tensor._version
            if key not in ranges:
                if may_give_up and not saved.has_offload_room(stretch.nbytes):
                    raise TooMuchToKeepError
                ranges[key] = _OffloadedRange(stretch, saved.offload_range(stretch, claim), saved)
            return ranges[key].pack(tensor)
        if storage not in seen:
            seen.add(storage)
            if not slots.holds(tensor):
                if may_give_up and storage not in free and not saved.has_room(tensor):
                    raise TooMuchToKeepError
                saved.reserve(tensor, "unit inputs" if storage in free else "kept tensors", claim)
        return tensor.detach()

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        return packed.unpack() if isinstance(packed, _PackedRange) else slots.view(cargo, *packed)

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            graph, result = run_with_graph(unit, runner, arguments, inputs, others, forward, needs, leaving)
    except TooMuchToKeepError:
        saved.release(claim, num_before)
        raise
    saved.policy.update_peaks()
    graph.ranges, graph.has_weights = list(ranges.values()), has_weights
    for stretch in graph.ranges:
        stretch.memory = None
    return graph, result


def nodes_of(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield the graph nodes behind tensors, each once."""
    seen: set[Any] = set()
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            yield node
            nodes.extend(following for following, _ in node.next_functions if following is not None)


def has_only_torch_nodes(tensors: Iterable[torch.Tensor]) -> bool:
    """True if the graph behind tensors has no custom autograd function.

    A custom function may hold weights unknown to autograd.
    """
    return not any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes_of(tensors))


def is_number(tensor: torch.Tensor) -> bool:
    """True for a one-element tensor with own storage: saving costs nothing."""
    return tensor.numel() == 1 and tensor.untyped_storage().nbytes() == tensor.itemsize


def _find_leaving(unit: Unit, inputs: Sequence[torch.Tensor], needs: Sequence[bool]) -> list[int]:
    """Return the indices of inputs that an offloaded graph need not hold.

    Excluded are inputs shared with other units, and non-contiguous inputs, since their gradients would have another
    layout.
    """
    shared = unit.traits.shared
    return [i for i, t in enumerate(inputs) if needs[i] and i not in shared and t.is_contiguous()]


def _can_leave(tensor: torch.Tensor, runner: UnitRunner) -> bool:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return False  # The tensor has properties beyond raw bytes.
    is_large = tensor.untyped_storage().nbytes() >= SMALLEST_BYTES
    return is_large and tensor.device == runner.device.torch_device and not runner.slots.holds(tensor)
