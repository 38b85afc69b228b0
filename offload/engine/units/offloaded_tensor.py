"""Placeholder tensors without memory for offloaded parameters; values come from the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from offload.engine.units.snapshots import past_subclasses
from offload.errors import ConfigError
from offload.layout.regions import ParameterInfo


class Holder(Protocol):
    """Provides the values of offloaded parameters and rejects forbidden operations."""

    def values_of(self, info: ParameterInfo, dtype: torch.dtype) -> torch.Tensor:
        """Return a fresh CPU copy of a parameter, in the compute dtype or in fp32. Raises if unavailable."""

    def is_in_model(self) -> bool:
        """True while the model or the engine runs: reads then give the compute dtype."""

    def refuse(self, info: ParameterInfo, operation: str, detail: str = "") -> None:
        """Raise ConfigError for a forbidden operation, unless performed by the engine.

        `operation`: "write", "in place" (a write by an operation), "gradient", "hook" or "address". `detail`:
        description of a write.
        """

    def gradient_of(self, info: ParameterInfo) -> torch.Tensor | None:
        """Return `grad` of a parameter: the engine's gradient in place, or None if there is none."""

    def drop_gradient(self, info: ParameterInfo) -> None:
        """Set `grad` to None. Raises ConfigError while the engine has gradients for the next update."""


