"""Parks: an engine between two steps without memory on the device. The contract of all features is in
tests/contracts.
"""

from __future__ import annotations

import gc
import itertools
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload import Engine
from offload.distributed.joining import open_comm
from offload.engine import parking
from offload.engine.companions import add_companion
from offload.errors import ConfigError, DoesNotFitError, OffloadError
from offload.layout.regions import ParameterInfo
from tests.cases.features import CASES, PLACES, Cell
from tests.cases.models import build, llama, tokens
from tests.cases.run import Training
from tests.engine import ranks
from tests.engine.compare import assert_same, rounded, weights
from tests.engine.device import cpu_only, own_device, set_seed
from tests.engine.inside import assert_parked, memory_of, parts_of, resident_names, states


@pytest.mark.slow
@cpu_only("compiles for the CPU")
def test_compiled_blocks_are_parked(tmp_path: Path) -> None:
    training = Training(CASES["llama"], Cell(PLACES["device"], {"compile": "always"}), tmp_path)
    found = []
    for parks in (True, False):
        with training.engine() as engine:
            steps = []
            for number in range(3):
                steps.append(training.step(engine, number))
                if parks:
                    with engine.parked():
                        assert_parked(engine)
            found.append((steps, weights(engine)))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_twenty_parks_leave_memory_as_it_was(place: str) -> None:
    """Break: keep the copies of the states after a resume."""
    with Engine(build(llama), placement=PLACES[place]) as engine:
        engine.step(tokens(0, 4))
        held: list[tuple[Any, ...]] = []
        for number in range(30):
            with engine.parked():
                assert_parked(engine)
                parked = dict(memory_of(engine).host.allocations)
                assert ("parked states" in parked) == (place == "device")
            if number == 10:  # the first parks fill caches of Python
                tracemalloc.start()
                before = tracemalloc.get_traced_memory()[0]
            held.append((sorted(engine.allocations), len(memory_of(engine).device.blocks.present())))
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert held[1:] == held[:-1]
        assert grown < 1 << 16


@pytest.mark.parametrize("place", ["device", "cpu"])
def test_a_parked_engine_computes_nothing_and_reads_everything(place: str, tmp_path: Path) -> None:
    """Break: leave `check_running` out of a call."""
    batch, other = tokens(0, 4), Engine(build(llama, seed=1), placement=PLACES[place])
    with other, Engine(build(llama), placement=PLACES[place]) as engine:
        other.step(batch)
        other.save_checkpoint(tmp_path / "other")
        wanted = weights(other)
        engine.step(batch)
        model: Any = engine.model
        assert resident_names(engine)
        engine.park()
        engine.park()
        for compute in (
            lambda: engine.step(batch),
            lambda: engine.evaluate(batch),
            lambda: engine.backward(torch.zeros(())),
            lambda: engine.update(),
            lambda: engine.grad_norm(),
            lambda: engine.replay([]),
            lambda: model(**batch),
        ):
            with pytest.raises(OffloadError, match=r"the engine is parked.*engine\.resume\(\)"):
                compute()
        engine.zero_grad()
        assert not engine.has_gradients()  # a step of an own loop does nothing
        before, moments = weights(engine), states(engine)["model.norm.weight"].exp_avg
        assert torch.equal(model.model.norm.weight.detach().cpu(), before["model.norm.weight"])
        assert_same({name: value.float() for name, value in model.state_dict().items() if name in before}, before)
        engine.save_checkpoint(tmp_path / "saved")
        engine.export(tmp_path / "exported")
        for _, value in engine.edit(["model.norm.weight"]):
            value.mul_(2)
        engine.resume()
        engine.resume()
        assert torch.equal(weights(engine)["model.norm.weight"], 2 * before["model.norm.weight"])
        assert torch.equal(states(engine)["model.norm.weight"].exp_avg, moments)
        with engine.parked():
            engine.load_checkpoint(tmp_path / "other")
        assert_same(weights(engine), wanted)
        engine.step(batch)
        other.step(batch)
        assert_same(weights(engine), weights(other))


@pytest.mark.parametrize("restore", [True, False])
def test_a_parked_engine_closes(restore: bool) -> None:
    engine = Engine(build(llama), placement=PLACES["device"])
    engine.step(tokens(0, 4))
    wanted, model = weights(engine), engine.model
    engine.park()
    engine.close(restore=restore)
    if restore:
        assert_same({name: p.detach().cpu() for name, p in model.named_parameters()}, wanted)
        assert {buffer.device.type for buffer in model.buffers()} == {own_device().type}
        model(**{key: value.to(own_device()) for key, value in tokens(0, 4).items()})
    with pytest.raises(OffloadError, match="closed"):
        engine.resume()


