"""What an engine gives of its states, and takes: copies, edits, exports, checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
import xxhash

from offload.checkpoint.reader import Reader
from offload.checkpoint.spread import bring
from offload.distributed.comm import Comm
from offload.distributed.outcome import as_one
from offload.engine.checkpoints import Saving, check_contents, load_states, spans_read
from offload.engine.exporting import Made, export_model
from offload.engine.loss.batch_agreement import agree_on_pass
from offload.engine.own_loop import OwnLoop
from offload.engine.reading import Reading
from offload.engine.recovery import Recovery
from offload.engine.state import EngineState
from offload.engine.steps import Steps
from offload.engine.units.activation_offload import GRAPHS
from offload.errors import ConfigError, nearest, warn
from offload.hf.safetensors_file import reader
from offload.hf.write import SHARD_BYTES
from offload.layout.codecs import EXACT
from offload.layout.regions import ParameterInfo
from offload.planning.plan import told_frozen_weights, told_links
from offload.telemetry.counters import Counters

_Json = Mapping[str, Any] | None
_Files = Mapping[str, bytes] | None
_MARKED = 4096
"""Elements of each parameter by which weights are told from others."""
_BLOCK = 1 << 22
"""Elements that are read at once where all are."""


class StateAccess:
    """The calls of an engine about its states. Each waits until the updates before it are made."""

    comm: Comm
    """The ranks."""
    counters: Counters
    """The bytes of the last step, to which none of these calls adds."""
    _state: EngineState
    _recovery: Recovery
    _steps: Steps
    _own_loop: OwnLoop
    _reading: Reading

    def _settle(self, operation: str) -> None:
        """Let every update that is on its way arrive, before the host reads the states. Collective."""
        self._recovery.check_usable()
        agree_on_pass(self.comm, operation)
        with self._recovery.working():
            self._state.updates.flush()
            self._state.lanes.drain_updates()
            if self.comm.size > 1:
                self._state.lanes.finish()

    def named_parameters(
        self, trained_only: bool = False, *, names: Iterable[str] | None = None, as_given: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield fresh CPU copies of the master weights, fp32 or of the dtypes `as_given`, under the model's names, in
        torch's order, tied names once; all of them, those that were not frozen at `Engine()`, or some `names`. Of those
        that rest in codes (`frozen_weights`) it is what the codes stand for. Collective: all ranks ask for the same.
        """
        self._settle("named_parameters")
        for info in self._infos_of("engine.named_parameters", names):
            if info.trainable or not trained_only:
                yield info.name, self._read(info).to(self._state.dtypes[info.index] if as_given else torch.float32)

    def _read(self, info: ParameterInfo, span: tuple[int, int] | None = None) -> torch.Tensor:
        """Return fp32 master weights: all in their shape, or those from an element to another, flat. Collective."""
        if self.comm.size > 1:  # a step may have been made since the last one was asked for
            self._state.lanes.finish()
        with self._recovery.working(), self.counters.unchanged():
            values = self._state.store.values
            return values.read(info.index) if span is None else values.read_range(info.index, *span)

    def edit(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters to be changed in place, for merges, resets and averages:

            for name, value in engine.edit():
                value.mul_(0.5)

        Each is an fp32 copy of the master weights on the CPU, in its shape, and is written back when the loop goes on.
        Moments stay as they are. Collective: all ranks ask for the same, and those of rank 0 are written.

        names: of the parameters, as `named_parameters` has them; None for all.

        Raises as `check_edit`, and ConfigError for values that are not finite, which are not written. A frozen
        parameter that was written is in every checkpoint from then on, with `trained_only` as well.
        """
        wanted = self.check_edit(names)
        self._own_loop.refuse_middle("engine.edit")
        self._settle(f"edit({', '.join(info.name for info in wanted)})")
        self.catch_up()
        return self._edited(wanted)

    def check_edit(self, names: Iterable[str] | None = None) -> list[ParameterInfo]:
        """Return what `edit` would yield, and write nothing. Raises ConfigError for a name that there is none of, and
        for one that rests in codes (`frozen_weights`) or in the model's own files.
        """
        wanted = self._infos_of("engine.edit", names)
        has_files = self._state.files is not None
        fixed = (info for info in wanted if info.codec is not EXACT or (has_files and not info.trainable))
        if (info := next(fixed, None)) is not None:
            raise ConfigError(
                f"engine.edit was asked for {info.name}, which is not written: it rests in few bits, where other "
                "weights would come of it, or in the model's own files. Name other parameters, or set "
                "--offload.frozen_weights exact and --offload.parameters cpu."
            )
        return wanted

    def answering(self, values: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Within, whoever reads one of these parameters from the model is given a copy of these `values`, by the names
        of `named_parameters`: for another library's code that saves on one rank what several hold. Not collective.
        """
        return self._reading.given(values)

    def _infos_of(self, call: str, names: Iterable[str] | None) -> list[ParameterInfo]:
        """Return parameters by their names, None for all. Raises ConfigError for a name that there is none of."""
        infos = {info.name: info for info in self._state.infos}
        wanted = list(infos if names is None else names)
        unknown = next((name for name in wanted if name not in infos), None)
        if unknown is not None:
            raise ConfigError(f"{call} was asked for {unknown!r}{nearest(unknown, infos)}, which is no parameter.")
        return [infos[name] for name in wanted]

    def prune_moments(self, names: Iterable[str], share: float) -> None:
        """Set to zero what the update rule keeps of parameters: of each array, such as a first moment, this share of
        the elements, those of least magnitude (ReLoRA, arXiv:2307.05695, section 3: 0.99 and 0.999); all with 1. How
        often a parameter was updated stays as it is. Collective: all ranks ask for the same.

        names: of the parameters, as `named_parameters` has them. share: 0 to 1. Raises ConfigError for a name that
        there is none of, and for a share below 1 of moments in int8.
        """
        wanted = self._infos_of("engine.prune_moments", names)
        self._own_loop.refuse_middle("engine.prune_moments")
        self._settle(f"prune_moments({share})")
        with self._recovery.working(), self.counters.unchanged():
            for info in wanted:
                self._state.store.values.prune_moments(info.index, share)
            self._state.lanes.drain_updates()

    def _edited(self, infos: Iterable[ParameterInfo]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter, and write it back. Between two of them anything may be called: nothing is stale."""
        state = self._state
        for info in infos:
            self._settle(f"edit of {info.name}")
            value = self._read(info)
            yield info.name, value
            self._settle(f"edit of {info.name}")
            if num_wrong := value.numel() - int(value.isfinite().sum()):
                raise ConfigError(
                    f"engine.edit was left {num_wrong} of {value.numel()} values of {info.name} that are not finite; "
                    "they were not written."
                )
            with self._recovery.working(), self.counters.unchanged():
                state.store.values.write(info.index, reader(value), value.dtype, source=0)
                state.lanes.drain_updates()  # a disk that fails is found out here
                if not info.trainable:
                    state.changed.add(info.name)
                state.weights_changed(region for region in state.regions if info.index in region.parameters)

    def weights_mark(self, *, whole: bool = False) -> str:
        """Return 16 hexadecimal digits that tell the weights from others: of each parameter the name, and the first
        few thousand of its fp32 master weights, or with `whole` all of them, a block at a time. Collective.
        """
        self._settle("weights_mark")
        found = xxhash.xxh64()
        for info in self._state.infos:
            found.update(info.name.encode())
            end = info.numel if whole else min(info.numel, _MARKED)
            for begin in range(0, end, _BLOCK):
                found.update(self._read(info, (begin, min(begin + _BLOCK, end))).numpy().data)
        return found.hexdigest()

    @property
    def graphs_on_host_bytes(self) -> int:
        """The bytes of the host's memory in which graphs wait for their backward (`Placement(graphs="cpu")`)."""
        return self._state.host.allocations.get(GRAPHS, 0)

    @property
    def head_chunk_bytes(self) -> int | None:
        """How many bytes of logits exist at once at most, counted in fp32; None for all."""
        return self._steps.losses.chunk_bytes

    @property
    def allocations(self) -> list[tuple[str, str, int]]:
        """Return what is held: (tier, name, bytes)."""
        if self._recovery.is_idle:
            with self._recovery.working():
                self._state.runner.collect()
        ledgers = (self._state.device.ledger, self._state.host, self._state.nvme_ledger)
        return [(ledger.tier, name, size) for ledger in ledgers for name, size in ledger.allocations.items()]

    @property
    def update_devices(self) -> Mapping[str, torch.device]:
        """Where the update of each parameter is computed: where its states rest, or to which they stream."""
        state = self._state
        on_host, devices = state.plan.updated_on_host(state.regions), (state.device.torch_device, torch.device("cpu"))
        return {info.name: devices[info.index in on_host] for info in state.infos}

    @property
    def told_updates(self) -> str:
        """What of the states that rest on the host is updated where, for people; empty where all of it is there."""
        return self._state.plan.told_updates(self._state.regions)

    @property
    def told_tiles(self) -> str:
        """What is cut, or has run over tiles, since the device has too little for it, for people; empty for nothing."""
        return ".\n".join(filter(None, (self._state.cutting.told, self._state.runner.forwards.told)))

    @property
    def told_frozen_weights(self) -> str:
        """Which frozen weights rest in codes or in the model's own files, for people; empty where all are as others."""
        return told_frozen_weights(self._state.infos, self._state.regions, self._state.plan.layout)

    @property
    def told_links(self) -> str:
        """What of weights and gradients travels in codes, and what is approximate by that, for people, or nothing."""
        return told_links(self._state.regions, self._state.plan.layout.sharding)

    @property
    def resting(self) -> frozenset[str]:
        """The names of those allocations in host memory that the device never copies from, and that are not pinned."""
        return self._state.plan.layout.resting(self._state.regions)

    def export(
        self,
        path: str | Path,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
        files: Mapping[str, bytes] | None = None,
        replace: bool = False,
        made: Made | None = None,
    ) -> None:
        """Write the model as a Hugging Face folder: configuration, as it was given, and safetensors, piece by piece.
        Collective; rank 0 writes. The folder is there whole, or not at all.

        dtype: None for that in which the device uses each weight; float32 gives the master weights, bit for bit. What
            rests in codes (`frozen_weights`) is written as what the codes stand for.
        shard_bytes: of a file of weights at most. files: rank 0's, by name, go with it, such as those of its
        tokenizer. replace: an earlier export gives way. made: another model instead, whose weights are made of these,
            such as one with an adapter merged in; the same on all ranks.

        Raises, on all ranks, ConfigError or DiskError.
        """
        self._recovery.check_open()
        self._state.snapshot.check(trains=False)
        self._settle("export")
        with self._recovery.working(), self.counters.unchanged():
            export_model(self._state, Path(path), dtype, shard_bytes, files or {}, replace, made)

    def save_checkpoint(
        self, path: str | Path, meta: _Json = None, files: _Files = None, *, trained_only: bool = False
    ) -> None:
        """Write all states to a folder, from which any number of ranks with any placement can go on. Collective. What
        was there before stays until the new one is complete; `meta` (for JSON) is given back by `load_checkpoint`, and
        `files` (rank 0's, by name) lie beside the model's configuration, such as those of its tokenizer. With
        `trained_only` it lacks what was frozen at `Engine()`, and only an engine that has the same there can load it.
        What rests in codes (`frozen_weights`) or in the model's own files is in no checkpoint: save it so.

        Raises, on all ranks, DiskError or ConfigError, after which training can go on.
        """
        how = {"copies": False, "trained_only": trained_only}
        with self._saving("save_checkpoint", path, meta, files, **how) as saving, self._recovery.working():
            saving.finish()

    def begin_checkpoint(
        self, path: str | Path, meta: _Json = None, files: _Files = None, *, trained_only: bool = False
    ) -> Saving:
        """Begin what `save_checkpoint` does: all states are copied into host memory that is left over (of the budget,
        or half of what is free without one), and are on their way to the disk when this returns. What has no room there
        is waited for. Steps may follow; the checkpoint is there once `finish` of what this returns has returned, which
        is collective as well, and comes before `close`. It `is_done` (on this rank) when `finish` need not wait;
        `abort` gives it up.

        Raises as `save_checkpoint`; what the disk refuses later is raised by `finish`, on all ranks.
        """
        return self._saving("begin_checkpoint", path, meta, files, copies=True, trained_only=trained_only)

    def _saving(self, name: str, path: str | Path, meta: _Json, files: _Files, **how: bool) -> Saving:
        self._own_loop.refuse_middle(f"engine.{name}")
        self._settle(name)
        with ExitStack() as interrupted:  # it comes out where the work ends, and nobody would have what was made
            with self._recovery.working(), self.counters.unchanged():
                decided = self._steps.decided
                saving = interrupted.enter_context(Saving(self._state, Path(path), decided, meta or {}, files, **how))
            interrupted.pop_all()
        return saving

    def load_checkpoint(self, path: str | Path, *, reset: bool = False) -> dict[str, Any]:
        """Take all states from a folder that `save_checkpoint` wrote; return its meta. Collective. A torn engine is
        sound again. With `reset` the states of an update rule that is not this engine's, or of another width, are left
        out: this one's begin anew.

        Raises, on all ranks, CheckpointError for a folder that is damaged (where its data are, the engine is torn), and
        ConfigError for another model's, or, without `reset`, another rule's.
        """
        self._recovery.check_open()
        agree_on_pass(self.comm, "load_checkpoint")
        self._recovery.recover()
        self._state.lanes.finish()
        with self._recovery.working(), ExitStack() as opened:
            opened.enter_context(self.counters.unchanged())
            with as_one(self.comm, "opening of the checkpoint"):
                reader = opened.enter_context(Reader(Path(path), in_part=self.comm.size > 1))
                anew = check_contents(self._state, reader, may_reset=reset)
            bring(self.comm, reader, reader.files_of(spans_read(self._state, reader, anew=anew)))
            if anew and self.comm.rank == 0:
                warn(f"{path} holds the states of another update rule: this one's begin anew.")
            self._recovery.tear(f"{path} was read in part")
            self._steps.method.forget()
            self._state.store.forgive()
            self._state.lanes.forget_failures()
            with as_one(self.comm, "reading of the checkpoint"):
                decided, meta = load_states(self._state, reader, anew=anew)
                self._state.lanes.drain_updates()  # what fails on its way to the disk fails the load
            self._state.weights_changed()
            self._state.slots.settle()
        self._steps.decide_again(decided)
        self._state.lanes.settle()
        self._recovery.mend()
        self._own_loop.forget()
        return meta

    def catch_up(self) -> None:
        """Let what is computed next see the newest weights. It is for the end of a run whose updates come late: between
        its steps an evaluation sees the weights that the next step would compute with. Collective.
        """
        self._settle("catch_up")
        with self._recovery.working(), self.counters.unchanged():
            self._state.updates.catch_up()
            self._state.weights_changed()
