"""Tests of the race rule: each type of wait is removed once, and a result must then be wrong.

Lanes wait at random and freed buffers are poisoned (`debug`), so an early reader or writer shows in the result. Waits
without visible effect in engine steps are tested on the parts with the waits, with a blocked lane. On a CPU, compute is
finished on return: tests/accelerator/test_engine.py covers the waits for compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import AdamW, Engine, Placement
from offload.engine.gradients.tile_updates import RegionUpdate
from offload.engine.recording.equivalence import PassComparator
from offload.engine.units.saved_inputs import SavedInputs
from offload.lanes.lanes import Lanes
from offload.lanes.streams import StreamLanes
from offload.lanes.threads import ThreadLane
from offload.lanes.ticket import Fence, Ticket
from offload.planning import device_updates, disk
from offload.planning.device_updates import UPDATE_RING as DEVICE_RING
from offload.schedule.execute import Executor
from offload.tiers.lease import Ring
from offload.tiers.nvme import ACTIVATION_RING, FETCH_RING, UPDATE_RING, Channel, Record
from offload.tiers.tile import Tile
from tests.cases.models import build, llama, tokens
from tests.engine.compare import same_bits, weights
from tests.engine.handmade import WIDTH, Stack, cross_entropy, words
from tests.engine.inside import parts_of, stored_plane
from tests.engine.test_overlap import deep

Change = Callable[[pytest.MonkeyPatch], None]
FREE: dict[str, Any] = {"max_grad_norm": None}
CLIPPED: dict[str, Any] = {"max_grad_norm": 0.2}


def without(kinds: str | tuple[str, ...], wait: str) -> Change:
    """Remove the waits of a reader, or of the next writer, for some types of buffer."""

    def change(patch: pytest.MonkeyPatch) -> None:
        original, none = getattr(Fence, wait), (kinds,) if isinstance(kinds, str) else kinds
        patch.setattr(Fence, wait, lambda self: () if self.buffer_type in none else original(self))

    return change


def reused_at_once(kind: str, link: str | None = None) -> Change:
    """Hand out a ring slice during use. `link`: ignore only the users on this link."""

    def change(patch: pytest.MonkeyPatch) -> None:
        original = Ring.take

        def take(self: Ring, num_bytes: int) -> Any:
            stretch = original(self, num_bytes)
            if stretch is not None and self.buffer_type == kind:
                stretch.users[:] = [ticket for ticket in stretch.users if link not in (None, ticket.lane)]
            return stretch

        patch.setattr(Ring, "take", take)

    return change


def from_the_disk(change: Change) -> Change:
    """Read all weights from disk, as for a model larger than the update ring."""

    def changed(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Record, "_at_hand", lambda *_: None)
        change(patch)

    return changed


def used_before_it_was_read(kind: str) -> Change:
    """Do not wait for disk reads into a ring."""

    def change(patch: pytest.MonkeyPatch) -> None:
        original = Channel.read

        def read(self: Channel, *args: Any, **settings: Any) -> Ticket:
            ticket = original(self, *args, **settings)
            return Ticket("nvme_read", is_done=True) if self.ring.buffer_type == kind else ticket

        patch.setattr(Channel, "read", read)

    return change


def begun_at_once(*lanes: str) -> Change:
    """Start work on lanes before the data to read are ready."""

    def change(patch: pytest.MonkeyPatch) -> None:
        original = ThreadLane.submit

        def submit(self: ThreadLane, work: Callable[[], object], **how: Any) -> Ticket:
            return original(self, work, **how | ({"reads": ()} if self.name in lanes else {}))

        patch.setattr(ThreadLane, "submit", submit)

    return change


def written_at_once(kind: str) -> Change:
    """Write a ring slice to disk before the update or the D2H copy into the slice is done."""

    def change(patch: pytest.MonkeyPatch) -> None:
        original = Channel.write

        def write(self: Channel, *args: Any, **settings: Any) -> Ticket:
            return original(self, *args, **settings | ({"reads": ()} if self.ring.buffer_type == kind else {}))

        patch.setattr(Channel, "write", write)

    return change


def fetched_before_the_place_is_free(patch: pytest.MonkeyPatch) -> None:
    """Issue the fetches after a use already at the start of the use."""
    enter, leave = Executor.enter, Executor.leave

    def early(self: Executor, regions: Any, backward: bool) -> None:
        enter(self, regions, backward)
        leave(self, regions)

    patch.setattr(Executor, "enter", early)
    patch.setattr(Executor, "leave", lambda self, regions: None)


def norm_before_the_sums(patch: pytest.MonkeyPatch) -> None:
    """Do not wait for arriving gradients before the norm."""
    for kind in (Lanes, StreamLanes):
        patch.setattr(kind, "wait", lambda self, tickets, users=(): None)
    patch.setattr(Lanes, "compute_after", _WAIT)


def recomputed_at_once(patch: pytest.MonkeyPatch) -> None:
    """Do not wait for the inputs of an activation recomputation."""
    patch.setattr(SavedInputs, "wait", lambda self, returning: returning.tensors)


def deeper() -> nn.Module:
    return llama(num_hidden_layers=16)


class Scaled(Stack):
    """Multiplies the embeddings by a parameter of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) * self.scale
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def only_the_scale_learns() -> nn.Module:
    """Return a model with resident frozen weights, so a step begins without other fetches."""
    model = Scaled()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name == "scale"
    return model


