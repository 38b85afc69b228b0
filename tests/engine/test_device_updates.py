"""Device updates of states stored on the host or on disk: the same bits and errors as updates on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import AdamW, Engine, Lion, Muon, Placement
from offload.engine.gradients.policies import RunningNorm
from offload.errors import ConfigError, DoesNotFitError, NonFiniteError, TornError
from offload.layout.residence import DEVICE
from offload.planning import device_updates, disk
from offload.planning.device_updates import UPDATE_RING
from tests.cases.models import build, llama, tokens
from tests.engine.compare import assert_same, weights
from tests.engine.device import TWO_KERNELS
from tests.engine.inside import parts_of, states
from tests.engine.sizes import elements, tier_bytes
from tests.engine.test_rules import Blocks
from tests.matrix import quick

CLIPS: dict[str, dict[str, Any]] = {
    "none": {"max_grad_norm": None},
    "deferred": {"max_grad_norm": 0.2, "clip": "deferred"},
    "speculative": {"max_grad_norm": 0.2, "clip": "speculative"},
    "skip": {"on_nonfinite": "skip"},
}
RULES = {
    "AdamW": AdamW(),
    "Lion": Lion(),
    "Blocks": Blocks(),
    "int8 moments": AdamW(states="int8"),
    "bf16 moments": AdamW(states="bf16"),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even tiny regions use each ring slot several times."""
    for module in (disk, device_updates):
        monkeypatch.setattr(module, "_LARGEST_TILE", 2048)


def train(engine: Engine, num_steps: int = 4) -> tuple[list[Any], dict[str, torch.Tensor], dict[str, str]]:
    """Return (results per step as text, weights, states as text).

    Step 3 has an infinite loss if the engine skips non-finite steps.
    """
    found = []
    for seed in range(num_steps):
        spikes = seed == 3 and parts_of(engine).updates._skips
        loss_fn = (lambda outputs, batch: outputs.loss * float("inf")) if spikes else None
        result = engine.step(tokens(seed), loss_fn=loss_fn)
        found.append((result.loss.item(), result.grad_norm, result.skipped, result.corrected))
    assert all(corrected for *_, corrected in found) or engine.clip != "speculative"
    return [str(step) for step in found], weights(engine), {name: str(state) for name, state in states(engine).items()}


# -- states on the device -----------------------------------------------------------------------------------


def deep() -> nn.Module:
    return llama(num_hidden_layers=6)


# -- host and device updates in one step ---------------------------------------------------------------------

SOME = {"fp32": "300KiB", "bf16": "280KiB"}
"""Device memory for the optimizer states of some layers only."""
BELOW: dict[str, dict[str, str]] = {
    "cpu": {},
    "weights stay": {"parameters": "device"},
    "nvme": {"parameters": "nvme", "gradients": "nvme", "host_memory": "220KiB"},
}


def shared(
    place: str, folder: Path, precision: str = "fp32", memory: str | None = None, **budgets: str
) -> dict[str, Any]:
    """Return settings under which device and host each update part of the regions."""
    on_disk = {"nvme_dir": str(folder), **budgets} if place == "nvme" else {}
    places = {"parameters": "cpu", "optimizer": "auto", "optimizer_memory": memory or SOME[precision]}
    return {"placement": Placement(**places | BELOW[place] | on_disk), "update": "both"}


def assert_shared(engine: Engine) -> None:
    """Assert that the device updates some regions, with all states there, and the host the others."""
    residence, trained_ones = parts_of(engine).plan.residence, [r for r in parts_of(engine).regions if r.trainable]
    assert engine.updates_on == "both"
    assert residence.updated_on_device == residence.indices_on(DEVICE)
    assert 0 < len(residence.updated_on_device) < len(trained_ones)
    kept = sum(p.num_bytes(r.numel) for r in trained_ones for p in r.states if residence.tier(r, p) == DEVICE)
    moments = {plane.label for region in trained_ones for plane in region.states if plane.state == "optimizer"}
    assert kept == sum(size for label, size in tier_bytes(engine, "device").items() if label in moments)


@TWO_KERNELS
@pytest.mark.parametrize(
    ("place", "clip", "precision", "rule", "debug"),
    quick(
        [
            ("cpu", "speculative", "fp32", "AdamW", 1),
            ("weights stay", "none", "bf16", "int8 moments", False),
            ("nvme", "deferred", "bf16", "Lion", 1),
            ("cpu", "skip", "fp32", "Blocks", False),
            ("nvme", "skip", "fp32", "bf16 moments", False),
        ],
        [("nvme", "deferred", "bf16", "Lion", 1)],
    ),
)
def test_both_places_in_one_step_change_no_bit(
    place: str, clip: str, precision: str, rule: str, debug: Any, tmp_path: Path
) -> None:
    settings = {"precision": precision, "optimizer": RULES[rule], "debug": debug} | CLIPS[clip]
    small = {"int8 moments": "80KiB", "bf16 moments": "150KiB", "Lion": "150KiB", "Blocks": "20KiB"}.get(rule)
    with Engine(build(deep), **shared(place, tmp_path, precision, small), **settings) as engine:
        assert_shared(engine)
        assert bool(tier_bytes(engine, "nvme")) == (place == "nvme")
        steps, found, marks = train(engine)
    host = {"precision": precision, "optimizer": RULES[rule], "update": "cpu"} | CLIPS[clip]
    with Engine(build(deep), **host) as engine:
        wanted_steps, wanted, wanted_marks = train(engine)
    assert steps == wanted_steps
    assert_same(found, wanted)
    assert marks == wanted_marks


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_the_norm_so_far_does_not_depend_on_which_place_is_late(order: list[int]) -> None:
    """Speculative clipping uses the gradients that arrived earlier, in any order of requests."""
    with Engine(build(deep)) as engine:
        measures, regions = parts_of(engine).gradients.measures, parts_of(engine).regions[4:0:-1]
        for piece in (piece for region in regions for piece in region.pieces):
            measures.squares[piece] = 1.1**piece.parameter / 3
        so_far, wanted, total = RunningNorm(measures), [], 0.0
        for number, region in enumerate(regions):
            assert so_far.append(region) == number
            total += sum(measures.squares[piece] for piece in region.pieces)
            wanted.append(total)
        measures.begin_step()  # next step begins before a lane has finished this one
        found = {number: so_far.total(number) for number in order}
        assert [found[number] for number in range(4)] == wanted


