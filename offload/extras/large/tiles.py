"""Modules inside a unit run over sequence tiles, each recomputed in the backward.

This is the tiled MLP from ALST (arXiv:2506.13996), for any row-wise module. Beside attention memory, a unit then holds
the inputs and results of these modules, and intermediate tensors (an MLP's hidden layer) for one tile only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.engine.comparison import are_near
from offload.engine.units.arguments import Arguments
from offload.engine.units.snapshots import ThreadState
from offload.modules import forwards_replaced

Span = tuple[int, int]
"""Row range [begin, end)."""


_SHARE_OF_LENGTH = 32
_FEWEST_ROWS, _MOST_ROWS = 256, 4096
"""Limits of the automatic tile size: fewer rows underuse a GPU, more rows are no faster."""


def tile_rows(length: int) -> int:
    """Return the automatic tile size for a sequence: a power of two near length / 32, within limits."""
    share = 1 << max(0, (length // _SHARE_OF_LENGTH).bit_length() - 1)
    return min(_MOST_ROWS, max(_FEWEST_ROWS, share))


@dataclass(frozen=True)
class RowModule:
    """A row-wise module inside a unit: a result row depends only on the same input row, not on the position."""

    name: str
    """Module name in the unit."""
    module: nn.Module
    """The module."""
    structure: Hashable
    """Argument structure for which the module is row-wise."""
    cut: tuple[int, ...]
    """Indices for input tensors with rows."""
    axis: int
    """Row axis in these inputs and in all results."""
    is_idle: bool = False
    """True if the unit backward reads no result values, so a recomputation can skip them."""

    def num_rows(self, arguments: Arguments) -> int:
        """Return the number of rows in a call; 0 if the call differs from the tried ones."""
        if arguments.structure != self.structure:
            return 0
        tensors = arguments.tensors
        sizes = {tensors[i].shape[self.axis] for i in self.cut}
        # A gradient for a tensor without rows would be a sum over tiles; gradients here are put side by side.
        is_shared = all(i in self.cut or not t.requires_grad for i, t in enumerate(tensors))
        if len(sizes) != 1 or not is_shared:
            return 0
        return sizes.pop()


@dataclass(frozen=True)
class Tiles:
    """Trial results for the modules inside a unit."""

    modules: tuple[RowModule, ...]
    """Outermost row-wise modules that save memory when run over tiles."""
    whole: tuple[tuple[str, str], ...] = ()
    """(name, reason) for modules run whole."""
    input: int = 0
    """Index of the unit input with tiled rows."""
    axis: int = 0
    """Row axis in this input."""
    saved_bytes: float = 0.0
    """Graph bytes per token, untiled, without inputs and weights. 0: unknown."""
    is_whole: bool = False
    """True if the unit was tried as a whole on a few tokens."""
    tried_rows: int = 0
    """Length of the longest use with a comparison between tiled and whole results."""


@dataclass(eq=False)
class TiledForward:
    """Runs the original unit forward, with some inner modules over `size`-row tiles."""

    own: Callable[..., Any]
    modules: Sequence[RowModule]
    size: int
    device_type: str
    is_recomputation: bool = False

    def for_recomputation(self) -> TiledForward:
        """Return the forward for a recomputation: results have a graph, and values only where read."""
        return TiledForward(self.own, self.modules, self.size, self.device_type, is_recomputation=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forwards = {rows.module: partial(self._run, rows, rows.module.forward) for rows in self.modules}
        with forwards_replaced(forwards):
            return self.own(*args, **kwargs)

    def _run(self, rows: RowModule, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = Arguments((args, kwargs))
        num_rows = rows.num_rows(arguments)
        if num_rows <= self.size:
            return own(*args, **kwargs)
        tensors, parameters = list(arguments.tensors), list(rows.module.parameters())
        arguments.tensors.clear()  # Only autograd may hold the inputs until the backward.
        call = _TiledCall(self, rows, own, arguments, len(tensors))
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *parameters)):
            call.thread_state = ThreadState(self.device_type)
            outputs = _TiledFunction.apply(call, *tensors, *parameters)
        else:
            outputs = call.forward(tensors)
        result, call.result = call.result, None
        assert result is not None
        return result.fill(outputs)


class ComparedForward(TiledForward):
    """Runs a unit as usual, and compares tiled with whole module results."""

    def __init__(self, tiled: TiledForward, most_rows: int) -> None:
        """`most_rows`: row limit for whole modules, by memory."""
        super().__init__(tiled.own, tiled.modules, tiled.size, tiled.device_type)
        self._most_rows = most_rows
        self.differing: set[str] = set()
        """Modules (names) with different results over tiles."""

    def _run(self, rows: RowModule, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = Arguments((args, kwargs))
        tensors, length = list(arguments.tensors), rows.num_rows(arguments)
        num_rows = min(length, self._most_rows)
        while num_rows > self.size:
            few = [
                t.narrow(rows.axis, 0, num_rows).contiguous() if num_rows < length and i in rows.cut else t
                for i, t in enumerate(tensors)
            ]
            few_arguments = arguments.fill(few)
            try:
                whole = Arguments(own(*few_arguments[0], **few_arguments[1])).tensors
            except torch.OutOfMemoryError:  # the limit is an estimate
                num_rows //= 2
                continue
            tiles = Arguments(super()._run(rows, own, *few_arguments[0], **few_arguments[1])).tensors
            if len(whole) != len(tiles) or not all(map(are_near, whole, tiles)):
                self.differing.add(rows.name)
            break
        return super()._run(rows, own, *args, **kwargs)


class _TiledCall:
    """One tiled module call, from forward to backward."""

    def __init__(
        self, tiled: TiledForward, rows: RowModule, own: Callable[..., Any], arguments: Arguments, num_inputs: int
    ) -> None:
        """`arguments`: call arguments, emptied of their `num_inputs` tensors."""
        self._rows = rows
        self._own = own
        self._arguments = arguments
        self.num_inputs = num_inputs
        self._size = tiled.size
        self._is_idle = tiled.is_recomputation and rows.is_idle  # the first forward needs values
        self.thread_state: ThreadState | None = None
        """Thread state around the forward. None: no backward."""
        self.result: Arguments | None = None
        """Result structure, until fetched by the caller."""

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results for all rows; zeros for an idle call."""
        axis = self._rows.axis
        outputs: list[torch.Tensor] = []
        for span in self._spans(inputs):
            result = self._own_results(self._tile(inputs, span))
            if self.result is None:
                num_rows = inputs[self._rows.cut[0]].shape[axis]
                shapes = [(*t.shape[:axis], num_rows, *t.shape[axis + 1 :]) for t in result.tensors]
                pairs, self.result = list(zip(result.tensors, shapes, strict=True)), result
                if self._is_idle:  # The recomputation needs only the result structure.
                    outputs = [t.new_zeros(()).expand(shape) for t, shape in pairs]
                    break
                outputs = [t.new_empty(shape) for t, shape in pairs]
                del pairs
            for output, part in zip(outputs, result.tensors, strict=True):
                self._part(output, span).copy_(part)
            result.tensors.clear()
        assert self.result is not None
        self.result.tensors.clear()
        return outputs

    def backward(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Recompute each tile with a graph and run the tile backward.

        Return the gradients for inputs and parameters. Parameter gradients are summed over tiles in fp32 and rounded
        once, so hooks see one gradient.
        """
        num_inputs = self.num_inputs
        inputs, weight_needs = tensors[:num_inputs], needs[num_inputs:]
        # The present Parameters: the slot may differ from the forward.
        parameters = zip(self._rows.module.parameters(), weight_needs, strict=True)
        weights = [p if need and p.requires_grad else None for p, need in parameters]
        trainable = [p for p in weights if p is not None]
        input_gradients = [torch.empty_like(t) if need else None for t, need in zip(inputs, needs, strict=False)]
        sums: list[torch.Tensor | None] = [None] * len(trainable)
        for span in self._spans(inputs):
            leaves = [t.detach().requires_grad_(n) for t, n in zip(self._tile(inputs, span), needs, strict=False)]
            parts = self._gradients(leaves, trainable, [None if g is None else self._part(g, span) for g in gradients])
            for target, part in zip(input_gradients, parts, strict=False):
                if target is not None and part is not None:
                    self._part(target, span).copy_(part)
                elif target is not None:  # not used in this tile
                    self._part(target, span).zero_()
            for number, part in enumerate(parts[num_inputs:]):
                previous = sums[number]
                if part is not None and previous is not None:
                    previous.add_(part)
                elif part is not None:
                    # The autograd result may be a view of another tensor.
                    sums[number] = part.to(torch.float32, copy=True)
        for number, weight in enumerate(trainable):  # One by one, so only one gradient exists in both dtypes at a time.
            total = sums[number]
            if total is not None:
                sums[number] = total.to(weight.dtype)
        rest = iter(sums)
        return [*input_gradients, *(None if weight is None else next(rest) for weight in weights)]

    def _gradients(
        self, leaves: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return leaf and weight gradients for one tile with incoming `gradients`."""
        assert self.thread_state is not None
        with torch.enable_grad():
            # A backward may run outside of autocast and modes, and on a GPU in a thread of autograd.
            results = self.thread_state.run(self._own_results, leaves).tensors
        pairs = [(t, g) for t, g in zip(results, gradients, strict=True) if t.requires_grad and g is not None]
        wanted = [t for t in (*leaves, *weights) if t.requires_grad]
        if not pairs or not wanted:
            return [None] * (len(leaves) + len(weights))
        leaf_gradients = torch.autograd.grad([t for t, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        rest = iter(leaf_gradients)
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
    """Border between the unit graph and a tiled module.

    Module parameters are inputs too, so autograd runs the backward even without other gradients, and takes parameter
    gradients as usual.
    """

    @staticmethod
    def forward(ctx: Any, call: _TiledCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)  # A saved unit graph detects weight use by these saved tensors.
        ctx.set_materialize_grads(False)
        outputs = call.forward(tensors[: call.num_inputs])
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.call.backward(ctx.saved_tensors, gradients, ctx.needs_input_grad[1:])