_WAIT = Lanes.wait
STATES = {"parameters": "nvme", "optimizer": "nvme"}
GRADIENTS = {"gradients": "nvme"}
ON_DISK: dict[str, Any] = CLIPPED | {"on_disk": STATES}
MOMENTS: dict[str, Any] = CLIPPED | {"on_disk": {"optimizer": "nvme"}}
WAITING: dict[str, Any] = CLIPPED | {"on_disk": GRADIENTS}
ACTIVATIONS: dict[str, Any] = CLIPPED | {"on_disk": {"activations": "nvme"}}
STREAMED: dict[str, Any] = CLIPPED | {"update": "device"}
LARGE: dict[str, Any] = ACTIVATIONS | {"rows": 64}  # more activation tiles than the ring holds

CHANGES: dict[str, tuple[Change, dict[str, Any]]] = {
    "compute reads a slot before its fetch": (without("slot", "before_read"), CLIPPED),
    "a fetch overwrites a slot in use": (fetched_before_the_place_is_free, CLIPPED | {"prefetch": 1}),
    "a fetch reads weights before their update": (
        without("weights", "before_read"),
        CLIPPED | {"throttle": {"update": {"latency_seconds": 0.01}}},
    ),
    "compute reads what stays before it came up": (
        without("resident weights", "before_read"),
        CLIPPED | {"make": only_the_scale_learns, "placement": Placement(device_memory="8MiB")},
    ),
    "backward overwrites gradients on their way": (reused_at_once("gradient buffer"), FREE),
    "an update reads gradients before they landed": (
        without("waiting gradients", "before_read"),
        CLIPPED | {"clip": "speculative"},
    ),
    "an update reads staging before it is filled": (without("gradient staging", "before_read"), FREE),
    "gradients land on others that wait": (
        reused_at_once("gradient staging"),
        FREE | {"throttle": {"update": {"latency_seconds": 0.02}}},
    ),
    "activations come back before they went down": (
        without("activation checkpoints", "before_read"),
        CLIPPED
        | {"make": deeper, "placement": Placement(activations="cpu"), "throttle": {"d2h": {"latency_seconds": 0.01}}},
    ),
    "a recompute reads inputs before they came back": (
        recomputed_at_once,
        CLIPPED | {"placement": Placement(activations="cpu")},
    ),
    "the norm is taken before the sums": (norm_before_the_sums, CLIPPED | {"own_loop": True}),
    "a fetch reads a record before its update is written": (
        without("record", "before_read"),
        CLIPPED | {"on_disk": {"parameters": "nvme"}},
    ),
    "a correction reads a record before its update is written": (
        without("record", "before_read"),
        MOMENTS | {"clip": "speculative"},
    ),
    "an update reads a record before its gradients are written": (without("waiting gradients", "before_read"), WAITING),
    "a fetch goes up before it was read": (from_the_disk(used_before_it_was_read(FETCH_RING)), ON_DISK),
    "a fetch is read over one that goes up": (from_the_disk(reused_at_once(FETCH_RING, "h2d")), ON_DISK),
    "states are updated before they were read": (used_before_it_was_read(UPDATE_RING), MOMENTS),
    "states are written before they were updated": (written_at_once(UPDATE_RING), MOMENTS),
    "states are read over others that are being written": (reused_at_once(UPDATE_RING, "nvme_write"), MOMENTS),
    "states are read over weights that go up": (
        reused_at_once(UPDATE_RING, "h2d"),
        ON_DISK | {"throttle": {"h2d": {"latency_seconds": 0.002}}},
    ),
    "gradients are written before they landed": (written_at_once(UPDATE_RING), WAITING),
    "gradients land on others that are being written": (reused_at_once(UPDATE_RING, "nvme_write"), WAITING),
    "gradients are read over others that an update reads": (reused_at_once(UPDATE_RING, "update"), WAITING),
    "states go up before their gradients landed": (begun_at_once("update_up"), FREE | {"update": "device"}),
    "states are updated before they went up": (begun_at_once("update", "update_on_device"), STREAMED),
    "states come down before they were updated": (begun_at_once("update_down"), STREAMED),
    "states go up over others that are coming down": (reused_at_once(DEVICE_RING), STREAMED),
    "weights are fetched before they came down": (without("weights", "before_read"), STREAMED),
    "a correction goes up before its update came down": (
        begun_at_once("update_up"),
        STREAMED | {"clip": "speculative"},
    ),
    "states go up before they were read from disk": (
        used_before_it_was_read(UPDATE_RING),
        STREAMED | {"on_disk": {"optimizer": "nvme"}},
    ),
    "states are written before they came down": (
        written_at_once(UPDATE_RING),
        STREAMED | {"on_disk": {"optimizer": "nvme"}},
    ),
    "activations are read before they were written": (
        without("activation checkpoints", "before_read"),
        ACTIVATIONS | {"throttle": {"nvme_write": {"latency_seconds": 0.02}}},
    ),
    "activations are written before they came down": (written_at_once(ACTIVATION_RING), LARGE),
    "activations come down on others that are being written": (reused_at_once(ACTIVATION_RING, "nvme_write"), LARGE),
    "activations go up before they were read": (used_before_it_was_read(ACTIVATION_RING), LARGE),
    "activations are read over others that go up": (
        reused_at_once(ACTIVATION_RING, "h2d"),
        LARGE | {"throttle": {"h2d": {"latency_seconds": 0.01}}},
    ),
}


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rings small, so tiny regions and activations go around them many times."""
    monkeypatch.setattr(disk, "_LARGEST_TILE", 2048)
    monkeypatch.setattr(device_updates, "_LARGEST_TILE", 2048)
    monkeypatch.setattr(disk, "_MOST_ACTIVATION_RING", 1 << 16)


def train(own_loop: bool = False, make: Callable[[], nn.Module] = deep, rows: int = 4, **settings: Any) -> list[Any]:
    """Train three steps. Return the norms, and the weights after two of them."""
    engine = Engine(build(make), **settings)
    loss_fn = cross_entropy if make is only_the_scale_learns else None
    found: list[Any] = []
    try:
        for seed in range(3):
            batch = words(seed) if loss_fn else tokens(seed, rows=rows)
            if own_loop:
                for part in range(2):
                    engine.backward(engine.model(**tokens(10 * seed + part)).loss)
                found.append(engine.update().grad_norm)
            else:
                found.append(engine.step(batch, loss_fn=loss_fn).grad_norm)
            if seed in (0, 2):
                found += weights(engine).values()
    finally:
        engine.close()
    return found


def is_same(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return all(same_bits(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(found, wanted, strict=True))


_SERIAL: dict[str, list[Any]] = {}
_SOUND: set[str] = set()
"""Settings with results equal to serial in-memory results while all waits are in place."""


def serial(settings: Mapping[str, Any]) -> list[Any]:
    """Return the serial in-memory results for the settings, cached."""
    here = {key: value for key, value in settings.items() if key != "on_disk"} | {"prefetch": 0}
    key = repr(sorted(here.items()))
    if key not in _SERIAL:
        _SERIAL[key] = train(**here)
    return _SERIAL[key]


QUICK = (
    "a fetch overwrites a slot in use",
    "compute reads what stays before it came up",
    "an update reads staging before it is filled",
    "the norm is taken before the sums",
)
"""Each of the other changes takes seconds to show a wrong result."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CHANGES]
)
def test_without_this_wait_a_result_is_wrong(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, settings = CHANGES[name][0], dict(CHANGES[name][1])
    on_disk = settings.pop("on_disk", None)
    wanted = serial(CHANGES[name][1])
    if on_disk is not None:
        settings["placement"] = Placement(**on_disk, nvme_dir=tmp_path)
    if (key := repr(sorted(CHANGES[name][1].items()))) not in _SOUND:
        assert is_same(train(**settings, debug=1), wanted), "with all waits nothing is wrong"
        _SOUND.add(key)
    monkeypatch.setattr(PassComparator, "_first_difference", lambda *_, **__: "")  # else some faults are detected
    change(monkeypatch)
    for seed in range(100):  # a busy machine starts compute late and hides the race in many runs
        try:
            if not is_same(train(**settings, debug=seed), wanted):
                return
        except Exception:  # NaN, or an impossible state
            return
    pytest.fail("a hundred runs went well without it: the delays do not show this wait")


# -- waits between parts --------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An idle engine with lane threads, after two steps."""
    yield from stepped(Placement(activations="cpu"))


@pytest.fixture
def streaming() -> Iterator[Engine]:
    """An idle engine with updates on the device, after two steps."""
    yield from stepped(Placement(), update="device")


def stepped(placement: Placement, **more: Any) -> Iterator[Engine]:
    made = Engine(build(deep), throttle={"h2d": 10**12}, prefetch=0, max_grad_norm=0.2, placement=placement, **more)
    for seed in range(2):
        made.step(tokens(seed))
    settle(made)
    yield made
    made.close()


def of_one_tile(engine: Engine) -> tuple[Any, Any]:
    """Return a unit with one region of one tile, and the state of the region."""
    unit = next(unit for unit in parts_of(engine).units if unit.name.endswith("embed_tokens"))
    (region,) = unit.regions
    state = parts_of(engine).store.states[region]
    assert len(state.tiles) == 1
    return unit, state


def land(engine: Engine, state: Any, value: float) -> None:
    """Start a step, and let constant gradients arrive for a region."""
    flow, region = parts_of(engine).gradients, state.region
    flow.begin_step()
    flow.measures.touched[region.index] = [True] * len(region.parameters)
    flow.transfer.send(region, torch.full((region.numel,), value), Fence("gradient buffer"))


def update(engine: Engine, state: Any, gradients: Tensor | None = None) -> None:
    """Submit an update. `gradients=None`: the gradients are on disk."""
    touched, fence = [True] * len(state.region.parameters), Fence("gradients on disk")
    RegionUpdate(parts_of(engine).updates.tiles, state.region, gradients, fence, touched).submit()


def takes_gradients(engine: Engine) -> None:
    """Change the rule: exp_avg becomes the gradient."""
    tiles = parts_of(engine).updates.tiles
    tiles.settings = tiles.settings._replace(rules=[AdamW(betas=(0.0, 0.0))])


def brought_up(engine: Engine, unit: Any, state: Any) -> torch.Tensor:
    """Start the fetch of a unit. Return the slot memory of the first parameter in the region."""
    slots = parts_of(engine).slots
    slots.fetch(slots.cargo_of(unit.regions), 0)
    return slots.place(unit.regions)[state.region][state.span(0)]


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Engine]:
    """An idle engine with all states on disk, after two steps."""
    yield from stepped(Placement(**STATES, **GRADIENTS, activations="nvme", nvme_dir=tmp_path))


