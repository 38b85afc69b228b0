"""Model ownership by an engine: registration, refused operations, and detection of outside changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar, cast
from weakref import ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offload.engine.units.offloaded_tensor import OffloadedTensor, make_placeholder
from offload.engine.units.snapshots import past_subclasses
from offload.engine.units.unit import Unit
from offload.errors import ConfigError, DoesNotFitError, format_bytes
from offload.layout.planes import DTYPES
from offload.layout.regions import ParameterInfo
from offload.machine.limits import memory

_T = TypeVar("_T")
_CALL, _SAVE = nn.Module._call_impl.__code__, "save_pretrained"
_CHANGE_BEFORE = (
    "Change the model before Engine(). To keep the trained weights of this one, call engine.close(restore=True) or "
    "engine.save_checkpoint(folder) first."
)
_OWNED = (
    "belongs to an open engine, which holds its weights. Call close(restore=True) on that engine first (.engine of a "
    "Trainer or an accelerator). If nothing refers to the engine any more, the weights are lost: build a new model."
)
_SPENT = (
    "belonged to an engine that was closed without restore=True: its weights are lost. Build a new model, or load an "
    "export of engine.export."
)
_FAILED = "was passed to an Engine() that failed: some of its weights are lost. Build a new model."
_RETURNED = (
    "is a placeholder: its engine was closed with close(restore=True), and the parameter is back in the model. Read "
    "it from there."
)
_LOST = (
    "{name} cannot {how}: its weights are in an engine, or were lost with a closed one. Between steps, engine.edit "
    "changes values: for _, value in engine.edit([{name!r}]): value.mul_(0.5). In a forward, compute with a changed "
    "copy. "
) + _CHANGE_BEFORE
_REFUSALS = {
    "write": _LOST,
    "in place": _LOST,
    "gradient": (
        "{name} was read outside the model's forward and received a gradient, which would be lost because its weights "
        "are in an engine. For a term such as a penalty, read it within the forward, or in the loss_fn of "
        "engine.step, from the first call on; where no gradient is needed, read parameter.detach(), or under "
        "torch.no_grad(). (For weight decay use the optimizer's.)"
    ),
    "derivative": (
        "torch.autograd.grad was asked for the gradient of {name}, which no graph has: the engine computes it unit by "
        "unit. Call loss.backward() and read parameter.grad (in a loop over offload.wrap; optimizer.zero_grad() drops "
        "it), once for each loss. To balance losses, take torch.autograd.grad of an activation, such as the input of "
        "the last layer."
    ),
    "hook": (
        "a hook on {name} (register_hook or register_post_accumulate_grad_hook) would never run: the engine collects "
        "gradients unit by unit. engine.grad_norm() is the norm of all gradients, max_grad_norm clips them, and "
        "requires_grad_(False) prevents one; a hook of a module does run."
    ),
    "address": (
        "{name} has no address (data_ptr(), storage()): its weights are in an engine, or were lost with a closed one. "
        "Read a copy (parameter.detach().clone(), or state_dict() of the model), or the master weights with "
        "engine.named_parameters(); engine.export(folder) writes them as a Hugging Face folder."
    ),
}
_FILLER = 0.5
"""Value of weights whose true values a discarded run does not need. It lies in the usual ranges: of probabilities, of
positions in a grid, of logarithms. Torch's kernels read out of bounds where NaN becomes an index.
"""
_OWNERSHIPS: set[ref[ModelOwnership]] = set()
"""Ownerships of live models whose weights are in an engine or gone.

