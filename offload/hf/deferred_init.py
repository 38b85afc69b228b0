"""Initial weights on demand: a model is built in full, but writes to its parameters are noted instead of done.

A randomly initialised model larger than memory can so be filled one unit at a time, by exactly the calls that its own
constructors and its family's `_init_weights` made, in their order. `torch.empty` gives memory that costs nothing until
it is written, so a parameter that was not filled yet takes address space alone.

The noting is done through `TorchFunctionMode`, torch's own hook for watching calls. Only writes of constants and random
numbers are put off. A write that needs the values of other tensors, or a read of a parameter that has notes, makes the
notes real first; so the worst that an unforeseen initialisation can do is to use memory early.
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

Note = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

# Writes that replace every element, so that earlier notes of the same tensor are void.
_REPLACING = frozenset(
    ("normal_", "uniform_", "constant_", "kaiming_uniform_", "trunc_normal_", "orthogonal_", "zero_", "fill_", "copy_")
)
# What may be asked of a parameter without its values: metadata, new tensors like it, views (written through `_base`).
# fmt: off
_HARMLESS = frozenset((
    "dim", "size", "numel", "nelement", "stride", "element_size", "data_ptr", "storage_offset", "is_contiguous",
    "get_device", "is_floating_point", "is_complex", "requires_grad_", "__hash__", "__len__", "__eq__", "new_empty",
    "new_zeros", "new_ones", "new_full", "new_tensor", "empty_like", "zeros_like", "ones_like", "full_like",
    "__getitem__", "view", "view_as", "narrow", "select", "t", "transpose", "permute", "squeeze", "unsqueeze",
))
# fmt: on
# Where whole initialisations live; while a model initialises, transformers puts its own in the place of torch's.
_INIT_MODULES = ("torch.nn.init", "transformers.initialization")
# Initialisations of torch that read what they wrote (rejection, QR): noted whole, where transformers calls them.
_WHOLE = ("trunc_normal_", "orthogonal_")


class DeferredInit(TorchFunctionMode):
    """While active, constant and random writes to `nn.Parameter`s are noted; `bind` returns the function that makes
    them.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._notes: dict[int, list[Note]] = {}
        self._alive: dict[int, nn.Parameter] = {}  # an id names one parameter only as long as that one lives

    def __enter__(self) -> DeferredInit:
        self._contexts = ExitStack()
        self._contexts.enter_context(_seeded(self._seed))
        self._contexts.enter_context(self._whole_calls())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._contexts.__exit__(*error)

    def bind(self, model: nn.Module, only: Collection[int] | None = None) -> Callable[[str, nn.Module], None]:
        """Return `fill(name, module)`, which makes the notes of the module's parameters, once; with `only`, those of
        the parameters with these ids.

        The values depend on the seed and on the parameter's first name in `model`, not on the order of the calls.
        """
        names = {
            id(parameter): name for name, parameter in model.named_parameters() if only is None or id(parameter) in only
        }
        notes = {key: found for key, found in self._notes.items() if key in names}
        self._notes, self._alive = {}, {}

        def fill(_name: str, module: nn.Module) -> None:
            for parameter in module.parameters():
                pending = notes.pop(id(parameter), None)
                if pending is not None:
                    digest = hashlib.sha256(f"{self._seed}:{names[id(parameter)]}".encode()).digest()
                    with _seeded(int.from_bytes(digest[:8], "little") >> 1):
                        _make(pending)

        return fill

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__") and getattr(getattr(func, "__self__", None), "__name__", "") != "data":
            return func(*args, **kwargs)  # an attribute such as dtype, device or grad
        target, rest = _split(name, func, args, kwargs)
        for tensor in rest:
            if name not in _HARMLESS:
                self._settle(_owner(tensor))
        if target is None:
            return func(*args, **kwargs)
        owner = _owner(target)
        if owner is not None and not rest and kwargs.get("generator") is None:
            self._note(owner, target, name, (func, args, kwargs))
            return target
        if name in _REPLACING and target is owner:
            self._notes.pop(id(owner), None)
        self._settle(owner)
        return func(*args, **kwargs)

    def _note(self, owner: nn.Parameter, target: torch.Tensor, name: str, note: Note) -> None:
        if name in _REPLACING and target is owner:
            self._notes[id(owner)] = []
        self._alive[id(owner)] = owner
        self._notes.setdefault(id(owner), []).append(note)

    def _settle(self, owner: nn.Parameter | None) -> None:
        """Make what was noted for a parameter, because its values are needed now."""
        if owner is not None:
            _make(self._notes.pop(id(owner), []))

    @contextmanager
    def _whole_calls(self) -> Iterator[None]:
        """Note the initialisations of `_WHOLE` as one call each, in the table where transformers looks them up."""
        table = getattr(transformers_initialization, "TORCH_INIT_FUNCTIONS", {})
        originals = {name: table[name] for name in _WHOLE if name in table}

        def whole(name: str) -> Callable[..., torch.Tensor]:
            def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                if not isinstance(tensor, nn.Parameter) or kwargs.get("generator") is not None:
                    return originals[name](tensor, *args, **kwargs)
                self._note(tensor, tensor, name, (originals[name], (tensor, *args), kwargs))
                return tensor

            return call

        try:
            table.update({name: whole(name) for name in originals})
            yield
        finally:
            table.update(originals)


def _owner(tensor: torch.Tensor) -> nn.Parameter | None:
    """Return the parameter whose memory a tensor is, as far as autograd's view tracking tells."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    base = tensor._base
    return base if isinstance(base, nn.Parameter) else None


def _split(name: str, func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return the tensor that a call writes, if any, and the tensors that it reads."""
    tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
    if tensors and getattr(func, "__module__", None) in _INIT_MODULES:
        return tensors[0], tensors[1:]
    in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    if tensors and args and tensors[0] is args[0] and (in_place or name == "__setitem__"):
        return tensors[0], tensors[1:]
    return None, tensors


def _make(notes: list[Note]) -> None:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for func, args, kwargs in notes:
            func(*args, **kwargs)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