@pytest.fixture
def gradients_on_disk(tmp_path: Path) -> Iterator[Engine]:
    """An idle engine with only gradients on disk.

    With other states there, the lane would order the update's write before the gradients' write.
    """
    yield from stepped(Placement(**GRADIENTS, nvme_dir=tmp_path))


@pytest.fixture
def one(request: pytest.FixtureRequest) -> Engine:
    """The engine fixture named by the test parameter."""
    engine: Engine = request.getfixturevalue(request.param)
    return engine


_chance_s = 0.02


@pytest.fixture(autouse=True)
def a_chance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the time for a premature access: short with all waits, long without one, for busy machines."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    monkeypatch.setitem(globals(), "_chance_s", 0.5 if parameters.get("broken") else 0.02)


def settle(engine: Engine) -> None:
    for lane in parts_of(engine).lanes._all:
        lane.drain()
    parts_of(engine).lanes.finish()  # also drains the streams of an accelerator


@contextmanager
def held_up(lane: Any) -> Iterator[None]:
    """Block a lane inside the context and a little longer."""
    gate = threading.Event()
    lane.submit(gate.wait)
    yield
    time.sleep(_chance_s)
    gate.set()
    lane.drain()


def as_it_is(_patch: pytest.MonkeyPatch) -> None:
    """No change: the test itself removes a wait."""


