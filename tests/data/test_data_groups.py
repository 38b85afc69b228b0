"""Batches by length: each row once per epoch, any batch alone, little padding, few widths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.extras.data.dataset import Dataset
from offload.extras.data.mixture import LengthBatching, MixedBatching
from offload.extras.data.packing import Rows
from tests.data.asked import source_of
from tests.data.test_data_packing import PAD, stored
from tests.matrix import examples

Build = Callable[..., Dataset]


def padding(
    lengths: np.ndarray, batches: list[np.ndarray], batching: LengthBatching | MixedBatching, length: int
) -> float:
    """Return the padding share in the batches."""
    wide = sum(len(rows) * batching.width(lengths[rows], length) for rows in batches)
    return 1 - sum(lengths[rows].sum() for rows in batches) / wide


@examples(60)
@given(st.lists(st.integers(2, 20), min_size=1, max_size=90), st.integers(1, 9), st.integers(0, 99))
def test_an_epoch_has_each_row_once(sizes: list[int], batch_size: int, seed: int) -> None:
    with stored([[True] * size for size in sizes], masked=False) as store:
        rows = Rows.over(store, 16, False, PAD)
        steps = range(-(-3 * len(sizes) // batch_size))
        batches = [LengthBatching().at(rows, step, batch_size, seed) for step in steps]
        lengths = rows.lengths(np.arange(len(sizes)))
    assert all(len(batch) == batch_size for batch in batches)
    found = np.concatenate(batches)
    for epoch in range(3):
        assert sorted(found[len(sizes) * epoch :][: len(sizes)]) == list(range(len(sizes)))
    for batch in batches:
        longest = lengths[batch].max()
        assert longest <= LengthBatching().width(lengths[batch], 16) <= min(longest + 8, 16)


@pytest.mark.slow
def test_batches_have_little_padding_and_come_in_another_order_each_epoch() -> None:
    draw = np.random.default_rng(0)
    sizes = np.minimum(draw.lognormal(5, 1, 2400).astype(int) + 2, 4000)
    with stored([[True] * size for size in sizes], masked=False) as store:
        rows = Rows.over(store, 2048, False, PAD)
        lengths = rows.lengths(np.arange(rows.num_rows))
        batches = {
            each: [each.at(rows, step, 8, 1) for step in range(600)] for each in (LengthBatching(), MixedBatching())
        }
        other = LengthBatching().at(rows, 0, 8, 2)
    shares = {each: padding(lengths, found, each, 2048) for each, found in batches.items()}
    assert shares[LengthBatching()] < 0.16
    assert shares[MixedBatching()] > 0.85
    found = batches[LengthBatching()]
    assert len({LengthBatching().width(lengths[rows], 2048) for rows in found}) <= 32
    assert sorted(map(sorted, found[:300])) != sorted(map(sorted, found[300:])), "each epoch has other batches"
    order = [lengths[rows].max() for rows in found[:50]]
    assert order != sorted(order, reverse=True), "long ones first would be a schedule"
    assert sorted(other) != sorted(found[0])


@pytest.fixture
def build(dataset_of: Build, write_lines: Callable[..., Path]) -> Build:
    """Return a function: build a dataset over two weighted sources with documents in many lengths."""
    paths = [
        write_lines(f"{name}.jsonl", *({"text": f"{name} " * (7 * i % 41)} for i in range(1, 60))) for name in "ab"
    ]
    sources = [source_of(str(path), weight=weight) for path, weight in zip(paths, (2.0, 1.0), strict=True)]
    return partial(dataset_of, *sources, sequence_length=64, group_by_length=True, eval_share=0.2)


def test_batches_have_widths_of_their_own_and_count_their_tokens(build: Build) -> None:
    """tests/data/test_data_mixture.py has the shares of ranks."""
    dataset = build()
    assert dataset.layout_description.endswith("those of a batch of about one length")
    widths = set()
    for step in (29, 0, 1, 7, 28):
        whole = dataset.batch(step)
        mask = whole.get("attention_mask", torch.ones_like(whole["labels"]))
        assert int(mask.sum()) == dataset.num_tokens(step)
        assert whole["input_ids"].is_contiguous()
        assert bool((whole["labels"][mask == 0] == -100).all())
        widths.add(whole["input_ids"].shape[1])
    assert len(widths) > 1
    assert len({batch["labels"].shape[1] for batch in dataset.eval_batches(3)}) > 1


def test_a_run_goes_on_with_batches_as_they_were(build: Build) -> None:
    dataset = build()
    build().check_state(dataset.state_dict())
    mixed = build(group_by_length=False)
    with pytest.raises(ConfigError, match=r"data\.group_by_length is False and was True when the run began"):
        mixed.check_state(dataset.state_dict())
    with pytest.raises(ConfigError, match=r"data\.group_by_length is True and was False"):
        dataset.check_state(mixed.state_dict())
    assert "group_by_length" not in build(packing=True).state_dict(), "as earlier versions have it"
    shape = mixed.batch(0)["labels"].shape
    assert shape == (6, 64)