class OffloadedTensor(torch.Tensor):
    """A tensor without memory. Each operation that needs the values fetches them.

    Shape, dtype, device, strides and requires_grad are correct and free. Memory addresses are refused. An operation
    receives a fresh copy of the values on the device; autograd sees the operation itself. Views, `detach()` and `.data`
    included, are OffloadedTensors too, so no write can reach a temporary copy; all writes are refused. There is one
    class, because `nn.Parameter(tensor)` requires `detach()` to return the same class; parameters carry `_is_param`,
    the torch flag for custom tensor classes.
    """

    info: ParameterInfo
    holder: Holder
    place: torch.device
    num_bytes: int
    """Bytes of the whole parameter, of which this may be a view."""
    values: Callable[[], torch.Tensor]
    """Returns a fresh copy on the device."""
    functions: Mapping[Any, Callable[..., torch.Tensor]] = {}
    """Replacements for torch functions with this weight as second argument, called without the weight."""
    is_placeholder = False
    """True for the placeholder in the model. Gradients must not arrive there."""
    master: OffloadedTensor | None = None
    """Placeholder in fp32, for reads by scripts. None: they read the compute dtype."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Handles only functions that bypass the torch dispatcher.
        kwargs = kwargs or {}
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if isinstance(weight, OffloadedTensor) and func in weight.functions:
            others = {key: value for key, value in kwargs.items() if key != "weight"}
            return weight.functions[func](*args[:1], *args[2:], **others)
        if func in _WRITES and isinstance(args[0], OffloadedTensor):
            if func in (_SET_GRAD, _DELETE_GRAD) and args[0].is_placeholder:
                value = args[1] if func == _SET_GRAD else None
                return _set_gradient(args[0].holder, args[0].info, value)
            args[0].holder.refuse(args[0].info, "write", _WRITES[func])
        if func in _ADDRESSES and isinstance(args[0], OffloadedTensor):
            args[0].holder.refuse(args[0].info, "address")
        if func is torch.autograd.grad:
            for leaf in tree_leaves((args[1:], kwargs.get("inputs"))):
                if isinstance(leaf, OffloadedTensor):
                    leaf.holder.refuse(leaf.info, "derivative")
        if func in _HOOKS and args[0].is_placeholder:
            args[0].holder.refuse(args[0].info, "hook")
        if func == _GET_GRAD and args[0].is_placeholder:
            return args[0].holder.gradient_of(args[0].info)
        if func is torch._has_compatible_shallow_copy_type:  # Conversion by Module.to and similar methods.
            own, converted = args
            if isinstance(own, OffloadedTensor) and not own.is_alias_of(converted):
                own.holder.refuse(
                    own.info, "write", f"become {list(converted.shape)} of {converted.dtype} on {converted.device}"
                )
        if func in _READS:
            result = past_subclasses(func, *tree_map(_copy, args), **tree_map(_copy, kwargs))
            if isinstance(result, np.ndarray):  # shares memory with the copy: numpy then refuses writes
                result.flags.writeable = False
            return result
        if func not in _STATE:
            args, kwargs = tree_map(_as_read, args), tree_map(_as_read, kwargs)
        return past_subclasses(func, *args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].place
        kwargs = kwargs or {}
        if func.is_view:
            return _view(func, args, kwargs)
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            inputs = {each.name: value for each, value in zip(arguments, args, strict=False)} | kwargs
            changed = [inputs.get(each.name) for each in arguments if each.is_write]
            for leaf in tree_leaves(changed):
                if isinstance(leaf, OffloadedTensor):
                    leaf.holder.refuse(leaf.info, "in place", f"be written to, by {func}")
        copies: dict[int, torch.Tensor] = {}  # one for each tensor, also where it is an operand twice

        def fetch(leaf: Any) -> Any:
            if not isinstance(leaf, OffloadedTensor):
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf.values()
            return copies[id(leaf)]

        args, kwargs = tree_map(fetch, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def data(self) -> Any:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Module.to and similar methods come here too. Without a conversion they assign the tensor itself.
        if not self.is_alias_of(value):
            _refuse_data(self.holder, self.info, value)

    def is_alias_of(self, other: torch.Tensor) -> bool:
        """True if `other` represents the same values with equal shape, strides and dtype."""
        return (
            isinstance(other, OffloadedTensor)
            and (other.holder, other.info) == (self.holder, self.info)
            and (other.shape, other.stride(), other.dtype) == (self.shape, self.stride(), self.dtype)
        )

    def to_ordinary(self) -> torch.Tensor:
        """Return an ordinary tensor or Parameter with the values."""
        values = _as_read(self).values()
        if isinstance(self, nn.Parameter):
            return nn.Parameter(values, requires_grad=self.requires_grad)
        return values.requires_grad_(self.requires_grad)

    def _use_count(self) -> None:  # `torch.utils.swap_tensors` calls this method on both tensors.
        self.holder.refuse(self.info, "write", "swap with another tensor")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.to_ordinary())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.to_ordinary())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.to_ordinary().__reduce_ex__(protocol)


class ResidentParameter(nn.Parameter):
    """A Parameter over weights that stay on the device. `grad` is the engine's gradient, as for a placeholder.

    Autograd's own `grad` is empty between backwards, because the engine takes each gradient out.
    """

    info: ParameterInfo
    holder: Holder
    has_address = False
    """True after code has asked for the memory: torch counts no write through `.data` or an address."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return the text of a plain Parameter."""
        return repr(nn.Parameter(self.detach(), self.requires_grad))

    @property
    def grad(self) -> torch.Tensor | None:
        return self.holder.gradient_of(self.info)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _set_gradient(self.holder, self.info, value)

    @grad.deleter
    def grad(self) -> None:
        _set_gradient(self.holder, self.info, None)

    @property
    def data(self) -> Any:
        self.has_address = True
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Module.to and similar methods come here too. Without a conversion they assign the same memory.
        if (value.dtype, value.shape, value.data_ptr()) != (self.dtype, self.shape, torch.Tensor.data_ptr(self)):
            _refuse_data(self.holder, self.info, value)

    def data_ptr(self) -> int:
        self.has_address = True
        return super().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        self.has_address = True
        return super().untyped_storage()

    def __dlpack__(self, **options: Any) -> Any:
        self.has_address = True
        return super().__dlpack__(**options)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:  # noqa: ARG002
        """Raise ConfigError: the gradient is in the engine at this time."""
        self.holder.refuse(self.info, "hook")

    def to_ordinary(self) -> nn.Parameter:
        """Return a Parameter with a copy of the values."""
        return nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return memo.setdefault(id(self), self.to_ordinary())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.to_ordinary().__reduce_ex__(protocol)


