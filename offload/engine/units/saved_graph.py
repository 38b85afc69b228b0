"""Keep a unit's graph instead of recomputing it: saved weights are remembered by their place in the slot, the
rest stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.engine.units.arguments import Arguments
from offload.engine.units.claims import Claim
from offload.engine.units.forwards import Forward
from offload.engine.units.runner import UnitRunner
from offload.engine.units.unit import Unit

Graph = tuple[list[torch.Tensor], list[torch.Tensor]]
"""The leaves of a graph, and the tensors that gradients come in for."""
_Packed = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
"""dtype, bytes into the cargo, shape, stride"""


class TooMuchToKeepError(Exception):
    """The device's budget has no room for a graph that may be given up."""


def run_with_graph(
    unit: Unit,
    runner: UnitRunner,
    arguments: Arguments,
    inputs: Sequence[torch.Tensor],
    others: Sequence[Any],
    forward: Forward,
    needs: Sequence[bool],
) -> tuple[Graph, Arguments]:
    """Run a unit with a graph of its own; return that, and the result as a caller may have it, who must not be held by
    the graph: outputs hold it.
    """
    leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs, strict=True)]
    with torch.enable_grad():
        result = runner.run(unit, arguments, leaves, others, forward)
    graph = leaves, list(result.tensors)
    original = {id(leaf): t for leaf, t in zip(leaves, inputs, strict=True)}
    result.tensors[:] = [original[id(t)] if id(t) in original else t.detach() for t in result.tensors]
    return graph, result


def run_keeping_graph(
    unit: Unit,
    runner: UnitRunner,
    arguments: Arguments,
    inputs: Sequence[torch.Tensor],
    others: Sequence[Any],
    forward: Forward,
    needs: Sequence[bool],
    claim: Claim,
) -> tuple[Graph, Arguments]:
    """Run a unit as `run_with_graph`; the graph of one micro-batch is alive from its forward to its backward. Raises
    TooMuchToKeepError.

    A tensor that autograd saves and that lies in the unit's slot is packed as its place in the cargo, and rebuilt over
    the slot into which the unit was fetched again. Any other is kept, and entered in the device's ledger. It is packed
    detached: handing back the tensor itself would tie a reference cycle through its own graph.
    """
    saved, slots, num_before = runner.saved, runner.slots, len(claim.entries)
    may_give_up = saved.policy.mode == "auto"
    # Where graphs compete for room, what a recompute would hold on the device as well is no cost of theirs.
    free = {t.untyped_storage().data_ptr() for t in inputs} if may_give_up and saved.inputs_stay else set()
    cargo = slots.cargo_of(unit.regions)
    weights = slots.addresses(cargo)
    seen: set[int] = set()

    def pack(tensor: torch.Tensor) -> _Packed | torch.Tensor:
        if tensor.layout is not torch.strided:  # a sparse one, whose values may lie in the slot
            return tensor.detach().clone()
        address = tensor.data_ptr()
        if address in weights:
            return tensor.dtype, address - weights.start, tensor.shape, tensor.stride()
        storage = tensor.untyped_storage().data_ptr()
        if storage not in seen:
            seen.add(storage)
            if not slots.holds(tensor):
                if may_give_up and storage not in free and not saved.has_room(tensor):
                    raise TooMuchToKeepError
                saved.hold(tensor, "unit inputs" if storage in free else "kept tensors", claim)
        return tensor.detach()

    def unpack(packed: _Packed | torch.Tensor) -> torch.Tensor:
        return packed if isinstance(packed, torch.Tensor) else slots.view(cargo, *packed)

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return run_with_graph(unit, runner, arguments, inputs, others, forward, needs)
    except TooMuchToKeepError:
        saved.let_go(claim, num_before)
        raise
