"""Pinned host memory under the driver's rules."""

import ctypes
import mmap

import pytest
import torch

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]

DEVICE = "sim:0"
PAGE = mmap.PAGESIZE
ALREADY_REGISTERED, NOT_REGISTERED, INVALID = 712, 713, 1


class Mapped:
    """Anonymous memory with a tensor over it; tests register parts."""

    def __init__(self, num_bytes=4 * PAGE):
        self.map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor = torch.frombuffer(self.map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()


@pytest.fixture
def mapped():
    made = Mapped()
    yield made
    for offset in range(0, 4 * PAGE, 64):
        torch.sim.host_unregister(made.address + offset)
    torch.sim.take_last_error()


@pytest.mark.parametrize("offset", [0, 64, PAGE])
def test_copies_from_and_to_registered_memory(sim, mapped, offset):
    values = torch.arange(3 * PAGE - 2 * offset, dtype=torch.int32).to(torch.uint8)[: 2 * PAGE]
    part = mapped.tensor[offset : offset + len(values)]
    part.copy_(values)
    assert torch.sim.host_register(mapped.address + offset, len(values)) == 0
    assert part.is_pinned() is (offset == 0)  # torch checks the start of the storage
    assert torch.equal(part, values)
    on_device = torch.empty(len(values), dtype=torch.uint8, device=DEVICE)
    sim.reset_counters()
    with sim.held(torch.accelerator.current_stream()):
        on_device.copy_(part, non_blocking=True)
        part.fill_(5)  # too early: the copy has not begun
    torch.accelerator.synchronize()
    received = on_device.clone()
    with sim.held(torch.accelerator.current_stream()):
        on_device.fill_(6)
        part.copy_(on_device, non_blocking=True)
        assert set(part.tolist()) == {5}  # too early as well
    torch.accelerator.synchronize()
    counters = sim.counters()
    assert set(part.tolist()) == {6}
    assert set(received.tolist()) == {5}
    assert (counters["pageable_copies"], counters["operation_waits"], counters["copies"]) == (0, 0, 2)
    assert (counters["to_device_bytes"], counters["to_host_bytes"]) == (len(values), len(values))


def test_overlapping_registrations_are_refused(sim, mapped):
    assert torch.sim.host_register(mapped.address + PAGE, PAGE) == 0
    for begin, size in ((0, 4 * PAGE), (PAGE, PAGE), (2 * PAGE - 1, 2), (PAGE + 8, 8), (0, PAGE + 1)):
        assert torch.sim.host_register(mapped.address + begin, size) == ALREADY_REGISTERED
    assert torch.sim.host_register(mapped.address, PAGE) == 0  # the neighbouring page is not registered
    assert sim.registered() == (2, 2 * PAGE)
    assert torch.sim.take_last_error() == ALREADY_REGISTERED


def test_only_what_begins_there_is_unregistered(sim, mapped):
    assert torch.sim.host_register(mapped.address, PAGE) == 0
    assert torch.sim.host_unregister(mapped.address + 64) == NOT_REGISTERED
    assert torch.sim.host_unregister(mapped.address) == 0
    assert torch.sim.host_unregister(mapped.address) == NOT_REGISTERED
    assert not mapped.tensor.is_pinned()
    assert sim.registered() == (0, 0)
    torch.sim.take_last_error()


def test_what_is_not_mapped_cannot_be_registered(sim):
    assert torch.sim.host_register(0, PAGE) == INVALID
    assert torch.sim.host_register(1 << 46, PAGE) == INVALID
    torch.sim.take_last_error()


def test_a_copy_must_lie_in_one_registration(sim, mapped):
    assert torch.sim.host_register(mapped.address, PAGE) == 0
    assert torch.sim.host_register(mapped.address + PAGE, PAGE) == 0
    on_device = torch.zeros(PAGE, dtype=torch.uint8, device=DEVICE)
    for begin in (PAGE // 2, PAGE + PAGE // 2):  # across two registrations; half outside
        part = mapped.tensor[begin : begin + PAGE]
        with pytest.raises(RuntimeError, match="invalid argument"):
            on_device.copy_(part, non_blocking=True)
        with pytest.raises(RuntimeError, match="invalid argument"):
            part.copy_(on_device, non_blocking=True)
    on_device.copy_(mapped.tensor[PAGE : 2 * PAGE], non_blocking=True)


def test_the_driver_goes_on_with_the_old_pages(sim):
    """Memory is unmapped while registered and mapped again: copies use the old pages, and registering the new memory
    fails.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.mmap.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long],
    )
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, PAGE, *how, -1, 0)

    def memory():
        return torch.frombuffer((ctypes.c_uint8 * PAGE).from_address(address), dtype=torch.uint8)

    memory().fill_(1)
    assert torch.sim.host_register(address, PAGE) == 0
    assert libc.munmap(address, PAGE) == 0
    fixed = 0x10
    assert libc.mmap(address, PAGE, how[0], how[1] | fixed, -1, 0) == address
    memory().fill_(2)
    on_device = torch.empty(PAGE, dtype=torch.uint8, device=DEVICE)
    on_device.copy_(memory(), non_blocking=True)
    assert set(on_device.tolist()) == {1}
    assert torch.sim.host_register(address, PAGE) == ALREADY_REGISTERED
    assert torch.sim.host_unregister(address) == 0
    assert torch.sim.host_register(address, PAGE) == 0
    on_device.copy_(memory(), non_blocking=True)
    assert set(on_device.tolist()) == {2}
    assert torch.sim.host_unregister(address) == 0
    torch.sim.take_last_error()
    libc.munmap(address, PAGE)


def test_a_copy_under_way_outlives_its_registration(sim, mapped):
    mapped.tensor.fill_(3)
    assert torch.sim.host_register(mapped.address, 4 * PAGE) == 0
    on_device = torch.empty(4 * PAGE, dtype=torch.uint8, device=DEVICE)
    with sim.held(torch.accelerator.current_stream()):
        on_device.copy_(mapped.tensor, non_blocking=True)
        assert torch.sim.host_unregister(mapped.address) == 0
    assert set(on_device.tolist()) == {3}


def test_a_refused_call_poisons_the_next_launch(sim, mapped):
    data = torch.zeros(4, device=DEVICE)
    assert torch.sim.host_register(mapped.address, PAGE) == 0
    assert torch.sim.host_register(mapped.address, PAGE) == ALREADY_REGISTERED
    with pytest.raises(torch.AcceleratorError, match="already mapped"):
        data.add_(1)
    data.add_(1)  # the first call took the error
    assert data.tolist() == [2] * 4  # and the kernel ran
    assert torch.sim.host_unregister(1) == NOT_REGISTERED
    assert torch.sim.take_last_error() == NOT_REGISTERED
    assert torch.sim.take_last_error() == 0
    data.add_(1)


def test_pageable_copies_block_and_are_counted(sim):
    host = torch.arange(100, dtype=torch.float32)
    on_device = torch.empty(100, device=DEVICE)
    torch.accelerator.synchronize()
    sim.reset_counters()
    on_device.copy_(host, non_blocking=True)
    assert (sim.counters()["waits"], sim.counters()["pageable_copies"]) == (1, 1)
    host.zero_()  # the driver already has a copy
    back = torch.empty(100)
    back.copy_(on_device, non_blocking=True)
    assert back.tolist() == list(range(100))
    counters = sim.counters()
    assert (counters["waits"], counters["pageable_copies"], counters["pageable_bytes"]) == (2, 2, 800)


def test_strides_and_dtypes_make_pinned_copies_pageable(sim):
    host = torch.arange(12, dtype=torch.float32).pin_memory().view(3, 4)
    sim.reset_counters()
    rotate = host.t().to(DEVICE, non_blocking=True)
    assert sim.counters()["pageable_copies"] == 1
    half = host.to(DEVICE, torch.bfloat16, non_blocking=True)
    assert torch.equal(rotate.cpu(), host.t())
    assert torch.equal(half.cpu(), host.bfloat16())


def test_torchs_pinned_memory_is_not_reused_while_a_copy_is_under_way(sim):
    host = torch.full((5000,), 4, dtype=torch.uint8, pin_memory=True)
    address = host.data_ptr()
    assert host.is_pinned()
    on_device = torch.empty(5000, dtype=torch.uint8, device=DEVICE)
    with sim.held(torch.accelerator.current_stream()):
        on_device.copy_(host, non_blocking=True)
        del host
        other = torch.empty(5000, dtype=torch.uint8, pin_memory=True)
        assert other.data_ptr() != address
        other.fill_(9)
    assert set(on_device.tolist()) == {4}
    taken = []  # torch keeps other free blocks of the size, from earlier tests
    while address not in {each.data_ptr() for each in taken}:
        assert len(taken) < 1000
        taken.append(torch.empty(8192, dtype=torch.uint8, pin_memory=True))  # sizes are powers of two
    assert torch.arange(3).pin_memory().is_pinned()
    assert not torch.arange(3).is_pinned()
