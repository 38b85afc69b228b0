"""The allocator reuses and refuses memory like CUDA, and memory used too early or too late is NaN."""

import gc
import signal
import textwrap
import threading

import pytest
import torch

from tests import forks

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]

DEVICE = "sim:0"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _empty(sim):
    torch.accelerator.empty_cache()


def child(code, devices=1):
    begin = f"import torch\nfrom tests import accelerator\nsim = accelerator.load(num_devices={devices})\n"
    return forks.run(["-c", begin + textwrap.dedent(code)])


@pytest.mark.parametrize(
    "stray",
    ["ctypes.string_at(x.data_ptr(), 4)", "ctypes.memset(x.data_ptr(), 0, 4)"],
)
def test_the_host_cannot_touch_device_memory(loaded, stray):
    done = child(f"import ctypes\nx = torch.ones(8, device='sim')\ntorch.accelerator.synchronize()\n{stray}")
    assert done.returncode == -signal.SIGSEGV


def test_a_kernel_cannot_touch_another_device(sim):
    here, there = torch.ones(4, device=DEVICE), torch.ones(4, device="sim:1")
    with pytest.raises(RuntimeError, match="same device.*sim:0.*sim:1"):
        here.add_(there)
    with pytest.raises(RuntimeError, match="same device"):
        torch.addmm(here, torch.ones(4, 4, device="sim:1"), torch.ones(4, 4, device=DEVICE))
    assert (here + there.to(DEVICE)).tolist() == [2] * 4
    assert sim.counters(0)["peer_bytes"] == 16


def test_a_freed_block_is_used_again_on_its_stream(sim):
    first = torch.ones(1000, device=DEVICE)
    address = first.data_ptr()
    del first
    assert torch.empty(1000, device=DEVICE).data_ptr() == address
    with torch.Stream(DEVICE):
        assert torch.empty(1000, device=DEVICE).data_ptr() != address


def test_memory_that_nobody_wrote_is_nan(sim):
    data = torch.empty(1000, device=DEVICE)
    assert data.isnan().all()
    data.fill_(1)
    view = torch.empty(0, device=DEVICE).set_(data.untyped_storage()).clone()
    del data
    assert torch.empty(1000, device=DEVICE).isnan().all()
    assert torch.empty(10, dtype=torch.bfloat16, device=DEVICE).isnan().all()
    assert view.numel() == 1000


def test_poison_comes_in_the_order_of_the_stream(sim):
    data = torch.ones(1000, device=DEVICE)
    with sim.held(torch.accelerator.current_stream()):
        total = data.sum()
        del data
    assert total.item() == 1000


def test_blocks_split_and_merge(loaded):
    done = child(
        """
        MIB = 1 << 20

        def make(size):
            return torch.empty(size, dtype=torch.uint8, device="sim")

        blocks = [make(MIB // 4) for _ in range(8)]
        addresses = [block.data_ptr() for block in blocks]
        assert addresses == [addresses[0] + MIB // 4 * number for number in range(8)]
        assert torch.sim.memory_reserved() == 2 * MIB  # one segment
        del blocks[::2]
        assert torch.sim.memory_allocated() == MIB
        large = make(MIB // 2)  # as much is free, and nowhere in one piece
        assert (torch.sim.memory_allocated(), torch.sim.memory_reserved()) == (MIB + MIB // 2, 4 * MIB)
        del large, blocks
        wholes = [make(2 * MIB) for _ in range(2)]  # as if they had never been cut
        assert torch.sim.memory_reserved() == 4 * MIB
        assert addresses[0] in {whole.data_ptr() for whole in wholes}
        """
    )
    assert done.returncode == 0, done.stderr


def test_sizes_are_multiples_of_512(sim):
    before = torch.sim.memory_allocated()
    kept = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in (1, 512, 513)]
    assert torch.sim.memory_allocated() - before == 512 + 512 + 1024
    assert torch.empty(0, device=DEVICE).data_ptr() == 0
    del kept
    assert torch.sim.memory_allocated() == before


def test_peaks(sim):
    gc.collect()  # free leftovers from earlier tests
    base = torch.sim.memory_allocated()
    torch.sim.reset_peak_memory_stats()
    data = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    assert torch.sim.max_memory_allocated() == base + MIB
    del data
    assert torch.sim.memory_allocated() == base
    assert torch.sim.max_memory_allocated() == base + MIB
    torch.sim.reset_peak_memory_stats()
    assert torch.sim.max_memory_allocated() == base
    assert torch.sim.max_memory_reserved() == torch.accelerator.memory_reserved()


def test_the_driver_counts_what_is_cached_as_used(sim):
    free, total = torch.sim.mem_get_info()
    data = torch.empty(8 * MIB, dtype=torch.uint8, device=DEVICE)
    del data
    assert torch.sim.mem_get_info() == (free - 8 * MIB, total)
    torch.accelerator.empty_cache()
    assert torch.sim.mem_get_info() == (free, total)


def test_out_of_memory_after_one_retry(sim):
    sim.set_memory_limit(torch.sim.memory_reserved() + 8 * MIB)
    with torch.Stream(DEVICE):
        cached = torch.empty(6 * MIB, dtype=torch.uint8, device=DEVICE)
        del cached  # cached for this stream alone until memory is short
    retries = torch.sim.memory_stats()["num_alloc_retries"]
    data = torch.empty(6 * MIB, dtype=torch.uint8, device=DEVICE)
    assert torch.sim.memory_stats()["num_alloc_retries"] == retries + 1
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4194304 bytes.*may be used"):
        torch.empty(4 * MIB, dtype=torch.uint8, device=DEVICE)
    del data
    torch.empty(4 * MIB, dtype=torch.uint8, device=DEVICE)


def test_a_retry_waits_for_recorded_streams(sim):
    sim.set_memory_limit(torch.sim.memory_reserved() + 6 * MIB)
    other = torch.Stream(DEVICE)
    data = torch.ones(MIB, device=DEVICE)
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        total = data.sum()
    data.record_stream(other)
    del data
    again = torch.zeros(MIB // 2, device=DEVICE)  # fits only after the first block is returned
    with other:
        assert total.item() == MIB
    assert again.sum().item() == 0


def test_a_forked_child_cannot_go_on(loaded):
    done = child(
        """
        import os
        torch.ones(4, device="sim")
        torch.accelerator.synchronize()
        if os.fork() == 0:
            try:
                torch.ones(4, device="sim")
            except RuntimeError as error:
                os._exit(7 if "forked" in str(error) else 8)
            os._exit(9)
        print(os.waitstatus_to_exitcode(os.wait()[1]), torch.ones(4, device="sim").sum().item())
        """
    )
    assert done.stdout.split() == ["7", "4.0"], done.stderr


def test_threads_allocate_side_by_side(sim):
    def work(number):
        torch.accelerator.set_device_index(number % 2)
        with torch.Stream(torch.device("sim", number % 2)):
            for size in range(1, 60):
                data = torch.full((size * 97,), float(number), device="sim")
                found.add((data * 2).mean().item() == 2 * number)

    found = set()
    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {True}
