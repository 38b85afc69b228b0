"""Attention within each document of packed rows, instead of a mask over whole rows.

Positions that restart mark documents, as in transformers. In place of a mask [rows, 1, tokens, tokens], layers get
`starts`, int32 [rows, tokens] on the host: the attention window at the first token of each document, else 0.
Micro-batches and recomputation cut and keep `starts` like any other input, and no layer waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from offload.distributed.comm import Comm
from offload.engine.units.attention import Attention
from offload.errors import warn
from offload.extras.large.document_operation import OPERATION, Documents, by_loop, has_kernel
from offload.extras.large.shared_attention import attention_configs
from offload.tiers.counters import Counters

IMPLEMENTATION = "offload_documents"
"""Name of this attention in transformers."""


class DocumentAttention(Attention):
    """Replaces sdpa attention in a transformers model. Rows with one document run as before."""

    def __init__(self, model: nn.Module) -> None:
        flags = [
            module._supports_attention_backend
            for module in model.modules()
            if hasattr(type(module), "_supports_attention_backend")
        ]
        self._own = [(config, config._attn_implementation) for config in attention_configs(model)]
        # Without the flag, a family's attention does not ask the interface.
        if not all(flags) or all(own != "sdpa" for _, own in self._own):
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

    rules = list(mask_rules(mask_function))
    found = dict(rules)
    documents, window = found.get("packed_sequence_mask_function"), found.get("sliding_window_overlay")
    if documents is not None and attention_mask is None:
        others = {name for name, _ in rules} - {"packed_sequence_mask_function", "sliding_window_overlay"}
        if others == {"causal_mask_function"}:
            return find_starts(documents, window)
        _warn_of_mask(", ".join(sorted(others - {"causal_mask_function"})))
    own = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    return own(mask_function=mask_function, attention_mask=attention_mask, **options)


def mask_rules(mask_function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each condition in a transformers mask function."""
    code: Any = getattr(mask_function, "__code__", None)
    cells = getattr(mask_function, "__closure__", None) or ()
    values = dict(zip(code.co_freevars, [cell.cell_contents for cell in cells], strict=True)) if code else {}
    is_known = getattr(mask_function, "__module__", "") == "transformers.masking_utils"
    name = mask_function.__qualname__.partition(".")[0] if is_known else "a mask of the model"
    if name == "and_masks":
        for each in values["mask_functions"]:
            yield from mask_rules(each)
    elif name == "remap_positions_for_packed_sequence":  # within a document, positions differ as places do
        yield from mask_rules(values["mask_function"])
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
    has_starts = isinstance(mask, torch.Tensor) and mask.dtype == torch.int32  # masks are bool or floating point
    has_bias = options.get("position_bias") is not None
    is_traced = torch.compiler.is_compiling()
    is_plain = not dropout and not has_bias and options.get("softcap") is None
    if has_starts and is_plain and (is_traced or has_kernel(query, value)):
        return OPERATION(query, key, value, mask, scaling)[0], None
    if has_starts and is_traced:  # the stage of compiled blocks then leaves these uncompiled
        raise NotImplementedError(
            "attention within documents, with dropout, a bias or capped scores, needs a mask over whole rows in a "
            "compiled block"
        )
    options |= {"dropout": dropout, "scaling": scaling}
    if has_starts and not has_bias:
        return by_loop(query, key, value, Documents.of(mask), **options), None
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if has_starts:  # a bias has the shape of whole rows
        mask = _as_mask(mask, query.device)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)
