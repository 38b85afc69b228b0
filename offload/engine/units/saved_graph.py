"""Keep a unit's graph instead of recomputing it: saved weights are remembered by their place in the slot; the rest
stays on the device, or goes below it and comes back ahead of the backward.
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
from offload.engine.units.claims import Claim
from offload.engine.units.forwards import Forward
from offload.engine.units.recompute_policy import BELOW, DEVICE
from offload.engine.units.runner import UnitRunner
from offload.engine.units.saved_inputs import Returning, SavedInputs
from offload.engine.units.unit import Unit
from offload.errors import OffloadError

Root = torch.Tensor | GradientEdge | None
"""What a gradient comes in for: a result, or, where the result itself is not to be held, its edge; None for a result
without a gradient.
"""
_Packed = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
"""dtype, bytes into the cargo, shape, stride"""
SMALLEST_BYTES = 4096
"""What is smaller stays on the device: moving it takes longer than a page does."""


class TooMuchToKeepError(Exception):
    """Memory has no room for a graph that may be given up."""


class _Below:
    """A stretch of memory that a graph saves, and that went below the device from the forward to the backward."""

    def __init__(self, stretch: torch.Tensor, stands: torch.Tensor, saved: SavedInputs) -> None:
        self.memory: torch.Tensor | None = stretch
        """The stretch, as long as the forward runs: no address means two of them."""
        self._begin = stretch.data_ptr()
        self._stands, self._saved = stands, saved
        self._num_uses = 0
        self._returning: Returning | None = None

    def pack(self, tensor: torch.Tensor) -> _PackedBelow:
        """Return what is kept of a tensor in the stretch."""
        self._num_uses += 1
        offset = (tensor.data_ptr() - self._begin) // tensor.itemsize
        return _PackedBelow(self, tensor.dtype, offset, tensor.shape, tensor.stride())

    def prepare(self) -> None:
        """Start to bring the stretch back, unless nobody is expected to ask for it any more."""
        if self._returning is None and self._num_uses > 0:
            self._returning = self._bring_back()

    def take(self) -> torch.Tensor:
        """Return the bytes on the device; the last who asks for them has them alone. A backward may ask more often than
        it saved (`ctx.saved_tensors` brings all of them each time), and gets them once more.
        """
        returning = self._returning or self._bring_back()
        (found,) = self._saved.wait(returning)
        self._num_uses -= 1
        self._returning = returning if self._num_uses > 0 else None
        return found

    def _bring_back(self) -> Returning:
        return self._saved.bring_back([self._stands], of_graph=True)


@dataclass(frozen=True)
class _PackedBelow:
    """What is kept of a tensor that autograd saves, where its memory went below the device."""

    stretch: _Below
    """The memory."""
    dtype: torch.dtype
    """The type of the tensor's elements."""
    offset: int
    """Where the tensor begins in the stretch, in elements."""
    shape: torch.Size
    """The shape of the tensor."""
    stride: tuple[int, ...]
    """The strides of the tensor, in elements."""

    def unpack(self) -> torch.Tensor:
        """Return the tensor, on the device again."""
        flat = self.stretch.take()
        whole = flat[: flat.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


@dataclass
class Graph:
    """The graph of one micro-batch of a use, from its forward to its backward."""

    leaves: list[torch.Tensor]
    """What the gradients of the inputs come to."""
    roots: list[Root]
    """What gradients come in for."""
    below: list[_Below] = field(default_factory=list)
    """What went below the device, in the order in which it went."""
    has_weights: bool = False
    """True if autograd has saved weights of the unit, which its backward will read."""

    def prepare(self) -> None:
        """Start to bring back what went below the device: what went last is wanted first."""
        for stretch in reversed(self.below):
            stretch.prepare()


def refuse_changed(unit: Unit, tensor: torch.Tensor, version: int) -> None:
    """Raise OffloadError where an input of a unit, once of this version, was changed in place."""
    if tensor._version != version:
        raise OffloadError(
            f"unit {unit.name}: an input of shape {tuple(tensor.shape)} was changed in place, which did not happen in "
            "the recording pass; use an out-of-place operation there."
        )


class _Entrance(torch.autograd.Function):
    """Lets an input into a graph that does not hold its memory, but for what operations save of it."""

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
    """Run a unit with a graph of its own; return that, and the result as a caller may have it, who must not be held by
    the graph: outputs hold it. With a list of inputs that are `leaving`, by number, the graph does not hold these, nor
    the results.
    """
    leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
    gone = leaving or ()
    for i in gone:
        leaves[i] = inputs[i].new_empty(()).expand(inputs[i].shape).requires_grad_()
    versions = {i: inputs[i]._version for i in gone}
    with torch.enable_grad():
        given = [
            _Entrance.apply(leaf, t.detach()) if i in gone else leaf
            for i, (leaf, t) in enumerate(zip(leaves, inputs, strict=True))
        ]
        result = runner.run(unit, arguments, given, others, forward)
    for i, version in versions.items():  # of another one torch refuses it, since that is a leaf in there
        refuse_changed(unit, inputs[i], version)
    roots: list[Root] = [
        None if not t.requires_grad else t if leaving is None else get_gradient_edge(t) for t in result.tensors
    ]
    original = {id(leaf): t for leaf, t in zip(given, inputs, strict=True)}
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
    is_below: bool,
) -> tuple[Graph, Arguments]:
    """Run a unit as `run_with_graph`; the graph of one micro-batch is alive from its forward to its backward, and where
    it `is_below`, what it saves is below the device meanwhile. Raises TooMuchToKeepError.

    A tensor that autograd saves and that lies in the unit's slot is packed as its place in the cargo, and rebuilt over
    the slot into which the unit was fetched again. Any other is kept, and entered in the device's ledger, or its whole
    storage is put away, once: strides come back as they were, by which kernels are chosen. A tensor is packed detached:
    handing back the tensor itself would tie a reference cycle through its own graph.
    """
    saved, slots, num_before = runner.saved, runner.slots, len(claim.entries)
    may_give_up = saved.policy.may_give_up(BELOW if is_below else DEVICE)
    # Where graphs compete for room, what a recompute would hold on the device as well is no cost of theirs.
    counts = may_give_up and saved.inputs_stay and not is_below
    # Whether weights come up for a backward must not hang on the room of a rank.
    may_give_up = may_give_up and unit.traits.graph((tuple(needs), unit.frozen)).reads_weights
    free = {t.untyped_storage().data_ptr() for t in inputs} if counts else set()
    leaving = _leaving(unit, inputs, needs) if is_below and not saved.is_trial else None
    staying = {t.untyped_storage().data_ptr() for i, t in enumerate(inputs) if i not in (leaving or ())}
    below: dict[tuple[int, int, int], _Below] = {}
    cargo = slots.cargo_of(unit.regions)
    weights = slots.addresses(cargo)
    seen: set[int] = set()
    has_weights = False

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided:  # a sparse one, whose values may lie in the slot
            return tensor.detach().clone()
        address = tensor.data_ptr()
        if address in weights:
            nonlocal has_weights
            has_weights = True
            return tensor.dtype, address - weights.start, tensor.shape, tensor.stride()
        storage = tensor.untyped_storage().data_ptr()
        if leaving is not None and storage not in staying and _can_leave(tensor, runner):
            if not tensor.numel():
                return torch.empty_like(tensor)  # a view of nothing would hold all of its storage
            stretch = stretch_of(tensor)
            # What was changed in place between two operations is other bytes, whether or not the first has a backward.
            key = stretch.data_ptr(), stretch.nbytes, tensor._version
            if key not in below:
                if may_give_up and not saved.has_room_below(stretch.nbytes):
                    raise TooMuchToKeepError
                below[key] = _Below(stretch, saved.put_below(stretch, claim), saved)
            return below[key].pack(tensor)
        if storage not in seen:
            seen.add(storage)
            if not slots.holds(tensor):
                if may_give_up and storage not in free and not saved.has_room(tensor):
                    raise TooMuchToKeepError
                saved.hold(tensor, "unit inputs" if storage in free else "kept tensors", claim)
        return tensor.detach()

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        return packed.unpack() if isinstance(packed, _PackedBelow) else slots.view(cargo, *packed)

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            graph, result = run_with_graph(unit, runner, arguments, inputs, others, forward, needs, leaving)
    except TooMuchToKeepError:
        saved.let_go(claim, num_before)
        raise
    saved.policy.saw()
    graph.below, graph.has_weights = list(below.values()), has_weights
    for stretch in graph.below:
        stretch.memory = None
    return graph, result


