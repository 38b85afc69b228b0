"""Checkpoints: save and load all engine states.

Data are addressed by parameter name and slice. A checkpoint can be read with another number of ranks, another ZeRO
stage or another placement.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from offload.amounts import Amount, Tally
from offload.checkpoint.manifest import CHUNK_BYTES, MANIFEST, Contents, Entry, name_of, without_moved
from offload.checkpoint.manifest import ERROR as ERROR_PREFIX
from offload.checkpoint.reader import CHANGED, Reader, Span
from offload.checkpoint.spread import broadcast_value, keepers
from offload.checkpoint.writer import Save, Writer
from offload.distributed.outcomes import share_failure
from offload.engine.loss.batch_agreement import RankBatch, agree_on_pass
from offload.engine.state import EngineState
from offload.errors import CheckpointError, ConfigError
from offload.files.extra_files import check_extra_files
from offload.files.sources import FORMAT, MODEL_FORMATS
from offload.files.temporary_files import files_written
from offload.lanes.ticket import Fence
from offload.layout.codecs import EXACT
from offload.layout.planes import CODES, ERROR, MASTER, STALE
from offload.layout.regions import Region
from offload.machine.limits import memory
from offload.tiers.lease import Lease
from offload.tiers.tile import RegionState, Tile, encode

_COPY = "copy for a checkpoint"
_TRAINED_ONLY = "trained_only"
_CODED = "coded"
_BUFFER = "buffer"  # a buffer's only plane


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
        trained_only = trained_only and not all(region.trainable for region in engine.store.states)
        if not trained_only and (why := _trained_only_reason(engine)):
            raise ConfigError(
                f"{why}, and a full checkpoint cannot hold them: save with trained_only=True, and load into an engine "
                "built from the same model."
            )
        comm, contents = engine.comm, _contents(engine, engine.changed if trained_only else None)
        moved = engine.moved_buffers.find(comm, _buffers(engine))
        for name, entry in moved.items():
            known = contents.get(name, Entry(entry.shape, {}))
            contents[name] = replace(known, planes={**known.planes, **entry.planes})
        self._comm, self._contents, self._save, self._tell = comm, contents, None, engine.tell
        self._random = [base64.b64encode(each.numpy().tobytes()).decode() for each in engine.device.random_state()]
        steps = ((state.region.parameters, state.steps) for state in engine.store.states.values())
        updates = {engine.infos[index].name: count for each in steps for index, count in zip(*each, strict=True)}
        own = {**decided, "step": engine.runner.step_number, "updates": updates}
        own |= {
            "built_in": _built_dtypes(engine),
            "conversions": MODEL_FORMATS[FORMAT].conversions(engine.model),
            "rule": _rule_titles(engine),
        }
        if engine.frozen_weights != EXACT.name:
            own["frozen_weights"] = engine.frozen_weights
            own[_CODED] = _coded(engine)
        if trained_only:
            own[_TRAINED_ONLY] = True
        if engine.changed:
            own[CHANGED] = sorted(engine.changed)
        with ExitStack() as opened:
            self._keepers = keepers(comm, folder.parent)
            with share_failure(comm, "metadata of the checkpoint"):
                # The caller may change these values in later steps: copy them now.
                try:
                    self._meta = json.loads(json.dumps({"engine": own, "meta": dict(meta)}))
                except (TypeError, ValueError) as error:
                    raise ConfigError(
                        f"meta of a checkpoint must be JSON (numbers, text, lists, dicts with text keys), but {error}: "
                        "save tensors as files, or convert them with tolist()."
                    ) from error
            if len(set(self._keepers)) > 1:  # one manifest for several disks, but `seconds` differ by rank
                files, self._meta = broadcast_value(comm, (files, self._meta), "metadata of the checkpoint")
            with share_failure(comm, "creation of the checkpoint"):
                if self._keepers[comm.rank] == comm.rank:
                    configuration = _configuration(engine)
                    ranks = {f"rank-{rank}.bin" for rank in range(comm.size)}
                    check_extra_files(files, "checkpoint", {*configuration, *ranks, MANIFEST})
                    self._save = opened.enter_context(Save(folder))
                    for name, data in {**configuration, **(files or {})}.items():
                        self._save.attach(name, data)
            paths = comm.gather_objects(self._save and self._save.path, "folders of the checkpoint")
            path: Any = paths[self._keepers[comm.rank]]
            with share_failure(comm, "writing of the checkpoint"):
                engine.host.make_room()  # frees the copy from an earlier save
                spare_bytes = _spare_bytes(engine, contents) if copies else 0
                self._writer = opened.enter_context(Writer(path, comm.rank, contents, spare_bytes=spare_bytes))
                if self._writer.spare_bytes:
                    opened.enter_context(engine.host.reserve_until(_COPY, self._writer.spare_bytes, self._is_on_disk))
                writer, num_bytes = self._writer, _share_bytes(engine, contents)
                self._tell("saving the states", lambda: Amount(writer.num_bytes, num_bytes))
                _write(engine, writer, _saved_regions(engine, contents))
                engine.moved_buffers.write(self._writer, comm.rank, moved)
                self._writer.end()
            self._opened = opened.pop_all()

    def _is_on_disk(self) -> bool:
        """Return whether the copy is on disk and the memory is free. Raises a write error."""
        assert self._writer is not None
        if self._writer.has_ended:
            self._writer.wait()
        return self._writer.has_ended

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


def _spare_bytes(engine: EngineState, contents: Contents) -> int:
    """Return the spare host memory, in bytes, for a copy of this rank's share.

    With a budget: the unused part, given back on demand. Without: half the free memory.
    """
    host = engine.host
    if host.budget_bytes is not None:
        free = host.budget_bytes - host.current_bytes
    else:
        free = memory().get("available_bytes", 0) // engine.comm.local_size // 2
    return max(0, min(_share_bytes(engine, contents) + CHUNK_BYTES, free))


def _share_bytes(engine: EngineState, contents: Contents) -> int:
    """Return this rank's share of a checkpoint, in bytes."""
    num_bytes = sum(
        entry.count(name) * dtype.itemsize for entry in contents.values() for name, dtype in entry.planes.items()
    )
    return num_bytes // engine.store.sharding.num_ranks


