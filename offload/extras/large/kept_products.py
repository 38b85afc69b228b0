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
from offload.engine.units.use import Forward, Product, Use
from offload.errors import OffloadError
from offload.extras.large.document_operation import OPERATION
from offload.extras.large.sink_operation import SINK_ATTENTION, computed_share
from offload.extras.quant.weight_codes import PRODUCT
from offload.machine.hardware import ATTENTION_SHARE
from offload.planning.settings import Settings

_MATRIX_PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
)
_NAMES = (
    *_MATRIX_PRODUCTS,
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
_SUMS = frozenset((torch.ops.aten.add, torch.ops.aten._unsafe_view))
"""Operations, beside views, whose gradient reads no values."""
# Versions of torch lack some of the names.
_OPERATIONS = frozenset(
    [OPERATION, SINK_ATTENTION, PRODUCT]
    + [getattr(torch.ops.aten, name) for name in _NAMES if hasattr(torch.ops.aten, name)]
)


class _Call(NamedTuple):
    """One product in a forward: operation, result structure, and results other than tensors (`_TENSOR` for tensors)."""

    operation: Any
    structure: TreeSpec
    others: Sequence[Any]
    is_kept: bool = True


class Recorder:
    """Collects the product outputs in call order. An output changed in place later is copied before the change.

    The output of a last matrix product, with sums and views alone behind it, is read by no gradient: a number in its
    shape stands for it. torch's checkpoints end before this product too (`early_stop`).
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.products: list[Product] = []
        self._is_last_read = True  # False since a matrix product with sums and views alone behind it
        self._places: dict[int, list[tuple[list[torch.Tensor], int]]] = {}

    def product(self, operation: Any, compute: Callable[[], Any], inner: float) -> Any:
        """Compute a product and keep the outputs. `inner`: multiplications for an element of the first one."""
        result = compute()
        leaves, structure = tree_flatten(result)
        outputs: list[torch.Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                # By storage: a write may go through a view.
                self._places.setdefault(leaf.untyped_storage()._cdata, []).append((outputs, len(outputs)))
                outputs.append(leaf.detach())
        others = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.calls.append(_Call(operation, structure, others))
        self.products.append(Product(outputs, inner * outputs[0].numel()))
        name = getattr(getattr(operation, "overloadpacket", None), "__name__", "")
        # Without a graph, the product is in an autograd function of its own, whose backward may read the output.
        self._is_last_read = name not in _MATRIX_PRODUCTS or not torch.is_grad_enabled()
        return result

    def other(self, is_sum: bool) -> None:
        """Note an operation that is no product. `is_sum`: its gradient reads no values."""
        self._is_last_read |= not is_sum or not torch.is_grad_enabled()

    def finish(self) -> list[Product]:
        """Return all products."""
        if not self._is_last_read:
            last = self.products[-1]
            last.outputs = [t.new_zeros(()).expand(t.shape) for t in last.outputs]
        return self.products

    def before_write(self, tensor: torch.Tensor) -> None:
        """Copy the outputs in this tensor's memory, because an operation is about to change it."""
        for outputs, place in self._places.pop(tensor.untyped_storage()._cdata, ()):
            outputs[place] = outputs[place].clone()


class _Replay:
    """Returns recorded outputs in call order."""

    def __init__(self, unit: str, calls: Sequence[_Call], outputs: KeptOutputs) -> None:
        self._unit = unit
        self._calls = iter(calls)
        self._outputs = outputs

    def product(self, operation: Any, compute: Callable[[], Any], _inner: float) -> Any:
        """Return the recorded outputs of this product; compute it if they were not kept.

        Raises OffloadError after another product than recorded.
        """
        call = next(self._calls, None)
        if call is None or call.operation is not operation:
            raise OffloadError(
                f"unit {self._unit} made other products in the recomputation ({operation}) than in the forward "
                f"({call and call.operation}), so kept outputs cannot be used. Set --train.recompute always."
            )
        if not call.is_kept:
            return compute()
        leaves = list(call.others)
        for place, other in enumerate(leaves):
            if other is _TENSOR:
                output = self._outputs.next_replayed()
                assert output is not None
                leaves[place] = output.detach()  # autograd marks the returned object
        return tree_unflatten(leaves, call.structure)

    def other(self, is_sum: bool) -> None:
        """Do nothing: the forward has told."""

    def before_write(self, tensor: torch.Tensor) -> None:
        """Do nothing: each output is returned once."""


class _ProductMode(WatchingMode):
    """Passes products to a recorder or a replay."""

    def __init__(self, tape: Recorder | _Replay) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_product, is_sum, written, draws, causal = _kind(func)
        for place in written:  # before the operation: afterwards the kept values would be lost
            for tensor in tree_iter(_argument(place, args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self._tape.before_write(tensor)
        if is_product and not any(_argument(place, args, kwargs) for place in draws):
            is_causal = func.overloadpacket is OPERATION or any(_argument(place, args, kwargs) for place in causal)
            return self._tape.product(func, partial(func, *args, **kwargs), _inner(func, args, is_causal))
        self._tape.other(is_sum)
        return func(*args, **kwargs)


class _Place(NamedTuple):
    """An argument of an operation."""

    number: int
    name: str


class _Kind(NamedTuple):
    """An operation: a product, or a sum or view, and the places for written tensors, dropout and the causal flag."""

    is_product: bool
    is_sum: bool
    written: Sequence[_Place]
    draws: Sequence[_Place]
    causal: Sequence[_Place]


@cache
def _kind(func: Any) -> _Kind:
    """Return the kind of an operation.

    Attention with dropout is computed again, because later operations need the same random state. Cached, because torch
    builds a schema at each read.
    """
    places = [(_Place(number, each.name), each) for number, each in enumerate(func._schema.arguments)]
    written = [place for place, each in places if each.alias_info is not None and each.alias_info.is_write]
    draws, causal = ([place for place, _ in places if place.name == name] for name in ("dropout_p", "is_causal"))
    # A product into given memory (out=) makes no output to keep.
    is_product = func.overloadpacket in _OPERATIONS and not written
    is_sum = (func.is_view or func.overloadpacket in _SUMS) and not written
    return _Kind(is_product, is_sum, written, draws, causal)


def _argument(place: _Place, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return args[place.number] if place.number < len(args) else kwargs.get(place.name)


def _inner(func: Any, args: Sequence[Any], is_causal: bool) -> float:
    """Return the multiplications for one element in the first output, each at the rate of bf16 products."""
    name = func.overloadpacket.__name__
    if func.overloadpacket is SINK_ATTENTION:
        return attention_inner(args[1], computed_share(args[0], args[1], args[4]))
    if "attention" in name:
        return attention_inner(args[1], 0.5 if is_causal else 1.0)
    has_sum = name in ("addmm", "baddbmm")
    inner = args[int(has_sum)].shape[-1]
    return inner / 2 if "_scaled" in name or func.overloadpacket is PRODUCT else float(inner)  # FP8


def attention_inner(key: torch.Tensor, share: float) -> float:
    """Return attention's multiplications for one element in the result. `share`: computed part of the scores."""
    num_tokens = max(key.shape[1:-1])  # more than heads: their axes have either order
    return 2 * share * num_tokens / ATTENTION_SHARE


class ProductsForward:
    """The forward of one block use. Calls keep the product outputs in `outputs`, as `keep` decides."""

    def __init__(
        self,
        forward: Forward,
        unit: str,
        outputs: KeptOutputs,
        keep: Callable[[Sequence[Product]], None],
        recorder: Callable[[], Recorder] = Recorder,
    ) -> None:
        self._forward = forward
        self._unit = unit
        self._outputs = outputs
        self._keep = keep
        self._recorder = recorder
        self._calls: Sequence[_Call] = ()  # of the last forward
        self.tape: Recorder | _Replay = recorder()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.tape = recorder = self._recorder()
        with _ProductMode(recorder):
            result = self._forward(*args, **kwargs)
        self.tape = self._recorder()  # no reference to the outputs: `KeptOutputs` decides how long they stay
        products = recorder.finish()
        self._keep(products)
        pairs = zip(recorder.calls, products, strict=True)
        self._calls = [call._replace(is_kept=bool(product.outputs)) for call, product in pairs]
        for product in products:
            for output in product.outputs:
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
    """Keeps the product outputs in the blocks that recompute. Only with `train.recompute products`.

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
        if self.is_paused or use.keep_products is None or not unit.is_block:
            return forward
        return ProductsForward(forward, unit.name, self._outputs, use.keep_products)

    def for_recomputation(self, forward: Forward) -> Forward:
        if not isinstance(forward, ProductsForward):
            return self.inner.for_recomputation(forward)
        return forward.for_recomputation(self.inner.for_recomputation(forward.original))
