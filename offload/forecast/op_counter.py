"""What operations on `meta` tensors would cost, and hold: seen one by one, below autograd.

Numbers that follow from shapes alone (positions, masks, lengths) are computed beside, on the CPU, since models ask for
them (`if mask.all()`). What follows from weights or tokens is not known: to a question the answer is no, and whoever
asks for a number is refused.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from offload.engine.recording.watching import WatchingMode
from offload.forecast.workload import NO_COST, Cost

_MOST_KNOWN = 1 << 22
"""Elements of what is computed beside."""
_aten = torch.ops.aten
_ITEMS = (_aten._local_scalar_dense.default,)
_COPIES = (_aten._to_copy.default,)
_EMPTY = frozenset((_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided))
_NOTHING = _EMPTY | {_aten._unsafe_view, _aten._reshape_alias}
"""What computes nothing, beside views: what only makes memory, and what is a view under another name."""
_GATHERS = frozenset((_aten.embedding, _aten.index, _aten.index_select, _aten.gather))
"""What reads as much as it makes, of a table that may be larger."""


def _histc(values: torch.Tensor, bins: int = 100, *_range: float, **_options: float) -> torch.Tensor:
    return values.new_empty(bins)


def _grouped_mm(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    groups = (len(offs),) if right.dim() == 2 else ()
    return left.new_empty(*groups, left.shape[0], right.shape[-1])


_STAND_INS: dict[Any, Any] = {_aten.histc: _histc, _aten._grouped_mm: _grouped_mm}
"""What computes shapes that torch does not know on `meta`, or of bf16 alone."""


class UnknownValueError(Exception):
    """A model asks for a value that does not follow from shapes."""


class OpCounter(WatchingMode):
    """Counts operations of `meta` tensors, and the memory that they would have.

    live_bytes: of all tensors that operations have made and somebody still holds. peak_bytes: the most of these since
    `begin`. What was made outside, such as weights, is not counted. cost: all work so far.
    """

    def __init__(self, *, fuses_dropout: bool = True) -> None:
        """`fuses_dropout`: attention with dropout runs in one kernel too, as on GPUs."""
        super().__init__()
        self._fuses_dropout = fuses_dropout
        self.live_bytes = self.peak_bytes = 0
        self.cost = NO_COST
        self._own: dict[int, int] = {}  # bytes of storages by address of what torch keeps of them
        self._others: dict[int, Any] = {}
        self._values: Any = WeakIdKeyDictionary()

    @contextmanager
    def watching(self) -> Iterator[OpCounter]:
        """Within, operations are counted, attention as a fused kernel does it."""
        with ExitStack() as stack:
            stack.enter_context(self)
            stack.enter_context(_FusedAttention(self, self._fuses_dropout))
            yield self

    def exchange(self, num_bytes: float) -> None:
        """So many bytes are sent to ranks that share sequences."""
        self.cost += replace(NO_COST, exchanged_bytes=num_bytes)

    def begin(self) -> int:
        """Begin to look for a peak; return what is held now, in bytes."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def count(self, flops: float, num_bytes: float) -> None:
        """Add a kernel that no operation stands for."""
        self.cost += Cost(flops, num_bytes, 1) if flops else Cost(0.0, 0.0, 1, num_bytes)

    def storage_of(self, tensor: torch.Tensor) -> int:
        """Return what tells a tensor's memory from that of others that live."""
        return int(tensor.untyped_storage()._cdata)

    def is_own(self, storage: int) -> bool:
        """True for a storage that an operation has made."""
        return storage in self._own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        if func in _ITEMS and given[0].is_meta:
            value = self._values.get(given[0])
            if value is None and given[0].dtype == torch.bool:
                return False  # a question about tokens: whether any is padding, out of range, ...
            return func(self._known(given[0]))
        if func in _COPIES and given[0].is_meta and torch.device(kwargs.get("device") or "meta").type == "cpu":
            return func(self._known(given[0]), **kwargs)
        for tensor in given:
            key = self.storage_of(tensor)
            if key not in self._own and key not in self._others:
                self._remember(self._others, tensor, key, 0)
        stand_in = _STAND_INS.get(func.overloadpacket) if given and given[0].is_meta else None
        result: Any = (stand_in or func)(*args, **kwargs)
        made = [t for t in tree_iter(result) if isinstance(t, torch.Tensor)]
        for tensor in made:
            key = self.storage_of(tensor)
            if tensor.is_meta and key not in self._own and key not in self._others:
                num_bytes = tensor.untyped_storage().nbytes()
                self._remember(self._own, tensor, key, num_bytes)
                self.live_bytes += num_bytes
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if not func.is_view and func.overloadpacket not in _NOTHING and any(t.is_meta for t in made):
            if func.overloadpacket in _GATHERS:
                given = [*made, *given[1:]]
            num_bytes = sum(map(_touched_bytes, given)) + sum(map(_touched_bytes, made))
            self.count(_flops(func, args, kwargs, result), num_bytes)
        self._compute_beside(func, args, kwargs, given, made, result)
        return result

    def _remember(self, among: dict[int, Any], tensor: torch.Tensor, key: int, num_bytes: int) -> None:
        among[key] = num_bytes

        def forget() -> None:
            self.live_bytes -= among.pop(key)

        weakref.finalize(tensor.untyped_storage(), forget).atexit = False

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self._values.get(tensor)
        if value is None:
            raise UnknownValueError(f"a value of a {tensor.dtype} tensor of shape {tuple(tensor.shape)}")
        return value

    def _compute_beside(self, func: Any, args: Any, kwargs: Any, given: Any, made: Any, result: Any) -> None:
        is_known = all(not t.is_meta or t in self._values for t in given)
        is_small = all(t.numel() <= _MOST_KNOWN for t in (*made, *given))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_open = func.overloadpacket in _EMPTY and any(t.is_floating_point() for t in made)  # results of units
        if not is_known or not is_small or is_random or is_open:
            for tensor in made:
                self._values.pop(tensor, None)
            return
        if not any(t.is_meta for t in made):
            return
        args, kwargs = tree_map_only(torch.Tensor, lambda t: self._values.get(t, t), (args, kwargs))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        values = func(*args, **kwargs)
        for tensor, value in zip(tree_iter(result), tree_iter(values), strict=True):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._values[tensor] = value


