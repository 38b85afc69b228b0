"""Scripts and other libraries in fp16: the engine scales the loss, where they have a GradScaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import AdamW, Engine
from offload.engine.gradients import loss_scale
from offload.integrations.rules import without_decay
from tests.engine import ranks
from tests.engine.compare import assert_same
from tests.engine.device import TWO_KERNELS, own_device, twin
from tests.engine.handmade import cross_entropy, words
from tests.integrations.plain import (
    CLIP,
    LR,
    PLACEMENT,
    KernelAdamW,
    assert_same_weights,
    llama,
    logged,
    needs,
    offload_trainer,
    rows,
)
from tests.integrations.test_wrap import PLACES, adamw, model_of, schedule, stored

needs("accelerate", "datasets", "trl")
pytestmark = TWO_KERNELS

from offload.integrations.accelerate import OffloadAccelerator  # noqa: E402
from offload.integrations.transformers import OffloadTrainer  # noqa: E402
from tests.integrations import jobs  # noqa: E402
from tests.integrations.test_accelerate import Script  # noqa: E402
from tests.integrations.test_trl import made  # noqa: E402

SPIKE = 2
"""The step, from 0, with gradients that are not finite."""


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INTERVAL", 2)


def loss_of(model: Any, number: int, part: int) -> torch.Tensor:
    batch = {key: value.to(own_device()) for key, value in words(2 * number + part).items()}
    return cross_entropy(model(batch["x"]), batch) * (1e6 if number == SPIKE else 1) / 2


def in_plain_pytorch(model: Any, optimizer: Any, scheduler: Any, scaler: Any, steps: range) -> list[Any]:
    """Train by torch's GradScaler. A twin in fp16 computes; its gradients are summed in fp32 and rounded once."""
    told: list[Any] = []
    short = twin(model).half()
    for number in steps:
        for mine, master in zip(short.parameters(), model.parameters(), strict=True):
            mine.data.copy_(master)
            mine.sum = None
        for part in range(2):
            loss = loss_of(short, number, part)
            scaler.scale(loss).backward()
            told.append(loss.item())
            for mine in (p for p in short.parameters() if p.grad is not None):
                mine.sum = mine.grad.float() + (0 if mine.sum is None else mine.sum)
                mine.grad = None
        for mine, master in zip(short.parameters(), model.parameters(), strict=True):
            master.grad = None if mine.sum is None else mine.sum.half().float()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        was_skipped = scaler.get_scale() < scale
        if not was_skipped:
            scheduler.step()
        told += [str(norm.item()), scale, was_skipped, scheduler.get_last_lr()]
    return told


def over_an_engine(model: Any, optimizer: Any, scheduler: Any, steps: range) -> list[Any]:
    told: list[Any] = []
    for number in steps:
        for part in range(2):
            loss = loss_of(model, number, part)
            loss.backward()
            told.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scale = optimizer.engine.loss_scale.value
        optimizer.step()
        optimizer.zero_grad()
        if not optimizer.step_was_skipped:
            scheduler.step()
        told += [str(norm.item()), scale, optimizer.step_was_skipped, scheduler.get_last_lr()]
    return told


@pytest.mark.filterwarnings("ignore:gradients with several contributions are summed in host memory")
@pytest.mark.parametrize("place", ["cpu", pytest.param("nvme", marks=pytest.mark.slow)])
def test_a_plain_loop_has_the_bits_of_a_grad_scaler(place: str, tmp_path: Path) -> None:
    """With groups, accumulation, clipping, a schedule, a frozen parameter, and a resume from state dicts."""
    where = PLACES[place] | ({"nvme_dir": tmp_path} if place == "nvme" else {})
    model = model_of()
    plain = twin(model)
    theirs = adamw(plain, KernelAdamW)
    their_schedule = schedule(theirs)
    scaler = torch.amp.GradScaler(own_device().type, growth_interval=2)
    wanted = in_plain_pytorch(plain, theirs, their_schedule, scaler, range(8))
    assert wanted.count(True) == 1

    ours, optimizer = offload.wrap(model, adamw(model), precision="fp16", **where)
    our_schedule = schedule(optimizer)
    found = over_an_engine(ours, optimizer, our_schedule, range(4))
    weights, states, rates = stored(ours, optimizer, our_schedule)
    optimizer.engine.close()
    resumed = model_of()
    resumed.load_state_dict(weights)
    ours, optimizer = offload.wrap(resumed, adamw(resumed), precision="fp16", **where)
    our_schedule = schedule(optimizer)
    optimizer.load_state_dict(states)
    our_schedule.load_state_dict(rates)
    found += over_an_engine(ours, optimizer, our_schedule, range(4, 8))
    assert found == wanted
    masters = {name: value.cpu() for name, value in plain.state_dict().items()}
    masters["embedding.weight"] = masters["embedding.weight"].half().float()  # frozen weights have none in fp16
    assert_same(ours.state_dict(), masters)
    optimizer.engine.close()


def test_a_model_given_in_fp16_trains_in_fp16() -> None:
    model = model_of().half()
    ours, optimizer = offload.wrap(model, adamw(model))
    over_an_engine(ours, optimizer, schedule(optimizer), range(2))
    assert {value.dtype for value in ours.state_dict().values()} == {torch.float16}
    assert optimizer.state_dict()["state"][1]["master"].dtype == torch.float32
    optimizer.engine.close()


