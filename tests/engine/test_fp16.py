"""Training in fp16 with a loss scale: as plain PyTorch with fp32 masters and the rule of `torch.amp.GradScaler`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload import LOMO, SGD, Adafactor, AdamW, Engine, Lion, MeZO, Muon, Placement
from offload.distributed.joining import open_comm
from offload.engine.gradients import loss_scale
from offload.engine.gradients.loss_scale import DynamicScale
from offload.errors import ConfigError, DoesNotFitError, NonFiniteError
from offload.optim.rule import UpdateRule
from tests.cases.features import CASES, PLACES
from tests.cases.models import build
from tests.cases.run import small
from tests.engine.compare import PROPORTIONAL, assert_same, assert_weights, weights
from tests.engine.device import own_device, twin
from tests.engine.handmade import WIDTH, Block, Stack, cross_entropy, words
from tests.engine.inside import parts_of, states, updating_device
from tests.engine.ranks import run
from tests.engine.reference import Reference
from tests.engine.test_delay import Late
from tests.matrix import quick

NUM_STEPS, SPIKE = 12, 2
"""Steps of a run, and the number of the one with gradients that are not finite."""
RULE = AdamW(lr=1e-2, weight_decay=0.1)


class Spiking:
    """Loss that is a million times as large in one step: its gradients are infinite in fp16, and the loss is not."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        return cross_entropy(outputs, batch) * (1e6 if self.step == SPIKE else 1.0)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale grows after two finite steps: a run meets its largest value by itself."""
    monkeypatch.setattr(loss_scale, "INTERVAL", 2)
    monkeypatch.setattr(Reference, "growth_interval", 2)


def steps_of(engine: Engine, numbers: range = range(NUM_STEPS)) -> Iterator[tuple[Any, ...]]:
    """Yield (loss, norm, scale, skipped) for each step; norm -1: not finite."""
    loss_fn = Spiking()
    for number in numbers:
        loss_fn.step = number
        result = engine.step(words(number), loss_fn=loss_fn)
        norm = result.grad_norm if math.isfinite(result.grad_norm) else -1.0
        yield result.loss.item(), norm, result.loss_scale, result.skipped


def of_plain_pytorch(reference: Reference) -> Iterator[tuple[Any, ...]]:
    loss_fn = Spiking()
    for number in range(NUM_STEPS):
        loss_fn.step = number
        scale = float(reference.scale)
        loss, norm = reference.step(words(number), loss_fn)
        yield loss.item(), norm if math.isfinite(norm) else -1.0, scale, number in reference.skipped


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    ("place", "clip"),
    quick(
        [("cpu", 1.0), ("cpu", None), ("device", 0.05), ("nvme", 0.05), ("moments on nvme", None)],
        [("cpu", None), ("nvme", 0.05)],
    ),
)
def test_losses_scales_skipped_steps_and_weights_are_those_of_plain_pytorch(
    place: str, clip: float | None, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"precision": "fp16", "max_grad_norm": clip}
    reference = Reference(build(Stack), RULE, **settings)
    placement = Placement(**PLACES[place], nvme_dir=str(tmp_path))
    scales = set()
    with Engine(build(Stack), RULE, placement, **settings) as engine:
        reference.update_on(updating_device(engine))
        for number, (found, wanted) in enumerate(zip(steps_of(engine), of_plain_pytorch(reference), strict=True)):
            assert found == wanted, number
            assert_weights(engine, reference, when=f"after step {number}")
            scales.add(found[2])
    assert SPIKE in reference.skipped
    assert len(scales) >= 3, "the scale grew and fell"


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    "rule",
    quick(
        [
            SGD(lr=0.1, momentum=0.9),
            Lion(lr=1e-3, states="int8"),
            LOMO(lr=0.1, clip_norm=0.2),
            LOMO(lr=0.1),
            Adafactor(lr=0.02),
            Muon(lr=0.02, rest=AdamW(lr=1e-2)),
        ],
        [LOMO(lr=0.1, clip_norm=0.2)],
    ),
    ids=repr,
)
@pytest.mark.parametrize("place", quick(["cpu", "device"], ["cpu"]))
def test_every_rule_is_told_gradients_without_the_scale(rule: UpdateRule, place: str) -> None:
    settings: dict[str, Any] = {"precision": "fp16", "max_grad_norm": None}
    reference = Reference(build(Stack), rule, **settings)
    with Engine(build(Stack), rule, Placement(**PLACES[place]), **settings) as engine:
        reference.update_on(updating_device(engine))
        for number, (found, wanted) in enumerate(zip(steps_of(engine), of_plain_pytorch(reference), strict=True)):
            assert found == wanted, number
            assert_weights(engine, reference, when=f"after step {number}")


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("rows", quick([1, 3], [1]))
def test_micro_batches_have_the_scales_of_the_whole_batch(rows: int) -> None:
    found = []
    for size in (None, rows):
        with Engine(build(Stack), PROPORTIONAL, precision="fp16", micro_batch_size=size) as engine:
            found.append([*steps_of(engine)])
            found.append(weights(engine))
    whole, masters, parts, others = found
    assert [step[2:] for step in parts] == [step[2:] for step in whole]
    for part, one in zip(parts, whole, strict=True):
        assert part[:2] == pytest.approx(one[:2], rel=1e-3)
    assert_same(others, masters, within=1e-2)


