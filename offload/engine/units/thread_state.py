"""Thread state around a forward, restored for the recomputation in a backward."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from offload.engine.units.arguments import copy_collected, find_collectors

_T = TypeVar("_T")


class ThreadState:
    """Default device, torch function modes, context variables and autocast state of a forward.

    The recomputation needs them, because a backward may be called outside, has no modes, and on a GPU runs in an
    autograd thread.
    """

    def __init__(self, device_type: str) -> None:
        self._device, self._context = torch.get_default_device(), _copy_context(contextvars.copy_context())
        self._modes = _function_modes()
        self._types = dict.fromkeys(("cpu", device_type))
        self._autocast = self._autocast_now()

    def run(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call `function(*args)` with the saved state. Changes to context variables are discarded."""
        context, is_same_device = _copy_context(self._context), torch.get_default_device() == self._device
        modes = [mode for mode in self._modes if mode not in _function_modes()] if self._modes else ()
        is_same_autocast = self._autocast_now() == self._autocast
        if is_same_device and is_same_autocast and not modes:
            return context.run(function, *args)
        with ExitStack() as stack:
            if not is_same_device:
                stack.enter_context(self._device)
            for mode in modes:
                stack.enter_context(mode)  # After an exception in a backward, autograd discards entered modes itself.
            if not is_same_autocast:
                for name, enabled, dtype, caches in self._autocast:
                    stack.enter_context(torch.autocast(name, dtype, enabled, caches))
            return context.run(function, *args)

    def _autocast_now(self) -> list[tuple[str, bool, torch.dtype, bool]]:
        caches, settings = torch.is_autocast_cache_enabled(), []
        for t in self._types:
            settings.append((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t), caches))  # noqa: PERF401
        return settings


def _function_modes() -> list[TorchFunctionMode]:
    stack = _get_current_function_mode_stack()
    return [mode for mode in stack if not isinstance(mode, DeviceContext)] if stack else stack


def _copy_context(context: contextvars.Context) -> contextvars.Context:
    """Return a copy with separate containers, without graph tensors.

    transformers collects layer outputs in a context variable; a use that refers to these would be part of a
    reference cycle.
    """
    copy = context.copy()
    variables, collected = find_collectors(context)
    for variable, own in zip(
        variables, copy_collected(collected, [], keep=_has_no_graph) if collected else (), strict=True
    ):
        copy.run(variable.set, own)
    return copy


def _has_no_graph(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is None


def past_subclasses(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with `__torch_function__` disabled.

    A single C call, since an interrupt at the end of a `with` block would leave the thread in the disabled state.
    """
    return torch._C._disabled_torch_function_impl(function, (), args, kwargs)
