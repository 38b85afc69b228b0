"""Attention with a mask, without cuDNN on GPUs where cuDNN's gradients can be NaN.

The flags of torch choose the kernel in the forward, and the backward is of the same library. Attention without a mask
keeps cuDNN, the fastest there. This is the outermost stage, so that compiled forwards are traced without cuDNN, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from offload.accelerators import masked_attention_fault
from offload.engine.units.arguments import Arguments
from offload.engine.units.stages import Host, Stage
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, ForwardRunner, Use
from offload.planning.settings import Settings

_MASK_AXES = 4
"""Axes of a mask or bias of scores: [rows, heads, queries, keys]."""


_MASK_WORDS = "attn_mask", "key_padding_mask"
"""Names of masks in torch's functions of attention."""
_MASK_POSITION = 3
"""Position of the mask in `scaled_dot_product_attention`."""


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Attention within the context is computed by other kernels than cuDNN's."""
    cuda = torch.backends.cuda
    was_enabled = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(was_enabled)


class WithoutCudnn:
    """A forward without cuDNN's attention, for a use with a mask among its arguments."""

    def __init__(self, forward: Forward) -> None:
        self.original = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with without_cudnn():
            return self.original(*args, **kwargs)


class _MaskedCalls(TorchFunctionMode):
    """Calls attention with a mask without cuDNN, and other attention as it is."""

    has_masks = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_masked(func, args, kwargs):
            return func(*args, **kwargs)
        self.has_masks = True
        with without_cudnn():
            return func(*args, **kwargs)


def is_masked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True for a call of torch's attention with a mask."""
    is_attention = func is functional.scaled_dot_product_attention
    if any(kwargs.get(word) is not None for word in _MASK_WORDS):
        return is_attention or func is functional.multi_head_attention_forward
    return is_attention and len(args) > _MASK_POSITION and args[_MASK_POSITION] is not None


class Watched:
    """A forward whose calls of attention are watched, in a use that may make masks itself."""

    def __init__(self, forward: Forward, stage: MaskedAttention, unit: Unit) -> None:
        self.original = forward
        self.stage = stage
        self.unit = unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _MaskedCalls() as calls:
            result = self.original(*args, **kwargs)
        if calls.has_masks:
            self.stage.making.add(self.unit.number)
        return result


class MaskedAttention(Stage):
    """Units with a mask among their arguments run without cuDNN, and masks made inside a unit are found at the call.

    The calls of a unit are watched while it is recorded, and in its first use with other shapes, because a block may
    make a mask for long rows alone. A unit that has made a mask is watched in all uses: a recomputation and a resumed
    run then choose the same kernels. Compiled blocks have no calls to watch: see `masks_left_out`.
    """

    def __init__(self, inner: Stage) -> None:
        super().__init__(inner)
        self.making: set[int] = set()
        """Numbers of units that have made masks."""
        self._known: set[Hashable] = set()
        """Uses watched before: unit and shapes."""

    @classmethod
    def over(cls, inner: Stage, host: Host, settings: Settings) -> Stage:  # noqa: ARG003
        if not masked_attention_fault(host.device.torch_device):
            return inner
        return cls(inner)

    def forward_of(self, unit: Unit, use: Use) -> Forward:
        if _has_mask(use.tensors):
            with without_cudnn():  # a trial may run or compile the forward
                return WithoutCudnn(self.inner.forward_of(unit, use))
        forward = self.inner.forward_of(unit, use)
        if type(unit.module) in self.inner.compiled:
            return forward
        key = unit.number, tuple([tensor.shape for tensor in use.tensors])
        if key in self._known and unit.number not in self.making:
            return forward
        self._known.add(key)
        return Watched(forward, self, unit)

    def for_recomputation(self, forward: Forward) -> Forward:
        if isinstance(forward, WithoutCudnn):
            return WithoutCudnn(self.inner.for_recomputation(forward.original))
        if isinstance(forward, Watched):
            return Watched(self.inner.for_recomputation(forward.original), self, forward.unit)
        return self.inner.for_recomputation(forward)

    def record(self, unit: Unit, runner: ForwardRunner, arguments: Arguments, rows: int | None) -> Forward:
        forward = self.inner.record(unit, runner, arguments, rows)
        if _has_mask(arguments.tensors):
            return WithoutCudnn(forward)
        return Watched(forward, self, unit)


def _has_mask(tensors: Iterable[torch.Tensor]) -> bool:
    """True for tensors with a mask among them. Pictures look like masks, and then lose some speed."""
    return any(tensor.dim() == _MASK_AXES for tensor in tensors)


def masks_left_out(graph: torch.fx.GraphModule, inputs: Iterable[Any]) -> AbstractContextManager[None]:
    """Return a context to compile a graph in: without cuDNN, if the graph has attention with a mask and cuDNN the
    fault. The compiler then chooses the kernels.
    """
    devices = {tensor.device for tensor in inputs if isinstance(tensor, torch.Tensor)}
    masked = any(is_masked(node.target, node.args, node.kwargs) for node in graph.graph.nodes)
    if masked and any(map(masked_attention_fault, devices)):
        return without_cudnn()
    return nullcontext()