def seen(change: Change = as_it_is) -> pytest.MarkDecorator:
    """Run a test with all waits, and again as `broken`, to prove the test detects a missing wait."""
    return pytest.mark.parametrize(
        "broken", [pytest.param(None, id=""), pytest.param(change, id="broken")], indirect=True
    )


@pytest.fixture
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return True for the broken run. The wait is removed while the engine is idle."""
    if request.param:
        request.param(monkeypatch)
    return bool(request.param)


@pytest.mark.slow
@seen(without("weights", "before_fill"))
@pytest.mark.parametrize("one", ["engine", "streaming"], indirect=True)
def test_an_update_waits_for_the_fetch_that_reads_the_weights(one: Engine, broken: bool) -> None:
    parts, (unit, state) = parts_of(one), of_one_tile(one)
    index = state.region.parameters[0]
    before = parts.store.values.read(index)
    with held_up(parts.lanes.h2d):
        shown = brought_up(one, unit, state)
        update(one, state, torch.ones(state.region.numel))
    settle(one)
    assert torch.equal(shown.cpu(), before.view(-1)) == (not broken)
    assert not torch.equal(parts.store.values.read(index), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "lane", "broken"),
    [
        ("engine", "update", None),
        ("engine", "update", without("weights", "before_read")),
        ("on_disk", "update_write", None),
        ("on_disk", "update_write", without("record", "before_read")),
    ],
    indirect=["one", "broken"],
)
def test_the_host_reads_states_after_their_update(one: Engine, lane: str, broken: bool) -> None:
    parts, (_, state) = parts_of(one), of_one_tile(one)
    index = state.region.parameters[0]
    before = parts.store.values.read(index)
    with ThreadPoolExecutor() as reader, held_up(getattr(parts.lanes, lane)):
        update(one, state, torch.ones(state.region.numel))
        found = reader.submit(parts.store.values.read, index)
    settle(one)
    assert torch.equal(found.result(), before) == broken


@pytest.mark.slow
@seen(without("waiting gradients", "before_fill"))
@pytest.mark.parametrize(("one", "lane"), [("engine", "update"), ("streaming", "update_up")], indirect=["one"])
def test_gradients_wait_for_the_update_that_reads_those_before(one: Engine, lane: str, broken: bool) -> None:
    parts, (_, state) = parts_of(one), of_one_tile(one)
    assert state.gradients is not None
    state.gradients.fill_(0.0)
    with held_up(getattr(parts.lanes, lane)):
        takes_gradients(one)
        RegionUpdate(parts.updates.tiles, state.region, state.gradients, state.gradient_fence, [True]).submit()
        land(one, state, 1.0)
    settle(one)
    exp_avg = state.tiles[0].planes["exp_avg"]
    assert bool((exp_avg[state.span(0)] == 0).all()) == (not broken)
    assert bool((state.gradients == 1).all())


@pytest.mark.slow
@seen(without("activation checkpoints", "before_fill"))
@pytest.mark.parametrize(("one", "lane"), [("engine", "returning"), ("on_disk", "activation_read")], indirect=["one"])
def test_an_activation_waits_for_whoever_reads_the_one_before(one: Engine, lane: str, broken: bool) -> None:
    parts, checkpoints = parts_of(one), parts_of(one).runner.saved._offload
    assert checkpoints is not None
    put = checkpoints.put(torch.full((1000,), 1.0))
    settle(one)
    with held_up(getattr(parts.lanes, lane)):
        back, *_ = checkpoints.get(put)
        checkpoints.free(put.data_ptr())
        again = checkpoints.put(torch.full((1000,), 3.0))
        assert again.data_ptr() == put.data_ptr()
    settle(one)
    assert bool((back == 1).all()) == (not broken)


# -- the same for the disk --------------------------------------------------------------------------------------


@pytest.mark.slow
@seen(without(("weights", "record"), "before_fill"))
def test_an_update_is_written_once_the_fetch_has_read_its_record(on_disk: Engine, broken: bool) -> None:
    """Two waits: the update waits for the H2D copy, and the write waits for the read."""
    parts, (unit, state) = parts_of(on_disk), of_one_tile(on_disk)
    (region,), index = unit.regions, state.region.parameters[0]
    before = parts.store.values.read(index)
    parts.store.reset()  # else the copy comes from the update ring
    with held_up(parts.lanes.fetch_read):
        shown = brought_up(on_disk, unit, state)
        update(on_disk, state, torch.ones(region.numel))
    settle(on_disk)
    assert torch.equal(shown.cpu(), before.view(-1)) == (not broken)
    assert not torch.equal(parts.store.values.read(index), before)


def read_early(engine: Engine, state: Any) -> None:
    """Start to read a region's states for the next update."""
    updates = parts_of(engine).updates
    updates.tiles.early.follow([state.region])
    updates.tiles.early.begin()
    assert len(updates.tiles.early._leases) == 1


