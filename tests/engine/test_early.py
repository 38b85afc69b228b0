"""Early reads of disk states, before the norm is known: every lease is released at the end, and all bits equal states
in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from offload import Engine, Placement
from offload.engine.gradients.tile_updates import EarlyReads
from offload.errors import DiskError, TornError
from offload.planning import disk
from offload.tiers.nvme import RING_TILES, UPDATE_RING, Stripes
from tests.cases.models import build
from tests.engine.compare import assert_same, assert_same_states, weights
from tests.engine.handmade import Stack, cross_entropy, words
from tests.engine.inside import parts_of, states
from tests.engine.test_giving_up import Told, raise_in_backward


class Fickle(Stack):
    """Run the blocks in the order `takes`, possibly not all. `breaks` raises in the backward."""

    def __init__(self) -> None:
        super().__init__(depth=5)
        self.takes: tuple[int, ...] = (0, 1, 2, 3, 4)
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for number in self.takes:
            h = self.blocks[number](h)
            if self.breaks and number == self.takes[0]:
                raise_in_backward(h)
        return self.head(h)


def _fail(*_: object) -> None:
    raise DiskError("on purpose", 5, Path("states.bin"), 0, 1)


class Pair:
    """Two engines, with states on disk and in memory, for the same work on both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        placement = Placement(parameters="nvme", optimizer="nvme", nvme_dir=folder)
        self.on_disk, self.in_memory = (
            Engine(build(Fickle), placement=place, on_nonfinite="skip", clip="deferred", max_grad_norm=0.2)
            for place in (placement, Placement())
        )

    def do(self, work: Callable[[Engine], Any]) -> None:
        assert work(self.on_disk) == work(self.in_memory)
        assert not parts_of(self.on_disk).updates.tiles.early._leases
        ring = parts_of(self.on_disk).store._nvme.updates.ring
        assert not [stretch for stretch in ring._slices if stretch.is_open]

    def compare(self) -> None:
        assert_same_states(states(self.on_disk), states(self.in_memory))
        assert_same(weights(self.on_disk), weights(self.in_memory))


def step(engine: Engine, seed: int = 0, scale: float = 1.0) -> tuple[float, bool]:
    result = engine.step(words(seed), loss_fn=lambda outputs, batch: scale * cross_entropy(outputs, batch))
    return result.loss.item(), result.skipped


def steps(engine: Engine) -> list[Any]:
    return [step(engine, seed) for seed in range(3)]


def skipped(engine: Engine) -> None:
    assert step(engine, scale=float("inf"))[1]


def fails(engine: Engine) -> None:
    engine.model.breaks = True
    with pytest.raises(Told):
        step(engine)
    engine.model.breaks = False


def takes(*blocks: int) -> Callable[[Engine], Any]:
    def run(engine: Engine) -> list[Any]:
        engine.model.takes = blocks
        return steps(engine)

    return run


def own_loop(engine: Engine) -> list[float]:
    found = []
    for _ in range(2):
        engine.backward(cross_entropy(engine.model(words()["x"]), words()))
        found.append(engine.evaluate(words(1), loss_fn=cross_entropy).item())
    return [*found, engine.update().grad_norm]


def saves_and_loads(engine: Engine, folder: Path) -> None:
    engine.save_checkpoint(folder)
    step(engine, 3)
    engine.load_checkpoint(folder)


