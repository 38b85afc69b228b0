"""The engine on the simulated accelerator has the bits of the CPU under any delays, and needs every single wait for
this.

Seeded random delays precede kernels and copies. Each side has to be slow in turn: late copies show a kernel without a
wait, late kernels show a copy without a wait.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import Engine, Placement
from offload.accelerators import Accelerator, own_accelerator
from offload.engine.analysis import Analysis
from offload.engine.gradients.tile_updates import RegionUpdate
from offload.lanes.lanes import Lanes
from offload.lanes.streams import StreamLane, StreamLanes, StreamTicket
from offload.lanes.threads import ThreadLane
from offload.lanes.ticket import Fence, Ticket
from offload.tiers.accelerator_device import AcceleratorDevice, _Staging
from offload.tiers.host import HostMapping, Pinning
from offload.tiers.slots import Slots
from tests.accelerator.control import Control
from tests.cases.models import build, llama, tokens
from tests.engine.compare import same_bits, weights
from tests.engine.inside import parts_of

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]

NUM_STEPS = 3
BUDGET = "200KiB"
"""Less than the weights of all units."""


def words(seed: int, **shape: int) -> dict[str, torch.Tensor]:
    """Return a batch in host memory, as most callers pass."""
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
    """Save after a step, run another, and load the checkpoint."""
    engine.step(words(0))
    path = folder / "saved"
    engine.save_checkpoint(path)
    engine.step(words(5))
    engine.load_checkpoint(path)
    return steps(engine, folder)


Job = Callable[[Engine, Path], list[Any]]
Wanted = Callable[[str], list[Any]]
Learned = Callable[[str], Analysis]
CASES: Mapping[str, tuple[Job, dict[str, Any], dict[str, Any]]] = {  # job, settings, placement settings
    "plain": (steps, {}, {}),
    "speculative": (steps, {"clip": "speculative", "max_grad_norm": 0.2}, {}),
    "unclipped": (steps, {"max_grad_norm": None}, {}),
    "bf16": (steps, {"precision": "bf16"}, {}),
    "activations": (steps, {}, {"activations": "cpu"}),
    "states on the device": (steps, {}, {"parameters": "device", "optimizer": "device"}),
    "updates on the device": (steps, {"update": "device"}, {}),
    "updates at once on the device": (steps, {"update": "device", "max_grad_norm": None, "precision": "bf16"}, {}),
    "corrections on the device": (
        steps,
        {"update": "device", "clip": "speculative", "max_grad_norm": 0.2},
        {"parameters": "nvme", "optimizer": "nvme", "gradients": "nvme"},
    ),
    "weights on the device": (steps, {"precision": "bf16"}, {"parameters": "device"}),
    "nvme": (steps, {}, {"parameters": "nvme", "optimizer": "nvme", "activations": "nvme"}),
    "kept graphs": (steps, {"recompute": "never"}, {}),
    "micro-batches": (steps, {"micro_batch_size": 1, "precision": "bf16"}, {"activations": "cpu"}),
    "wide gradients": (steps, {"micro_batch_size": 1, "precision": "bf16", "max_grad_norm": None}, {}),
    "head in chunks": (steps, {"head_chunk_bytes": 4096}, {}),
    "graphs below": (steps, {"recompute": "never"}, {"graphs": "cpu"}),
    "graphs on disk": (steps, {"recompute": "never", "micro_batch_size": 2}, {"graphs": "nvme", "parameters": "nvme"}),
    "budget": (steps, {"recompute": "auto"}, {"device_memory": BUDGET}),
    "own loop": (own_loop, {"precision": "bf16"}, {}),
    "evaluation": (evaluated, {}, {}),
    "checkpoint": (resumed, {}, {}),
}
NUM_SEEDS = 20
QUICK_SEED = {name: number % NUM_SEEDS for number, name in enumerate(CASES)}
"""One seed per case; the cases together cover all seeds."""
SIDES: tuple[Any, ...] = ("compute", "copies")
LATE_US = 500
"""Maximum delay in microseconds, longer than most operations here."""


def opened(name: str, folder: Path, device: str, **more: Any) -> Engine:
    """Return the engine of a case."""
    _, settings, placement = CASES[name]
    folder.mkdir(exist_ok=True)
    on_disk = {"nvme_dir": str(folder)} if "nvme" in placement.values() else {}
    return Engine(
        build(lambda: llama(num_hidden_layers=4)),
        placement=Placement(**placement, **on_disk),
        device=device,
        **settings | more,
    )


def run(name: str, folder: Path, device: str, **more: Any) -> list[Any]:
    """Return losses, norms and weights of a case."""
    with opened(name, folder, device, **more) as engine:
        return [*CASES[name][0](engine, folder), *weights(engine).values()]


_ANALYSES: dict[str, Analysis] = {}
"""Analyses by device and everything in a case that changes them: most of a short run is trial passes."""


def analysis_key(name: str, device: str) -> str:
    job, settings, _ = CASES[name]
    told = {key: value for key, value in settings.items() if key not in ("clip", "max_grad_norm", "update")}
    return f"{job.__name__} on {device}: {told}"


def run_undelayed(name: str, folder: Path, device: str) -> list[Any]:
    """Run a case without trial passes, where an earlier one has the same."""
    key = analysis_key(name, device)
    with opened(name, folder, device, analysis=_ANALYSES.get(key)) as engine:
        found = [*CASES[name][0](engine, folder), *weights(engine).values()]
        _ANALYSES[key] = engine.analysis
        return found


@pytest.fixture(scope="module")
def wanted(loaded: Control, tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    """Return results of the CPU, or of the device without delays for cases with device updates."""

    def made(name: str) -> list[Any]:
        loaded.set_jitter(0)
        on_device = name == "states on the device" or CASES[name][1].get("update") == "device"
        return run_undelayed(name, tmp_path_factory.mktemp("cpu"), "sim" if on_device else "cpu")

    return cache(made)


@pytest.fixture(scope="module")
def learned(loaded: Control, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """Return the analysis of a case on the device without delays."""

    def made(name: str) -> Analysis:
        loaded.set_jitter(0)
        key = analysis_key(name, "sim")
        if key not in _ANALYSES:
            run_undelayed(name, tmp_path_factory.mktemp("learned"), "sim")
        return _ANALYSES[key]

    return cache(made)


def is_same(found: list[Any], wanted: list[Any]) -> bool:
    """Compare tensors by bits, and norms to 1e-7, since devices sum in another order."""
    return all(
        same_bits(a, b) if isinstance(a, torch.Tensor) else a == pytest.approx(b, rel=1e-7, abs=0)
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("slow", SIDES)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "every seed"])
@pytest.mark.parametrize("name", CASES)
def test_bits_are_the_same_whatever_is_late(
    sim: Control, wanted: Wanted, learned: Learned, tmp_path: Path, name: str, slow: Any, every: bool
) -> None:
    """Trial passes are late with every seed, and in the plain case."""
    expected, analysis = wanted(name), None if every or name == "plain" else learned(name)
    for seed in range(NUM_SEEDS) if every else [QUICK_SEED[name]]:
        sim.set_jitter(LATE_US, seed, slow)
        assert is_same(run(name, tmp_path / str(seed), "sim", analysis=analysis), expected), f"seed {seed}"
    assert sim.registered() == (0, 0)
    assert sim.counters()["launches"] > 100, "nothing was done there"


@pytest.mark.parametrize(
    ("name", "tier"), [("updates on the device", "cpu"), ("updates at once on the device", "nvme")]
)
def test_states_that_stream_are_updated_as_those_that_stay(sim: Control, tmp_path: Path, name: str, tier: str) -> None:
    job, settings, _ = CASES[name]
    found = []
    for there in (tier, "device"):
        placement = Placement(parameters=there, optimizer=there, nvme_dir=str(tmp_path) if there == "nvme" else None)
        with Engine(build(llama), placement=placement, device="sim", **settings) as engine:
            found.append([*job(engine, tmp_path), *weights(engine).values()])
    assert is_same(*found)


def deep() -> torch.nn.Module:
    return llama(num_hidden_layers=12)


@cache
def deep_analysis() -> Analysis:
    """Return the analysis of the deep model: the same for all placements and updates."""
    with Engine(build(deep), device="sim") as engine:
        engine.step(words(0))
        return engine.analysis


def some_stay(**settings: Any) -> Engine:
    """Return an engine with room for some moments on the device."""
    placement = Placement("cpu", "auto", device_memory="1400KiB")
    told = {"update": "device", "analysis": deep_analysis(), **settings}
    engine = Engine(build(deep), placement=placement, device="sim", **told)
    stays = [bool(parts_of(engine).store.states[region].stays) for region in parts_of(engine).regions]
    assert any(stays)
    assert not all(stays)
    return engine


def test_what_stays_is_updated_as_what_streams(sim: Control, tmp_path: Path) -> None:
    with Engine(build(deep), device="sim", update="device", analysis=deep_analysis()) as engine:
        wanted = [*resumed(engine, tmp_path), *weights(engine).values()]
    for slow in SIDES:
        sim.set_jitter(LATE_US, 1, slow)
        (tmp_path / slow).mkdir()
        with some_stay() as engine:
            assert is_same([*resumed(engine, tmp_path / slow), *weights(engine).values()], wanted), slow


@pytest.mark.parametrize("broken", [False, True])
def test_an_update_comes_after_what_was_read_into_states_that_stay(
    sim: Control, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of compute writes a loaded checkpoint."""
    with some_stay(max_grad_norm=None) as engine:
        engine.step(words(0))
        engine.finish()
        updates, store = parts_of(engine).updates, parts_of(engine).store
        state = next(state for state in store.states.values() if state.stays)
        if broken:
            monkeypatch.setattr(parts_of(engine).lanes, "mark", lambda: ())
        gradients = torch.ones(state.region.numel)
        with sim.held(torch.accelerator.current_stream()):
            state.planes["exp_avg_sq"].fill_(0.0)
            updates.tiles.place.begin_step()
            touched = [True] * len(state.region.parameters)
            RegionUpdate(updates.tiles, state.region, gradients, Fence("gradients"), touched).submit()
            if broken:  # the update is done before the memory is cleared
                down = parts_of(engine).lanes.update_down
                down.finish()
                down._stream.synchronize()  # type: ignore[attr-defined]
            else:
                time.sleep(0.02)  # for an update without the wait
        parts_of(engine).lanes.finish()
        assert bool(state.planes["exp_avg_sq"][state.span(0)].any()) == (not broken)