@pytest.mark.usefixtures("often")
def test_updates_one_step_late_have_the_bits_of_plain_pytorch() -> None:
    """A skipped step makes none late: the next one computes with the newest weights."""
    settings: dict[str, Any] = {"precision": "fp16", "max_grad_norm": 0.5}
    reference = Late(build(Stack), RULE, **settings)
    with Engine(build(Stack), RULE, Placement(**PLACES["cpu"]), delay=1, **settings) as engine:
        for number, (found, wanted) in enumerate(zip(steps_of(engine), of_plain_pytorch(reference), strict=True)):
            assert found == wanted, number
            assert_weights(engine, reference, when=f"after step {number}")
    assert SPIKE in reference.skipped


def test_a_skipped_step_moves_nothing_but_the_scale() -> None:
    with Engine(build(Stack), RULE, precision="fp16") as engine:
        list(steps_of(engine, range(SPIKE)))
        before, counts = weights(engine), {name: state.num_steps for name, state in states(engine).items()}
        ((_, norm, scale, skipped),) = steps_of(engine, range(SPIKE, SPIKE + 1))
        assert (norm, scale, skipped) == (-1.0, 2.0**16, True)
        assert_same(weights(engine), before)
        assert {name: state.num_steps for name, state in states(engine).items()} == counts
        assert parts_of(engine).updates.loss_scale.value == 2.0**15


def test_a_sum_of_finite_gradients_that_is_too_large_for_fp16_is_skipped() -> None:
    """Each row has gradients of 32768, and both together of 65536, which is infinite in fp16."""

    def mean_of_rows(outputs: Tensor, batch: Any) -> Tensor:
        return outputs.float().sum() / len(outputs)

    for rows in (None, 1):
        model = build(lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)))
        for parameter in model.parameters():
            parameter.data.fill_(1 / 8)
        with Engine(model, SGD(lr=0.0), precision="fp16", micro_batch_size=rows) as engine:
            batch = {"input": torch.ones(2, 8, dtype=torch.float16, device=own_device())}
            steps = [engine.step(batch, loss_fn=mean_of_rows) for _ in range(2)]
        assert [(step.loss_scale, step.skipped) for step in steps] == [(2.0**16, True), (2.0**15, False)], rows


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("stop", quick([SPIKE, SPIKE + 1, SPIKE + 2], [SPIKE + 1]))
def test_the_scale_is_saved_and_resumed(stop: int, tmp_path: Path) -> None:
    with Engine(build(Stack), RULE, precision="fp16") as engine:
        wanted = [*steps_of(engine, range(6))]
        at_end = weights(engine)
    with Engine(build(Stack), RULE, precision="fp16") as engine:
        found = [*steps_of(engine, range(stop))]
        engine.save_checkpoint(tmp_path / "saved")
    with Engine(build(Stack), RULE, precision="fp16", placement=Placement(**PLACES["device"])) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        found += steps_of(engine, range(stop, 6))
        assert found == wanted
        assert_same(weights(engine), at_end)


