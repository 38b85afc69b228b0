"""Modules inside a unit that run over tiles of the sequence, each of which is recomputed in the backward (the tiled MLP
of ALST, arXiv:2506.13996, for any module that is a function of rows).

Beside what attention needs, a unit then holds the inputs and results of such modules, and of what is in between (the
hidden layer of an MLP) one tile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.engine.units.arguments import Arguments
from offload.engine.units.rerouting import forwards_replaced
from offload.engine.units.surroundings import Surroundings

Span = tuple[int, int]
"""Rows from one up to another."""


_SHARE_OF_LENGTH = 32
_FEWEST_ROWS, _MOST_ROWS = 256, 4096
"""Of a tile that nobody has chosen: products of fewer rows do not keep a GPU busy, and those of more are no faster."""


def tile_rows(length: int) -> int:
    """Return the rows of a tile for a sequence of that length, where nobody says: a power of two, of which the graph of
    a module holds a small share.
    """
    share = 1 << max(0, (length // _SHARE_OF_LENGTH).bit_length() - 1)
    return min(_MOST_ROWS, max(_FEWEST_ROWS, share))


@dataclass(frozen=True)
class RowModule:
    """A module inside a unit that is a function of rows: each row of its results follows from that row of its inputs,
    wherever the row stands and whatever the others are.
    """

    name: str
    """The name of the module in the unit."""
    module: nn.Module
    """The module."""
    structure: Hashable
    """The structure of the arguments for which it is such a function."""
    cut: tuple[int, ...]
    """The numbers of the input tensors that have the rows."""
    axis: int
    """The axis of rows, of these and of all results."""
    is_idle: bool = False
    """True if the backward of the unit reads no value of the results, so that a recompute need not make them."""

    def num_rows(self, arguments: Arguments) -> int:
        """Return the number of rows of a call; 0 where it is not called as it was tried."""
        if arguments.structure != self.structure:
            return 0
        given = arguments.tensors
        sizes = {given[i].shape[self.axis] for i in self.cut}
        is_shared = all(i in self.cut or not t.requires_grad for i, t in enumerate(given))
        return sizes.pop() if len(sizes) == 1 and is_shared else 0


@dataclass(frozen=True)
class Tiles:
    """What was found about the modules inside a unit."""

    modules: tuple[RowModule, ...]
    """The outermost modules that are functions of rows, where it saves memory to run them over tiles."""
    whole: tuple[tuple[str, str], ...] = ()
    """The names of other modules, and why they run whole."""
    input: int = 0
    """The number of the unit's input tensor whose rows the tiles have."""
    axis: int = 0
    """The axis of that tensor."""
    saved_bytes: float = 0.0
    """What the graph of the unit saves for each token, untiled, beside its inputs and weights; 0 where that is not
    known.
    """
    is_whole: bool = False
    """True if the unit was tried as a whole, on a few tokens."""
    tried_rows: int = 0
    """The length of the longest use in which the modules were compared, over tiles and whole."""


class TiledForward:
    """Runs a unit's own forward, and within it modules over tiles of so many rows."""

    def __init__(
        self, own: Callable[..., Any], modules: Sequence[RowModule], size: int, device_type: str, again: bool = False
    ) -> None:
        self._own, self._modules, self._size, self._device_type = own, modules, size, device_type
        self._is_again = again

    def again(self) -> TiledForward:
        """Return what runs in a recompute, where results have a graph, and need values as far as others read them."""
        return TiledForward(self._own, self._modules, self._size, self._device_type, again=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forwards = {rows.module: partial(self._run, rows, rows.module.forward) for rows in self._modules}
        with forwards_replaced(forwards):
            return self._own(*args, **kwargs)

    def _run(self, rows: RowModule, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = Arguments((args, kwargs))
        num_rows = rows.num_rows(arguments)
        if num_rows <= self._size:
            return own(*args, **kwargs)
        given, parameters = list(arguments.tensors), list(rows.module.parameters())
        arguments.tensors.clear()  # of a use that waits for its backward, nobody but autograd holds the inputs
        call = _TiledCall(rows, own, arguments, len(given), self._size, is_idle=self._is_again and rows.is_idle)
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*given, *parameters)):
            call.surroundings = Surroundings(self._device_type)
            outputs = _TiledFunction.apply(call, *given, *parameters)
        else:
            outputs = call.forward(given)
        result, call.result = call.result, None
        assert result is not None
        return result.fill(outputs)


