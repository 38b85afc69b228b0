"""transformers' Trainer and TRL's trainers with an engine for the trained model.

    class MySFT(OffloadMixin, trl.SFTTrainer): ...
    MySFT(model=model, args=args, ..., offload=dict(placement=Placement(...)))

`OffloadTrainer` is the version for the plain Trainer. If a Trainer class cannot change, `offload_optimizer_factory` and
`OffloadCallback` provide most functions: see docs/reference/libraries.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from offload.engine.companions import without_companions
from offload.engine.compile_wrappers import remove_compile_wrappers
from offload.engine.engine import Engine
from offload.engine.prepare import disable_checkpointing
from offload.errors import ConfigError, DiskError, warn
from offload.integrations import require_libraries
from offload.integrations.optimizer import FOLDER, OffloadOptimizer, find_own
from offload.integrations.rules import rule_of_arguments, without_decay
from offload.integrations.saving import (
    adapters_state,
    complete_or_absent,
    export_into,
    share_write_errors,
    state_of,
    weights_dtype,
)
from offload.integrations.wrap import give_back, open_engine, own_precision
from offload.optim.adamw import AdamW
from offload.optim.rule import UpdateRule

require_libraries("transformers", "accelerate")

from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer import TRAINING_ARGS_NAME  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint  # noqa: E402

from offload.integrations.accelerate import OffloadAccelerator, refuse_others  # noqa: E402

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class OffloadMixin(_Base):
    """Mixin before a transformers or TRL Trainer. Moves the model into an engine on first need.

    Trainer arguments keep their meaning: `optim` (if an equal update rule exists), learning rate, schedule, weight
    decay, `max_grad_norm`, accumulation. With `bf16` or `fp16`, the engine computes in it with fp32 master weights,
    without autocast and GradScaler. Gradient checkpointing is turned off, because the engine recomputes units anyway.
    Unsupported arguments raise ConfigError with the name. The engine manages the ranks: start with torchrun; there is
    no DDP wrapper.

    Saved files are the same as from the Trainer. A checkpoint also contains the engine states. With PEFT, the adapter
    is saved.

    engine: None until training or evaluation begins.
    """

    engine: Engine | None = None
    model: Any
    optimizer: Any

    def __init__(self, *args: Any, offload: Mapping[str, Any] | None = None, park: bool = False, **kwargs: Any) -> None:
        """`offload`: engine settings, as a mapping. `park`: with TRL's GRPO over vLLM the engine holds no memory of the
        device while texts are generated (`Engine.park`).

        Keys: `placement` (a Placement, or its fields), and any `Engine` keyword not decided by the Trainer's arguments.
        `optimizer`, an update rule, overrides `optim`, learning rate and decay. Raises ConfigError.
        """
        self._offload = dict(offload or {})
        self._parks = park
        self._dtype: torch.dtype | None = None  # dtype for saving the model
        super().__init__(*args, **kwargs)
        self.model = remove_compile_wrappers(self.model)
        self.model_wrapped = self.model
        if park:
            _check_park(self)
        _put_callback_first(self)
        _adopt(self)

    def create_accelerator_and_postprocess(self) -> None:
        refuse_arguments(self.args)
        super().create_accelerator_and_postprocess()
        _adopt(self)
        if self.args.n_gpu > 1:
            warn(
                f"{self.args.n_gpu} GPUs are visible to one process, and an engine uses one of them. Start with "
                "torchrun to use all."
            )
            self.args._n_gpu = 1

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Like Trainer.call_model_init, with torch.compile removed."""
        return remove_compile_wrappers(super().call_model_init(trial))

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model in place: the engine copies weights to the device when needed."""

    # -- the engine ------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:  # noqa: ARG002
        """Move the model into an engine, unless done already. Return the engine's optimizer."""
        disable_checkpointing(self.model)  # train() turns it on each time
        if not self._is_engaged:
            self._engage()
        assert self.engine is not None
        self.engine.zero_grad()  # left by an interrupted train()
        return self.optimizer

    @property
    def _is_engaged(self) -> bool:
        return self.engine is not None and not self.engine.closed and self.engine.model is self.model

    def _engage(self) -> None:
        if self.engine is not None:
            self._leave(self.engine)
        own = find_own(self.optimizer)
        if own is None:
            own = self._open()
        if own.engine.model is not self.model:
            raise ConfigError(
                "optimizers has an OffloadOptimizer over another model than the Trainer's: make it over the Trainer's "
                "model."
            )
        self.engine = own.engine
        self.optimizer = own
        self.accelerator.engine = self.engine
        vllm = getattr(self, "vllm_generation", None)
        if vllm is not None:  # TRL's vLLM reads weights from the engine
            vllm._iter_named_params = partial(weights_for_vllm, self, vllm)
        model: Any = self.model
        if self.engine.world_size > 1 and hasattr(model, "generate"):  # every forward needs all ranks
            model.generate = partial(model.generate, synced_gpus=True)

    def _leave(self, engine: Engine) -> None:
        """Detach an engine whose model is no longer trained or was restored."""
        if find_own(self.optimizer) is not None:
            self.optimizer = None
        self.accelerator._models = [each for each in self.accelerator._models if each is not engine.model]
        self.accelerator._optimizers = [each for each in self.accelerator._optimizers if find_own(each) is None]
        if engine.model is self.model:
            warn(
                "the Trainer's engine has returned its model (to another Trainer, or by close(restore=True)): its "
                "moments are lost, and the next engine begins without moments."
            )
        elif not engine.closed:
            engine.close()

    def _open(self) -> OffloadOptimizer:
        """Return the optimizer for a new engine configured by the arguments."""
        args, settings = self.args, dict(self._offload)  # a copy: another `train` begins with all of them
        # An earlier engine holds the weights of the model.
        give_back(self.model, self.optimizer)
        factory, factory_settings = self.optimizer_cls_and_kwargs or (None, {})
        if factory is offload_optimizer_factory:
            settings |= _without_rule(dict(factory_settings), self.model)
        if self.optimizer is not None and "optimizer" in settings:
            raise ConfigError(
                f"the Trainer has a {type(self.optimizer).__name__}, and offload has the update rule "
                f"{settings['optimizer'].title}: leave one of them out."
            )
        for key, trainer_value in (("max_grad_norm", args.max_grad_norm), ("lr", args.learning_rate)):
            if key in settings and (settings[key] or None) != (trainer_value or None):  # no clipping: 0 or None
                raise ConfigError(
                    f"offload has {key}={settings[key]!r}, but the Trainer's arguments have {trainer_value!r}, and "
                    f"they decide. Set TrainingArguments.{'learning_rate' if key == 'lr' else key}, and leave {key} "
                    "out of offload."
                )
            settings.pop(key, None)
        settings = {
            "max_grad_norm": args.max_grad_norm,
            "precision": _precision_of(self, settings.get("precision")),
            "device": str(args.device),
            "seed": args.seed,
            "compile": "always" if args.torch_compile else "auto",
            **settings,
        }
        self._dtype = weights_dtype(self.model)
        if "optimizer" in settings:
            return OffloadOptimizer(open_engine(self.model, settings.pop("optimizer"), settings))
        create: Any = super().create_optimizer
        # A subclass may make another optimizer; the engine then takes over this optimizer.
        is_own = type(self).get_optimizer_cls_and_kwargs is not Trainer.get_optimizer_cls_and_kwargs
        if self.optimizer is None and (factory or is_own or create.__func__ is not Trainer.create_optimizer):
            create()
        if self.optimizer is not None:
            _refuse_beside(self)
            own_optimizer: OffloadOptimizer = self.accelerator.engage(self.model, self.optimizer, settings)
            if getattr(self.lr_scheduler, "optimizer", None) is self.optimizer:
                own_optimizer.follow(self.lr_scheduler)
            return own_optimizer
        decayed = set(self.get_decay_parameter_names(self.model))
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        engine = open_engine(self.model, rule_of_arguments(args, names, decayed), settings)
        # Two groups, as the Trainer's own optimizer has them.
        own, others = [n for n in names if n in decayed], [n for n in names if n not in decayed]
        return OffloadOptimizer(engine, [(1.0, args.weight_decay, own), (1.0, 0.0, others)])

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:  # noqa: ARG002
        """Return the model without a wrapper. Evaluation may call this first, so open the engine here too."""
        if model is self.model:
            if self.optimizer is None:
                self.create_optimizer()
            if not self._is_engaged or find_own(self.optimizer) is None:
                self._engage()
            disable_checkpointing(model)
        return model

    # -- a step ----------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like Trainer.training_step. With a rule without gradients, the whole step happens here, on the batch."""
        own = self._own_optimizer
        if own.has_gradients:
            loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
            return loss
        _refuse_other_losses(self)
        model.train()
        return own.descend(self._prepare_inputs(inputs)).loss.to(self.args.device)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        """Like GRPOTrainer._generate. With `park` the engine lends the device to the sampler meanwhile."""
        if not (self._parks and self._is_engaged):
            return super()._generate(*args, **kwargs)
        assert self.engine is not None
        with self.engine.parked():
            return super()._generate(*args, **kwargs)

    # -- saving ----------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save on all ranks. Older Trainers call only the first rank for this."""
        if not self._is_engaged:
            super().save_model(output_dir, _internal_call)
            return
        folder = self._folder_of(output_dir)
        with complete_or_absent(folder, is_writer=self.args.should_save):
            if not _is_plain(super().save_model):
                super().save_model(output_dir, _internal_call)
                return
            self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _folder_of(self, output_dir: str | None) -> Path:
        if output_dir is None:
            output_dir = self.args.output_dir
        return Path(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write the same files as the Trainer. Collective."""
        if not self._is_engaged:
            super()._save(output_dir, state_dict)
            return
        assert self.engine is not None
        folder = self._folder_of(output_dir)
        weights = None
        if hasattr(self.model, "peft_config"):
            weights = adapters_state(self.engine)
        elif not _is_plain(super()._save):
            weights = {}  # one rank reads each weight when it is written
            if self.engine.world_size > 1:
                weights = state_of(self.engine)
        if weights is not None:
            with share_write_errors(self.engine, folder):
                if self.args.should_save:  # older versions write on every calling rank
                    with self.engine.answering(weights):
                        super()._save(output_dir, weights or state_dict)
            return
        export_into(self.engine, folder, self._dtype)
        with share_write_errors(self.engine, folder):
            if self.args.should_save:
                speaker = self.processing_class or getattr(self.data_collator, "tokenizer", None)
                if speaker is not None:
                    speaker.save_pretrained(folder)
                torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_checkpoint(self, model: nn.Module, trial: Any, *args: Any, **kwargs: Any) -> None:
        """Like Trainer._save_checkpoint, but complete or absent: a run is resumed from the newest folder."""
        run = Path(self._get_output_dir(trial=trial))
        folder = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        try:
            with complete_or_absent(folder, is_writer=self.args.should_save):
                super()._save_checkpoint(model, trial, *args, **kwargs)
        except DiskError as error:
            last = get_last_checkpoint(str(run))
            way_on = f"resume_from_checkpoint=True goes on from {last}" if last else "there is no checkpoint yet"
            raise DiskError(f"{error} Make room: {way_on}.", error.errno or 0, error.path) from error

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        own = self._own_optimizer
        with share_write_errors(own.engine, Path(output_dir)):
            super()._save_optimizer_and_scheduler(output_dir)
        own.save(Path(output_dir) / FOLDER)

    @property
    def _own_optimizer(self) -> OffloadOptimizer:
        own = find_own(self.optimizer)
        assert own is not None
        return own

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        """Skip the weights: the engine loads them together with its states.

        For a checkpoint without optimizer states, load the weights before an engine exists.
        """
        folder = Path(resume_from_checkpoint)
        if (folder / FOLDER).is_dir():
            return
        if (folder / "optimizer.pt").is_file() or self._is_engaged:
            raise ConfigError(
                f"{folder} has no folder {FOLDER!r}: another trainer saved it, and an engine cannot read that "
                "trainer's optimizer states. Load the weights (from_pretrained) into the Trainer's model, and begin a "
                "new run."
            )
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (Path(checkpoint) / FOLDER).is_dir():
            self._own_optimizer.load(Path(checkpoint) / FOLDER)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        if not self._is_engaged:
            super()._load_best_model()
            return
        self._own_optimizer.load(Path(self.state.best_model_checkpoint) / FOLDER)


def _refuse_beside(trainer: Any) -> None:
    """Raise ConfigError if the optimizer also trains a module beside the model, such as a loss with parameters."""
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    foreign = trained - {id(p) for p in trainer.model.parameters()}
    for key, value in vars(trainer).items():
        modules = value.values() if isinstance(value, dict) else [value]
        for module in (each for each in modules if isinstance(each, nn.Module)):
            names = [name for name, parameter in module.named_parameters() if id(parameter) in foreign]
            if names:
                raise ConfigError(
                    f"the Trainer's {key}, a {type(module).__name__}, has {len(names)} own parameters that the "
                    f"optimizer trains, first {names[0]}, and an engine trains the model alone. Freeze them "
                    "(requires_grad_(False)) before training, or choose another."
                )


def _is_plain(method: Any) -> bool:
    """Tell whether a method is the Trainer's, where sentence-transformers has another way to save, for example."""
    return method.__func__ is getattr(Trainer, method.__name__)


class OffloadTrainer(OffloadMixin, Trainer):
    """transformers' Trainer over an engine: see `OffloadMixin`."""


class OffloadCallback(TrainerCallback):
    """Adds engine measurements to the Trainer's step logs.

    - `grad_norm`: the true norm.
    - `offload/bytes`: bytes moved in the last step over all links.
    - `offload/exposed_seconds`: seconds compute waited for these transfers.
    - `offload/loss_scale`: in fp16, factor on the loss in the backward.
    - With MeZO: `seed`, `lr`, `projected_grad`, `loss_plus`, `loss_minus`, for `engine.replay`.

    Added by `offload_optimizer_factory`, it also saves the engine states into each checkpoint, and reads them if the
    Trainer resumes from a checkpoint in its output_dir. `OffloadMixin` adds the callback itself.
    """

    def on_log(
        self, _args: Any, state: Any, _control: Any, logs: dict[str, Any] | None = None, optimizer: Any = None, **_: Any
    ) -> None:
        own = find_own(optimizer)
        if own is None or own.result is None or logs is None or "loss" not in logs:
            return
        more = {
            "grad_norm": own.result.grad_norm,
            "offload/bytes": own.engine.counters.total,
            "offload/exposed_seconds": sum(lane.exposed_seconds for lane in own.result.lanes.values()),
        }
        if own.result.loss_scale != 1.0:
            more["offload/loss_scale"] = own.result.loss_scale
        if own.result.measured is not None:
            more |= own.result.measured.fields()
        for logged in (logs, *state.log_history[-1:]):  # the Trainer keeps a copy
            logged.update(more)

    def on_train_begin(
        self, args: Any, state: Any, _control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        own = find_own(optimizer)
        if own is None:
            return
        # A Trainer with an optimizer made elsewhere is not adopted yet, and would call torch's backward.
        trainer = _calling_trainer(model)
        if trainer is not None and not isinstance(trainer.accelerator, OffloadAccelerator):
            _adopt(trainer)
            trainer.accelerator.engine = own.engine
        if args.load_best_model_at_end and trainer is not None and not isinstance(trainer, OffloadMixin):
            raise ConfigError(
                "load_best_model_at_end is set, but a plain Trainer would load the best weights into the model, not "
                "into the engine that trains it. Train with OffloadTrainer, or class X(OffloadMixin, ...), or set it "
                "to False."
            )
        if own.misses_states:
            own.load(_checkpoint(args, state) / FOLDER)

    def on_save(self, args: Any, state: Any, _control: Any, optimizer: Any = None, **_: Any) -> None:
        own, folder = find_own(optimizer), _checkpoint(args, state)
        if own is not None and not args.save_only_model and not (folder / FOLDER).is_dir():
            own.save(folder / FOLDER)


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _put_callback_first(trainer: Trainer) -> None:
    """Put an OffloadCallback before callbacks that log elsewhere. Adds one if missing."""
    callbacks = trainer.callback_handler.callbacks
    own = next((each for each in callbacks if isinstance(each, OffloadCallback)), None) or OffloadCallback()
    # First: later loggers then see the engine's numbers in the same line.
    callbacks[:] = [own, *(each for each in callbacks if each is not own)]


def offload_optimizer_factory() -> Callable[..., OffloadOptimizer]:
    """Return an optimizer factory for a Trainer class that cannot change.

    Usage: `Trainer(model, args, optimizer_cls_and_kwargs=(offload_optimizer_factory, {...}))`.

    Settings: `lr`, `betas`, `eps`, `weight_decay` for AdamW, or `optimizer`, an update rule; and engine settings,
    except `max_grad_norm`, which the Trainer provides. An `OffloadCallback` is added to the Trainer if missing. One
    rank only, because with several ranks the Trainer would wrap the model: use `OffloadTrainer` there.
    """
    return _make_optimizer


def _make_optimizer(model: nn.Module, **settings: Any) -> OffloadOptimizer:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"offload_optimizer_factory does not work over {dist.get_world_size()} ranks, because a plain Trainer "
            "wraps the model in DDP. Train with OffloadTrainer, or class X(OffloadMixin, ...)."
        )
    give_back(model)
    trainer = _calling_trainer(model)  # knows the wrapped model
    original_model = model
    model = remove_compile_wrappers(model)
    if trainer is not None and model is not original_model:
        trainer.model = model
        trainer.model_wrapped = model
    options = _without_rule(settings, model)
    if not options["optimizer"].has_gradients:
        raise ConfigError(
            f"offload_optimizer_factory was given {type(options['optimizer']).__name__}, which needs no backward, but "
            "a plain Trainer calls backward in each step: train with OffloadTrainer, or class X(OffloadMixin, ...)."
        )
    options.setdefault("precision", own_precision(model))
    if trainer is not None:
        refuse_arguments(trainer.args)
        options["precision"] = _precision_of(trainer, settings.get("precision"))
        options.setdefault("compile", "always" if trainer.args.torch_compile else "auto")
        limit = trainer.args.max_grad_norm
        if (options.setdefault("max_grad_norm", limit) or None) != (limit or None):
            raise ConfigError(
                f"offload_optimizer_factory was given max_grad_norm {options['max_grad_norm']}, but the Trainer's is "
                f"{limit}, and it decides. Leave it out, and set TrainingArguments.max_grad_norm."
            )
        _put_callback_first(trainer)
        _adopt(trainer)
    return OffloadOptimizer(open_engine(model, options.pop("optimizer"), options))


def _precision_of(trainer: Any, given: str | None) -> str:
    """Return the engine's precision: that of the Trainer's arguments, or `given`, or the one of the weights.

    Raises ConfigError for two different ones.
    """
    mixed = trainer.accelerator.mixed_precision
    if mixed == "no":
        return given or own_precision(trainer.model)
    if given not in (None, mixed):
        raise ConfigError(f"offload has precision={given!r}, and the Trainer's arguments {mixed}=True: leave one out.")
    return mixed


def _adopt(trainer: Trainer) -> None:
    """Route the Trainer's backward and gradient clipping to the engine."""
    refuse_others(trainer.accelerator)
    trainer.accelerator.__class__ = OffloadAccelerator  # made by the Trainer; the subclass adds no fields
    trainer.accelerator.drop_scaler()
    vars(trainer)["_mixed_mesh_grads"] = False  # otherwise the Trainer inspects gradients


def _calling_trainer(model: nn.Module) -> Trainer | None:
    """Return the Trainer for this model from the call stack. None: not found.

    The Trainer passes itself neither to a factory nor to a callback, and passes no arguments to a factory.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # `f_locals` is a copy held by the frame: a look-up in each step would keep a batch alive.
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and caller.model is model:
            return caller
        frame = frame.f_back
    return None


def _without_rule(settings: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return settings with an update rule in place of AdamW settings.

    Weight decay follows the choice in transformers.
    """
    own = {key: settings.pop(key) for key in ("lr", "betas", "eps", "weight_decay") if key in settings}
    rule = settings.get("optimizer")
    if rule is None:
        decayed = set(Trainer.get_decay_parameter_names(None, model))
        names = [name for name, p in model.named_parameters() if p.requires_grad and name not in decayed]
        return {**settings, "optimizer": without_decay(AdamW(**{"weight_decay": 0.0, **own}), names)}
    if not isinstance(rule, UpdateRule) or set(own) - {"lr"}:
        raise ConfigError(
            f"offload_optimizer_factory was given optimizer={rule!r} and {sorted(own)}: an update rule, such as "
            "AdamW(lr=1e-4), includes these settings."
        )
    whole: Any = rule
    return {**settings, "optimizer": replace(whole, **own)}


def refuse_arguments(args: Any) -> None:
    """Raise ConfigError for Trainer arguments without engine support."""
    why = {
        "fp16_full_eval": "the engine holds the weights in its compute dtype: leave it out, and set fp16=True",
        "bf16_full_eval": "the engine holds the weights in its compute dtype: leave it out, and set bf16=True",
        "deepspeed": "an engine does the same itself: start with torchrun or python",
        "fsdp": "an engine shards the states over ranks itself: start with torchrun",
        "auto_find_batch_size": "it repeats training with smaller batches after running out of memory, which an "
        "engine cannot: set per_device_train_batch_size, with gradient_accumulation_steps",
        "parallelism_config": "an engine shards states and rows over ranks, not heads or sequences",
        "tpu_num_cores": "an engine does not run on TPUs",
        "save_on_each_node": "rank 0 writes, and all ranks write a checkpoint together: set output_dir to a folder "
        "shared by all machines",
    }
    for name, reason in why.items():
        if getattr(args, name, None):
            raise ConfigError(f"{name} is {getattr(args, name)!r}, which an engine does not support: {reason}.")
    for name, default in (("torch_compile_backend", "inductor"), ("torch_compile_mode", "default")):
        if getattr(args, name) not in (None, default):
            raise ConfigError(
                f"{name} is {getattr(args, name)!r}, but an engine compiles blocks with inductor in the default mode. "
                "Leave it out; torch_compile=True is enough."
            )
    if args.save_only_model and args.load_best_model_at_end:
        raise ConfigError(
            "save_only_model and load_best_model_at_end are set, but an engine loads the best weights from its states "
            "in the checkpoint. Set save_only_model=False, with save_total_limit to save space."
        )


def _refuse_other_losses(trainer: Any) -> None:
    """Raise ConfigError for Trainer losses without support in a gradient-free step."""
    args, rule = trainer.args, type(trainer.engine.optimizer).__name__
    if args.gradient_accumulation_steps > 1:
        raise ConfigError(
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, but {rule} has no gradients to "
            "accumulate: a step measures the loss of one batch. Multiply per_device_train_batch_size by it instead; "
            "offload=dict(micro_batch_size=...) cuts the batch."
        )
    wrong = {
        "label_smoothing_factor": trainer.label_smoother is not None,
        "compute_loss_func": trainer.compute_loss_func is not None,
        f"compute_loss of {type(trainer).__name__}": type(trainer).compute_loss is not Trainer.compute_loss,
    }
    argument = next((name for name, is_given in wrong.items() if is_given), None)
    if argument is not None:
        raise ConfigError(
            f"{argument} replaces the model's loss, but a step of {rule} uses the loss that the model returns, from "
            "several interleaved passes. Leave it out and let the model compute its loss, or call engine.step(batch, "
            "loss_fn) in your own loop."
        )


def _check_park(trainer: Any) -> None:
    """Raise ConfigError if the engine computes what is generated, or would be parked within a step."""
    if getattr(trainer, "vllm_generation", None) is None:
        raise ConfigError(
            "park=True lends the device to vLLM while it generates, and this Trainer generates nothing, or with the "
            "engine: set use_vllm=True in its arguments, or leave park out."
        )
    args = trainer.args
    if args.vllm_mode != "colocate":
        raise ConfigError(
            f"park=True lends the device to vLLM in this process, but vllm_mode is {args.vllm_mode!r}, and a server "
            "has memory of its own: leave park out, or set vllm_mode='colocate'."
        )
    if not args.vllm_enable_sleep_mode:
        raise ConfigError(
            "park=True takes the device back for each step, but vLLM keeps its memory: set vllm_enable_sleep_mode=True "
            "in the Trainer's arguments, or leave park out."
        )
    every = args.steps_per_generation * trainer.num_iterations
    if every % args.gradient_accumulation_steps:
        raise ConfigError(
            f"park=True needs texts that are generated between two steps, and these come every {every} batches of a "
            f"step of {args.gradient_accumulation_steps}: set steps_per_generation to a multiple of "
            "gradient_accumulation_steps."
        )


def weights_for_vllm(trainer: Any, vllm: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, weight) for TRL's vLLM: vLLM names, on the device, in the dtype that the model shows. Collective."""
    if hasattr(trainer.model, "peft_config"):
        raise ConfigError(
            "use_vllm with a PEFT model merges the adapter into the base for each generation, but an engine streams a "
            "frozen base: set use_vllm=False, or train the whole model."
        )
    with without_companions(trainer.model):  # vLLM samples from the trained model alone
        shown = dict(trainer.model.named_parameters())
    for name, value in trainer.engine.named_parameters(names=shown, as_given=True):
        yield vllm._fix_param_name_to_vllm(name), value.to(trainer.accelerator.device, shown[name].dtype)
