"""Calls of a training loop into the model: of the whole, or of any part with weights in the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import torch
from torch import nn

from offload.engine.units.arguments import Arguments
from offload.engine.units.residency import refuse_copy
from offload.engine.units.runner import UnitRunner
from offload.engine.units.unit import Unit


class ModelCall(NamedTuple):
    """A call from a training loop."""

    module: nn.Module
    """The model, or the part called alone."""
    name: str
    """Name of the part; "" for the model."""
    args: Sequence[Any]
    """Positional arguments."""
    kwargs: Mapping[str, Any]
    """Keyword arguments."""

    def run_on_copies(self) -> Any:
        """Call the module on copies of the arguments; the caller's containers, values and graphs stay unchanged."""
        arguments = Arguments((self.args, dict(self.kwargs)))
        own = [t.detach().requires_grad_(t.requires_grad).clone() for t in arguments.tensors]
        args, kwargs = arguments.fill(own)
        return self.module(*args, **kwargs)


class Entries:
    """Tells `prepare` of each call from outside, before the forward.

    A loop may call the model, a backbone, or a single block, in any order. The outermost such call is the entry; the
    calls below belong to it. Modules inside a streamed unit are no entries, since they have no weights alone.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], runner: UnitRunner, prepare: Callable[[ModelCall], None]
    ) -> None:
        self.runner = runner
        self._prepare = prepare
        self._current: nn.Module | None = None
        self._shown: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Results in the present call, as a script's hooks see them, and as the model goes on with them."""
        self._closing: dict[nn.Module, Any] = {}
        """Last hooks of running parts."""
        homes = {unit.module for unit in units}
        streamed = [unit for unit in units if not unit.resident]
        inside = {module for unit in streamed for module in unit.modules if module is not unit.module}
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if module not in inside and not homes.isdisjoint(module.modules()):
                # A part that outlives the model must not keep the engine alive.
                hooks = _Hooks(name, ref(self), self if module is model else None)
                self._handles.append(module.register_forward_pre_hook(hooks.begin, with_kwargs=True))
                self._handles.append(module.register_forward_hook(hooks.end, prepend=True, always_call=True))

    def begin(self, call: ModelCall) -> tuple[Any, Any] | None:
        """Prepare for a call, unless it is part of another one. Return its arguments; None: as they are."""
        # A second call of the current module: an interrupt has ended the first one.
        if self._current is not None and self._current is not call.module:
            self._show_to_hooks(call.module)
            return None
        self._current = call.module
        args, kwargs = _with_scale((call.args, call.kwargs), self.runner.loss_scale.enter)
        if torch._C._current_graph_task_id() == -1:  # a checkpoint of the script repeats a call that is prepared
            self._prepare(call._replace(args=args, kwargs=kwargs))
        return args, kwargs

    def end(self, module: nn.Module, result: Any) -> Any:
        """End a call, also after an exception. Return the result for the script; None: as it is."""
        if module is not self._current:
            if module in self._closing:
                return _with_scale(result, self._show)
            return None
        self._current = None
        result = _with_scale(result, self._inner)
        self._shown.clear()
        return _with_scale(result, self.runner.loss_scale.leave)

    def _show_to_hooks(self, part: nn.Module) -> None:
        """Let a script's hooks see the result like that of a whole model: in fp32, with a gradient without scale."""
        if part in self._closing:  # an exception has ended its last call
            self._closing.pop(part).remove()
        if any(map(_is_of_script, part._forward_hooks.values())):
            self._closing[part] = part.register_forward_hook(self._close_part)

    def _show(self, tensor: torch.Tensor) -> torch.Tensor:
        shown = self.runner.loss_scale.leave(tensor)
        if shown is not tensor:
            self._shown.append((shown, tensor))
        return shown

    def _inner(self, tensor: torch.Tensor) -> torch.Tensor:
        return next((inner for shown, inner in self._shown if shown is tensor), tensor)

    def _close_part(self, part: nn.Module, _args: Any, result: Any) -> Any:
        """Return the result for the model, after the script's hooks, which may have changed it."""
        self._closing.pop(part).remove()

        def back(tensor: torch.Tensor) -> torch.Tensor:
            inner = self._inner(tensor)
            if inner is not tensor:
                return inner
            return self.runner.loss_scale.enter(tensor)

        return _with_scale(result, back)

    def forget(self) -> None:
        """Reset: no call is running."""
        self._current = None
        self._shown.clear()
        for handle in self._closing.values():
            handle.remove()
        self._closing.clear()

    def close(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()


def _is_of_script(hook: Any) -> bool:
    """Tell whether a forward hook is neither an engine's nor one by which transformers gathers results."""
    is_own = isinstance(getattr(hook, "__self__", None), _Hooks)
    return not is_own and not str(hook.__module__).startswith("transformers.")


def _with_scale(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the tree with `change(tensor)` for each tensor that requires a gradient; the tree itself, if none does."""
    arguments = Arguments(tree)
    tensors = [change(tensor) if tensor.requires_grad else tensor for tensor in arguments.tensors]
    if all(map(is_, tensors, arguments.tensors)):
        return tree
    return arguments.fill(tensors)


class _Hooks:
    """The hooks of one module."""

    def __init__(self, name: str, entries: ref[Entries], owner: Entries | None) -> None:
        self._name = name
        self._entries = entries
        self._owner = owner

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        entries = self._entries()
        # Runs in every call of a module with weights, and most of these are the engine's own.
        if entries is None or entries.runner.is_engine_call:
            return None
        return entries.begin(ModelCall(module, self._name, args, kwargs))

    def end(self, module: nn.Module, _args: Any, result: Any) -> Any:
        entries = self._entries()
        if entries is None or entries.runner.is_engine_call:
            return None
        return entries.end(module, result)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        refuse_copy("pickle (torch.save) or copy.deepcopy")  # for the module, because its hooks refer to this object
