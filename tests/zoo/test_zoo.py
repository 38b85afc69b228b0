"""Every causal language model of transformers, streamed, trains as plain PyTorch trains it."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.leaks import no_graph_is_left
from tests.zoo.compare import ALWAYS, MICRO, NEVER, SUMS, Mode, examine
from tests.zoo.families import BATCHES, OPEN, OVERRIDES, UNBUILDABLE, families

QUICK = ("mamba", "xlnet", "zamba", "gemma3n_text")
"""The default run: a state space, positions of another kind, shared blocks, keys and values that layers share. The
tests of the engine have more of them (tests/engine/families.py)."""


def cases(
    modes: Sequence[Mode], quick: Sequence[str], first: int = 0, every: int = 1, *, unlike: bool = True
) -> list[object]:
    """Buildable families as parameters in one of the modes, which take turns; all but the quick ones are slow. Of
    `every` so many one is taken, from the `first` on, and with it those that are `unlike` others: that need settings or
    a batch of their own. (tests/zoo/table.py takes each family in every mode.)"""
    found: list[object] = []
    for number, name in enumerate(families()):
        if number % every != first and name not in quick and not (unlike and name in (*OVERRIDES, *BATCHES)):
            continue
        mode = modes[len(found) % len(modes)]
        marks = [] if name in quick else [pytest.mark.slow]
        if name in UNBUILDABLE:
            marks.append(pytest.mark.skip(reason=UNBUILDABLE[name]))
        if name in OPEN:
            marks.append(pytest.mark.xfail(reason=OPEN[name], strict=True))
        found.append(pytest.param(name, mode, marks=marks, id=f"{name}-{label(mode)}"))
    return found


def label(mode: Mode) -> str:
    return f"{mode.rows}rows" if mode in MICRO else mode.name


@pytest.fixture(autouse=True)
def what_was_imported_stays() -> None:
    """Else each search for graphs, and each collection, looks through the modules of all families before."""
    gc.collect()
    gc.freeze()


def test_the_quick_families_are_registered() -> None:
    assert set(QUICK) <= set(families())


@pytest.mark.slow
def test_families_are_called_as_their_configurations() -> None:
    for name, family in families().items():
        own = family.model_class.config_class.model_type
        known = own in CONFIG_MAPPING or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(own) == family.class_name
        assert name == own or not known


@pytest.mark.parametrize(("name", "mode"), cases([ALWAYS, NEVER], QUICK))
def test_two_steps_in_fp32_equal_plain_pytorch(name: str, mode: Mode) -> None:
    """With recompute `always` or `never`: a graph is kept while the weights that it has saved leave the slot."""
    with no_graph_is_left():
        outcome = examine(families()[name], "fp32", mode)
    assert outcome.is_finite
    if not outcome.is_equal:
        assert outcome.why == SUMS, f"{outcome.differences} at {outcome.worst}"
        assert outcome.differences["loss"] < 1e-6, outcome.differences
        assert outcome.differences["gradient"] < 1e-4, outcome.differences


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), cases([ALWAYS, NEVER], QUICK[::3], first=1, every=5, unlike=False))
def test_a_step_in_bf16_equals_plain_pytorch(name: str, mode: Mode) -> None:
    outcome = examine(families()[name], "bf16", mode)
    assert outcome.is_finite
    if not outcome.is_equal:
        assert outcome.why == SUMS, f"{outcome.differences} at {outcome.worst}"
        assert outcome.differences["loss"] < 1e-3, outcome.differences


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), cases(MICRO, QUICK[1::2], first=3, every=4))
def test_micro_batches_equal_plain_pytorch_up_to_the_order_of_sums(name: str, mode: Mode) -> None:
    outcome = examine(families()[name], "fp32", mode)
    assert outcome.is_finite
    assert outcome.is_within_rounding, f"{outcome.differences} at {outcome.worst}; order of sums {outcome.order:.1e}"