BOTH: dict[str, dict[str, Any]] = {
    "at once": {"max_grad_norm": None},
    "deferred": {"max_grad_norm": 0.2, "clip": "deferred"},
    "speculative": {"max_grad_norm": 0.2, "clip": "speculative"},
}


def both_places(clip: str) -> Engine:
    """Return an engine with some regions updated on the device and the others on the host."""
    placement = Placement("cpu", "auto", optimizer_memory="500KiB")
    settings = {"update": "both", "prefetch": 1, "analysis": deep_analysis()}
    engine = Engine(build(deep), placement=placement, device="sim", **settings, **BOTH[clip])
    assert 0 < len(parts_of(engine).plan.residence.updated_on_device) < len(parts_of(engine).regions)
    return engine


@pytest.mark.parametrize("clip", list(BOTH))
def test_both_places_of_update_do_not_meet(sim: Control, tmp_path: Path, clip: str) -> None:
    """Host and device update at the same time in separate threads. The order does not matter."""
    with both_places(clip) as engine:
        wanted = [*steps(engine, tmp_path), *weights(engine).values()]
    for slow in SIDES:
        sim.set_jitter(LATE_US, 1, slow)
        with both_places(clip) as engine:
            assert is_same([*steps(engine, tmp_path), *weights(engine).values()], wanted), slow