AUTO = Placement("cpu", "auto", optimizer_memory="100KiB")


@pytest.mark.parametrize(
    ("rule", "place", "update", "said"),
    [
        (AdamW(), None, "both", r"update is both, but with offload.optimizer cpu.*--offload.optimizer auto"),
        (Muon(), AUTO, "both", r"update is both, but Muon updates .* --offload.update cpu or auto"),
        (Muon(), None, "device", r"update is device, but Muon updates .* --offload.update cpu or auto"),
        (AdamW(), None, "gpu", r"offload.update is 'gpu'; this version allows auto, cpu, device"),
    ],
)
def test_what_cannot_be_updated_there_is_refused(rule: Any, place: Any, update: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Engine(build(llama), rule, place, update=update)


@pytest.mark.parametrize(
    ("rule", "place", "update", "resolved"),
    [
        (AdamW(), Placement("cpu", "auto", optimizer_memory=0), "both", "cpu"),
        (AdamW(), Placement(optimizer="cpu"), "auto", "cpu"),
        (AdamW(), Placement("device", "device"), "device", "device"),
        (Muon(), Placement("device", "device"), "auto", "cpu"),
    ],
)
def test_where_updates_run_is_resolved(rule: Any, place: Placement, update: str, resolved: str) -> None:
    """States on the device need no ring. A resolved place is taken again, also by a rule bound to the host."""
    for told in (update, resolved):
        with Engine(build(llama), rule, place, update=told) as engine:
            assert (engine.updates_on, ring_bytes(engine)) == (resolved, 0)
            assert bool(engine.told_updates) == (resolved == "device")


def test_what_is_updated_where_is_told() -> None:
    with Engine(build(deep), **shared("cpu", Path())) as engine:
        count, kept = len(parts_of(engine).plan.residence.updated_on_device), tier_bytes(engine, "device")
        assert f"updates of {count} of 9 regions on the device, with" in engine.told_updates
        assert sum(kept[name] for name in ("exp avg", "exp avg sq")) <= 300 << 10
        residence = parts_of(engine).plan.residence
        for region in parts_of(engine).regions:
            names = [parts_of(engine).infos[index].name for index in region.parameters]
            where = engine.device if region.index in residence.updated_on_device else torch.device("cpu")
            assert {engine.update_devices[name] for name in names} == {where}


# -- the plan ------------------------------------------------------------------------------------------------


def ring_bytes(engine: Engine) -> int:
    return tier_bytes(engine, "device").get(UPDATE_RING, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "bytes_an_element"), [("fp32", 16), ("bf16", 14)])
def test_states_pass_through_a_ring_of_four_tiles(precision: str, bytes_an_element: int) -> None:
    model = build(llama)
    total = sum(elements(unit) for unit in (model.model.embed_tokens, model.model.norm, model.lm_head))
    total += sum(elements(layer) for layer in model.model.layers)
    moved = {}
    for update in ("cpu", "device"):
        with Engine(build(llama), precision=precision, update=update, prefetch=0) as engine:
            assert engine.updates_on == update
            assert ring_bytes(engine) == (4 * 2048 * bytes_an_element if update == "device" else 0)
            assert tier_bytes(engine, "cpu")["gradients"] > 0, "and nothing else is kept otherwise"
            train(engine, 2)
            moved[update] = engine.counters.h2d_bytes, engine.counters.d2h_bytes
    assert moved["device"][0] - moved["cpu"][0] == bytes_an_element * total
    assert moved["device"][1] - moved["cpu"][1] == 12 * total


def test_a_budget_without_room_for_the_ring_is_refused_with_numbers() -> None:
    with Engine(build(llama), update="device") as engine:
        needed = sum(tier_bytes(engine, "device").values())
        ring = ring_bytes(engine)
    with pytest.raises(DoesNotFitError, match=rf"update ring .*\({ring}\).*--offload.update cpu"):
        Engine(build(llama), update="device", placement=Placement(optimizer="cpu", device_memory=ring - 1))
    with Engine(build(llama), update="device", placement=Placement(optimizer="cpu", device_memory=needed)) as engine:
        assert ring_bytes(engine) == ring
    Engine(build(llama), update="cpu", placement=Placement(optimizer="cpu", device_memory=needed - ring)).close()


# -- failures ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_that_are_not_finite_are_refused_by_unit() -> None:
    engine = Engine(build(llama), update="device", optimizer=AdamW(lr=3e38), debug=1, **CLIPS["deferred"])

    def step_and_settle() -> None:
        engine.step(tokens(0))
        engine.finish()
        weights(engine)

    with pytest.raises((NonFiniteError, TornError), match="weights of unit .* are not finite"):
        step_and_settle()
    with pytest.raises(TornError, match="weights of unit .* are not finite"):
        weights(engine)
    engine.close()