def spans_to_read(engine: EngineState, reader: Reader, *, anew: bool = False) -> Iterator[Span]:
    """Yield the spans this rank reads from a checkpoint, in `load_states` order."""
    for state in _saved_regions(engine, reader.contents):
        for tile in state.held_tiles:
            for plane in _names_to_read(engine, reader, state, tile, anew):
                for _, span in _stretches(engine, reader.contents, state.region, tile, plane):
                    yield span
        for _, name, plane, values in () if anew else _factors(engine, state):
            yield name, plane, 0, len(values)
        for _, span in () if anew else _error_spans(engine, reader.contents, state):
            yield span
    for name, buffer in _buffers(engine).items():
        yield name, _BUFFER, 0, buffer.numel()
    yield from engine.moved_buffers.spans(reader, engine.comm.rank, _has_same_ranks(engine, reader))


def _has_same_ranks(engine: EngineState, reader: Reader) -> bool:
    """Return whether an equal number of ranks wrote the checkpoint."""
    return len(reader.meta["engine"]["random"]) == engine.store.sharding.num_ranks


def load_states(engine: EngineState, reader: Reader, *, anew: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fill all states from a checkpoint accepted by `check_contents`. Return (engine decisions, meta). Each rank reads
    only its own part. Random generators and buffers that differ between ranks are restored if the rank count is the
    same. `anew`: restore the weights only; the optimizer state starts as in the first step.

    Raises CheckpointError for damaged data; the states then belong to no step.
    """
    own, kept = reader.meta["engine"], _saved_regions(engine, reader.contents)
    spans = partial(spans_to_read, engine, reader, anew=anew)
    tally = Tally(sum(numel * reader.contents[name].planes[plane].itemsize for name, plane, _, numel in spans()))
    engine.tell("reading the checkpoint", tally)
    reader.expect(spans(), tally.add)
    updates = {} if anew else own["updates"]
    for state in kept:
        for tile in state.held_tiles:
            names = _names_to_read(engine, reader, state, tile, anew)
            _fill(engine, reader, state.region, tile, names)
            tile.stale = Fence("stale weights") if STALE in names else None
        for _, name, plane, values in _factors(engine, state):
            piece = torch.zeros(values.shape, dtype=values.dtype)
            if not anew:
                reader.read(name, plane, 0, piece)
            values.copy_(piece)
        if state.error is not None:  # 0 without a saved error
            state.error.zero_()
            for elements, (name, plane, begin, numel) in () if anew else _error_spans(engine, reader.contents, state):
                error = torch.empty(numel, dtype=ERROR.dtype)
                reader.read(name, plane, begin, error)
                state.error[elements] += error.to(state.error.device)
        state.steps[:] = [updates.get(engine.infos[index].name, 0) for index in state.region.parameters]
    for name, buffer in _buffers(engine).items():
        value = torch.empty(buffer.shape, dtype=buffer.dtype)
        reader.read(name, _BUFFER, 0, value)
        buffer.copy_(value)
    engine.moved_buffers.load(reader, engine.comm.rank, _has_same_ranks(engine, reader))
    engine.runner.step_number = own["step"]
    if _has_same_ranks(engine, reader):
        states = [base64.b64decode(text) for text in own["random"][engine.comm.rank]]
        if len(states) == len(engine.device.random_state()):
            engine.device.set_random_state(
                tuple(torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in states)
            )
    engine.changed.clear()
    engine.changed.update(reader.changed)
    return own, reader.meta["meta"]


def check_contents(engine: EngineState, reader: Reader, *, may_reset: bool = False) -> bool:
    """Return whether the optimizer state must start anew: the checkpoint has another update rule or other state dtypes.

    Always False without `may_reset`. Raises ConfigError if the model, the trainable parameters or the storage format
    differ.
    """
    if "engine" not in reader.meta:
        raise CheckpointError(f"{reader.path} was not written by an engine.", reader.path)
    codecs = reader.meta["engine"].get("frozen_weights", EXACT.name), engine.frozen_weights
    if len(set(codecs)) > 1:
        raise ConfigError(
            f"{reader.path} was trained on frozen weights stored as {codecs[0]}, but offload.frozen_weights is "
            f"{codecs[1]}, which gives other weights. Set --offload.frozen_weights {codecs[0]}."
        )
    saved_coded = reader.meta["engine"].get(_CODED, {})
    frozen = {info.name for info in engine.infos if not info.trainable} - reader.contents.keys()
    if others := sorted(frozen & (_coded(engine).keys() ^ saved_coded.keys())):
        then, now = (codecs[0], EXACT.name) if others[0] in saved_coded else (EXACT.name, codecs[0])
        raise ConfigError(
            f"{reader.path} was trained on {others[0]} stored as {then}, and this version of offload stores it as "
            f"{now}, which gives other weights. Resume with the version that saved it, or start a new run; "
            "`offload export --merge` writes the model as it was trained."
        )
    trained_only, changed = reader.meta["engine"].get(_TRAINED_ONLY, False), reader.changed
    if not trained_only and (why := _trained_only_reason(engine)):
        raise ConfigError(
            f"{reader.path} contains frozen weights, but {why} and cannot be loaded from a checkpoint: load one saved "
            "with trained_only=True, or set --offload.parameters cpu and --offload.frozen_weights exact."
        )
    if trained_only and (lost := sorted(engine.changed - changed)):
        raise ConfigError(
            f"{reader.path} was saved with unchanged frozen weights, but engine.edit has changed {lost[0]} since: load "
            "the checkpoint into a new engine."
        )
    own = _contents(engine, changed if trained_only else None)
    # Stale weights exist only with delayed updates, and only a delayed update needs them.
    wanted, saved = (
        {name: entry.with_planes(STALE.__ne__) for name, entry in contents.items()}
        for contents in map(without_moved, (own, reader.contents))
    )
    saved_rule, own_rule = reader.meta["engine"].get("rule"), _rule_titles(engine)
    if saved_rule in (None, own_rule) and not may_reset:
        _check_frozen(reader, wanted, saved)
    trained = {info.name for info in engine.infos if info.trainable}
    for name in [*wanted, *saved]:
        # For trainable parameters the update rule decides about a low half of the master weights.
        kept = (*MASTER[: 1 if name in trained else 2], _BUFFER)
        saved_entry, model_entry = (
            each and each.with_planes(kept.__contains__) for each in (saved.get(name), wanted.get(name))
        )
        if saved_entry != model_entry:
            raise ConfigError(
                f"{reader.path} does not fit the model: for {name} the checkpoint has "
                f"{_describe_entry(saved.get(name))}, and the model has "
                f"{_describe_entry(wanted.get(name))}. Resume with the model, trainable parameters and "
                "--train.precision of the saved run."
            )
    different = next((name for name in wanted if wanted[name] != saved[name]), None)
    if different is None and saved_rule in (None, own_rule):
        return False
    if not may_reset:
        where = (
            ""
            if different is None
            else (
                f" ({different}: {_describe_entry(saved[different])} in the checkpoint, "
                f"{_describe_entry(wanted[different])} in the model)"
            )
        )
        raise ConfigError(
            f"{reader.path} contains optimizer states of {saved_rule or 'another update rule'}{where}, which "
            f"{own_rule} cannot use. Resume with the --optimizer.name, .states, .master and .groups of the saved run, "
            "or set --optimizer.reset (load_checkpoint(..., reset=True)), which restores weights, step number and data "
            f"position, and resets the states of {own_rule}."
        )
    return True


def _coded(engine: EngineState) -> dict[str, str]:
    """Return the compute dtype of each parameter in the format `frozen_weights`, by name."""
    is_coded = engine.frozen_weights != EXACT.name
    return {info.name: info.compute for info in engine.infos if is_coded and info.is_quantized}


def _check_frozen(reader: Reader, wanted: Contents, saved: Contents) -> None:
    """Raise ConfigError if the checkpoint has optimizer state for other trainable parameters than `wanted`."""
    trained_only = reader.meta["engine"].get(_TRAINED_ONLY, False)
    known = wanted if trained_only else wanted.keys() & saved.keys()
    trainable, saved_trainable = (
        {name for name in known if name in contents and not contents[name].planes.keys() <= {*MASTER, _BUFFER}}
        for contents in (wanted, saved)
    )
    if trainable and saved_trainable and trainable != saved_trainable:
        changes = [
            f"{len(names)} are {is_now} now but were {was_then} in the checkpoint, such as {min(names)}"
            for names, is_now, was_then in (
                (trainable - saved_trainable, "trainable", "frozen"),
                (saved_trainable - trainable, "frozen", "trainable"),
            )
            if names
        ]
        reset = (
            ", or set --optimizer.reset (load_checkpoint(..., reset=True)), which restores weights, step number and "
            "data position, and resets the optimizer states"
        )
        raise ConfigError(
            f"{reader.path} was saved with other frozen parameters: {'; '.join(changes)}. Freeze the parameters of the "
            f"saved run (requires_grad, --optimizer.freeze){'' if trained_only else reset}."
        )


def _trained_only_reason(engine: EngineState) -> str:
    """Say which weights cannot be in a checkpoint; empty if all can."""
    reasons = (info.codec.unsaved_reason for info in engine.infos)
    in_files = "offload.parameters is files, so frozen weights stay in the model's own files"
    return next(filter(None, reasons), in_files if engine.files is not None else "")


def _rule_titles(engine: EngineState) -> str:
    """Return the update rule titles, comma-separated."""
    return ", ".join(dict.fromkeys(rule.title for rule in engine.rules))


def _describe_entry(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    planes = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in entry.planes.items())
    return f"{list(entry.shape)} as {planes}"


def _saved_regions(engine: EngineState, contents: Contents) -> list[RegionState]:
    """Return the regions with a parameter in the checkpoint."""
    indices = {info.index for info in engine.infos if info.name in contents}
    return [state for state in engine.store.states.values() if not indices.isdisjoint(state.region.parameters)]


def _unsaved_planes(is_late: bool) -> set[str]:
    """Return the planes no checkpoint has.

    Quantized records are made again from the master weights. Stale weights are saved only for a late region.
    """
    return {CODES} if is_late else {CODES, STALE}


def _contents(engine: EngineState, changed: Collection[str] | None = None) -> dict[str, Entry]:
    """Return the entries for parameters and buffers. `changed`: the only frozen parameters to include."""
    contents = {}
    for state in engine.store.states.values():
        left_out = _unsaved_planes(state.is_stale)
        kept = [plane for plane in state.region.states if plane.name not in left_out]
        planes = {plane.name: plane.dtype for plane in kept}
        blocks = {plane.name: plane.block for plane in kept if plane.block > 1}
        for index in state.region.parameters:
            if changed is not None and not state.region.trainable and engine.infos[index].name not in changed:
                continue
            shape = tuple(engine.infos[index].shape)
            counts = {each.name: each.numel(shape) for each in state.region.factors if each.numel(shape)}
            factors = {each.name: each.dtype for each in state.region.factors if each.name in counts}
            num_errors = 0 if state.error is None else engine.store.sharding.num_replicas
            errors = {f"{ERROR_PREFIX}{replica}": ERROR.dtype for replica in range(num_errors)}
            contents[engine.infos[index].name] = Entry(shape, planes | factors | errors, blocks, counts)
    for name, buffer in _buffers(engine).items():
        contents[name] = Entry(tuple(buffer.shape), {_BUFFER: buffer.dtype})
    return contents


def _buffers(engine: EngineState) -> dict[str, torch.Tensor]:
    """Return the buffers in the model's state dict, each under its first name."""
    state_dict = engine.model.state_dict(keep_vars=True)  # leaves out non-persistent buffers
    buffers = {name: buffer for name, buffer in engine.model.named_buffers() if state_dict.get(name) is buffer}
    return {name: buffer.detach() for name, buffer in buffers.items()}


def _built_dtypes(engine: EngineState) -> dict[str, Any]:
    """Return the most common weight dtype ("main") and the parameters with another dtype ("others").

    Loading decides by these dtypes which weights stay in fp32.
    """
    dtypes = {info.name: name_of(dtype) for info, dtype in zip(engine.infos, engine.dtypes, strict=True)}
    counts: Counter[str] = Counter()
    for info in engine.infos:
        counts[dtypes[info.name]] += info.numel
    main = counts.most_common(1)[0][0]
    return {"main": main, "others": {name: dtype for name, dtype in dtypes.items() if dtype != main}}


def _configuration(engine: EngineState) -> dict[str, bytes]:
    """Return the files that describe the original model configuration, by name."""
    with engine.caches.with_original_flags():
        return files_written(partial(MODEL_FORMATS[FORMAT].write_configuration, engine.model))


def _write(engine: EngineState, writer: Writer, kept: Sequence[RegionState]) -> None:
    """Write this rank's pieces of the regions `kept`. Rank 0 also writes the buffers.

    Ranks with equal data split the work: each writes its own piece, and those factors that begin in this piece.
    """
    to_host = engine.device.to_host
    if engine.comm.rank == 0:
        for name, buffer in _buffers(engine).items():
            writer.write(name, _BUFFER, 0, to_host(buffer).contiguous())
    sharding = engine.store.sharding
    for state in kept:
        shard = sharding.piece(state.region)
        for begin, name, plane, values in _factors(engine, state):
            if shard.start <= begin < shard.stop:
                writer.write(name, plane, 0, to_host(values))
        for elements, (name, plane, begin, _) in _error_spans(engine, writer.contents, state):
            assert state.error is not None
            writer.write(name, plane, begin, to_host(state.error[elements]))
    with closing(_lease_tiles(engine, kept)) as lent:
        for region, tile, lease in lent:
            shard = sharding.piece(region)
            engine.lanes.wait(lease.reads)
            for plane, flat in lease.planes.items():
                for elements, (name, _, begin, _) in _stretches(engine, writer.contents, region, tile, plane, shard):
                    writer.write(name, plane, begin, to_host(flat[elements]))


def _lease_tiles(engine: EngineState, kept: Sequence[RegionState]) -> Generator[tuple[Region, Tile, Lease], None, None]:
    """Yield a lease for each tile this rank writes. The disk read for the next tile runs meanwhile."""
    shares = [(state.region, engine.store.sharding.piece(state.region), state.tiles) for state in kept]
    wanted = [
        (region, tile)
        for region, shard, tiles in shares
        for tile in tiles
        if tile.begin < shard.stop and shard.start < tile.end
    ]
    open_now: deque[tuple[Region, Tile, Lease]] = deque()
    try:
        for number in range(len(wanted) + 1):
            if number < len(wanted):
                region, tile = wanted[number]
                left_out = _unsaved_planes(tile.stale is not None)
                names = [name for name in tile.states if name not in left_out]
                open_now.append((region, tile, tile.lend(*names)))
            if number:
                yield open_now[0]
                open_now.popleft()[2].give_back()
    finally:
        for _, _, lease in open_now:
            lease.give_back()


def _names_to_read(engine: EngineState, reader: Reader, state: RegionState, tile: Tile, anew: bool) -> Collection[str]:
    """Return the tile planes to read from the checkpoint.

    With `anew`: master weights only. Stale weights: only if the checkpoint and the next update are both late. For
    quantized records the master weights are read, also on a rank that does not store them.
    """
    names_of_region = (engine.infos[index].name for index in state.region.parameters)
    first = next(reader.contents[name] for name in names_of_region if name in reader.contents)
    left_out = _unsaved_planes(STALE in first.planes and engine.updates.delays(reader.meta["engine"]["step"]))
    names = [name for name in tile.states if name not in left_out]
    if CODES in tile.states:
        names += [plane.name for plane in state.region.states if plane.name in MASTER and plane.name not in names]
    return [name for name in names if name in MASTER] if anew else names


def _fill(engine: EngineState, reader: Reader, region: Region, tile: Tile, read_names: Collection[str]) -> None:
    """Read the planes `read_names` from the checkpoint into a tile and clear the other planes.

    Disk planes are written while the tile is read. For a region only partly in the checkpoint the other values stay.
    """
    names = [name for name in tile.states if name != STALE or name in read_names]
    is_whole = all(engine.infos[index].name in reader.contents for index in region.parameters)
    lease = tile.land(*names) if is_whole else tile.lend(*names)
    with lease.opened(engine.lanes.wait, changes=True) as own:
        beside = {region.plane(name) for name in read_names if name not in names}  # another rank's, to quantize
        numel = tile.end - tile.begin
        planes = own | {p.name: torch.zeros(p.numel(numel), dtype=p.dtype, device=own[CODES].device) for p in beside}
        for plane in (*(name for name in names if name != CODES), *(name for name in read_names if name not in names)):
            flat, filled = planes[plane], 0
            stretches = _stretches(engine, reader.contents, region, tile, plane) if plane in read_names else ()
            for elements, (name, _, begin, _) in stretches:
                if is_whole:
                    flat[filled : elements.start] = 0  # padding, or values missing in the checkpoint
                target, filled = flat[elements], elements.stop
                piece = target if target.is_cpu else torch.empty(target.shape, dtype=target.dtype)
                reader.read(name, plane, begin, piece)
                if piece is not target:
                    target.copy_(piece)
            if is_whole:
                flat[filled:] = 0
        encode(region, planes, slice(0, tile.end - tile.begin))


def _stretches(
    engine: EngineState, contents: Contents, region: Region, tile: Tile, plane: str, shard: slice = slice(None)
) -> Iterator[tuple[slice, Span]]:
    """Yield (slice in a tile plane, checkpoint span) for each parameter, limited to `shard`.

    A rule with bf16-only weights has written no low half.
    """
    plane_type, shard_begin, shard_end = region.plane(plane), shard.start or 0, shard.stop or region.numel
    for position, piece in enumerate(region.pieces):
        span, name = engine.store.states[region].span(position), engine.infos[piece.parameter].name
        begin, end = max(span.start, tile.begin, shard_begin), min(span.stop, tile.end, shard_end)
        if begin < end and name in contents and plane in contents[name].planes:
            elements = plane_type.cut(slice(begin - tile.begin, end - tile.begin))
            yield (
                elements,
                (name, plane, (piece.begin + begin - span.start) // plane_type.block, elements.stop - elements.start),
            )


def _factors(engine: EngineState, state: RegionState) -> Iterator[tuple[int, str, str, torch.Tensor]]:
    """Yield a region's factored states: (first element in the region, parameter name, plane, values)."""
    for position, index in enumerate(state.region.parameters):
        for plane, values in state.factors_of(position).items():
            yield state.span(position).start, engine.infos[index].name, plane, values


def _error_spans(engine: EngineState, contents: Contents, state: RegionState) -> Iterator[tuple[slice, Span]]:
    """Yield (slice in this rank's gradient quantization error, span in the checkpoint), to write or to read.

    A trainable parameter has one plane per replica, `error-REPLICA`. An error is the part a rank left out in a gradient
    sum. The next sum includes the error, no matter from which rank. With another replica count the planes are
    distributed round-robin, and each replica adds up the planes received. A run with exact gradients ignores them.
    """
    if state.error is None:
        return
    sharding = engine.store.sharding
    shard = sharding.shard(state.region)
    for position, piece in enumerate(state.region.pieces):
        span, name = state.span(position), engine.infos[piece.parameter].name
        begin, end = max(span.start, shard.start), min(span.stop, shard.stop)
        if begin < end and name in contents:
            planes = (f"{ERROR_PREFIX}{replica}" for replica in count(sharding.replica, sharding.num_replicas))
            for plane in takewhile(contents[name].planes.__contains__, planes):
                elements = slice(begin - shard.start, end - shard.start)
                yield elements, (name, plane, piece.begin + begin - span.start, end - begin)
