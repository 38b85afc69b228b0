"""Count compute and memory for operations on `meta` tensors, one dispatch at a time, below autograd.

Values determined by shapes alone (positions, masks, lengths) are also computed on the CPU, because models branch on
them (`if mask.all()`). Values derived from weights or tokens are unknown: a boolean reads as False, and reading a
number raises `UnknownValueError`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from offload.engine.recording.watching import WatchingMode
from offload.extras.large.kept_products import ProductsForward, attention_inner
from offload.extras.large.sink_operation import SINK_ATTENTION
from offload.extras.plan.workload import NO_COST, Cost
from offload.extras.quant.weight_codes import PRODUCT, cast_bytes
from offload.fused_attention import PREFERS_CUDNN, Capability, bound_call, fitted, kernel_of

_MOST_KNOWN = 1 << 22
"""Size limit, in elements, for values computed on the CPU."""
_FRESH_BYTES = 32 << 20
"""Smallest result that the C library always maps by itself (glibc: the largest `M_MMAP_THRESHOLD`)."""
_aten = torch.ops.aten
_VALUE_READS = (_aten._local_scalar_dense.default,)
_COPIES = (_aten._to_copy.default,)
_EMPTY = frozenset((_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided))
_FREE_OPERATIONS = _EMPTY | {_aten._unsafe_view, _aten._reshape_alias}
"""Operations without compute, besides views: allocations, and views not marked as views."""
_GATHERS = frozenset((_aten.embedding, _aten.index, _aten.index_select, _aten.gather))
"""Operations reading only as many bytes as the result has, from a possibly larger table."""
_FP8_PRODUCTS = frozenset((_aten._scaled_mm, PRODUCT))
_ATTENTIONS = frozenset((SINK_ATTENTION, torch.ops.offload.sink_attention_backward))
_FILLS = frozenset((_aten.copy_, _aten.zero_, _aten.fill_))
"""Operations that write the first operand without reading it."""


def _histc(values: torch.Tensor, bins: int = 100, *_range: float, **_options: float) -> torch.Tensor:
    return values.new_empty(bins)


def _grouped_mm(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    groups = (len(offs),) if right.dim() == 2 else ()
    return left.new_empty(*groups, left.shape[0], right.shape[-1])


_STAND_INS: dict[Any, Any] = {_aten.histc: _histc, _aten._grouped_mm: _grouped_mm}
"""Replacements for operations without a `meta` kernel, or with one limited to bf16."""


class UnknownValueError(Exception):
    """The model reads a value not determined by shapes."""


class OpCounter(WatchingMode):
    """Counts operations on `meta` tensors and the memory they would use.

    cost: total work so far.
    live_bytes: bytes in live tensors created by operations. Tensors from outside, such as weights, are not counted.
    peak_bytes: maximum live_bytes since `begin`.
    """

    def __init__(self, *, fuses_dropout: bool = True, capability: Capability | None = None) -> None:
        """Create a counter. `fuses_dropout`: attention with dropout is one fused kernel too, as on GPUs.

        `capability`: as for `fused`.
        """
        super().__init__()
        self.capability = capability
        self._fuses_dropout = fuses_dropout
        self.live_bytes = 0
        self.peak_bytes = 0
        self.cost = NO_COST
        self.causal_share = 1.0
        """Computed share of causal attention."""
        self.products: ProductsForward | None = None
        """Forward with kept product outputs, if one runs: fused attention is a product too."""
        self._own: dict[int, int] = {}  # storage address -> bytes
        self._others: dict[int, Any] = {}  # from outside: a result over one of them, such as a view, is not new
        self._values: Any = WeakIdKeyDictionary()  # by identity: tensors have no other equality

    @contextmanager
    def watching(self) -> Iterator[OpCounter]:
        """Count operations in this context, with attention counted as the kernel that torch takes."""
        with self, _FusedAttention(self, self._fuses_dropout):
            yield self

    def begin(self) -> int:
        """Reset the peak. Returns the live bytes."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def storage_of(self, tensor: torch.Tensor) -> int:
        """Return an identifier for the tensor storage, unique among live storages."""
        return int(tensor.untyped_storage()._cdata)

    def is_own(self, storage: int) -> bool:
        """Return True if an operation under this counter created the storage."""
        return storage in self._own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        if func in _VALUE_READS and inputs[0].is_meta:  # `item()`, or a tensor in a condition
            value = self._values.get(inputs[0])
            if value is None and inputs[0].dtype == torch.bool:
                return False  # a question about tokens, such as "any padding?"
            return func(self._known_value(inputs[0]))
        # A copy to the host, for example of lengths.
        if func in _COPIES and inputs[0].is_meta and torch.device(kwargs.get("device") or "meta").type == "cpu":
            return func(self._known_value(inputs[0]), **kwargs)
        for tensor in inputs:
            key = self.storage_of(tensor)
            if key not in self._own and key not in self._others:
                self._remember(self._others, tensor, key, 0)
        stand_in = _STAND_INS.get(func.overloadpacket) if inputs and inputs[0].is_meta else None
        result: Any = (stand_in or func)(*args, **kwargs)
        outputs, fresh_bytes = [t for t in tree_iter(result) if isinstance(t, torch.Tensor)], 0
        for tensor in outputs:
            key = self.storage_of(tensor)
            # Neither a view nor a result in place.
            if tensor.is_meta and key not in self._own and key not in self._others:
                num_bytes = tensor.untyped_storage().nbytes()
                self._remember(self._own, tensor, key, num_bytes)
                self.live_bytes += num_bytes
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                if num_bytes >= _FRESH_BYTES:
                    fresh_bytes += num_bytes
        if fresh_bytes:
            self.cost += replace(NO_COST, fresh_bytes=fresh_bytes)
        if not func.is_view and func.overloadpacket not in _FREE_OPERATIONS and any(t.is_meta for t in outputs):
            read = [tensor for tensor in inputs if tensor is not kwargs.get("out")]
            if func.overloadpacket in _GATHERS:
                read = [*outputs, *inputs[1:]]
            elif func.overloadpacket in _FILLS:
                read = inputs[1:]
            written = outputs
            if func.overloadpacket is _aten.scatter_:  # a few elements of a table, in place
                read, written = inputs[1:], inputs[2:]
            num_bytes = sum(map(_touched_bytes, (*read, *written)))
            if func.overloadpacket is PRODUCT:  # reads codes, with half the bytes that the weight has
                num_bytes -= _touched_bytes(inputs[-1]) // 2
                self.cost += replace(NO_COST, once_bytes=cast_bytes(*args[2:]))
            self.cost += _cost(func, args, num_bytes, _flops(func, args, kwargs, result))
        self._compute_values(func, args, kwargs, inputs, outputs, result)
        return result

    def attend(self, compute: Callable[[], Any], key: torch.Tensor, share: float) -> Any:
        """Return the outputs of fused attention: computed, or kept ones. `share`: computed part of the scores."""
        if self.products is None:
            return compute()
        return self.products.tape.product(_Attention, compute, attention_inner(key, share))

    def _remember(self, storages: dict[int, Any], tensor: torch.Tensor, key: int, num_bytes: int) -> None:
        storages[key] = num_bytes

        def forget() -> None:
            self.live_bytes -= storages.pop(key)

        weakref.finalize(tensor.untyped_storage(), forget).atexit = False  # at the exit nothing is counted any more

    def _known_value(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self._values.get(tensor)
        if value is None:
            raise UnknownValueError(f"a value of a {tensor.dtype} tensor of shape {tuple(tensor.shape)}")
        return value

    def _compute_values(self, func: Any, args: Any, kwargs: Any, inputs: Any, outputs: Any, result: Any) -> None:
        is_known = all(not t.is_meta or t in self._values for t in inputs)
        is_small = all(t.numel() <= _MOST_KNOWN for t in (*outputs, *inputs))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_unwritten = func.overloadpacket in _EMPTY and any(t.is_floating_point() for t in outputs)  # unit results
        if not is_known or not is_small or is_random or is_unwritten:
            for tensor in outputs:
                self._values.pop(tensor, None)
            return
        if not any(t.is_meta for t in outputs):
            return
        args, kwargs = tree_map_only(torch.Tensor, lambda t: self._values.get(t, t), (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        values = func(*args, **kwargs)
        for tensor, value in zip(tree_iter(result), tree_iter(values), strict=True):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._values[tensor] = value


class _FusedAttention(TorchFunctionMode):
    """Replaces torch attention, because the `meta` version materializes the score matrix. That version stays where the
    device has no fused kernel either.
    """

    def __init__(self, counter: OpCounter, fuses_dropout: bool) -> None:
        super().__init__()
        self._counter = counter
        self._fuses_dropout = fuses_dropout

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            capability = self._counter.capability
            call = fitted(capability, bound_call(args, kwargs))
            kernel = kernel_of(capability, call)
            if kernel and (self._fuses_dropout or not call.get("dropout_p")):
                share = 1.0
                # A causal kernel skips the upper triangle, unless a mask is given.
                if call.get("is_causal", False) and call.get("attn_mask") is None:
                    share = self._counter.causal_share / 2
                is_slow = kernel == "efficient" and capability is not None and capability[0] in PREFERS_CUDNN
                return _Attention.apply(call["query"], call["key"], call["value"], self._counter, share, is_slow)
            return func(**call)
        return func(*args, **kwargs)


class _Attention(torch.autograd.Function):
    """FlashAttention (arXiv:2205.14135) over [batch, heads, tokens, size].

    Saves the inputs, the result and one number per score row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        counter: OpCounter,
        share: float,
        is_slow: bool,
    ) -> Any:
        batch, heads, tokens, _ = query.shape
        shapes = query.shape, (*key.shape[:1], heads, *key.shape[2:]), (*value.shape[:1], heads, *value.shape[2:])

        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            if value.shape[-1] == query.shape[-1]:
                result = torch.empty_like(query)  # kernels use the query layout
            else:
                result = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
            flops = share * sdpa_flop_count(*shapes)
            num_bytes = sum(map(_touched_bytes, (query, key, value, result)))
            counter.cost += Cost(flops, num_bytes, 1, attention_flops=flops, efficient_flops=is_slow * flops)
            return result, query.new_empty(batch, heads, tokens, dtype=torch.float32)

        result, sums = counter.attend(compute, key, share)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.counter = counter
        ctx.share = share
        ctx.is_slow = is_slow
        ctx.shapes = shapes
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, result, _ = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
        flops = ctx.share * sdpa_backward_flop_count(gradient.shape, *ctx.shapes)
        num_bytes = sum(map(_touched_bytes, (query, key, value, result, gradient, *gradients)))
        ctx.counter.cost += Cost(flops, num_bytes, 1, attention_flops=flops, efficient_flops=ctx.is_slow * flops)
        return (*gradients, None, None, None)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the FLOPs of a product, from the torch formulas plus a formula for grouped products."""
    if func.overloadpacket is _aten._grouped_mm:
        return 2.0 * args[0].numel() * args[1].shape[-1]  # [S, K] x [groups, K, N], or [M, S] x [S, N]
    formula = flop_registry.get(func.overloadpacket)
    return float(formula(*args, **kwargs, out_val=result)) if formula else 0.0


def _cost(func: Any, args: Any, num_bytes: int, flops: float) -> Cost:
    """Return the cost of an operation that reads and writes `num_bytes`."""
    if flops:
        fp8_flops = flops if func.overloadpacket in _FP8_PRODUCTS else 0.0
        attention_flops = flops if func.overloadpacket in _ATTENTIONS else 0.0
        return Cost(flops, num_bytes, 1, fp8_flops=fp8_flops, attention_flops=attention_flops)
    if func.overloadpacket is _aten.copy_ and _are_alike(*args[:2]):
        return Cost(0.0, 0.0, 1, copied_bytes=num_bytes)
    return Cost(0.0, 0.0, 1, moved_bytes=num_bytes)


def _are_alike(target: torch.Tensor, source: torch.Tensor) -> bool:
    """True if a copy moves one stretch of memory as it is."""
    is_same = (target.shape, target.dtype) == (source.shape, source.dtype)
    return is_same and target.is_contiguous() and source.is_contiguous()


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes touched when reading or writing a tensor. An expanded tensor counts only the storage size."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
