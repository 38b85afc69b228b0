"""Rules by matrix in an engine: no tile and no rank cuts a parameter, and what they keep of it is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offload import Adafactor, AdaLomo, AdamW, Engine, Muon, Placement
from offload.errors import ConfigError, DoesNotFitError
from offload.optim.rule import UpdateRule
from offload.planning import disk
from tests.engine import matrix_jobs
from tests.engine.compare import assert_same, step_by_step, train_both, weights
from tests.engine.device import LEDGER, own_device, twin
from tests.engine.families import batches, build, llama, mamba, mixtral, tokens
from tests.engine.inside import parts_of, stored_factors, stored_plane
from tests.engine.ranks import run
from tests.engine.ranks_child import CASES, trained
from tests.engine.reference import Reference
from tests.engine.test_rules import PLACES, placed
from tests.matrix import matrix, quick

RULES: dict[str, UpdateRule] = {
    "adafactor": Adafactor(lr=0.03, weight_decay=0.1, groups=(("(q|x)_proj", {"lr_scale": 0.5}),)),
    "adalomo": AdaLomo(lr=0.03),
    "muon": Muon(lr=0.02, rest=AdamW(lr=1e-3), groups=(("norm", {"lr_scale": 2.0}),)),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_LARGEST_TILE", 2048)


@matrix(strength=1, rule=list(RULES), place=list(PLACES), precision=["fp32", "bf16"])
def test_tiers_change_no_bit(rule: str, place: str, precision: str, tmp_path: Path) -> None:
    if rule == "muon" and place == "device" and own_device().type != "cpu":
        pytest.skip("AdamW for the rest: an update on an accelerator is within 2 ulp of the CPU's kernel, not its bits")
    clip = 0.2 if precision == "fp32" else None
    settings = {"optimizer": RULES[rule], "precision": precision, "max_grad_norm": clip}
    engine, reference = train_both(build(llama), batches(3), placement=placed(place, tmp_path), **settings)
    engine.finish()
    names = {name for _, name, _ in engine.allocations}
    assert ("exp avg" in names) is (rule == "muon")
    assert ({"row var", "col var", "variance"} <= names) is (rule != "muon")
    for info in parts_of(engine).infos:
        for name, found in stored_factors(engine, info.name).items():
            assert torch.equal(found.cpu(), reference.states[info.name][name].cpu()), (info.name, name)
    if rule == "muon":
        index = next(info.index for info in parts_of(engine).infos if "up_proj" in info.name)
        found = stored_plane(parts_of(engine).store, index, "momentum_buffer")
        name = parts_of(engine).infos[index].name
        assert torch.equal(found, reference.states[name]["momentum_buffer"].view(-1).cpu())


@matrix(strength=1, make=[mixtral, mamba], rule=["adafactor", "muon"])
def test_experts_and_convolutions(rule: str, make: Any) -> None:
    """Of Muon each matrix of the experts is one, and a convolution is none."""
    engine, _ = train_both(build(make), batches(2), optimizer=RULES[rule], debug=True)
    if rule == "muon":
        chosen = {info.name: info.rule for info in parts_of(engine).infos}
        assert {rule for name, rule in chosen.items() if "conv1d.weight" in name} <= {1}
        assert {rule for name, rule in chosen.items() if "experts." in name and len(name) > 0} <= {0}
        assert {rule for name, rule in chosen.items() if "embed" in name or "head" in name} == {1}


@pytest.mark.parametrize("max_grad_norm", [None, 0.2])
def test_each_step_of_muon_is_torchs_beside_torchs_adamw(max_grad_norm: float | None) -> None:
    """From gradients of plain torch on the same device: the matrices of blocks bit for bit."""
    rule = Muon(lr=0.02, rest=AdamW(lr=1e-3, decay_1d=True))
    model = build(llama)
    plain, engine = twin(model), Engine(model, rule, max_grad_norm=max_grad_norm)
    names = {id(p): name for name, p in plain.named_parameters()}
    matrices = [p for name, p in plain.named_parameters() if "layers" in name and p.dim() == 2]
    rest = [p for p in plain.parameters() if not any(p is matrix for matrix in matrices)]
    optimizers = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)
    for _, after in step_by_step(plain, engine, batches(3), max_grad_norm):
        for optimizer in optimizers:
            optimizer.step()
        exact = max_grad_norm is None and own_device().type in ("cpu", "sim")
        for p in matrices:  # the norm is summed in another order by torch, and may be another number
            apart = (after[names[id(p)]] - p.detach().cpu()).abs().max().item()
            assert apart == 0.0 if exact else apart < 2e-3, names[id(p)]
        for p in rest:
            torch.testing.assert_close(after[names[id(p)]], p.detach().cpu(), rtol=1e-6, atol=1e-6)


def test_each_step_of_adafactor_is_torchs() -> None:
    model = build(llama)
    plain, engine = twin(model), Engine(model, Adafactor(lr=0.03, decay_1d=True), max_grad_norm=None)
    optimizer = torch.optim.Adafactor(plain.parameters(), lr=0.03)
    for before, after in step_by_step(plain, engine, batches(4)):
        optimizer.step()
        for name, p in plain.named_parameters():
            wanted = p.detach().cpu()
            size = (wanted - before[name]).abs().max().item()
            torch.testing.assert_close(after[name], wanted, rtol=3e-7, atol=1e-5 * size)


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_groups_give_rules_by_matrix(place: str, tmp_path: Path) -> None:
    groups = (("mlp", {"rule": Adafactor(lr=0.03), "lr_scale": 2.0}), ("attn", {"rule": Muon(lr=0.02)}))
    rule = AdamW(lr=0.01, groups=groups)
    engine, _ = train_both(build(llama), batches(3), optimizer=rule, placement=placed(place, tmp_path))
    kept = {name for _, name, _ in engine.allocations}
    assert {"exp avg", "row var", "momentum buffer", "update workspace"} <= kept


@matrix(strength=1, rule=list(RULES), precision=["fp32", "bf16"])
def test_a_checkpoint_is_gone_on_from(rule: str, precision: str, tmp_path: Path) -> None:
    whole = Engine(build(llama), RULES[rule], placed("nvme", tmp_path), precision=precision)
    for seed in range(2):
        whole.step(tokens(seed))
    whole.save_checkpoint(tmp_path / "saved")
    resumed = Engine(build(llama, seed=9), RULES[rule], precision=precision)
    resumed.load_checkpoint(tmp_path / "saved")
    for seed in range(2, 4):
        assert whole.step(tokens(seed)).loss.item() == resumed.step(tokens(seed)).loss.item()
    assert_same(weights(resumed), weights(whole))
    whole.close()


@LEDGER
def test_what_is_kept_is_planned_to_the_byte() -> None:
    """Adafactor's factors on the host, Muon's workspace on the device: one byte less is refused, before anything."""
    for rule, key, tier in ((RULES["adafactor"], "host_memory", "cpu"), (RULES["muon"], "device_memory", "device")):
        places = {"parameters": "cpu", "optimizer": "cpu"}
        engine = Engine(build(llama), rule, Placement(**places))
        needed = sum(size for where, _, size in engine.allocations if where == tier)
        Engine(build(llama), rule, Placement(**places, **{key: needed})).close()
        with pytest.raises(DoesNotFitError, match="row var|update workspace"):
            Engine(build(llama), rule, Placement(**places, **{key: needed - 1}))
    infos = parts_of(engine).infos
    largest = max(RULES["muon"].workspace_bytes(info.shape) for info in infos if info.rule == 0)
    assert ("device", "update workspace", largest) in engine.allocations


# -- over ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [pytest.param(name, marks=[] if name == "muon" else pytest.mark.slow) for name in RULES]
)
def test_ranks_share_parameters_out_whole(rule: str, tmp_path: Path) -> None:
    """At every tier, and at every stage that cuts, the same bits on both ranks. Near those of stage 0, where what each
    rank sums up begins and ends elsewhere, and of one process.
    """
    common = {"case": "plain", "rows": (2, 2), "num_steps": 3, "optimizer": RULES[rule], "folder": str(tmp_path)}
    runs = [
        common | {"zero_stage": stage, "placement": placement, "max_grad_norm": 0.2}
        for stage, placement in ((0, {}), (0, PLACES["nvme"]), (1, PLACES["nvme"]), (2, {}), (3, {}))
    ]
    first, second = run(2, trained, runs=runs)
    for begin, end in ((0, 2), (2, 5)):
        for found in (*first[begin:end], *second[begin:end]):
            assert found.results == first[begin].results
            assert_same(found.weights, first[begin].weights)
    case = CASES["plain"]
    reference = Reference(build(case.make), RULES[rule], max_grad_norm=0.2)
    for number in range(3):
        torch.manual_seed(number)
        reference.step(case.batch(number, 4))
    for found in (first[0], first[2]):
        assert_same(found.weights, reference.masters, within=2e-2 if rule == "muon" else 1e-5)


@pytest.mark.parametrize("rule", quick(["adafactor", "muon"], ["muon"]))
def test_ranks_go_on_from_what_others_have_saved(rule: str, tmp_path: Path) -> None:
    arguments = {"path": str(tmp_path / "saved"), "rule": RULES[rule]}
    wanted, _ = run(2, matrix_jobs.saved, zero_stage=3, **arguments)
    for stage in (0, 2):
        for found in run(2, matrix_jobs.loaded, zero_stage=stage, **arguments):
            assert_same(found, wanted)
    alone = Engine(build(CASES["plain"].make), RULES[rule])
    alone.load_checkpoint(tmp_path / "saved")
    alone.step(tokens(2))
    assert_same(weights(alone), wanted, within=2e-2 if rule == "muon" else 1e-5)


def test_ranges_that_would_be_mostly_padding_are_refused() -> None:
    for told in run(3, matrix_jobs.refused):
        assert "needs a matrix as a whole" in told
        assert "--offload.zero_stage 0" in told
        assert "--optimizer.groups" in told


# -- another rule's checkpoint -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("place", [pytest.param(p, marks=[] if p == "nvme" else pytest.mark.slow) for p in PLACES])
def test_another_rules_states_are_refused_or_begin_anew(place: str, tmp_path: Path) -> None:
    """With reset: as if an engine were made of those weights, whatever this one had trained before."""
    first = Engine(build(llama), AdamW(lr=0.01))
    for seed in range(2):
        first.step(tokens(seed))
    first.save_checkpoint(tmp_path / "saved", {"step": 2})
    for rule in RULES.values():
        engine = Engine(build(llama, seed=3), rule, placed(place, tmp_path))
        engine.step(tokens(8))
        told = rf"saved holds the states of AdamW, with .*exp_avg.*, and the model.*{type(rule).__name__}.*"
        with pytest.raises(ConfigError, match=told + r"--optimizer\.name.*--optimizer\.reset.*reset=True"):
            engine.load_checkpoint(tmp_path / "saved")
        with pytest.warns(UserWarning, match="another update rule"):
            assert engine.load_checkpoint(tmp_path / "saved", reset=True) == {"step": 2}
        assert_same(weights(engine), weights(first))
        other = build(llama)
        with torch.no_grad():
            for (_, p), value in zip(other.named_parameters(), weights(first).values(), strict=True):
                p.copy_(value)
        anew = Engine(other, rule, placed(place, tmp_path))
        for seed in range(2):
            assert engine.step(tokens(seed)).loss.item() == anew.step(tokens(seed)).loss.item()
        assert_same(weights(engine), weights(anew))
        engine.close()


def test_reset_changes_nothing_where_the_rule_is_the_same(tmp_path: Path) -> None:
    whole = Engine(build(llama), RULES["adafactor"])
    whole.step(tokens(0))
    whole.save_checkpoint(tmp_path / "saved")
    resumed = Engine(build(llama, seed=9), RULES["adafactor"])
    resumed.load_checkpoint(tmp_path / "saved", reset=True)
    for engine in (whole, resumed):
        engine.step(tokens(1))
    assert_same(weights(resumed), weights(whole))


def test_another_models_checkpoint_is_refused_with_reset_too(tmp_path: Path) -> None:
    engine = Engine(build(llama), AdamW())
    engine.save_checkpoint(tmp_path / "saved")
    other = Engine(build(lambda: llama(intermediate_size=64)), Adafactor())
    with pytest.raises(ConfigError, match="does not fit the model"):
        other.load_checkpoint(tmp_path / "saved", reset=True)
