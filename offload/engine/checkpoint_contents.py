"""Contents of a checkpoint: parameters, planes and buffers, and their places in the tiles of a rank.

Data are addressed by parameter name and slice. A checkpoint can be read with another number of ranks, another ZeRO
stage or another placement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import count, takewhile

import torch
from torch import nn

from offload.checkpoint.manifest import ERROR as ERROR_PREFIX
from offload.checkpoint.manifest import Contents, Entry
from offload.checkpoint.reader import Span
from offload.engine.companions import without_companions
from offload.engine.state import EngineState
from offload.engine.weights import Weights
from offload.layout.codecs import EXACT
from offload.layout.planes import CODES, ERROR, STALE
from offload.layout.regions import ParameterInfo, Region
from offload.layout.sharding import Sharding
from offload.tiers.store import Store
from offload.tiers.tile import RegionState, Tile

TRAINED_ONLY = "trained_only"
"""Key of a checkpoint without parameters frozen at engine creation and unchanged since."""
CODED = "coded"
"""Key of the parameters in the format `frozen_weights`."""
BUFFER = "buffer"
"""The only plane of a buffer."""


def contents_of(engine: EngineState, changed: Collection[str] | None = None) -> dict[str, Entry]:
    """Return the entries for parameters and buffers. `changed`: the only frozen parameters to include."""
    contents: dict[str, Entry] = {}
    store = engine.memory.store
    for region, state in store.states.items():
        entries = region_entries(region, store.infos, store.sharding, is_late=state.is_stale)
        if changed is not None and not region.trainable:
            entries = {name: entry for name, entry in entries.items() if name in changed}
        contents |= entries
    for name, buffer in buffers_in_state_dict(engine.flow.model).items():
        contents[name] = Entry(tuple(buffer.shape), {BUFFER: buffer.dtype})
    return contents


def region_entries(
    region: Region, infos: Sequence[ParameterInfo], sharding: Sharding, *, is_late: bool
) -> dict[str, Entry]:
    """Return the entries for the parameters in a region. `is_late`: passes compute with stale weights."""
    left_out = unsaved_planes(is_late)
    kept = [plane for plane in region.states if plane.name not in left_out]
    planes = {plane.name: plane.dtype for plane in kept}
    blocks = {plane.name: plane.block for plane in kept if plane.block > 1}
    num_errors = 0
    if sharding.error_bytes(region):  # gradients are exchanged in codes
        num_errors = sharding.num_replicas
    errors = {f"{ERROR_PREFIX}{replica}": ERROR.dtype for replica in range(num_errors)}
    entries = {}
    for info in (infos[index] for index in region.parameters):
        if info.companion:
            continue
        shape = tuple(info.shape)
        counts = {each.name: each.numel(shape) for each in region.factors if each.numel(shape)}
        factors = {each.name: each.dtype for each in region.factors if each.name in counts}
        entries[info.name] = Entry(shape, planes | factors | errors, blocks, counts)
    return entries


def unsaved_planes(is_late: bool) -> set[str]:
    """Return the planes no checkpoint has.

    Quantized records are made again from the master weights. Stale weights are saved only for a late region.
    """
    if is_late:
        return {CODES}
    return {CODES, STALE}


def buffers_in_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers in the model's state dict, each under its first name."""
    with without_companions(model):
        state_dict = model.state_dict(keep_vars=True)  # leaves out non-persistent buffers
        buffers = {name: buffer for name, buffer in model.named_buffers() if state_dict.get(name) is buffer}
    return {name: buffer.detach() for name, buffer in buffers.items()}


def unsaved_reason(engine: EngineState) -> str:
    """Say which weights cannot be in a checkpoint; empty if all can."""
    own = engine.weights.own_infos
    in_files = ""
    if engine.memory.files is not None and any(not info.trainable for info in own):
        in_files = "offload.parameters is files, so frozen weights stay in the model's own files"
    return next(filter(None, (info.codec.unsaved_reason for info in own)), in_files)


def coded_dtypes(weights: Weights) -> dict[str, str]:
    """Return the compute dtype of each parameter in the format `frozen_weights`, by name."""
    is_coded = weights.frozen_weights != EXACT.name
    return {info.name: info.compute for info in weights.own_infos if is_coded and info.is_quantized}


def rule_titles(weights: Weights) -> str:
    """Return the update rule titles, comma-separated."""
    return ", ".join(dict.fromkeys(rule.title for rule in weights.rules))


class Places:
    """Where the contents of a checkpoint are in the memory of this rank."""

    def __init__(self, store: Store, contents: Contents) -> None:
        self._contents = contents
        self._infos = store.infos
        self._states = store.states
        self._sharding = store.sharding

    @property
    def regions(self) -> list[RegionState]:
        """The regions with a parameter in the checkpoint."""
        indices = {info.index for info in self._infos if info.name in self._contents}
        return [state for state in self._states.values() if not indices.isdisjoint(state.region.parameters)]

    def stretches(
        self, region: Region, tile: Tile, plane: str, shard: slice = slice(None)
    ) -> Iterator[tuple[slice, Span]]:
        """Yield (slice in a tile plane, checkpoint span) for each parameter, limited to `shard`.

        A rule with bf16-only weights has written no low half.
        """
        plane_type = region.plane(plane)
        shard_begin, shard_end = shard.start or 0, shard.stop or region.numel
        for position, piece in enumerate(region.pieces):
            span, name = self._states[region].span(position), self._infos[piece.parameter].name
            begin, end = max(span.start, tile.begin, shard_begin), min(span.stop, tile.end, shard_end)
            if begin < end and name in self._contents and plane in self._contents[name].planes:
                elements = plane_type.cut(slice(begin - tile.begin, end - tile.begin))
                first = (piece.begin + begin - span.start) // plane_type.block
                yield elements, (name, plane, first, elements.stop - elements.start)

    def factors(self, state: RegionState) -> Iterator[tuple[int, str, str, torch.Tensor]]:
        """Yield a region's factored states: (first element in the region, parameter name, plane, values)."""
        for position, index in enumerate(state.region.parameters):
            for plane, values in state.factors_of(position).items():
                yield state.span(position).start, self._infos[index].name, plane, values

    def errors(self, state: RegionState) -> Iterator[tuple[slice, Span]]:
        """Yield (slice in this rank's gradient quantization error, span in the checkpoint), to write or to read.

        A trainable parameter has one plane per replica, `error-REPLICA`. An error is the part a rank left out in a
        gradient sum. The next sum includes the error, no matter from which rank. With another replica count the planes
        are distributed round-robin, and each replica adds up the planes received. A run with exact gradients ignores
        them.
        """
        if state.error is None:
            return
        sharding = self._sharding
        shard = sharding.shard(state.region)
        for position, piece in enumerate(state.region.pieces):
            span, name = state.span(position), self._infos[piece.parameter].name
            begin, end = max(span.start, shard.start), min(span.stop, shard.stop)
            if begin < end and name in self._contents:
                elements = slice(begin - shard.start, end - shard.start)
                planes = (f"{ERROR_PREFIX}{replica}" for replica in count(sharding.replica, sharding.num_replicas))
                for plane in takewhile(self._contents[name].planes.__contains__, planes):
                    yield elements, (name, plane, piece.begin + begin - span.start, end - begin)