@pytest.mark.parametrize("clip", list(BOTH))
def test_each_region_has_the_bits_of_its_place(sim: Control, clip: str) -> None:
    """Both start from equal states."""
    found = []
    for update in ("cpu", "device"):
        with Engine(build(deep), device="sim", update=update, analysis=deep_analysis(), **BOTH[clip]) as engine:
            engine.step(words(0))
            found.append(weights(engine))
    with both_places(clip) as engine:
        engine.step(words(0))
        mine, there = weights(engine), engine.update_devices
    assert len(set(there.values())) == 2
    for name, weight in mine.items():
        assert same_bits(weight, found[there[name].type != "cpu"][name]), name


def test_updates_on_the_device_are_within_two_ulp_of_the_hosts(sim: Control) -> None:
    """The unit is the larger of weight and change, after a step from equal states."""
    with Engine(build(llama), device="sim", update="cpu") as engine:
        begun = weights(engine)
    found = []
    for update in ("cpu", "device"):
        with Engine(build(llama), device="sim", update=update) as engine:
            engine.step(words(0))
            found.append(weights(engine))
    for name, wanted in found[0].items():
        unit = torch.maximum(wanted.abs(), (wanted - begun[name]).abs())
        ulp = torch.nextafter(unit, torch.tensor(torch.inf)) - unit
        assert bool(((found[1][name] - wanted).abs() <= 2 * ulp).all()), name