Weak-reference callbacks are C functions only: a Python callback, as in the `weakref` containers, would lose a Ctrl-C
arriving meanwhile.
"""


def refuse_owned(model: nn.Module) -> None:
    """Raise ConfigError if an engine has, or took away for good, weights of `model`."""
    for ownership in _living(_OWNERSHIPS):
        part = ownership.overlap(model)
        if part is not None:
            raise ConfigError(f"{part} {ownership.state}")


def engine_of(model: nn.Module) -> Any:
    """Return the engine with weights of `model`, if registered by `keep`, else None."""
    return next(
        (
            ownership.engine
            for ownership in _living(_OWNERSHIPS)
            if ownership.engine is not None and ownership.overlap(model)
        ),
        None,
    )


def _living(known: Iterable[ref[_T]]) -> list[_T]:
    return [target for target in [reference() for reference in list(known)] if target is not None]


def refuse_copy(operation: str) -> NoReturn:
    """Raise the ConfigError for an operation that bypasses the engine to copy or change a model."""
    raise ConfigError(
        f"{operation} does not work on this model: its weights are in an engine, or were lost with one closed without "
        "restore=True. engine.export(folder) writes them as a Hugging Face folder, engine.save_checkpoint(folder) "
        "writes all states (engine.load_checkpoint(folder) reads them; load a state dict before Engine() or "
        "offload.wrap, or value by value with engine.edit), and engine.close(restore=True) puts the weights back into "
        "the model. If the engine is closed already, or Engine() failed, build a new model."
    )


def refuse_change(name: str, change: str) -> NoReturn:
    """Raise the ConfigError for a changed model part unknown to the engine."""
    raise ConfigError(f"{name} {change} after Engine() was created, which would not see the change. {_CHANGE_BEFORE}")


def check_tensors(model: nn.Module, has_fill: bool) -> None:
    """Raise ConfigError for a scripted module, for a sparse parameter or buffer, since the engine stores elements
    densely, and for one without shape (lazy) or values (meta), unless a function fills the model (`has_fill`).
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or 'the model'} is a scripted module (torch.jit.script or torch.jit.trace): its compiled code "
                "reads its own weights, so an engine cannot move them. Build the model with the original module, and "
                "script it after the training: engine.close(restore=True), then torch.jit.script(...)."
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} has no shape yet: it belongs to a lazy module (nn.LazyLinear and others), and the first call "
                "creates it. Call the model once on a batch before the optimizer and Engine() (or offload.wrap) are "
                "made: with torch.no_grad(): model(batch)."
            )
        if tensor.is_meta and not has_fill:
            raise ConfigError(
                f"{name} is on the device 'meta', where it has no values: load the model with from_pretrained (for a "
                "new model leave out init_empty_weights and torch.device('meta')), or call model.to_empty and fill it."
            )
        if tensor.layout is not torch.strided:
            raise ConfigError(
                f"{name} is sparse ({tensor.layout}), but the engine stores only dense parameters and buffers: store "
                "its indices and values as separate tensors, and build it in the forward."
            )


class EngineQueries(Protocol):
    """Engine queries available through the model."""

    def read(self, info: ParameterInfo, dtype: torch.dtype) -> torch.Tensor:
        """Return a fresh CPU copy of a parameter, in the compute dtype or in fp32."""
        ...

    def is_busy(self) -> bool:
        """True if the engine is at work."""
        ...

    def gradient(self, info: ParameterInfo) -> torch.Tensor | None:
        """Return a parameter's gradient in the step of a user training loop, in place; None: no gradient."""
        ...

    def drop_gradient(self, info: ParameterInfo) -> None:
        """Drop a parameter's gradient of the last step. Raises ConfigError during a step with gradients."""
        ...


class _Override:
    """Handle of the `save_pretrained` in a model's instance."""

    def __init__(self, model: ref[nn.Module]) -> None:
        self._model = model

    def remove(self) -> None:
        model = self._model()
        if model is not None:
            vars(model).pop(_SAVE, None)


