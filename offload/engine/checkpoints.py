"""All states into a checkpoint and back: by parameter name and slice, so that another number of ranks, another stage or
another placement can read what this one wrote.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch

from offload.checkpoint.manifest import CHUNK_BYTES, Contents, Entry, name_of, without_moved
from offload.checkpoint.publish import Save
from offload.checkpoint.reader import CHANGED, Reader, Span
from offload.checkpoint.spread import keepers, of_rank_0
from offload.checkpoint.writer import Writer
from offload.distributed.outcome import as_one
from offload.engine.kept_errors import error_planes, error_spans, fill_error
from offload.engine.loss.batch_agreement import agree_on_pass
from offload.engine.state import EngineState
from offload.errors import CheckpointError, ConfigError
from offload.hf.names import CannotStream, conversions_used
from offload.hf.write import write_configuration
from offload.lanes.ticket import Ticket
from offload.layout.codecs import EXACT
from offload.layout.planes import CODES, MASTER, STALE
from offload.layout.quantized import Quantized
from offload.layout.regions import Region
from offload.machine.environment import memory
from offload.tiers.lease import Lease
from offload.tiers.tile import RegionState, Tile, encode

_COPY = "copy for a checkpoint"
_TRAINED_ONLY = "trained_only"
_BUFFER = "buffer"  # the only plane of a buffer


class Saving:
    """A checkpoint on its way: what is to be in it is copied, and goes to the disk while training goes on.

    What was in the folder before stays until `finish`. Leaving the `with` block before that removes what was written.
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
        """Hand in all states, and what a step depends on beside its batch, for `folder`; `decided` (what the engine
        has, once and for all) and `meta` (both for JSON) are kept with them, and so are `files`. Collective; no update
        may be on its way. `copies`: into memory that is left over, as far as it reaches; else the disk is waited for.
        `trained_only`: without the parameters that were frozen when the engine was made, and not changed since.

        Raises, on all ranks, DiskError, ConfigError, or what else `outcome` raises.
        """
        trained_only = trained_only and not all(state.region.trainable for state in engine.store.states)
        codec = _codec(engine)
        if not trained_only and (why := _why_trained_only(engine)):
            raise ConfigError(
                f"{why} is in no checkpoint: save with trained_only=True, and make the engine that loads it of the "
                "same model."
            )
        comm, contents = engine.comm, _contents(engine, engine.changed if trained_only else None)
        moved = engine.moved.find(comm, _buffers(engine))
        for name, entry in moved.items():
            known = contents.get(name, Entry(entry.shape, {}))
            contents[name] = replace(known, planes={**known.planes, **entry.planes})
        self._comm, self._contents, self._save = comm, contents, None
        self._random = [base64.b64encode(each.numpy().tobytes()).decode() for each in engine.device.random_state()]
        steps = ((state.region.parameters, state.steps) for state in engine.store.states)
        updates = {engine.infos[index].name: count for each in steps for index, count in zip(*each, strict=True)}
        own = {**decided, "step": engine.runner.step_number, "updates": updates}
        own |= {"built_in": _built_in(engine), "conversions": _conversions(engine), "rule": _rule(engine)}
        if codec != EXACT.name:
            own["frozen_weights"] = codec
            own["coded"] = {info.name: info.compute for info in engine.infos if info.codec is not EXACT}
        if trained_only:
            own[_TRAINED_ONLY] = True
        if engine.changed:
            own[CHANGED] = sorted(engine.changed)
        with ExitStack() as opened:
            self._keepers = keepers(comm, folder.parent)
            with as_one(comm, "what a checkpoint says"):
                # What of it is somebody's, the steps that follow may change.
                self._meta = json.loads(json.dumps({"engine": own, "meta": dict(meta)}))
            if len(set(self._keepers)) > 1:  # whose manifests are one, although each rank has seconds of its own
                files, self._meta = of_rank_0(comm, (files, self._meta), "what a checkpoint says")
            with as_one(comm, "making of the checkpoint"):
                if self._keepers[comm.rank] == comm.rank:
                    self._save = opened.enter_context(Save(folder))
                    for name, data in {**_configuration(engine), **(files or {})}.items():
                        self._save.attach(name, data)
            paths = comm.gather_objects(self._save and self._save.path, "folders of the checkpoint")
            path: Any = paths[self._keepers[comm.rank]]
            with as_one(comm, "writing of the checkpoint"):
                engine.host.make_room()  # of a copy that another save has still
                spare_bytes = _spare_bytes(engine, contents) if copies else 0
                self._writer = opened.enter_context(Writer(path, comm.rank, contents, spare_bytes=spare_bytes))
                if self._writer.spare_bytes:
                    opened.enter_context(engine.host.lent(_COPY, self._writer.spare_bytes, self._has_let_go))
                _write(engine, self._writer, _kept(engine, contents))
                for name, plane, value in engine.moved.own(comm.rank, moved):
                    self._writer.write(name, plane, 0, value)
                self._writer.end()
            self._opened = opened.pop_all()

    def _has_let_go(self) -> bool:
        """Return whether the copy is written, so that its memory is anybody's. Raises what failed."""
        assert self._writer is not None
        if self._writer.has_ended:
            self._writer.wait()
        return self._writer.has_ended

    @property
    def is_done(self) -> bool:
        """True once `finish` need not wait for this rank's disk."""
        return self._writer.is_done

    def finish(self) -> None:
        """Wait until all is on the disk, and publish it. Collective. Raises as the making of it."""
        comm = self._comm
        with self._opened:
            agree_on_pass(comm, "finish of a checkpoint")
            with as_one(comm, "writing of the checkpoint"):
                written = self._writer.finish()
            told = comm.gather_objects((written, self._random), "parts of the checkpoint")
            with as_one(comm, "end of the checkpoint"):
                if self._save is not None:
                    self._meta["engine"]["random"] = [random for _, random in told]
                    parts = [its for its, _ in told]
                    others = (part for part, keeper in zip(parts, self._keepers, strict=True) if keeper != comm.rank)
                    elsewhere = {name for part in others for name in part["files"]}
                    self._save.commit(self._contents, parts, self._meta, elsewhere)

    def abort(self) -> None:
        """Remove what was written; nothing to do after `finish`. Not collective."""
        self._opened.close()

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.abort()


