"""All states into a checkpoint and back: by parameter name and slice, so that another number of ranks, another stage or
another placement can read what this one wrote.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch

from offload.checkpoint.hf_names import CannotStream, conversions_used
from offload.checkpoint.hf_write import write_configuration
from offload.checkpoint.manifest import CHUNK_BYTES, Contents, Entry, name_of, without_moved
from offload.checkpoint.reader import Reader, Span
from offload.checkpoint.saving import Save
from offload.checkpoint.writer import Writer
from offload.engine.assemble import Assembly
from offload.engine.meeting import meet
from offload.errors import CheckpointError, ConfigError
from offload.lanes.ticket import Ticket
from offload.partition.layout import PLANES, Region
from offload.partition.outcome import as_one
from offload.planning.environment import memory
from offload.tiers.ledger import Ledger
from offload.tiers.loan import Loan
from offload.tiers.store import Part, RegionState, plane_dtype

_STATES = PLANES[:-1]
_COPY = "copy for a checkpoint"
_BUFFER = "buffer"  # the only plane of a buffer


class Saving:
    """A checkpoint on its way: what is to be in it is copied, and goes to the disk while training goes on.

    What was in the folder before stays until `finish`. Leaving the `with` block before that removes what was written.
    """

    def __init__(
        self,
        parts: Assembly,
        folder: Path,
        decided: Mapping[str, Any],
        meta: Mapping[str, Any],
        files: Mapping[str, bytes] | None = None,
        *,
        copies: bool = False,
    ) -> None:
        """Hand in all states, and what a step depends on beside its batch, for `folder`; `decided` (what the engine
        has, once and for all) and `meta` (both for JSON) are kept with them, and so are `files`. Collective; no update
        may be on its way. `copies`: into memory that is left over, as far as it reaches; else the disk is waited for.

        Raises, on all ranks, DiskError, ConfigError, or what else `outcome` raises.
        """
        comm, contents = parts.comm, _contents(parts)
        moved = parts.moved.find(comm, _buffers(parts))
        for name, entry in moved.items():
            planes = contents[name].planes if name in contents else {}
            contents[name] = Entry(entry.shape, {**planes, **entry.planes})
        self._comm, self._contents, self._save = comm, contents, None
        self._random = _random(parts)
        own = {**decided, "step": parts.stream.step_number, "updates": dict(_updates(parts))}
        own |= {"built_in": _built_in(parts), "conversions": _conversions(parts)}
        with ExitStack() as opened:
            with as_one(comm, "making of the checkpoint"):
                if comm.rank == 0:
                    # What of it is somebody's, the steps that follow may change.
                    self._meta = json.loads(json.dumps({"engine": own, "meta": dict(meta)}))
                    self._save = opened.enter_context(Save(folder))
                    for name, data in {**_configuration(parts), **(files or {})}.items():
                        self._save.attach(name, data)
            path: Any = comm.gather_objects(self._save and self._save.path, "folder of the checkpoint")[0]
            with as_one(comm, "writing of the checkpoint"):
                parts.host.make_room()  # of a copy that another save has still
                spare_bytes = _spare_bytes(parts, contents) if copies else 0
                self._writer = opened.enter_context(Writer(path, comm.rank, contents, spare_bytes=spare_bytes))
                if self._writer.spare_bytes:
                    opened.enter_context(_borrowed(parts.host, self._writer))
                _write(parts, self._writer)
                for name, plane, value in parts.moved.own(comm.rank, moved):
                    self._writer.write(name, plane, 0, value)
                self._writer.end()
            self._opened = opened.pop_all()

    @property
    def is_done(self) -> bool:
        """True once `finish` need not wait for this rank's disk."""
        return self._writer.is_done

    def finish(self) -> None:
        """Wait until all is on the disk, and publish it. Collective. Raises as the making of it."""
        comm = self._comm
        with self._opened:
            meet(comm, "finish of a checkpoint")
            with as_one(comm, "writing of the checkpoint"):
                part = self._writer.finish()
            told = comm.gather_objects((part, self._random), "parts of the checkpoint")
            with as_one(comm, "end of the checkpoint"):
                if self._save is not None:
                    self._meta["engine"]["random"] = [random for _, random in told]
                    self._save.commit(self._contents, [its for its, _ in told], self._meta)

    def abort(self) -> None:
        """Remove what was written; nothing to do after `finish`. Not collective."""
        self._opened.close()

    def __enter__(self) -> Saving:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.abort()


