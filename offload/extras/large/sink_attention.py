"""Fused attention for models with sinks, where transformers has only eager attention, which makes all scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offload.distributed.comm import Comm
from offload.engine.units.attention import Attention
from offload.errors import ConfigError
from offload.extras.large.document_attention import find_starts, mask_rules
from offload.extras.large.shared_attention import attention_configs
from offload.extras.large.sink_operation import SINK_ATTENTION
from offload.tiers.counters import Counters

IMPLEMENTATION = "offload_sinks"
"""Name of this attention in transformers."""
_IN_STARTS = {"causal_mask_function", "packed_sequence_mask_function", "sliding_window_overlay"}
"""Conditions of a mask that `starts` can say."""


class SinkAttention(Attention):
    """Replaces eager attention in a transformers model with sinks.

    By the model's own flags: it asks the interface, has no sdpa attention, and another implementation may make its
    masks (flex attention), so no code of the family reads them.
    """

    def __init__(self, model: nn.Module) -> None:
        own: Any = model
        has_flags = getattr(own, "_supports_attention_backend", False) and getattr(own, "_supports_flex_attn", False)
        has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
        self._configs = []
        if has_flags and has_sinks and not own._supports_sdpa:
            self._configs = attention_configs(model)
        # Fused weights are not in memory for a dropout.
        if any(each._attn_implementation != "eager" or _dropout(each) for each in self._configs):
            self._configs = []

    @classmethod
    def open(cls, model: nn.Module, size: int, comm: Comm, counters: Counters) -> Attention:  # noqa: ARG003
        return cls(model)

    def divert(self) -> None:
        if self._configs:
            register()
        for config in self._configs:
            config._attn_implementation = IMPLEMENTATION

    def undo(self) -> None:
        for config in self._configs:
            config._attn_implementation = "eager"


def _dropout(config: Any) -> float:
    return getattr(config, "attention_dropout", None) or 0.0


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers, also for models without an engine."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """Return the starts of documents (`find_starts`) for whole rows without padding, else the mask of sdpa."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    rules = dict(mask_rules(mask_function))
    is_causal = "causal_mask_function" in rules and not rules.keys() - _IN_STARTS
    if q_length == kv_length and is_causal and (attention_mask is None or bool(attention_mask.all())):
        documents = rules.get("packed_sequence_mask_function")
        if documents is None:
            documents = torch.zeros(batch_size, q_length, dtype=torch.int32, device="cpu")
        return find_starts(documents, rules.get("sliding_window_overlay"))
    own: Callable[..., torch.Tensor | None] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    options |= {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    options |= {"mask_function": mask_function, "attention_mask": attention_mask, "allow_is_causal_skip": False}
    return own(**options)


def _attend(
    module: nn.Module,  # noqa: ARG001
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    s_aux: torch.Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the sinks `s_aux`. Shapes as for `SINK_ATTENTION`. Raises ConfigError for a dropout."""
    if dropout:
        raise ConfigError(
            f"attention has a dropout of {dropout}, but fused attention with sinks has none: set --model.attention "
            "eager, or attention_dropout to 0 in the model's configuration."
        )
    return SINK_ATTENTION(query, key, value, s_aux, mask, scaling)[0], None