DONE: list[Callable[[Engine], Any]] = [
    skipped,
    fails,
    takes(4, 3, 2, 0, 1),
    takes(0, 3),
    takes(4),
    lambda engine: engine.evaluate(words(1), loss_fn=cross_entropy).item(),
    lambda engine: [value.sum().item() for value in weights(engine).values()],
    own_loop,
]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Yield engines after a few steps with 12 early tile reads, besides the usual four."""
    monkeypatch.setattr(disk, "_LARGEST_TILE", 2048)
    monkeypatch.setattr(disk, "_MOST_EARLY_TILES", 12)
    pair, early, read = Pair(tmp_path), [], EarlyReads.begin

    def counted(reads: EarlyReads) -> None:
        read(reads)
        early.append(len(reads._leases))

    monkeypatch.setattr(EarlyReads, "begin", counted)
    pair.do(steps)
    tiles = sum(len(state.tiles) for state in parts_of(pair.on_disk).store.states.values())
    assert max(early) == min(4 + 12, tiles)
    yield pair
    pair.on_disk.close()
    pair.in_memory.close()


@pytest.mark.slow
def test_what_was_read_early_is_given_back(pair: Pair, tmp_path: Path) -> None:
    for work in DONE:
        pair.do(work)
        pair.do(steps)
        pair.compare()
    for engine in (pair.on_disk, pair.in_memory):
        saves_and_loads(engine, tmp_path / str(id(engine)))
    pair.do(steps)
    pair.compare()


def test_weights_without_a_gradient_stay_on_the_device() -> None:
    engine = Engine(build(Fickle), placement=Placement(device_memory="8MiB"), clip="deferred", max_grad_norm=0.2)
    slots = parts_of(engine).slots
    cargoes = [slots.cargo_of(unit.regions) for unit in parts_of(engine).units if "blocks" in unit.name]
    steps(engine)
    engine.evaluate(words(), loss_fn=cross_entropy)
    assert set(cargoes) <= set(slots.valid_offsets())
    engine.model.takes = (4,)
    step(engine)
    assert set(cargoes[:4]) <= set(slots.valid_offsets())
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("more", [1, 20])
def test_no_more_is_read_early_than_host_memory_has_room_for(
    more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient sums of a user's own loop, allocated later, still fit. `more`: number of tiles beyond the
    minimum.
    """
    monkeypatch.setattr(disk, "_LARGEST_TILE", 2048)

    def run(host_memory: int | None) -> tuple[int, int]:
        tiers = {"parameters": "nvme", "optimizer": "nvme", "gradients": "cpu"}
        placement = Placement(**tiers, nvme_dir=tmp_path, host_memory=host_memory)
        with Engine(build(Fickle), placement=placement, clip="deferred") as engine:
            step(engine)
            own_loop(engine)
            return parts_of(engine).plan.rings[UPDATE_RING], engine.counters.peak_host_bytes

    with monkeypatch.context() as patched:
        patched.setattr(disk, "_MOST_EARLY_TILES", 0)
        ring_bytes, needed = run(None)
    tile_bytes = ring_bytes // RING_TILES
    host_memory = needed + more * tile_bytes
    found, peak = run(host_memory)
    assert peak <= host_memory
    assert ring_bytes <= found <= ring_bytes + 12 * tile_bytes
    assert found <= ring_bytes + more * tile_bytes
    assert (found > ring_bytes) == (more > 2)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before the norm", "after it", "in a step that is skipped"])
def test_a_read_that_fails(when: str, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed early read ends the step without a trace if no update has begun. A skipped step does not need the
    read.
    """
    early = EarlyReads.begin

    def read(reads: EarlyReads) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Stripes, "read", _fail)
            early(reads)
            parts_of(pair.on_disk).lanes.update_read.finish()

    pair.on_disk.save_checkpoint(tmp_path / "saved")
    with monkeypatch.context() as patched:
        patched.setattr(EarlyReads, "begin", read)
        if when == "in a step that is skipped":
            pair.do(skipped)
        elif when == "before the norm":
            with pytest.raises(DiskError, match="on purpose"):
                step(pair.on_disk)
        else:
            patched.setattr(EarlyReads, "check", lambda _: None)
            step(pair.on_disk)
            with pytest.raises(TornError, match="on purpose"):
                pair.on_disk.finish()
            pair.on_disk.load_checkpoint(tmp_path / "saved")
    pair.do(steps)
    pair.compare()