class _FusedAttention(TorchFunctionMode):
    """Puts an attention that makes no matrix of scores in the place of torch's, which on `meta` makes one."""

    def __init__(self, counter: OpCounter, fuses_dropout: bool) -> None:
        super().__init__()
        self._counter, self._fuses_dropout = counter, fuses_dropout

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            given = _signature.bind_partial(*args, **kwargs).arguments
            if self._fuses_dropout or not given.get("dropout_p"):
                # Kernels skip what is above the diagonal; with a mask they do not know.
                is_half = given.get("is_causal", False) and given.get("attn_mask") is None
                tensors = given["query"], given["key"], given["value"]
                return _Attention.apply(*tensors, self._counter, 0.5 if is_half else 1.0)
        return func(*args, **kwargs)


def _attend(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, **options: Any) -> None:
    """Name the arguments of torch's function, which tells no signature."""


_signature = inspect.signature(_attend)


class _Attention(torch.autograd.Function):
    """Attention [batch, heads, tokens, size] that saves its inputs, its result and a number for each row of scores
    (arXiv:2205.14135).
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, counter: OpCounter, share: float
    ) -> Any:
        batch, heads, tokens, _ = query.shape
        if value.shape[-1] == query.shape[-1]:
            result = torch.empty_like(query)  # kernels lay it out as the query is
        else:
            result = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.counter, ctx.share = counter, share
        shapes = query.shape, (*key.shape[:1], heads, *key.shape[2:]), (*value.shape[:1], heads, *value.shape[2:])
        ctx.shapes = shapes
        counter.count(share * sdpa_flop_count(*shapes), sum(map(_touched_bytes, (query, key, value, result))))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, result, _ = ctx.saved_tensors
        found = [torch.empty_like(tensor) for tensor in (query, key, value)]
        flops = ctx.share * sdpa_backward_flop_count(gradient.shape, *ctx.shapes)
        ctx.counter.count(flops, sum(map(_touched_bytes, (query, key, value, result, gradient, *found))))
        return (*found, None, None)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the floating point operations of products: by torch's formulas, which lack that of groups of rows."""
    if func.overloadpacket is _aten._grouped_mm:
        return 2.0 * args[0].numel() * args[1].shape[-1]  # [S, K] x [groups, K, N], or [M, S] x [S, N]
    formula = flop_registry.get(func.overloadpacket)
    return float(formula(*args, **kwargs, out_val=result)) if formula else 0.0


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of memory that reading or writing a tensor touches: an expanded one's own."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
