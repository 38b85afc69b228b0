"""Every causal language model in transformers trains like plain PyTorch when streamed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offload import Engine
from tests.cases.features import Case
from tests.contracts.contracts import Setting, beside_reference
from tests.engine.compare import same_bits, weights
from tests.engine.inside import parts_of
from tests.leaks import no_graph_is_left
from tests.threads import torch_threads
from tests.zoo.families import BATCHES, OPEN, OVERRIDES, UNBUILDABLE, families

QUICK = ("xlnet", "zamba", "gemma3n_text")
"""Quick families: relative positions, shared blocks, and layers with shared keys and values.

More families: tests/cases/models.py.
"""
ALWAYS: dict[str, Any] = {"recompute": "always"}
NEVER: dict[str, Any] = {"recompute": "never", "debug": True}
"""Debug mode poisons free slots: a saved graph must find the weights after each fetch."""
MICRO: tuple[dict[str, Any], ...] = tuple({"micro_batch_size": rows} for rows in (1, 2, 3))
_SMALL_SHARE = 16
"""Units outside the blocks, smaller than the largest unit divided by this, may stay resident without a warning."""


@dataclass(frozen=True)
class FamilySetting(Setting):
    """A family in the place of a case. changes: keywords for `Engine`."""

    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def case(self) -> Case:
        return families()[self.name].case(self.precision, **self.changes)


def cases() -> Iterator[Any]:
    """Yield (family, precision, settings): each family in fp32, some in bf16 and in micro-batches.

    (tests/zoo/table.py runs each family in every way.)
    """
    for number, name in enumerate(families()):
        is_special = name in (*OVERRIDES, *BATCHES)
        ways = {"fp32": ("fp32", (ALWAYS, NEVER)[number % 2])}
        if number % 5 == 1 or name in QUICK[::3]:
            ways["bf16"] = ("bf16", (ALWAYS, NEVER)[number // 5 % 2])
        if number % 4 == 3 or is_special or name in QUICK[1::2]:
            ways["parts"] = ("fp32", MICRO[number % 3])
        for way, (precision, settings) in ways.items():
            marks = [] if name in QUICK and way == "fp32" else [pytest.mark.slow]
            if name in UNBUILDABLE:
                marks.append(pytest.mark.skip(reason=UNBUILDABLE[name]))
            if name in OPEN:
                marks.append(pytest.mark.xfail(reason=OPEN[name], strict=True))
            yield pytest.param(name, precision, settings, marks=marks, id=f"{name}-{way}")


@pytest.fixture(autouse=True)
def what_was_imported_stays() -> Iterator[None]:
    """Otherwise each graph search and each collection visits the modules of all earlier families."""
    gc.collect()
    gc.freeze()
    with torch_threads(1):
        yield


def test_the_quick_families_are_registered() -> None:
    assert set(QUICK) <= set(families())


@pytest.mark.slow
def test_families_are_called_as_their_configurations() -> None:
    for name, family in families().items():
        own = family.model_class.config_class.model_type
        known = own in CONFIG_MAPPING or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(own) == family.class_name
        assert name == own or not known


@pytest.mark.parametrize(("name", "precision", "settings"), list(cases()))
def test_a_family_equals_plain_pytorch(name: str, precision: str, settings: Mapping[str, Any], tmp_path: Path) -> None:
    """In two steps and an evaluation. The model streams, and has its weights back at the end."""
    at = FamilySetting(name, "cpu", precision, "deferred", tmp_path, settings)
    with no_graph_is_left(), trained(at) as (engine, reported):
        assert_streamed(engine, reported)
        model, masters = engine.model, weights(engine)
        engine.close(restore=True)
    assert [name for name, _ in model.named_parameters()] == list(masters)
    assert all(same_bits(p, masters[name].to(p.dtype)) for name, p in model.named_parameters())
    assert caches_of(model) == caches_of(families()[name].build())


def caches_of(model: nn.Module) -> list[bool | None]:
    """Return `use_cache` of each module with a configuration: an engine turns it off until it closes."""
    return [getattr(module.config, "use_cache", None) for module in model.modules() if hasattr(module, "config")]


@contextmanager
def trained(at: FamilySetting) -> Iterator[tuple[Engine, list[str]]]:
    """Train a family beside plain PyTorch. Yield the engine, and its warnings about units that stay on the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with beside_reference(at) as engine:
            messages = [str(warning.message) for warning in caught]
            yield engine, [text for text in messages if "is read from outside" in text]


def sizes_of(engine: Engine) -> dict[str, int]:
    """Return the number of elements of each unit, by name."""
    infos = parts_of(engine).infos
    return {unit.name: sum(infos[place.parameter].numel for place in unit.places) for unit in parts_of(engine).units}


def assert_streamed(engine: Engine, reported: list[str]) -> None:
    """Every parameter has a unit, and all units stream except small or reported ones."""
    units, sizes = parts_of(engine).units, sizes_of(engine)
    owned = {place.parameter for unit in units for place in unit.places}
    assert owned == set(range(len(parts_of(engine).infos))), "a parameter belongs to no unit"
    resident = [unit.name for unit in units if unit.resident]
    assert len(units) - len(resident) >= 3 - len(reported), "two blocks and an embedding are wanted"
    for name in resident:
        is_reported = any(f"unit {name} " in text for text in reported)
        assert is_reported or sizes[name] * _SMALL_SHARE < max(sizes.values()), f"{name} stays without a warning"
