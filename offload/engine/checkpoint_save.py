"""Save all engine states, while training continues."""

from __future__ import annotations

import base64
import json
from collections import Counter, deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from offload.amounts import Amount
from offload.checkpoint.manifest import MANIFEST, Entry, name_of
from offload.checkpoint.reader import CHANGED
from offload.checkpoint.spread import broadcast_value, keepers
from offload.checkpoint.writer import Save, Writer, copy_bytes, share_bytes
from offload.distributed.outcomes import share_failure
from offload.engine.checkpoint_contents import (
    BUFFER,
    CODED,
    TRAINED_ONLY,
    Places,
    buffers_in_state_dict,
    coded_dtypes,
    contents_of,
    rule_titles,
    unsaved_planes,
    unsaved_reason,
)
from offload.engine.companions import without_companions
from offload.engine.flow import Flow
from offload.engine.loss.batch_agreement import RankBatch, agree_on_pass
from offload.engine.state import EngineState
from offload.engine.weights import Weights
from offload.errors import ConfigError
from offload.files.extra_files import check_extra_files
from offload.files.sources import FORMAT, MODEL_FORMATS
from offload.files.temporary_files import files_written
from offload.layout.codecs import EXACT
from offload.layout.regions import Region
from offload.machine.limits import memory
from offload.tiers.lease import Lease
from offload.tiers.store import Store
from offload.tiers.tile import RegionState, Tile

_COPY = "copy for a checkpoint"
"""Name of the spare host memory in the ledger."""


