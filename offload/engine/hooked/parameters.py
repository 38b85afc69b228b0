"""Parameters that stay the user's own objects, while the memory of their weights comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from offload.errors import OffloadError

_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "grad", "grad_fn"),
    *("retains_grad", "output_nr", "_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"),
    *(name for name, value in vars(torch._C.TensorBase).items() if name.startswith("is_") and not callable(value)),
)
_SET = ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "__len__", "type"),
    *(
        "get_device",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_conj",
        "is_neg",
        "is_inference",
    ),
    *("is_pinned", "is_shared", "_is_view", "requires_grad_", "__hash__"),
    *("register_hook", "register_post_accumulate_grad_hook"),
)
_FUNCTIONS = ("is_floating_point", "is_complex", "is_tensor", "numel", "is_conj", "is_neg", "is_inference")
_WITHOUT_VALUES: frozenset[Any] = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)),
        *(getattr(torch.Tensor, name).__set__ for name in _SET),
        vars(torch._C.TensorBase)["grad"].__delete__,
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(getattr(torch, name) for name in _FUNCTIONS),
    ]
)
"""Functions that need no values."""
_ADDRESSES: frozenset[Any] = frozenset((torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.storage))


class Values(Protocol):
    """Gives the values of absent parameters."""

    def shown(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Context in which these parameters have their values, in memory of their own."""
        ...


class AbsentParameter(nn.Parameter):
    """Class of a parameter while its weights are not on the device. Each engine has a subclass with its `owner`.

    The parameter is the same object as before, with true shape, dtype and device. An operation finds the true values,
    and autograd the same leaf. The memory is one NaN, in case a kernel is reached past this class.
    """

    owner: Callable[[], Values | None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _ADDRESSES:
            raise OffloadError("the weights of this parameter have no address while they are not on the device.")
        absent = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, AbsentParameter)}
        owner = next(type(leaf).owner() for leaf in absent.values())
        if owner is None:
            raise OffloadError("the engine with the weights of this parameter is gone.")
        with owner.shown(absent.values()):
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]


def absent_class(owner: Callable[[], Values | None]) -> type[AbsentParameter]:
    """Return the class of absent parameters of one engine."""
    return type("AbsentParameter", (AbsentParameter,), {"owner": staticmethod(owner)})


class HiddenWeights:
    """The parameters of a unit: with the weights of a place, or absent."""

    def __init__(self, parameters: Sequence[nn.Parameter], absent: type[AbsentParameter]) -> None:
        self._parameters = parameters
        self._classes = [type(parameter) for parameter in parameters]
        self._absent = absent
        self._nothing = [_nothing_like(parameter) for parameter in parameters]

    def show(self, views: Sequence[torch.Tensor]) -> None:
        """Give the parameters memory: a view for each."""
        for parameter, own_class, view in zip(self._parameters, self._classes, views, strict=True):
            parameter.__class__ = own_class
            parameter.data = view

    def hide(self) -> None:
        """Take the memory away."""
        for parameter, nothing in zip(self._parameters, self._nothing, strict=True):
            parameter.data = nothing
            parameter.__class__ = self._absent


def _nothing_like(parameter: nn.Parameter) -> torch.Tensor:
    """Return a tensor of the same form over one element."""
    value = float("nan")
    if not parameter.is_floating_point():
        value = -1
    return torch.full((), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
