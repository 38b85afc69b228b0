"""Update rules on whole matrices: tiles and ranks never cut a parameter, and checkpoints include their states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offload import LOMO, Adafactor, AdamW, Engine, Muon, Placement
from offload.distributed.joining import open_comm
from offload.errors import ConfigError, DoesNotFitError
from offload.layout import build_regions
from tests.cases.models import batches, build, llama, mamba, mixtral, tokens
from tests.engine.compare import PLACES, assert_same, placed, train_both, weights
from tests.engine.device import LEDGER, own_device
from tests.engine.inside import parts_of
from tests.engine.ranks import run
from tests.engine.ranks_child import CASES, opened, trained
from tests.engine.reference import Reference
from tests.engine.test_rules import MATRIX as RULES

pytestmark = pytest.mark.usefixtures("small_tiles")


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "make"), [("adafactor", mixtral), ("muon", mixtral), ("muon", mamba)])
def test_experts_and_convolutions(rule: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon updates each expert matrix separately, and no convolution. All products run on the device."""
    factor, devices = Muon._orthogonalised, set()

    def noted(self: Muon, rows: int, columns: int, work: list[torch.Tensor]) -> torch.Tensor:
        devices.add(work[0].device.type)
        return factor(self, rows, columns, work)

    monkeypatch.setattr(Muon, "_orthogonalised", noted)
    engine, _ = train_both(build(make), batches(2), optimizer=RULES[rule], debug=True)
    if rule == "muon":
        assert devices == {own_device().type}
        chosen = {info.name: info.rule for info in parts_of(engine).infos}
        assert {rule for name, rule in chosen.items() if "conv1d.weight" in name} <= {1}
        assert {rule for name, rule in chosen.items() if "experts." in name and len(name) > 0} <= {0}
        assert {rule for name, rule in chosen.items() if "embed" in name or "head" in name} == {1}


@pytest.mark.slow
def test_groups_give_rules_by_matrix(tmp_path: Path) -> None:
    groups = (("mlp", {"rule": Adafactor(lr=0.03), "lr_scale": 2.0}), ("attn", {"rule": Muon(lr=0.02)}))
    rule = AdamW(lr=0.01, groups=groups)
    engine, _ = train_both(build(llama), batches(3), optimizer=rule, placement=placed("nvme", tmp_path))
    kept = {name for _, name, _ in engine.allocations}
    assert {"exp avg", "row var", "momentum buffer", "update workspace"} <= kept


@LEDGER
def test_what_is_kept_is_planned_to_the_byte() -> None:
    """Adafactor's factors on the host and Muon's workspace on the device are planned exactly. One byte less on the host
    is refused at once.
    """
    for rule, key, tier in ((RULES["adafactor"], "host_memory", "cpu"), (RULES["muon"], "device_memory", "device")):
        places = {"parameters": "cpu", "optimizer": "cpu"}
        engine = Engine(build(llama), rule, Placement(**places))
        needed = sum(size for where, _, size in engine.allocations if where == tier)
        Engine(build(llama), rule, Placement(**places, **{key: needed})).close()
        if tier == "cpu":  # with less device memory, smaller units would fit
            with pytest.raises(DoesNotFitError, match="row var"):
                Engine(build(llama), rule, Placement(**places, **{key: needed - 1}))
    infos = parts_of(engine).infos
    largest = max(RULES["muon"].workspace_bytes(info.shape) for info in infos if info.rule == 0)
    assert ("device", "update workspace", largest) in engine.allocations


# -- over ranks --------------------------------------------------------------------------------------------------------


def refused_padding() -> str:
    """Build an engine with ranges of mostly padding. Return the error message."""
    with pytest.MonkeyPatch.context() as patch, open_comm() as comm:
        patch.setattr(build_regions, "_MOST_PADDING", 0)
        with pytest.raises(ConfigError) as caught:
            opened(comm, CASES["plain"], optimizer=Adafactor(), zero_stage=3)
    return str(caught.value)