def _spare_bytes(parts: Assembly, contents: Contents) -> int:
    """Return how much host memory this rank may take for a copy of its share: what is left of its budget, which it
    gives back as soon as somebody else needs it, or without one half of what is free.
    """
    share = sum(entry.numel * dtype.itemsize for entry in contents.values() for dtype in entry.planes.values())
    host = parts.host
    if host.budget_bytes is not None:
        free = host.budget_bytes - host.current_bytes
    else:
        free = memory().get("available_bytes", 0) // parts.comm.local_size // 2
    return max(0, min(share // parts.comm.size + CHUNK_BYTES, free))


@contextmanager
def _borrowed(host: Ledger, writer: Writer) -> Iterator[None]:
    """Enter a copy into the ledger for as long as it is there, which is until somebody else needs the memory."""
    is_held, num_bytes = True, writer.spare_bytes

    def release() -> None:
        nonlocal is_held
        if is_held and _COPY in host.allocations:  # the engine may be closed by now
            host.release(_COPY, num_bytes)
        is_held = False
        if host.give_way is give_way:
            host.give_way = None

    def give_way() -> None:
        if writer.has_ended:
            writer.wait()
            release()

    host.reserve(_COPY, num_bytes)
    host.give_way = give_way
    try:
        yield
    finally:
        release()


def load_states(parts: Assembly, reader: Reader) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fill all states from a checkpoint that `check_contents` has accepted; return what was decided, and its meta. Each
    rank reads what it holds. Random generators, and buffers that ranks have moved apart, are as they were where the
    number of ranks is the same.

    Raises CheckpointError where the data are damaged: the states belong to no step then.
    """
    own = reader.meta["engine"]
    reader.expect(span for state in parts.store.states for part in state.held for span in _wanted(parts, state, part))
    for state in parts.store.states:
        for part in state.held:
            _fill(parts, reader, state.region, part)
        state.steps = [own["updates"].get(parts.infos[index].name, 0) for index in state.region.parameters]
    for name, buffer in _buffers(parts).items():
        value = torch.empty(buffer.shape, dtype=buffer.dtype)
        reader.read(name, _BUFFER, 0, value)
        buffer.copy_(value)
    parts.moved.load(reader, parts.comm.rank, len(own["random"]) == parts.comm.size)
    parts.stream.step_number = own["step"]
    if len(own["random"]) == parts.comm.size:
        states = [base64.b64decode(text) for text in own["random"][parts.comm.rank]]
        if len(states) == len(parts.device.random_state()):
            parts.device.set_random_state(
                tuple(torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in states)
            )
    return own, reader.meta["meta"]


def check_contents(parts: Assembly, reader: Reader) -> None:
    """Raise ConfigError where a checkpoint is not one of this model, trained and stored alike."""
    wanted, found = _contents(parts), without_moved(reader.contents)
    if "engine" not in reader.meta:
        raise CheckpointError(f"{reader.path} was not written by an engine.", reader.path)
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            raise ConfigError(
                f"{reader.path} does not fit the model: it has {_shown(found.get(name))} for {name}, and the model "
                f"{_shown(wanted.get(name))}. Resume with the model, the trained parameters and the --train.precision "
                "that it was made with."
            )


def _shown(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    planes = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in entry.planes.items())
    return f"{list(entry.shape)} as {planes}"


def _contents(parts: Assembly) -> dict[str, Entry]:
    contents = {}
    for state in parts.store.states:
        names = state.region.planes(keeps_gradients=False, accumulates=False)
        planes = {name: plane_dtype(state.region, name) for name in names}
        for index in state.region.parameters:
            contents[parts.infos[index].name] = Entry(tuple(parts.infos[index].shape), planes)
    for name, buffer in _buffers(parts).items():
        contents[name] = Entry(tuple(buffer.shape), {_BUFFER: buffer.dtype})
    return contents


def _buffers(parts: Assembly) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to a model's state, each by the first of its names."""
    with parts.hold.reading(parts.stream.undo):
        kept = parts.model.state_dict(keep_vars=True)  # which leaves out those that are not persistent
    found = {name: buffer for name, buffer in parts.model.named_buffers() if kept.get(name) is buffer}
    return {name: buffer.detach() for name, buffer in found.items()}


def _built_in(parts: Assembly) -> dict[str, Any]:
    """Return the dtype in which most of the model was built, and those of the other parameters: by them it is decided
    what is kept in fp32.
    """
    dtypes = {info.name: name_of(dtype) for info, dtype in zip(parts.infos, parts.dtypes, strict=True)}
    counts: Counter[str] = Counter()
    for info in parts.infos:
        counts[dtypes[info.name]] += info.numel
    main = counts.most_common(1)[0][0]
    return {"main": main, "others": {name: dtype for name, dtype in dtypes.items() if dtype != main}}


def _conversions(parts: Assembly) -> dict[str, Any]:
    """Return what an export needs beside the configuration."""
    try:
        return conversions_used(parts.model)
    except CannotStream:  # an export without it goes by the family's own rules; no reason to lose a checkpoint
        return {}


def _configuration(parts: Assembly) -> dict[str, bytes]:
    """Return the files that say how to build the model again, by name, as it was given."""
    with TemporaryDirectory() as folder, parts.unchanged_config():
        write_configuration(parts.model, Path(folder))
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def _write(parts: Assembly, writer: Writer) -> None:
    """Write this rank's ranges; in stage 0, where all have all, each writes its share too. Rank 0 has the buffers."""
    if parts.comm.rank == 0:
        for name, buffer in _buffers(parts).items():
            writer.write(name, _BUFFER, 0, buffer.cpu().contiguous())
    sharding = parts.store.sharding
    with closing(_lent(parts)) as lent:
        for region, part, loan in lent:
            shard = sharding.shard(region)
            parts.lanes.wait(loan.after)
            for name, plane in loan.planes.items():
                for index, begin, end, start in _pieces(parts, region, part):
                    begin, end = max(begin, shard.start), min(end, shard.stop)
                    if begin < end:
                        piece = plane[begin - part.begin : end - part.begin].cpu()
                        writer.write(parts.infos[index].name, name, begin - start, piece)


def _lent(parts: Assembly) -> Generator[tuple[Region, Part, Loan], None, None]:
    """Yield the parts that this rank writes, lent; what of the next one is on disk is on its way meanwhile."""
    shares = [(state.region, parts.store.sharding.shard(state.region), state.parts) for state in parts.store.states]
    wanted = [
        (region, part)
        for region, shard, its in shares
        for part in its
        if part.begin < shard.stop and shard.start < part.end
    ]
    open_now: deque[tuple[Region, Part, Loan]] = deque()
    try:
        for number in range(len(wanted) + 1):
            if number < len(wanted):
                region, part = wanted[number]
                open_now.append((region, part, part.lend(*_STATES)))
            if number:
                yield open_now[0]
                open_now.popleft()[2].give_back()
    finally:
        for _, _, loan in open_now:
            loan.give_back()


def _wanted(parts: Assembly, state: RegionState, part: Part) -> Iterator[Span]:
    """Yield what `_fill` reads, in its order."""
    for name in part.states:
        for index, begin, end, start in _pieces(parts, state.region, part):
            yield parts.infos[index].name, name, begin - start, end - begin


def _fill(parts: Assembly, reader: Reader, region: Region, part: Part) -> None:
    """Read all of a part's states. What of them is on disk is written while the next part is read."""
    loan = part.land(*part.states)
    give_back = loan.read
    try:
        parts.lanes.wait(loan.after, behind=loan.behind)
        for name in part.states:
            plane, filled = loan.planes[name], part.begin
            for index, begin, end, start in _pieces(parts, region, part):
                plane[filled - part.begin : begin - part.begin] = 0  # between parameters
                target, filled = plane[begin - part.begin : end - part.begin], end
                piece = target if target.is_cpu else torch.empty(target.shape, dtype=target.dtype)
                reader.read(parts.infos[index].name, name, begin - start, piece)
                if piece is not target:
                    target.copy_(piece)
            plane[filled - part.begin :] = 0
        give_back = loan.changed
    finally:
        give_back(Ticket("compute", is_done=True))


def _pieces(parts: Assembly, region: Region, part: Part) -> Iterator[tuple[int, int, int, int]]:
    """Yield (parameter, its elements in a part from which to which, where it begins), counted in the region."""
    for position, index in enumerate(region.parameters):
        span = parts.store[region].span(position)
        begin, end = max(span.start, part.begin), min(span.stop, part.end)
        if begin < end:
            yield index, begin, end, span.start


def _updates(parts: Assembly) -> Iterator[tuple[str, int]]:
    """Yield how often each parameter was updated."""
    for state in parts.store.states:
        for index, count in zip(state.region.parameters, state.steps, strict=True):
            yield parts.infos[index].name, count


def _random(parts: Assembly) -> list[str]:
    return [base64.b64encode(state.numpy().tobytes()).decode() for state in parts.device.random_state()]
