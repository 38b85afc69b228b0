"""The engine: one training step over streamed units."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import xxhash
from torch import nn

from offload.arguments import check_types
from offload.checkpoint.reader import Reader
from offload.checkpoint.spread import copy_missing_files
from offload.distributed.comm import Comm, share_failure
from offload.distributed.joining import open_comm
from offload.engine.analysis import Analysis
from offload.engine.assemble import assemble
from offload.engine.checkpoints import PendingCheckpoint, check_contents, load_states, spans_to_read
from offload.engine.compile_wrappers import remove_compile_wrappers
from offload.engine.exporting import DerivedModel, export_model
from offload.engine.loss.batch import Batch
from offload.engine.loss.batch_agreement import agree_on_pass
from offload.engine.loss.loss import LossFunction
from offload.engine.methods.result import StepResult
from offload.engine.own_loop import OwnLoop
from offload.engine.parameter_reads import ParameterReads
from offload.engine.steps import Steps
from offload.engine.units.activation_offload import GRAPHS
from offload.engine.units.residency import refuse_copy, refuse_owned, refuse_sparse
from offload.errors import ConfigError, nearest, warn
from offload.files.safetensors_file import tensor_reader
from offload.files.sources import SHARD_BYTES, Fill
from offload.lanes.timeline import Span
from offload.layout.codecs import Codec
from offload.layout.regions import ParameterInfo
from offload.machine.limits import use_share_of_cores
from offload.optim.rule import UpdateRule
from offload.planning.plan import describe_frozen_weights, describe_links
from offload.planning.settings import Settings, with_settings
from offload.retired import without_retired
from offload.tiers.counters import Counters
from offload.tiers.placement import Placement

_Json = Mapping[str, Any] | None
_Files = Mapping[str, bytes] | None
_MARK_ELEMENTS = 4096
"""Elements per parameter that enter a `weights_mark`."""
_BLOCK = 1 << 22
"""Elements read at a time when all are read."""


class Engine:
    """Trainer for `model`, with the states on the tiers in `placement`.

    `placement` is a Placement or a mapping of Placement fields. The other keywords are `Settings` fields; `settings`
    passes them as one object.

    The engine consumes the model: the parameters move into the engine, unit by unit. `fill(name, module)`, if given, is
    called right before the engine takes a unit's parameters. It writes the parameters, or returns the sources from
    which they are read piece by piece, so no parameter has to be in memory as a whole. Over several ranks one rank
    calls `fill` for each unit. Without `fill` all ranks receive rank 0's weights. `quantized`: codecs for parameters
    quantized in the model files (`BuiltModel.quantized`). `analysis`: `analysis` of an earlier engine
    over the same model with the same settings; the first step then needs no trial runs.

    Over several ranks (from `comm`, the process group, or the torchrun variables) every call is collective: all ranks
    make the same calls in the same order, each with its own rows.
    """

    @with_settings
    def __init__(
        self,
        model: nn.Module,
        optimizer: UpdateRule | None = None,
        placement: Placement | Mapping[str, Any] | None = None,
        *,
        fill: Fill | None = None,
        quantized: Mapping[nn.Parameter, Codec] | None = None,
        comm: Comm | None = None,
        analysis: Analysis | None = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        own = {"model": model, "fill": fill, "quantized": quantized, "comm": comm, "analysis": analysis}
        check_types(Engine.__init__, {**own, "settings": settings})
        positional = {"optimizer": optimizer, "placement": placement}
        options |= {key: value for key, value in positional.items() if value is not None}
        settings = replace(settings or Settings(), **without_retired(options))
        if torch.is_inference_mode_enabled():
            raise ConfigError(
                "Engine() was called under torch.inference_mode, where training is not possible: call it outside."
            )
        refuse_owned(model)
        refuse_sparse(model)
        model = remove_compile_wrappers(model, settings.compile)
        self.model, self.optimizer, self.counters = model, settings.optimizer, Counters()
        self._owned_comm = open_comm(device=settings.device) if comm is None else None
        self.comm = comm or self._owned_comm or Comm()
        use_share_of_cores(self.comm.local_rank, self.comm.local_gpus)
        self.comm.claim(self)
        try:
            self._state = assemble(model, settings, self.counters, fill, self.comm, quantized or {})
        except BaseException as error:
            self.comm.release()
            if self._owned_comm is not None:
                self._owned_comm.close(error)
            raise
        self.device = self._state.device.torch_device
        self._recovery = self._state.recovery
        self._steps = Steps(self._state, self.counters, settings)
        self._own_loop = OwnLoop(self._state, self._steps)
        self._parameter_reads = ParameterReads(self._state, self.counters, self._own_loop)
        self._recovery.on_give_up(
            self._steps.trial_runs.discard_incomplete, self._state.spare_memory.give_up, self._own_loop.forget
        )
        if analysis is not None:
            try:
                self._steps.check_analysis(analysis)
                self._steps.adopt(analysis)
            except BaseException:
                self.close(restore=True)
                raise

    def __repr__(self) -> str:
        return f"<Engine: {type(self.optimizer).__name__} over {type(self.model).__name__} on {self.device}>"

    def stay(self) -> None:
        """Keep the engine alive as long as the model, even without other references. `engine_of` finds the engine."""
        self._state.ownership.engine = self

    # -- a step ----------------------------------------------------------------------------------------------

    def step(self, batch: Batch, loss_fn: LossFunction | None = None) -> StepResult:
        """Train on this rank's rows of a batch: forward, backward, update.

        `batch`: the model's forward arguments by name; labels unshifted, -100 is ignored. `loss_fn(outputs, batch)`
        computes the loss if the model has none, and may use batch entries unknown to the model. It returns a 0-dim
        tensor; with MeZO, any number to minimize.
        """
        self._recovery.check_usable()
        if not torch.is_grad_enabled():
            raise ConfigError(
                "engine.step was called with gradients disabled (torch.no_grad or torch.inference_mode) and cannot "
                "train: call it outside, or call engine.evaluate for a loss."
            )
        self._state.snapshot.check(trains=True)
        self._own_loop.refuse_during_step("engine.step")
        self._own_loop.forget()  # a forward that had no backward
        with self._recovery.working():
            return self._steps.step(batch, loss_fn)

    def evaluate(self, batch: Batch, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """Return the loss `step` would report, in eval mode and without side effects.

        Computes no gradients; counters and random generators stay unchanged.
        """
        with torch.inference_mode(False):  # inference tensors cannot be used in later steps
            self._recovery.check_usable()
            self._state.snapshot.check(trains=False)
            with self._recovery.working():
                return self._steps.evaluate(batch, loss_fn)

    def replay(self, records: Iterable[Any]) -> None:
        """Repeat the steps of a MeZO run bit for bit, from the run's initial weights. Collective.

        `records`: in order, `measured` from `step` results, lines of the run's metrics.jsonl, or (step, seed, slopes).
        Needs no batch and runs no forward.

        Raises ConfigError for another rule, other settings, or a missing step. A skipped step needs a record too: the
        metrics.jsonl line, or (step, 0, ()) without slopes.
        """
        self._settle("replay")
        self._own_loop.refuse_during_step("engine.replay")
        with self.counters.preserve():
            self._steps.replay(records)
            self._state.runner.weights_changed()

    def backward(self, loss: torch.Tensor) -> None:
        """For own loops: add the gradients of `loss`, without scaling."""
        self._recovery.check_usable()
        self._state.snapshot.check(trains=True)
        self._own_loop.backward(loss)

    def grad_norm(self) -> float:
        """For own loops: return the gradient norm since the last update, over all ranks, before clipping.

        The gradients are then complete: call `update` next.
        """
        self._recovery.check_usable()
        return self._own_loop.grad_norm()

    def update(self, max_grad_norm: float | None = None) -> StepResult:
        """For own loops: clip, update, and return the mean loss since the last update, over all ranks.

        max_grad_norm: clipping norm for this step instead of the engine's; 0: no clipping. A plain `loss.backward()`
        can replace `backward`; the loss in the result is then NaN, because the engine does not know the loss.
        """
        self._recovery.check_usable()
        return self._own_loop.update(max_grad_norm)

    def zero_grad(self) -> None:
        """For own loops: drop the gradients since the last update, if any. Collective."""
        self._recovery.check_usable()
        self._own_loop.zero_grad()

    def finish(self) -> None:
        """Wait until all work is done: all updates are written, and the first weights for the next step are on the
        device. No other call needs this one; use it to time a step.

        Raises TornError if an update has failed.
        """
        self._recovery.check_usable()
        with self._recovery.working():
            self._state.updates.flush()
            self._state.lanes.finish()
        self._recovery.check_sound()

    @property
    def max_grad_norm(self) -> float | None:
        """Clipping norm, unless `update` receives another one; None: no clipping."""
        return self._state.updates.max_norm

    @property
    def clip(self) -> str:
        """Clipping mode: deferred or speculative; auto until the first steps have decided."""
        return self._state.updates.clip

    @property
    def lr(self) -> float:
        """Learning rate for the next update. Set between steps, equal on all ranks."""
        return self._steps.method.lr

    @lr.setter
    def lr(self, value: float) -> None:
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"engine.lr was set to {value!r}; it must be a number, finite and at least 0.")
        self._steps.method.lr = value

    def tune(self, settings: Mapping[str, Any] | None = None, decays: Mapping[str, float] | None = None) -> None:
        """Change update rule settings and weight decays, from the next update on. Collective.

        `settings`: only the rule's `steered` settings, for example `betas` and `momentum`. `decays`: weight decay by
        parameter name. Call between steps, or before `update`.
        """
        settings, decays, rule = dict(settings or {}), dict(decays or {}), self.optimizer
        refused = next((key for key in settings if key not in rule.steered), None)
        if refused is not None or not rule.has_gradients:
            raise ConfigError(
                f"engine.tune cannot change {refused or 'weight decays'}: besides the learning rate, {rule.title} lets "
                f"only {', '.join(rule.steered) or 'no setting'} change between steps."
            )
        self._recovery.check_usable()
        agree_on_pass(self.comm, f"tune({settings}, {decays})")
        untyped_rule: Any = rule
        changed = replace(untyped_rule, **settings)
        self._state.updates.tune(changed, decays)
        self.optimizer = changed

    @property
    def groups(self) -> list[tuple[float, float, list[str]]]:
        """Groups of trainable parameters with equal updates: (learning rate multiplier, weight decay, parameter names).

        Groups with the engine's own learning rate come first.
        """
        names_by_group: dict[tuple[float, float], list[str]] = {}
        for info in self._state.updates.infos:
            if info.trainable:
                names_by_group.setdefault((info.lr_scale, info.weight_decay), []).append(info.name)
        return [(*group, names) for group, names in sorted(names_by_group.items(), key=lambda item: item[0][0] != 1.0)]

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.comm.size

    @property
    def num_steps(self) -> int:
        """Number of completed steps, including those before a loaded checkpoint."""
        return self._state.runner.step_number

    @property
    def prefetch(self) -> int:
        """Least number of units to prefetch; spare device memory allows more."""
        return self._state.plan.ahead

    @property
    def updates_on(self) -> str:
        """Device for updates of host states: cpu, device, or both."""
        return self._state.plan.update

    @property
    def head_chunks(self) -> int:
        """Number of logit chunks in the last loss."""
        return self._steps.losses.num_chunks

    @property
    def compiled_graphs(self) -> int:
        """Number of graphs built by torch.compile so far, from blocks; 0 with `compile: never`."""
        return self._state.runner.stages.num_graphs

    @property
    def compiled_classes(self) -> frozenset[type]:
        """Block classes that ran compiled, without a refusal."""
        return self._state.runner.stages.compiled

    @property
    def pins(self) -> bool:
        """True if host memory for transfers is registered with the device driver, up to the driver's limit."""
        return self._state.store.pinned_bytes > 0

    @property
    def overlaps(self) -> bool:
        """True if copies and updates run beside compute."""
        return self._state.lanes.overlap

    @property
    def analysis(self) -> Analysis:
        """Results of all trial runs so far: a JSON value for `Engine(analysis=...)`.

        Complete after the first step. With sequence tiles, another engine repeats the recording.
        """
        return self._steps.analysis

    @property
    def spans(self) -> list[Span]:
        """Work on every lane in the last step."""
        return self._steps.method.spans

    def resolve_clip(self, tokens: int) -> str:
        """Decide `clip: auto` for steps with `tokens` tokens on this rank, and return the current mode.

        Deferred if updates are short enough to hide behind a forward, or if one of the first eight steps is clipped;
        otherwise speculative.
        """
        self._recovery.check_open()
        return self._steps.resolve_clip(tokens)

    # -- states: copies, edits, exports, checkpoints. Each call waits for earlier updates. -----------------------------

    def _settle(self, operation: str) -> None:
        """Wait for all pending updates before the host reads the states. Collective."""
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
        """Yield (name, value): new CPU copies of the master weights, in torch's parameter order, tied weights once.

        Default: all parameters, in fp32. `trained_only`: without the parameters frozen at `Engine()`. `names`: only
        these. `as_given`: in the original dtypes. Quantized weights (`frozen_weights`) are dequantized. Collective,
        with equal arguments on all ranks.
        """
        self._settle("named_parameters")
        for info in self._infos_of("engine.named_parameters", names):
            if info.trainable or not trained_only:
                yield info.name, self._read(info).to(self._state.dtypes[info.index] if as_given else torch.float32)

    def _read(self, info: ParameterInfo, span: tuple[int, int] | None = None) -> torch.Tensor:
        """Return fp32 master weights in the parameter's shape, or a flat range `span` of elements. Collective."""
        if self.comm.size > 1:  # a step may have run since the last request
            self._state.lanes.finish()
        with self._recovery.working(), self.counters.preserve():
            values = self._state.store.values
            return values.read(info.index) if span is None else values.read_range(info.index, *span)

    def edit(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters for changes in place, for merges, resets and averages:

            for name, value in engine.edit():
                value.mul_(0.5)

        Each value is an fp32 CPU copy of the master weights in the parameter's shape, and is written back when the loop
        continues. The moments stay unchanged. Collective, with equal arguments on all ranks; rank 0's values are
        written.

        names: parameter names, as in `named_parameters`; None: all.

        Raises like `check_edit`, and ConfigError for non-finite values, before they are written. An edited frozen
        parameter is in every later checkpoint, also with `trained_only`.
        """
        wanted = self.check_edit(names)
        self._own_loop.refuse_during_step("engine.edit")
        self._settle(f"edit({', '.join(info.name for info in wanted)})")
        self.catch_up()
        return self._edit_each(wanted)

    def check_edit(self, names: Iterable[str] | None = None) -> list[ParameterInfo]:
        """Check names for `edit`, and return the parameters that `edit` would yield. Changes nothing.

        Raises ConfigError for an unknown name, and for a parameter that cannot change: quantized (`frozen_weights`), or
        frozen and read from the model files at each use.
        """
        wanted = self._infos_of("engine.edit", names)
        has_files = self._state.files is not None
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
        """Return parameters by name; None: all. Raises ConfigError for an unknown name."""
        infos = {info.name: info for info in self._state.infos}
        wanted = list(infos if names is None else names)
        unknown = next((name for name in wanted if name not in infos), None)
        if unknown is not None:
            raise ConfigError(f"{call}: the model has no parameter {unknown!r}{nearest(unknown, infos)}.")
        return [infos[name] for name in wanted]

    def _edit_each(self, infos: Iterable[ParameterInfo]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter and write it back. Other engine calls between two parameters are safe."""
        state = self._state
        for info in infos:
            self._settle(f"edit of {info.name}")
            value = self._read(info)
            yield info.name, value
            self._settle(f"edit of {info.name}")
            if num_wrong := value.numel() - int(value.isfinite().sum()):
                raise ConfigError(
                    f"engine.edit got {num_wrong} of {value.numel()} values of {info.name} that are not finite; no "
                    "value was written."
                )
            with self._recovery.working(), self.counters.preserve():
                state.store.values.write(info.index, tensor_reader(value), value.dtype, source=0)
                state.lanes.drain_updates()  # a disk failure is raised here
                if not info.trainable:
                    state.changed.add(info.name)
                state.runner.weights_changed(region for region in state.regions if info.index in region.parameters)

    @property
    def moments_bytes(self) -> int:
        """Bytes of all moments as `named_moments` yields them."""
        values = self._state.store.values
        return sum(values.moments_bytes(info.index) for info in self._state.infos if info.trainable)

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
                num_steps, moments = self._state.store.values.read_moments(info.index)
            state = {"step": torch.tensor(float(num_steps))} | moments
            yield info.name, state if num_steps else {}

    def load_moments(self, moments: Mapping[str, Mapping[str, torch.Tensor | float | None]]) -> None:
        """Set the optimizer states of parameters by name, as `named_moments` yields them or a torch optimizer has them.
        An empty state begins anew. A state without `step` (torch's SGD) counts as one update.

        Raises ConfigError, before the first write, for an unknown name, missing, unknown or misshapen moments, over
        several ranks, and for moments that are not fp32.
        """
        infos = self._infos_of("engine.load_moments", moments)
        self._own_loop.refuse_during_step("engine.load_moments")
        self._check_moments("written")
        states: list[tuple[ParameterInfo, int, dict[str, torch.Tensor]]] = []
        for info in infos:
            num_steps = int(moments[info.name].get("step", 1) or 0) if moments[info.name] else 0
            tensors = {k: v for k, v in moments[info.name].items() if isinstance(v, torch.Tensor) and k != "step"}
            rule_shapes = self._state.store.values.moment_shapes(info.index)
            shapes = {key: tuple(value.shape) for key, value in tensors.items()}
            if moments[info.name] and shapes != rule_shapes:
                raise ConfigError(
                    f"the optimizer state of {info.name} has {_describe_shapes(shapes)}, and "
                    f"{self._state.rules[info.rule].title} has {_describe_shapes(rule_shapes)}: give the rule with "
                    "which the state was made, or begin without a state."
                )
            states.append((info, num_steps, tensors))
        self._settle("load_moments")
        with self._recovery.working(), self.counters.preserve():
            for info, num_steps, tensors in states:
                self._state.store.values.write_moments(info.index, num_steps, tensors)
            self._state.lanes.drain_updates()

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
                self._state.store.values.prune_moments(info.index, share)
            self._state.lanes.drain_updates()

    def _check_moments(self, access: str) -> None:
        """Raise ConfigError if moments cannot be read or written for a single parameter."""
        size, title = self._state.comm.size, self._state.rules[0].title
        narrow = any(
            plane.dtype != torch.float32
            for info in self._state.infos
            if info.trainable
            for plane in self._state.store.values.moment_planes(info.index)
        )
        if size > 1 or narrow:
            why = f"divided over {size} ranks" if size > 1 else f"not fp32 ({title})"
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
        for info in self._state.infos:
            hasher.update(info.name.encode())
            end = info.numel if whole else min(info.numel, _MARK_ELEMENTS)
            for begin in range(0, end, _BLOCK):
                hasher.update(self._read(info, (begin, min(begin + _BLOCK, end))).numpy().data)
        return hasher.hexdigest()

    @property
    def graphs_on_host_bytes(self) -> int:
        """Host memory in bytes for saved autograd graphs (`Placement(graphs="cpu")`)."""
        return self._state.host.allocations.get(GRAPHS, 0)

    @property
    def head_chunk_bytes(self) -> int | None:
        """Limit for logits in memory at a time, in bytes as fp32; None: no limit."""
        return self._steps.losses.chunk_bytes

    @property
    def allocations(self) -> list[tuple[str, str, int]]:
        """Memory reservations on all tiers: (tier, name, bytes)."""
        if self._recovery.is_idle:
            with self._recovery.working():
                self._state.runner.collect()
        ledgers = (self._state.device.ledger, self._state.host, self._state.nvme_ledger)
        return [(ledger.tier, name, size) for ledger in ledgers for name, size in ledger.allocations.items()]

    @property
    def update_devices(self) -> Mapping[str, torch.device]:
        """Compute device for the update of each parameter, by name."""
        state = self._state
        on_host, devices = state.plan.updated_on_host(state.regions), (state.device.torch_device, torch.device("cpu"))
        return {info.name: devices[info.index in on_host] for info in state.infos}

    @property
    def told_updates(self) -> str:
        """Text about the update devices of host states; empty if all updates run on the host."""
        return self._state.plan.describe_updates(self._state.regions)

    @property
    def told_tiles(self) -> str:
        """Text about split units and sequence tiles due to little device memory; empty if none."""
        return ".\n".join(filter(None, (self._state.splitting.description, self._state.runner.stages.description)))

    @property
    def told_frozen_weights(self) -> str:
        """Text about frozen weights that are quantized or read from the model files; empty if none."""
        return describe_frozen_weights(self._state.infos, self._state.regions, self._state.plan.residence)

    @property
    def told_links(self) -> str:
        """Text about quantized transfers of weights and gradients, and their approximations; empty if none."""
        return describe_links(self._state.regions, self._state.plan.residence.sharding)

    @property
    def resting(self) -> frozenset[str]:
        """Names of host allocations the device never copies from; they are not pinned."""
        return self._state.plan.residence.resting_labels(self._state.regions)

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
        0 writes. Weights are read piece by piece. A failed export leaves no folder.

        dtype: None: the dtype the device uses for each weight; float32: the master weights, bit for bit. Quantized
        weights (`frozen_weights`) are dequantized. shard_bytes: largest size of a weight file. files: extra files from
        rank 0, by name, for example the tokenizer. replace: overwrite an earlier export. made: export another model
        with weights computed from these, for example with a merged adapter; equal on all ranks.

        Raises, on all ranks, ConfigError or DiskError.
        """
        self._recovery.check_open()
        self._state.snapshot.check(trains=False)
        self._settle("export")
        with self._recovery.working(), self.counters.preserve():
            export_model(self._state, Path(path), dtype, shard_bytes, files or {}, replace, made)

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
                    PendingCheckpoint(self._state, Path(path), decided, meta or {}, files, **options)
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
        agree_on_pass(self.comm, "load_checkpoint")
        self._recovery.recover()
        self._state.lanes.finish()
        with self._recovery.working(), ExitStack() as opened:
            opened.enter_context(self.counters.preserve())
            with share_failure(self.comm, "opening of the checkpoint"):
                reader = opened.enter_context(Reader(Path(path), in_part=self.comm.size > 1))
                anew = check_contents(self._state, reader, may_reset=reset)
            copy_missing_files(self.comm, reader, reader.files_of(spans_to_read(self._state, reader, anew=anew)))
            if anew and self.comm.rank == 0:
                warn(f"{path} has states of another update rule: the optimizer states are reset.")
            self._recovery.torn = f"{path} was only partly read"
            self._steps.method.forget()
            self._state.store.forgive()
            self._state.lanes.forget_failures()
            with share_failure(self.comm, "reading of the checkpoint"):
                decided, meta = load_states(self._state, reader, anew=anew)
                self._state.lanes.drain_updates()  # a failed disk write fails the load
            self._state.runner.weights_changed()
            self._state.slots.compute_after_resident()
        self._steps.restore_decisions(decided)
        self._state.lanes.close_step()
        self._recovery.mark_sound()
        self._own_loop.forget()
        return meta

    def catch_up(self) -> None:
        """Compute with the newest weights from now on. Collective.

        For the end of a run with delayed updates: between steps, an evaluation uses the weights of the next step.
        """
        self._settle("catch_up")
        with self._recovery.working(), self.counters.preserve():
            self._state.updates.catch_up()
            self._state.runner.weights_changed()

    # -- the end ---------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._recovery.is_closed

    def close(self, restore: bool = False) -> None:
        """Free every tier.

        With `restore` the model gets the weights back in the original dtype. Otherwise the model has no weights, and
        cannot run, be saved or be trained again.
        """
        if self._recovery.is_closed:
            return
        if self.comm.size == 1:
            self._recovery.recover()
        error = sys.exc_info()[1]  # error in the block for which this call cleans up
        is_sound = error is None and not self._recovery.torn and self._state.updates.failure() is None
        if is_sound and (restore or (self.comm.size > 1 and self.comm.is_alive)):
            self._settle(f"close(restore={restore})")
        if self._owned_comm is not None and not is_sound:
            self._owned_comm.close(error)
        self._own_loop.close()
        self._steps.method.free()
        self._state.close(restore and (is_sound or self.comm.size == 1))
        self.comm.release()
        if self._owned_comm is not None:
            self._owned_comm.close()

    def __enter__(self) -> Engine:
        self._recovery.check_open()
        return self

    def __exit__(self, _type: Any, error: BaseException | None, _trace: Any) -> None:
        """Close without `restore`. An error in the block takes precedence over an error in `close`."""
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Closing the engine failed as well: {failure!r}")

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        refuse_copy("pickle (torch.save) or copy.deepcopy")


def _describe_shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "no moments"
