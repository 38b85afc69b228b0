"""Batches for causal, masked and encoder-decoder models."""

from __future__ import annotations

import pytest
import torch

from offload.app.training.objectives import IGNORED, choose_objective
from offload.errors import ConfigError


def batch(rows: int = 4, length: int = 1000) -> dict[str, torch.Tensor]:
    ids = torch.arange(rows * length).reshape(rows, length) % 90
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


class Tokens(list[int]):
    """The tokenizer attributes read by an objective: length and mask token."""

    def __init__(self, num_tokens: int, mask_token_id: int | None = None) -> None:
        super().__init__(range(num_tokens))
        self.mask_token_id = mask_token_id


def test_causal_batches_pass_as_they_are() -> None:
    objective = choose_objective("causal", tokenizer=Tokens(90), vocab_size=90, seed=0)
    given = batch()
    given["labels"][0, :10] = IGNORED
    assert objective.apply(given, 3) is given
    assert objective.count(given) == 4 * 999 - 9


def test_masked_batches_keep_mask_and_scramble_as_bert_does() -> None:
    objective = choose_objective("masked", tokenizer=Tokens(90), vocab_size=100, seed=0)
    given = batch()
    given["attention_mask"][:, 900:] = 0
    made = objective.apply(given, 0)
    chosen = made["labels"] != IGNORED
    assert not chosen[:, 900:].any()
    assert torch.equal(made["labels"][chosen], given["input_ids"][chosen])
    assert torch.equal(made["input_ids"][~chosen], given["input_ids"][~chosen])
    assert chosen[:, :900].float().mean() == pytest.approx(0.15, abs=0.02)
    masked = made["input_ids"][chosen] == 99  # 99 is an embedding row without a token
    kept = made["input_ids"][chosen] == given["input_ids"][chosen]
    assert masked.float().mean() == pytest.approx(0.8, abs=0.06)
    assert kept.float().mean() == pytest.approx(0.1, abs=0.05)
    assert objective.count(made) == chosen.sum()
    again, other = objective.apply(given, 0), objective.apply(given, 1)
    assert torch.equal(again["input_ids"], made["input_ids"])
    assert not torch.equal(other["labels"], made["labels"])


def test_what_is_masked_does_not_depend_on_the_number_of_ranks() -> None:
    objective = choose_objective("masked", tokenizer=Tokens(90), vocab_size=100, seed=0)
    whole = objective.apply(batch(5), 3)
    parts = []
    for rows in (slice(0, 2), slice(2, 3), slice(3, 5)):
        own = {key: value[rows] for key, value in batch(5).items()}
        parts.append(objective.apply(own, 3, rows.start, 5))
    for key, value in whole.items():
        assert torch.equal(torch.cat([part[key] for part in parts]), value)
    filler = {key: value[:1] for key, value in batch(5).items()}
    filler["labels"] = torch.full_like(filler["labels"], IGNORED)
    assert objective.count(objective.apply(filler, 3, 4, 5)) == 0, "a row of a rank that has none"


def test_a_masked_model_needs_a_mask() -> None:
    assert choose_objective("masked", tokenizer=Tokens(90, 4), vocab_size=90, seed=0)
    with pytest.raises(ConfigError, match="mask token"):
        choose_objective("masked", tokenizer=Tokens(90), vocab_size=90, seed=0)


def test_encoder_decoder_batches_are_cut_in_half() -> None:
    made = choose_objective("seq2seq", tokenizer=Tokens(90), vocab_size=90, seed=0).apply(batch(2, 10), 0)
    assert torch.equal(made["input_ids"][0], torch.arange(5))
    assert torch.equal(made["labels"][0], torch.arange(5, 10))
    assert made["attention_mask"].shape == (2, 5)
    assert all(value.is_contiguous() for value in made.values())