# -- each wait removed ---------------------------------------------------------------------------------------

Change = Callable[[pytest.MonkeyPatch], None]


def compute_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamLanes, "compute_after", lambda self, tickets, *, users=(): self._await(tickets, users))


def streams_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamLane, "_order", lambda self, ticket: None)


def nobody_waits_for_compute(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamLanes, "mark", lambda self: ())


def the_host_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """Host lanes, and the running norm, treat work enqueued in a stream as done."""
    patch.setattr(ThreadLane, "_order", lambda self, ticket: None)
    patch.setattr(Ticket, "synchronize", lambda self: None)


def memory_is_freed_at_once(patch: pytest.MonkeyPatch) -> None:
    """The allocator does not learn about the use in another stream."""

    patch.setattr(AcceleratorDevice, "lend", lambda self, tensor: None)


def the_caller_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """The caller waits neither for the norm nor for other values."""
    patch.setattr(StreamLanes, "wait", lambda self, tickets, *, users=(): self._await(tickets, users))


def without(method: str, *callers: str) -> Change:
    """Disable a method of the lanes for these callers: marks of compute, or waits for work in streams. Waits until the
    work is enqueued remain.
    """
    original = getattr(StreamLanes, method)

    def none(self: StreamLanes) -> Any:
        return () if sys._getframe(1).f_code.co_qualname in callers else original(self)

    def early(self: StreamLanes, tickets: Any, *, users: Any = ()) -> None:
        if sys._getframe(1).f_code.co_qualname in callers:
            self._await(tickets, users)
        else:
            original(self, tickets, users=users)

    return lambda patch: patch.setattr(StreamLanes, method, none if method == "mark" else early)


def staging_is_used_again_at_once(patch: pytest.MonkeyPatch) -> None:
    give_back = _Staging.give_back

    def at_once(self: _Staging, staged: torch.Tensor, event: torch.Event) -> None:
        give_back(self, staged, own_accelerator("sim").event())  # never recorded, so complete

    patch.setattr(_Staging, "give_back", at_once)


