"""Tensors that outlive a forward in another place than its result: an attribute, a list, an object of a hook."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch.overrides import TorchFunctionMode


class OutsideTensors(TorchFunctionMode):
    """Numbers the tensors made in a forward, and finds those still alive afterwards.

    Anything may hold a tensor, so nothing is searched: a tensor alive after the forward is held outside. The inputs
    have the numbers -1, -2, ... A repetition of the forward makes the same tensors in the same order.
    """

    def __init__(self, wanted: Collection[int] = ()) -> None:
        """`wanted`: numbers of tensors to hold in `again`."""
        super().__init__()
        self._wanted = wanted
        self.again: dict[int, torch.Tensor] = {}
        """The wanted tensors of this forward, by number."""
        self._references: dict[int, ref[torch.Tensor]] = {}  # weak: only others may keep a tensor alive
        self._num_made = 0

    def watching(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` under this mode."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else (result,)
        for each in made:
            if isinstance(each, torch.Tensor):
                self._add(self._num_made, each)
                self._num_made += 1
        return result

    def add_inputs(self, inputs: Iterable[torch.Tensor]) -> None:
        """Number the inputs too."""
        for number, tensor in enumerate(inputs, 1):
            self._add(-number, tensor)

    def alive(self, known: Sequence[torch.Tensor] = ()) -> dict[int, torch.Tensor]:
        """Return the tensors with a gradient that are still alive, by number, each once, except for `known`."""
        found = {id(t): (number, t) for number, each in self._references.items() if (t := each()) is not None}
        others = [(number, t) for number, t in found.values() if all(t is not one for one in known)]
        # A leaf is an input, or a weight, which some operations return as it is.
        return {number: t for number, t in others if t.grad_fn is not None or (number < 0 and t.requires_grad)}

    def _add(self, number: int, tensor: torch.Tensor) -> None:
        self._references[number] = ref(tensor)
        if number in self._wanted:
            self.again[number] = tensor
