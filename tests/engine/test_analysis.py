"""The analysis of a model as a value: a second engine, or a resumed run, needs no trial runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import Analysis, Engine, MeZO
from offload.checkpoint.manifest import Manifest
from offload.engine.analysis import Analyst
from offload.errors import ConfigError
from tests.engine.families import build, gpt2, tokens
from tests.engine.handmade import RunningStatistics, Stack, cross_entropy, words
from tests.engine.inside import steps_of
from tests.engine.test_overlap import deep


def count_forwards(model: nn.Module) -> list[int]:
    """Return a list that gets an entry for each forward of the first block. Call before `Engine()`."""
    found: list[int] = []
    block = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[0]
    next(block.children()).register_forward_hook(lambda *_: found.append(1))
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "micro-batches": {"micro_batch_size": 2},
    "chunks": {"head_chunk_bytes": 4 * 4 * 64 * 3, "micro_batch_size": 1},
    "graphs": {"recompute": "never"},
    "mezo": {"optimizer": MeZO(lr=1e-3)},
}


CASES = [(family, name) for family in (deep, gpt2) for name in SETTINGS] + [(RunningStatistics, "whole")]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_an_engine_with_an_analysis_runs_no_trials(family: Any, name: str) -> None:
    """Losses and buffers are equal to the bit, also with dropout. Counted are forwards until the end of a first and
    second step.
    """
    results, counts, text = [], [], ""
    batch, loss_fn = (words, cross_entropy) if family is RunningStatistics else (tokens, None)
    for _ in range(2):
        model = build(family).train()
        analysis = Analysis.from_json(text) if text else None
        torch.manual_seed(3)
        found = count_forwards(model)
        with Engine(model, analysis=analysis, **SETTINGS[name]) as engine:
            results.append([])
            for seed in range(2):
                results[-1].append(engine.step(batch(seed), loss_fn).loss.item())
                counts.append(len(found))
                found.clear()
            results[-1] += [buffer.tolist() for buffer in model.buffers()]
            assert text in ("", repr(engine.analysis))
            text = repr(engine.analysis)
    assert results[0] == results[1]
    assert counts[0] > counts[1] == counts[2] == counts[3]


def test_an_analysis_belongs_to_one_model_and_to_one_mode() -> None:
    with Engine(build(deep)) as engine:
        engine.step(tokens(0))
        analysis = engine.analysis
    with pytest.raises(ConfigError, match="belongs to another model: parameters, settings differ"):
        Engine(build(deep), analysis=analysis, precision="bf16" if engine.model.dtype == torch.float32 else "fp32")
    other = build(gpt2)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ConfigError, match="another model: code, parameters, buffers, units, config"):
        Engine(other, analysis=analysis)
    assert all(torch.equal(value.cpu(), before[name].cpu()) for name, value in other.state_dict().items())
    with pytest.raises(ConfigError, match="another model: settings differ"):  # tiles are found in a recording
        Engine(build(deep), analysis=analysis, sequence_tile=512)
    changed = build(deep)
    next(module for name, module in changed.named_modules() if name.endswith("act_fn")).inplace = True
    with pytest.raises(ConfigError, match="another model: code differ"):
        Engine(changed, analysis=analysis)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ConfigError, match="another model: device differ"):
            Engine(build(deep), analysis=analysis)
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(ConfigError, match="no analysis of this version"):
        Analysis.from_json("[1]")
    model = build(deep).train(not engine.model.training)
    found = count_forwards(model)
    with Engine(model, analysis=analysis) as engine:
        engine.step(tokens(0))
        first = len(found)
        engine.step(tokens(0))
        assert first > 2 * (len(found) - first), "another mode is recorded"


def test_a_resumed_engine_runs_no_trials(tmp_path: Path) -> None:
    models = [build(deep), build(deep)]
    counts = list(map(count_forwards, models))
    whole, resumed = (Engine(model, micro_batch_size=2) for model in models)
    whole.step(tokens(0))
    whole.save_checkpoint(tmp_path / "saved")
    resumed.load_checkpoint(tmp_path / "saved")
    counts[0].clear()
    assert resumed.step(tokens(1)).loss == whole.step(tokens(1)).loss
    assert len(counts[0]) == len(counts[1])


OLD: dict[str, Any] = {
    "way": {"cut": "calls", "chunks": False, "recomputes": True, "interleaves": True},
    "losses": {"input_ids:2 labels:2 -3396751985128501883": [1, 0, 0]},
    "resident": ["model.norm", "model.layers.1"],
    "judged": {"a kind": ["[()]"]},
}
"""Decisions in a checkpoint before there was an analysis."""


@pytest.mark.filterwarnings("ignore:unit model.layers.1 is read from outside")
def test_a_checkpoint_with_decisions_alone_is_read(tmp_path: Path) -> None:
    whole, resumed = Engine(build(deep), micro_batch_size=2), Engine(build(deep), micro_batch_size=2)
    whole.step(tokens(0))
    whole.save_checkpoint(tmp_path / "saved")
    path = tmp_path / "saved" / "manifest.json"
    manifest = Manifest.decode(path.read_bytes(), path)
    del manifest.meta["engine"]["analysis"]
    manifest.meta["engine"] |= OLD
    path.write_bytes(manifest.encode())
    resumed.load_checkpoint(tmp_path / "saved")
    found = resumed.analysis
    assert (found.mode, found.losses, found.checks) == (OLD["way"], OLD["losses"], OLD["judged"])
    assert set(OLD["resident"]) <= {*found.resident}
    assert not found.uses
    resumed.step(tokens(1))
    assert resumed.analysis.uses


def test_an_analysis_has_no_names_of_one_process() -> None:
    """A model with a value that has no JSON is still described; loss functions are told apart by their code."""
    with Engine(build(Stack)) as engine:
        engine.step(words(0), lambda outputs, batch: 1 * cross_entropy(outputs, dict(batch)))
        engine.step(words(0), lambda outputs, batch: 2 * cross_entropy(outputs, dict(batch)))
        assert len(engine.analysis.kinds["results"]) == 2
        assert " at 0x" not in repr(engine.analysis)
        analyst: Analyst = steps_of(engine)._analyst
        assert analyst.differences(engine.analysis) == []
