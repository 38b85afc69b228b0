"""transformers' Trainer and TRL's trainers, with an engine for the model that they train.

    class MySFT(OffloadMixin, trl.SFTTrainer): ...
    MySFT(model=model, args=args, ..., offload=dict(placement=Placement(...)))

`OffloadTrainer` is that of transformers' own. Where a Trainer must stay as it is, `offload_optimizer_factory` and
`OffloadCallback` do the most of it: see docs/reference/libraries.md.
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

from offload.engine.assemble import leave_off_checkpointing
from offload.engine.engine import Engine
from offload.engine.units.uncompiled import uncompiled
from offload.errors import ConfigError, warn
from offload.integrations.needs import need
from offload.integrations.optimizer import FOLDER, OffloadOptimizer, find_own
from offload.integrations.rules import rule_of_arguments, without_decay
from offload.integrations.saving import adapters_state, export_into, weights_dtype, written
from offload.optim.adamw import AdamW
from offload.optim.rule import UpdateRule

need("transformers", "accelerate")

from transformers import Trainer, TrainerCallback  # noqa: E402
from transformers.trainer import TRAINING_ARGS_NAME  # noqa: E402
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402

from offload.integrations.accelerate import OffloadAccelerator, give_back, open_engine, refuse_others  # noqa: E402

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = object


class OffloadMixin(_Base):
    """Goes before a Trainer, transformers' or TRL's, and gives its model to an engine when it is first needed.

    The arguments of the Trainer keep their meaning: `optim` (where there is a rule that does the same), learning rate,
    its schedule, weight decay, `max_grad_norm`, accumulation; with `bf16` the engine computes in bf16, over fp32
    masters, without autocast. Gradient checkpointing is left off, since units are computed again in any case. What an
    engine cannot do is refused by name. Ranks are the engine's: start with torchrun; DDP wraps nothing.

    What is saved is what the Trainer would save, and, in a checkpoint, the engine's states beside it. With PEFT that is
    the adapter.

    engine: the engine; None until training or evaluation begins.
    """

    engine: Engine | None = None
    model: Any
    optimizer: Any

    def __init__(self, *args: Any, offload: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """`offload`: settings of the engine: `placement` (a Placement, or its fields), and any keyword of `Engine` that
        the Trainer's arguments do not decide. `optimizer`, a rule, overrides `optim`, learning rate and decay.

        Raises ConfigError.
        """
        self._offload = dict(offload or {})
        self._dtype: torch.dtype | None = None  # in which the model is saved
        super().__init__(*args, **kwargs)
        self.model = self.model_wrapped = uncompiled(self.model)
        _put_callback_first(self)
        _adopt(self)

    def create_accelerator_and_postprocess(self) -> None:
        refuse_arguments(self.args)
        super().create_accelerator_and_postprocess()
        _adopt(self)
        if self.args.n_gpu > 1:
            warn(
                f"{self.args.n_gpu} GPUs are visible, and one process: an engine uses one. Start with torchrun to use "
                "all."
            )
            self.args._n_gpu = 1

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """As the Trainer's."""
        return uncompiled(super().call_model_init(trial))

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the engine brings up what the device needs."""

    # -- the engine ------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:  # noqa: ARG002
        """Give the model to an engine, unless it has it; return its optimizer."""
        leave_off_checkpointing(self.model)  # train() turns it on each time
        if not self._is_engaged:
            self._engage()
        assert self.engine is not None
        self.engine.zero_grad()  # of a train() that was interrupted
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
                "optimizers has an OffloadOptimizer over another model than the Trainer's: give that one."
            )
        self.engine, self.optimizer = own.engine, own
        self.accelerator.engine = self.engine
        self._share_weights()
        model: Any = self.model
        if self.engine.world_size > 1 and hasattr(model, "generate"):  # every forward is one of all ranks
            model.generate = partial(model.generate, synced_gpus=True)

    def _leave(self, engine: Engine) -> None:
        """Another model is trained from here on, or the same one that was given back."""
        if find_own(self.optimizer) is not None:
            self.optimizer = None
        self.accelerator._models = [each for each in self.accelerator._models if each is not engine.model]
        self.accelerator._optimizers = [each for each in self.accelerator._optimizers if find_own(each) is None]
        if engine.model is self.model:
            warn(
                "the Trainer's engine has given its model back (to another Trainer, or by close(restore=True)): its "
                "moments are gone, and the next engine begins without any."
            )
        elif not engine.closed:
            engine.close()

    def _open(self) -> OffloadOptimizer:
        """Return the optimizer of an engine that the arguments describe."""
        args, settings = self.args, dict(self._offload)
        give_back(self.model, self.optimizer)
        factory, given = self.optimizer_cls_and_kwargs or (None, {})
        if factory is offload_optimizer_factory:
            settings |= _without_rule(dict(given), self.model)
        if self.optimizer is not None and "optimizer" in settings:
            raise ConfigError(
                f"the Trainer has a {type(self.optimizer).__name__}, and offload a rule, "
                f"{settings['optimizer'].title}: leave one of them out."
            )
        for key, there in (("max_grad_norm", args.max_grad_norm), ("lr", args.learning_rate)):
            if key in settings and settings[key] != there:
                raise ConfigError(
                    f"offload has {key}={settings[key]!r}, and the Trainer's arguments {there!r}: it is theirs to say. "
                    f"Set TrainingArguments.{'learning_rate' if key == 'lr' else key}."
                )
            settings.pop(key, None)
        precision = "bf16" if args.bf16 or weights_dtype(self.model) is None else "fp32"
        if args.bf16 and settings.get("precision", "bf16") != "bf16":
            raise ConfigError("offload has precision='fp32', and the Trainer's arguments bf16=True: leave one out.")
        settings = {
            "max_grad_norm": args.max_grad_norm,
            "precision": precision,
            "device": str(args.device),
            "seed": args.seed,
            "compile": "auto" if args.torch_compile else "never",
            **settings,
        }
        self._dtype = weights_dtype(self.model)
        if "optimizer" in settings:
            return OffloadOptimizer(open_engine(self.model, settings.pop("optimizer"), settings))
        create: Any = super().create_optimizer
        is_own = type(self).get_optimizer_cls_and_kwargs is not Trainer.get_optimizer_cls_and_kwargs
        if self.optimizer is None and (factory or is_own or create.__func__ is not Trainer.create_optimizer):
            create()
        if self.optimizer is not None:
            engaged: OffloadOptimizer = self.accelerator.engage(self.model, self.optimizer, settings)
            if getattr(self.lr_scheduler, "optimizer", None) is self.optimizer:
                engaged.follow(self.lr_scheduler)
            return engaged
        decayed = set(self.get_decay_parameter_names(self.model))
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        engine = open_engine(self.model, rule_of_arguments(args, names, decayed), settings)
        own, others = [n for n in names if n in decayed], [n for n in names if n not in decayed]
        return OffloadOptimizer(engine, [(1.0, args.weight_decay, own), (1.0, 0.0, others)])

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:  # noqa: ARG002
        """Wrap it in nothing; evaluation may be what comes first."""
        if model is self.model:
            if self.optimizer is None:
                self.create_optimizer()
            if not self._is_engaged or find_own(self.optimizer) is None:
                self._engage()
            leave_off_checkpointing(model)
        return model

    def _share_weights(self) -> None:
        """Let TRL's vLLM have the weights of the engine."""
        vllm = getattr(self, "vllm_generation", None)
        if vllm is not None:
            vllm._iter_named_params = partial(weights_for_vllm, self, vllm)

    # -- a step ----------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the Trainer's; with a rule without gradients the whole step is made here, on the batch."""
        own = self._own_optimizer
        if own.has_gradients:
            loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
            return loss
        _refuse_other_losses(self)
        model.train()
        return own.descend(self._prepare_inputs(inputs)).loss.to(self.args.device)

    # -- saving ----------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save on all ranks, of which older Trainers ask only the first."""
        if not self._is_engaged:
            super().save_model(output_dir, _internal_call)
            return
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write what the Trainer would write. Collective."""
        if not self._is_engaged:
            super()._save(output_dir, state_dict)
            return
        assert self.engine is not None
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        if hasattr(self.model, "peft_config"):
            weights = adapters_state(self.engine)
            with written(self.engine, folder):
                if self.args.should_save:  # older ones write on whichever rank they are called
                    with self.engine.answering(weights):
                        super()._save(output_dir, weights)
            return
        export_into(self.engine, folder, self._dtype)
        with written(self.engine, folder):
            if self.args.should_save:
                speaker = self.processing_class or getattr(self.data_collator, "tokenizer", None)
                if speaker is not None:
                    speaker.save_pretrained(folder)
                torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        own = self._own_optimizer
        with written(own.engine, Path(output_dir)):
            super()._save_optimizer_and_scheduler(output_dir)
        own.save(Path(output_dir) / FOLDER)

    @property
    def _own_optimizer(self) -> OffloadOptimizer:
        own = find_own(self.optimizer)
        assert own is not None
        return own

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Leave the weights to the engine, which takes them with its states; or, of a checkpoint without any, take the
        weights before there is an engine.
        """
        folder = Path(resume_from_checkpoint)
        if (folder / FOLDER).is_dir():
            return
        if (folder / "optimizer.pt").is_file() or self._is_engaged:
            raise ConfigError(
                f"{folder} has no folder {FOLDER!r}: it was saved by another trainer, whose optimizer states an engine "
                "cannot take over. Load its weights (from_pretrained) into the model that the Trainer is given, and "
                "begin anew."
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (Path(checkpoint) / FOLDER).is_dir():
            self._own_optimizer.load(Path(checkpoint) / FOLDER)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        """Take the weights of the best checkpoint, with the states that belong to them."""
        if not self._is_engaged:
            super()._load_best_model()
            return
        self._own_optimizer.load(Path(self.state.best_model_checkpoint) / FOLDER)


class OffloadTrainer(OffloadMixin, Trainer):
    """transformers' Trainer over an engine: see `OffloadMixin`."""


class OffloadCallback(TrainerCallback):
    """Adds to what a Trainer logs of its steps: `grad_norm`, the true one, `offload/bytes`, moved for the last step
    over all links, and `offload/exposed_seconds`, for which compute waited for them; with MeZO `seed`, `lr`,
    `projected_grad`, `loss_plus` and `loss_minus`, by which `engine.replay` makes the step again.

    With `offload_optimizer_factory`, which adds one, it also saves the engine's states into each checkpoint, and reads
    them where the Trainer resumes from one in its output_dir. An `OffloadMixin` has one of its own.
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
        trainer = _calling_trainer(model)
        if trainer is not None and not isinstance(trainer.accelerator, OffloadAccelerator):
            _adopt(trainer)
            trainer.accelerator.engine = own.engine
        if args.load_best_model_at_end and trainer is not None and not isinstance(trainer, OffloadMixin):
            raise ConfigError(
                "load_best_model_at_end is set, and a plain Trainer would load the best weights into the model, whose "
                "own are in an engine. Train with OffloadTrainer, or class X(OffloadMixin, ...), or set it to False."
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
    """Let a Trainer have an OffloadCallback, before those that log elsewhere."""
    callbacks = trainer.callback_handler.callbacks
    own = next((each for each in callbacks if isinstance(each, OffloadCallback)), None) or OffloadCallback()
    callbacks[:] = [own, *(each for each in callbacks if each is not own)]


def offload_optimizer_factory() -> Callable[..., OffloadOptimizer]:
    """For a Trainer that must stay as it is:
    `Trainer(model, args, optimizer_cls_and_kwargs=(offload_optimizer_factory, {...}))`.

    Its settings: `lr`, `betas`, `eps`, `weight_decay` of AdamW, or `optimizer`, a rule; and those of the engine, but
    for `max_grad_norm`, which is the Trainer's. The Trainer is given an `OffloadCallback`, if it has none. One rank:
    over several the Trainer would wrap the model; that is `OffloadTrainer`'s.
    """
    return _make_optimizer


def _make_optimizer(model: nn.Module, **settings: Any) -> OffloadOptimizer:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"offload_optimizer_factory: there are {dist.get_world_size()} ranks, for which a plain Trainer wraps the "
            "model in DDP. Train with OffloadTrainer, or class X(OffloadMixin, ...)."
        )
    give_back(model)
    trainer, given, model = _calling_trainer(model), model, uncompiled(model)
    if trainer is not None and model is not given:
        trainer.model = trainer.model_wrapped = model
    options = _without_rule(settings, model)
    if not options["optimizer"].has_gradients:
        raise ConfigError(
            f"offload_optimizer_factory was given {type(options['optimizer']).__name__}, which makes a step of forward "
            "passes alone, and a plain Trainer goes backward: train with OffloadTrainer, or class X(OffloadMixin, ...)."
        )
    if weights_dtype(model) is None or (trainer is not None and trainer.args.bf16):
        options.setdefault("precision", "bf16")
    if trainer is not None:
        refuse_arguments(trainer.args)
        options.setdefault("compile", "auto" if trainer.args.torch_compile else "never")
        limit = trainer.args.max_grad_norm
        if (options.setdefault("max_grad_norm", limit) or None) != (limit or None):
            raise ConfigError(
                f"offload_optimizer_factory was given max_grad_norm {options['max_grad_norm']}, and the Trainer's is "
                f"{limit}: it is theirs to say. Leave it out, and set TrainingArguments.max_grad_norm."
            )
        _put_callback_first(trainer)
        _adopt(trainer)
    return OffloadOptimizer(open_engine(model, options.pop("optimizer"), options))


def _adopt(trainer: Trainer) -> None:
    """Let a Trainer's backward and its clipping be the engine's."""
    refuse_others(trainer.accelerator)
    trainer.accelerator.__class__ = OffloadAccelerator  # which the Trainer has made itself: ours has nothing more
    vars(trainer)["_mixed_mesh_grads"] = False  # else the Trainer looks at gradients to find that out


def _calling_trainer(model: nn.Module) -> Trainer | None:
    """Return the Trainer of this model within whose call this is, or None. It tells neither a factory nor a callback
    which it is, and a factory not its arguments.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and found.model is model:
            return found
        frame = frame.f_back
    return None


def _without_rule(settings: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return settings in which a rule stands for those of AdamW, with transformers' own choice of what decays."""
    own = {key: settings.pop(key) for key in ("lr", "betas", "eps", "weight_decay") if key in settings}
    rule = settings.get("optimizer")
    if rule is None:
        decayed = set(Trainer.get_decay_parameter_names(None, model))
        names = [name for name, p in model.named_parameters() if p.requires_grad and name not in decayed]
        return {**settings, "optimizer": without_decay(AdamW(**{"weight_decay": 0.0, **own}), names)}
    if not isinstance(rule, UpdateRule) or set(own) - {"lr"}:
        raise ConfigError(
            f"offload_optimizer_factory was given optimizer={rule!r} and {sorted(own)}: a rule, such as "
            "AdamW(lr=1e-4), has these itself."
        )
    whole: Any = rule
    return {**settings, "optimizer": replace(whole, **own)}


def refuse_arguments(args: Any) -> None:
    """Raise ConfigError where a Trainer's arguments ask for what does not go with an engine."""
    why = {
        "fp16": "an engine computes in fp32 or bf16: set bf16=True",
        "fp16_full_eval": "the weights are in the engine, in what it computes in: leave it out",
        "bf16_full_eval": "the weights are in the engine, in what it computes in: leave it out, and set bf16=True",
        "deepspeed": "an engine does what it does: start with torchrun or python",
        "fsdp": "an engine shares out the states over ranks itself: start with torchrun",
        "auto_find_batch_size": "it trains again with less after running out of memory, which an engine does not do: "
        "set per_device_train_batch_size, and offload=dict(micro_batch_size=...)",
        "parallelism_config": "an engine shares out the states over ranks, and rows, not heads or sequences",
        "tpu_num_cores": "an engine has no TPU",
        "save_on_each_node": "the first rank writes, and all ranks a checkpoint together: set output_dir to a folder "
        "that all machines share",
    }
    for name, reason in why.items():
        if getattr(args, name, None):
            raise ConfigError(f"{name} is {getattr(args, name)!r}, which does not go with an engine: {reason}.")
    for name, taken in (("torch_compile_backend", "inductor"), ("torch_compile_mode", "default")):
        if getattr(args, name) not in (None, taken):
            raise ConfigError(
                f"{name} is {getattr(args, name)!r}, which does not go with an engine: it compiles blocks, with "
                "inductor as it is. Leave that out; torch_compile=True is enough."
            )
    if args.save_only_model and args.load_best_model_at_end:
        raise ConfigError(
            "save_only_model and load_best_model_at_end are set: an engine takes the best weights from its own states "
            "in the checkpoint. Set save_only_model=False, with save_total_limit where there is little room."
        )


def _refuse_other_losses(trainer: Any) -> None:
    """Raise ConfigError where a Trainer asks for what a step without gradients does not do."""
    args, rule = trainer.args, type(trainer.engine.optimizer).__name__
    if args.gradient_accumulation_steps > 1:
        raise ConfigError(
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, and {rule} has no gradients: a step "
            "measures the loss of one batch. Set per_device_train_batch_size to so many times as much; it is cut by "
            "offload=dict(micro_batch_size=...)."
        )
    wrong = {
        "label_smoothing_factor": trainer.label_smoother is not None,
        "compute_loss_func": trainer.compute_loss_func is not None,
        f"compute_loss of {type(trainer).__name__}": type(trainer).compute_loss is not Trainer.compute_loss,
    }
    given = next((name for name, is_given in wrong.items() if is_given), None)
    if given is not None:
        raise ConfigError(
            f"{given} is the Trainer's own loss, and a step of {rule} runs the model by turns, several times at once, "
            "for the loss that it returns itself. Leave it out, let the model make its loss, or call "
            "engine.step(batch, loss_fn) in a loop of your own."
        )


def weights_for_vllm(trainer: Any, vllm: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as TRL gives them to vLLM: by the names that it knows, on the device, in what the engine
    computes in. Collective.
    """
    if hasattr(trainer.model, "peft_config"):
        raise ConfigError(
            "use_vllm with a PEFT model wants the adapter merged into the base for each generation, which an engine "
            "streams, frozen: set use_vllm=False, or train the whole model."
        )
    shown = dict(trainer.model.named_parameters())
    for name, value in trainer.engine.named_parameters():
        yield vllm._fix_param_name_to_vllm(name), value.to(trainer.accelerator.device, shown[name].dtype)
