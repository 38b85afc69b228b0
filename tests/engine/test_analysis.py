"""The analysis of a model as a value: a second engine, or a resumed run, only checks these results."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import Analysis, Engine, MeZO
from offload.checkpoint.manifest import Manifest
from offload.engine.analysis import Analyst
from offload.errors import ConfigError
from tests.cases.models import build, gpt2, llama, tokens
from tests.engine.handmade import Block, RunningStatistics, Stack, cross_entropy, words
from tests.engine.inside import steps_of
from tests.engine.reference import Reference
from tests.matrix import quick


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


CASES = [(family, name) for family in (llama, gpt2) for name in SETTINGS] + [(RunningStatistics, "whole")]


@pytest.mark.parametrize(("family", "name"), quick(CASES, [*CASES[1:5], CASES[-1]]))
def test_an_engine_with_an_analysis_runs_one_check(family: Any, name: str) -> None:
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
    assert counts[0] > counts[2] > counts[1] == counts[3]


class Open(Block):
    """Mixes rows if one of many values says so, or scales the input in place."""

    shared = False
    pair, scales, clamps, choose = (0, 0), (False,), (False,), staticmethod(bool)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("switch", torch.zeros(1))

    @property
    def computed(self) -> bool:
        return self.shared

    def forward(self, h: torch.Tensor, default: tuple[bool] = (False,)) -> torch.Tensor:
        if self.scales[0]:
            h.mul_(0.9)
        if self.clamps[0]:
            self.up.weight.data.clamp_(-0.01, 0.01)
        mixes = self.pair[0] or self.computed or self.choose() or bool(self.switch) or default[0]
        return super().forward(h - h.mean(0, keepdim=True) if mixes else h)


def opened(route: str) -> nn.Module:
    model = build(partial(Stack, Open))
    block: Any = model.blocks[1]
    if route == "hook":
        block.register_forward_pre_hook(lambda module, _: setattr(module, "pair", (1, 0)))
    if route == "buffer":
        block.switch.fill_(1)
    if route == "function":
        block.choose = lambda: True
    if route in ("pair", "scales", "clamps"):
        setattr(block, route, (True,))
    return model


@pytest.fixture(scope="module")
def unmixed() -> Analysis:
    """Return the analysis of the model without mixed rows, for a step and an own loop."""
    with Engine(opened(""), micro_batch_size=1, max_grad_norm=None) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.step(words(0), cross_entropy)
        engine.backward(cross_entropy(engine.model(words(0)["x"]), words(0)))
        return engine.analysis


AGAIN = r"does not hold for this model: (.|\n)*analysed again"


@pytest.mark.filterwarnings("ignore:the engine and plain PyTorch give different results")
@pytest.mark.parametrize("route", ["hook", "buffer", "function", "pair", "property", "default"])
def test_an_analysis_is_checked_on_the_first_batch(
    route: str, unmixed: Analysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key has no such values. Break: take over the checks of the other engine."""
    if route == "property":
        monkeypatch.setattr(Open, "shared", True)
    if route == "default":
        monkeypatch.setattr(Open.forward, "__defaults__", ((True,),))
    loss, norm = Reference(opened(route), max_grad_norm=None).step(words(0), cross_entropy)
    with Engine(opened(route), micro_batch_size=1, max_grad_norm=None, analysis=unmixed) as engine:
        with pytest.warns(UserWarning, match=AGAIN):
            result = engine.step(words(0), cross_entropy)
        assert (float(result.loss), result.grad_norm) == (float(loss), pytest.approx(norm, rel=1e-6))
        assert engine.analysis.mode["cut"] == "whole"


@pytest.mark.filterwarnings("ignore:micro_batch_size 1 cut the batch")
def test_an_analysis_is_checked_in_the_first_call_of_an_own_loop(unmixed: Analysis) -> None:
    """Break: take over the calls of the other engine as checked."""
    _, norm = Reference(opened("scales"), max_grad_norm=None).step(words(0), cross_entropy)
    with Engine(opened("scales"), micro_batch_size=1, max_grad_norm=None, analysis=unmixed) as engine:
        with pytest.warns(UserWarning, match=AGAIN):
            engine.backward(cross_entropy(engine.model(words(0)["x"]), words(0)))
        assert engine.grad_norm() == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("way", ["step", "own loop"])
