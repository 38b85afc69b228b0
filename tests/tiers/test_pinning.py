"""Registered host memory: pieces, lifetime, and refused registrations."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from offload.engine.units.activation_offload import HostActivationOffload
from offload.lanes.lanes import Lanes
from offload.layout.build_regions import build_regions
from offload.layout.regions import ParameterInfo
from offload.layout.residence import DEVICE, SLOT, Residence, Row
from offload.optim.adamw import AdamW
from offload.tiers.counters import Counters, Ledger
from offload.tiers.host import Arena, HostMapping, Pinning
from offload.tiers.store import Store
from tests.tiers.driver import PlayedDevice, PlayedDriver, is_mapped

PAGE = mmap.PAGESIZE


@pytest.fixture
def driver() -> PlayedDriver:
    return PlayedDriver()


def test_pages_are_resident_before_their_registration(driver: PlayedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would touch them in one thread."""
    register, resident = driver.register, []

    def register_resident(address: int, num_bytes: int) -> int:
        pages = (ctypes.c_ubyte * (num_bytes // PAGE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages) == 0
        resident.append(sum(page & 1 for page in pages))
        return register(address, num_bytes)

    monkeypatch.setattr(driver, "register", register_resident)
    arena = Arena(4 * PAGE, Pinning(driver))
    first, last = arena.take(PAGE, torch.uint8).fill_(3), arena.take(3 * PAGE, torch.uint8)
    assert (resident, first.unique().tolist(), last.unique().tolist()) == ([4], [3], [0])


def test_a_large_arena_is_registered_in_pieces_in_which_its_tensors_lie_whole(driver: PlayedDriver) -> None:
    sizes = [3, 3, 3, 20, 1, 1, 5, 5]  # in pages; a piece has 8 if possible
    arena = Arena(sum(sizes) * PAGE, Pinning(driver, 8 * PAGE))
    flats = [arena.take(size * PAGE, torch.uint8) for size in sizes]
    assert [size // PAGE for size in driver.ranges.values()] == [6, 3, 20, 7, 5]
    assert arena.pinned_bytes == sum(sizes) * PAGE
    for flat in flats:
        driver.copy(flat)


def test_pieces_begin_on_pages(driver: PlayedDriver) -> None:
    """Registrations never share a page, although tensors may."""
    sizes = [PAGE + 8, PAGE - 8, PAGE + 8, PAGE, PAGE - 8, PAGE]
    arena = Arena(sum(sizes), Pinning(driver, 2 * PAGE))
    for size in sizes:
        driver.copy(arena.take(size, torch.uint8))
    assert [(begin % PAGE, size) for begin, size in driver.ranges.items()] == [(0, 2 * PAGE), (0, 3 * PAGE), (0, PAGE)]


def test_the_last_tensor_takes_the_registration_with_it(driver: PlayedDriver) -> None:
    arena = Arena(2 * PAGE, Pinning(driver))
    flats = [arena.take(PAGE, torch.uint8) for _ in range(2)]
    del arena
    part = flats.pop()[8:10].view(torch.int16)
    flats.clear()
    assert len(driver.ranges) == 1, "a view of it still lives"
    del part
    assert not driver.ranges
    assert driver.calls == ["register", "wait", "unregister"], "what is on its way comes first"


def test_a_ring_of_references_unregisters_too_and_the_address_is_free(driver: PlayedDriver) -> None:
    for _ in range(20):
        Arena(PAGE, Pinning(driver)).take(PAGE, torch.uint8).fill_(1)
        driver.launch()
    assert driver.registered == [PAGE] * 20
    ring = [Arena(PAGE, Pinning(driver)).take(PAGE, torch.uint8)]
    ring.append(ring)  # type: ignore[arg-type]
    del ring
    gc.collect()
    assert not driver.ranges


def test_closing_unpins_at_once_and_once(driver: PlayedDriver) -> None:
    arena = Arena(PAGE, Pinning(driver))
    flat = arena.take(PAGE, torch.uint8)
    arena.close()
    assert not driver.ranges
    assert arena.pinned_bytes == 0
    arena.close()
    flat.fill_(1)
    del arena, flat
    assert driver.calls == ["register", "wait", "unregister"]


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [2, 4, 6])
def test_a_refusal_leaves_what_comes_first_pinned_is_told_once_and_leaves_no_error(
    driver: PlayedDriver, piece: int
) -> None:
    driver.limit_bytes = 5 * PAGE
    pinning = Pinning(driver, piece * PAGE, margin_bytes=0)
    arenas = [Arena(6 * PAGE, pinning) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"24 KiB .* \(CUDA error 2\): 8 KiB stay .* container") as warned:
        flats = [arena.take(2 * PAGE, torch.uint8) for arena in arenas for _ in range(3)]
    driver.launch()
    assert len(warned) == 1
    assert "ulimit" not in str(warned[0].message)
    assert [arena.pinned_bytes for arena in arenas] == [4 * PAGE, 0]
    pinned = [any(begin <= flat.data_ptr() < begin + size for begin, size in driver.ranges.items()) for flat in flats]
    assert pinned == [True, True, False, False, False, False]
    for flat in flats:
        flat.fill_(1)
        driver.copy(flat)
    arenas[0].close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small = Arena(4 * PAGE, pinning)
        small.take(4 * PAGE, torch.uint8)
    assert small.pinned_bytes == 4 * PAGE, "what still fits is pinned"


@pytest.mark.parametrize(
    ("piece", "margin", "kept"),
    [(2, 0, 8), (2, 1, 6), (2, 2, 6), (2, 3, 4), (100, 1, 6), (100, 3, 4), (100, 8, 0), (2, 100, 0), (6, 1, 6)],
)
def test_after_a_refusal_a_margin_is_given_back(driver: PlayedDriver, piece: int, margin: int, kept: int) -> None:
    """In pages. Tensors of 2 pages are pinned whole or not at all."""
    driver.limit_bytes = 8 * PAGE
    pinning = Pinning(driver, piece * PAGE, margin * PAGE)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        arenas = [Arena(12 * PAGE, pinning) for _ in range(2)]
        flats = [arena.take(2 * PAGE, torch.uint8) for arena in arenas for _ in range(6)]
    assert [arena.pinned_bytes // PAGE for arena in arenas] == [kept, 0]
    assert sum(driver.ranges.values()) == kept * PAGE
    for flat in flats:
        driver.copy(flat)
    driver.launch()
    if margin:
        small = Arena(min(margin, 8) * PAGE, Pinning(driver))
        small.take(small.num_bytes, torch.uint8)
        assert small.pinned_bytes == small.num_bytes, "the margin is there"


@pytest.mark.parametrize("trouble", ["refused", "lost", "forked", "ending"])
def test_what_cannot_be_unregistered_stays_mapped(
    driver: PlayedDriver, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(PAGE, Pinning(driver))
    flat = arena.take(PAGE, torch.uint8)
    address, before = flat.data_ptr(), len(driver.calls)
    if trouble == "refused":
        driver.ranges.clear()
    elif trouble == "lost":
        driver.is_lost = True
    elif trouble == "forked":
        process = os.getpid()
        monkeypatch.setattr("os.getpid", lambda: process + 1)
    else:
        monkeypatch.setattr(HostMapping.__del__, "__defaults__", (lambda: True, HostMapping.__del__.__defaults__[1]))
    del arena, flat
    assert is_mapped(address, PAGE)
    if trouble in ("forked", "ending"):
        assert len(driver.calls) == before, "neither a forked child nor the interpreter's end asks the driver"
    driver.launch()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc/self/smaps")
def test_a_fork_does_not_copy_pinned_pages(driver: PlayedDriver) -> None:
    flat = Arena(PAGE, Pinning(driver)).take(PAGE, torch.uint8)
    _, _, after = Path("/proc/self/smaps").read_text().partition(f"{flat.data_ptr():x}-")
    flags = next(line for line in after.splitlines() if line.startswith("VmFlags:"))
    assert "dc" in flags.split(), "the kernel's name for MADV_DONTFORK"


# -- arena owners --------------------------------------------------------------------------------------------


def test_a_store_replaces_and_closes_what_it_registered(driver: PlayedDriver) -> None:
    infos = [ParameterInfo(number, str(number), (64, 64), True, "bf16", False) for number in range(4)]
    regions = build_regions(infos, {"a": [0, 1], "b": [2, 3]}, [AdamW().moments])
    device = PlayedDevice(Pinning(driver, 1 << 14), driver)
    lanes = Lanes(overlap=False, throttle={})
    store = Store(regions, infos, device=device, host=Ledger("cpu"), lanes=lanes)
    states = dict(driver.ranges)
    assert len(states) > 1, "above the largest registration"
    for accumulated in ([], [region.index for region in regions], []):
        store.hold_gradients(accumulated)
        assert states.items() <= driver.ranges.items()
        assert store.pinned_bytes == sum(driver.ranges.values())
        copy_all(store, device)
    store.close()
    assert not driver.ranges


@pytest.mark.parametrize("in_slots", [False, True])
@pytest.mark.parametrize("streamed", [(), (1,), (1, 2)])
def test_what_is_copied_to_the_device_is_pinned_and_the_rest_is_not(
    driver: PlayedDriver, streamed: Sequence[int], in_slots: bool
) -> None:
    infos = [ParameterInfo(number, str(number), (64, 64), number > 0, "bf16", True) for number in range(3)]
    regions = build_regions(infos, {str(number): [number] for number in range(3)}, [AdamW().moments])
    update = {number: SLOT for number in (1, 2) if in_slots} | dict.fromkeys(streamed, DEVICE)
    residence = Residence({number: Row(update=place) for number, place in update.items()})
    device, lanes = PlayedDevice(Pinning(driver), driver), Lanes(overlap=False, throttle={})
    store = Store(regions, infos, device=device, host=Ledger("cpu"), lanes=lanes, residence=residence)

    def is_pinned(flat: torch.Tensor) -> bool:
        return any(begin <= flat.data_ptr() < begin + size for begin, size in driver.ranges.items())

    everything, travels, pinned = {"weights", "low", "exp_avg", "exp_avg_sq"}, 0, set[str]()
    for state in store.states.values():
        found = {name for name, flat in state.planes.items() if is_pinned(flat)}
        always = {"weights", "low"} if in_slots and state.region.trainable else {"weights"}
        assert found == (everything if state.region.index in streamed else always)
        travels += sum(flat.nbytes for name, flat in state.planes.items() if name in found)
        pinned |= found
    assert store.pinned_bytes == travels
    assert {label.replace(" ", "_") for label in residence.resting_labels(regions)} == everything - pinned
    store.close()


def copy_all(store: Store, device: PlayedDevice) -> None:
    for state in store.states.values():
        for flat in (*state.planes.values(), state.gradients):
            assert flat is not None
            device.copy(torch.empty_like(flat), flat)


def test_activation_buffers_are_registered_as_long_as_they_live(driver: PlayedDriver) -> None:
    device = PlayedDevice(Pinning(driver), driver)
    place = HostActivationOffload(device, Lanes(overlap=False, throttle={}), Counters(), Ledger("cpu"))
    for size in (100, PAGE, 3 * PAGE):
        place.put(torch.zeros(size, dtype=torch.uint8))
    place.end_step()
    assert not driver.ranges, "what is in use is left alone"
    place.reset()
    place.end_step()
    assert sorted(driver.ranges.values()) == [100, PAGE, 3 * PAGE]
    place.end_step()
    assert len(driver.registered) == 3, "once"
    place.put(torch.zeros(4 * PAGE, dtype=torch.uint8))
    assert not driver.ranges, "larger ones take their place"