def _on_rank(stage: int) -> tuple[list[Any], dict[str, Tensor]]:
    """Job: only the rows of rank 1 have infinite gradients in one step."""
    with open_comm() as comm:
        loss_fn = Spiking()
        found = []
        with Engine(build(Stack), RULE, precision="fp16", zero_stage=stage, comm=comm) as engine:
            for number in range(8):
                loss_fn.step = number % 4 if comm.rank == 1 else -1
                batch = words(10 * number + comm.rank, rows=2)
                if number < 4:
                    result = engine.step(batch, loss_fn=loss_fn)
                else:  # a script's loop
                    engine.backward(loss_fn(engine.model(batch["x"]), batch) / 2)
                    result = engine.update()
                found.append((result.loss.item(), result.loss_scale, result.skipped))
            return found, weights(engine)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_agree_on_the_scale_and_on_skipped_steps(stage: int) -> None:
    (one, masters), (other, others) = run(2, _on_rank, stage=stage)
    assert one == other
    assert_same(others, masters)
    assert [(scale, skipped) for _, scale, skipped in one] == [
        *[(2.0**16, number == SPIKE) for number in range(3)],
        *[(2.0**15, number == 4 + SPIKE) for number in range(3, 7)],
        (2.0**14, False),
    ]


def test_the_scale_follows_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, drawn = DynamicScale(), torch.Generator().manual_seed(1)
    theirs, tracker = torch.tensor(ours.value), torch.zeros((), dtype=torch.int32)
    for _ in range(30_000):
        is_finite = bool(torch.rand((), generator=drawn) > 5e-4)
        found_inf = torch.tensor(float(not is_finite))
        torch._amp_update_scale_(theirs, tracker, found_inf, 2.0, 0.5, 2000)
        ours.adjust(is_finite)
        assert (ours.value, ours.state_dict()["finite_steps"]) == (float(theirs), int(tracker))
    other = DynamicScale()
    other.load_state_dict(ours.state_dict())
    assert vars(other) == vars(ours)
    monkeypatch.setattr(loss_scale, "INTERVAL", 1)
    for _ in range(200):
        ours.adjust(True)
    assert math.isfinite(torch.tensor(ours.value))


def test_gradients_that_no_scale_makes_finite_end_the_run() -> None:
    scale = DynamicScale()
    for _ in range(30):
        scale.adjust(False)
    with pytest.raises(NonFiniteError, match=r"not finite in fp16 with any loss scale.*--train\.precision"):
        scale.adjust(False)


def test_trained_weights_have_an_fp32_master_and_frozen_ones_none() -> None:
    case = CASES["fp16 over nf4"]
    with small(case), Engine(build(case.make), RULE, **case.settings) as engine:
        regions = parts_of(engine).regions
        assert {region.dtype for region in regions} == {torch.float16}
        for region in regions:
            widths = {plane.name: plane.dtype for plane in region.planes}
            if region.trainable:
                assert (widths["weights"], widths["low"]) == (torch.float16, torch.float32)
                assert widths["gradients"] == torch.float16
                assert sum(plane.num_bytes(region.numel) for plane in region.planes) == 16 * region.numel
            else:
                assert set(widths) == {"weights"}
        assert any(not region.trainable and not region.codec.decodes for region in regions)


def test_a_plan_names_the_master_and_no_clipping_as_its_cost() -> None:
    place = Placement(**PLACES["cpu"], host_memory=1000)
    texts = {}
    for precision in ("bf16", "fp16"):
        with pytest.raises(DoesNotFitError) as refused:
            Engine(build(Stack), RULE, place, precision=precision)
        texts[precision] = str(refused.value)
    assert "max_grad_norm none" in texts["bf16"]
    assert "max_grad_norm none" not in texts["fp16"]
    with Engine(build(Stack), RULE, PLACES["cpu"], precision="fp16") as engine:
        names = {allocation.name for allocation in parts_of(engine).plan.allocations}
    assert {"weights", "master", "gradients"} <= names


