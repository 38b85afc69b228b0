"""The engine on the simulated accelerator: what it does has the bits of the CPU, whatever is late, and each kind of
wait is needed for that.

Random delays before kernels and copies are drawn by a seed. Both sides have to be the slow one: a kernel that does not
wait for a copy is seen where copies are late, a copy that does not wait for a kernel where kernels are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import Engine, Placement
from offload.lanes.lane import ThreadLane
from offload.lanes.streams import StreamLane, StreamLanes
from offload.tiers.device import AcceleratorDevice
from offload.tiers.pinning import HostMapping, Pinning
from tests.accelerator.control import Control
from tests.engine.compare import same_bits, weights
from tests.engine.families import build, llama, tokens

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]

NUM_STEPS = 3
BUDGET = "200KiB"
"""Of which the weights of all units are more."""


def words(seed: int, **shape: int) -> dict[str, torch.Tensor]:
    """Return a batch of the host, as most callers have it."""
    return {key: value.cpu() for key, value in tokens(seed, **shape).items()}


def steps(engine: Engine, folder: Path) -> list[Any]:
    found: list[Any] = []
    for seed in range(NUM_STEPS):
        result = engine.step(words(seed))
        found += [result.loss, result.grad_norm]
    return found


def own_loop(engine: Engine, folder: Path) -> list[Any]:
    found = []
    for seed in range(NUM_STEPS):
        for part in range(2):
            batch = {key: value.to(engine.device) for key, value in words(10 * seed + part).items()}
            engine.backward(engine.model(**batch).loss / 2)
        result = engine.update()
        found += [result.loss, result.grad_norm]
    return found


def evaluated(engine: Engine, folder: Path) -> list[Any]:
    found = [engine.evaluate(words(9)).cpu()]
    for seed in range(NUM_STEPS):
        engine.step(words(seed))
        found += [engine.evaluate(words(9)).cpu(), engine.evaluate(words(8, length=7)).cpu()]
    return found


def resumed(engine: Engine, folder: Path) -> list[Any]:
    """Save after a step, take another one, and go back."""
    engine.step(words(0))
    path = folder / "saved"
    engine.save_checkpoint(path)
    engine.step(words(5))
    engine.load_checkpoint(path)
    return steps(engine, folder)


Job = Callable[[Engine, Path], list[Any]]
CASES: Mapping[str, tuple[Job, dict[str, Any], dict[str, Any]]] = {  # the settings, and those of the placement
    "plain": (steps, {}, {}),
    "speculative": (steps, {"clip": "speculative", "max_grad_norm": 0.2}, {}),
    "unclipped": (steps, {"max_grad_norm": None}, {}),
    "bf16": (steps, {"precision": "bf16"}, {}),
    "activations": (steps, {}, {"activations": "cpu"}),
    "states on the device": (steps, {}, {"parameters": "device", "optimizer": "device"}),
    "weights on the device": (steps, {"precision": "bf16"}, {"parameters": "device"}),
    "nvme": (steps, {}, {"parameters": "nvme", "optimizer": "nvme", "activations": "nvme"}),
    "kept graphs": (steps, {"recompute": "never"}, {}),
    "micro-batches": (steps, {"micro_batch_size": 1, "precision": "bf16"}, {"activations": "cpu"}),
    "head in chunks": (steps, {"head_chunk_bytes": 4096}, {}),
    "budget": (steps, {"recompute": "auto"}, {"device_memory": BUDGET}),
    "own loop": (own_loop, {"precision": "bf16"}, {}),
    "evaluation": (evaluated, {}, {}),
    "checkpoint": (resumed, {}, {}),
}
SEEDS = (0, 1)
LATE_US = 500
"""At most: more than most of what is done here takes by itself."""


def run(name: str, folder: Path, device: str, **more: Any) -> list[Any]:
    """Return losses, norms and weights of a case."""
    job, settings, placement = CASES[name]
    folder.mkdir(exist_ok=True)
    on_disk = {"nvme_dir": str(folder)} if "nvme" in placement.values() else {}
    engine = Engine(
        build(lambda: llama(num_hidden_layers=4)),
        placement=Placement(**placement, **on_disk),
        device=device,
        **settings | more,
    )
    try:
        return [*job(engine, folder), *weights(engine).values()]
    finally:
        engine.close()


@pytest.fixture(scope="module")
def wanted(loaded: Control, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """What the CPU gives; where updates are made on the device, what that gives when nothing is late."""

    def made(name: str) -> list[Any]:
        loaded.set_jitter(0)
        return run(name, tmp_path_factory.mktemp("cpu"), "sim" if name == "states on the device" else "cpu")

    return cache(made)


def is_same(found: list[Any], wanted: list[Any]) -> bool:
    """Bits of tensors; norms, whose sums have another order on a device, to 1e-7."""
    return all(
        same_bits(a, b) if isinstance(a, torch.Tensor) else a == pytest.approx(b, rel=1e-7, abs=0)
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("slow", ["compute", "copies"])
@pytest.mark.parametrize("name", CASES)
def test_bits_are_the_same_whatever_is_late(
    sim: Control, wanted: Callable[[str], list[Any]], tmp_path: Path, name: str, slow: Any
) -> None:
    expected = wanted(name)
    for seed in SEEDS:
        sim.set_jitter(LATE_US, seed, slow)
        assert is_same(run(name, tmp_path / str(seed), "sim"), expected), f"seed {seed}"
    assert sim.registered() == (0, 0)
    assert sim.counters()["launches"] > 100, "nothing was done there"


# -- each wait, taken away -----------------------------------------------------------------------------------

Change = Callable[[pytest.MonkeyPatch], None]


def compute_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamLanes, "compute_after", lambda self, tickets, *, fills=(): self._await(tickets, fills))


def streams_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamLane, "_order", lambda self, ticket: None)


def nobody_waits_for_compute(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamLanes, "mark", lambda self: ())


def the_host_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """Its lanes take what is put into a stream for done."""
    patch.setattr(ThreadLane, "_order", lambda self, ticket: None)


def memory_is_freed_at_once(patch: pytest.MonkeyPatch) -> None:
    """The allocator is not told that another stream uses it."""

    def copy(self: AcceleratorDevice, target: torch.Tensor, source: torch.Tensor) -> None:
        target.data.copy_(source, non_blocking=True)

    patch.setattr(AcceleratorDevice, "copy", copy)


def the_caller_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """Neither for the norm nor for anything else that it reads."""
    patch.setattr(StreamLanes, "wait", lambda self, tickets, *, fills=(): self._await(tickets, fills))


WITHOUT: Mapping[str, tuple[Change, str, str]] = {  # the case that shows it, and which side is late there
    "compute waits for copies": (compute_does_not_wait, "plain", "copies"),
    "streams wait for each other": (streams_do_not_wait, "plain", "compute"),
    "copies wait for compute": (nobody_waits_for_compute, "plain", "compute"),
    "updates wait for gradients": (the_host_does_not_wait, "unclipped", "copies"),
    "the disk waits for gradients": (the_host_does_not_wait, "nvme", "copies"),
    "memory waits for copies": (memory_is_freed_at_once, "activations", "copies"),
    "the norm waits for its parts": (the_caller_does_not_wait, "plain", "copies"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_without_this_wait_a_result_is_wrong(
    sim: Control, wanted: Callable[[str], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    change, case, slow = WITHOUT[name]
    expected = wanted(case)
    change(monkeypatch)
    for seed in range(20):
        sim.set_jitter(LATE_US, seed, slow)
        try:
            if not is_same(run(case, tmp_path / str(seed), "sim"), expected):
                return
        except Exception:  # NaN, or a state that cannot be
            return
    pytest.fail("twenty runs went well without it")


def test_without_registration_copies_are_staged(sim: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("plain", tmp_path, "sim")
    pinned = sim.counters()
    sim.reset_counters()
    monkeypatch.setattr(Pinning, "register", lambda self, address, num_bytes: False)
    run("plain", tmp_path, "sim")
    pageable = sim.counters()
    assert pageable["pageable_bytes"] > 4 * pinned["pageable_bytes"]


def test_without_unregistration_ranges_are_left(sim: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(HostMapping, "unpin", lambda self: kept.append(self._pieces))
    run("activations", tmp_path, "sim")
    assert sim.registered()[0] > 0
    for address, _ in (piece for pieces in kept for piece in pieces):
        torch.sim.host_unregister(address)
    torch.sim.take_last_error()