@pytest.mark.slow
@seen(without(UPDATE_RING, "before_read"))
def test_weights_go_up_from_the_ring_once_they_were_read(on_disk: Engine, broken: bool) -> None:
    parts, (unit, state) = parts_of(on_disk), of_one_tile(on_disk)
    before = parts.store.values.read(state.region.parameters[0])
    parts.store._nvme.updates.ring.memory.zero_()
    with held_up(parts.lanes.update_read):
        read_early(on_disk, state)
        shown = brought_up(on_disk, unit, state)
    settle(on_disk)
    assert torch.equal(shown.cpu(), before.view(-1)) == (not broken)


@pytest.mark.slow
@seen(without(("weights", UPDATE_RING), "before_read"))
def test_weights_go_up_from_the_ring_once_they_were_updated(on_disk: Engine, broken: bool) -> None:
    """Two waits: one for the weights, and one for their ring slice."""
    parts, (unit, state) = parts_of(on_disk), of_one_tile(on_disk)
    with held_up(parts.lanes.update):
        update(on_disk, state, torch.ones(state.region.numel))
        parts.lanes.update_read.drain()
        shown = brought_up(on_disk, unit, state)
    settle(on_disk)
    assert torch.equal(shown.cpu(), parts.store.values.read(state.region.parameters[0]).view(-1)) == (not broken)


