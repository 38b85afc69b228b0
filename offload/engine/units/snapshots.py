"""Snapshots of the state changed by a pass (RNGs, and module attributes other than parameters), and of thread state."""

from __future__ import annotations

import contextvars
import ctypes
import pickle
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from offload.engine.comparison import same_bits
from offload.engine.units.arguments import copy_collected, find_collectors
from offload.engine.units.state_snapshot import (
    AttributePlace,
    ContainerSnapshot,
    DictSnapshots,
    StateSnapshot,
)
from offload.engine.units.torch_state import TorchState
from offload.tiers.device import Device

_T = TypeVar("_T")
_FORWARD_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_NO_STATE = StateSnapshot({}, lambda _: False)
_NO_CONTAINERS = ContainerSnapshot(())
BufferPlace = tuple[nn.Module, str]
"""(module, buffer name). A forward may assign another tensor there."""


def buffers_of(modules: Iterable[nn.Module]) -> dict[BufferPlace, torch.Tensor]:
    """Return all buffers in these modules."""
    return {
        (module, key): buffer for module in modules for key, buffer in module._buffers.items() if buffer is not None
    }


class Snapshot:
    """State at one moment: random generators, `modules`, all objects reachable from attributes and `roots`, and, with
    `roots`, the global state of torch.

    A forward may assign to module attributes and buffers, register hooks, and change mutable values in place.
    Attributes include `training` and buffer bookkeeping (for example the length of a grown table).
    """

    def __init__(
        self,
        device: Device,
        ignores: Callable[[torch.Tensor], bool],
        modules: Sequence[nn.Module] = (),
        moving: Iterable[BufferPlace] = (),
        mutable_attributes: Collection[AttributePlace] = (),
        may_repeat: bool = True,
        last: Snapshot | None = None,
        roots: Mapping[str, Any] = MappingProxyType({}),
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """Take the snapshot.

        `ignores`: True for a tensor over engine weights. `moving`: buffers with possible in-place changes. `roots`:
        objects by name, e.g. a model, a batch, a loss function. `may_repeat`: random draws after this moment may need
        to be repeated. `last`: the previous snapshot; if no Python or numpy random number was drawn since then,
        `last.repeated` repeats none. `settle`: called after `put_back`, for attributes of the engine in the modules.
        """
        self._device = device
        self._ignores = ignores
        self._modules = modules
        self._mutable_attributes = mutable_attributes
        self._roots = roots
        self._settle = settle

        # Generators.
        self.random = device.random_state()
        self._may_repeat = may_repeat
        self._rng_state: RngState | None = None
        before: RngState | None = None
        if last is not None:
            before = last._rng_state
        if may_repeat:
            self._rng_state = RngState.capture(before)
        if last is not None and before is self._rng_state:  # nothing was drawn since then
            last._may_repeat = False

        # Everything within reach. Empty for most units: a walk over all objects takes long.
        self.state = _NO_STATE
        self._containers = _NO_CONTAINERS
        self._torch_state: TorchState | None = None
        if mutable_attributes or roots:
            self.state = self.capture_state()
        if roots:
            self._containers = ContainerSnapshot(_modules_of(roots))
            self._torch_state = TorchState(device.torch_device.type)

        # Attributes, buffers and hooks of the modules.
        self._next_hook = RemovableHandle.next_id  # torch numbers all hooks of a process
        self._hooks = _hooks(modules)
        self._attributes = DictSnapshots(map(vars, modules))
        self._buffers = DictSnapshots(map(attrgetter("_buffers"), modules))
        self._values: list[tuple[nn.Module, str, torch.Tensor, int | None, torch.Tensor]] = []
        for module, key in moving:
            buffer = module._buffers.get(key)  # a forward may have removed it
            if buffer is not None:
                self._values.append((module, key, buffer, _version(buffer), buffer.detach().clone()))

    def capture_state(self) -> StateSnapshot:
        """Return the present state behind mutable attributes and roots."""
        values = {f"{number}.{key}": vars(m).get(key) for number, (m, key) in enumerate(self._mutable_attributes)}
        return StateSnapshot({**values, **self._roots}, self._ignores, gradients=bool(self._roots))

    @property
    def has_sampled(self) -> bool:
        """True if random numbers were sampled since the snapshot."""
        is_same = all(map(torch.equal, self.random, self._device.random_state()))
        return not is_same or RngState.capture(self._rng_state) is not self._rng_state

    def put_back_generators(self) -> None:
        """Restore the random generators."""
        self._device.set_random_state(self.random)
        if self._rng_state is not None:
            self._rng_state.put_back()

    def put_back(self, *, has_generators: bool = True) -> None:
        """Restore the snapshot, with or without the generators."""
        if has_generators:
            self.put_back_generators()
        self._containers.put_back()
        self._attributes.put_back()
        self._put_back_values(compares=True)
        if RemovableHandle.next_id > self._next_hook:
            for module in self._modules:
                _drop_hooks(module, self._next_hook)
        if self._torch_state is not None:
            self._torch_state.put_back()
        self._settle()

    def drop_graphs(self) -> None:
        """Hold values instead of tensors with a graph (see `StateSnapshot.drop_graphs`)."""
        self._attributes.drop_graphs()
        self.state.drop_graphs()

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Restore generators, attributes and hooks during the context, for a recomputation.

        Afterwards, restore the present state, except for the device generators.
        """
        hooks = _hooks(self._modules)
        draws = self._rng_state if self._may_repeat else None
        draws_now = draws and RngState.capture(draws)
        saved = self._attributes
        now = saved
        if not saved.are_unchanged:
            now = DictSnapshots(map(vars, self._modules))
            saved.put_back()
        _install_hooks(self._hooks, hooks)  # A forward may register hooks and remove them again.
        self._device.set_random_state(self.random)
        if draws is not None and draws_now is not draws:
            draws.put_back()
        try:
            yield
        finally:
            now.put_back()
            _install_hooks(hooks, self._hooks)
            if draws_now is not None:
                draws_now.put_back()

    @contextmanager
    def values_restored(self, moving: Collection[BufferPlace]) -> Iterator[None]:
        """Restore buffers and mutable attributes during the context; afterwards, restore the present state.

        `moving`: buffers with present values to restore too.
        """
        if not (self._values or moving or self._mutable_attributes) and self._buffers.are_unchanged:
            put_back = self._buffers.put_back  # in most uses nothing has changed, and nothing is copied
        else:
            now = Snapshot(self._device, self._ignores, self._modules, moving, self._mutable_attributes)
            put_back = now._put_back_values
            self._put_back_values()
        try:
            yield
        finally:
            put_back()

    def _put_back_values(self, compares: bool = False) -> None:
        """Restore buffers, mutable attributes and roots.

        compares: skip equal buffers, since a copy would invalidate saved graphs. The host then waits for the device.
        """
        self.state.put_back()
        # Read before their places are restored: a buffer that is still in its place is written to.
        buffers = [module._buffers.get(key) for module, key, *_ in self._values]
        self._buffers.put_back()
        with torch.no_grad():
            for (module, key, tensor, version, value), buffer in zip(self._values, buffers, strict=True):
                if compares and _version(tensor) == version and same_bits(tensor, value):
                    continue
                if buffer is tensor and not tensor.is_inference():
                    tensor.copy_(value)
                elif version is None or _version(tensor) != version:
                    # Changed and then replaced: a saved graph may still hold the old tensor.
                    module._buffers[key] = value.clone()


def _modules_of(roots: Mapping[str, Any]) -> Iterator[nn.Module]:
    """Yield all modules in and below `roots`."""
    for root in roots.values():
        if isinstance(root, nn.Module):
            yield from root.modules()


_Hooks = Mapping[int, tuple[dict[int, Any], dict[int, Any]]]
"""Non-empty hook dicts keyed by id: (dict, copy)."""


def _hooks(modules: Iterable[nn.Module]) -> _Hooks:
    """Return the modules' forward hooks."""
    hooks_by_id: dict[int, tuple[dict[int, Any], dict[int, Any]]] = {}
    for module in modules:
        # The other dicts only have options of hooks in these two.
        if module._forward_pre_hooks or module._forward_hooks:
            for name in _FORWARD_HOOKS:
                hooks = getattr(module, name)
                if hooks:
                    hooks_by_id[id(hooks)] = hooks, dict(hooks)
    return hooks_by_id


def _install_hooks(hooks: _Hooks, others: _Hooks) -> None:
    """Install `hooks` in the modules in place of `others`."""
    if not hooks and not others:
        return
    for live, _ in others.values():
        live.clear()
    for live, saved in hooks.values():
        live.clear()
        live.update(saved)


def _drop_hooks(module: nn.Module, since: int) -> None:
    """Remove the module hooks with torch handle number `since` or higher."""
    for name, hooks in vars(module).items():
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(hooks, dict):
            for number in [number for number in hooks if isinstance(number, int) and number >= since]:
                del hooks[number]


def _version(tensor: torch.Tensor) -> int | None:
    if tensor.is_inference():  # torch counts no versions of these
        return None
    return tensor._version


_BYTES = 625 * 4
"""Mersenne twister state: 624 words and the position."""


class RngState(NamedTuple):
    """State of both generators at one moment.

    Other threads may draw from the generators too, so the state is restored only after a draw.
    """

    python: tuple[Any, ...]
    """Python generator state."""
    numpy: bytes
    """Pickled state dict of the numpy default generator."""
    memory: bytes | None
    """Raw numpy generator memory, cheap to read.

    None if incomplete: a cached normal number is pending, or the generator is not a Mersenne twister.
    """

    @classmethod
    def capture(cls, before: RngState | None = None) -> RngState:
        """Return the present state. Returns `before` itself if nothing was drawn since."""
        python, memory = random.getstate(), _generator_memory()
        if before is not None and memory is not None and memory == before.memory:
            if python == before.python:
                return before
            return cls(python, before.numpy, memory)
        numpy: Any = np.random.get_state(legacy=False)  # slow, so only after a draw
        if memory is not None and (memory != _twister_memory(**numpy["state"]) or numpy["has_gauss"]):
            memory = None
        now = cls(python, pickle.dumps(numpy), memory)
        if before is not None and now == before:
            return before
        return now

    def put_back(self) -> None:
        """Restore both generators to this moment."""
        if RngState.capture(self) is not self:
            random.setstate(self.python)
            np.random.set_state(pickle.loads(self.numpy))


def _generator_memory() -> bytes | None:
    """Return the raw memory of the numpy default generator. None: not a Mersenne twister."""
    generator = np.random.mtrand.get_bit_generator()
    if type(generator) is not np.random.MT19937:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _BYTES)


