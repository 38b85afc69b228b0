"""A unit: one module whose parameters travel together. The one place that reroutes a module's forward.

Its code is untouched. Forward fetches the weights into a device slot, runs the original forward without a graph, and gives the slot back;
backward fetches again, recomputes under the saved generator state with a graph, and hands the gradients on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from offload.engine.discover import Candidate
from offload.errors import OffloadError
from offload.partition.layout import ParameterInfo, Region

if TYPE_CHECKING:
    from offload.engine.stream import Stream

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def resting_parameter(info: ParameterInfo, device: torch.device) -> nn.Parameter:
    """Return what stands for a parameter while its weights are elsewhere: one NaN, expanded.

    Device, dtype and shape are right, the storage is one element, and a stray read is NaN. (On `meta` some operations return
    uninitialised memory without a word.)
    """
    nan = torch.full((), float("nan"), dtype=_DTYPES[info.compute], device=device)
    return nn.Parameter(nan.expand(info.shape), requires_grad=info.trainable)


class Unit:
    """A module, the places of its parameters, and the regions that hold them.

    `mutated`: indices of input tensors that the forward changes in place; `detached`: indices of output tensors that never require a
    gradient. Both are learned by the recording pass.
    """

    def __init__(self, candidate: Candidate, regions: Sequence[Region], stream: Stream) -> None:
        self.name, self.module, self.places = candidate.name, candidate.module, candidate.places
        self.whole, self.resident = candidate.whole, candidate.resident
        self.regions = tuple(regions)
        self.trainable = any(region.trainable for region in regions)
        self.mutated: set[int] = set()
        self.stale: set[int] = set()
        self.detached: set[int] = set()
        self.resting: dict[int, nn.Parameter] = {}
        self._live: dict[int, nn.Parameter] | None = None
        self._stream = stream
        self._original: Callable[..., Any] | None = None

    # -- the module's parameters ------------------------------------------------------------------------------------------------------

    def install(self, parameters: dict[int, nn.Parameter]) -> None:
        """Hang Parameters (by the model's index) in the module."""
        for place in self.places:
            put_parameter(place.module, place.key, parameters[place.parameter])

    def live(self) -> dict[int, nn.Parameter]:
        """Return the Parameters that view this unit's weights on the device, made once."""
        if self._live is None:
            self._live = self._stream.make_live(self.regions)
        return self._live

    def forget_live(self) -> None:
        """The unit's place on the device has changed."""
        self._live = None

    # -- the module's forward ---------------------------------------------------------------------------------------------------------

    def route(self) -> None:
        """Send calls of the module through the stream. Its signature stays readable."""
        self._own = self.module.__dict__.get("forward")
        self._original = original = self.module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._stream.call(self, args, kwargs)

        self.module.forward = forward  # type: ignore[method-assign]

    def unroute(self) -> None:
        """Give the module its own forward back."""
        if self._original is None:
            return
        if self._own is None:
            del self.module.forward
        else:
            self.module.forward = self._own
        self._original = None

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], weights: dict[int, nn.Parameter]) -> Any:
        """Run the original forward with `weights` in place."""
        assert self._original is not None
        self.install(weights)
        try:
            return self._original(*args, **kwargs)
        finally:
            self.install(self.resting)


def put_parameter(module: nn.Module, key: str, parameter: nn.Parameter) -> None:
    """Set a parameter by the short way, or through the module's own `__setattr__` where it keeps references (the RNNs of torch do)."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[key] = parameter
    else:
        setattr(module, key, parameter)


class Arguments:
    """Positional and keyword arguments (or a result) as a tree, with each tensor listed once, however often it occurs."""

    def __init__(self, tree: Any) -> None:
        leaves, self._spec = tree_flatten(tree)
        self.tensors: list[torch.Tensor] = []
        seen: dict[int, int] = {}
        self._leaves: list[Any] = []
        self._is_tensor: list[bool] = []
        for leaf in leaves:
            is_tensor = isinstance(leaf, torch.Tensor)
            if is_tensor:
                index = seen.setdefault(id(leaf), len(self.tensors))
                if index == len(self.tensors):
                    self.tensors.append(leaf)
                leaf = index
            self._leaves.append(leaf)
            self._is_tensor.append(is_tensor)

    @property
    def spec(self) -> TreeSpec:
        return self._spec

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the tree with other tensors in the places of the listed ones."""
        leaves = [
            tensors[leaf] if is_tensor else leaf for leaf, is_tensor in zip(self._leaves, self._is_tensor, strict=True)
        ]
        return tree_unflatten(leaves, self._spec)


