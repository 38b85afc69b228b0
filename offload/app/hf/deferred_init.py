"""Initial weights on demand: the model is built in full, but writes to parameters are recorded and done later.

A randomly initialized model larger than memory is filled one unit at a time. Each unit runs the exact calls from its
constructors and from `_init_weights`, in order. Memory from `torch.empty` is committed by the OS on first write, so an
unfilled parameter costs address space only.

Recording uses `TorchFunctionMode`. Only constant and random writes are deferred. A write with other tensors as input,
or a read after recorded writes, first replays the recorded writes. An unforeseen initialization therefore costs at most
early memory use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter
from transformers import initialization as transformers_initialization

RecordedCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

# Writes that replace every element. They void earlier recorded writes to the same tensor.
_REPLACING = frozenset(
    ("normal_", "uniform_", "constant_", "kaiming_uniform_", "trunc_normal_", "orthogonal_", "zero_", "fill_", "copy_")
)
# fmt: off
SHAPE_OPERATIONS = frozenset((
    "dim", "size", "numel", "nelement", "stride", "element_size", "is_contiguous", "get_device", "is_floating_point",
    "is_complex", "requires_grad_", "__hash__", "__len__", "__eq__", "new_empty", "new_zeros", "new_ones", "new_full",
    "empty_like", "zeros_like", "ones_like", "full_like",
))
"""Parameter operations without need for values or memory: metadata, and new tensors like another."""
# Also views, which are written through `_base`.
_HARMLESS = SHAPE_OPERATIONS | frozenset((
    "data_ptr", "storage_offset", "new_tensor", "__getitem__", "view", "view_as", "narrow", "select", "t", "transpose",
    "permute", "squeeze", "unsqueeze",
))
# fmt: on
# Modules with whole initializations. While a model initializes, transformers replaces torch's functions by its own.
_INIT_MODULES = ("torch.nn.init", "transformers.initialization")
# torch initializations with reads after their own writes (rejection, QR). Recorded whole, at the call by transformers.
_WHOLE = ("trunc_normal_", "orthogonal_")


class DeferredInit(TorchFunctionMode):
    """Record constant and random writes to `nn.Parameter`s. `bind` returns the replay function."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._calls: dict[int, list[RecordedCall]] = {}
        self._alive: dict[int, nn.Parameter] = {}  # holds references: ids stay unique

    def __enter__(self) -> DeferredInit:
        self._contexts = ExitStack()
        self._contexts.enter_context(_seeded_rng(self._seed))
        self._contexts.enter_context(self._whole_calls())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._contexts.__exit__(*error)

    def bind(self, model: nn.Module, only: Collection[int] | None = None) -> Callable[[str, nn.Module], None]:
        """Return `fill(name, module)`, a function to replay the recorded writes to module parameters, once.

        `only`: restrict to parameters with these ids. The values depend on the seed and the first parameter name in
        `model`, not on the call order.
        """
        names = {
            id(parameter): name for name, parameter in model.named_parameters() if only is None or id(parameter) in only
        }
        calls_by_id = {key: calls for key, calls in self._calls.items() if key in names}
        # The calls hold the parameters from here on, until each is filled.
        self._calls = {}
        self._alive = {}

        def fill(_name: str, module: nn.Module) -> None:
            for parameter in module.parameters():
                pending = calls_by_id.pop(id(parameter), None)
                if pending is not None:
                    # By the name: the order of units and ranks must not change values.
                    digest = hashlib.sha256(f"{self._seed}:{names[id(parameter)]}".encode()).digest()
                    with _seeded_rng(int.from_bytes(digest[:8], "little") >> 1):
                        _replay(pending)

        return fill

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__") and getattr(getattr(func, "__self__", None), "__name__", "") != "data":
            return func(*args, **kwargs)  # an attribute, for example dtype, device or grad
        target, inputs = _split(name, func, args, kwargs)
        for tensor in inputs:
            if name not in _HARMLESS:
                self._replay_now(_owner(tensor))
        if target is None:
            return func(*args, **kwargs)
        owner = _owner(target)
        if owner is not None and not inputs and kwargs.get("generator") is None:
            self._record(owner, target, name, (func, args, kwargs))
            return target
        if name in _REPLACING and target is owner:
            self._calls.pop(id(owner), None)
        self._replay_now(owner)
        return func(*args, **kwargs)

    def _record(self, owner: nn.Parameter, target: torch.Tensor, name: str, call: RecordedCall) -> None:
        # A constructor writes, then `_init_weights` writes again: the last one counts.
        if name in _REPLACING and target is owner:
            self._calls[id(owner)] = []
        self._alive[id(owner)] = owner
        self._calls.setdefault(id(owner), []).append(call)

    def _replay_now(self, owner: nn.Parameter | None) -> None:
        """Replay the writes recorded for a parameter, because its values are needed now."""
        if owner is not None:
            _replay(self._calls.pop(id(owner), []))

    @contextmanager
    def _whole_calls(self) -> Iterator[None]:
        """Record each initialization in `_WHOLE` as one call, in the lookup table of transformers."""
        table = getattr(transformers_initialization, "TORCH_INIT_FUNCTIONS", {})
        originals = {name: table[name] for name in _WHOLE if name in table}

        def whole(name: str) -> Callable[..., torch.Tensor]:
            def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                if not isinstance(tensor, nn.Parameter) or kwargs.get("generator") is not None:
                    return originals[name](tensor, *args, **kwargs)
                self._record(tensor, tensor, name, (originals[name], (tensor, *args), kwargs))
                return tensor

            return call

        try:
            table.update({name: whole(name) for name in originals})
            yield
        finally:
            table.update(originals)


def _owner(tensor: torch.Tensor) -> nn.Parameter | None:
    """Return the parameter that owns the tensor memory, as far as autograd view tracking knows."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    base = tensor._base
    if isinstance(base, nn.Parameter):
        return base
    return None


def _split(name: str, func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return the tensor written by a call (None: no write) and the tensors read."""
    tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
    if tensors and getattr(func, "__module__", None) in _INIT_MODULES:
        return tensors[0], tensors[1:]
    in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    if tensors and args and tensors[0] is args[0] and (in_place or name == "__setitem__"):
        return tensors[0], tensors[1:]
    return None, tensors


def _replay(calls: list[RecordedCall]) -> None:
    with torch._C.DisableTorchFunction(), torch.no_grad():  # or the calls would be recorded again
        for func, args, kwargs in calls:
            func(*args, **kwargs)


@contextmanager
def _seeded_rng(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):  # the generator of the run must not move by a model's size
        torch.manual_seed(seed)
        yield