def nodes_of(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield the nodes of the graph behind tensors, each once."""
    seen: set[Any] = set()
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            yield node
            nodes.extend(following for following, _ in node.next_functions if following is not None)


def is_torchs_own(tensors: Iterable[torch.Tensor]) -> bool:
    """True where the graph behind tensors has no function of its own, which may keep weights that autograd does not
    know of.
    """
    return not any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes_of(tensors))


def is_number(tensor: torch.Tensor) -> bool:
    """True for a tensor that is alone in its memory, and a single number: to save it is no cost."""
    return tensor.numel() == 1 and tensor.untyped_storage().nbytes() == tensor.itemsize


def _leaving(unit: Unit, inputs: Sequence[torch.Tensor], needs: Sequence[bool]) -> list[int]:
    """Return which inputs a graph that goes below the device need not hold there: not those that other units get too,
    nor those whose gradient would lie in another way than they do.
    """
    shared = unit.traits.shared
    return [i for i, t in enumerate(inputs) if needs[i] and i not in shared and t.is_contiguous()]


def _can_leave(tensor: torch.Tensor, runner: UnitRunner) -> bool:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return False  # it is more than its bytes
    is_large = tensor.untyped_storage().nbytes() >= SMALLEST_BYTES
    return is_large and tensor.device == runner.device.torch_device and not runner.slots.holds(tensor)