def test_an_analysis_is_checked_for_writes_to_weights(way: str) -> None:
    """Both passes of a check clamp the weights, and without recomputation nothing differs. Break: watch no writes."""

    def run(route: str, analysis: Analysis | None) -> Analysis:
        with Engine(opened(route), recompute="never", analysis=analysis) as engine:
            if way == "step":
                engine.step(words(0), cross_entropy)
            else:
                engine.backward(engine.model(words(0)["x"]).sum())
            return engine.analysis

    analysis = run("", None)
    with pytest.warns(UserWarning, match=AGAIN), pytest.raises(ConfigError, match="forward writes to weights of"):
        run("clamps", analysis)


@pytest.mark.filterwarnings("ignore:the engine and plain PyTorch give different results")
def test_a_resumed_step_is_checked_too(unmixed: Analysis, tmp_path: Path) -> None:
    """The code of the model may be another one."""
    with Engine(opened(""), micro_batch_size=1, max_grad_norm=None) as engine:
        steps_of(engine).adopt(unmixed)
        engine.save_checkpoint(tmp_path / "saved")
    loss, _ = Reference(opened("pair"), max_grad_norm=None).step(words(0), cross_entropy)
    with Engine(opened("pair"), micro_batch_size=1, max_grad_norm=None) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        with pytest.warns(UserWarning, match=AGAIN):
            assert float(engine.step(words(0), cross_entropy).loss) == float(loss)