WITHOUT_STATES = {"norm": LOMO(lr=0.3, clip_norm=0.2), "value": LOMO(lr=0.3, clip_value=1e-2)}


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*RULES, *WITHOUT_STATES])
def test_ranks_share_parameters_out_whole(rule: str, tmp_path: Path) -> None:
    """On every tier and every sharding stage, both ranks have the same bits. They are close to stage 0, with other
    borders between partial sums, and to one process. LOMO with its own clipping is covered too.
    """
    optimizer, norm = (RULES | WITHOUT_STATES)[rule], 0.2 if rule in RULES else None
    common = {"case": "plain", "rows": (2, 2), "num_steps": 3, "optimizer": optimizer, "folder": str(tmp_path)}
    runs = [
        common | {"zero_stage": stage, "placement": placement, "max_grad_norm": norm, "delays": delays}
        for stage, placement, delays in (
            (0, {}, None),
            (0, PLACES["nvme"], None),
            (1, PLACES["nvme"], 3),
            (2, {}, None),
            (3, {}, 5),
        )
    ]
    first, second = run(2, trained, runs=runs)
    for begin, end in ((0, 2), (2, 5)):
        for found in (*first[begin:end], *second[begin:end]):
            assert found.results == first[begin].results
            assert_same(found.weights, first[begin].weights)
    case = CASES["plain"]
    reference = Reference(build(case.make), optimizer, max_grad_norm=norm)
    for number in range(3):
        torch.manual_seed(number)
        reference.step(case.batch(number, 4))
    for found in (first[0], first[2]):
        assert_same(found.weights, reference.masters, within=2e-2 if rule == "muon" else 1e-5)


@pytest.mark.slow
def test_ranges_that_would_be_mostly_padding_are_refused() -> None:
    for told in run(3, refused_padding):
        assert "needs whole matrices" in told
        assert "--offload.zero_stage 0" in told
        assert "--optimizer.groups" in told


# -- checkpoints of another update rule --------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_rules_states_are_refused_or_begin_anew(tmp_path: Path) -> None:
    """With `reset=True` the engine equals a new engine over the loaded weights, regardless of earlier training."""
    first = Engine(build(llama), AdamW(lr=0.01))
    for seed in range(2):
        first.step(tokens(seed))
    first.save_checkpoint(tmp_path / "saved", {"step": 2})
    for rule in RULES.values():
        engine = Engine(build(llama, seed=3), rule, placed("nvme", tmp_path))
        engine.step(tokens(8))
        told = rf"saved contains optimizer states of AdamW .*exp_avg.*{type(rule).__name__}.*"
        with pytest.raises(ConfigError, match=told + r"--optimizer\.name.*--optimizer\.reset.*reset=True"):
            engine.load_checkpoint(tmp_path / "saved")
        with pytest.warns(UserWarning, match="another update rule"):
            assert engine.load_checkpoint(tmp_path / "saved", reset=True) == {"step": 2}
        assert_same(weights(engine), weights(first))
        other = build(llama)
        with torch.no_grad():
            for (_, p), value in zip(other.named_parameters(), weights(first).values(), strict=True):
                p.copy_(value)
        anew = Engine(other, rule)
        for seed in range(2):
            assert engine.step(tokens(seed)).loss.item() == anew.step(tokens(seed)).loss.item()
        assert_same(weights(engine), weights(anew))
        engine.close()


def test_another_models_checkpoint_is_refused_with_reset_too(tmp_path: Path) -> None:
    engine = Engine(build(llama), AdamW())
    engine.save_checkpoint(tmp_path / "saved")
    other = Engine(build(lambda: llama(intermediate_size=64)), Adafactor())
    with pytest.raises(ConfigError, match="does not fit the model"):
        other.load_checkpoint(tmp_path / "saved", reset=True)
