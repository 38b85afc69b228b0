"""Cases of tests/engine/test_shared_sequences.py, for rank jobs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.cases.features import BF16, Case
from tests.cases.models import TABLE_BYTES, gemma2, gpt2, llama, mamba, mixtral, qwen3, table, table_tokens, tokens

Batch = dict[str, Tensor]
LENGTH = 12
rows_of = partial(tokens, length=LENGTH)


def packed(seed: int, rows: int) -> Batch:
    """Rows with several documents: one begins inside each rank's part, and one crosses the border."""
    batch = rows_of(seed, rows)
    positions = torch.arange(LENGTH).repeat(rows, 1)
    positions[:, 5:] -= 5
    positions[1:, 9:] -= 4
    return {**batch, "position_ids": positions.to(batch["labels"].device)}


def padded(seed: int, rows: int) -> Batch:
    batch = rows_of(seed, rows)
    mask = torch.ones_like(batch["labels"])
    mask[0, -3:], mask[1, -7:] = 0, 0
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def mixed(seed: int, rows: int) -> Batch:
    """Alternate between plain, packed and padded rows."""
    return (rows_of, packed, padded)[seed % 3](seed, rows)


def answers(seed: int, rows: int) -> Batch:
    """Targets only at the end of rows: none on the first rank, some at the border."""
    batch = rows_of(seed, rows)
    batch["labels"][:, : LENGTH // 2] = -100
    return batch


def still_gpt2() -> nn.Module:
    return gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def with_router_loss() -> nn.Module:
    return mixtral(output_router_logits=True)


class Blurred(nn.Module):
    """Adds the previous token, halved, to each token before the block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.block(hidden + 0.5 * nn.functional.pad(hidden[:, :-1], (0, 0, 1, 0)), *args, **kwargs)


def blurred_gpt2() -> nn.Module:
    model: Any = still_gpt2()
    model.transformer.h[1] = Blurred(model.transformer.h[1])
    return model


MIXING = {"a router's loss": with_router_loss, "linear attention": mamba, "a shift of tokens": blurred_gpt2}
"""Models with operations across tokens that ranks cannot share."""
PACKED = Case(llama, batch=packed)
SHARED: dict[str, Case] = {
    "packed": PACKED,
    "masks that come and go, in micro-batches": Case(llama, {"micro_batch_size": 2}, batch=mixed),
    "answers alone": Case(mixtral, {"recompute": "never"}, batch=answers),
    "graphs where there is room": Case(qwen3, {"recompute": "auto"}, batch=rows_of),
    "positions in a table": Case(still_gpt2, batch=padded),
    "eager, soft-capped": Case(gemma2, batch=packed),
    "a row more or less": Case(llama, {"zero_stage": 0}, batch=partial(tokens, length=LENGTH + 1)),
    "tiles": Case(llama, {"sequence_tile": 2}, batch=rows_of),
    "chunks": replace(PACKED, settings={"head_chunk_bytes": 2000, "debug": 3}),
    "inputs on the host": Case(mixtral, placement={"activations": "cpu"}, batch=rows_of),
    "streamed experts": Case(mixtral, placement={"experts": "streamed"}, batch=rows_of),
    "blocks of rows": Case(
        table,
        {"head_chunk_bytes": TABLE_BYTES // 16},
        {"device_memory": TABLE_BYTES // 3},
        batch=partial(table_tokens, length=LENGTH),
    ),
    "bf16": Case(llama, BF16, batch=rows_of),
}