class PendingCheckpoint:
    """A checkpoint in progress: states are copied, and go to the disk while training continues.

    The previous folder stays until `finish`. Leaving the `with` block before `finish` removes all written files.
    """

    def __init__(
        self,
        engine: EngineState,
        folder: Path,
        decided: Mapping[str, Any],
        meta: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
        *,
        copies: bool = False,
        trained_only: bool = False,
    ) -> None:
        """Submit states, random generators and buffers for `folder`. Collective; no update may be pending. `decided`
        (final engine decisions), `meta` (both JSON) and `files` are saved too. `copies`: copy into spare host memory as
        far as possible; data beyond wait for the disk. `trained_only`: leave out parameters frozen at engine creation
        and unchanged since.

        Raises, on all ranks, DiskError, ConfigError, or any error from `share_outcome`.
        """
        trained_only = trained_only and not all(region.trainable for region in engine.memory.store.states)
        if not trained_only and (why := unsaved_reason(engine)):
            raise ConfigError(
                f"{why}, and a full checkpoint cannot hold them: save with trained_only=True, and load into an engine "
                "built from the same model."
            )
        self._comm = engine.memory.comm
        self._tell = engine.flow.tell
        self._save: Save | None = None  # on the ranks that keep a folder
        contents = contents_of(engine, engine.weights.changed if trained_only else None)
        moved = engine.flow.moved_buffers.find(self._comm, buffers_in_state_dict(engine.flow.model))
        self._contents = _with_planes(contents, moved)
        random = engine.memory.device.random_state()
        self._random = [base64.b64encode(each.numpy().tobytes()).decode() for each in random]
        with without_companions(engine.flow.model):
            own = _describe_engine(engine, decided, trained_only)
        with ExitStack() as opened:
            self._keepers = keepers(self._comm, folder.parent)
            self._meta = self._copy_meta(own, meta)
            if len(set(self._keepers)) > 1:  # one manifest for several disks, but `seconds` differ by rank
                shared = (files, self._meta)
                files, self._meta = broadcast_value(self._comm, shared, "metadata of the checkpoint")
            path = self._create(opened, engine, folder, files or {})
            self._writer = self._write(opened, engine, path, moved, copies)
            self._opened = opened.pop_all()

    def _copy_meta(self, own: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the values now, because the caller may change them in later steps. Collective."""
        with share_failure(self._comm, "metadata of the checkpoint"):
            try:
                return dict(json.loads(json.dumps({"engine": own, "meta": dict(meta)})))
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"meta of a checkpoint must be JSON (numbers, text, lists, dicts with text keys), but {error}: "
                    "save tensors as files, or convert them with tolist()."
                ) from error

    def _create(self, opened: ExitStack, engine: EngineState, folder: Path, files: Mapping[str, bytes]) -> Path:
        """Create a folder on each disk. Return the folder for the states of this rank. Collective."""
        comm = self._comm
        with share_failure(comm, "creation of the checkpoint"):
            if self._keepers[comm.rank] == comm.rank:
                configuration = _configuration(engine.flow)
                ranks = {f"rank-{rank}.bin" for rank in range(comm.size)}
                check_extra_files(files, "checkpoint", {*configuration, *ranks, MANIFEST})
                self._save = opened.enter_context(Save(folder))
                for name, data in {**configuration, **files}.items():
                    self._save.attach(name, data)
        paths: list[Any] = comm.gather_objects(self._save and self._save.path, "folders of the checkpoint")
        path: Path = paths[self._keepers[comm.rank]]
        return path

    def _write(
        self, opened: ExitStack, engine: EngineState, path: Path, moved: Mapping[str, Entry], copies: bool
    ) -> Writer:
        """Submit the states of this rank. Return the writer, which has them in spare memory or on disk. Collective."""
        comm = self._comm
        with share_failure(comm, "writing of the checkpoint"):
            host = engine.memory.host
            host.make_room()  # frees the copy from an earlier save
            num_bytes = share_bytes(self._contents, engine.memory.store.sharding.num_ranks)
            spare_bytes = 0
            if copies:
                free_bytes = memory()["available_bytes"] // comm.local_size
                spare_bytes = copy_bytes(num_bytes, host.budget_bytes, host.current_bytes, free_bytes)
            writer = opened.enter_context(Writer(path, comm.rank, self._contents, spare_bytes=spare_bytes))
            if writer.spare_bytes:
                opened.enter_context(host.reserve_until(_COPY, writer.spare_bytes, partial(_is_on_disk, writer)))
            self._tell("saving the states", lambda: Amount(writer.num_bytes, num_bytes))
            _write_states(engine, writer)
            engine.flow.moved_buffers.write(writer, comm.rank, moved)
            writer.end()
        return writer

    @property
    def is_done(self) -> bool:
        """True once `finish` need not wait for this rank's disk."""
        return self._writer.is_done

    def finish(self) -> None:
        """Wait until all data are on disk, then publish the checkpoint. Collective. Raises like `__init__`."""
        comm = self._comm
        with self._opened:
            agree_on_pass(comm, RankBatch("finish of a checkpoint"))
            with share_failure(comm, "writing of the checkpoint"):
                writer = self._writer
                self._tell("writing the states to disk", lambda: Amount(writer.num_on_disk, writer.num_bytes))
                written = writer.finish()
            parts_by_rank = comm.gather_objects((written, self._random), "parts of the checkpoint")
            with share_failure(comm, "publication of the checkpoint"):
                if self._save is not None:
                    self._meta["engine"]["random"] = [random for _, random in parts_by_rank]
                    parts = [part for part, _ in parts_by_rank]
                    others = (part for part, keeper in zip(parts, self._keepers, strict=True) if keeper != comm.rank)
                    elsewhere = {name for part in others for name in part["files"]}
                    self._save.commit(self._contents, parts, self._meta, elsewhere)

    def abort(self) -> None:
        """Remove all written files. No effect after `finish`. Not collective."""
        self._opened.close()

    def __enter__(self) -> PendingCheckpoint:
        return self

    def __exit__(self, _type: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.abort()


# -- metadata ----------------------------------------------------------------------------------------------------------


def _with_planes(contents: Mapping[str, Entry], added: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries with the planes of `added`."""
    joined = dict(contents)
    for name, entry in added.items():
        known = contents.get(name, Entry(entry.shape, {}))
        joined[name] = replace(known, planes={**known.planes, **entry.planes})
    return joined


def _describe_engine(engine: EngineState, decided: Mapping[str, Any], trained_only: bool) -> dict[str, Any]:
    """Return the engine's part of the metadata, as JSON."""
    infos = engine.weights.infos
    steps = ((state.region.parameters, state.steps) for state in engine.memory.store.states.values())
    own = {
        **decided,
        "step": engine.flow.runner.step_number,
        "updates": {infos[index].name: count for each in steps for index, count in zip(*each, strict=True)},
        "built_in": _built_dtypes(engine.weights),
        "conversions": MODEL_FORMATS[FORMAT].conversions(engine.flow.model),
        "rule": rule_titles(engine.weights),
    }
    if engine.weights.frozen_weights != EXACT.name:
        own["frozen_weights"] = engine.weights.frozen_weights
        own[CODED] = coded_dtypes(engine.weights)
    if trained_only:
        own[TRAINED_ONLY] = True
    if engine.weights.changed:
        own[CHANGED] = sorted(engine.weights.changed)
    return own


def _built_dtypes(weights: Weights) -> dict[str, Any]:
    """Return the most common weight dtype ("main") and the parameters with another dtype ("others").

    Loading decides by these dtypes which weights stay in fp32.
    """
    dtypes = {info.name: name_of(weights.dtypes[info.index]) for info in weights.own_infos}
    counts: Counter[str] = Counter()
    for info in weights.own_infos:
        counts[dtypes[info.name]] += info.numel
    main = counts.most_common(1)[0][0]
    return {"main": main, "others": {name: dtype for name, dtype in dtypes.items() if dtype != main}}


def _configuration(flow: Flow) -> dict[str, bytes]:
    """Return the files that describe the original model configuration, by name."""
    with flow.caches.with_original_flags():
        return files_written(partial(MODEL_FORMATS[FORMAT].write_configuration, flow.model))


# -- states ------------------------------------------------------------------------------------------------------------


def _is_on_disk(writer: Writer) -> bool:
    """Return whether the copy is on disk and the memory is free. Raises a write error."""
    if writer.has_ended:
        writer.wait()
    return writer.has_ended


def _write_states(engine: EngineState, writer: Writer) -> None:
    """Write this rank's pieces of the regions in the checkpoint. Rank 0 also writes the buffers.

    Ranks with equal data split the work: each writes its own piece, and those factors that begin in this piece.
    """
    store, to_host = engine.memory.store, engine.memory.device.to_host
    if store.comm.rank == 0:
        for name, buffer in buffers_in_state_dict(engine.flow.model).items():
            writer.write(name, BUFFER, 0, to_host(buffer).contiguous())
    sharding = store.sharding
    places = Places(store, writer.contents)
    for state in places.regions:
        shard = sharding.piece(state.region)
        for begin, name, plane, values in places.factors(state):
            if shard.start <= begin < shard.stop:
                writer.write(name, plane, 0, to_host(values))
        for elements, (name, plane, begin, _) in places.errors(state):
            assert state.error is not None
            writer.write(name, plane, begin, to_host(state.error[elements]))
    with closing(_lease_tiles(store, places.regions)) as lent:
        for region, tile, lease in lent:
            store.lanes.wait(lease.reads)
            for plane, flat in lease.planes.items():
                for elements, (name, _, begin, _) in places.stretches(region, tile, plane, sharding.piece(region)):
                    writer.write(name, plane, begin, to_host(flat[elements]))


def _lease_tiles(store: Store, states: Sequence[RegionState]) -> Generator[tuple[Region, Tile, Lease], None, None]:
    """Yield a lease for each tile this rank writes. The disk read for the next tile runs meanwhile."""
    wanted: list[tuple[Region, Tile]] = []
    for state in states:
        shard = store.sharding.piece(state.region)
        own = (tile for tile in state.tiles if tile.begin < shard.stop and shard.start < tile.end)
        wanted += [(state.region, tile) for tile in own]
    open_now: deque[tuple[Region, Tile, Lease]] = deque()
    try:
        for number in range(len(wanted) + 1):
            if number < len(wanted):
                region, tile = wanted[number]
                left_out = unsaved_planes(tile.stale is not None)
                names = [name for name in tile.states if name not in left_out]
                open_now.append((region, tile, tile.lend(*names)))
            if number:
                yield open_now[0]
                open_now.popleft()[2].give_back()
    finally:
        for _, _, lease in open_now:
            lease.give_back()
