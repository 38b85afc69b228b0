"""Check a checkpoint against an engine, then load all states."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from typing import Any

import torch

from offload.amounts import Tally
from offload.checkpoint.manifest import Contents, Entry, without_moved
from offload.checkpoint.reader import Reader, Span
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
from offload.engine.state import EngineState
from offload.errors import CheckpointError, ConfigError
from offload.lanes.ticket import Fence
from offload.layout.codecs import EXACT
from offload.layout.planes import CODES, ERROR, MASTER, STALE
from offload.layout.regions import Region
from offload.tiers.tile import RegionState, Tile, encode


def check_contents(engine: EngineState, reader: Reader, *, may_reset: bool = False) -> bool:
    """Return whether the optimizer state must start anew: the checkpoint has another update rule or other state dtypes.

    Always False without `may_reset`. Raises ConfigError if the model, the trainable parameters or the storage format
    differ.
    """
    if "engine" not in reader.meta:
        raise CheckpointError(f"{reader.path} was not written by an engine.", reader.path)
    trained_only = reader.meta["engine"].get(TRAINED_ONLY, False)
    # The most particular error first: a difference of formats or of extent is also one of the contents below.
    _check_codecs(engine, reader)
    _check_extent(engine, reader, trained_only)
    changed = None
    if trained_only:
        changed = reader.changed
    own = contents_of(engine, changed)
    # Stale weights exist only with delayed updates, and only a delayed update needs them.
    wanted, saved = (
        {name: entry.with_planes(STALE.__ne__) for name, entry in contents.items()}
        for contents in map(without_moved, (own, reader.contents))
    )
    is_same_rule = reader.meta["engine"].get("rule") in (None, rule_titles(engine.weights))
    if is_same_rule and not may_reset:
        _check_frozen(reader, wanted, saved, trained_only)
    _check_model(engine, reader, wanted, saved)
    different = next((name for name in wanted if wanted[name] != saved[name]), None)
    if different is None and is_same_rule:
        return False
    if not may_reset:
        _refuse_states(engine, reader, different, wanted, saved)
    return True


def _check_codecs(engine: EngineState, reader: Reader) -> None:
    """Raise ConfigError if the saved run computed with frozen weights in another format."""
    own = reader.meta["engine"]
    then, now = own.get("frozen_weights", EXACT.name), engine.weights.frozen_weights
    if then != now:
        raise ConfigError(
            f"{reader.path} was trained on frozen weights stored as {then}, but offload.frozen_weights is "
            f"{now}, which gives other weights. Set --offload.frozen_weights {then}."
        )
    # One setting may store other weights in codes in another version of offload.
    saved_coded = own.get(CODED, {})
    frozen = {info.name for info in engine.weights.own_infos if not info.trainable} - reader.contents.keys()
    if others := sorted(frozen & (coded_dtypes(engine.weights).keys() ^ saved_coded.keys())):
        formats = EXACT.name, then
        if others[0] in saved_coded:
            formats = then, EXACT.name
        raise ConfigError(
            f"{reader.path} was trained on {others[0]} stored as {formats[0]}, and this version of offload stores it "
            f"as {formats[1]}, which gives other weights. Resume with the version that saved it, or start a new run; "
            "`offload export --merge` writes the model as it was trained."
        )


def _check_extent(engine: EngineState, reader: Reader, trained_only: bool) -> None:
    """Raise ConfigError if the checkpoint has frozen weights that this engine cannot load, or lacks some it needs."""
    if not trained_only and (why := unsaved_reason(engine)):
        raise ConfigError(
            f"{reader.path} contains frozen weights, but {why} and cannot be loaded from a checkpoint: load one saved "
            "with trained_only=True, or set --offload.parameters cpu and --offload.frozen_weights exact."
        )
    if trained_only and (lost := sorted(engine.weights.changed - reader.changed)):
        raise ConfigError(
            f"{reader.path} was saved with unchanged frozen weights, but engine.edit has changed {lost[0]} since: load "
            "the checkpoint into a new engine."
        )


def _check_frozen(reader: Reader, wanted: Contents, saved: Contents, trained_only: bool) -> None:
    """Raise ConfigError if the checkpoint has optimizer state for other trainable parameters than `wanted`."""
    known: Set[str] = wanted.keys()  # a trained-only checkpoint lacks what was frozen
    reset = ""
    if not trained_only:
        # A parameter that only one of them has is another error, see `_check_model`.
        known = wanted.keys() & saved.keys()
        reset = (
            ", or set --optimizer.reset (load_checkpoint(..., reset=True)), which restores weights, step number and "
            "data position, and resets the optimizer states"
        )
    trainable, saved_trainable = (
        {name for name in known if name in contents and not contents[name].planes.keys() <= {*MASTER, BUFFER}}
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
        raise ConfigError(
            f"{reader.path} was saved with other frozen parameters: {'; '.join(changes)}. Freeze the parameters of the "
            f"saved run (requires_grad, --optimizer.freeze){reset}."
        )


def _check_model(engine: EngineState, reader: Reader, wanted: Contents, saved: Contents) -> None:
    """Raise ConfigError if the weights or buffers have other names, shapes or dtypes."""
    trained = {info.name for info in engine.weights.infos if info.trainable}
    for name in [*wanted, *saved]:
        # For trainable parameters the update rule decides about a low half of the master weights.
        masters: Sequence[str] = MASTER
        if name in trained:
            masters = MASTER[:1]
        kept = (*masters, BUFFER)
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


def _refuse_states(
    engine: EngineState, reader: Reader, different: str | None, wanted: Contents, saved: Contents
) -> None:
    """Raise ConfigError for optimizer states of another rule, or in other dtypes for the parameter `different`."""
    saved_rule, own_rule = reader.meta["engine"].get("rule"), rule_titles(engine.weights)
    where = ""
    if different is not None:
        where = (
            f" ({different}: {_describe_entry(saved[different])} in the checkpoint, "
            f"{_describe_entry(wanted[different])} in the model)"
        )
    raise ConfigError(
        f"{reader.path} contains optimizer states of {saved_rule or 'another update rule'}{where}, which "
        f"{own_rule} cannot use. Resume with the --optimizer.name, .states, .master and .groups of the saved run, "
        "or set --optimizer.reset (load_checkpoint(..., reset=True)), which restores weights, step number and data "
        f"position, and resets the states of {own_rule}."
    )


def _describe_entry(entry: Entry | None) -> str:
    if entry is None:
        return "nothing"
    planes = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in entry.planes.items())
    return f"{list(entry.shape)} as {planes}"


class StateLoader:
    """Fills all states from a checkpoint accepted by `check_contents`. Each rank reads only its own part.

    Random generators and buffers that differ between ranks are restored if the rank count is the same. `anew`: restore
    the weights only; the optimizer state starts as in the first step.
    """

    def __init__(self, engine: EngineState, reader: Reader, *, anew: bool) -> None:
        self._engine = engine
        self._reader = reader
        self._anew = anew
        self._own = reader.meta["engine"]
        self._places = Places(engine.memory.store, reader.contents)
        self._has_same_ranks = len(self._own["random"]) == engine.memory.store.sharding.num_ranks

    def spans(self) -> Iterator[Span]:
        """Yield the spans this rank reads, in `load` order."""
        engine, places = self._engine, self._places
        # The order of `load`, because the reader fetches the announced spans ahead.
        for state in places.regions:
            for tile in state.held_tiles:
                for plane in self._names_to_read(state, tile):
                    for _, span in places.stretches(state.region, tile, plane):
                        yield span
            if not self._anew:
                for _, name, plane, values in places.factors(state):
                    yield name, plane, 0, len(values)
                for _, span in places.errors(state):
                    yield span
        for name, buffer in buffers_in_state_dict(engine.flow.model).items():
            yield name, BUFFER, 0, buffer.numel()
        yield from engine.flow.moved_buffers.spans(self._reader, engine.memory.comm.rank, self._has_same_ranks)

    def load(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read all spans. Return (engine decisions, meta).

        Raises CheckpointError for damaged data; the states then belong to no step.
        """
        engine, reader = self._engine, self._reader
        sizes = (numel * reader.contents[name].planes[plane].itemsize for name, plane, _, numel in self.spans())
        tally = Tally(sum(sizes))
        engine.flow.tell("reading the checkpoint", tally)
        reader.expect(self.spans(), tally.add)
        updates: dict[str, int] = {}  # numbers of updates so far, by parameter
        if not self._anew:
            updates = self._own["updates"]
        for state in self._places.regions:
            self._load_region(state)
            state.steps[:] = [updates.get(engine.weights.infos[index].name, 0) for index in state.region.parameters]
        for name, buffer in buffers_in_state_dict(engine.flow.model).items():
            value = torch.empty(buffer.shape, dtype=buffer.dtype)  # the reader fills host memory alone
            reader.read(name, BUFFER, 0, value)
            buffer.copy_(value)
        engine.flow.moved_buffers.load(reader, engine.memory.comm.rank, self._has_same_ranks)
        engine.flow.runner.step_number = self._own["step"]
        if self._has_same_ranks:  # the states of other ranks' generators would repeat their numbers
            self._restore_generators()
        engine.weights.changed.clear()
        engine.weights.changed.update(reader.changed)
        return self._own, reader.meta["meta"]

    def _load_region(self, state: RegionState) -> None:
        """Fill the tiles, factors and the gradient quantization error of a region."""
        for tile in state.held_tiles:
            names = self._names_to_read(state, tile)
            self._fill(state.region, tile, names)
            tile.stale = None  # no update is late
            if STALE in names:
                tile.stale = Fence("stale weights")
        for _, name, plane, values in self._places.factors(state):
            piece = torch.zeros(values.shape, dtype=values.dtype)
            if not self._anew:
                self._reader.read(name, plane, 0, piece)
            values.copy_(piece)
        if state.error is None:
            return
        state.error.zero_()  # 0 without a saved error
        if self._anew:
            return
        # A sum: with fewer replicas than in the saved run, each takes over the errors of several.
        for elements, (name, plane, begin, numel) in self._places.errors(state):
            error = torch.empty(numel, dtype=ERROR.dtype)
            self._reader.read(name, plane, begin, error)
            state.error[elements] += error.to(state.error.device)

    def _names_to_read(self, state: RegionState, tile: Tile) -> Collection[str]:
        """Return the tile planes to read from the checkpoint.

        With `anew`: master weights only. Stale weights: only if the checkpoint and the next update are both late. For
        quantized records the master weights are read, also on a rank that does not store them.
        """
        contents, infos = self._reader.contents, self._engine.weights.infos
        names_of_region = (infos[index].name for index in state.region.parameters)
        first = next(contents[name] for name in names_of_region if name in contents)
        left_out = unsaved_planes(STALE in first.planes and self._engine.weights.updates.delays(self._own["step"]))
        names = [name for name in tile.states if name not in left_out]
        # Codes are not in a checkpoint: they are made anew from the master weights.
        if CODES in tile.states:
            names += [plane.name for plane in state.region.states if plane.name in MASTER and plane.name not in names]
        if self._anew:
            names = [name for name in names if name in MASTER]
        return names

    def _fill(self, region: Region, tile: Tile, read_names: Collection[str]) -> None:
        """Read the planes `read_names` from the checkpoint into a tile and clear the other planes.

        Disk planes are written while the tile is read. For a region only partly in the checkpoint the other values
        stay.
        """
        infos, contents = self._engine.weights.infos, self._reader.contents
        names = [name for name in tile.states if name != STALE or name in read_names]
        is_whole = all(infos[index].name in contents for index in region.parameters)
        lease = tile.lend(*names, lands=is_whole)  # without the present values, unless some stay
        with lease.opened(self._engine.memory.lanes.wait, changes=True) as own:
            beside = {region.plane(name) for name in read_names if name not in names}  # another rank's, to quantize
            size = tile.end - tile.begin
            planes = own | {p.name: torch.zeros(p.numel(size), dtype=p.dtype, device=own[CODES].device) for p in beside}
            # In the order of `spans`.
            in_order = [name for name in names if name != CODES]
            in_order += [name for name in read_names if name not in names]
            for plane in in_order:
                spans: Iterable[tuple[slice, Span]] = ()
                if plane in read_names:
                    spans = self._places.stretches(region, tile, plane)
                self._fill_plane(planes[plane], plane, spans, is_whole)
            encode(region, planes, slice(0, size))

    def _fill_plane(self, flat: torch.Tensor, plane: str, spans: Iterable[tuple[slice, Span]], is_whole: bool) -> None:
        """Read a plane of a tile. is_whole: clear the elements outside `spans`, padding or values not in the
        checkpoint.
        """
        filled = 0
        for elements, (name, _, begin, _) in spans:
            if is_whole:
                flat[filled : elements.start] = 0
            target = flat[elements]
            filled = elements.stop
            piece = target
            if not target.is_cpu:
                piece = torch.empty(target.shape, dtype=target.dtype)
            self._reader.read(name, plane, begin, piece)
            if piece is not target:
                target.copy_(piece)
        if is_whole:
            flat[filled:] = 0

    def _restore_generators(self) -> None:
        """Restore the random generators, if the checkpoint comes from a device with the same ones."""
        device = self._engine.memory.device
        states = [base64.b64decode(text) for text in self._own["random"][self._engine.memory.comm.rank]]
        if len(states) == len(device.random_state()):
            device.set_random_state(tuple(torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in states))