class ComparedForward(TiledForward):
    """Runs a unit as its own forward does, and compares the results of modules over tiles with those of all rows."""

    def __init__(
        self,
        own: Callable[..., Any],
        modules: Sequence[RowModule],
        size: int,
        device_type: str,
        most_rows: int,
        is_near: Callable[[torch.Tensor, torch.Tensor], bool],
    ) -> None:
        """`most_rows`: what the device has memory for, of a module that runs whole. `is_near`: True for results that
        differ by rounding alone.
        """
        super().__init__(own, modules, size, device_type)
        self._most_rows, self._is_near = most_rows, is_near
        self.differing: set[str] = set()
        """The names of the modules whose results are others over tiles."""

    def _run(self, rows: RowModule, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = Arguments((args, kwargs))
        given, length = list(arguments.tensors), rows.num_rows(arguments)
        num_rows = min(length, self._most_rows)
        while num_rows > self._size:
            few = [
                t.narrow(rows.axis, 0, num_rows).contiguous() if num_rows < length and i in rows.cut else t
                for i, t in enumerate(given)
            ]
            some = arguments.fill(few)
            try:
                whole = Arguments(own(*some[0], **some[1])).tensors
            except torch.OutOfMemoryError:
                num_rows //= 2
                continue
            tiles = Arguments(super()._run(rows, own, *some[0], **some[1])).tensors
            if len(whole) != len(tiles) or not all(map(self._is_near, whole, tiles)):
                self.differing.add(rows.name)
            break
        return super()._run(rows, own, *args, **kwargs)


class _TiledCall:
    """Serves the forward and the backward of one call of a module over tiles."""

    def __init__(
        self,
        rows: RowModule,
        own: Callable[..., Any],
        arguments: Arguments,
        num_inputs: int,
        size: int,
        *,
        is_idle: bool,
    ) -> None:
        """`arguments`: of the call, without its `num_inputs` tensors. `is_idle`: no value of the results is read."""
        self._rows, self._own, self._arguments, self.num_inputs = rows, own, arguments, num_inputs
        self._size, self._is_idle = size, is_idle
        self.surroundings: Surroundings | None = None
        """What surrounded the forward, where there is a backward."""
        self.result: Arguments | None = None
        """How the results lie in what the module returns, until somebody has asked for that."""

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results of all rows: those of an idle call are zeros."""
        axis = self._rows.axis
        outputs: list[torch.Tensor] = []
        for span in self._spans(inputs):
            made = self._own_results(self._tile(inputs, span))
            if self.result is None:
                num_rows = inputs[self._rows.cut[0]].shape[axis]
                shapes = [(*t.shape[:axis], num_rows, *t.shape[axis + 1 :]) for t in made.tensors]
                pairs, self.result = list(zip(made.tensors, shapes, strict=True)), made
                if self._is_idle:  # a recompute needs to know how the results lie, and no more
                    outputs = [t.new_zeros(()).expand(shape) for t, shape in pairs]
                    break
                outputs = [t.new_empty(shape) for t, shape in pairs]
                del pairs
            for output, part in zip(outputs, made.tensors, strict=True):
                self._part(output, span).copy_(part)
            made.tensors.clear()
        assert self.result is not None
        self.result.tensors.clear()
        return outputs

    def backward(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Run each tile again with a graph, and backward through it; return the gradients of inputs and parameters. The
        parameters' are sums over the tiles, in fp32, rounded once: their hooks see one gradient.
        """
        num_inputs = self.num_inputs
        inputs, of_weights = tensors[:num_inputs], needs[num_inputs:]
        # Those that hang in the module now, which may lie elsewhere than in the forward.
        hung = zip(self._rows.module.parameters(), of_weights, strict=True)
        weights = [p if need and p.requires_grad else None for p, need in hung]
        trained = [p for p in weights if p is not None]
        found = [torch.empty_like(t) if need else None for t, need in zip(inputs, needs, strict=False)]
        sums: list[torch.Tensor | None] = [None] * len(trained)
        for span in self._spans(inputs):
            leaves = [t.detach().requires_grad_(n) for t, n in zip(self._tile(inputs, span), needs, strict=False)]
            parts = self._gradients(leaves, trained, [None if g is None else self._part(g, span) for g in gradients])
            for number, target in enumerate(found):
                if target is not None:
                    part = parts[number]
                    self._part(target, span).copy_(target.new_zeros(()) if part is None else part)
            for number, part in enumerate(parts[num_inputs:]):
                so_far = sums[number]
                if part is not None and so_far is not None:
                    so_far.add_(part)
                elif part is not None:
                    sums[number] = part.to(torch.float32, copy=True)  # autograd's own may be a view of another
        for number, weight in enumerate(trained):  # one by one: both kinds of one are there at a time
            total = sums[number]
            sums[number] = None if total is None else total.to(weight.dtype)
        rest = iter(sums)
        return [*found, *(None if weight is None else next(rest) for weight in weights)]

    def _gradients(
        self, leaves: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of each of these for a tile, of which `gradients` come in."""
        assert self.surroundings is not None
        with torch.enable_grad():
            made = self.surroundings.run(lambda: self._own_results(leaves)).tensors
        pairs = [(t, g) for t, g in zip(made, gradients, strict=True) if t.requires_grad and g is not None]
        wanted = [t for t in (*leaves, *weights) if t.requires_grad]
        if not pairs or not wanted:
            return [None] * (len(leaves) + len(weights))
        made_of = torch.autograd.grad([t for t, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        rest = iter(made_of)
        return [next(rest) if t.requires_grad else None for t in (*leaves, *weights)]

    def _own_results(self, tensors: Sequence[torch.Tensor]) -> Arguments:
        args, kwargs = self._arguments.fill(tensors)
        return Arguments(self._own(*args, **kwargs))

    def _spans(self, inputs: Sequence[torch.Tensor]) -> Iterator[Span]:
        num_rows = inputs[self._rows.cut[0]].shape[self._rows.axis]
        return ((begin, min(begin + self._size, num_rows)) for begin in range(0, num_rows, self._size))

    def _tile(self, inputs: Sequence[torch.Tensor], span: Span) -> list[torch.Tensor]:
        cut = self._rows.cut
        return [self._part(t, span).contiguous() if i in cut else t for i, t in enumerate(inputs)]

    def _part(self, tensor: torch.Tensor, span: Span) -> torch.Tensor:
        return tensor.narrow(self._rows.axis, span[0], span[1] - span[0])


class _TiledFunction(torch.autograd.Function):
    """The border between a unit's graph and a module over tiles. The module's parameters are among the inputs, so that
    autograd asks for a backward where nothing else needs one, and takes their gradients as it takes others.
    """

    @staticmethod
    def forward(ctx: Any, call: _TiledCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)  # a graph that is kept knows by these that its backward reads weights
        ctx.set_materialize_grads(False)
        outputs = call.forward(tensors[: call.num_inputs])
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.call.backward(ctx.saved_tensors, gradients, ctx.needs_input_grad[1:])