def lend_gradient(parameter: nn.Parameter, stand_in: nn.Parameter) -> None:
    """Let a Parameter over device weights answer `grad` as the parameter of an engine does in its place."""
    if isinstance(stand_in, OffloadedTensor | ResidentParameter):
        own: Any = parameter
        own.__class__ = ResidentParameter
        own.info, own.holder = stand_in.info, stand_in.holder


class UsedGradient(torch.Tensor):
    """The gradient of a parameter from a step of a torch optimizer until the script clears it, without memory.

    The next update refuses to run before: plain PyTorch would add to this gradient. Setting it to zero clears it.
    """

    info: ParameterInfo
    clear: Callable[[], None]
    """Called when the script sets the gradient to zero."""

    @classmethod
    def of(
        cls, info: ParameterInfo, dtype: torch.dtype, device: torch.device, clear: Callable[[], None]
    ) -> UsedGradient:
        """Return the used gradient of a parameter, with the dtype and device of compute."""
        own: Any = torch.Tensor._make_wrapper_subclass(cls, info.shape, dtype=dtype, device=device)
        own.info, own.clear = info, clear
        return cast(UsedGradient, own)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        used = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, UsedGradient)]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls.of(used[0].info, used[0].dtype, used[0].device, used[0].clear)
        # The ways in which `zero_grad(set_to_none=False)` and a script clear a gradient.
        if func in _ZEROS or (func is torch.ops.aten.fill_.Scalar and not args[1]):
            for each in used:
                each.clear()
            return args[0] if func._schema.returns else None
        raise ConfigError(
            f"the gradient of {used[0].info.name} was used after optimizer.step(), where its memory serves the update "
            f"({func}). Read or change gradients between backward and step, and clear them with optimizer.zero_grad()."
        )


def make_placeholder(
    info: ParameterInfo,
    dtype: torch.dtype,
    device: torch.device,
    holder: Holder,
    functions: Mapping[Any, Callable[..., torch.Tensor]] | None = None,
) -> nn.Parameter:
    """Return a placeholder for a parameter, on the device of compute.

    An arriving gradient would be lost and is refused. `functions`: see `OffloadedTensor.functions`.
    """
    like = torch.empty(info.shape, dtype=dtype, device="meta")
    placeholder = _make_tensor(like, device, info, holder, like.nbytes)
    placeholder.values = lambda: holder.values_of(info, dtype).to(device)
    placeholder.is_placeholder = True
    placeholder._is_param = True  # a Parameter for torch
    placeholder.functions = functions or {}
    if info.trainable:
        placeholder.requires_grad_()
        # None comes from the edge of a unit to its weights.
        refuse = partial(holder.refuse, info, "gradient")
        past_subclasses(placeholder.register_hook, lambda gradient: None if gradient is None else refuse())
    return cast(nn.Parameter, placeholder)


