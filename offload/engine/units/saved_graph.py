"""Keep a unit's graph instead of recomputing it: saved weights are remembered by their place in the slot, the
rest stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.engine.units.arguments import Arguments
from offload.engine.units.claims import Claim
from offload.engine.units.runner import UnitRunner
from offload.engine.units.unit import Unit

_Packed = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
"""dtype, bytes into the cargo, shape, stride"""


class TooMuchToKeepError(Exception):
    """The device's budget has no room for a graph that may be given up."""


class SavedGraph:
    """The graph of one micro-batch of a unit, alive from its forward to its backward.

    A tensor that autograd saves and that lies in the unit's slot is packed as its place in the cargo, and rebuilt over
    the slot into which the unit was fetched again. Any other is kept, and entered in the device's ledger. It is packed
    detached: handing back the tensor itself would tie a reference cycle through its own graph.
    """

    def __init__(
        self,
        unit: Unit,
        runner: UnitRunner,
        arguments: Arguments,
        inputs: Sequence[torch.Tensor],
        needs: Sequence[bool],
        others: Sequence[Any],
        claim: Claim,
    ) -> None:
        # The graph holds `pack` and `unpack`, and this object holds the graph: what they use are locals, or it would be
        # a cycle.
        num_before = len(claim.entries)
        may_give_up = runner.saved.may_give_up_graphs
        # Where graphs compete for room, what a recompute would hold on the device as well is no cost of theirs.
        free = {t.untyped_storage().data_ptr() for t in inputs} if may_give_up and runner.saved.inputs_stay else set()
        slots = runner.slots
        cargo = slots.cargo_of(unit.regions)
        weights = slots.addresses(cargo)

        def pack(tensor: torch.Tensor) -> _Packed | torch.Tensor:
            if tensor.layout is not torch.strided:  # a sparse one, whose values may lie in the slot
                return tensor.detach().clone()
            address = tensor.data_ptr()
            if address in weights:
                return tensor.dtype, address - weights.start, tensor.shape, tensor.stride()
            tensor = tensor.detach()
            if not slots.holds(tensor):
                is_input = bool(free) and tensor.untyped_storage().data_ptr() in free
                if may_give_up and not is_input and not runner.saved.has_room(tensor):
                    raise TooMuchToKeepError
                runner.saved.hold(tensor, "unit inputs" if is_input else "kept tensors", claim)
            return tensor

        def unpack(packed: _Packed | torch.Tensor) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            return slots.view(cargo, *packed)

        leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                result = runner.run(unit, arguments, leaves, others)
        except TooMuchToKeepError:
            runner.saved.let_go(claim, num_before)
            raise
        self._graph: tuple[list[torch.Tensor], list[torch.Tensor]] | None = (leaves, list(result.tensors))
        original = {id(leaf): t for leaf, t in zip(leaves, inputs, strict=True)}
        result.tensors[:] = [original[id(t)] if id(t) in original else runner.own(t.detach()) for t in result.tensors]
        self._result: Arguments | None = result

    def hand_over(self) -> Arguments:
        """Return the result, once: the caller's outputs hold this graph, and must not be held by it."""
        result, self._result = self._result, None
        assert result is not None
        return result

    def take(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the leaves and the results of the graph, which is then the caller's."""
        assert self._graph is not None
        graph, self._graph = self._graph, None
        return graph
