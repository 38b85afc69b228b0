"""The page with published speeds beside our plans."""

from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks import published
from offload.extras.plan.machine_files import read_machine
from offload.machine.hardware import Rates


def bound(shape: Mapping[str, Any], row_tokens: int, rates: Rates, matmul: str) -> float:
    """Return tokens a second if products and causal attention alone took time, each once."""
    hidden, layers, inner = (shape[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    heads, shared = shape["num_attention_heads"], shape["num_key_value_heads"]
    width = heads * shape.get("head_dim", hidden // heads)
    block = hidden * (2 * width + 2 * width * shared // heads + 3 * inner)
    head_s = 6 * hidden * shape["vocab_size"] / rates.flops("bf16")
    attention_s = 7 * layers * width * row_tokens / rates.attention("bf16")  # half of the scores; 2 and 5 products
    return 1 / (6 * layers * block / rates.fp8_flops(matmul, "bf16") + head_s + attention_s)


def compared(row: published.Published) -> bool:
    """True if a row trains all of a dense model at a known speed, with products summed in fp32."""
    is_dense = "num_experts" not in published.SHAPES[row.model] and row.adapter is None
    return is_dense and row.theirs[0] != "–" and "fp16 sums" not in row.exact


@pytest.mark.parametrize("row", [*filter(compared, published.ROWS)], ids=lambda row: row.title)
def test_no_described_card_is_slower_than_somebody_measured(row: published.Published) -> None:
    """Break: describe the 5060 Ti by 0.8 of its sheet. llmq measured more end to end than its products would allow."""
    rates = read_machine(row.gpu).rates
    for theirs, matmul in zip(row.theirs, ("precision", "fp8_tensorwise"), strict=True):
        if theirs != "–":
            measured = max(float(each.replace(",", "")) for each in theirs.split(" to "))
            assert row.num_ranks * bound(published.SHAPES[row.model], row.row_tokens, rates, matmul) > measured, matmul
