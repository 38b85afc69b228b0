"""Build a training run from the configuration: architecture, data, model, engine, initial states."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from xxhash import xxh3_64_hexdigest

from offload.accelerators import own_accelerator
from offload.amounts import Tell, tell_nobody, unmeasured
from offload.app.config.config import Config
from offload.app.config.sections import DOCUMENTS, ModelSection
from offload.app.environment import integrated_note
from offload.app.hf.model_object import ModelObject
from offload.app.hf.models import (
    BuiltModel,
    ModelKind,
    build_model,
    check_sequence_length,
    is_pretrained,
    locate,
    max_positions,
    model_kind,
    quiet_transformers,
    rope_limit,
    vocab_size,
)
from offload.app.hf.quantized import quantization_method, quantization_settings
from offload.app.stored_model import rebuild_model
from offload.app.training.decisions import FROM_NUM_STEPS, decide, resolve
from offload.app.training.isolation import isolate
from offload.app.training.objectives import OBJECTIVES, Objective
from offload.app.training.parts import MeasuredFill, build_engine, describe_length, stages
from offload.app.training.planner import PLANNERS, RunForecast, document_share, measure_network, planned_advice
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
from offload.engine.engine import Engine
from offload.errors import CheckpointError, ConfigError, OffloadError, common, format_bytes, shorten, untrainable_error
from offload.layout.planes import DTYPES
from offload.planning.machines import ThisMachine

Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """A built training run.

    - config: configuration with every decision possible before the first step.
    - files: tokenizer or processor files by name, on rank 0.
    - extra_files: further files for each checkpoint.
    - meta: run position from the checkpoint to resume from. None: a new run.
    - trainable: the trainable part and its storage.
    - build_base: builds the initial model again.
    - forecast: memory and time forecast. None: unknown, or a rank other than 0.
    - misfit: shortage by the forecast and the smallest change that fits, on all ranks. Empty: fits, or unknown.
    - disk_needs: bytes needed on the disk with the run folder.
    """

    config: Config
    model_kind: ModelKind
    data: Task
    objective: Objective
    engine: Engine
    files: Mapping[str, bytes]
    extra_files: Mapping[str, bytes]
    meta: Mapping[str, Any] | None
    trainable: TrainablePart
    build_base: BuildBase
    forecast: RunForecast | None
    misfit: str
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
    def read(cls, start: ResumePoint, user_model: ModelObject | None = None, *, has_accelerator: bool) -> RunSetup:
        """Read the architecture and check the settings against it.

        `user_model`: a model already made in Python. Raises ConfigError and MissingLibraryError.
        """
        quiet_transformers()
        torch.manual_seed(start.config.run.seed)
        architecture = load_architecture(start) if user_model is None else user_model.architecture()
        kind = model_kind(architecture) if user_model is None else user_model.resolve_kind(architecture)
        method = start.config.train.method
        if method != "sft" and kind.auto is None:
            raise ConfigError(
                f"train.method is {method}, but the given model is not a transformers model, whose outputs have "
                "logits: give a transformers model, or train.method sft."
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
        config = resolve(start.config, has_accelerator=has_accelerator, max_positions=max_positions(architecture))
        check_sequence_length(max_positions(architecture), int(config.data.sequence_length or 0))
        trainable, num_rows = choose_trainable_part(config, architecture, kind, start), vocab_size(architecture)
        has_weights = bool(start.folders) and not config.lora.adapts  # the checkpoint has all weights
        grows = not has_weights and user_model is None and TASKS["rows"].grow_vocabulary(config, architecture)
        if config.lora.adapts:
            refuse_growth(vocab_size(architecture), num_rows)
        return cls(config, architecture, kind, trainable, grows)


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
    first = next(iter(start.folders), None)
    whole = None if start.config.lora.adapts else first  # checkpoint with all weights
    with share_failure(comm, "reading of the architecture"):
        accelerator = own_accelerator(start.config.offload.device)
        setup = RunSetup.read(start, user_model, has_accelerator=accelerator is not None)
    config, architecture, kind, trainable, grows = setup
    vocabulary, limit = vocab_size(architecture), rope_limit(architecture)
    has_moved = whole is not None and not _is_found(config.model)
    if has_moved:
        note(f"model.path {config.model.path} is not there any more: the tokenizer is read from {whole}.")

    def build(alive: Callable[[], object]) -> Task:
        described = config.with_resolved(model__path=str(whole)) if has_moved else config
        return TASKS["rows"].build(described, kind, vocabulary, stages(doing, alive), limit)

    if first and config.data.packing_isolated == "auto":  # as at the start, whatever auto means now
        cut = start.data.get("packing", True)
        config = config.with_resolved(data__packing=bool(cut), data__packing_isolated=cut == "isolated")
    if first and config.data.group_by_length == "auto":
        config = config.with_resolved(data__group_by_length=bool(start.data.get("group_by_length")))
    data = rank_0_first(comm, "preparation of the data", build)
    requires_isolation = config.data.packing_isolated is True
    config = config.with_resolved(data__packing_isolated=data.is_isolated)
    if data.has_pictures:
        config = config.with_resolved(data__packing=False)
    if config.attends_documents and not first:
        config = config.with_resolved(model__attention=DOCUMENTS)
    comm.agree("the training data", data.state_dict())
    if first:
        with share_failure(comm, "comparison of the data"):
            data.check_state(start.data)
    if data.by_length:
        config = config.with_resolved(data__group_by_length=True)
    steps, epochs = config.train.steps, config.train.epochs
    if steps and epochs and config.origin("train.steps") != "resolved":
        say(f"note: train.steps is {steps}, and overrides train.epochs, {epochs:g}: leave one of them out.")
    without_steps, config = config, decide(config, FROM_NUM_STEPS, data.num_steps)

    def build_base(path: str | None = None) -> BuiltModel:
        if user_model is not None:
            return user_model.build()
        return build_model(
            config.model if path is None else config.with_resolved(model__path=path).model,
            seed=config.run.seed,
            config=copy.deepcopy(architecture),
            sequence_length=int(config.data.sequence_length or 0),
            grow=grows,
            dtype=DTYPES[str(config.train.precision)],
        )

    doing("making the model and its plan", unmeasured)
    with share_failure(comm, "making of the model"):
        objective = OBJECTIVES[config.train.method].of(config, kind.name, data.tokenizer, vocabulary)
        for text in (*data.describe(objective), *describe_length(config, data)):
            say(text)
        files = data.files() if comm.rank == 0 else {}
        if whole is None and config.model.init == "random" and TASKS["rows"].trains_tokenizer(config):
            architecture.bos_token_id = data.tokenizer.bos_token_id
            architecture.eos_token_id = data.tokenizer.eos_token_id
        if kind.name == "reward":  # the model finds the last token in a row by this id
            for each in (architecture, *(() if user_model is None else (user_model.model.config,))):
                each.get_text_config().pad_token_id = data.pad_id
        if whole and user_model is None:
            # The weights stay unfilled: the checkpoint provides them after the engine opens.
            built = trainable.prepare(BuiltModel(rebuild_model(whole, config.model), folder=whole))
        else:
            built = trainable.prepare(build_base())
        for text in built.notes:
            note(text)
        built.model.train()
    late_notes: list[str] = []
    config, forecast, misfit = _decide_placement(config, architecture, data, comm, say, note, late_notes.append)
    if forecast is not None and data.has_pictures:
        note("the memory forecast covers text only: images need more.")
    if forecast is not None:
        say(f"plan: at most {forecast.description}")
    num_parameters = sum(parameter.numel() for parameter in built.model.parameters())
    name, description = trainable.name(built.model), list(trainable.describe(built.model))
    own_files = trainable.files(built.model)
    comm.agree("what lies beside the states", {name: xxh3_64_hexdigest(data) for name, data in own_files.items()})
    extra_files = {**files, **own_files}
    needs = DiskNeeds.of(config, trainable, built.model)
    fill = MeasuredFill(built, comm.size)
    doing("making room for the weights of a checkpoint" if whole else "reading the weights", fill.amount)
    with planned_advice(misfit):
        engine = build_engine(config, replace(built, fill=fill), comm)
    engine.tell_stages(doing)
    trainable.check(engine)
    for text in late_notes:
        note(text)
    built.close()
    if accelerator is not None and accelerator.is_integrated and any(tier == "cpu" for tier, *_ in engine.allocations):
        note(integrated_note(accelerator.describe()["name"]))
    weights = "the weights of a checkpoint" if whole else "given" if user_model else f"{config.model.init} weights"
    replicas = ""
    if forecast is not None and forecast.num_replicas > 1:
        states = "that share out the states" if config.offload.replica_states == "shared" else "with all states each"
        replicas = f" in {forecast.num_replicas} replicas {states}"
    say(
        f"model: {name}, {num_parameters:,} parameters, {weights}, {config.train.precision} on {engine.device}"
        + (f", {engine.world_size} ranks{replicas}" if engine.world_size > 1 else "")
    )
    for text in description:
        say(text)
    if config.train.delay:
        first_late = config.train.delay_after + 1
        say(f"updates are one step late, from step {first_late} on (train.delay 1): results differ from train.delay 0.")
    if engine.compiles:
        say(
            "blocks are compiled in the first steps, which takes a minute or more. The last bits differ from those of "
            "uncompiled blocks (--train.compile never)."
        )
    if isinstance(config.train.sequence_tile, int):
        say(
            "modules that compute each token separately (found in the first step) run over tiles of "
            f"{config.train.sequence_tile} tokens: gradients differ by the order of their sums."
        )
    meta = load_start(start, engine, say)
    why_mask = why = ""
    if data.is_isolated and limit is not None and data.longest > limit:
        why = (
            f"beyond {limit:,} tokens the model has other rotary frequencies for all documents in a batch, and the "
            f"longest document has {data.longest:,}"
        )
    elif data.is_isolated:
        one_by_one = config.attends_documents and config.model.attention == DOCUMENTS
        why_mask, why = isolate(engine, data.tokenizer, vocabulary, comm, one_by_one)
    if why_mask:
        config = config.with_resolved(model__attention="auto")
    if why_mask and not why:
        mask_bytes = data.batch_size // engine.world_size * int(config.data.sequence_length or 0) ** 2
        say(
            f"note: without a mask, {why_mask}: packed documents keep a mask over whole rows, at most "
            f"{format_bytes(mask_bytes)}, and no plan counts it."
        )
    if why:
        if first or requires_isolation:
            engine.close()
            raise common(
                ConfigError(
                    f"data.packing_isolated is true, but {why}: documents in a row would not be isolated. Set "
                    "--data.packing false for one document in each row, or --data.packing_isolated false."
                )
            )
        by_length = {"data__group_by_length": False} if engine.compiles else {}
        config = config.with_resolved(data__packing=False, data__packing_isolated=False, **by_length)
        data = rank_0_first(comm, "preparation of the data", build)
        again = decide(without_steps, FROM_NUM_STEPS, data.num_steps)
        config = config.with_resolved(
            train__steps=again.train.steps, optimizer__warmup_steps=again.optimizer.warmup_steps
        )
        say(f"note: {why}: conversations are not packed. {data.rows_description}")
    config = config.with_resolved(data__group_by_length=data.by_length)
    return Run(
        config, kind, data, objective, engine, files, extra_files, meta, trainable, build_base, forecast, misfit, needs
    )


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


def _is_found(section: ModelSection) -> bool:
    try:
        locate(section)
    except ConfigError:
        return False
    return True


def _decide_placement(
    config: Config, architecture: PreTrainedConfig, data: Task, comm: Comm, say: Say, note: Say, note_later: Say
) -> tuple[Config, RunForecast | None, str]:
    """Decide the placement of states, on rank 0 for all ranks.

    Return the configuration, the forecast and the shortage (`RunForecast.misfit`). The forecast exists on rank 0 only.
    None: unknown. `note_later` receives the shortage, or the reason for a missing forecast. The caller shows these only
    if the engine starts, because an engine error would say the same. Collective.
    """
    network = None
    if comm.num_far:
        if comm.num_machines == 1:
            note("there is no memory forecast: the machines have different numbers of ranks.")
            return config, None, ""
        network = measure_network(comm)
    machine = ThisMachine(own_accelerator(config.offload.device))
    machine = replace(machine, agreed_memory=machine.free_memory(comm))
    forecast = None
    if comm.rank == 0:
        try:
            share = document_share(config, data)
            forecast = PLANNERS["forecast"](config, architecture, comm.local_size, machine, say, network, share)
        except (OffloadError, OSError) as error:  # no forecast is needed, and the engine reports errors better
            note_later(f"there is no memory forecast: {error}")
        except Exception as error:
            if config.run.debug:
                traceback.print_exception(error)
            cause = shorten(" ".join(f"{type(error).__name__}: {error}".split()))
            hint = "" if config.run.debug else ", and --debug shows where"
            note(
                f"there is no memory forecast, because of a defect in the forecast ({cause}): training continues "
                f"without one{hint}."
            )
    decided = (config, "") if forecast is None else (forecast.config, forecast.misfit)
    if decided[1]:
        note_later(f"by the plan the run does not fit. {decided[1]}")
    config, misfit = comm.from_rank(0, decided, "placement")
    return config, forecast, misfit


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
        except CheckpointError as error:
            if len(start.folders) > 1:
                say(f"note: a checkpoint is skipped: {error}")
            reasons.append(str(error))
        else:
            say(f"resumed at step {meta['step']} from {folder}")
            return meta
    if reasons:
        raise common(no_intact_checkpoint(start.folders, reasons))
    return None
