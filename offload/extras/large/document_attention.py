"""Attention within each document of packed rows, instead of a mask over whole rows.

Positions that restart mark documents, as in transformers. In place of a mask [rows, 1, tokens, tokens], layers get
`starts`, int32 [rows, tokens] on the host: the attention window at the first token of each document, else 0.
Micro-batches and recomputation cut and keep `starts` like any other input, and no layer waits for the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import nn

from offload.accelerators import runs_gpu_kernels
from offload.distributed.comm import Comm
from offload.engine.units.attention import Attention
from offload.errors import warn
from offload.extras.large.shared_attention import attention_configs
from offload.tiers.counters import Counters

IMPLEMENTATION = "offload_documents"
"""Name of this attention in transformers."""
_MOST_BATCHES = 64
"""Micro-batches with remembered documents."""
_MOST_WIDTH = 256
"""Largest head of the GPU kernels, in elements."""


class DocumentAttention(Attention):
    """Replaces sdpa attention in a transformers model. Rows with one document run as before."""

    def __init__(self, model: nn.Module) -> None:
        flags = [
            module._supports_attention_backend
            for module in model.modules()
            if hasattr(type(module), "_supports_attention_backend")
        ]
        self._own = [(config, config._attn_implementation) for config in attention_configs(model)] if all(flags) else []
        if all(own != "sdpa" for _, own in self._own):
            self._own = []

    @classmethod
    def open(cls, model: nn.Module, size: int, comm: Comm, counters: Counters) -> Attention:  # noqa: ARG003
        return cls(model)

    def divert(self) -> None:
        register()
        for config, own in self._own:  # a configuration passes the name on to the ones inside, which come later
            config._attn_implementation = IMPLEMENTATION if own == "sdpa" else own

    def undo(self) -> None:
        for config, own in self._own:
            config._attn_implementation = own


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers, also for models without an engine."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask)


# -- masks ---------------------------------------------------------------------------------------------------


def _mask(mask_function: Callable[..., Any], attention_mask: torch.Tensor | None = None, **options: Any) -> Any:
    """Return the document starts for packed rows, else the mask of sdpa."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    rules = list(_rules(mask_function))
    found = dict(rules)
    documents, window = found.get("packed_sequence_mask_function"), found.get("sliding_window_overlay")
    if documents is not None and attention_mask is None:
        others = {name for name, _ in rules} - {"packed_sequence_mask_function", "sliding_window_overlay"}
        if others == {"causal_mask_function"}:
            return find_starts(documents, window)
        _warn_of_mask(", ".join(sorted(others - {"causal_mask_function"})))
    own = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    return own(mask_function=mask_function, attention_mask=attention_mask, **options)


