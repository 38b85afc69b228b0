"""What hangs in a model while its weights are elsewhere: tensors without memory, whose values come from the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from offload.engine.units.row_blocks import RowBlocks
from offload.layout.regions import ParameterInfo


class Holder(Protocol):
    """Has the values of parameters at rest, and says what is not to be done to them."""

    def values_of(self, info: ParameterInfo) -> torch.Tensor:
        """Return a fresh copy of a parameter, on the CPU, or raise why there is none."""

    def refuse(self, info: ParameterInfo, what: str, how: str = "") -> None:
        """Raise ConfigError, saying why, unless it is the engine that tries something. `what`: a "write", one "in
        place" by an operation, a "gradient", a "hook" or the "address"; `how` a write is done.
        """

    def check_look(self, info: ParameterInfo, how: str) -> None:
        """Raise ConfigError where who reads `grad`, which is None, would take it that there are no gradients, or who
        sets it to None that there are none any more.
        """


def past_subclasses(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function within which no `__torch_function__` is asked. In one call, since an interrupt at the end of a
    `with` would leave it so for the thread.
    """
    return torch._C._disabled_torch_function_impl(function, (), args, kwargs)


class OffloadedTensor(torch.Tensor):
    """A tensor whose values are elsewhere, and are brought for each operation that needs them.

    Shape, dtype, device, strides and whether it takes gradients are right, and cost nothing. It has no memory: who asks
    for an address is refused. An operation is given a fresh copy of the values, on the device; autograd sees the
    operation itself. A view is another one of these, `detach()` and `.data` included, so that nobody writes to a copy
    that is dropped: whatever writes is refused. All are of one class, since `nn.Parameter(this)` wants that of its
    `detach()`; what is a parameter is so by torch's flag for tensors of other kinds.
    """

    info: ParameterInfo
    holder: Holder
    place: torch.device
    values: Callable[[], torch.Tensor]
    """Returns a fresh copy on the device."""
    blocks: RowBlocks | None = None
    """The blocks of a weight, or bias, that is cut in rows."""
    hangs = False
    """True for what hangs in the model, where no gradient may come."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Only what goes past torch's dispatcher is seen to here.
        kwargs = kwargs or {}
        if func in _BY_BLOCKS:
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            if isinstance(weight, OffloadedTensor) and weight.blocks is not None:
                return _BY_BLOCKS[func](weight.blocks, *args[:1], *args[2:], **_without_weight(kwargs))
        if func in _WRITES and isinstance(args[0], OffloadedTensor):
            if args[1:] == (None,):
                args[0].holder.check_look(args[0].info, "set to None")
            else:
                args[0].holder.refuse(args[0].info, "write", _WRITES[func])
        if func in _ADDRESSES and isinstance(args[0], OffloadedTensor):
            args[0].holder.refuse(args[0].info, "address")
        if func in _HOOKS and args[0].hangs:
            args[0].holder.refuse(args[0].info, "hook")
        if func == _LOOK and args[0].hangs:
            args[0].holder.check_look(args[0].info, "read")
        if func is torch._has_compatible_shallow_copy_type:  # Module.to and its kin have converted a parameter
            own, made = args
            if isinstance(own, OffloadedTensor) and not own.is_same(made):
                own.holder.refuse(own.info, "write", f"become {list(made.shape)} of {made.dtype} on {made.device}")
        if func in _READS:
            args, kwargs = tree_map(_copy, (args, kwargs))
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
            given = {each.name: value for each, value in zip(arguments, args, strict=False)} | kwargs
            changed = [given.get(each.name) for each in arguments if each.is_write]
            for leaf in tree_leaves(changed):
                if isinstance(leaf, OffloadedTensor):
                    leaf.holder.refuse(leaf.info, "in place", f"be written to, by {func}")
        found: dict[int, torch.Tensor] = {}

        def bring(leaf: Any) -> Any:
            if not isinstance(leaf, OffloadedTensor):
                return leaf
            if id(leaf) not in found:
                found[id(leaf)] = leaf.values()
            return found[id(leaf)]

        args, kwargs = tree_map(bring, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def data(self) -> Any:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Module.to and its kin come here too; where there is nothing to convert they give a tensor itself.
        if not self.is_same(value):
            self.holder.refuse(self.info, "write", f"become {list(value.shape)} of {value.dtype} (by .data)")

    def is_same(self, other: torch.Tensor) -> bool:
        """True where another tensor stands for the same values."""
        return (
            isinstance(other, OffloadedTensor)
            and (other.holder, other.info) == (self.holder, self.info)
            and (other.shape, other.stride(), other.dtype) == (self.shape, self.stride(), self.dtype)
        )

    def copied(self) -> torch.Tensor:
        """Return a tensor of its own with the values, of the kind that this one stands for."""
        if isinstance(self, nn.Parameter):
            return nn.Parameter(self.values(), requires_grad=self.requires_grad)
        return self.values().requires_grad_(self.requires_grad)

    def _use_count(self) -> None:  # torch.utils.swap_tensors asks both of its tensors
        self.holder.refuse(self.info, "write", "change places with another tensor")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.copied())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.copied())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.copied().__reduce_ex__(protocol)


def stand_in(
    info: ParameterInfo, dtype: torch.dtype, device: torch.device, holder: Holder, blocks: RowBlocks | None = None
) -> nn.Parameter:
    """Return what hangs in the place of a parameter, in the dtype and on the device of its uses. A gradient that comes
    to it is refused, since it would be lost. `blocks`: of one that is cut, which compute in its place.
    """
    made = _make(torch.empty(info.shape, dtype=dtype, device="meta"), device, info, holder)
    made.values = lambda: holder.values_of(info).to(device)
    made.hangs = made._is_param = True
    made.blocks = blocks
    if info.trainable:
        made.requires_grad_()
        past_subclasses(made.register_hook, lambda _: holder.refuse(info, "gradient"))
    return cast(nn.Parameter, made)


def _make(like: torch.Tensor, device: torch.device, info: ParameterInfo, holder: Holder) -> Any:
    # To torch it is on `meta`, so that another tensor never takes its memory over (`other.data = this`), and says that
    # it is elsewhere.
    made = torch.Tensor._make_wrapper_subclass(
        OffloadedTensor,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=torch.device("meta"),
        dispatch_device=True,
    )
    torch._C._set_throw_on_mutable_data_ptr(made)  # else it is 0, and who reads there ends the process
    made.info, made.holder, made.place = info, holder, device
    return made


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """Return views of views, or of a parameter."""
    base = args[0]
    like = torch.empty(0, dtype=base.dtype, device="meta").as_strided(base.shape, base.stride())
    found = func(like, *args[1:], **kwargs)
    made = []
    for number, each in enumerate([found] if isinstance(found, torch.Tensor) else found):
        view = _make(each, base.place, base.info, base.holder)
        view.values = partial(_values_of_view, base, func, args[1:], kwargs, number)
        made.append(view)
    return made[0] if isinstance(found, torch.Tensor) else made


def _values_of_view(base: OffloadedTensor, func: Any, args: Any, kwargs: Any, number: int) -> torch.Tensor:
    made = func(base.values(), *args, **kwargs)
    return made if isinstance(made, torch.Tensor) else made[number]


def _copy(leaf: Any) -> Any:
    return copy.deepcopy(leaf) if isinstance(leaf, OffloadedTensor) else leaf


def _without_weight(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "weight"}


_BY_BLOCKS: dict[Any, Callable[..., torch.Tensor]] = {
    functional.linear: RowBlocks.linear,
    functional.embedding: RowBlocks.embedding,
}
_LOOK = vars(torch._C.TensorBase)["grad"].__get__
_READS = {
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.tolist,
    torch.Tensor.__dlpack__,
    torch.Tensor.new_tensor,
    torch.Tensor.new,
    torch.Tensor.__format__,
}
"""What reads memory itself, or makes tensors by what torch takes the device for."""
_ADDRESSES = {torch.Tensor.data_ptr, torch.Tensor.storage}
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}
_WRITES = {
    vars(torch._C.TensorBase)["grad"].__set__: "be given a gradient",
    torch.Tensor.share_memory_: "move into shared memory",
    torch.Tensor.set_: "be given another storage",
}
