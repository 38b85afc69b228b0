"""Access to the states of an engine between steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
import xxhash

from offload.checkpoint.reader import Reader
from offload.checkpoint.spread import copy_missing_files
from offload.distributed.outcomes import share_failure
from offload.engine.checkpoint_load import StateLoader, check_contents
from offload.engine.checkpoint_save import PendingCheckpoint
from offload.engine.exporting import DerivedModel, export_model
from offload.engine.figures import Figures
from offload.engine.loss.batch_agreement import RankBatch, agree_on_pass
from offload.engine.own_loop import OwnLoop
from offload.engine.parameter_reads import ParameterReads
from offload.errors import ConfigError, nearest, warn
from offload.files.safetensors_file import tensor_reader
from offload.files.sources import SHARD_BYTES
from offload.layout.regions import ParameterInfo
from offload.tiers.counters import Counters

_Json = Mapping[str, Any] | None
_Files = Mapping[str, bytes] | None
_MARK_ELEMENTS = 4096
"""Elements per parameter that enter a `weights_mark`."""
_BLOCK = 1 << 22
"""Elements read at a time when all are read."""


class StateAccess(Figures):
    """The part of `Engine` that reads and writes states between steps: copies, edits, moments, exports, checkpoints.

    Each call waits for pending updates. None changes the counters.
    """

    counters: Counters
    _own_loop: OwnLoop
    _parameter_reads: ParameterReads

    def _settle(self, operation: str) -> None:
        """Wait for all pending updates before the states leave the engine, or change. Collective.

        Raises ConfigError if a script has written to weights on the device: the states would be without the change.
        """
        self._recovery.check_readable()
        with self._recovery.working():
            self._steps.foreign_writes.check()
        self._wait_for_updates(operation)

    def _wait_for_updates(self, operation: str) -> None:
        """Wait for all pending updates before the host reads the states. Collective."""
        self._recovery.check_readable()
        agree_on_pass(self.comm, RankBatch(operation))
        with self._recovery.working():
            self._weights.updates.flush()
            self._memory.lanes.drain_updates()
            self._end_exchanges()

    def _end_exchanges(self) -> None:
        """With other ranks, wait for all work: the next request is an exchange too."""
        if self.comm.size > 1:
            self._memory.lanes.finish()

    def named_parameters(
        self, trained_only: bool = False, *, names: Iterable[str] | None = None, as_given: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, value): new CPU copies of the master weights, in torch's parameter order, tied weights once.

        Default: all parameters except those of companions, in fp32. `trained_only`: without the parameters frozen at
        `Engine()`. `names`: only these. `as_given`: in the original dtypes. Quantized weights (`frozen_weights`) are
        dequantized. Collective, with equal arguments on all ranks.
        """
        self._settle("named_parameters")
        for info in self._infos_of("engine.named_parameters", names):
            if trained_only and not info.trainable:
                continue
            dtype = torch.float32
            if as_given:
                dtype = self._weights.dtypes[info.index]
            yield info.name, self._read(info, dtype)

    def weight_buckets(self, num_bytes: int, dtype: torch.dtype | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """Yield all weights by name, without companions, for a sampler: new CPU copies, as many at a time as fit
        `num_bytes` of host memory. A larger weight comes alone. Works on a parked engine. Drop a bucket before the next
        one. Collective.

        dtype: None: the original dtypes. Quantized weights (`frozen_weights`) are dequantized.
        """
        self._settle("weight_buckets")
        bucket: dict[str, torch.Tensor] = {}
        held = 0
        for info in self._weights.own_infos:
            own = dtype or self._weights.dtypes[info.index]
            size = info.numel * own.itemsize
            if bucket and held + size > num_bytes:
                yield bucket
                bucket, held = {}, 0
            bucket[info.name] = self._read(info, own)
            held += size
        yield bucket

    def _read(self, info: ParameterInfo, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return master weights in the parameter's shape. Collective."""
        return self._read_range(info, 0, info.numel, dtype).view(info.shape)

    def _read_range(
        self, info: ParameterInfo, begin: int, end: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        self._end_exchanges()  # a step may have run since the last request
        with self._recovery.working(), self.counters.preserve():
            return self._memory.store.values.read_range(info.index, begin, end, dtype)

    def edit(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters for changes in place, for merges, resets and averages:

            for name, value in engine.edit():
                value.mul_(0.5)

        Each value is an fp32 CPU copy of the master weights in the parameter's shape, and is written back when the loop
        continues. The moments stay unchanged. Collective, with equal arguments on all ranks; rank 0's values are
        written.

        names: parameter names, as in `named_parameters`; None: all except those of companions.

        Raises like `check_edit`, and ConfigError for non-finite values, before they are written. An edited frozen
        parameter is in every later checkpoint, also with `trained_only`, but one of a companion is in none.
        """
        wanted = self.check_edit(names)
        self._own_loop.refuse_during_step("engine.edit")
        self._settle(f"edit({', '.join(info.name for info in wanted)})")
        self.catch_up()  # an edit of the newest weights would not reach the older ones in a delayed step
        return self._edit_each(wanted)

    def check_edit(self, names: Iterable[str] | None = None) -> list[ParameterInfo]:
        """Check names for `edit`, and return the parameters that `edit` would yield. Changes nothing.

        Raises ConfigError for an unknown name, and for a parameter that cannot change: quantized (`frozen_weights`), or
        frozen and read from the model files at each use.
        """
        wanted = self._infos_of("engine.edit", names)
        has_files = self._memory.files is not None
        fixed = (info for info in wanted if info.is_quantized or (has_files and not info.trainable))
        if (info := next(fixed, None)) is not None:
            raise ConfigError(
                f"engine.edit cannot change {info.name}: it is stored quantized, or in the model's own files. Name "
                "other parameters, or set --offload.frozen_weights exact and --offload.parameters cpu."
            )
        return wanted

    def answering(self, values: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Context in which reads of these parameters from the model return copies of `values`, by parameter name.

        For code in other libraries that saves on one rank weights partitioned over several. Not collective.
        """
        return self._parameter_reads.answering(values)

    def _infos_of(self, call: str, names: Iterable[str] | None) -> list[ParameterInfo]:
        """Return parameters by name; None: all of the trained model. Raises ConfigError for an unknown name."""
        if names is None:
            return self._weights.own_infos
        wanted = list(names)
        infos = {info.name: info for info in self._weights.infos}
        unknown = next((name for name in wanted if name not in infos), None)
        if unknown is not None:
            raise ConfigError(f"{call}: the model has no parameter {unknown!r}{nearest(unknown, infos)}.")
        return [infos[name] for name in wanted]

    def _edit_each(self, infos: Iterable[ParameterInfo]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter and write it back. Other engine calls between two parameters are safe."""
        store, runner = self._memory.store, self._flow.runner
        for info in infos:
            self._wait_for_updates(f"edit of {info.name}")
            value = self._read(info)
            yield info.name, value
            self._wait_for_updates(f"edit of {info.name}")  # a step may have run in the caller's loop
            if num_wrong := value.numel() - int(value.isfinite().sum()):
                raise ConfigError(
                    f"engine.edit got {num_wrong} of {value.numel()} values of {info.name} that are not finite; no "
                    "value was written."
                )
            with self._recovery.working(), self.counters.preserve():
                store.values.write(info.index, tensor_reader(value), value.dtype, source=0)
                store.lanes.drain_updates()  # a disk failure is raised here
                if not info.trainable:
                    self._weights.changed.add(info.name)
                runner.weights_changed(each for each in self._weights.regions if info.index in each.parameters)

    @property
    def moments_bytes(self) -> int:
        """Bytes of all moments as `named_moments` yields them."""
        values = self._memory.store.values
        return sum(values.moments_bytes(info.index) for info in self._weights.infos if info.trainable)

    def named_moments(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield (name, optimizer state) for each trainable parameter, in the format of torch's optimizers: `step`, the
        number of updates as a 0-dim fp32 tensor, and new fp32 CPU copies of the moments, such as `exp_avg`, in the
        parameter's shape (`row_var` and `col_var` with a last, or next to last, dimension of 1). Empty before the first
        update of a parameter.

        names: parameter names, as in `named_parameters`; None: all. Raises ConfigError over several ranks, and for
        moments that are not fp32: `save_checkpoint` writes those.
        """
        wanted = [info for info in self._infos_of("engine.named_moments", names) if info.trainable]
        self._check_moments("read")
        self._settle("named_moments")
        for info in wanted:
            with self._recovery.working(), self.counters.preserve():
                num_steps, moments = self._memory.store.values.read_moments(info.index)
            if not num_steps:  # torch makes the state in the first update
                yield info.name, {}
                continue
            yield info.name, {"step": torch.tensor(float(num_steps))} | moments

    def load_moments(self, moments: Mapping[str, Mapping[str, torch.Tensor | float | None]]) -> None:
        """Set the optimizer states of parameters by name, as `named_moments` yields them or a torch optimizer has them.
        An empty state begins anew: zero moments, no updates yet. A state without `step` (torch's SGD) counts as one
        update. Collective, with equal arguments on all ranks.

        Raises ConfigError, before the first write, for an unknown name, missing, unknown or misshapen moments, and for
        states that are not empty over several ranks, or with moments that are not fp32.
        """
        infos = self._infos_of("engine.load_moments", moments)
        self._own_loop.refuse_during_step("engine.load_moments")
        if any(moments.values()):
            self._check_moments("written")
        # All states are checked before the first is written.
        states: list[tuple[ParameterInfo, int, dict[str, torch.Tensor]]] = []
        for info in infos:
            given = moments[info.name]
            num_steps = 0
            if given:
                num_steps = int(given.get("step", 1) or 0)
            tensors = {k: v for k, v in given.items() if isinstance(v, torch.Tensor) and k != "step"}
            rule_shapes = self._memory.store.values.moment_shapes(info.index)
            shapes = {key: tuple(value.shape) for key, value in tensors.items()}
            if given and shapes != rule_shapes:
                raise ConfigError(
                    f"the optimizer state of {info.name} has {_describe_shapes(shapes)}, and "
                    f"{self._weights.rules[info.rule].title} has {_describe_shapes(rule_shapes)}: give the rule with "
                    "which the state was made, or begin without a state."
                )
            states.append((info, num_steps, tensors))
        self._settle("load_moments")
        with self._recovery.working(), self.counters.preserve():
            for info, num_steps, tensors in states:
                self._memory.store.values.write_moments(info.index, num_steps, tensors)
            self._memory.lanes.drain_updates()

    def prune_moments(self, names: Iterable[str], share: float) -> None:
        """Set the smallest elements of the optimizer state to zero, in each array separately. ReLoRA, arXiv:2307.05695,
        section 3, uses shares of 0.99 and 0.999. Step counts stay unchanged. Collective, with equal arguments on all
        ranks.

        names: parameter names, as in `named_parameters`. share: fraction to clear, 0 to 1; 1 clears all. Raises
        ConfigError for an unknown name, and for a share below 1 with int8 moments.
        """
        wanted = self._infos_of("engine.prune_moments", names)
        self._own_loop.refuse_during_step("engine.prune_moments")
        self._settle(f"prune_moments({share})")
        with self._recovery.working(), self.counters.preserve():
            for info in wanted:
                self._memory.store.values.prune_moments(info.index, share)
            self._memory.lanes.drain_updates()

    def _check_moments(self, access: str) -> None:
        """Raise ConfigError if moments cannot be read or written for a single parameter."""
        values = self._memory.store.values
        trained = [info for info in self._weights.infos if info.trainable]
        planes = [plane for info in trained for plane in values.moment_planes(info.index)]
        size = self._memory.store.sharding.num_ranks
        why = ""
        if any(plane.dtype != torch.float32 for plane in planes):
            why = f"not fp32 ({self._weights.rules[0].title})"
        if size > 1:
            why = f"divided over {size} ranks"
        if why:
            raise ConfigError(
                f"the optimizer states were to be {access} by parameter, and are {why}: optimizer.save(folder) and "
                "optimizer.load(folder), or engine.save_checkpoint and engine.load_checkpoint, write and read them."
            )

    def weights_mark(self, *, whole: bool = False) -> str:
        """Return a fingerprint of the weights: 16 hexadecimal digits.

        The fingerprint covers each parameter's name and first 4096 fp32 master weights, or with `whole` all weights,
        read in blocks. Collective.
        """
        self._settle("weights_mark")
        hasher = xxhash.xxh64()
        for info in self._weights.infos:
            hasher.update(info.name.encode())
            end = info.numel
            if not whole:
                end = min(end, _MARK_ELEMENTS)
            for low in range(0, end, _BLOCK):  # or memory would grow with a parameter
                hasher.update(self._read_range(info, low, min(low + _BLOCK, end)).numpy().data)
        return hasher.hexdigest()

    def export(
        self,
        path: str | Path,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
        files: Mapping[str, bytes] | None = None,
        replace: bool = False,
        made: DerivedModel | None = None,
    ) -> None:
        """Write the model as a Hugging Face folder: the original configuration and safetensors files. Collective; rank
        0 writes. Weights are read piece by piece. A failed export leaves no folder. A model with a PEFT adapter is
        refused: `model.save_pretrained` writes the adapter.

        dtype: None: the dtype the device uses for each weight; float32: the master weights, bit for bit. Quantized
        weights (`frozen_weights`) are dequantized. shard_bytes: largest size of a weight file. files: extra files from
        rank 0, by name, for example the tokenizer. replace: overwrite an earlier export. made: export another model
        with weights computed from these, for example with a merged adapter; equal on all ranks.

        Raises, on all ranks, ConfigError or DiskError.
        """
        self._recovery.check_open()
        folder = self.comm.folder_of(path, of_model=True)
        self._flow.snapshot.check(trains=False)
        self._settle("export")
        with self._recovery.working(), self.counters.preserve():
            export_model(self._state, folder, dtype, shard_bytes, files, replace, made)

    def save_checkpoint(
        self, path: str | Path, meta: _Json = None, files: _Files = None, *, trained_only: bool = False
    ) -> None:
        """Write all states to a folder, to resume with any number of ranks and any placement. Collective. The previous
        checkpoint stays until the new one is complete. `load_checkpoint` returns `meta` (JSON). `files` (rank 0's, by
        name) are stored beside the model configuration, for example the tokenizer. `trained_only`: leave out parameters
        frozen at `Engine()`; only an engine with the same frozen weights can load the checkpoint. Required if frozen
        weights are quantized (`frozen_weights`) or in the model files.

        Raises, on all ranks, DiskError or ConfigError; training can continue after either.
        """
        options = {"copies": False, "trained_only": trained_only}
        with self._saving("save_checkpoint", path, meta, files, **options) as saving, self._recovery.working():
            saving.finish()

    def begin_checkpoint(
        self, path: str | Path, meta: _Json = None, files: _Files = None, *, trained_only: bool = False
    ) -> PendingCheckpoint:
        """Begin a `save_checkpoint` and return while the disk writes are in progress. States are first copied to spare
        host memory (the unused budget, or half the free memory without a budget); states without room there are written
        before the return. Training may continue. The checkpoint is complete when `finish` of the result returns.
        `finish` is collective, and must come before `close`. `is_done`: `finish` need not wait on this rank. `abort`
        cancels the checkpoint.

        Raises like `save_checkpoint`. Later disk errors are raised by `finish`, on all ranks.
        """
        return self._saving("begin_checkpoint", path, meta, files, copies=True, trained_only=trained_only)

    def _saving(self, name: str, path: str | Path, meta: _Json, files: _Files, **options: bool) -> PendingCheckpoint:
        self._own_loop.refuse_during_step(f"engine.{name}")
        self._settle(name)
        with ExitStack() as interrupted:  # an interrupt is raised as `working` ends, before the caller has it
            with self._recovery.working(), self.counters.preserve():
                decided = self._steps.decisions
                saving = interrupted.enter_context(
                    PendingCheckpoint(self._state, self.comm.folder_of(path), decided, meta or {}, files, **options)
                )
            interrupted.pop_all()
        return saving

    def load_checkpoint(self, path: str | Path, *, reset: bool = False) -> dict[str, Any]:
        """Load all states from a checkpoint folder and return the saved meta. Collective. A torn engine is sound
        afterwards. `reset`: ignore optimizer states of another update rule or state dtype; the states start anew.

        Raises, on all ranks, CheckpointError for a damaged folder (with damaged data the engine is torn), and
        ConfigError for another model, or, without `reset`, another rule.
        """
        self._recovery.check_open()
        agree_on_pass(self.comm, RankBatch("load_checkpoint"))
        self._recovery.recover()
        self._memory.lanes.finish()
        with self._recovery.working(), ExitStack() as opened:
            opened.enter_context(self.counters.preserve())
            with share_failure(self.comm, "opening of the checkpoint"):
                reader = opened.enter_context(Reader(self.comm.folder_of(path), in_part=self.comm.size > 1))
                anew = check_contents(self._state, reader, may_reset=reset)
            loader = StateLoader(self._state, reader, anew=anew)
            copy_missing_files(self.comm, reader, reader.files_of(loader.spans()))
            if anew and self.comm.rank == 0:
                warn(f"{path} has states of another update rule: the optimizer states are reset.")
            # From here on the states change, so an error leaves a mixture of two steps.
            self._recovery.torn = f"{path} was only partly read"
            self._steps.method.forget()
            self._memory.store.forgive()
            self._memory.lanes.forget_failures()
            with share_failure(self.comm, "reading of the checkpoint"):
                decided, meta = loader.load()
                self._memory.lanes.drain_updates()  # a failed disk write fails the load
            self._flow.runner.weights_changed()
            self._memory.slots.compute_after_resident()
        self._steps.restore_decisions(decided)
        self._memory.lanes.close_step()  # the writes so far belong to no step that could be given up
        self._recovery.mark_sound()
        self._own_loop.forget()
        return meta

    def catch_up(self) -> None:
        """Compute with the newest weights from now on. Collective.

        For the end of a run with delayed updates: between steps, an evaluation uses the weights of the next step.
        """
        self._settle("catch_up")
        with self._recovery.working(), self.counters.preserve():
            self._weights.updates.catch_up()
            self._flow.runner.weights_changed()


def _describe_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "no moments"
