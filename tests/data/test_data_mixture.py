"""Weighted sources: rows per epoch and source in any order, on any number of ranks; eval sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.extras.data.dataset import Dataset
from offload.extras.data.mixture import quotas
from offload.extras.data.source_rows import names_of
from offload.extras.data.sources import Source
from tests.data.asked import source_of
from tests.matrix import examples

SIZES = {"large": 50, "small": 7, "middle": 20}
Build = Callable[..., Dataset]


@pytest.fixture
def mix(tmp_path: Path, dataset_of: Build, write_lines: Callable[..., Path]) -> Build:
    """Return a function: build a weighted dataset over three sources. Each row names source and row number."""
    for name, size in SIZES.items():
        write_lines(f"{name}.jsonl", *({"text": f"{name} {i}"} for i in range(size)))

    def mix(*weights: float | None, **changes: Any) -> Dataset:
        pairs = zip(SIZES, weights or (None,) * 3, strict=False)
        sources = [source_of(str(tmp_path / f"{name}.jsonl"), weight=weight) for name, weight in pairs]
        return dataset_of(*sources, **{"seed": 3, **changes})

    return mix


def texts(dataset: Dataset, ids: torch.Tensor) -> list[str]:
    return [dataset.tokenizer.decode(row).split("<|")[0] for row in ids]


def epochs_of(dataset: Dataset, num_epochs: int) -> list[list[str]]:
    """Return the rows in the first epochs, as texts."""
    num_rows = dataset.num_train_rows
    rows = [
        text
        for step in range(dataset.num_steps(num_epochs))
        for text in texts(dataset, dataset.batch(step)["input_ids"])
    ]
    return [rows[num_rows * epoch : num_rows * (epoch + 1)] for epoch in range(num_epochs)]


def by_source(rows: list[str]) -> Counter[str]:
    return Counter(row.split()[0] for row in rows)


def test_by_weight_until_all_are_used_up(mix: Build) -> None:
    dataset = mix(0.5, 0.25, 0.25)
    for rows in epochs_of(dataset, 2):
        assert by_source(rows) == {"large": 50, "small": 25, "middle": 25}
        times = Counter(rows)
        assert {times[f"large {i}"] for i in range(50)} == {1}
        assert {times[f"small {i}"] for i in range(7)} == {3, 4}, "each as often as the others, but for one"
        assert {times[f"middle {i}"] for i in range(20)} == {1, 2}
    assert dataset.sources[1].more(dataset.quotas[1], dataset.num_train_rows) == [
        "25% of the rows of an epoch, 3.57 times its own rows"
    ]


def test_by_weight_until_one_is_used_up_and_each_epoch_drawn_anew(mix: Build) -> None:
    dataset = mix(2, 1, 1, stopping_strategy="first_exhausted")
    epochs = epochs_of(dataset, 4)
    for rows in epochs:
        assert by_source(rows) == {"large": 14, "small": 7, "middle": 7}
        assert len(set(rows)) == 28, "none comes twice"
    large = [{row for row in rows if row.startswith("large")} for rows in epochs]
    assert len(large[0] | large[1] | large[2]) == 42, "50 rows are enough for three epochs of other ones"
    assert len(large[2] | large[3]) < 28, "then all are mixed anew"


@pytest.mark.parametrize(
    ("strategy", "cut"),
    [
        ("all_exhausted", {}),
        ("first_exhausted", {"packing": True}),
        ("first_exhausted", {"group_by_length": True}),
        pytest.param("all_exhausted", {"packing": True, "isolated": True}, marks=pytest.mark.slow),
    ],
)
def test_any_step_is_the_same_alone_and_over_any_ranks(mix: Build, strategy: str, cut: dict[str, bool]) -> None:
    dataset, again = (mix(0.6, 0.1, 0.3, stopping_strategy=strategy, **cut) for _ in range(2))
    steps = {step: dataset.batch(step) for step in (*range(40), 123_456_789)}
    for step in (0, 7, 39, 123_456_789):  # like a run resumed at this step
        assert all(torch.equal(again.batch(step)[key], steps[step][key]) for key in steps[step])
        for world_size in (1, 2, 3, 4, 5, 6):
            parts = [again.batch(step, rank, world_size) for rank in range(world_size)]
            assert all(set(part) == set(steps[step]) for part in parts)
            assert all(torch.equal(torch.cat([part[key] for part in parts]), steps[step][key]) for key in steps[step])
            assert {len(part["labels"]) for part in parts} <= {6 // world_size, -(-6 // world_size)}
    with pytest.raises(ConfigError, match=r"train\.batch_size is 6, but there are 7 ranks.*--train\.batch_size to 7"):
        dataset.batch(0, 0, 7)
    again.check_state(dataset.state_dict())
    other = mix(0.6, 0.1, 0.3, stopping_strategy=strategy, seed=4, **cut)
    assert any(not torch.equal(other.batch(step)["input_ids"], steps[step]["input_ids"]) for step in range(3))
    with pytest.raises(ConfigError, match="weights of sources"):
        mix(0.5, 0.2, 0.3, stopping_strategy=strategy, **cut).check_state(dataset.state_dict())


@examples(100)
@given(
    st.lists(st.tuples(st.integers(1, 10**7), st.floats(0.01, 100)), min_size=1, max_size=5),
)
def test_quotas_follow_weights_and_what_there_is(parts: list[tuple[int, float]]) -> None:
    rows, weights = [size for size, _ in parts], [weight for _, weight in parts]
    whole = sum(weights)
    upsampled, cut = (quotas(rows, weights, each) for each in ("all_exhausted", "first_exhausted"))
    assert all(quota >= size for quota, size in zip(upsampled, rows, strict=True))
    assert any(quota <= size + 1 for quota, size in zip(upsampled, rows, strict=True))
    assert all(quota <= max(size, 1) for quota, size in zip(cut, rows, strict=True))
    for found in (upsampled, cut):
        total = sum(found)
        assert all(
            abs(quota - total * weight / whole) <= len(parts) + 1 for quota, weight in zip(found, weights, strict=True)
        )
    assert quotas(rows, [None] * len(rows), "all_exhausted") == rows


def test_a_source_of_which_nothing_is_trained_on_is_refused(mix: Build, write_lines: Callable[..., Path]) -> None:
    good = write_lines("good.jsonl", {"text": "one two three"})
    chats = write_lines("users.jsonl", {"messages": [{"role": "user", "content": "Hi"}]})
    sources = [source_of(str(path), setting="data.sources") for path in (good, chats)]
    with pytest.raises(ConfigError, match=r"data\.sources=.*users\.jsonl'\] has \d+ tokens but none to train on"):
        mix(sources=sources)
    with pytest.raises(ConfigError, match=r"data\.eval_source=.*users\.jsonl"):
        mix(eval_sources=[source_of(str(chats), setting="data.eval_source")])


def test_eval_sources_have_names_and_are_apart_from_training(mix: Build, write_lines: Callable[..., Path]) -> None:
    names = ("news.jsonl", "code.jsonl")
    paths = [write_lines(name, *({"text": f"{name} {i}"} for i in range(9))) for name in names]
    dataset = mix(eval_sources=[source_of(str(path)) for path in paths], eval_share=0.2)
    assert list(dataset.evals) == ["", "news", "code"]
    assert dataset.num_eval_rows == dataset.eval.num_rows + 18
    assert [each.contents.split(": ")[1] for each in dataset.eval_sources] == [
        f"9 documents, {num:,} tokens" for num in (116, 116)
    ]
    seen = [text for batch in dataset.eval_batches(4, name="code") for text in texts(dataset, batch["input_ids"])]
    assert sorted(seen) == [f"code.jsonl {i}" for i in range(9)]
    held_out = [t for batch in dataset.eval_batches(4) for t in texts(dataset, batch["input_ids"])]
    assert by_source(held_out).keys() <= set(SIZES)
    assert not set(held_out) & {text for rows in epochs_of(dataset, 1) for text in rows}


@pytest.mark.parametrize("other", ["large.jsonl", "sub/../large.jsonl", "link.jsonl", "hard.jsonl"])
def test_a_file_that_is_trained_on_is_not_evaluated_on_by_another_name(mix: Build, tmp_path: Path, other: str) -> None:
    """Break: compare unresolved paths. A held-out file part must not be trained under another name."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "large.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to(tmp_path / "large.jsonl")
    with pytest.raises(ConfigError, match=r"large\.jsonl.*, which data\.source .* trains on.*--data\.eval_share"):
        mix(eval_sources=[source_of(str(tmp_path / other))])
    twice = [source_of(str(tmp_path / name)) for name in ("large.jsonl", other)]
    assert len(mix(sources=twice, eval_share=0).sources) == 2
    if "/" in other or other == "large.jsonl":
        assert mix(sources=twice, eval_share=0.5).num_eval_rows, "the same rows are held out"
    else:
        with pytest.raises(
            ConfigError,
            match=r"held out for evaluation in one entry \(data.eval_share=0.5\) would be trained on in the other",
        ):
            mix(sources=twice, eval_share=0.5)


def test_names_tell_sources_apart() -> None:
    sources = [
        *(Source((path,)) for path in ("a/x.jsonl.gz", "b/x.csv", "team/set", "builtin:stdlib", "y.txt", "y.txt")),
        Source(("team/other",), split="test"),
        *(Source((glob,)) for glob in ("notes/*.txt", "logs/**/*.txt", "part-*.txt", "*.md")),
    ]
    expected = ["a/x.jsonl.gz", "b/x.csv", "set", "builtin:stdlib", "y.txt", "y.txt#2", "other[test]"]
    expected += ["notes", "logs", "part-*", "*.md"]
    assert names_of(sources) == expected


def test_packed_parts_keep_their_rows(mix: Build) -> None:
    """A row in a packed mixture has tokens from one source."""
    dataset = mix(1, 1, 1, packing=True)
    for step in range(5):
        for text in (dataset.tokenizer.decode(row) for row in dataset.batch(step)["input_ids"]):
            assert len({name for name in SIZES if name in text}) == 1
    lengths = dataset.train.lengths(np.arange(3))
    assert lengths.tolist() == [16, 16, 16]