@pytest.mark.slow
@seen(lambda patch: patch.setattr(Tile, "renew_lease", lambda self, lease: lease))
def test_an_update_waits_until_what_was_read_early_has_gone_up(on_disk: Engine, broken: bool) -> None:
    parts, (unit, state) = parts_of(on_disk), of_one_tile(on_disk)
    before = parts.store.values.read(state.region.parameters[0])
    read_early(on_disk, state)
    with held_up(parts.lanes.h2d):
        shown = brought_up(on_disk, unit, state)
        update(on_disk, state, torch.ones(state.region.numel))
    settle(on_disk)
    assert torch.equal(shown.cpu(), before.view(-1)) == (not broken)
    assert not torch.equal(parts.store.values.read(state.region.parameters[0]), before)


@pytest.mark.slow
@seen()
def test_the_host_waits_for_what_it_reads_from_disk(
    on_disk: Engine, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, (_, state) = parts_of(on_disk), of_one_tile(on_disk)
    index = state.region.parameters[0]
    before = parts.store.values.read(index)
    if broken:
        used_before_it_was_read(UPDATE_RING)(monkeypatch)
    parts.store._nvme.updates.ring.memory.zero_()
    with ThreadPoolExecutor() as reader, held_up(parts.lanes.update_read):
        found = reader.submit(parts.store.values.read, index)
    assert torch.equal(found.result(), before) == (not broken)


@pytest.mark.slow
@seen(without("waiting gradients", "before_fill"))
def test_gradients_are_written_once_the_update_has_read_those_before(gradients_on_disk: Engine, broken: bool) -> None:
    parts, (_, state) = parts_of(gradients_on_disk), of_one_tile(gradients_on_disk)
    land(gradients_on_disk, state, 0.0)
    settle(gradients_on_disk)
    takes_gradients(gradients_on_disk)
    with held_up(parts.lanes.update_read):
        update(gradients_on_disk, state)
        land(gradients_on_disk, state, 1.0)
    settle(gradients_on_disk)
    exp_avg = stored_plane(parts.store, state.region.parameters[0], "exp_avg")
    assert exp_avg is not None
    assert bool((exp_avg == 0).all()) == (not broken)