def test_weights_below_the_range_of_fp16_are_exact_in_the_master() -> None:
    model = build(Stack)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-8)
    wanted = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with Engine(model, RULE, precision="fp16") as engine:
        assert_same(weights(engine), wanted)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"optimizer": MeZO()}, r"MeZO has no gradients for a loss scale"),
        ({"optimizer": MeZO(master="bf16")}, r"optimizer.master is bf16, but.*fp16"),
        ({"link_gradients": "int8"}, r"train.precision is fp16, but.*link_gradients"),
        ({"matmul": "fp8_rowwise"}, r"FP8 products return bf16"),
    ],
)
def test_what_fp16_cannot_do_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Engine(build(Stack), **settings, precision="fp16")


# -- own loops -----------------------------------------------------------------------------------------------


def own_step(engine: Engine, number: int, reads: bool) -> tuple[Any, ...]:
    """Take a step: two backwards, one by each way. Return (loss, norm, scale, skipped), and gradients if `reads`."""
    loss_fn, model = Spiking(), engine.model
    loss_fn.step = number
    (first, second), gradients = (words(2 * number), words(2 * number + 1)), {}
    (loss_fn(checkpoint(model, first["x"], use_reentrant=False), first) / 2).backward()
    loss = loss_fn(model(second["x"]), second) / 2
    engine.backward(loss)
    if reads:
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    result = engine.update()
    norm = result.grad_norm if math.isfinite(result.grad_norm) else -1.0
    return loss.item(), norm, result.loss_scale, result.skipped, gradients


def own_step_of_plain_pytorch(reference: Reference, number: int, reads: bool) -> tuple[Any, ...]:
    loss_fn = Spiking()
    loss_fn.step = number
    scale, gradients = float(reference.scale), {}
    for batch in (words(2 * number), words(2 * number + 1)):
        loss = loss_fn(reference.model(batch["x"]), batch) / 2
        loss.backward(torch.full_like(loss, scale))
        reference.collect()
    if reads:
        gradients = {name: total.half().float() / scale for name, total in reference._sums.items()}
    norm = reference.update()
    return loss.item(), norm if math.isfinite(norm) else -1.0, scale, number in reference.skipped, gradients


@pytest.mark.usefixtures("often")
@pytest.mark.filterwarnings("ignore:gradients with several contributions are summed in host memory")
@pytest.mark.parametrize(
    ("place", "reads"),
    quick([(place, reads) for place in PLACES for reads in (False, True)], [("cpu", True), ("nvme", False)]),
)
def test_own_loops_have_the_bits_of_plain_pytorch(place: str, reads: bool, tmp_path: Path) -> None:
    """Also after a resume. Gradients that are read have no scale."""
    settings: dict[str, Any] = {"precision": "fp16", "max_grad_norm": 0.5}
    reference = Reference(build(Stack), RULE, **settings)
    placement = Placement(**PLACES[place], nvme_dir=str(tmp_path))
    for numbers in (range(SPIKE + 2), range(SPIKE + 2, NUM_STEPS)):
        with Engine(build(Stack), RULE, placement, **settings) as engine:
            reference.update_on(updating_device(engine))
            if numbers.start:
                engine.load_checkpoint(tmp_path / "saved")
            for number in numbers:
                *found, gradients = own_step(engine, number, reads)
                *wanted, theirs = own_step_of_plain_pytorch(reference, number, reads)
                assert found == wanted, number
                assert_weights(engine, reference, when=f"after step {number}")
                assert_same(gradients, {name: theirs[name] for name in gradients})
            engine.save_checkpoint(tmp_path / "saved")
    assert SPIKE in reference.skipped


def loss_of_parts(model: Any, gain: nn.Parameter, short: torch.dtype) -> tuple[Tensor, Tensor]:
    """Call the parts, with the script's parameter between. Return its loss, and a tensor from inside a block."""
    kept: list[Tensor] = []
    handle = model.blocks[1].up.register_forward_hook(lambda _module, _inputs, result: kept.append(result))
    h = (model.embedding(words()["x"]).float() * gain).to(short)
    for block in model.blocks:
        h = block(h)
    handle.remove()
    return cross_entropy(model.head(h), words()), kept[-1].float().square().mean()


