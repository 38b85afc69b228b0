"""A simulated device takes the time given by its rates.

Times come from the model, for work enqueued behind a held stream, so machine speed does not matter.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.accelerator.control import Cost

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]

SIMPLE = Cost(
    half_flops_per_s=2e9,
    single_flops_per_s=1e9,
    memory_bytes_per_s=1e9,
    to_device_bytes_per_s=1e8,
    to_host_bytes_per_s=2e8,
    peer_bytes_per_s=4e8,
    kernel_latency_s=0.0,
    copy_latency_s=0.0,
    launch_latency_s=0.0,
)


def milliseconds(sim, work, device="sim:0"):
    """Return the model time for `work` on the current stream."""
    stream = torch.accelerator.current_stream(device)
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize(device)
    with sim.held(stream):
        begin.record(stream)
        work()
        end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end)


def test_a_kernel_takes_its_flops_or_its_bytes(sim):
    x, y = (torch.zeros(100, 100, device="sim") for _ in range(2))
    half, out = x.bfloat16(), torch.zeros(100, 100, device="sim")
    sim.set_cost(SIMPLE)
    assert milliseconds(sim, lambda: torch.mm(x, y, out=out)) == pytest.approx(2 * 100**3 / 1e9 * 1e3, rel=1e-3)
    assert milliseconds(sim, lambda: half @ half) == pytest.approx(2 * 100**3 / 2e9 * 1e3, rel=1e-3)
    assert milliseconds(sim, lambda: torch.add(x, y)) == pytest.approx(3 * 4e4 / 1e9 * 1e3, rel=1e-2)


@pytest.mark.parametrize(
    ("flops", "make"),
    [
        (2 * 6 * 20 * 30 * 40, lambda: (torch.bmm, torch.zeros(6, 20, 30), torch.zeros(6, 30, 40))),
        (2 * 20 * 30 * 40, lambda: (F.linear, torch.zeros(20, 30), torch.zeros(40, 30), torch.zeros(40))),
        (4 * 2 * 3 * 64 * 64 * 16, lambda: (F.scaled_dot_product_attention, *[torch.zeros(2, 3, 64, 16)] * 3)),
        (2 * 2 * 8 * 30 * 30 * 4 * 9, lambda: (F.conv2d, torch.zeros(2, 4, 32, 32), torch.zeros(8, 4, 3, 3))),
    ],
    ids=["bmm", "linear", "attention", "convolution"],
)
def test_flops_are_counted_from_shapes(sim, flops, make):
    op, *tensors = make()
    tensors = [tensor.to("sim") for tensor in tensors]
    sim.set_cost(Cost(**{**SIMPLE.__dict__, "memory_bytes_per_s": 1e15}))
    torch.accelerator.synchronize()
    sim.reset_counters()
    op(*tensors)
    torch.accelerator.synchronize()
    assert sim.busy_seconds()["compute"] == pytest.approx(flops / 1e9, rel=1e-6)


def test_copies_take_the_link_and_each_direction_its_own(sim):
    up, down = (torch.zeros(100_000, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    data, other = (torch.zeros(100_000, dtype=torch.uint8, device="sim") for _ in range(2))
    streams = [torch.Stream("sim:0") for _ in range(2)]
    sim.set_cost(SIMPLE)
    assert milliseconds(sim, lambda: data.copy_(up, non_blocking=True)) == pytest.approx(1, rel=1e-3)
    assert milliseconds(sim, lambda: down.copy_(data, non_blocking=True)) == pytest.approx(0.5, rel=1e-3)

    sim.reset_counters()
    for stream, copies in zip(streams, ([(data, up)], [(down, other), (down, data)]), strict=True):
        with stream:
            for target, source in copies:
                target.copy_(source, non_blocking=True)
    torch.accelerator.synchronize()
    busy = sim.busy_seconds()
    assert (busy["to_device"], busy["to_host"]) == pytest.approx((1e-3, 1e-3))
    assert busy["compute"] == 0


def test_copies_of_one_direction_take_turns(sim):
    up = torch.zeros(1_000_000, dtype=torch.uint8, pin_memory=True)
    streams = [torch.Stream("sim:0") for _ in range(2)]
    targets = [torch.zeros(1_000_000, dtype=torch.uint8, device="sim") for _ in range(2)]
    ends = [torch.Event("sim:0", enable_timing=True) for _ in range(2)]
    torch.accelerator.synchronize()
    sim.set_cost(SIMPLE)
    for stream, target, end in zip(streams, targets, ends, strict=True):
        with stream:
            target.copy_(up, non_blocking=True)
            end.record(stream)
    torch.accelerator.synchronize()
    assert abs(ends[0].elapsed_time(ends[1])) >= 9.9  # 10 ms each


def test_scales_play_large_shapes(sim):
    x = torch.zeros(100, 100, device="sim")
    up = torch.zeros(10_000, dtype=torch.uint8, pin_memory=True)
    data = torch.zeros(10_000, dtype=torch.uint8, device="sim")
    times = []
    for cost in (SIMPLE, SIMPLE.scaled(flops=8, num_bytes=4)):
        sim.set_cost(cost)
        times.append((milliseconds(sim, lambda: x @ x), milliseconds(sim, lambda: data.copy_(up, non_blocking=True))))
    assert times[1][0] / times[0][0] == pytest.approx(8, rel=1e-2)
    assert times[1][1] / times[0][1] == pytest.approx(4, rel=1e-2)


def test_kernels_that_compute_nothing(sim):
    data = torch.zeros(100, device="sim")
    torch.accelerator.synchronize()
    sim.set_computing(False)
    sim.reset_counters()
    data.add_(1)
    host = torch.full((100,), 7.0, pin_memory=True)
    host.copy_(data, non_blocking=True)
    torch.accelerator.synchronize()
    assert sim.counters()["launches"] == 1
    assert set(host.tolist()) == {7}
    sim.set_computing(True)
    assert set(data.tolist()) == {0}
