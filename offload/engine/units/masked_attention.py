"""Attention with a mask, without cuDNN on GPUs where cuDNN's gradients can be NaN.

The flags of torch choose the kernel in the forward, and the backward is of the same library. Attention without a mask
keeps cuDNN, the fastest there. This is the outermost stage, so that compiled forwards are traced without cuDNN, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from offload.accelerators import masked_attention_fault
from offload.engine.units.arguments import Arguments
from offload.engine.units.stages import Host, Stage
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, ForwardRunner, Use
from offload.planning.settings import Settings

_MASK_AXES = 4
"""Axes of a mask or bias of scores: [rows, heads, queries, keys]."""


class WithoutCudnn:
    """A forward whose attention is computed by other kernels than cuDNN's."""

    def __init__(self, forward: Forward) -> None:
        self.original = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cuda = torch.backends.cuda
        was_enabled = cuda.cudnn_sdp_enabled()
        cuda.enable_cudnn_sdp(False)
        try:
            return self.original(*args, **kwargs)
        finally:
            cuda.enable_cudnn_sdp(was_enabled)


class MaskedAttention(Stage):
    """Units with a mask among their arguments run without cuDNN. Masks made inside a unit are not seen."""

    @classmethod
    def over(cls, inner: Stage, host: Host, settings: Settings) -> Stage:  # noqa: ARG003
        if not masked_attention_fault(host.device.torch_device):
            return inner
        return cls(inner)

    def forward_of(self, unit: Unit, use: Use) -> Forward:
        return _without_cudnn(self.inner.forward_of(unit, use), use.tensors)

    def for_recomputation(self, forward: Forward) -> Forward:
        if not isinstance(forward, WithoutCudnn):
            return self.inner.for_recomputation(forward)
        return WithoutCudnn(self.inner.for_recomputation(forward.original))

    def record(self, unit: Unit, runner: ForwardRunner, arguments: Arguments, rows: int | None) -> Forward:
        return _without_cudnn(self.inner.record(unit, runner, arguments, rows), arguments.tensors)


def _without_cudnn(forward: Forward, tensors: Sequence[torch.Tensor]) -> Forward:
    """Return the forward for a use with these tensors. Pictures look like masks, and then lose some speed."""
    if not any(tensor.dim() == _MASK_AXES for tensor in tensors):
        return forward
    return WithoutCudnn(forward)
