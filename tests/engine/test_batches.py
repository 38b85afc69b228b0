"""From a batch to a loss: micro-batches, ignored labels, target counts and refused batches."""

from __future__ import annotations

import pydoc
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import AdamW, Engine, Lion, Settings
from offload.errors import ConfigError, OffloadError
from tests.cases.models import batches, bert, build, gemma2, gpt2, llama, mamba, t5, tokens
from tests.engine.compare import assert_same, train_both, weights
from tests.engine.device import own_device
from tests.engine.handmade import WORDS, Stack, cross_entropy, words
from tests.engine.reference import Batch, count_labels, count_shifted

Maker = Callable[[], nn.Module]
ROUNDING = 1e-6


@pytest.mark.parametrize(
    ("make", "rows"),
    [(llama, None), pytest.param(llama, 1, marks=pytest.mark.slow), pytest.param(mamba, 2, marks=pytest.mark.slow)],
)
def test_rows_without_targets(make: Maker, rows: int | None) -> None:
    """A micro-batch without targets contributes nothing, although a mean over no target is 0/0."""
    batch, within = tokens(1), 2 * ROUNDING if rows else None
    batch["labels"][1:] = -100
    engine, _ = train_both(build(make), [tokens(0), batch, tokens(2)], micro_batch_size=rows, within=within)
    assert all(torch.isfinite(value).all() for value in weights(engine).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "count"), [(llama, count_shifted), (gemma2, count_shifted), (bert, count_labels), (t5, count_labels)]
)
def test_tokens_are_the_targets_that_the_loss_counts(make: Maker, count: Callable[[Batch], int]) -> None:
    batch = tokens(3)
    assert count_shifted(batch) != count_labels(batch)
    for rows in (None, 1):
        engine = Engine(build(make), micro_batch_size=rows)
        assert engine.step(batch).tokens == count(batch)


def test_evaluation_runs_in_micro_batches_too() -> None:
    engine, reference = train_both(build(llama), batches(1), micro_batch_size=3, within=2 * ROUNDING)
    with torch.no_grad():
        wanted = reference.model.eval()(**tokens(5)).loss.item()
    assert engine.evaluate(tokens(5)).item() == pytest.approx(wanted, rel=ROUNDING)


def test_a_loss_function_may_use_what_the_model_does_not_take() -> None:
    def weighted(outputs: Any, batch: Batch) -> Tensor:
        losses = nn.functional.cross_entropy(outputs.logits.transpose(1, 2), batch["labels"], reduction="none")
        return (losses * batch["row_weights"]).mean()

    engine = Engine(build(llama))
    result = engine.step(tokens() | {"row_weights": torch.rand(4, 10, device=own_device())}, weighted)
    assert (result.loss.dtype, result.loss.dim(), result.loss.device.type) == (torch.float32, 0, "cpu")
    assert result.loss.isfinite()
    assert not result.loss.requires_grad
    assert type(result.grad_norm) is float
    assert result.skipped is False


def test_batches_may_change_their_shape() -> None:
    """A schedule recorded on one batch serves every other shape."""
    train_both(build(gemma2), [tokens(0, 4, 10), tokens(1, 1, 16), tokens(2, 7, 3), tokens(3, 4, 20)])


# -- refused --------------------------------------------------------------------------------------------------------


def test_a_batch_whose_labels_are_all_ignored_is_refused() -> None:
    engine = Engine(build(llama))
    batch = tokens()
    batch["labels"][:, 1:] = -100
    batch["labels"][:, 0] = 5  # the first label of a row is never predicted
    before = weights(engine)
    with pytest.raises(ConfigError, match="target"):
        engine.step(batch)
    assert_same(weights(engine), before)
    engine.step(tokens())


@pytest.mark.parametrize(
    ("make", "batch", "said"),
    [
        (llama, {"input_idz": "input_ids", "labels": "labels"}, "input_idz.*input_ids"),
        (gpt2, {"input_ids": "input_ids", "labels": "labels", "attention_maks": "labels"}, "maks.*attention_mask"),
        (llama, {"input_ids": "input_ids"}, "labels"),
        (Stack, {"x": "input_ids"}, "labels"),
        (Stack, {"xx": "input_ids"}, r"'xx'.*did you mean x\?"),
    ],
)
def test_a_missing_or_misspelt_key_is_refused_with_the_nearest_name(
    make: Maker, batch: dict[str, str], said: str
) -> None:
    """A model with `**kwargs` would ignore the key silently, yet the engine refuses the key."""
    engine = Engine(build(make))
    with pytest.raises(ConfigError, match=said):
        engine.step({key: tokens()[name] % WORDS for key, name in batch.items()})
    if make is llama:
        engine.step(tokens())


BAD: list[Any] = [
    [1, 2],
    {},
    {"input_ids": [[1, 2, 3]], "labels": torch.ones(1, 3, dtype=torch.long)},
    {"input_ids": torch.ones(0, 3, dtype=torch.long), "labels": torch.ones(0, 3, dtype=torch.long)},
    {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.ones(3, 3, dtype=torch.long)},
    {"input_ids": torch.tensor(1), "labels": torch.tensor(1)},
]


def test_a_batch_of_another_form_is_refused() -> None:
    engine = Engine(build(llama))
    for batch in BAD:
        for use in (engine.step, engine.evaluate):
            with pytest.raises(ConfigError, match="batch"):
                use(batch)  # type: ignore[operator]
    engine.step(tokens())


def test_a_loss_that_is_no_number_is_refused() -> None:
    engine = Engine(build(Stack))
    with pytest.raises(OffloadError, match="loss"):
        engine.step(words(), loss_fn=lambda outputs, batch: outputs)
    engine.step(words(), loss_fn=cross_entropy)


SETTINGS: list[tuple[str, Any]] = [
    ("precision", "fp64"),
    ("clip", "sometimes"),
    ("on_nonfinite", "ignore"),
    ("micro_batch_size", 0),
    ("recompute", "perhaps"),
    ("zero_stage", 4),
    ("prefetch", -1),
    ("throttle", {"nowhere": 1}),
    ("head_chunk_bytes", "many"),
    ("seed", "x"),
    ("debug", "x"),
    ("optimizer", "lion"),
    ("placement", "cpu"),
    ("max_grad_norm", -1.0),
    ("max_grad_norm", float("nan")),
    ("max_grad_norm", "1"),
    ("micro_batch_size", 2.5),
]


@pytest.mark.parametrize(("key", "value"), SETTINGS)
def test_a_setting_that_is_not_allowed_is_refused_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        Engine(build(Stack), **{key: value})


def test_settings_are_the_same_object_as_keywords() -> None:
    """Keywords may override single fields of `settings`."""
    settings = Settings(max_grad_norm=None, optimizer=Lion(), precision="bf16")
    assert (settings.clip, settings.resolved_clip) == ("auto", "deferred")
    clips = replace(settings, optimizer=AdamW(), max_grad_norm=1.0)
    assert clips.resolved_clip == "auto"
    assert Engine(build(Stack), settings=settings, max_grad_norm=1.0, optimizer=AdamW()).clip == "auto"
    with pytest.raises(ConfigError, match="settings="):
        Engine(build(Stack), settings)  # type: ignore[arg-type]


def test_help_says_what_each_setting_is() -> None:
    shown = pydoc.plain(pydoc.render_doc(Engine.__init__))
    for field in fields(Settings):
        assert f"{field.name}: " in shown.partition("\n")[2], field.name
