"""Keep the outputs of matrix products and attention from a block's forward, and return them in its recomputation.

Norms, activations and other cheap operations are computed again (selective activation recomputation, arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_unflatten

from offload.engine.recording.watching import WatchingMode
from offload.engine.units.recompute_policy import PRODUCTS
from offload.engine.units.saved_inputs import KeptOutputs
from offload.engine.units.stages import Host, Stage
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, Use
from offload.errors import OffloadError
from offload.extras.large.document_operation import OPERATION
from offload.planning.settings import Settings

_NAMES = (
    *("mm", "addmm", "bmm", "baddbmm", "linear"),
    *("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"),
    *(
        f"_scaled_dot_product_{kind}"
        for kind in (
            "flash_attention",
            "flash_attention_for_cpu",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    ),
    *("_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward"),
)
_TENSOR = object()
# Versions of torch lack some of the names.
_OPERATIONS = frozenset(
    [OPERATION, *(getattr(torch.ops.aten, name) for name in _NAMES if hasattr(torch.ops.aten, name))]
)


class _Call(NamedTuple):
    """One product in a forward: operation, result structure, and results other than tensors (`_TENSOR` for tensors)."""

    operation: Any
    structure: TreeSpec
    others: Sequence[Any]


class _Recorder:
    """Collects the outputs of products in call order. An output changed in place later is copied before the change."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.outputs: list[torch.Tensor] = []
        self._places: dict[int, list[int]] = {}

    def product(self, operation: Any, compute: Callable[[], Any]) -> Any:
        """Compute a product and keep the outputs."""
        result = compute()
        leaves, structure = tree_flatten(result)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                # By storage: a write may go through a view.
                self._places.setdefault(leaf.untyped_storage()._cdata, []).append(len(self.outputs))
                self.outputs.append(leaf.detach())
        others = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.calls.append(_Call(operation, structure, others))
        return result

    def before_write(self, tensor: torch.Tensor) -> None:
        """Copy the outputs in this tensor's memory, because an operation is about to change it."""
        for place in self._places.pop(tensor.untyped_storage()._cdata, ()):
            self.outputs[place] = self.outputs[place].clone()


class _Replay:
    """Returns recorded outputs in call order."""

    def __init__(self, unit: str, calls: Sequence[_Call], outputs: KeptOutputs) -> None:
        self._unit = unit
        self._calls = iter(calls)
        self._outputs = outputs

    def product(self, operation: Any, compute: Callable[[], Any]) -> Any:
        """Return the recorded outputs of this product; compute it if no outputs were kept.

        Raises OffloadError after another product than recorded.
        """
        call = next(self._calls, None)
        if call is None or call.operation is not operation:
            raise OffloadError(
                f"unit {self._unit} made other products in the recomputation ({operation}) than in the forward "
                f"({call and call.operation}), so kept outputs cannot be used. Set --train.recompute always."
            )
        leaves: list[Any] = []
        for other in call.others:
            if other is not _TENSOR:
                leaves.append(other)
            elif (output := self._outputs.next_replayed()) is None:
                return compute()
            else:
                leaves.append(output.detach())  # autograd marks the returned object
        return tree_unflatten(leaves, call.structure)

    def before_write(self, tensor: torch.Tensor) -> None:
        """Do nothing: each output is returned once."""


class _ProductMode(WatchingMode):
    """Passes products to a recorder or a replay."""

    def __init__(self, tape: _Recorder | _Replay) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_product, written, draws = _kind(func)
        for place in written:  # before the operation: afterwards the kept values would be lost
            for tensor in tree_iter(_argument(place, args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self._tape.before_write(tensor)
        if is_product and not any(_argument(place, args, kwargs) for place in draws):
            return self._tape.product(func, partial(func, *args, **kwargs))
        return func(*args, **kwargs)


class _Place(NamedTuple):
    """An argument of an operation."""

    number: int
    name: str


@cache
def _kind(func: Any) -> tuple[bool, Sequence[_Place], Sequence[_Place]]:
    """Return whether an operation is a product, the arguments that it changes, and the probability of dropout.

    Attention with dropout is computed again, because later operations need the same random state. Cached, because torch
    builds a schema at each read.
    """
    places = [(_Place(number, each.name), each) for number, each in enumerate(func._schema.arguments)]
    written = [place for place, each in places if each.alias_info is not None and each.alias_info.is_write]
    draws = [place for place, _ in places if place.name == "dropout_p"]
    # A product into given memory (out=) makes no output to keep.
    return func.overloadpacket in _OPERATIONS and not written, written, draws


def _argument(place: _Place, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return args[place.number] if place.number < len(args) else kwargs.get(place.name)


class ProductsForward:
    """The forward of one block use. Calls keep the outputs of products in `outputs`."""

    def __init__(self, forward: Forward, unit: str, outputs: KeptOutputs) -> None:
        self._forward = forward
        self._unit = unit
        self._outputs = outputs
        self._calls: Sequence[_Call] = ()  # of the last forward
        self.tape: _Recorder | _Replay = _Recorder()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.tape = recorder = _Recorder()
        with _ProductMode(recorder):
            result = self._forward(*args, **kwargs)
        self._calls = recorder.calls
        self.tape = _Recorder()  # no reference to the outputs: `KeptOutputs` decides how long they stay
        for output in recorder.outputs:
            self._outputs.record(output, copies=False)
        return result

    def for_recomputation(self, forward: Forward) -> Forward:
        """Return `forward` with the outputs kept by the last call."""
        self.tape = replay = _Replay(self._unit, self._calls, self._outputs)

        def run(*args: Any, **kwargs: Any) -> Any:
            with _ProductMode(replay):
                return forward(*args, **kwargs)

        return run

    @property
    def original(self) -> Forward:
        """The forward without kept outputs."""
        return self._forward


class KeptProducts(Stage):
    """Keeps the outputs of products in the blocks that recompute. Only with `train.recompute products`.

    The innermost stage: a compiled or tiled forward replaces the module's own forward and keeps nothing.
    """

    def __init__(self, inner: Stage, outputs: KeptOutputs) -> None:
        super().__init__(inner)
        self._outputs = outputs

    @classmethod
    def over(cls, inner: Stage, host: Host, settings: Settings) -> Stage:
        if settings.recompute != PRODUCTS:
            return inner
        return cls(inner, host.runner.outputs)

    def forward_of(self, unit: Unit, use: Use) -> Forward:
        forward = self.inner.forward_of(unit, use)
        if self.is_paused or not use.keeps_products or not unit.is_block:
            return forward
        return ProductsForward(forward, unit.name, self._outputs)

    def for_recomputation(self, forward: Forward) -> Forward:
        if not isinstance(forward, ProductsForward):
            return self.inner.for_recomputation(forward)
        return forward.for_recomputation(self.inner.for_recomputation(forward.original))