def test_a_park_without_room_on_the_host_changes_nothing() -> None:
    """Break: give memory back before the copies are made."""
    found = []
    for budget in (1 << 12, None):
        with Engine(build(llama), placement={**PLACES["device"], "host_memory": budget}) as engine:
            engine.step(tokens(0, 4))
            if budget:
                with pytest.raises(DoesNotFitError, match="parked states"):
                    engine.park()
            engine.step(tokens(1, 4))
            found.append(weights(engine))
    assert_same(*found)


def failing(call: Callable[..., Any], error: Exception, number: int = 1) -> Callable[..., Any]:
    """Return `call`, which fails once: at this call."""
    numbers = itertools.count(1)

    def fail(*arguments: Any) -> Any:
        if next(numbers) == number:
            raise error
        return call(*arguments)

    return fail


def fail_in_park(patch: pytest.MonkeyPatch, engine: Engine, part: str) -> None:
    """Let the next park fail in one of its parts."""
    owner = {"Arena": parking, "move_buffers": parts_of(engine)}[part]
    patch.setattr(owner, part, failing(getattr(owner, part), MemoryError("no room")))


PARTS = ["Arena", "move_buffers"]


@pytest.mark.parametrize("part", PARTS)
def test_a_park_that_fails_changes_nothing(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break: leave the states in host memory, or the copies in the ledger, after a park that failed."""
    found = []
    for fails in (True, False):
        with Engine(build(llama), placement=PLACES["device"]) as engine:
            engine.step(tokens(0, 4))
            before = sorted(engine.allocations)
            for _ in range(2 * fails):
                with monkeypatch.context() as patch:
                    fail_in_park(patch, engine, part)
                    with pytest.raises(MemoryError, match="no room"):
                        engine.park()
                assert sorted(engine.allocations) == before
            engine.step(tokens(1, 4))
            gc.collect()  # an error holds memory of the engine before
            with engine.parked():
                assert_parked(engine)
            engine.step(tokens(2, 4))
            found.append(weights(engine))
    assert_same(*found)


def taken(resize: Any) -> Any:
    """Return a `resize` that fails at the third block, once, as if another program had taken the memory."""
    give = failing(resize, torch.OutOfMemoryError("taken"), 3)

    def refuse(block: torch.UntypedStorage, num_bytes: int) -> None:
        if num_bytes:
            give(block, num_bytes)
        else:
            resize(block, 0)

    return refuse


@pytest.mark.parametrize("part", ["blocks", "buffers"])
def test_an_engine_stays_parked_while_others_have_the_memory(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break: do not give back what a failed resume has taken."""
    found = []
    for fails in (True, False):
        with Engine(build(llama), placement=PLACES["device"]) as engine:
            engine.step(tokens(0, 4))
            before = sorted(engine.allocations)
            engine.park()
            blocks, flow = memory_of(engine).device.blocks, parts_of(engine)
            with monkeypatch.context() as patch:
                if part == "blocks":
                    patch.setattr(blocks, "_resize", taken(blocks._resize))
                else:
                    patch.setattr(flow, "move_buffers", failing(flow.move_buffers, torch.OutOfMemoryError("taken")))
                for _ in range(fails):
                    with pytest.raises(DoesNotFitError, match="stays parked"):
                        engine.resume()
                    assert_parked(engine)
            engine.resume()
            assert sorted(engine.allocations) == before
            engine.step(tokens(1, 4))
            found.append(weights(engine))
    assert_same(*found)


def looped(parks: bool, **place: Any) -> dict[str, torch.Tensor]:
    """Train in a loop over `offload.wrap`, with and without a park after each part of it."""
    model: Any
    model, optimizer = offload.wrap(build(llama), offload.AdamW(lr=1e-2), **place)
    engine = optimizer.engine

    def park() -> None:
        if parks:
            with engine.parked():
                assert_parked(engine)

    for number in range(4):
        set_seed(number)
        park()
        if parks:
            model(**tokens(7, 2))  # a forward without a backward
            park()
        model(**tokens(number, 4)).loss.backward()
        if parks:
            with pytest.raises(ConfigError, match=r"engine\.park was called during a step"):
                engine.park()
        optimizer.step()
        park()
        optimizer.zero_grad()
        park()
    found = weights(engine)
    engine.close()
    return found


@pytest.mark.parametrize("place", ["device", "cpu"])
def test_a_loop_of_ones_own_parks_between_steps(place: str) -> None:
    assert_same(looped(True, **PLACES[place]), looped(False, **PLACES[place]))


def on_ranks(parks: bool, stage: int, place: str, folder: Path) -> dict[str, torch.Tensor]:
    """Job of a rank: train, and let rank 1 fail in a resume."""
    gc.collect()  # the engine of an earlier job in this process has memory of the device
    placement = Training(CASES["llama"], Cell(PLACES[place]), folder).placement
    with open_comm() as comm, Engine(build(llama), placement=placement, comm=comm, zero_stage=stage) as engine:
        for number in range(3):
            engine.step({key: value[2 * comm.rank :][:2] for key, value in tokens(number, 4).items()})
            if not parks:
                continue
            engine.park()
            assert_parked(engine)
            blocks = memory_of(engine).device.blocks
            with pytest.MonkeyPatch.context() as patch:
                if comm.rank:
                    patch.setattr(blocks, "_resize", taken(blocks._resize))
                with pytest.raises(DoesNotFitError, match=r"\[rank 1\].*stays parked"):
                    engine.resume()
            assert_parked(engine)
            engine.resume()
        return weights(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "place"), [(3, "device"), (1, "cpu"), (3, "cpu"), (2, "nvme")])
