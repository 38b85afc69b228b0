"""Build a training run from the configuration: architecture, data, model, engine, initial states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from xxhash import xxh3_64_hexdigest

from offload.accelerators import Accelerator, has_bf16, own_accelerator
from offload.amounts import Tell, tell_nobody, unmeasured
from offload.app.config.config import Config
from offload.app.config.sections import ModelSection
from offload.app.environment import integrated_note
from offload.app.hf.companion import beside, companion_at, rope_limits
from offload.app.hf.model_object import ModelObject
from offload.app.hf.models import (
    BuiltModel,
    ModelKind,
    build_model,
    check_sequence_length,
    freeze_for_evaluation,
    is_decoder,
    is_found,
    is_pretrained,
    locate,
    max_positions,
    model_kind,
    quiet_transformers,
    vocab_size,
)
from offload.app.hf.quantized import quantization_method, quantization_settings
from offload.app.stored_model import attached_names, rebuild_model
from offload.app.training.decisions import FROM_NUM_STEPS, decide, resolve, resolve_rows, resolve_saved_rows
from offload.app.training.isolation import isolate
from offload.app.training.objectives import OBJECTIVES, BuildModel, Objective
from offload.app.training.parts import MeasuredFill, build_engine, describe_differences, describe_length, stages
from offload.app.training.planner import PlacementDecision, decide_placement, planned_advice
from offload.app.training.ranks import rank_0_first
from offload.app.training.resume import ResumePoint, no_intact_checkpoint
from offload.app.training.run_folder import LONG_BYTES
from offload.app.training.task import TASKS, Task
from offload.app.training.trainable import (
    BuildBase,
    DiskNeeds,
    TrainablePart,
    load_architecture,
    refuse_growth,
    trainable_class,
)
from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_failure
from offload.engine.companions import without_companions
from offload.engine.engine import Engine
from offload.errors import (
    CheckpointError,
    ConfigError,
    DoesNotFitError,
    common,
    first_names,
    format_bytes,
    untrainable_error,
)
from offload.layout.planes import DTYPES

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """A built training run.

    - config: configuration with every decision possible before the first step. Those in `setup` and `planned` have
      fewer.
    - files: files of the export beside the model by name, on rank 0: the tokenizer's or processor's, and the
      objective's.
    - extra_files: further files for each checkpoint.
    - meta: run position from the checkpoint to resume from. None: a new run.
    - build_base: builds the initial model again.
    - build_other: builds another model for the loss again.
    - disk_needs: bytes needed on the disk with the run folder.
    """

    config: Config
    setup: RunSetup
    planned: PlacementDecision
    data: Task
    objective: Objective
    engine: Engine
    files: Mapping[str, bytes]
    extra_files: Mapping[str, bytes]
    meta: Mapping[str, Any] | None
    build_base: BuildBase
    build_other: BuildModel
    disk_needs: DiskNeeds


class RunSetup(NamedTuple):
    """Run settings and architecture, before data preparation."""

    config: Config
    """Settings with the decisions from machine and model."""
    architecture: PreTrainedConfig
    """Architecture with an embedding row for each added token."""
    model_kind: ModelKind
    trainable: TrainablePart
    grows: bool
    """True if embedding rows are added."""

    @classmethod
    def read(
        cls,
        start: ResumePoint,
        user_model: ModelObject | None = None,
        *,
        accelerator: Accelerator | None,
        num_ranks: int,
    ) -> RunSetup:
        """Read the architecture and check the settings against it.

        `user_model`: a model already made in Python. `num_ranks`: of all machines. Raises ConfigError and
        MissingLibraryError.
        """
        quiet_transformers()
        torch.manual_seed(start.config.run.seed)  # before anything draws a number
        if user_model is None:
            architecture = load_architecture(start)
            kind = model_kind(architecture)
        else:
            architecture = user_model.architecture()
            kind = user_model.resolve_kind(architecture)
        method = start.config.train.method
        if method != "sft" and kind.auto is None:
            raise ConfigError(
                f"train.method is {method}, but the given model is not a transformers model, whose outputs have "
                "logits: give a transformers model, or train.method sft."
            )
        if (kind.name == "embedding") != (method == "contrastive"):
            raise ConfigError(
                f"the given model is a {kind.name} one, but train.method is {method}: contrastive needs a model of "
                "hidden states (AutoModel), and the other methods one with a head."
            )
        if (kind.name == "reward") != (method == "reward"):
            raise ConfigError(
                f"the model scores texts (num_labels 1), but train.method {method} needs a language model: set "
                "--train.method reward, or --model.path to a language model."
            )
        if method in ("dpo", "orpo") and kind.name != "causal":
            raise ConfigError(
                f"train.method is {method}, but the model is a {kind.name} one: only causal language models learn "
                "preferences between answers this way. Set --train.method reward to score answers, or give a causal "
                "model."
            )
        most = max_positions(architecture)
        config = resolve(
            start.config,
            has_accelerator=accelerator is not None,
            has_bf16=has_bf16(accelerator),
            max_positions=most,
            is_decoder=is_decoder(architecture),
            num_ranks=num_ranks,
        )
        check_sequence_length(most, int(config.data.sequence_length or 0))
        trainable = choose_trainable_part(config, architecture, kind, start)
        num_rows = vocab_size(architecture)  # without the rows added below
        has_weights = bool(start.folders) and not config.lora.adapts  # the checkpoint has all weights
        grows = not has_weights and user_model is None and TASKS["rows"].grow_vocabulary(config, architecture)
        if config.lora.adapts:
            refuse_growth(vocab_size(architecture), num_rows)
        return cls(config, architecture, kind, trainable, grows)

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.architecture)

    @property
    def rope_limit(self) -> int | None:
        """See `TaskKind.build`."""
        return rope_limits(self.config, self.architecture)

    def objective(self, config: Config, data: Task) -> Objective:
        """Return the objective, whose loss may need `with_companions`. Raises ConfigError."""
        kind = OBJECTIVES[config.train.method]
        return kind.of(config, self.model_kind.name, data.tokenizer, self.vocab_size)

    def with_companions(self, config: Config, objective: Objective, built: BuiltModel, build: BuildModel) -> BuiltModel:
        """Return the prepared model with those beside it that the loss needs, and give the objective this loss.

        Raises ConfigError.
        """
        kind = OBJECTIVES[config.train.method]
        companions = kind.companions(config, built.model, build)
        objective.loss = kind.loss_over(config, built.model, companions, self.vocab_size) or objective.loss
        for name, companion in companions.items():
            built = beside(built, name, companion)
        return built


def make_run(
    start: ResumePoint,
    comm: Comm,
    say: Say,
    note: Say,
    user_model: ModelObject | None = None,
    doing: Tell = tell_nobody,
) -> Run:
    """Build architecture, data, model and engine in this order. Each stage checks as much as possible first.
    Collective.

    - say: prints a line on rank 0.
    - note: shows a message once, from any rank.
    - user_model: a model to use instead of the configured one.
    - doing: shows the current work and its amount.

    Raises OffloadError.
    """
    resumes = bool(start.folders)
    with share_failure(comm, "reading of the architecture"):
        accelerator = own_accelerator(start.config.offload.device)
        setup = RunSetup.read(start, user_model, accelerator=accelerator, num_ranks=comm.size)
    build = _Build(start, comm, say, note, user_model, doing, accelerator, setup)
    asked = setup.config
    if resumes:  # by the rows of the earlier run: other rows would end at the comparison below
        asked = resolve_saved_rows(asked, start.data)
    data = build.prepare_data(asked)
    comm.agree("the training data", data.state_dict())  # each rank has read a disk of its own
    if resumes:
        with share_failure(comm, "comparison of the data"):
            data.check_state(start.data)
    config = resolve_rows(asked, data, resumes=resumes)
    train = config.train
    if train.steps and train.epochs and config.origin("train.steps") != "resolved":
        say(f"note: train.steps is {train.steps}, and overrides train.epochs, {train.epochs:g}: leave one of them out.")
    doing("making the model and its plan", unmeasured)
    # The plan before the engine, and the engine before the states of a checkpoint: these go into the engine's memory.
    model = build.make_model(config, data)
    planned = decide_placement(config, setup.architecture, data, comm, say, note)
    open_frozen = partial(build.open_frozen, planned)
    model.objective.measure_others(planned.config, open_frozen, data, comm, start.folders, say)
    opened = build.open_engine(planned, model.built)
    meta = load_start(start, opened.engine, say)
    # Only the model with its weights can tell.
    final, rows = build.keep_documents_apart(asked, planned.config, data, opened.engine)
    return Run(
        config=final,
        setup=setup,
        planned=planned,
        data=rows,
        objective=model.objective,
        engine=opened.engine,
        files=model.files,
        extra_files={**attached_names(model.files), **opened.files},
        meta=meta,
        build_base=partial(build.build_base, final),
        build_other=partial(build.build_other, final),
        disk_needs=opened.disk_needs,
    )


class _Model(NamedTuple):
    """A model, unfilled."""

    built: BuiltModel
    objective: Objective
    files: Mapping[str, bytes]
    """As for `Run`."""


class _Opened(NamedTuple):
    """An engine, and what the model alone could tell: the engine takes it apart."""

    engine: Engine
    files: Mapping[str, bytes]
    """Further checkpoint files."""
    disk_needs: DiskNeeds


@dataclass(frozen=True)
class _Build:
    """Steps of `make_run`, with the arguments. Collective, except `build_base` and `build_other`."""

    start: ResumePoint
    comm: Comm
    say: Say
    note: Say
    user_model: ModelObject | None
    doing: Tell
    accelerator: Accelerator | None
    setup: RunSetup

    @property
    def whole(self) -> Path | None:
        """Checkpoint with all weights. None: the weights come from elsewhere."""
        if self.start.config.lora.adapts:  # a checkpoint has the adapter alone
            return None
        return next(iter(self.start.folders), None)

    def prepare_data(self, config: Config) -> Task:
        setup, whole = self.setup, self.whole
        described = config
        if whole is not None and not is_found(config.model):  # the checkpoint has everything
            self.note(f"model.path {config.model.path} is not there any more: the tokenizer is read from {whole}.")
            described = config.with_resolved(model__path=str(whole))
        return rank_0_first(
            self.comm,
            "preparation of the data",
            lambda alive: TASKS["rows"].build(
                described, setup.model_kind, setup.vocab_size, stages(self.doing, alive), setup.rope_limit
            ),
        )

    def build_base(self, config: Config, path: str | None = None) -> BuiltModel:
        """Return the initial model, unfilled. `path`: see `BuildBase`."""
        if self.user_model is not None:
            return self.user_model.build()
        if path is not None:
            config = config.with_resolved(model__path=path)
        return build_model(
            config.model,
            seed=config.run.seed,
            config=copy.deepcopy(self.setup.architecture),  # a build changes the copy
            sequence_length=int(config.data.sequence_length or 0),
            grow=self.setup.grows,
            dtype=DTYPES[str(config.train.precision)],
        )

    def build_other(self, config: Config, section: ModelSection) -> BuiltModel:
        """Return another model, unfilled, which does not train. Raises ConfigError without weights."""
        if not is_pretrained(section, locate(section)):
            raise ConfigError(
                f"model.path is {section.path or section.preset}, which has no weights: a plan takes a preset or a "
                "config.json, and a run a folder or a hub name."
            )
        built = build_model(
            section,
            seed=config.run.seed,
            sequence_length=int(config.data.sequence_length or 0),
            dtype=DTYPES[str(config.train.precision)],
        )
        if missing := first_names(built.report.missing, 3):  # such as a head: its values would be random
            raise ConfigError(
                f"the files of {section.label} lack {missing}. Give a folder with all weights of the model."
            )
        for text in built.notes:
            self.note(f"{section.label}: {text}")
        return built

    def open_frozen(self, planned: PlacementDecision, key: str) -> Engine:
        """Return an engine over the model that the setting `key` names, for evaluations alone. Collective. Raises
        ConfigError and DoesNotFitError.
        """
        config = planned.config
        with share_failure(self.comm, "making of another model"), companion_at(config, key) as section:
            built = self.build_other(config, section)
            freeze_for_evaluation(built.model)
        try:
            with planned_advice(planned.misfit):
                engine = build_engine(config.with_resolved(optimizer__groups=()), built, self.comm)
        except DoesNotFitError as error:
            error.reason = f"{key} is {section.path}, which runs before the first step: {error.reason}"
            raise
        built.close()
        return engine

    def make_model(self, config: Config, data: Task) -> _Model:
        setup, whole = self.setup, self.whole
        with share_failure(self.comm, "making of the model"):
            objective = setup.objective(config, data)
            for text in (*data.describe(objective), *describe_length(config, data)):
                self.say(text)
            self._set_token_ids(config, data)
            if whole is None or self.user_model is not None:
                base = self.build_base(config)
            else:
                # The weights stay unfilled: the checkpoint provides them after the engine opens.
                base = BuiltModel(rebuild_model(whole, config.model), folder=whole)
            files: Mapping[str, bytes] = {}
            if self.comm.rank == 0:  # rank 0 writes them
                files = {**data.files(), **objective.export_files(config, base)}
            built = setup.trainable.prepare(base)
            for text in built.notes:
                self.note(text)
            built.model.train()
            built = setup.with_companions(config, objective, built, partial(self.build_other, config))
            routes = getattr(setup.architecture.get_text_config(), "output_router_logits", False)
            if routes and objective.loss is not None:
                self.note(
                    "output_router_logits of the model's configuration has no effect: train.method "
                    f"{config.train.method} has no loss of the router."
                )
        return _Model(built, objective, files)

    def _set_token_ids(self, config: Config, data: Task) -> None:
        architecture, user_model = self.setup.architecture, self.user_model
        is_new = self.whole is None and config.model.init == "random"
        # Rows of token ids have no tokenizer.
        if is_new and data.tokenizer is not None and TASKS["rows"].trains_tokenizer(config):
            architecture.bos_token_id = data.tokenizer.bos_token_id
            architecture.eos_token_id = data.tokenizer.eos_token_id
        if self.setup.model_kind.name == "reward":  # the model finds the last token in a row by this id
            architecture.get_text_config().pad_token_id = data.pad_id
            if user_model is not None:  # made before, with a configuration of its own
                user_model.model.config.get_text_config().pad_token_id = data.pad_id

    def open_engine(self, planned: PlacementDecision, built: BuiltModel) -> _Opened:
        trainable, model = self.setup.trainable, built.model
        # All of this before `build_engine`: the engine puts other parameters into the model.
        with without_companions(model):  # which the run does not write
            num_parameters = sum(parameter.numel() for parameter in model.parameters())
            name = f"{trainable.name(model)}, {num_parameters:,} parameters"
            description = list(trainable.describe(model))
            files = trainable.files(model)
            disk_needs = DiskNeeds.of(planned.config, trainable, model)
        # Exchanged in place of the contents.
        digests = {file: xxh3_64_hexdigest(content) for file, content in files.items()}
        self.comm.agree("what lies beside the states", digests)
        fill = MeasuredFill(built, self.comm.size)
        work = "reading the weights"
        if self.whole:
            work = "making room for the weights of a checkpoint"
        self.doing(work, fill.amount)
        with planned_advice(planned.misfit):
            engine = build_engine(planned.config, replace(built, fill=fill), self.comm)
        engine.tell_stages(self.doing)
        trainable.check(engine)
        for text in planned.late_notes:
            self.note(text)
        built.close()  # the engine has reopened the files for reads in each step
        self._describe(planned, name, engine)
        for text in (*description, *describe_differences(planned.config, engine)):
            self.say(text)
        return _Opened(engine, files, disk_needs)

    def _describe(self, planned: PlacementDecision, name: str, engine: Engine) -> None:
        config, forecast = planned.config, planned.forecast
        accelerator = self.accelerator
        if accelerator is not None and accelerator.is_integrated:
            uses_host = any(tier == "cpu" for tier, *_ in engine.allocations)
            if uses_host:
                self.note(integrated_note(accelerator.describe()["name"]))
        weights = f"{config.model.init} weights"
        if self.whole:
            weights = "the weights of a checkpoint"
        elif self.user_model:
            weights = "given"
        ranks = ""
        if engine.world_size > 1:
            ranks = f", {engine.world_size} ranks"
        if ranks and forecast is not None and forecast.num_replicas > 1:
            states = "with all states each"
            if config.offload.replica_states == "shared":
                states = "that share out the states"
            ranks += f" in {forecast.num_replicas} replicas {states}"
        self.say(f"model: {name}, {weights}, {config.train.precision} on {engine.device}{ranks}")

    def keep_documents_apart(self, asked: Config, config: Config, data: Task, engine: Engine) -> tuple[Config, Task]:
        """Test the model, and choose its attention. Return other rows if it mixes the documents of a row.

        asked: settings before the data; config: settings so far. Raises ConfigError if the rows must stay.
        """
        setup = self.setup
        why_mask, why_mixed = isolate(engine, data, config, self.comm, setup.vocab_size, setup.rope_limit)
        if why_mask:
            config = config.with_resolved(model__attention="auto")
        if why_mixed:
            return self._separate_documents(asked, config, engine, why_mixed)
        if why_mask:
            mask_bytes = data.batch_size // engine.world_size * int(config.data.sequence_length or 0) ** 2
            self.say(
                f"note: without a mask, {why_mask}: packed documents keep a mask over whole rows, at most "
                f"{format_bytes(mask_bytes)}, and no plan counts it."
            )
        return config, data

    def _separate_documents(self, asked: Config, config: Config, engine: Engine, why: str) -> tuple[Config, Task]:
        """Prepare the data again, with one document in each row. Raises ConfigError if the rows must stay."""
        # Another packing would change the earlier steps of a resumed run, or contradict the user.
        if self.start.folders or asked.data.packing_isolated is True:
            engine.close()
            raise common(
                ConfigError(
                    f"data.packing_isolated is true, but {why}: documents in a row would not be isolated. Set "
                    "--data.packing false for one document in each row, or --data.packing_isolated false."
                )
            )
        one_each = {"data__packing": False, "data__packing_isolated": False}
        by_length = {}
        if engine.compiles:  # each length would be compiled
            by_length = {"data__group_by_length": False}
        rows = self.prepare_data(asked.with_resolved(**one_each, **by_length))
        self.say(f"note: {why}: conversations are not packed. {rows.rows_description}")
        counted = decide(asked, FROM_NUM_STEPS, rows.num_steps)  # other rows are other numbers of steps
        decided = config.with_resolved(
            **one_each,
            data__group_by_length=rows.by_length,
            train__steps=counted.train.steps,
            optimizer__warmup_steps=counted.optimizer.warmup_steps,
        )
        return decided, rows


def choose_trainable_part(
    config: Config, architecture: PreTrainedConfig, kind: ModelKind, start: ResumePoint
) -> TrainablePart:
    """Return the trainable part of a run, or of its checkpoint if the run resumes.

    Raises ConfigError, also for another base than in the checkpoint; MissingLibraryError.
    """
    if not config.lora.adapts:
        quantization = quantization_settings(architecture)
        if quantization is not None and is_pretrained(config.model, locate(config.model)):
            raise untrainable_error(f"model.path is {config.model.path}, which", quantization_method(quantization))
    return trainable_class(config).of(config, architecture, kind, start)


def load_start(start: ResumePoint, engine: Engine, say: Say) -> Mapping[str, Any] | None:
    """Load the first intact checkpoint. Return the run position stored there; None without checkpoints. Collective."""
    for reason in start.skipped:
        say(f"note: a checkpoint is skipped: {reason}")
    reasons: list[str] = []
    for folder in start.folders:
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
        if num_bytes > LONG_BYTES:
            say(f"reading {format_bytes(num_bytes)} of states from {folder} ...")
        try:
            meta = engine.load_checkpoint(folder, reset=start.config.optimizer.reset)
        except CheckpointError as error:  # the engine checks the data: damage shows only here
            if len(start.folders) > 1:
                say(f"note: a checkpoint is skipped: {error}")
            reasons.append(str(error))
        else:
            say(f"resumed at step {meta['step']} from {folder}")
            return meta
    if reasons:
        raise common(no_intact_checkpoint(start.folders, reasons))
    return None