class Call:
    """One use of a unit in a forward pass that will have a backward."""

    def __init__(self, unit: Unit, stream: Stream, arguments: Arguments) -> None:
        self.unit, self._stream, self._arguments = unit, stream, arguments
        self._needs = [t.requires_grad for t in arguments.tensors]
        self._inputs: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._random = stream.device.random_state()
        self.result: Arguments | None = None
        self.dirty: list[torch.Tensor] = []
        self._is_open = False

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run without a graph; keep the inputs for the backward. Returns the result's tensors, then the inputs changed in place."""
        unit, stream = self.unit, self._stream
        copied = unit.mutated | unit.stale
        self._inputs = [t.clone() if i in copied else t.detach() for i, t in enumerate(tensors)]
        self._versions = [t._version for t in self._inputs]
        stream.hold(self._inputs)
        stream.enter(unit)
        self._is_open = True
        try:
            args, kwargs = self._arguments.fill(tensors)
            result = Arguments(unit.run(args, kwargs, unit.live()))
            result.tensors = [stream.own(t) for t in result.tensors]
        finally:
            stream.leave(unit)
        self.result = result
        self.dirty = [tensors[i] for i in sorted(unit.mutated) if tensors[i].is_floating_point()]
        return [*result.tensors, *(t for t in self.dirty if all(t is not other for other in result.tensors))]

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Fetch, recompute with a graph, and return the gradients of the inputs; the parameters' go to the stream."""
        unit, stream = self.unit, self._stream
        if not self._is_open:
            raise OffloadError(f"unit {unit.name}: backward ran twice over one forward (retain_graph=True); run the forward again.")
        for tensor, version in zip(self._inputs, self._versions, strict=True):
            if tensor._version != version:
                raise OffloadError(
                    f"unit {unit.name}: an input of shape {tuple(tensor.shape)} was changed in place, which did not happen in the recording "
                    f"pass; use an out-of-place operation there."
                )
        leaves = [t.detach().requires_grad_(need) for t, need in zip(self._inputs, self._needs, strict=True)]
        with torch.enable_grad():
            inputs = [leaf.clone() if i in unit.mutated else leaf for i, leaf in enumerate(leaves)]
        after = stream.device.random_state()
        stream.enter(unit)
        try:
            stream.device.set_random_state(self._random)
            args, kwargs = self._arguments.fill(inputs)
            with torch.enable_grad():
                result = Arguments(unit.run(args, kwargs, unit.live())).tensors
            dirty = [inputs[i] for i in sorted(unit.mutated) if inputs[i].is_floating_point()]
            result = [*result, *(t for t in dirty if all(t is not other for other in result))]
            pairs = [
                (out, gradient)
                for out, gradient in zip(result, gradients, strict=True)
                if gradient is not None and out.requires_grad
            ]
            stream.device.set_random_state(after)
            stream.gradients.open(unit.regions)
            torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
            stream.gradients.close(unit.regions)
        finally:
            stream.leave(unit)
            self.close()
        return [leaf.grad if need else None for leaf, need in zip(leaves, self._needs, strict=True)]

    def close(self) -> None:
        """Let the inputs go."""
        if self._is_open:
            self._is_open = False
            self._stream.let_go(self.unit, self._inputs)
            self._inputs = []

    def __del__(self) -> None:
        self.close()


class Border(torch.autograd.Function):
    """The border between the outer graph and a unit."""

    @staticmethod
    def forward(ctx: Any, call: Call, anchor: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = call.forward(tensors)
        if call.dirty:
            ctx.mark_dirty(*call.dirty)
        ctx.mark_non_differentiable(
            *(t for i, t in enumerate(outputs) if i in call.unit.detached or not t.is_floating_point())
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.call.backward(gradients)


def stream_call(unit: Unit, stream: Stream, arguments: Arguments) -> Any:
    """Run one differentiable use of a unit; the anchor makes its outputs require a gradient even where no input does."""
    call = Call(unit, stream, arguments)
    anchor = stream.anchor if unit.trainable else None
    outputs = Border.apply(call, anchor, *arguments.tensors)
    assert call.result is not None
    return call.result.fill(outputs)