@pytest.mark.parametrize("at_root", [True, False])
def test_gradients_outside_of_the_model_are_without_the_scale(at_root: bool) -> None:
    reference = Reference(build(Stack), RULE, precision="fp16")
    gain, theirs = (nn.Parameter(torch.full((), 1.25, device=own_device())) for _ in range(2))
    loss, kept = loss_of_parts(reference.model, theirs, torch.float16)
    if at_root:
        loss = loss + kept
    loss.backward(torch.full_like(loss, float(reference.scale)))
    reference.collect()
    with Engine(build(Stack), RULE, precision="fp16") as engine:
        reference.update_on(updating_device(engine))
        found, kept = loss_of_parts(engine.model, gain, torch.float32)
        if at_root:
            found = found + kept
            engine.backward(found)
        else:
            found.backward()
        assert (found, gain.grad) == (loss, theirs.grad / reference.scale.to(own_device()))
        result = engine.update()
        assert (result.grad_norm, result.loss_scale) == (reference.update(), 2.0**16)
        assert_weights(engine, reference)


def alone(way: str) -> dict[str, Tensor]:
    """Return a script's gradients around two models, with a term from a block's result by a hook; in fp32 for way
    "plain", else with two engines in fp16.
    """
    first, second = build(Through), build(Through, seed=1)
    if way == "plain":
        first, second = twin(first), twin(second)
    engines = [] if way == "plain" else [Engine(model, RULE, precision="fp16") for model in (first, second)]
    own, seen, kept = nn.Linear(WIDTH, WIDTH), list[Tensor](), list[Tensor]()
    with torch.no_grad():
        own.weight.copy_(torch.eye(WIDTH) * 0.5)
    own.to(own_device())
    x = torch.linspace(-1, 1, 4 * WIDTH, device=own_device()).view(4, WIDTH)
    first.blocks[1].register_forward_hook(lambda _module, _inputs, result: kept.append(result))
    h = own(x)
    h.retain_grad()
    h.register_hook(lambda gradient: seen.append(gradient.clone()))
    short = x if way == "plain" else x.half()
    loss = (first(h) * second(short)).mean() + kept[-1].float().square().mean()
    if way == "engine":
        engines[0].backward(loss)
    else:
        loss.backward()
    assert h.grad is not None
    assert own.weight.grad is not None
    found = {"retained": h.grad, "hook": seen[0], "own": own.weight.grad}
    for name, model in (("first", first), ("second", second)):
        found[name] = model.blocks[0].up.weight.grad
    found = {name: value.detach().float().cpu().clone() for name, value in found.items()}
    for engine in engines:
        engine.zero_grad()
        engine.close()
    return found


class Through(nn.Module):
    """Blocks over vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h


@pytest.mark.parametrize("way", ["loss", "engine"])
def test_all_gradients_of_a_script_are_without_the_scale(way: str) -> None:
    """Break: put the scale at the root of `engine.backward`; give hooks the results as the next block has them."""
    wanted = alone("plain")
    for name, value in alone(way).items():
        assert (value - wanted[name]).norm() < 0.01 * wanted[name].norm(), name


def test_a_tensor_from_inside_a_block_has_its_gradient_in_engine_backward() -> None:
    """In one operation with the model's result. Break: scale only what the model returns."""
    found = []
    for engine in (None, Engine(build(Through), RULE, precision="fp16")):
        model = build(Through).to(own_device()) if engine is None else engine.model
        x = torch.ones(2, WIDTH, device=own_device(), dtype=torch.float32 if engine is None else torch.float16)
        kept: list[Tensor] = []
        model.blocks[1].down.register_forward_hook(lambda _module, _inputs, result, kept=kept: kept.append(result))
        loss = (model(x).float() * kept[-1].float()).mean()
        loss.backward() if engine is None else engine.backward(loss)
        found.append(model.blocks[0].up.weight.grad.float().cpu())
    assert (found[1] - found[0]).norm() < 0.01 * found[0].norm()


def test_a_gradient_that_would_miss_the_scale_is_refused() -> None:
    with Engine(build(Stack), RULE, precision="fp16") as engine:
        loss, kept = loss_of_parts(engine.model, nn.Parameter(torch.ones((), device=own_device())), torch.float32)
        with pytest.raises(ConfigError, match=r"inside unit blocks.1.*engine.backward\(loss\)"):
            (loss + kept).backward()