def row_mean(losses: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
    return (losses.sum(1) / is_target.sum(1).clamp(min=1)).sum() / is_target.any(1).sum()


def target_mean(losses: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
    return losses.sum() / is_target.sum()


class Loss:
    """A loss with two parts without a hash: the first column with targets, and the mean."""

    first, mean = 1, staticmethod(target_mean)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        first = Loss.first
        labels, logits = labels[:, first:], logits[:, : logits.shape[1] - first].float()
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return Loss.mean(losses, labels != -100)


def with_loss() -> nn.Module:
    model: Any = build(llama)
    model.loss_function = Loss()
    return model


def uneven(first: int) -> dict[str, torch.Tensor]:
    """Return tokens. Three rows have no labels in the `first` columns. 0: all rows have equal numbers of targets."""
    batch = tokens(first)
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][:3, :first] = -100
    return batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "value", "ignored", "way"),
    [
        ("first", 0, 1, "given"),
        ("first", 0, 1, "resumed with other settings"),
        ("mean", staticmethod(row_mean), 4, "resumed"),
    ],
)
def test_an_analysis_is_checked_for_another_loss(
    part: str, value: Any, ignored: int, way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first batch has rows with equal numbers of targets, where every rule gives the same loss.

    Break: take over loss rules and loss decisions without trials.
    """
    settings: dict[str, Any] = {"passes": 2, "max_grad_norm": None}
    with Engine(with_loss(), **settings) as engine:
        engine.step(uneven(0))
        analysis = engine.analysis
    with Engine(with_loss(), **settings) as engine:
        steps_of(engine).adopt(analysis)
        engine.save_checkpoint(tmp_path / "saved")
    monkeypatch.setattr(Loss, part, value)
    reference = Reference(with_loss(), max_grad_norm=None)
    if way == "resumed with other settings":
        settings |= {"recompute": "never"}
    with Engine(with_loss(), analysis=analysis if way == "given" else None, **settings) as engine:
        if way != "given":
            engine.load_checkpoint(tmp_path / "saved")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = [engine.step(batch) for batch in (uneven(0), uneven(ignored))]
        for batch, result in zip((uneven(0), uneven(ignored)), results, strict=True):
            loss, norm = reference.step(batch)
            assert (float(result.loss), result.grad_norm) == pytest.approx((float(loss), norm), rel=1e-5)


def equal_weights(outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class ClassWeights:
    """A loss with weights of classes, which no hash sees."""

    def __init__(self, least: float) -> None:
        self.weights = torch.ones(64).index_fill(0, torch.arange(32), least)

    def __call__(self, outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits, weights = outputs.logits[:, :-1], self.weights.to(outputs.logits.device)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), weights)


@pytest.mark.filterwarnings("ignore:micro_batch_size is none")
def test_each_loss_of_an_analysis_is_checked() -> None:
    """Two losses with one engine. Break: check the first loss alone."""
    settings: dict[str, Any] = {"passes": 2, "max_grad_norm": None}
    batch = uneven(0)
    with Engine(build(llama), **settings) as engine:
        for loss_fn in (equal_weights, ClassWeights(1.0)):
            engine.step(batch, loss_fn)
        analysis = engine.analysis
    reference = Reference(build(llama), max_grad_norm=None)
    with Engine(build(llama), analysis=analysis, **settings) as engine:
        for number, loss_fn in enumerate((equal_weights, ClassWeights(0.1))):
            loss, norm = reference.step(batch, loss_fn)
            with pytest.warns(UserWarning, match="does not hold") if number else nullcontext():
                result = engine.step(batch, loss_fn)
            assert (float(result.loss), result.grad_norm) == pytest.approx((float(loss), norm), rel=1e-5)


def test_an_analysis_belongs_to_one_model_and_to_one_mode() -> None:
    with Engine(build(llama)) as engine:
        engine.step(tokens(0))
        analysis = engine.analysis
    with pytest.raises(ConfigError, match="belongs to another model: parameters, settings differ"):
        Engine(build(llama), analysis=analysis, precision="bf16" if engine.model.dtype == torch.float32 else "fp32")
    other = build(gpt2)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ConfigError, match="another model: code, parameters, buffers, units, config"):
        Engine(other, analysis=analysis)
    assert all(torch.equal(value.cpu(), before[name].cpu()) for name, value in other.state_dict().items())
    with pytest.raises(ConfigError, match="another model: settings differ"):  # tiles are found in a recording
        Engine(build(llama), analysis=analysis, sequence_tile=512)
    changed = build(llama)
    next(module for name, module in changed.named_modules() if name.endswith("act_fn")).inplace = True
    with pytest.raises(ConfigError, match="another model: code differ"):
        Engine(changed, analysis=analysis)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ConfigError, match="another model: device differ"):
            Engine(build(llama), analysis=analysis)
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(ConfigError, match="no analysis of this version"):
        Analysis.from_json("[1]")
    model = build(llama).train(not engine.model.training)
    found = count_forwards(model)
    with Engine(model, analysis=analysis) as engine:
        engine.step(tokens(0))
        first = len(found)
        engine.step(tokens(0))
        assert first > 2 * (len(found) - first), "another mode is recorded"


OLD: dict[str, Any] = {
    "way": {"cut": "calls", "chunks": False, "recomputes": True, "interleaves": True},
    "losses": {"input_ids:2 labels:2 -3396751985128501883": [1, 0, 0]},
    "resident": ["model.norm", "model.layers.1"],
    "judged": {"a kind": ["[()]"]},
}
"""Decisions in a checkpoint before there was an analysis."""


@pytest.mark.filterwarnings("ignore:unit model.layers.1 is read from outside")
def test_a_checkpoint_with_decisions_alone_is_read(tmp_path: Path) -> None:
    whole, resumed = Engine(build(llama), micro_batch_size=2), Engine(build(llama), micro_batch_size=2)
    whole.step(tokens(0))
    whole.save_checkpoint(tmp_path / "saved")
    path = tmp_path / "saved" / "manifest.json"
    manifest = Manifest.decode(path.read_bytes(), path)
    del manifest.meta["engine"]["analysis"]
    manifest.meta["engine"] |= OLD
    path.write_bytes(manifest.encode())
    resumed.load_checkpoint(tmp_path / "saved")
    found = resumed.analysis
    assert (found.mode, found.losses, found.checks) == (OLD["way"], OLD["losses"], {})
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