def test_ranks_park_together(stage: int, place: str, tmp_path: Path) -> None:
    job: dict[str, Any] = {"stage": stage, "place": place, "folder": tmp_path}
    parked, plain = (ranks.run(2, on_ranks, parks=parks, **job) for parks in (True, False))
    for mine, wanted in zip(parked, plain, strict=True):
        assert_same(mine, wanted)


def refused_on_ranks(refuses: bool) -> dict[str, torch.Tensor]:
    """Job of a rank: train. Parks fail on rank 1 alone, and then for want of memory on the machine."""
    gc.collect()  # the engine of an earlier job in this process has memory of the device
    with open_comm() as comm, Engine(build(llama), placement=PLACES["device"], comm=comm) as engine:

        def step() -> None:
            engine.step({key: value[2 * comm.rank :][:2] for key, value in tokens(0, 4).items()})

        step()
        if refuses:
            before = sorted(engine.allocations)
            for part in PARTS:
                with pytest.MonkeyPatch.context() as patch:
                    if comm.rank:
                        fail_in_park(patch, engine, part)
                    with pytest.raises(OffloadError, match=r"\[rank 1\].*no room"):
                        engine.park()
                assert sorted(engine.allocations) == before
                step()
            gc.collect()  # errors hold memory of the device
            with engine.parked():
                assert_parked(engine)
                call = (engine.resume, engine.park)[comm.rank]
                with pytest.raises(ConfigError, match="rank 0: resume; rank 1: park"):
                    call()
                num_bytes = memory_of(engine).host.allocations["parked states"]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(parking, "memory", lambda: {"available_bytes": 2 * num_bytes - 1})
                with pytest.raises(DoesNotFitError, match="are free for each rank"):
                    engine.park()
        else:
            for _ in PARTS:
                step()
        step()
        return weights(engine)


@pytest.mark.slow
def test_ranks_refuse_a_park_together() -> None:
    """Break: change the engine before all ranks have their copies, or give each rank all free memory."""
    refused, plain = (ranks.run(2, refused_on_ranks, refuses=refuses) for refuses in (True, False))
    for mine, wanted in zip(refused, plain, strict=True):
        assert_same(mine, wanted)


@pytest.mark.parametrize("place", ["device", "nvme"])
def test_weights_come_in_buckets(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A companion is not in them: a sampler has the trained model alone.

    Break: hold the last weight of a bucket while the next one is read.
    """
    placement, most = Training(CASES["llama"], Cell(PLACES[place]), tmp_path).placement, 5000
    model = build(llama)
    add_companion(model, "teacher", build(llama))
    with Engine(model, placement=placement, precision="bf16") as engine, engine.parked():
        wanted = weights(engine)
        read = engine._read
        given: list[weakref.ref[torch.Tensor]] = []

        def watched(info: ParameterInfo, dtype: torch.dtype) -> torch.Tensor:
            assert not [each for each in given if each() is not None], "a bucket is held beside the next one"
            return read(info, dtype)

        monkeypatch.setattr(engine, "_read", watched)
        for dtype in (None, torch.bfloat16):
            found: dict[str, torch.Tensor] = {}
            for bucket in engine.weight_buckets(most, dtype):
                assert len(bucket) == 1 or sum(value.nbytes for value in bucket.values()) <= most
                found |= {name: value.clone() for name, value in bucket.items()}
                given += map(weakref.ref, bucket.values())
                del bucket
            assert_same(found, {name: rounded(value, dtype or torch.float32) for name, value in wanted.items()})
