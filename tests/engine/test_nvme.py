"""States, gradients and activations on disk: the same bits as in memory, byte counts as computed from shapes, and
memory independent of model depth.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import Engine, Placement
from offload.errors import DoesNotFitError
from offload.layout.sharding import Sharding
from offload.native.io import IoEngine
from offload.planning import disk
from offload.tiers import nvme
from tests.cases.models import build, llama, tokens
from tests.disks import nameless
from tests.engine.compare import assert_same, assert_same_states, weights
from tests.engine.inside import disk_files, parts_of, states
from tests.engine.sizes import tier_bytes
from tests.engine.test_overlap import MODES, deep
from tests.matrix import quick

TILE = 2048
"""Elements per tile, the minimum, so that even tiny regions are cut."""
CHUNK = 12288
"""Stripe size in bytes; a tile spans all disks."""
ALL = {"parameters": "nvme", "optimizer": "nvme", "gradients": "nvme", "activations": "nvme"}
Maker = Callable[[], nn.Module]


def deeper() -> nn.Module:
    return llama(num_hidden_layers=12)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_LARGEST_TILE", TILE)
    monkeypatch.setattr(nvme, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not nameless(tmp_path), "every file is closed"


def on_disk(*folders: Path, **placement: Any) -> Placement:
    return Placement(**{"parameters": "nvme", "optimizer": "nvme", "nvme_dir": folders} | placement)


def train(make: Maker, num_steps: int, **settings: Any) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """Return ([loss, norm, ...], weights, optimizer states)."""
    engine = Engine(build(make), **settings)
    numbers: list[float] = []
    for seed in range(num_steps):
        torch.manual_seed(seed)
        result = engine.step(tokens(seed))
        numbers += [result.loss.item(), result.grad_norm]
    found = numbers, weights(engine), states(engine)
    engine.close()
    return found


@cache
def in_memory(make: Maker, num_steps: int, precision: str) -> Any:
    placement = Placement(parameters="cpu", optimizer="cpu")
    return train(make, num_steps, precision=precision, placement=placement, **MODES["deferred"])


def assert_equal(found: Any, wanted: Any) -> None:
    assert found[0] == wanted[0]
    assert_same(found[1], wanted[1])
    assert_same_states(found[2], wanted[2])


def host_memory_for(make: Maker, precision: str, fraction: float) -> int:
    """Return a host budget in bytes that keeps `fraction` of the states in memory."""
    engine = Engine(build(make), precision=precision, placement=Placement(activations="device"), prefetch=2)
    states_bytes = sum(tier_bytes(engine, "cpu").values())
    regions = parts_of(engine).regions
    everything = disk._all_on_disk(regions, TILE, Sharding())
    engine.close()
    return int(fraction * states_bytes) + sum(disk.ring_bytes(everything, regions).values())


# -- the same bits -------------------------------------------------------------------------------------------

NUM_STEPS = 3


@pytest.mark.parametrize(
    ("io", "prefetch", "num_folders", "fraction", "precision"),
    quick(
        [("io_uring", 0, 1, 0.0, "bf16"), ("threads", 4, 3, 0.3, "fp32"), ("io_uring", 1, 2, 0.3, "bf16")],
        [("threads", 4, 3, 0.3, "fp32")],
    ),
)
def test_steps_are_bit_equal(
    io: str, prefetch: int, num_folders: int, fraction: float, precision: str, folder: Path, monkeypatch: Any
) -> None:
    used = []

    def chosen() -> IoEngine:
        used.append(IoEngine(io))
        return used[-1]

    monkeypatch.setattr(nvme, "IoEngine", chosen)
    folders = [folder / f"disk{number}" for number in range(num_folders)]
    for one in folders:
        one.mkdir()
    if fraction:
        budget = {"host_memory": host_memory_for(deeper, precision, fraction), "device_memory": "1MiB"}
        placement = Placement(parameters="auto", optimizer="auto", activations="device", nvme_dir=folders, **budget)
    else:
        placement = on_disk(*folders, gradients="nvme")
    found = train(deeper, NUM_STEPS, precision=precision, placement=placement, prefetch=prefetch, **MODES["deferred"])
    assert_equal(found, in_memory(deeper, NUM_STEPS, precision))
    assert bool(used) == (fraction < 1)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("most", [4096, 20_000, 1 << 20])
def test_parts_of_an_activation_come_back(axis: int, most: int) -> None:
    """Rows along any axis are read in tiles. Compares against brute force over the bytes of each tile."""
    from offload.engine.units.activation_offload import _tiles

    whole = torch.arange(6 * 5 * 700, dtype=torch.int32).view(6, 5, 700)
    raw = whole.reshape(-1).view(torch.uint8)
    for begin, end in itertools.combinations(range(whole.shape[axis] if axis < 2 else 6), 2):
        part = whole.narrow(axis, begin, end - begin)
        pieces = []
        for start, num_rows, row_bytes, run_bytes in _tiles(part, most):
            assert (num_rows - 1) * row_bytes + run_bytes <= most
            pieces += [raw[start + n * row_bytes :][:run_bytes] for n in range(num_rows)]
        assert torch.equal(torch.cat(pieces).view(torch.int32).view(part.shape), part)


# -- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "gradients"), [("fp32", "nvme"), ("bf16", "auto")])
@pytest.mark.usefixtures("nothing_left_over")
def test_counters_equal_what_the_shapes_say(precision: str, gradients: str, folder: Path) -> None:
    """Every state is read and written once per step.

    Weights are copied to the device twice more. Exceptions: resident units and the unit between forward and backward
    (once). A copy reads the disk unless the update ring still has the tiles. In the forward these are the last updated
    tiles; the first unit is copied right after the update. In the backward these are the tiles read early, or, with
    gradients on disk, the last tiles not yet overwritten by gradients.
    """
    engine = Engine(
        build(deep),
        precision=precision,
        placement=on_disk(folder, gradients=gradients),
        prefetch=0,
        **MODES["deferred"],
    )
    width = 4 if precision == "fp32" else 2
    regions = parts_of(engine).regions
    numel = sum(region.numel for region in regions)
    waits = width if gradients == "nvme" else 0
    at_hand = 4 if gradients == "nvme" else 16
    assert parts_of(engine).plan.rings[nvme.UPDATE_RING] == at_hand * (12 + waits) * TILE
    assert {region.numel % TILE for region in regions} == {0}
    num_tiles = numel // TILE
    assert [r.numel for r in regions if parts_of(engine).slots.is_resident(r)] == [TILE]
    forward = num_tiles - at_hand - 2  # minus resident tiles and the first unit
    # The last unit is still in a slot, although its gradients may use another place. The one-tile embedding is read
    # early, or needs no read.
    backward = num_tiles - at_hand - 1
    for seed in range(4):
        engine.step(tokens(seed))
        if seed:  # after a start, the ring has no updated tiles
            assert engine.counters.nvme_read_bytes == (12 + waits) * numel + width * TILE * (forward + backward)
        assert engine.counters.nvme_write_bytes == (12 + waits) * numel
    held = tier_bytes(engine, "nvme")
    assert sum(held.values()) == (12 + waits) * numel
    file_bytes = sum(path.stat().st_size for path in disk_files(engine))
    assert file_bytes == sum(held.values()), "the plan is what the files hold"
    engine.close()


@pytest.mark.slow
def test_finish_waits_for_what_a_step_leaves_behind(folder: Path) -> None:
    """Compares file contents: after `finish`, reading the states changes no file."""

    def files() -> list[bytes]:
        return [path.read_bytes() for path in disk_files(engine)]

    engine = Engine(build(deep), placement=on_disk(folder), **MODES["deferred"])
    engine.step(tokens(0))
    engine.finish()
    gate = threading.Event()
    parts_of(engine).lanes.update_write.submit(gate.wait)  # simulate a slow disk
    engine.step(tokens(1))
    left = files()
    threading.Timer(0.05, gate.set).start()
    engine.finish()
    finished = files()
    assert finished != left
    weights(engine)
    assert files() == finished
    engine.close()


@pytest.mark.slow
def test_activations_are_written_and_read_once(folder: Path) -> None:
    engine = Engine(build(deep), placement=Placement(activations="nvme", nvme_dir=folder), recompute="always")
    for seed in range(3):
        engine.step(tokens(seed))
        held = tier_bytes(engine, "nvme")["activation checkpoints"]
        assert engine.counters.nvme_write_bytes == engine.counters.nvme_read_bytes == held
    engine.close()


# -- refusals ------------------------------------------------------------------------------------------------


def test_the_budget_of_the_disk_is_kept(folder: Path) -> None:
    engine = Engine(build(deep), placement=on_disk(folder))
    needed = sum(tier_bytes(engine, "nvme").values())
    engine.close()
    Engine(build(deep), placement=on_disk(folder, nvme_memory=needed)).close()
    with pytest.raises(DoesNotFitError, match=r"offload.nvme_memory.*1 bytes\) more.*Nothing was allocated"):
        Engine(build(deep), placement=on_disk(folder, nvme_memory=needed - 1))
    with pytest.raises(DoesNotFitError, match=r"keep states off the disk with --offload.optimizer cpu[.,]"):
        Engine(build(deep), placement=Placement(optimizer="nvme", nvme_dir=folder, nvme_memory="8KiB"))


def test_activations_count_against_the_budget_of_the_disk(folder: Path) -> None:
    placement = Placement(activations="nvme", nvme_dir=folder, nvme_memory="4KiB")
    engine = Engine(build(deep), placement=placement, recompute="always")
    with pytest.raises(DoesNotFitError, match=r"nvme_memory.*activation checkpoints"):
        engine.step(tokens())
    engine.close()