def _rules(mask_function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each condition in a transformers mask function."""
    code: Any = getattr(mask_function, "__code__", None)
    cells = getattr(mask_function, "__closure__", None) or ()
    values = dict(zip(code.co_freevars, [cell.cell_contents for cell in cells], strict=True)) if code else {}
    is_known = getattr(mask_function, "__module__", "") == "transformers.masking_utils"
    name = mask_function.__qualname__.partition(".")[0] if is_known else "a mask of the model"
    if name == "and_masks":
        for each in values["mask_functions"]:
            yield from _rules(each)
    elif name == "remap_positions_for_packed_sequence":  # within a document, positions differ as places do
        yield from _rules(values["mask_function"])
    else:
        yield name, values.get("packed_sequence_mask", values.get("sliding_window"))


def find_starts(documents: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return `starts` for document numbers, integers [rows, tokens]. None: no window.

    Waits for the numbers, once in a model call. So does transformers' own search for documents.
    """
    documents = documents.cpu()
    starts = torch.ones(documents.shape, dtype=torch.int32, device="cpu")
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    tokens = documents.shape[1]
    return starts * min(window or tokens, tokens)


@cache
def _warn_of_mask(reason: str) -> None:
    warn(f"packed documents are computed with a mask over whole rows, because the model's mask has {reason}.")


def _as_mask(starts: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the mask for `starts`, bool [rows, 1, tokens, tokens]."""
    documents = (starts != 0).cumsum(1).to(device)
    places = torch.arange(starts.shape[1], device=device)
    distance, window = places[:, None] - places, starts[:, :1, None].to(device)
    is_same = documents[:, :, None] == documents[:, None]
    return (is_same & (distance >= 0) & (distance < window))[:, None]


# -- attention -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Documents:
    """Documents in the rows of a micro-batch, joined to one sequence.

    borders: start of each document, then the number of tokens.
    window: attention window in tokens.
    tokens: tokens in a row.
    """

    borders: list[int]
    window: int
    tokens: int
    _copies: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [end - begin for begin, end in zip(self.borders, self.borders[1:], strict=False)]

    def borders_on(self, device: torch.device) -> torch.Tensor:
        """Return the borders, int32 [documents + 1]. The copy runs in stream order."""
        if device not in self._copies:
            with torch.inference_mode(False):  # a backward may save this tensor
                borders = torch.tensor(self.borders, dtype=torch.int32, device="cpu")
                self._copies[device] = borders.pin_memory().to(device, non_blocking=True)
        return self._copies[device]


@lru_cache(_MOST_BATCHES)
def _read(starts: bytes, tokens: int) -> _Documents:
    values = torch.frombuffer(bytearray(starts), dtype=torch.int32)
    return _Documents([*values.nonzero().flatten().tolist(), len(values)], int(values[0]), tokens)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, Any]:
    """Compute attention for each document, or by sdpa without `starts`.

    Query, key and value are [rows, heads, tokens, width], the result is [rows, tokens, heads, width].
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    has_starts = isinstance(mask, torch.Tensor) and mask.dtype == torch.int32
    if not has_starts or torch.compiler.is_compiling() or options.get("position_bias") is not None:
        mask = _as_mask(mask, query.device) if has_starts else mask
        return own(module, query, key, value, mask, dropout=dropout, scaling=scaling, **options)
    documents = _read(mask.numpy().tobytes(), mask.shape[1])
    kernel = None if dropout or options.get("softcap") is not None else _kernel_for(query, value)
    if kernel is not None:
        return _by_kernel(kernel, query, key, value, documents, scaling), None

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        length, band = query.shape[2], None
        if length > documents.window:
            band = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - documents.window)
        more = {**options, "is_causal": True}
        result, _ = own(module, query, key, value, band, dropout=dropout, scaling=scaling, **more)
        return result

    return by_loop(attend, query, key, value, documents), None


def by_loop(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: _Documents,
) -> torch.Tensor:
    """Compute one document after the other."""
    results = []
    for begin, length in zip(documents.borders, documents.lengths, strict=False):
        row, first = divmod(begin, documents.tokens)
        parts = [tensor[row : row + 1, :, first : first + length] for tensor in (query, key, value)]
        results.append(attend(*parts))  # [1, length, heads, width]
    joined = torch.cat(results, 1)
    return joined.view(query.shape[0], documents.tokens, *joined.shape[2:])


def _by_kernel(
    kernel: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: _Documents,
    scaling: float | None,
) -> torch.Tensor:
    """Compute all documents in one launch."""
    borders, longest = documents.borders_on(query.device), max(documents.lengths)
    window = documents.window - 1 if documents.window < longest else -1
    joined = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]  # [all tokens, heads, width]
    result = kernel(*joined, borders, longest, scaling, window)
    return result.view(query.shape[0], documents.tokens, *result.shape[1:])


def _kernel_for(query: torch.Tensor, value: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """Return the kernel for many documents on this device. None: there is none for these tensors."""
    width = query.shape[-1]
    is_fit = query.dtype in (torch.bfloat16, torch.float16) and width == value.shape[-1] and not width % 8
    return _kernel() if runs_gpu_kernels(query.device.type) and is_fit and width <= _MOST_WIDTH else None


@cache
def _kernel() -> Callable[..., Any] | None:
    """Return a function of (query, key, value, borders, longest, scaling, window to the left): torch's own, else of
    flash-attn. None: neither is installed.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn

        if {"window_size", "enable_gqa", "scale"} <= set(inspect.signature(varlen_attn).parameters):
            return lambda q, k, v, borders, longest, scaling, window: varlen_attn(
                q, k, v, borders, borders, longest, longest,
                scale=scaling, window_size=(window, 0), enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
    except ImportError:
        pass
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return lambda q, k, v, borders, longest, scaling, window: flash_attn_varlen_func(
        q, k, v, borders, borders, longest, longest, softmax_scale=scaling, causal=True, window_size=(window, 0)
    )
