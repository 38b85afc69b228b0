"""accelerate's Accelerator with an engine for the trained model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from offload.engine.engine import Engine
from offload.errors import ConfigError
from offload.integrations import require_libraries
from offload.integrations.optimizer import FOLDER, OffloadOptimizer, find_own
from offload.integrations.saving import complete_or_absent, share_write_errors, state_of
from offload.integrations.wrap import engage

require_libraries("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402


class OffloadAccelerator(Accelerator):
    """An Accelerator with an engine for the trained model.

    `prepare(model, optimizer, ...)` makes the engine; the torch optimizer is replaced by the equivalent update rule.
    The model gets no wrapper: no autocast (mixed_precision="bf16" or "fp16": the engine computes in it with fp32 master
    weights, and scales the loss in fp16 instead of a GradScaler), no DDP (the engine manages the ranks).
    `clip_grad_norm_` returns the norm over all gradients and sets the clipping limit in the engine. Models prepared
    without an optimizer stay plain PyTorch.

    engine: None before `prepare`.
    """

    engine: Engine | None = None
    _models: list[nn.Module]
    _offload: Mapping[str, Any] = {}
    _is_saving = False

    def __init__(self, *args: Any, offload: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """`offload`: engine settings, with the keywords of `Engine`. All other arguments go to Accelerator."""
        super().__init__(*args, **kwargs)
        self._offload = dict(offload or {})
        refuse_others(self)

    # -- training setup -----------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Like Accelerator.prepare, but the optimizer's model moves into an engine."""
        return super().prepare(*self._engage_objects(args), device_placement=device_placement)

    def _engage_objects(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the objects with the engine's optimizer in place of the torch optimizer."""
        optimizers = [
            o for o in objects if isinstance(o, torch.optim.Optimizer) and not isinstance(o, AcceleratedOptimizer)
        ]
        if not optimizers:
            return objects
        optimizer, model = optimizers[0], None
        if isinstance(optimizer, OffloadOptimizer):  # made by the user, over an engine with the model
            self.engine = optimizer.engine
            return objects
        # The model with all of these parameters: other models, for example a teacher, are prepared as plain modules.
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        model = next(
            (o for o in objects if isinstance(o, nn.Module) and trained <= {id(p) for p in o.parameters()}), None
        )
        if len(optimizers) > 1 or model is None or self.engine is not None:
            raise ConfigError(
                f"prepare() was given {len(optimizers)} optimizers"
                f"{'' if model else ', not with the model that they train'}"
                f"{' after an engine was made' if self.engine else ''}: an OffloadAccelerator has a single "
                "engine, for a single model. Call prepare(model, optimizer, ...) once; train another model in another "
                "process."
            )
        own = self.engage(model, optimizer)
        for scheduler in objects:
            if getattr(scheduler, "optimizer", None) is optimizer:
                own.follow(scheduler)
        replaced: dict[int, Any] = {id(optimizer): own, id(model): own.engine.model}
        return tuple(replaced.get(id(o), o) for o in objects)

    def engage(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any] | None = None
    ) -> OffloadOptimizer:
        """Move a model into an engine. Return the engine's optimizer, with the parameter groups of `optimizer`.

        `settings`: engine settings; None: those of the accelerator. Raises ConfigError.
        """
        settings = dict(self._offload if settings is None else settings)
        # Settings of the user come last and win.
        defaults: dict[str, Any] = {"device": str(self.device)}
        if self.mixed_precision != "no":
            defaults["precision"] = self.mixed_precision
        if self.state.dynamo_plugin.backend.value != "NO":
            defaults["compile"] = "always"
        own = engage(model, optimizer, defaults | settings)
        self.engine = own.engine
        return own

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Like Accelerator.prepare_model, but the engine's model stays unwrapped."""
        if not self._is_own(model):
            return super().prepare_model(model, device_placement, evaluation_mode)
        # accelerate lists a model once, for `save_state`.
        if all(model is not own_model for own_model in self._models):
            self._models.append(model)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Like Accelerator.prepare_optimizer, but a GradScaler leaves the engine's optimizer alone."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        self.drop_scaler()
        return prepared

    def drop_scaler(self) -> None:
        """Let the engine's optimizer step without the GradScaler of accelerate: the engine scales the loss itself."""
        for prepared in self._optimizers:
            if find_own(prepared) is not None:
                self.scaler = None
                prepared.scaler = None
                prepared.__class__ = _PreparedOptimizer  # made by accelerate; the subclass adds no fields

    def _is_own(self, model: Any) -> bool:
        return self.engine is not None and model is self.engine.model and not self.engine.closed

    # -- a step ----------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Add the gradients of a loss averaged over the ranks, as with DDP."""
        if self.engine is None:
            super().backward(loss, **kwargs)
            return
        kwargs.pop("learning_rate", None)  # for LOMO in Trainer; the optimizer has the rate
        if kwargs:
            raise ConfigError(
                f"accelerator.backward was given {next(iter(kwargs))}, an argument that an engine does not support."
            )
        # DDP averages gradients over ranks, and the engine adds them.
        self.engine.backward(loss / self.gradient_accumulation_steps / self.engine.world_size)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing for the engine's optimizer: its gradients have no scale."""
        if self.engine is None:
            super().unscale_gradients(optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Return the gradient norm over all parameters and ranks. The next step clips the gradients to `max_norm`."""
        own = self._own_optimizer()
        if own is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        return own.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        if self.engine is not None and self.engine.world_size > 1:
            raise ConfigError(
                f"clip_grad_value_ was called over {self.engine.world_size} ranks, and no rank has whole gradients: "
                "call clip_grad_norm_."
            )
        super().clip_grad_value_(parameters, clip_value)

    def _own_optimizer(self) -> OffloadOptimizer | None:
        return next(filter(None, map(find_own, self._optimizers)), None)

    # -- states ----------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Like Accelerator.save_state, with engine states and model in a separate folder.

        Hooks get the model with readable parameters, and a placeholder in place of the weights, for hooks that pop
        them.
        """
        own = self._own_optimizer()
        if own is None:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        # Last, so hooks of the user see as many weights as models: diffusers pops both.
        handle = self.register_save_state_pre_hook(_drop_weights)
        folder = Path(output_dir or ".")
        if self.project_configuration.automatic_checkpoint_naming:
            folder = Path(self.project_dir or ".") / "checkpoints" / f"checkpoint_{self.save_iteration}"
        with complete_or_absent(folder, is_writer=self.is_main_process):
            self._is_saving = True
            try:
                with share_write_errors(own.engine, folder):
                    place = super().save_state(output_dir, safe_serialization, **kwargs)
            finally:
                self._is_saving = False
                handle.remove()
            # After accelerate's own files: the folder is removed as a whole if this fails.
            own.save(Path(place) / FOLDER)
        return place

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Like Accelerator.load_state, for a folder from `save_state`.

        Hooks get the model after the engine states are loaded. Loading equal values into the model does nothing; other
        values raise ConfigError.
        """
        first = self.register_load_state_pre_hook(self._load_own)
        # Before hooks of the user: they find the loaded weights.
        self._load_model_state_pre_hook.move_to_end(first.id, last=False)
        last = self.register_load_state_pre_hook(self._drop_own)
        try:
            super().load_state(input_dir, *args, **kwargs)
        finally:
            first.remove()
            last.remove()
            if self.engine is not None:
                vars(self.engine.model).pop("load_state_dict", None)

    def _load_own(self, _models: list[nn.Module], folder: str) -> None:
        own = self._own_optimizer()
        if own is not None:
            own.load(Path(folder) / FOLDER)
            vars(own.engine.model)["load_state_dict"] = partial(_check_same, own.engine.model)

    def _drop_own(self, models: list[nn.Module], _folder: str) -> None:
        models[:] = [model for model in models if not self._is_own(model)]

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Like Accelerator.get_state_dict. For the engine's model: weights in the original dtype, all in host memory.

        Collective.
        """
        if not self._is_own(model):
            return super().get_state_dict(model, unwrap)
        if self._is_saving:
            return _NoWeights()
        assert self.engine is not None
        return state_of(self.engine)


class _PreparedOptimizer(AcceleratedOptimizer):
    """The engine's optimizer as accelerate wraps it. A schedule does not move in a step that the engine skips."""

    @property
    def step_was_skipped(self) -> bool:
        own = find_own(self)
        return own is not None and own.step_was_skipped


class _NoWeights:
    """Placeholder for the engine's weights in save_state hooks.

    accelerate stores none of these weights.
    """

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigError(
            "a hook of save_state reads the weights of the engine's model, which are not all in memory; they are saved "
            f"in {FOLDER}/. Remove them from the list, and call model.save_pretrained(folder), or "
            "accelerator.get_state_dict(model) on all ranks before save_state."
        )

    __getattr__ = _refuse
    __getitem__ = _refuse
    __iter__ = _refuse
    __len__ = _refuse
    __contains__ = _refuse
    __reduce_ex__ = _refuse  # of pickle, for torch.save


def _drop_weights(_models: list[nn.Module], weights: list[Any], _folder: str) -> None:
    weights[:] = [each for each in weights if not isinstance(each, _NoWeights)]


def _check_same(model: nn.Module, weights: Mapping[str, Any], strict: bool = True, **_: Any) -> Any:
    """Replacement for `load_state_dict`: accepts only values equal to the present ones.

    Raises ConfigError otherwise.
    """
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name in own:
        if name in weights and not torch.equal(own[name].cpu(), weights[name].to("cpu", own[name].dtype)):
            raise ConfigError(
                f"a hook of load_state loads other values for {name} than the engine has loaded from {FOLDER}/: leave "
                "loading to the engine, or load the model before prepare() and begin a new run."
            )
    unexpected = [name for name in weights if name not in own]
    if strict and unexpected:
        raise ConfigError(f"a hook of load_state loads {unexpected[0]}, but the model has no such weight.")
    return _IncompatibleKeys([name for name in own if name not in weights], unexpected)


def refuse_others(accelerator: Accelerator) -> None:
    """Raise ConfigError for accelerate settings that duplicate engine functions or are not supported."""
    dynamo = accelerator.state.dynamo_plugin
    unsupported = {
        "GradScalerKwargs": accelerator.scaler_handler is not None,
        "mixed_precision='fp8'": accelerator.mixed_precision == "fp8",
        "DeepSpeed": accelerator.distributed_type.value == "DEEPSPEED",
        "FSDP": accelerator.distributed_type.value == "FSDP",
        "Megatron-LM": accelerator.distributed_type.value == "MEGATRON_LM",
        "XLA": accelerator.distributed_type.value == "XLA",
        f"dynamo_backend={dynamo.backend.value.lower()!r}": dynamo.backend.value not in ("NO", "INDUCTOR"),
        f"dynamo's mode={dynamo.mode!r}": dynamo.mode != "default",
        "parallelism_config": accelerator.parallelism_config is not None,
        "save_on_each_node": accelerator.project_configuration.save_on_each_node,
    }
    wrong = [name for name, is_on in unsupported.items() if is_on]
    if wrong:
        raise ConfigError(
            f"accelerate is set up for {', '.join(wrong)}, which an engine does not support: an engine shards the "
            "states over ranks itself, saves into a folder shared by all machines, computes in fp32, bf16, or fp16 "
            "with its own loss scale, and compiles with inductor in the default mode. Start with torchrun or python, "
            "mixed_precision 'no', 'bf16' or 'fp16', and without these settings."
        )
