"""Every causal language model in transformers trains like plain PyTorch when streamed."""

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
"""Quick families: a state space, relative positions, shared blocks, and layers with shared keys and values.

More families: tests/cases/models.py.
"""


def cases(
    modes: Sequence[Mode], quick: Sequence[str], first: int = 0, every: int = 1, *, unlike: bool = True
) -> list[object]:
    """Return pytest parameters for buildable families, with `modes` in turn. Non-quick families are marked slow.

    Takes one family out of `every`, starting at `first`. `unlike` adds the families with special settings or batches.
    (tests/zoo/table.py runs each family in every mode.)
    """
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
    """Otherwise each graph search and each collection visits the modules of all earlier families."""
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
    """Recomputation is `always` or `never`: a graph stays saved while the saved weights leave the slot."""
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
