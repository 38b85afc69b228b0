"""Several passes in a step are gradient accumulation: bit for bit, or within rounding for tied weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from offload import Engine, MeZO, Placement
from offload.engine.loss.label_trials import find_other_weights, find_row_weights
from offload.engine.loss.loss import LossRule
from offload.engine.units.activation_offload import CHECKPOINTS
from offload.errors import ConfigError
from tests.cases.models import bert, build, gpt2, llama, t5, tokens
from tests.engine.compare import PROPORTIONAL, assert_same, assert_weights, weights
from tests.engine.device import set_seed
from tests.engine.inside import parts_of, updating_device
from tests.engine.reference import Reference, count_labels, count_shifted
from tests.matrix import quick

ROWS = 4
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, float | None]] = {
    "llama": (llama, count_shifted, None),
    "dropout": (partial(llama, attention_dropout=0.2), count_shifted, None),
    "gpt2": (gpt2, count_shifted, 1e-6),
    "bert": (bert, count_labels, 1e-6),
    "t5": (t5, count_labels, 1e-6),
}
"""Models by name, with the count of targets and the tolerance: a tied weight sums the gradients of a pass first."""


@pytest.mark.parametrize("model", quick(MODELS, ["dropout", "bert", "t5"]))
def test_two_passes_are_gradient_accumulation(model: str) -> None:
    """In memory: a contract of the case "passes" has the same bits on other tiers."""
    make, count, within = MODELS[model]
    told: dict[str, Any] = {"max_grad_norm": 0.5} if within is None else {"optimizer": PROPORTIONAL}
    reference = Reference(build(make), micro_batch_size=ROWS // 2, **told)
    with Engine(build(make), passes=2, **told) as engine:
        reference.update_on(updating_device(engine))
        for seed in range(2):
            set_seed(seed)
            loss, norm = reference.step(tokens(seed, ROWS), None, count)
            set_seed(seed)
            result = engine.step(tokens(seed, ROWS))
            near = partial(pytest.approx, rel=within or 0.0, abs=0.0)
            assert (float(result.loss), result.grad_norm) == (near(float(loss)), near(norm))
            assert_weights(engine, reference, within, f"after step {seed}")


class Mixed(nn.Module):
    """Two layers, with `normed` a batch norm between them, which mixes rows."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16) if normed else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


def contrast(outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a loss over all pairs of rows."""
    return functional.cross_entropy(outputs @ batch["x"][:, :4].T, torch.arange(len(outputs), device=outputs.device))


def mean(outputs: torch.Tensor, _batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a mean over rows."""
    return outputs.square().mean()


@pytest.mark.parametrize(("normed", "loss_fn"), [(True, mean), (False, contrast)])
def test_rows_that_are_mixed_stay_in_one_pass(normed: bool, loss_fn: Callable[..., torch.Tensor]) -> None:
    """Break: leave passes out of the check of cut rows."""
    found = []
    for passes in (1, 3):
        torch.manual_seed(0)
        with Engine(Mixed(normed), optimizer=PROPORTIONAL, passes=passes) as engine:
            batch = {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(1))}
            with pytest.warns(UserWarning, match="batches are not split") if passes > 1 else nullcontext():
                results = [float(engine.step(batch, loss_fn=loss_fn).loss) for _ in range(2)]
            found.append((results, weights(engine)))
    assert found[1][0] == found[0][0]
    assert_same(found[1][1], found[0][1])


Losses = Mapping[str, tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]]


def over_tokens(outputs: torch.Tensor, labels: torch.Tensor, **told: Any) -> torch.Tensor:
    return functional.cross_entropy(outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **told)