def _spare_bytes(engine: EngineState, contents: Contents) -> int:
    """Return how much host memory this rank may take for a copy of its share: what is left of its budget, which it
    gives back as soon as somebody else needs it, or without one half of what is free.
    """
    share = sum(
        entry.count(name) * dtype.itemsize for entry in contents.values() for name, dtype in entry.planes.items()
    )
    host = engine.host
    if host.budget_bytes is not None:
        free = host.budget_bytes - host.current_bytes
    else:
        free = memory().get("available_bytes", 0) // engine.comm.local_size // 2
    return max(0, min(share // engine.comm.size + CHUNK_BYTES, free))


def spans_read(engine: EngineState, reader: Reader, *, anew: bool = False) -> Iterator[Span]:
    """Yield what this rank reads of a checkpoint, in the order of `load_states`."""
    for state in _kept(engine, reader.contents):
        for tile in state.held:
            for plane in _read_of(engine, reader, state, tile, anew):
                for _, span in _stretches(engine, reader.contents, state.region, tile, plane):
                    yield span
        for _, name, plane, values in () if anew else _factors(engine, state):
            yield name, plane, 0, len(values)
        for _, span in () if anew else error_spans(engine, reader.contents, state):
            yield span
    for name, buffer in _buffers(engine).items():
        yield name, _BUFFER, 0, buffer.numel()
    yield from engine.moved.spans(reader, engine.comm.rank, _is_same_size(engine, reader))


def _is_same_size(engine: EngineState, reader: Reader) -> bool:
    """Tell whether as many ranks wrote a checkpoint as read it."""
    return len(reader.meta["engine"]["random"]) == engine.comm.size


def load_states(engine: EngineState, reader: Reader, *, anew: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fill all states from a checkpoint that `check_contents` has accepted; return what was decided, and its meta. Each
    rank reads what it holds. Random generators, and buffers that ranks have moved apart, are as they were where the
    number of ranks is the same. `anew`: but for the weights, the states of the update rule are as at the first step.

    Raises CheckpointError where the data are damaged: the states belong to no step then.
    """
    own, kept = reader.meta["engine"], _kept(engine, reader.contents)
    there = {tile: _read_of(engine, reader, state, tile, anew) for state in kept for tile in state.held}
    reader.expect(spans_read(engine, reader, anew=anew))
    updates = {} if anew else own["updates"]
    for state in kept:
        for tile in state.held:
            _fill(engine, reader, state.region, tile, there[tile])
            tile.keep_stale(STALE in there[tile])
        for _, name, plane, values in _factors(engine, state):
            piece = torch.zeros(values.shape, dtype=values.dtype)
            if not anew:
                reader.read(name, plane, 0, piece)
            values.copy_(piece)
        fill_error(engine, reader, state, anew)
        state.steps[:] = [updates.get(engine.infos[index].name, 0) for index in state.region.parameters]
    for name, buffer in _buffers(engine).items():
        value = torch.empty(buffer.shape, dtype=buffer.dtype)
        reader.read(name, _BUFFER, 0, value)
        buffer.copy_(value)
    engine.moved.load(reader, engine.comm.rank, _is_same_size(engine, reader))
    engine.runner.go_on_from(own["step"])
    if _is_same_size(engine, reader):
        states = [base64.b64decode(text) for text in own["random"][engine.comm.rank]]
        if len(states) == len(engine.device.random_state()):
            engine.device.set_random_state(
                tuple(torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in states)
            )
    engine.changed.clear()
    engine.changed.update(reader.changed)
    return own, reader.meta["meta"]


def check_contents(engine: EngineState, reader: Reader, *, may_reset: bool = False) -> bool:
    """Return whether the states of the update rule have to begin anew, as they are another rule's, or of another width;
    never without `may_reset`. Raises ConfigError where a checkpoint is not one of this model, trained and stored alike.
    """
    if "engine" not in reader.meta:
        raise CheckpointError(f"{reader.path} was not written by an engine.", reader.path)
    codecs = reader.meta["engine"].get("frozen_weights", EXACT.name), _codec(engine)
    if len(set(codecs)) > 1:
        raise ConfigError(
            f"{reader.path} was made over frozen weights in {codecs[0]}, and offload.frozen_weights is {codecs[1]}: "
            f"training would go on over others. Set --offload.frozen_weights {codecs[0]}."
        )
    trained_only, changed = reader.meta["engine"].get(_TRAINED_ONLY, False), reader.changed
    if not trained_only and (why := _why_trained_only(engine)):
        raise ConfigError(
            f"{reader.path} has frozen weights, and {why} is taken from no checkpoint: load one that was saved with "
            "trained_only=True, or set --offload.parameters cpu and --offload.frozen_weights exact."
        )
    if trained_only and (lost := sorted(engine.changed - changed)):
        raise ConfigError(
            f"{reader.path} was made over frozen weights as they were given, and {lost[0]} has been changed since by "
            "engine.edit: load the checkpoint into an engine that is made anew."
        )
    own = _contents(engine, changed if trained_only else None)
    # Who makes updates in time has no weights from before one, and has no use for them.
    wanted, found = (
        {name: entry.having(STALE.__ne__) for name, entry in contents.items()}
        for contents in map(without_moved, (own, reader.contents))
    )
    was, now = reader.meta["engine"].get("rule"), _rule(engine)
    if was in (None, now) and not may_reset:
        _check_frozen(reader, wanted, found)
    trained = {info.name for info in engine.infos if info.trainable}
    for name in [*wanted, *found]:
        # Whether what is trained has a low half, its rule says.
        kept = (*MASTER[: 1 if name in trained else 2], _BUFFER)
        its, model = (each and each.having(kept.__contains__) for each in (found.get(name), wanted.get(name)))
        if its != model:
            raise ConfigError(
                f"{reader.path} does not fit the model: it has {_shown(found.get(name))} for {name}, and the model "
                f"{_shown(wanted.get(name))}. Resume with the model, the trained parameters and the --train.precision "
                "that it was made with."
            )
    different = next((name for name in wanted if wanted[name] != found[name]), None)
    if different is None and was in (None, now):
        return False
    if not may_reset:
        where = (
            ""
            if different is None
            else (f", with {_shown(found[different])} for {different}, and the model has {_shown(wanted[different])}")
        )
        raise ConfigError(
            f"{reader.path} holds the states of {was or 'another update rule'}{where}: {now} cannot go on with them. "
            "Resume with the --optimizer.name, .states, .master and .groups that it was made with, or set "
            "--optimizer.reset (load_checkpoint(..., reset=True)): that takes the weights, the number of the step and "
            f"the position in the data, and begins the states of {now} anew."
        )
    return True


def _check_frozen(reader: Reader, wanted: Contents, found: Contents) -> None:
    """Raise ConfigError where a checkpoint has the states of other trained parameters than the model's, `wanted`."""
    trained_only = reader.meta["engine"].get(_TRAINED_ONLY, False)
    known = wanted if trained_only else wanted.keys() & found.keys()
    now, was = (
        {name for name in known if name in contents and not contents[name].planes.keys() <= {*MASTER, _BUFFER}}
        for contents in (wanted, found)
    )
    if now and was and now != was:
        changes = [
            f"{len(names)} that are {is_now} now and were {was_then} there, such as {min(names)}"
            for names, is_now, was_then in ((now - was, "trained", "frozen"), (was - now, "frozen", "trained"))
            if names
        ]
        reset = (
            ", or set --optimizer.reset (load_checkpoint(..., reset=True)): that takes the weights, the number of the "
            "step and the position in the data, and begins the states anew"
        )
        raise ConfigError(
            f"{reader.path} was made with other frozen parameters: {'; '.join(changes)}. Freeze the same parameters as "
            f"then (requires_grad, --optimizer.freeze){'' if trained_only else reset}."
        )


def _codec(engine: EngineState) -> str:
    """Return in which of the codecs of the settings frozen weights rest, that need not."""
    names = (info.codec.name for info in engine.infos if info.codec not in (EXACT, *_in_few_bits(engine)))
    return next(names, EXACT.name)


def _in_few_bits(engine: EngineState) -> list[Quantized]:
    """Return the codecs of what the model's files have in few bits, and for which there is nothing to choose."""
    return [info.codec for info in engine.infos if isinstance(info.codec, Quantized)]


def _why_trained_only(engine: EngineState) -> str:
    """Say which weights cannot be in a checkpoint; empty where all can."""
    if (codec := _codec(engine)) != EXACT.name:
        return f"offload.frozen_weights is {codec}, and what rests in codes"
    if found := _in_few_bits(engine):
        return f"the model's files have frozen weights in {found[0].name}, and what rests in their codes"
    return "offload.parameters is files, and what rests in the model's own files" if engine.files is not None else ""


def _rule(engine: EngineState) -> str:
    """Return what the update rule, and those of its groups, are called."""
    return ", ".join(dict.fromkeys(rule.title for rule in engine.rules))


def _shown(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    planes = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in entry.planes.items())
    return f"{list(entry.shape)} as {planes}"


def _kept(engine: EngineState, contents: Contents) -> list[RegionState]:
    """Return the regions that a checkpoint has."""
    return [state for state in engine.store.states if any(name in contents for name in _names(engine, state))]


def _names(engine: EngineState, state: RegionState) -> list[str]:
    """Return the names of a region's parameters."""
    return [engine.infos[index].name for index in state.region.parameters]


def _left_out(is_late: bool) -> set[str]:
    """Return the planes that no checkpoint has: codes, which are made of the master weights, and weights from before an
    update, unless that is late.
    """
    return {CODES} if is_late else {CODES, STALE}


def _contents(engine: EngineState, changed: Collection[str] | None = None) -> dict[str, Entry]:
    """Return what a checkpoint has of each parameter and buffer: of all, or of frozen ones the `changed` alone."""
    contents = {}
    for state in engine.store.states:
        left_out = _left_out(state.is_late)
        kept = [plane for plane in state.region.states if plane.name not in left_out]
        planes = {plane.name: plane.dtype for plane in kept}
        blocks = {plane.name: plane.block for plane in kept if plane.block > 1}
        for index in state.region.parameters:
            if changed is not None and not state.region.trainable and engine.infos[index].name not in changed:
                continue
            shape = tuple(engine.infos[index].shape)
            counts = {each.name: each.numel(shape) for each in state.region.factors if each.numel(shape)}
            factors = {each.name: each.dtype for each in state.region.factors if each.name in counts}
            all_planes = planes | factors | error_planes(engine, state)
            contents[engine.infos[index].name] = Entry(shape, all_planes, blocks, counts)
    for name, buffer in _buffers(engine).items():
        contents[name] = Entry(tuple(buffer.shape), {_BUFFER: buffer.dtype})
    return contents


def _buffers(engine: EngineState) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to a model's state, each by the first of its names."""
    kept = engine.model.state_dict(keep_vars=True)  # which leaves out those that are not persistent
    found = {name: buffer for name, buffer in engine.model.named_buffers() if kept.get(name) is buffer}
    return {name: buffer.detach() for name, buffer in found.items()}


def _built_in(engine: EngineState) -> dict[str, Any]:
    """Return the dtype in which most of the model was built, and those of the other parameters: by them it is decided
    what is kept in fp32.
    """
    dtypes = {info.name: name_of(dtype) for info, dtype in zip(engine.infos, engine.dtypes, strict=True)}
    counts: Counter[str] = Counter()
    for info in engine.infos:
        counts[dtypes[info.name]] += info.numel
    main = counts.most_common(1)[0][0]
    return {"main": main, "others": {name: dtype for name, dtype in dtypes.items() if dtype != main}}


def _conversions(engine: EngineState) -> dict[str, Any]:
    """Return what an export needs beside the configuration."""
    try:
        return conversions_used(engine.model)
    except CannotStream:  # an export without it goes by the family's own rules; no reason to lose a checkpoint
        return {}


def _configuration(engine: EngineState) -> dict[str, bytes]:
    """Return the files that say how to build the model again, by name, as it was given."""
    with TemporaryDirectory() as folder, engine.caches.as_given():
        write_configuration(engine.model, Path(folder))
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def _write(engine: EngineState, writer: Writer, kept: Sequence[RegionState]) -> None:
    """Write this rank's pieces of what is `kept`; where several have the same, each writes its share too: of what
    there is once for a parameter, that which begins there. Rank 0 has the buffers.
    """
    if engine.comm.rank == 0:
        for name, buffer in _buffers(engine).items():
            writer.write(name, _BUFFER, 0, buffer.cpu().contiguous())
    sharding = engine.store.sharding
    for state in kept:
        shard = sharding.piece(state.region)
        for begin, name, plane, values in _factors(engine, state):
            if shard.start <= begin < shard.stop:
                writer.write(name, plane, 0, values.cpu())
        for its, (name, plane, begin, _) in error_spans(engine, writer.contents, state):
            assert state.error is not None
            writer.write(name, plane, begin, state.error[its].cpu())
    with closing(_lent(engine, kept)) as lent:
        for region, tile, lease in lent:
            shard = sharding.piece(region)
            engine.lanes.wait(lease.reads)
            for plane, flat in lease.planes.items():
                for its, (name, _, begin, _) in _stretches(engine, writer.contents, region, tile, plane, shard):
                    writer.write(name, plane, begin, flat[its].cpu())


def _lent(engine: EngineState, kept: Sequence[RegionState]) -> Generator[tuple[Region, Tile, Lease], None, None]:
    """Yield the parts that this rank writes, lent; what of the next one is on disk is on its way meanwhile."""
    shares = [(state.region, engine.store.sharding.piece(state.region), state.tiles) for state in kept]
    wanted = [
        (region, tile)
        for region, shard, its in shares
        for tile in its
        if tile.begin < shard.stop and shard.start < tile.end
    ]
    open_now: deque[tuple[Region, Tile, Lease]] = deque()
    try:
        for number in range(len(wanted) + 1):
            if number < len(wanted):
                region, tile = wanted[number]
                left_out = _left_out(tile.stale is not None)
                names = [name for name in tile.states if name not in left_out]
                open_now.append((region, tile, tile.lend(*names)))
            if number:
                yield open_now[0]
                open_now.popleft()[2].give_back()
    finally:
        for _, _, lease in open_now:
            lease.give_back()


def _read_of(engine: EngineState, reader: Reader, state: RegionState, tile: Tile, anew: bool) -> Collection[str]:
    """Return the planes of a tile that are read from a checkpoint: the weights alone where states begin `anew`, and
    weights from before an update only if one was late, and the next one is. Codes are made of the master weights, which
    are read for that where this rank does not hold them, too.
    """
    there = [name for name in tile.states if name != CODES]
    if CODES in tile.states:
        there += [plane.name for plane in state.region.states if plane.name in MASTER and plane.name not in there]
    if anew:
        return [name for name in there if name in MASTER]
    first = next(reader.contents[name] for name in _names(engine, state) if name in reader.contents)
    is_late = STALE in first.planes and engine.updates.delays(reader.meta["engine"]["step"])
    return [name for name in there if name != STALE or is_late]


def _fill(engine: EngineState, reader: Reader, region: Region, tile: Tile, there: Collection[str]) -> None:
    """Read a tile's states, those that are `there`, and clear the others. What of them is on disk is written while the
    tile is read. Of a region that the checkpoint has in part the rest stays as it is.
    """
    names = [name for name in tile.states if name != STALE or name in there]
    is_whole = all(engine.infos[index].name in reader.contents for index in region.parameters)
    lease = tile.land(*names) if is_whole else tile.lend(*names)
    give_back = lease.done_reading
    try:
        engine.lanes.wait(lease.reads, fills=lease.fills)
        beside = {region.plane(name) for name in there if name not in names}  # of another rank's range, to be encoded
        planes = lease.planes | {p.name: torch.zeros(p.numel(tile.end - tile.begin), dtype=p.dtype) for p in beside}
        for plane in (*(name for name in names if name != CODES), *(name for name in there if name not in names)):
            flat, filled = planes[plane], 0
            stretches = _stretches(engine, reader.contents, region, tile, plane) if plane in there else ()
            for its, (name, _, begin, _) in stretches:
                if is_whole:
                    flat[filled : its.start] = 0  # between parameters, and what the checkpoint does not have
                target, filled = flat[its], its.stop
                piece = target if target.is_cpu else torch.empty(target.shape, dtype=target.dtype)
                reader.read(name, plane, begin, piece)
                if piece is not target:
                    target.copy_(piece)
            if is_whole:
                flat[filled:] = 0
        encode(region, planes, slice(0, tile.end - tile.begin))
        give_back = lease.done_writing
    finally:
        give_back(Ticket("compute", is_done=True))


def _stretches(
    engine: EngineState, contents: Contents, region: Region, tile: Tile, plane: str, shard: slice = slice(None)
) -> Iterator[tuple[slice, Span]]:
    """Yield where a plane of a tile has what a checkpoint has of a parameter, and which elements of it these are; of a
    `shard` of the region. (A rule that kept weights in bf16 alone has written no low half.)
    """
    kind, shard_begin, shard_end = region.plane(plane), shard.start or 0, shard.stop or region.numel
    for position, piece in enumerate(region.pieces):
        span, name = engine.store[region].span(position), engine.infos[piece.parameter].name
        begin, end = max(span.start, tile.begin, shard_begin), min(span.stop, tile.end, shard_end)
        if begin < end and name in contents and plane in contents[name].planes:
            its = kind.cut(slice(begin - tile.begin, end - tile.begin))
            yield its, (name, plane, (piece.begin + begin - span.start) // kind.block, its.stop - its.start)


def _factors(engine: EngineState, state: RegionState) -> Iterator[tuple[int, str, str, torch.Tensor]]:
    """Yield what there is once for a parameter: where it begins in the region, its name, the plane, and the values."""
    for position, index in enumerate(state.region.parameters):
        for plane, values in state.factors_of(position).items():
            yield state.span(position).start, engine.infos[index].name, plane, values