def _make_tensor(like: torch.Tensor, device: torch.device, info: ParameterInfo, holder: Holder, num_bytes: int) -> Any:
    # Torch sees device `meta`: another tensor can never adopt the memory (`other.data = this`), and `device` reports
    # the true place.
    tensor = torch.Tensor._make_wrapper_subclass(
        OffloadedTensor,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=torch.device("meta"),
        dispatch_device=True,
    )
    # Otherwise `data_ptr()` returns 0, and a read there kills the process.
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    tensor.info = info
    tensor.holder = holder
    tensor.place = device
    tensor.num_bytes = num_bytes
    return tensor


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """Apply a view function to a placeholder; return placeholder views."""
    base = args[0]
    memory = torch.empty(base.num_bytes // base.dtype.itemsize, dtype=base.dtype, device="meta")
    like = memory.as_strided(base.shape, base.stride(), base.storage_offset())
    result = func(like, *args[1:], **kwargs)
    if isinstance(result, torch.Tensor):
        return _make_view(result, base, lambda: func(base.values(), *args[1:], **kwargs))
    # A split: each part makes all of them again.
    return [
        _make_view(each, base, partial(_values_of_part, base, func, args[1:], kwargs, number))
        for number, each in enumerate(result)
    ]


def _make_view(like: torch.Tensor, base: OffloadedTensor, values: Callable[[], torch.Tensor]) -> OffloadedTensor:
    _check_bounds(like, base)
    view: OffloadedTensor = _make_tensor(like, base.place, base.info, base.holder, base.num_bytes)
    view.values = values
    return view


def _check_bounds(view: torch.Tensor, base: OffloadedTensor) -> None:
    """Raise RuntimeError for a view past the end, as torch does; the device `meta` checks nothing."""
    last = view.storage_offset() + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
    if view.numel() and (last + 1) * view.dtype.itemsize > base.num_bytes:
        raise RuntimeError(
            f"a view of {base.info.name} with shape {list(view.shape)} and strides {list(view.stride())} from element "
            f"{view.storage_offset()} ends past the {base.num_bytes} bytes of the parameter"
        )


def _values_of_part(base: OffloadedTensor, func: Any, args: Any, kwargs: Any, number: int) -> torch.Tensor:
    result: Sequence[torch.Tensor] = func(base.values(), *args, **kwargs)
    return result[number]


def _as_read(leaf: Any) -> Any:
    """Return the placeholder in the dtype that the reader sees; other values unchanged."""
    if not isinstance(leaf, OffloadedTensor) or leaf.master is None or leaf.holder.is_in_model():
        return leaf
    # A script may freeze the parameter at any time, and knows nothing of the one in fp32.
    needs_gradient = past_subclasses(_GET_REQUIRES_GRAD, leaf)
    past_subclasses(torch.Tensor.requires_grad_, leaf.master, needs_gradient)
    return leaf.master


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, OffloadedTensor):
        return copy.deepcopy(leaf)
    return leaf


def _refuse_data(holder: Holder, info: ParameterInfo, value: torch.Tensor) -> None:
    holder.refuse(info, "write", f"become {list(value.shape)} of {value.dtype} (by .data)")


def _set_gradient(holder: Holder, info: ParameterInfo, value: torch.Tensor | None) -> None:
    """Set `grad` of a parameter. Accepts None, and the engine's own memory: `parameter.grad *= 0.5` assigns this."""
    if value is None:
        holder.drop_gradient(info)
    elif not _is_in_place(holder.gradient_of(info), value):
        holder.refuse(info, "write", _WRITES[_SET_GRAD])


def _is_in_place(gradient: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    """True if `tensor` is the memory of a gradient."""
    return gradient is not None and tensor.shape == gradient.shape and tensor.data_ptr() == gradient.data_ptr()


_GET_GRAD = vars(torch._C.TensorBase)["grad"].__get__
_SET_GRAD = vars(torch._C.TensorBase)["grad"].__set__
_DELETE_GRAD = vars(torch._C.TensorBase)["grad"].__delete__
_GET_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__get__
_STATE = {
    _GET_REQUIRES_GRAD,
    vars(torch._C.TensorBase)["requires_grad"].__set__,
    torch.Tensor.requires_grad_,
    _SET_GRAD,
    _DELETE_GRAD,
    torch._has_compatible_shallow_copy_type,
}
"""Functions of the placeholder itself, not of the values."""
_READS = {
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.tolist,
    torch.Tensor.__dlpack__,
    torch.Tensor.new_tensor,
    torch.Tensor.new,
    torch.Tensor.__format__,
}
"""Functions that read memory directly, or create tensors on the device known to torch (meta)."""
_ZEROS = {torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default}
_ADDRESSES = {torch.Tensor.data_ptr, torch.Tensor.storage}
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}
_WRITES = {
    _SET_GRAD: "be given a gradient",
    _DELETE_GRAD: "lose its gradient",
    torch.Tensor.share_memory_: "move into shared memory",
    torch.Tensor.set_: "be given another storage",
}