def numbers_are_read_before_they_are_down(patch: pytest.MonkeyPatch) -> None:
    def copy_to_host(self: AcceleratorDevice, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        staged = self._staging.take(values)
        staged.copy_(values.detach(), non_blocking=True)
        return staged.clone

    patch.setattr(AcceleratorDevice, "copy_to_host", copy_to_host)


def events_are_used_again_at_once(patch: pytest.MonkeyPatch) -> None:
    present = StreamLanes.record_event

    def give_back(self: StreamLanes, stream: torch.Stream) -> torch.Event:
        event = present(self, stream)
        self.pool.append(event)
        return event

    patch.setattr(StreamLanes, "record_event", give_back)
    patch.setattr(StreamTicket, "__del__", lambda self: None)


def slots_are_free_at_once(patch: pytest.MonkeyPatch) -> None:
    release = Slots.release
    patch.setattr(Slots, "release", lambda self, cargo, regions, marks: release(self, cargo, regions, ()))


def does_not_wait(lane: str) -> Change:
    """A lane with a stream of its own no longer waits for other lanes."""

    def change(patch: pytest.MonkeyPatch) -> None:
        wait = StreamLane._order
        patch.setattr(StreamLane, "_order", lambda self, ticket: None if self.name == lane else wait(self, ticket))

    return change


WITHOUT: Mapping[str, tuple[Change, str, str]] = {  # change, case that shows the error, late side
    "compute waits for copies": (compute_does_not_wait, "plain", "copies"),
    "compute waits for weights": (without("compute_after", "Slots.use"), "plain", "copies"),
    "compute waits for inputs that come back": (
        without("compute_after", "SavedInputs.wait"),
        "micro-batches",
        "copies",
    ),
    "compute waits for gradients on their way": (without("compute_after", "GradientFlow.open"), "unclipped", "copies"),
    "streams wait for each other": (streams_do_not_wait, "plain", "compute"),
    "copies wait for compute": (nobody_waits_for_compute, "plain", "compute"),
    "weights wait for who uses their slot": (slots_are_free_at_once, "plain", "compute"),
    "weights wait for who uses a stale slot": (without("mark", "Slots._retire"), "unclipped", "compute"),
    "weights wait for fresh memory": (without("mark", "Slots._new_fence"), "plain", "compute"),
    "gradients wait for their backward": (without("mark", "Exchange.reduce"), "plain", "compute"),
    "squares that come down alone wait for it": (
        without("mark", "Exchange._copy_squares"),
        "states on the device",
        "compute",
    ),
    "inputs go down when they are there": (
        without("mark", "HostActivationOffload._copy_out"),
        "activations",
        "compute",
    ),
    "graphs go down when they are there": (
        without("mark", "HostActivationOffload._copy_out"),
        "graphs below",
        "compute",
    ),
    "graphs come back to memory that is free": (
        without("mark", "HostActivationOffload._copy_in"),
        "graphs below",
        "compute",
    ),
    "compute waits for graphs that come back": (without("compute_after", "SavedInputs.wait"), "graphs below", "copies"),
    "memory waits for copies of graphs": (memory_is_freed_at_once, "graphs below", "copies"),
    "inputs come back to memory that is free": (
        without("mark", "HostActivationOffload._copy_in"),
        "activations",
        "compute",
    ),
    "inputs go to the disk when they are there": (
        without("mark", "DiskActivationOffload._copy_out"),
        "nvme",
        "compute",
    ),
    "inputs come from the disk to free memory": (without("mark", "DiskActivationOffload._copy_in"), "nvme", "compute"),
    "updates wait for gradients": (the_host_does_not_wait, "unclipped", "copies"),
    "the disk waits for gradients": (the_host_does_not_wait, "nvme", "copies"),
    "memory waits for copies of inputs": (memory_is_freed_at_once, "activations", "copies"),
    "memory waits for copies of gradients": (memory_is_freed_at_once, "wide gradients", "copies"),
    "the norm waits for its parts": (the_caller_does_not_wait, "plain", "copies"),
    "a loss waits for compute": (numbers_are_read_before_they_are_down, "evaluation", "compute"),
    "staging waits for copies": (staging_is_used_again_at_once, "plain", "copies"),
    "events wait for who waits for them": (events_are_used_again_at_once, "plain", "copies"),
    "states go up after what is there has gone down": (
        does_not_wait("update_up"),
        "updates on the device",
        "copies to the host",
    ),
    "updates wait for their states": (does_not_wait("update_on_device"), "updates on the device", "copies"),
    "states go down after their update": (does_not_wait("update_down"), "updates on the device", "compute"),
    "the norm so far waits for its parts": (the_host_does_not_wait, "corrections on the device", "copies"),
    "fetches wait for weights that go down": (does_not_wait("h2d"), "updates on the device", "copies"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_without_this_wait_a_result_is_wrong(
    sim: Control, wanted: Wanted, learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    change, case, slow = WITHOUT[name]
    expected, analysis = wanted(case), learned(case)
    change(monkeypatch)
    for seed in range(20):
        sim.set_jitter(LATE_US * (1 + seed), seed, slow)  # longer each time, to make a rare race certain
        try:
            if not is_same(run(case, tmp_path / str(seed), "sim", analysis=analysis), expected):
                return
        except Exception:  # NaN, or an impossible state
            return
    pytest.fail("twenty runs went well without it")


WAITING: Mapping[str, tuple[Callable[[StreamLanes, Pinning], Any], Change]] = {  # action, and the wait removed from it
    "close": (
        lambda lanes, pinning: lanes.close(),
        lambda patch: patch.setattr(StreamLane, "close", ThreadLane.close),
    ),
    "give up": (
        lambda lanes, pinning: lanes.give_up(),
        lambda patch: patch.setattr(StreamLane, "cancel", ThreadLane.cancel),
    ),
    "finish": (
        lambda lanes, pinning: lanes.finish(),
        lambda patch: patch.setattr(StreamLanes, "finish", Lanes.finish),
    ),
    "unregister": (
        lambda lanes, pinning: pinning.unregister([]),
        lambda patch: patch.setattr(Accelerator, "wait", lambda self: None),
    ),
}


@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
@pytest.mark.parametrize("what", WAITING)
def test_whoever_ends_something_waits_for_what_is_in_the_streams(
    sim: Control, monkeypatch: pytest.MonkeyPatch, what: str, broken: bool
) -> None:
    end, change = WAITING[what]
    accelerator = own_accelerator("sim")
    assert accelerator is not None
    lanes = StreamLanes(accelerator, throttle={}, delay_seed=None, abort=None)
    memory = torch.zeros(8, device="sim")
    lanes.d2h.submit(lambda: memory)
    lanes.d2h.finish()
    if broken:
        change(monkeypatch)
    thread = threading.Thread(target=end, args=[lanes, Pinning(accelerator)])
    with sim.held(lanes.d2h._stream):  # type: ignore[attr-defined]
        lanes.d2h.submit(lambda: memory.fill_(1.0))
        lanes.d2h.finish()
        thread.start()
        thread.join(0.05 if not broken else 10)
        assert thread.is_alive() != broken
    thread.join()
    monkeypatch.undo()
    lanes.close()


@pytest.mark.parametrize("broken", [False, True], ids=["", "broken"])
def test_memory_that_a_copy_fills_is_nobody_elses_before(
    sim: Control, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """When spare memory is released, slots are freed during H2D copies to them."""
    engine = Engine(build(llama), device="sim")
    engine.step(words(0))
    engine.finish()
    slots, lane = parts_of(engine).slots, parts_of(engine).lanes.h2d
    cargo = next(number for number, regions in enumerate(slots.cargoes) if regions)
    if broken:
        memory_is_freed_at_once(monkeypatch)
    size = slots.capacity_bytes
    parts_of(engine)._forget_addresses()
    slots.resize(size)
    parts_of(engine).lanes.finish()
    with sim.held(lane._stream):  # type: ignore[attr-defined]
        slots.fetch(cargo, 0)
        lane.finish()
        address = slots._memory.data_ptr()
        slots.resize(0)
        others: list[torch.Tensor] = []
        while len(others) < 100 or (broken and all(abs(other.data_ptr() - address) >= size for other in others)):
            others.append(torch.full((size,), 7, dtype=torch.uint8, device="sim"))  # the lane may release the slot late
        torch.accelerator.current_stream().synchronize()  # fill all tensors before the copy starts
    torch.accelerator.synchronize()
    assert all(bool((other == 7).all()) for other in others) != broken
    engine.close()


def test_without_registration_copies_are_staged(sim: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("plain", tmp_path, "sim")
    pinned = sim.counters()
    sim.reset_counters()
    monkeypatch.setattr(Pinning, "register", lambda self, address, num_bytes: False)
    run("plain", tmp_path, "sim")
    pageable = sim.counters()
    assert pageable["pageable_bytes"] > 2 * pinned["pageable_bytes"], "the first pass is tried by pageable ones"


def test_without_unregistration_ranges_are_left(sim: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(HostMapping, "unpin", lambda self: kept.append(self._pieces))
    run("activations", tmp_path, "sim")
    assert sim.registered()[0] > 0
    for address, _ in (piece for pieces in kept for piece in pieces):
        torch.sim.host_unregister(address)
    torch.sim.take_last_error()
