"""The weights of a base that is not filled, read while an adapter's first values are made of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from offload.hf.models import BuiltModel
from offload.hf.residual import residual_of
from offload.hf.sources import Removed, Source

# What may be asked of a parameter that has no values yet.
# fmt: off
_OF_SHAPE = frozenset((
    "dim", "size", "numel", "nelement", "stride", "element_size", "is_contiguous", "get_device", "is_floating_point",
    "is_complex", "requires_grad_", "__hash__", "__len__", "__eq__", "new_empty", "new_zeros", "new_ones", "new_full",
    "empty_like", "zeros_like", "ones_like", "full_like",
))
# fmt: on


class BaseReads(TorchFunctionMode):
    """While active, gives a parameter of a base that is not filled its values as soon as they are read, and takes them
    away when another one's are. What is written instead stays: but of a weight that was written without a product that
    was taken out of it, by an adapter's initialisation, the product is kept.
    """

    def __init__(self, built: BuiltModel, removed: Mapping[str, Removed]) -> None:
        """`removed`: what was taken out of weights, by their names, before."""
        super().__init__()
        self.removed = dict(removed)
        """What was taken out of weights so far, by their names in the base."""
        self._base, self._built = built, residual_of(built, self.removed)
        self._product: tuple[torch.Tensor, ...] = ()  # the matrices of the last product
        self._alive = {id(parameter): parameter for parameter in built.model.parameters()}  # so that ids stay theirs
        self._names = {id(parameter): name for name, parameter in built.model.named_parameters()}
        self._open: dict[int, torch.Tensor] = {}  # by the parameter's id, what is in the place of its values else
        self._left: dict[nn.Parameter, Source] = {}
        self._written: dict[int, torch.Tensor] = {}  # as `_open`

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._close()

    @property
    def changed(self) -> list[str]:
        """The names of the frozen parameters that were written."""
        return [self._names[key] for key in self._written if not self._alive[key].requires_grad]

    def take_back(self) -> None:
        """Forget what was written with the values that it had."""
        for key, parameter in self._alive.items():
            source = self._built.source(self._names[key]) if key in self._written else None
            with torch._C.DisableTorchFunction():
                if source is not None and torch.equal(parameter.data.view(-1), source.read(0, parameter.numel())):
                    parameter.data = self._written.pop(key)

    def fill(self, name: str, module: nn.Module) -> Mapping[nn.Parameter, Source]:
        """Do as the base's own `fill`: what the adapter adds has its values."""
        found = dict(self._built.fill(name, module) or {})
        for parameter in module.parameters():
            if parameter in self._left:
                found[parameter] = self._left.pop(parameter)
            if id(parameter) in self._written:
                found.pop(parameter, None)
        return found

    def source(self, name: str) -> Source | None:
        """Do as the base's own `source`, for what is left of its weights."""
        return self._built.source(name)

    def names_in(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """Yield the names in the adapted model of what the base has, and its own names."""
        for name, parameter in model.named_parameters():
            if id(parameter) in self._names and id(parameter) not in self._written:
                yield name, self._names[id(parameter)]

    def _close(self, but: Collection[int] = ()) -> None:
        for key in self._open.keys() - set(but):
            self._alive[key].data = self._open.pop(key)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        is_attribute = name in ("__get__", "__set__") and owner != "data"
        if is_attribute or name in _OF_SHAPE:
            return func(*args, **kwargs)
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        read = [id(each) for each in given if id(each) in self._names]
        is_write = name == "__set__" or (name.endswith("_") and not name.endswith("__"))
        if read:
            self._close(but=read)
        for key in read:
            if key not in self._open and key not in self._written:
                self._read(key)
        if read and is_write and id(given[0]) == read[0]:
            self._written.setdefault(read[0], self._open.pop(read[0], given[0].data))
        result = func(*args, **kwargs)
        if name in ("matmul", "__matmul__"):
            self._product = args
        elif read and name == "__set__":
            self._note_removed(read[0])
        return result

    def _note_removed(self, key: int) -> None:
        """Keep, instead of what was written, the last product, where that is the difference to the bit."""
        name, parameter = self._names[key], self._alive[key]
        source = self._base.source(name)
        if source is None or [each.dim() for each in (parameter, *self._product)] != [2, 2, 2]:
            return
        weight = source.read(0, parameter.numel()).view(parameter.shape)
        left, right = (each.detach().float().clone(memory_format=torch.contiguous_format) for each in self._product)
        for transposed in (False, True):
            removed = Removed(left, right, transposed)
            if removed.product().shape == weight.shape and torch.equal(removed.out_of(weight), parameter.detach()):
                self.removed[name], parameter.data = removed, self._written.pop(key)
                return

    def _read(self, key: int) -> None:
        source, parameter = self._built.source(self._names[key]), self._alive[key]
        if source is not None:
            self._open[key] = parameter.data
            parameter.data = source.read(0, parameter.numel()).view(parameter.shape)
            return
        for owner in self._built.model.modules():  # what no file has is made, once, and stays
            if any(each is parameter for each in owner._parameters.values()):
                self._left.update(self._built.fill("", owner) or {})