def over_rows_of_means(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a mean over the rows with a target."""
    rows = [functional.cross_entropy(o[:-1], t[1:]) for o, t in zip(outputs, labels, strict=True) if (t[1:] >= 0).any()]
    return torch.stack(rows).mean()


def masked(outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a mean over a mask beside the labels."""
    each = over_tokens(outputs, batch["labels"], reduction="none").view(len(outputs), -1)
    return (each * batch["mask"][:, 1:]).sum() / batch["mask"][:, 1:].sum()


TOKENS = torch.randint(8, (2, 6), generator=torch.Generator().manual_seed(1))
CLASSES = torch.tensor([1, 1])
MASK = (torch.arange(12) % 3 > 0).view(2, 6)
WEIGHTS = torch.tensor([0.1, 1, 1, 0.1, 1, 0.1, 1, 5.0])
OTHER: Losses = {
    "class weights": (lambda o, b: over_tokens(o, b["labels"], weight=WEIGHTS), {"labels": TOKENS}),
    "class weights over rows": (
        lambda o, b: functional.cross_entropy(o[:, 0], b["labels"], weight=WEIGHTS),
        {"labels": CLASSES},
    ),
    "mean over rows": (lambda o, b: over_rows_of_means(o, b["labels"]), {"labels": TOKENS}),
    "sum": (lambda o, b: over_tokens(o, b["labels"], reduction="sum"), {"labels": TOKENS}),
}
"""Losses that are no mean over targets, with a batch. Rows have equal numbers of targets."""
MEANS: Losses = {
    "tokens": (lambda o, b: over_tokens(o, b["labels"]), {"labels": TOKENS}),
    "label smoothing": (lambda o, b: over_tokens(o, b["labels"], label_smoothing=0.1), {"labels": TOKENS}),
    "and all logits": (lambda o, b: over_tokens(o, b["labels"]) + o.square().mean(), {"labels": TOKENS}),
    "classes": (lambda o, b: functional.cross_entropy(o[:, 0], b["labels"]), {"labels": CLASSES}),
    "bf16": (lambda o, b: over_tokens(o, b["labels"]).bfloat16(), {"labels": TOKENS}),
    "a mask": (masked, {"labels": TOKENS, "mask": MASK}),
    "shifted labels": (lambda o, b: over_tokens(o, b["shift_labels"]), {"labels": TOKENS, "shift_labels": TOKENS}),
    "classes as integers": (
        lambda o, b: functional.binary_cross_entropy_with_logits(o[:, 0, :6], (b["labels"] > 3).float()),
        {"labels": TOKENS},
    ),
    "regression": (lambda o, b: functional.mse_loss(o[:, 0, :6], b["labels"] * 1.0), {"labels": TOKENS}),
    "one-hot": (
        lambda o, b: -(o[:, 0].log_softmax(-1) * functional.one_hot(b["labels"], 8)).sum(-1).mean(),
        {"labels": CLASSES},
    ),
    "random numbers": (lambda o, b: over_tokens(o + torch.randn_like(o), b["labels"]), {"labels": TOKENS}),
}
"""Losses that train right in parts, as far as the labels tell."""


def each(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the losses [rows, tokens - 1], 0 without a target."""
    return over_tokens(outputs, labels, reduction="none").view(len(labels), -1)


def over_all_rows(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return a mean over all rows; a row without targets counts as 0."""
    return (each(outputs, labels).sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)).mean()


BY_ROWS: Losses = {
    "over all positions": (lambda o, b: each(o, b["labels"]).sum() / b["labels"].numel(), {"labels": TOKENS}),
    "over all rows": (lambda o, b: over_all_rows(o, b["labels"]), {"labels": TOKENS}),
    "a mask of one value": (
        lambda o, b: each(o, b["labels"]).mul(b["mask"][:, 1:]).mean(),
        {"labels": TOKENS, "mask": MASK[:1].expand(2, 6)},
    ),
    "classes over all rows": (
        lambda o, b: functional.cross_entropy(o[:, 0], b["labels"], reduction="sum") / len(o),
        {"labels": CLASSES},
    ),
}
"""Losses whose denominators count rows or positions, not targets."""
NEITHER: Losses = {
    "later rows count more": (
        lambda o, b: (each(o, b["labels"]).mean(1) @ torch.arange(1.0, len(o) + 1)) / len(o),
        {"labels": TOKENS},
    ),
}
"""Losses that add up over rows, but with weights that a row alone does not have."""


@pytest.mark.parametrize("name", [*OTHER, *MEANS, *BY_ROWS, *NEITHER])
def test_a_loss_that_is_no_mean_over_targets_is_found(name: str) -> None:
    """Break: labels of one kind, or parts of equal size; for MEANS: leave out the comparison with rows alone; for
    BY_ROWS: trial labels with equal numbers of targets in all rows.
    """
    loss_fn, batch = (OTHER | MEANS | BY_ROWS | NEITHER)[name]
    outputs = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(2))

    def cut(row: int, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rows = slice(row, row + 1)
        return loss_fn(outputs[rows], {key: value[rows] for key, value in inputs.items()})

    rule = LossRule(shifts=batch["labels"].dim() > 1)
    torch.manual_seed(0)
    found = find_other_weights(batch, rule, partial(loss_fn, outputs), cut, bool)
    assert bool(found) == (name in OTHER)
    if not found:
        rule = find_row_weights(batch, rule, partial(loss_fn, outputs), cut, bool)
        assert (rule.weighs_rows, bool(rule.obstacle)) == (name in BY_ROWS, name in NEITHER)


def assert_steps(
    loss_fn: Callable[..., torch.Tensor], *batches: Mapping[str, torch.Tensor], warns: str = "", **settings: Any
) -> None:
    """Train in two passes beside plain PyTorch. warns: the text of a warning in the last step, and in no other."""
    reference = Reference(build(llama), max_grad_norm=None)
    with (
        Engine(build(llama), max_grad_norm=None, passes=2, **settings) as engine,
        warnings.catch_warnings(action="error"),
    ):
        for batch in batches:
            loss, norm = reference.step(batch, loss_fn)
            is_told = bool(warns) and batch is batches[-1]
            with pytest.warns(UserWarning, match=warns) if is_told else nullcontext():
                result = engine.step(batch, loss_fn)
            assert (float(result.loss), result.grad_norm) == pytest.approx((float(loss), norm), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "cut"),
    [({"passes": 2}, "units"), ({"micro_batch_size": 2}, "calls"), ({"micro_batch_size": 2}, "units")],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_class_weights_stay_in_one_pass(seed: int, settings: dict[str, int], cut: str) -> None:
    """The rows of some first batches hide the weights. Units that cut rows keep one loss. Break: leave out the trials
    of weights.
    """
    weights_of_classes = torch.ones(64).index_fill(0, torch.arange(32), 0.1)

    def loss_fn(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return over_tokens(outputs.logits, batch["labels"], weight=weights_of_classes.to(outputs.logits.device))

    loss, norm = Reference(build(llama), max_grad_norm=None).step(tokens(seed, ROWS), loss_fn)
    with Engine(build(llama), max_grad_norm=None, **settings) as engine:
        parts_of(engine).execution_mode.change(cut=cut)
        said = pytest.warns(UserWarning, match=r"cannot be split by rows: the loss of \d+ targets is")
        with nullcontext() if settings == {"micro_batch_size": 2} and cut == "units" else said:
            result = engine.step(tokens(seed, ROWS), loss_fn)
        assert (float(result.loss), result.grad_norm) == (float(loss), pytest.approx(norm, rel=1e-6))


@pytest.mark.parametrize("num_rows", [2, 3])
def test_parts_of_a_mean_over_all_positions_add_up(num_rows: int) -> None:
    """The first rows have equal numbers of targets; later, some rows have none. Break: weigh rows by their targets."""

    def loss_fn(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return each(outputs.logits, batch["labels"]).sum() / batch["labels"].numel()

    even, uneven = tokens(0, num_rows), tokens(1, num_rows)
    uneven["labels"][0], uneven["labels"][1, :-1] = -100, -100
    assert_steps(loss_fn, even, uneven)


def test_rows_without_a_target_of_a_mask_count_for_nothing() -> None:
    """The first pass has no target: its own mean is 0 / 0. Break: scale this mean by 0."""

    def loss_fn(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        mask = batch["mask"][:, 1:]
        return (each(outputs.logits, batch["labels"]) * mask).sum() / mask.sum()

    batch = tokens(0, 2)
    batch["labels"][0] = -100
    batch["mask"] = batch["labels"] != -100
    assert_steps(loss_fn, batch)


@pytest.mark.slow
def test_targets_that_begin_to_differ_are_judged() -> None:
    """A mean over the padding mask leaves out more labels in the second batch. Break: judge the first batch alone."""

    def loss_fn(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return each(outputs.logits, batch["labels"]).sum() / batch["attention_mask"][:, 1:].sum()

    batches = [{**tokens(seed, 3), "attention_mask": torch.ones_like(tokens()["labels"][:3])} for seed in range(2)]
    for seed, batch in enumerate(batches):
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][0, : 6 * seed] = -100
    assert_steps(loss_fn, *batches, warns="give different results")


@pytest.mark.slow
@pytest.mark.parametrize("is_given", [False, True])
def test_weights_of_tokens_that_begin_later_are_found(is_given: bool) -> None:
    """Weights beside the labels are equal in the first batch. Break: record no constant values of text for the loss;
    keep those of a given analysis.
    """
    uses = torch.tensor(1.0)  # no hash sees this number

    def loss_fn(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weights = batch["weights"][:, 1:].cpu() ** uses
        return (each(outputs.logits, batch["labels"]) * weights.to(outputs.logits.device)).sum() / weights.sum()

    even, uneven = ({**tokens(seed, 2), "weights": torch.ones(tokens(seed, 2)["labels"].shape)} for seed in range(2))
    uneven["weights"][0] = 0.2
    analysis = None
    if is_given:
        uses.zero_()
        with Engine(build(llama), max_grad_norm=None, passes=2) as engine:
            engine.step(uneven, loss_fn)
            analysis = engine.analysis
        uses.fill_(1.0)
    assert_steps(loss_fn, even, uneven, warns="give different results", analysis=analysis)


def test_graphs_of_the_caller_end_after_the_last_pass() -> None:
    found = []
    for passes in (1, 3):
        table = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        batch = tokens(0, 6)
        batch = {"inputs_embeds": table[batch["input_ids"].cpu()] * 1.0, "labels": batch["labels"]}
        with Engine(build(llama), optimizer=PROPORTIONAL, passes=passes) as engine:
            loss = float(engine.step(batch).loss)
        found.append((loss, table.grad))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-5, atol=1e-7)


def test_passes_hold_the_inputs_of_their_rows_alone() -> None:
    peaks = []
    for passes in (1, 4):
        placement = Placement("cpu", "cpu", activations="cpu")
        with Engine(build(llama), passes=passes, placement=placement) as engine:
            engine.step(tokens(0, 8))
            peaks.append({name: size for _, name, size in engine.allocations}[CHECKPOINTS])
    assert peaks[1] == peaks[0] / 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"passes": 0}, "train.passes is 0; it must be a whole number, at least 1"),
        ({"optimizer": MeZO(lr=1e-3), "passes": 2}, "MeZO has no gradients to add up: set --train.passes 1"),
        ({"sequence_parallel": 2, "passes": 2}, "shared rows are computed in one pass"),
    ],
)
def test_other_passes_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Engine(build(llama), **settings)