class ModelOwnership:
    """Model ownership by an engine, from taking the weights until restore, or forever.

    Creates the placeholder parameters, answers reads, and lets every module refuse load and copy. Modules refer to the
    ownership by hooks; the ownership refers to modules weakly, so a surviving model part keeps neither the rest nor the
    engine alive.

    `state`: text in errors for users of the model. `engine`: an engine kept alive by the model, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        infos: Sequence[ParameterInfo],
        units: Sequence[Unit],
        device: torch.device,
        functions: Mapping[int, Mapping[Any, Callable[..., torch.Tensor]]],
    ) -> None:
        """`functions`: see `Splitting.functions`."""
        self._queries: Callable[[], EngineQueries | None] = lambda: None  # a weak reference after `connect`
        self.engine: Any = None
        self.placeholders = [
            make_placeholder(info, DTYPES[info.compute], device, self, functions.get(info.index)) for info in infos
        ]
        self._units = [ref(unit) for unit in units]
        # Modules without weights may be shared: transformers reuses one activation module in several models.
        self._names = {
            ref(module): name for name, module in model.named_modules() if next(module.parameters(), None) is not None
        }
        self._places: dict[ref[nn.Module], dict[str, ParameterInfo]] = {}
        for unit in units:
            for place in unit.places:
                self._places.setdefault(ref(place.module), {})[place.key] = infos[place.parameter]
        self._state_dict_values: dict[int, tuple[str, ref[torch.Tensor]]] = {}  # (name, value) given out last
        self.state = _OWNED
        self._note_read: Callable[[int], None] | None = None  # not None in a watched run
        self._handles: list[Any] = []  # of hooks in the modules
        self._is_saving = False  # in the `save_pretrained` of the model

    def connect(self, queries: EngineQueries) -> None:
        """Connect the engine. Only a weak reference is stored."""
        self._queries = ref(queries)

    def guard(self) -> None:
        """Register module hooks for state_dict and load, after the engine has taken the weights."""
        for module in _living(self._names):
            self._handles.append(module.register_state_dict_pre_hook(self._before_state_dict))
            self._handles.append(module.register_state_dict_post_hook(partial(self._after_state_dict)))
            self._handles.append(module.register_load_state_dict_pre_hook(self._on_load))
            if isinstance(module, nn.TransformerEncoder) and module.use_nested_tensor:
                self._handles.append(module.register_forward_pre_hook(self._check_padding, with_kwargs=True))
        _OWNERSHIPS.add(ref(self, _OWNERSHIPS.discard))

    def overlap(self, model: nn.Module) -> str | None:
        """Describe the first module of `model` in engine ownership, or return None."""
        mine = {id(parameter) for parameter in self.placeholders}
        for unit in _living(self._units):  # in a unit on the device, scripts see other Parameters
            mine.update(id(place.module._parameters.get(place.key)) for place in unit.places if unit.resident)
        for name, module in model.named_modules():
            shared = any(id(parameter) in mine for parameter in module._parameters.values())
            if shared or ref(module) in self._names:
                return f"{name or 'the model'} ({type(module).__name__})"
        return None

    @contextmanager
    def watched(self, note_read: Callable[[int], None]) -> Iterator[None]:
        """Pass the index of each offloaded parameter that is read to `note_read`, and return filler values.

        The recording pass makes the unit resident. The next pass reads true values.
        """
        self._note_read = note_read
        try:
            yield
        finally:
            self._note_read = None
            for each in self.placeholders:  # a backward over filler values is allowed here, and leaves gradients
                past_subclasses(setattr, each, "grad", None)

    def read_as_given(self, dtypes: Sequence[torch.dtype]) -> None:
        """Let scripts read master weights in fp32, where the model had fp32 and computes in another dtype.

        `dtypes`: parameter dtypes of the original model. The forward of the model reads the compute dtype as before.
        """
        for stand_in, given in zip(cast(list[OffloadedTensor], self.placeholders), dtypes, strict=True):
            if given == torch.float32 != stand_in.dtype:
                stand_in.master = cast(OffloadedTensor, make_placeholder(stand_in.info, given, stand_in.place, self))

    def save_as_given(self, model: nn.Module, original: Callable[[], AbstractContextManager[None]]) -> None:
        """Let `save_pretrained` of the model write the original configuration, shown during the context `original`."""
        if hasattr(type(model), _SAVE) and _SAVE not in vars(model):
            vars(model)[_SAVE] = partial(self._call_as_given, getattr(model, _SAVE), original)
            self._handles.append(_Override(ref(model)))

    def _call_as_given(
        self, function: Callable[..., Any], original: Callable[[], AbstractContextManager[None]], *args: Any, **kw: Any
    ) -> Any:
        """Call a function while every parameter of the model is a placeholder, also in units on the device.

        transformers writes the dtype of the first parameter to config.json. PEFT saves the result of a forward as a
        learned prompt.
        """
        with original(), ExitStack() as shown:
            for unit in _living(self._units):
                shown.enter_context(unit.showing({p.parameter: self.placeholders[p.parameter] for p in unit.places}))
                shown.enter_context(unit.unrouted())
            self._is_saving = True
            shown.callback(setattr, self, "_is_saving", False)
            return function(*args, **kw)

    def is_in_model(self) -> bool:
        """True while the engine or a module of the model runs in this thread.

        A look at the callers, because a hook after a forward is lost with Ctrl-C.
        """
        queries, frame = self._queries(), sys._getframe(1)
        if self._is_saving:
            return False
        if self._note_read is not None or queries is None or queries.is_busy():
            return True
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code is _CALL and ref(caller.f_locals["self"]) in self._names:
                return True
            caller = caller.f_back
        return False

    def _dtype_read(self, info: ParameterInfo) -> torch.dtype:
        """Return the dtype of reads at this moment."""
        master = cast(OffloadedTensor, self.placeholders[info.index]).master
        if master is None or self.is_in_model():
            return DTYPES[info.compute]
        return torch.float32

    def values_of(self, info: ParameterInfo, dtype: torch.dtype) -> torch.Tensor:
        """Return a fresh CPU copy in the compute dtype or in fp32."""
        if self._note_read is not None:
            self._note_read(info.index)
            # Not one expanded element: kernels rely on the strides of the placeholder, and would write past its end.
            return torch.full(info.shape, _FILLER, dtype=dtype)
        queries = self._queries()
        if queries is None:
            raise ConfigError(f"{info.name} {self.state}")
        return queries.read(info, dtype)

    def refuse(self, info: ParameterInfo, operation: str, detail: str = "") -> None:
        """Raise ConfigError for an operation whose effect would be lost.

        During `watched`, only "write" and "hook" raise. An "in place" write by the model's own forward is seen by the
        recording, and the unit is resident in the next pass.
        """
        if self._note_read is None or operation in ("write", "hook"):
            raise ConfigError(_REFUSALS[operation].format(name=info.name, how=detail))

    def gradient_of(self, info: ParameterInfo) -> torch.Tensor | None:
        """Return `grad` of a parameter: in the step of a user training loop the engine's gradient, else None."""
        queries = self._queries()
        if queries is None or self._note_read is not None:
            return None
        return queries.gradient(info)

    def drop_gradient(self, info: ParameterInfo) -> None:
        """Drop a used gradient. Raises ConfigError while the engine has gradients for an update: they would stay."""
        queries = self._queries()
        if queries is not None:
            queries.drop_gradient(info)

    def release(self) -> None:
        """End the ownership after a restore: the model has all weights again."""
        for handle in self._handles:
            handle.remove()
        _OWNERSHIPS.discard(ref(self))
        self.state, self.engine = _RETURNED, None
        self._queries = lambda: None

    def invalidate(self, failed: bool = False) -> None:
        """Mark the model as unusable: the weights are gone. `failed`: engine construction failed."""
        if not self._handles:
            self.guard()
        self._units = []
        self.state = _SPENT
        if failed:
            self.state = _FAILED
        self.engine = None
        self._queries = lambda: None
        for module in _living(self._names):
            module.register_forward_pre_hook(self._on_forward)

    def _check_padding(self, encoder: nn.TransformerEncoder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ConfigError for an evaluation with padding: torch zeroes padded outputs, only over plain weights."""
        if self._note_read is not None or encoder.training or torch.is_grad_enabled() or not encoder.use_nested_tensor:
            return
        mask, padding = (*args[1:], None, None)[:2]
        mask, padding = kwargs.get("mask", mask), kwargs.get("src_key_padding_mask", padding)
        # As torch: rows padded on the right, and no other mask.
        if mask is None and padding is not None and padding.any() and padding.bool().int().diff(dim=-1).ge(0).all():
            raise ConfigError(
                "in evaluation, nn.TransformerEncoder packs rows with a src_key_padding_mask into nested tensors and "
                "returns zeros at padded positions. It cannot do so over streamed weights: build it with "
                "enable_nested_tensor=False, so padded positions have the same values as in training."
            )

    def _before_state_dict(self, module: nn.Module, _prefix: str, keep_vars: bool) -> None:
        if self._queries() is None:
            refuse_copy("state_dict()")
        if keep_vars:  # The caller wants the placeholder objects themselves.
            return
        self._check_module(module)
        infos = {info.index: info for each in module.modules() for info in self._places.get(ref(each), {}).values()}
        num_bytes = sum(info.numel * self._dtype_read(info).itemsize for info in infos.values())
        free = memory().get("available_bytes", num_bytes)
        if num_bytes > free:
            raise DoesNotFitError(
                f"state_dict() of {self._name_of(module)} needs {format_bytes(num_bytes)}, but only "
                f"{format_bytes(free)} of host memory are free. engine.export(folder) writes the weights as a Hugging "
                "Face folder, piece by piece, and engine.named_parameters() yields one after the other."
            )

    def _after_state_dict(self, module: nn.Module, saved: Any, prefix: str, _metadata: Any) -> None:
        """Replace placeholders in a state dict by true values, with one tensor for all tied names."""
        for key, info in self._places.get(ref(module), {}).items():
            name, current = f"{prefix}{key}", module._parameters.get(key)
            saved_value = saved.get(name)
            if saved_value is None or saved_value is current:
                continue
            # A tied weight is given out once: the same tensor as under its first name in this state dict.
            first_name, reference = self._state_dict_values.get(info.index, ("", lambda: None))
            value = reference()
            if value is None or saved.get(first_name) is not value:
                value = self.values_of(info, self._dtype_read(info))
                self._state_dict_values[info.index] = name, ref(value)
            saved[name] = value

    def _check_module(self, module: nn.Module) -> None:
        """Raise ConfigError if an engine parameter, or a module with engine parameters, was replaced.

        A replacement has other values than the trained ones.
        """
        module_ref = ref(module)
        for key, info in self._places.get(module_ref, {}).items():
            parameter = module._parameters.get(key)
            if self._is_own(info, parameter):
                continue
            name = f"{self._names[module_ref]}.{key}".lstrip(".")
            refuse_change(name, "was removed" if parameter is None else "was replaced")
        if module_ref not in self._names:
            return
        for key, child in module._modules.items():
            if child is not None and ref(child) not in self._names and next(child.parameters(), None) is not None:
                refuse_change(f"{self._names[module_ref]}.{key}".lstrip("."), f"became another {type(child).__name__}")

    def _is_own(self, info: ParameterInfo, parameter: nn.Parameter | None) -> bool:
        """True if `parameter` is the engine's placeholder or device view, not a replacement."""
        if parameter is None:
            return False
        if parameter is self.placeholders[info.index]:
            return True
        return any(unit.has(parameter, DTYPES[info.compute]) for unit in _living(self._units))

    def _name_of(self, module: nn.Module) -> str:
        return self._names.get(ref(module)) or "the model"

    def _on_load(self, *_: Any) -> None:
        refuse_copy("load_state_dict()")

    def _on_forward(self, module: nn.Module, *_: Any) -> None:
        raise ConfigError(f"{self._name_of(module)} ({type(module).__name__}) {self.state}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # Reached by pickle and copy of any module, through the hooks.
        refuse_copy("pickle (torch.save) or copy.deepcopy")