# -- Trainer, TRL and accelerate -----------------------------------------------------------------------------
# On a CPU the plain ones compute in fp32 with fp16 set, so the engine's own step is the reference.


def as_the_engine_does(batches: list[Any], decays: Any, schedule_of: Any) -> tuple[list[float], Any]:
    """Train with the Trainer's rule. Return losses and final weights. Skipped steps move no schedule."""
    names = [name for name, _ in llama().named_parameters() if not decays(name)]
    losses, num_updates = [], 0
    rule = without_decay(AdamW(lr=LR, weight_decay=0.1), names)
    with Engine(llama(), rule, PLACEMENT, precision="fp16", max_grad_norm=CLIP) as engine:
        for batch in batches:
            engine.lr = schedule_of(num_updates)
            result = engine.step(batch)
            num_updates += not result.skipped
            losses.append(float(result.loss))
        return losses, dict(engine.named_parameters())


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_a_trainer_computes_as_the_engine_does(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps are skipped, until the scale fits: the learning rate waits."""
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**20)
    how: dict[str, Any] = {"fp16": True, "max_steps": 5}
    if kind == "Trainer":
        trainer = offload_trainer(tmp_path, llama(), OffloadTrainer, **how)
    else:
        trainer = made("sft nll", tmp_path, True, **how)
    batches: list[Any] = []
    collate = trainer.data_collator
    trainer.data_collator = lambda each: batches.append(collate(each)) or batches[-1]
    trainer.train()
    rates = logged(trainer, "learning_rate")
    losses, wanted = as_the_engine_does(
        batches[:5], lambda name: "norm" not in name, lambda number: LR * (5 - number) / 5
    )
    assert logged(trainer, "offload/loss_scale")[:3] == [2.0**20, 2.0**19, 2.0**18]
    assert 0 < rates.count(LR) - 1 < 4, "some steps were skipped, and some were not"
    if kind == "Trainer":
        assert logged(trainer) == pytest.approx(losses)
        assert_same_weights(dict(trainer.engine.named_parameters()), wanted)
    else:  # TRL computes the loss in another order
        assert logged(trainer) == pytest.approx(losses, rel=1e-4)


def test_accelerate_steps_without_its_grad_scaler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU accelerate makes one before `prepare`; here the test does."""
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**20)
    init = OffloadAccelerator.__init__

    def as_on_a_gpu(self: OffloadAccelerator, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.scaler = torch.amp.GradScaler("cpu")
        self.native_amp = True

    monkeypatch.setattr(OffloadAccelerator, "__init__", as_on_a_gpu)
    script = Script(tmp_path, True, accumulation=1, mixed_precision="fp16")
    script.run(5)
    rates = script.schedule.get_last_lr()
    batches = [
        {key: torch.stack([row[key] for row in rows(16)[start : start + 2]]) for key in ("input_ids", "labels")}
        for start in range(0, 10, 2)
    ]
    num_updates = round(LR / rates[0]) - 1
    assert 0 < num_updates < 4, "some steps were skipped, and some were not"
    losses, wanted = as_the_engine_does(batches, lambda name: "norm" not in name, lambda number: LR / (1 + number))
    assert script.losses == losses
    assert_same_weights(script.weights(), wanted)
    script.accelerator.unscale_gradients()


def test_a_schedule_waits_also_where_no_scale_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(tmp_path, True, accumulation=1, offload={"placement": PLACEMENT, "on_nonfinite": "skip"})
    factors, backward = iter([1.0, float("inf"), 1.0]), script.accelerator.backward
    monkeypatch.setattr(script.accelerator, "backward", lambda loss: backward(loss * next(factors)))
    script.run(3)
    assert script.schedule.get_last_lr() == [LR * (1 / 3)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["Trainer", "script"])
def test_two_ranks_have_the_bits_of_one_process(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process takes both ranks' rows in its own loop, in a backward each."""
    found = ranks.run(2, jobs.trained_in_fp16, way=way, folder=str(tmp_path))
    monkeypatch.setattr(loss_scale, "FIRST", 2.0**19)
    rule = without_decay(AdamW(lr=LR, weight_decay=0.1), [name for name in found[0]["weights"] if "norm" in name])
    num_updates = 0
    with Engine(llama(), rule, PLACEMENT, precision="fp16", max_grad_norm=None) as engine:
        for parts in zip(*(each["batches"] for each in found), strict=True):
            engine.lr = LR * (4 - num_updates) / 4
            num_items = sum(int((each["labels"][:, 1:] != -100).sum()) for each in parts)
            how, share = {"num_items_in_batch": num_items}, 1.0
            if way == "script":  # accelerate steps the schedule once for each rank, and takes the mean of their losses
                engine.lr, how, share = LR / (1 + 2 * num_updates), {}, 0.5
            for part in parts:
                engine.backward(engine.model(**part, **how).loss * share)
            num_updates += not engine.update().skipped
        assert 0 < num_updates < 4, "some steps were skipped, and some were not"
        for rank in found:
            assert rank["scale"] == engine.loss_scale.value
            assert_same_weights(rank["weights"], dict(engine.named_parameters()))
