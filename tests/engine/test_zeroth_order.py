"""Training without backward, compared with MeZO in plain PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import AdamW, Engine, MeZO, Muon, Placement, Settings
from offload.errors import ConfigError, NonFiniteError
from offload.lanes.ticket import Ticket
from offload.native import kernels
from tests.cases.models import batches, build, gpt2, llama, tokens
from tests.engine.compare import assert_same, weights
from tests.engine.device import own_device
from tests.engine.handmade import Log
from tests.engine.inside import parts_of, steps_of
from tests.engine.zeroth_order import PlainMeZO
from tests.matrix import quick

RULE = MeZO(lr=1e-3, eps=1e-2, weight_decay=0.1)
ALONE = replace(RULE, master="bf16")


def train_both(
    model: nn.Module,
    rule: MeZO = RULE,
    *,
    num_steps: int = 3,
    precision: str = "fp32",
    kept: Callable[[str], bool] = lambda name: False,
    **settings: Any,
) -> Engine:
    """Train both. Losses and weights are bit-equal after every step."""
    plain = PlainMeZO(model, rule, precision, kept)
    engine = Engine(model, rule, precision=precision, head_chunk_bytes=None, **settings)
    for number, batch in enumerate(batches(num_steps)):
        torch.manual_seed(number)
        wanted = plain.step(batch)
        torch.manual_seed(number)
        result = engine.step(batch)
        assert result.measured is not None
        assert list(result.measured.losses) == wanted, f"step {number}"
        assert_same(weights(engine), plain.masters, when=f"after step {number}")
    return engine


def of(width: str, rule: MeZO = RULE) -> dict[str, Any]:
    """Return rule and precision for a width: "fp32", "bf16" (fp32 masters) or "alone" (bf16 masters)."""
    if width == "alone":
        return {"rule": replace(rule, master="bf16"), "precision": "bf16"}
    return {"rule": rule, "precision": width}


class Squares(nn.Module):
    """The sum of the squared results of all blocks but one. With linear blocks the central difference equals the
    directional derivative, except for rounding.
    """

    def __init__(self, block: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, skip: int = -1) -> torch.Tensor:
        return torch.stack([block(x).square().sum() for n, block in enumerate(self.blocks) if n != skip]).sum()


def make_model(num_layers: int = 4) -> nn.Module:
    return build(lambda: llama(num_hidden_layers=num_layers))


PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"placement": Placement(parameters="cpu", optimizer="cpu")},
    "lanes": {"debug": 3, "placement": Placement(parameters="cpu", optimizer="cpu")},
    "stays": {"placement": Placement(parameters="device", optimizer="cpu")},
    "leftover": {"debug": 5, "placement": Placement(parameters="cpu", optimizer="cpu", device_memory="4MiB")},
    "throttled": {"throttle": {"h2d": "200MiB", "update": "400MiB"}, "placement": Placement(parameters="cpu")},
}


def pair(place: str, width: str, rule: MeZO = RULE, update: str = "auto") -> tuple[Engine, Engine]:
    """Return two engines: one with updates in slots, and one with updates on the host."""
    slots, host = (
        Engine(make_model(), optimizer=how.pop("rule"), **how, update=where, **PLACES[place])
        for where in (update, "cpu")
        for how in [of(width, rule)]
    )
    return slots, host


@pytest.mark.parametrize(
    ("how", "width"),
    [
        ({"magnitude_quantile": 0.3, "num_perturbations": 2}, "bf16"),
        pytest.param({"num_perturbations": 3}, "fp32", marks=pytest.mark.slow),
        pytest.param({"magnitude_quantile": 0.3}, "alone", marks=pytest.mark.slow),
    ],
)
def test_directions_and_quantiles(how: dict[str, Any], width: str) -> None:
    train_both(make_model(2), **of(width, replace(RULE, **how)), **PLACES["cpu"]).close()


def moved(engine: Engine, before: dict[str, torch.Tensor]) -> set[str]:
    """Return the names of the changed parameters."""
    return {name for name, value in weights(engine).items() if not torch.equal(value, before[name])}


def test_a_fraction_of_the_layers_takes_part() -> None:
    """Parameters outside blocks always participate. Half of the blocks do, different ones in each step."""
    rule = replace(RULE, layer_fraction=0.5, weight_decay=0.0)
    engine, plain = Engine(make_model(), rule, **PLACES["cpu"]), PlainMeZO(make_model(), rule)
    plain.masters = weights(engine)
    seen = set()
    for batch in batches(3):
        before = weights(engine)
        engine.step(batch)
        names = moved(engine, before)
        blocks = frozenset(int(name.split(".")[2]) for name in names if ".layers." in name)
        assert len(blocks) == 2
        assert names == {n for n in before if ".layers." not in n or int(n.split(".")[2]) in blocks}
        plain.step(batch, taking=names.__contains__)
        assert_same(weights(engine), plain.masters)
        seen.add(blocks)
    assert len(seen) > 1
    engine.close()


@pytest.mark.usefixtures("nothing_left_over")
@pytest.mark.parametrize(
    ("place", "width"), quick([("cpu", "bf16"), ("lanes", "alone"), ("throttled", "fp32")], [("cpu", "bf16")])
)
def test_updates_in_slots_have_the_bits_of_those_on_the_host(place: str, width: str) -> None:
    """Each weight is copied to the device once a step with the update data, and back once if the block participates."""
    slots, host = pair(place, width, replace(RULE, layer_fraction=0.5, magnitude_quantile=0.7))
    regions, resident = parts_of(slots).regions, parts_of(slots).slots.is_resident
    down_bytes = 0
    for number, batch in enumerate(batches(4)):
        assert slots.step(batch).measured == host.step(batch).measured
        if place != "cpu":
            continue
        touched = steps_of(slots).method.descent.touched(number + 1, 0)
        assert slots.counters.d2h_bytes == down_bytes
        assert host.counters.d2h_bytes == 0
        up_bytes = sum(region.weight_bytes for region in regions)
        assert host.counters.h2d_bytes == up_bytes
        co_fetched = down_bytes // 2 if width == "bf16" else 0
        assert slots.counters.h2d_bytes == up_bytes + co_fetched
        down_bytes = sum(
            (2 if width == "alone" else 4) * r.numel for r in regions if r.index in touched and not resident(r)
        )
    slots.evaluate(tokens(9))
    assert_same(weights(slots), weights(host))
    slots.close()
    host.close()


@pytest.mark.parametrize(
    "look", quick(["evaluate", "forward", "state_dict", "checkpoint", "restore"], ["evaluate", "checkpoint"])
)
def test_who_looks_sees_updates_that_were_put_off(look: str, tmp_path: Path) -> None:
    slots, host = pair("cpu", "fp32", update="device")
    for batch in batches(2):
        slots.step(batch)
        host.step(batch)
    assert steps_of(slots).method._pending._updates
    if look == "evaluate":
        assert slots.evaluate(tokens(9)) == host.evaluate(tokens(9))
    elif look == "forward":
        with torch.no_grad():
            assert slots.model(**tokens(9)).loss == host.model(**tokens(9)).loss
    elif look == "checkpoint":
        slots.save_checkpoint(tmp_path / "saved")
        slots.step(tokens(3))
        slots.load_checkpoint(tmp_path / "saved")
        assert_same(weights(slots), weights(host))
    else:
        wanted, model = weights(host), slots.model
        if look == "restore":
            slots.close(restore=True)
        found = {name: value for name, value in model.state_dict().items() if name in wanted}
        assert_same(found, wanted)
    slots.close()
    host.close()


def test_there_are_no_gradients_and_no_moments() -> None:
    engine = Engine(make_model(), RULE, **PLACES["cpu"], precision="bf16")
    engine.step(tokens())
    assert {name for tier, name, _ in engine.allocations if tier == "cpu"} == {"weights", "low"}
    wanted = {"unit slot", "resident weights", "perturbed weights"}
    assert {name.split(" (")[0] for tier, name, _ in engine.allocations if tier == "device"} == wanted
    engine.close()


# -- weights in bf16 alone ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_in_bf16_alone_take_two_bytes_a_parameter(tmp_path: Path) -> None:
    """On the host, on disk and in a checkpoint. With fp32 masters the host holds four."""
    for place, names in (("cpu", ("weights", "low")), ("cpu", ("weights",)), ("nvme", ("weights",))):
        rule = RULE if len(names) > 1 else ALONE
        with Engine(make_model(), rule, Placement(place, place, nvme_dir=tmp_path), precision="bf16") as engine:
            engine.step(tokens())
            parts = parts_of(engine)
            regions = [r for r in parts.regions if place == "cpu" or parts.store.states[r].tiles]
            wanted = dict.fromkeys(names, 2 * sum(region.numel for region in regions))
            assert {name: size for tier, name, size in engine.allocations if tier == place} == wanted
            engine.save_checkpoint(tmp_path / "saved")
            num_elements = sum(value.numel() for value in weights(engine).values())
    written = sum(file.stat().st_size for file in (tmp_path / "saved").glob("*.bin"))
    assert 2 * num_elements <= written < 2.1 * num_elements + 8192


def test_what_is_frozen_keeps_every_bit() -> None:
    """Weights frozen at the start keep more than bf16 precision. Later freezing keeps every bit as well."""
    model = make_model()
    model.lm_head.requires_grad_(False)
    wanted = model.lm_head.weight.detach().clone()
    engine = Engine(model, ALONE, precision="bf16", **PLACES["cpu"])
    engine.step(tokens())
    engine.model.model.layers[1].requires_grad_(False)
    before = weights(engine)
    engine.step(tokens(1))
    names = moved(engine, before)
    assert names
    assert not [name for name in names if "layers.1." in name or "lm_head" in name]
    assert torch.equal(weights(engine)["lm_head.weight"], wanted)
    engine.close()


@pytest.mark.parametrize("quantile", [1.0, 0.5])
def test_a_replay_knows_what_no_pass_used_and_what_was_frozen(quantile: float) -> None:
    """Unused weights move like used ones, in slots and on the host. Frozen weights do not move."""
    rule, records = replace(RULE, magnitude_quantile=quantile), []
    engine, again = (Engine(build(Squares), rule, **PLACES["cpu"]) for _ in range(2))
    plain = PlainMeZO(build(Squares), rule)
    for skip, frozen in ((-1, ()), (1, ()), (1, ("blocks.0.bias", "blocks.1.weight")), (2, ())):
        for name, parameter in engine.model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        records.append(engine.step({"x": torch.ones(4, 16), "skip": skip}).measured)
        assert records[-1].frozen == frozen
        inputs = torch.ones(4, 16, device=own_device())
        taking = {name for name in plain.masters if name not in frozen}.__contains__
        assert plain.measure(lambda n=skip, x=inputs: float(plain.model(x, n)), taking) == list(records[-1].losses)
        plain.move(records[-1].slopes, taking)
    first, second, third, last = records
    again.replay([first])
    again.replay([(2, second.seed, second.slopes, second.lr), {"step": 3, **third.fields()}, last])
    for each in (engine, again):
        assert_same(weights(each), plain.masters)
    with pytest.raises(ConfigError, match="4 steps are done"):
        again.replay([first])
    for wrong in (None, last._replace(slopes=(float("nan"),)), last._replace(lr=float("inf")), (5, 0, (1e400,))):
        with pytest.raises(ConfigError, match="the record is"):
            again.replay([wrong])
    with pytest.raises(ConfigError, match="step 5 is next"):
        again.replay([last._replace(step=6)])
    again.replay([(5, 0, ()), {"step": 6, "loss": float("nan")}])  # skipped
    assert again.num_steps == 6
    assert_same(weights(again), plain.masters)
    marks = {again.weights_mark()}
    again.replay([last._replace(step=7)])
    assert again.weights_mark() not in marks


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* the optimizer states are reset")
@pytest.mark.parametrize("masters", [("bf16", "fp32"), ("fp32", "bf16")], ids=" to ".join)
def test_a_run_goes_on_with_the_other_master_where_it_is_reset(masters: tuple[str, str], tmp_path: Path) -> None:
    """From bf16 masters no bit changes. To bf16 masters the weights are those used in compute."""
    engines = [Engine(make_model(), replace(RULE, master=master), precision="bf16") for master in masters]
    for batch in batches(2):
        engines[0].step(batch)
    engines[0].save_checkpoint(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"weights in bf16 alone.*optimizer\.reset"):
        engines[1].load_checkpoint(tmp_path / "saved")
    engines[1].load_checkpoint(tmp_path / "saved", reset=True)
    wanted = weights(engines[0])
    if masters[0] == "fp32":
        wanted = {name: kernels.split(value)[0].float() for name, value in wanted.items()}
    assert_same(weights(engines[1]), wanted)
    assert engines[1].num_steps == 2
    engines[1].step(tokens(2))
    for engine in engines:
        engine.close()


# -- the loss ----------------------------------------------------------------------------------------------


def test_the_estimate_is_the_directional_derivative() -> None:
    model, x = build(Squares), torch.randn(4, 16)
    plain = PlainMeZO(model, MeZO())
    plain.num_steps = 1
    loss = plain.model(x.to(own_device()))
    loss.backward()
    wanted = sum(float((p.grad.cpu() * plain.direction(name, 0)).sum()) for name, p in plain.model.named_parameters())
    engine = Engine(model, MeZO(eps=1e-2), **PLACES["cpu"])
    result = engine.step({"x": x})
    assert result.measured is not None
    assert result.measured.slopes[0] == pytest.approx(wanted, rel=1e-3)
    assert result.grad_norm == abs(result.measured.slopes[0])
    engine.close()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](torch.tanh(self.blocks[0](x.to(self.blocks[0].weight.dtype))))


def points(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 8, generator=generator)
    return {"x": x, "labels": (x[:, 0] > x[:, 1]).long()}


def test_a_number_of_python_is_a_loss_where_no_gradient_is_needed() -> None:
    """The loss has the bits of the tensor, whole or in micro-batches. With gradients a number is refused."""

    def tensor(outputs: torch.Tensor, _batch: Any) -> Any:
        return outputs.float().square().mean()

    def number(outputs: torch.Tensor, _batch: Any) -> Any:
        return tensor(outputs, _batch).item()

    for micro_batch_size in (None, 16):
        found = []
        for loss_fn in (tensor, number):
            engine = Engine(Classifier(), RULE, micro_batch_size=micro_batch_size)
            found.append((engine.evaluate(points(0), loss_fn), engine.step(points(0), loss_fn).measured))
            engine.close()
        assert found[0] == found[1]
    engine = Engine(Classifier(), AdamW())
    for refuses in (engine.evaluate, engine.step):
        with pytest.raises(ConfigError, match="loss_fn returned a float; it must return a 0-dim tensor"):
            refuses(points(0), number)
    with pytest.raises(ConfigError, match="loss_fn returned a bool"):
        Engine(Classifier(), RULE).step(points(0), lambda outputs, batch: True)
    engine.close()


# -- errors and interrupts ---------------------------------------------------------------------------------


def test_loops_with_gradients_are_refused() -> None:
    engine = Engine(make_model(2), RULE)
    forward, backward = partial(engine.model, **tokens()), partial(engine.backward, torch.zeros(()))
    for call in (forward, backward, engine.update, engine.grad_norm):
        with pytest.raises(ConfigError, match=r"engine\.step"):
            call()
    with torch.no_grad():
        engine.model(**tokens())
    engine.step(tokens())
    engine.close()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"clip": "speculative"}, "MeZO cannot be corrected"),
        ({"optimizer": {"eps": 0.0}}, "optimizer.eps"),
        ({"optimizer": {"eps": 1e-13}}, "optimizer.eps is 1e-13; .* at least 1e-12"),
        ({"optimizer": {"eps": True}}, "optimizer.eps is True"),
        ({"optimizer": {"layer_fraction": 0.0}}, "layer_fraction"),
        ({"optimizer": {"layer_fraction": True}}, "layer_fraction is True"),
        ({"optimizer": {"magnitude_quantile": 2}}, "magnitude_quantile"),
        ({"optimizer": {"num_perturbations": 0}}, "num_perturbations"),
        ({"optimizer": {"master": "fp16"}}, "optimizer.master is 'fp16'"),
        ({"optimizer": {"groups": [("norm", {"rule": AdamW()})]}}, "another rule"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Settings(**{**settings, "optimizer": MeZO(**settings.get("optimizer", {}))})


def test_a_rule_with_gradients_has_no_part_without() -> None:
    with pytest.raises(ConfigError, match=r"groups\['norm'\]: rule is MeZO, .* but AdamW needs gradients"):
        AdamW(groups=[("norm", {"rule": MeZO()})])
    with pytest.raises(ConfigError, match="Muon's rest is MeZO"):
        Muon(rest=MeZO())


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_loss_that_is_not_finite(on_nonfinite: str) -> None:
    engine = Engine(Classifier(), RULE, on_nonfinite=on_nonfinite)
    before, good = weights(engine), points(0)
    bad = {**good, "x": good["x"] / 0}
    if on_nonfinite == "stop":
        with pytest.raises(NonFiniteError, match=r"losses of step 1"):
            engine.step(bad, lambda outputs, batch: outputs.sum())
    else:
        result = engine.step(bad, lambda outputs, batch: outputs.sum())
        assert result.skipped
        assert result.measured is None
    assert_same(weights(engine), before)
    assert engine.step(good, lambda outputs, batch: outputs.square().sum()).measured is not None
    engine.close()


class Told(Exception):
    """Raised on purpose."""


class Breaks(nn.Linear):
    """Raises in the call with the number in `left`."""

    left = Log()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.left:
            self.left.append(self.left.pop() - 1)
            if not self.left[0]:
                raise Told
        return torch.tanh(super().forward(x))


def stepped(make: Callable[[], nn.Module], place: str, batch: Any) -> tuple[Engine, Engine]:
    """Return two engines after a step each."""
    engines = [Engine(build(make), RULE, **PLACES[place]) for _ in range(2)]
    for each in engines:
        each.step(batch)
    return engines[0], engines[1]


def test_an_update_that_was_put_off_is_made_once_where_a_read_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, twin = stepped(llama, "cpu", tokens())
    start = parts_of(engine).updates.start

    def interrupted() -> None:
        start()
        raise KeyboardInterrupt

    monkeypatch.setattr(parts_of(engine).updates, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.evaluate(tokens(2))
    monkeypatch.setattr(parts_of(engine).updates, "start", start)
    assert_same(weights(engine), weights(twin))
    engine.close()
    twin.close()


@pytest.mark.parametrize("call", [1, 2])
def test_a_pass_that_fails_ends_both_and_leaves_no_trace(call: int) -> None:
    threads = set(threading.enumerate())
    engine, twin = stepped(lambda: Squares(Breaks), "lanes", batch := {"x": torch.randn(4, 16)})
    engine.model.blocks[1].left.append(call)
    generator = torch.get_rng_state()
    with pytest.raises(Told):
        engine.step(batch)
    assert torch.equal(torch.get_rng_state(), generator)
    for _ in range(2):
        assert engine.step(batch).measured == twin.step(batch).measured
    assert_same(weights(engine), weights(twin))
    engine.close()
    twin.close()
    assert set(threading.enumerate()) <= threads


# -- resume and replay -------------------------------------------------------------------------------------


# -- races -------------------------------------------------------------------------------------------------


def test_an_update_in_a_kept_slot_waits_for_what_goes_down_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2()
    num_bytes = 4 * sum(parameter.numel() for parameter in model.transformer.h[0].parameters())
    throttle = {"d2h": num_bytes / 0.05}
    where = Placement(parameters="device", optimizer="cpu")
    with Engine(model, RULE, update="device", throttle=throttle, placement=where) as engine:
        lanes, waits = parts_of(engine).lanes, list[str]()
        compute_after = lanes.compute_after

        def noted(tickets: Sequence[Ticket], **how: Any) -> None:
            waits.extend(ticket.lane for ticket in tickets)
            compute_after(tickets, **how)

        monkeypatch.setattr(lanes, "compute_after", noted)
        for batch in batches(4):
            engine.step(batch)
        assert "d2h" in waits
