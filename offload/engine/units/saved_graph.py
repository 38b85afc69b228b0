"""Save a unit's autograd graph instead of recomputing. Saved weights are stored as slot offsets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from offload.engine.units.arguments import Arguments
from offload.engine.units.saved_inputs import Claim, SavedInputs
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, Use
from offload.errors import OffloadError
from offload.modules import nodes_of
from offload.tiers.slots import Slots

Root = torch.Tensor | GradientEdge | None
"""Target of an incoming gradient: the edge of a result, which does not hold the memory of the result, or a tensor that
stays alive outside the unit. None: no gradient."""


class TooMuchToKeepError(Exception):
    """No memory is left for an optional graph."""


class GraphMemory:
    """Memory of the tensors that autograd saves in one micro-batch: on the device, until the backward.

    A saved tensor in the unit's slot is packed as an offset, and rebuilt over the slot of the next fetch. Any other
    tensor is held and entered in the device ledger. Tensors are packed detached: returning the tensor itself would
    create a reference cycle through the graph.
    """

    leaving: Sequence[int] | None = None
    """Indices of inputs that the graph must not hold. None: the graph holds all."""

    def __init__(self, slots: Slots, saved: SavedInputs, claim: Claim, *, is_optional: bool) -> None:
        """`is_optional`: without enough memory, the graph is dropped."""
        self._slots = slots
        self._saved = saved
        self._claim = claim
        self._num_before = len(claim.entries)  # of earlier micro-batches, which stay if this graph is dropped
        self._address = saved.device.address
        self._is_optional = is_optional
        self._seen: set[int] = set()  # addresses of storages in the ledger
        self.has_weights = False
        """True if the backward will read unit weights saved by autograd."""

    def _open(self, unit: Unit, use: Use) -> None:
        """Begin the forward."""
        self._free: set[int] = set()
        if self._is_optional and self._saved.inputs_stay:
            # Inputs needed by a recomputation anyway are not counted as graph memory.
            self._free = {self._address(t.untyped_storage()) for t in use.tensors}
        # Fetching weights for a backward must not depend on the free memory of one rank.
        self._may_drop = self._is_optional and unit.traits.graph((tuple(use.needs or ()), unit.frozen)).reads_weights
        self._cargo = self._slots.cargo_of(unit.regions)
        self._weights = self._slots.addresses(self._cargo)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return the form in which autograd saves a tensor. Raises TooMuchToKeepError."""
        if tensor.layout is not torch.strided:  # Sparse tensors: the values may be in the slot.
            return tensor.detach().clone()
        address = self._address(tensor)
        if address in self._weights:
            self.has_weights = True
            return tensor.dtype, address - self._weights.start, tensor.shape, tensor.stride()
        storage = self._address(tensor.untyped_storage())
        if storage not in self._seen:
            self._seen.add(storage)
            if not self._slots.holds_storage(storage):
                is_free = storage in self._free
                if self._may_drop and not is_free and not self._saved.has_room(tensor):
                    raise TooMuchToKeepError
                name = "kept tensors"
                if is_free:
                    name = "unit inputs"
                self._saved.reserve((tensor,), name, self._claim)
        return tensor.detach()

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return a saved tensor, for the backward."""
        if isinstance(packed, torch.Tensor):
            return packed
        return self._slots.view(self._cargo, *packed)

    def prepare(self) -> None:
        """Start the copies to the device."""

    def run(self, unit: Unit, use: Use, forward: Forward) -> tuple[Graph, Arguments]:
        """Like `run_with_graph`; this memory holds the graph until the backward. Raises TooMuchToKeepError."""
        self._open(unit, use)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                graph, result = run_with_graph(unit, use, forward, leaving=self.leaving)
        except TooMuchToKeepError:
            self._saved.release(self._claim, self._num_before)
            raise
        self._saved.policy.update_peaks()
        self._saved.device.return_holes()
        graph.memory = self
        return graph, result


@dataclass
class Graph:
    """Autograd graph of one micro-batch, from forward to backward."""

    leaves: list[torch.Tensor]
    """Leaf tensors that receive the input gradients."""
    roots: list[Root]
    """Targets of the incoming gradients."""
    memory: GraphMemory | None = None
    """Memory of the saved tensors. None: the graph is dropped after the forward."""


def refuse_changed(unit: Unit, tensor: torch.Tensor) -> NoReturn:
    """Raise the OffloadError for an input changed in place."""
    raise OffloadError(
        f"unit {unit.name}: an input of shape {tuple(tensor.shape)} was changed in place, which did not happen in the "
        "recording pass; use an out-of-place operation there."
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
    unit: Unit, use: Use, forward: Forward, changed: Collection[int] = (), leaving: Sequence[int] | None = None
) -> tuple[Graph, Arguments]:
    """Run a use that needs gradients, with a graph.

    Return the graph, and the result for the caller, detached from the graph to avoid a cycle.

    `changed`: indices of inputs changed in place. The forward changes copies, with roots after those of the results.
    `leaving`: indices of inputs that the graph must not hold. None: hold all.
    """
    inputs = use.tensors
    leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, use.needs or (), strict=True)]
    entering: Sequence[int] = leaving or ()
    for i in entering:  # The graph holds a leaf, so this one has the shape of the input without its memory.
        leaves[i] = inputs[i].new_empty(()).expand(inputs[i].shape).requires_grad_()
    # Autocast casts a leaf once for all uses, so the gradients of an input would be summed in the lower precision.
    if torch.is_autocast_enabled(use.runner.device.autocast_type):
        entering = range(len(inputs))
    versions = {i: inputs[i]._version for i in entering if i not in changed}
    with torch.enable_grad():
        graph_inputs = []
        for i, (leaf, t) in enumerate(zip(leaves, inputs, strict=True)):
            graph_input = leaf
            if i in changed:  # torch forbids a change of a leaf in place
                graph_input = leaf.clone()
            elif i in entering and leaf.requires_grad:
                graph_input = _Entrance.apply(leaf, t.detach())
            graph_inputs.append(graph_input)
        result = use.runner.run(unit, use._replace(tensors=graph_inputs), forward)
    for i, version in versions.items():  # In-place changes of other inputs are refused by torch, since they are leaves.
        if inputs[i]._version != version:
            refuse_changed(unit, inputs[i])
    results = result.tensors
    dirty = [t for i in sorted(changed) if (t := graph_inputs[i]).is_floating_point()]
    targets = [*results, *[t for t in dirty if all(t is not other for other in results)]]
    roots: list[Root] = [_root_of(t) for t in targets]
    original = {id(leaf): t for leaf, t in zip(graph_inputs, inputs, strict=True)}
    results[:] = [original.get(id(t), t.detach()) for t in results]  # an input stays the tensor of the caller
    return Graph(leaves, roots), result


def _root_of(target: torch.Tensor) -> Root:
    if not target.requires_grad:
        return None
    return get_gradient_edge(target)


def has_only_torch_nodes(tensors: Iterable[torch.Tensor]) -> bool:
    """True if the graph behind tensors has no custom autograd function.

    A custom function may hold weights unknown to autograd.
    """
    return not any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes_of(tensors))


def is_number(tensor: torch.Tensor) -> bool:
    """True for a one-element tensor with own storage: saving costs nothing."""
    return tensor.numel() == 1 and tensor.untyped_storage().nbytes() == tensor.itemsize