def _twister_memory(key: np.ndarray[Any, Any], pos: int) -> bytes:
    """Return the raw memory for a Mersenne twister state."""
    return key.tobytes() + pos.to_bytes(4, sys.byteorder)


class ThreadState:
    """Default device, torch function modes, context variables and autocast state of a forward.

    The recomputation needs them, because a backward may be called outside, has no modes, and on a GPU runs in an
    autograd thread.
    """

    def __init__(self, device_type: str) -> None:
        self._device = torch.get_default_device()
        self._context = _copy_context(contextvars.copy_context())
        self._modes = _function_modes()
        self._types = dict.fromkeys(("cpu", device_type))  # without duplicates
        self._autocast = self._autocast_now()

    def run(self, function: Callable[..., _T], *args: Any) -> _T:
        """Call `function(*args)` with the saved state. Changes to context variables are discarded."""
        context = _copy_context(self._context)  # for each micro-batch anew
        modes = [mode for mode in self._modes if mode not in _function_modes()]
        is_same_device = torch.get_default_device() == self._device
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
    if not stack:  # in almost all uses
        return stack
    return [mode for mode in stack if not isinstance(mode, DeviceContext)]


def _copy_context(context: contextvars.Context) -> contextvars.Context:
    """Return a copy with separate containers, without graph tensors.

    transformers collects layer outputs in a context variable; a use that refers to these would be part of a
    reference cycle.
    """
    copy = context.copy()
    variables, collected = find_collectors(context)
    if collected:
        for variable, own in zip(variables, copy_collected(collected, [], keep=_has_no_graph), strict=True):
            copy.run(variable.set, own)
    return copy


def _has_no_graph(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is None


def past_subclasses(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with `__torch_function__` disabled.

    A single C call, since an interrupt at the end of a `with` block would leave the thread in the disabled state.
    """
    return torch._C._disabled_torch_function_impl(function, (), args, kwargs)
