"""Streams run independently, events order them, and work without order fails."""

import threading
import time

import pytest
import torch

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]

DEVICE = "sim:0"


def test_wait_stream_and_events_order_devices_too(sim):
    here, there = torch.accelerator.current_stream(0), torch.accelerator.current_stream(1)
    data = torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    order = []
    with sim.held(here):
        data.fill_(1)
        event = here.record_event()
        there.wait_event(event)
        after = there.record_event()
        order.append((event.query(), after.query()))
    after.synchronize()
    order.append((event.query(), after.query()))
    assert order == [(False, False), (True, True)]


def test_an_event_means_the_place_where_it_was_recorded_last(sim):
    stream = torch.accelerator.current_stream()
    event = torch.Event(DEVICE)
    assert event.query()
    event.synchronize()  # nothing recorded yet
    event.record(stream)
    torch.accelerator.synchronize()
    waiting = torch.Stream(DEVICE)
    with sim.held(stream):
        waiting.wait_event(event)  # completed work
        event.record(stream)
        assert waiting.record_event().synchronize() is None
        assert not event.query()
    event.synchronize()
    assert event.query()


def test_threads_have_a_stream_and_a_device_of_their_own(sim):
    seen = {}

    def look():
        seen["device"] = torch.accelerator.current_device_index()
        seen["stream"] = torch.accelerator.current_stream().stream_id

    torch.accelerator.set_device_index(1)
    with torch.Stream(torch.device("sim", 1)) as stream:
        assert torch.accelerator.current_stream() == stream
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == {"device": 0, "stream": 0}
    torch.accelerator.set_device_index(0)


def test_backward_runs_in_a_thread_of_its_own_under_the_streams_of_forward(sim):
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.append((threading.get_ident(), torch.accelerator.current_stream(), torch.sim.current_device()))
            return grad

    stream = torch.Stream(torch.device("sim", 1))
    with torch.sim.device(1), stream:
        x = torch.ones(3, device="sim", requires_grad=True)
        Look.apply(x).sum().backward()
    [(thread, of_backward, device)] = seen
    assert thread != threading.get_ident()
    assert (of_backward, device) == (stream, 1)


def test_events_are_timed(sim):
    begin, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    stream = torch.accelerator.current_stream()
    begin.record(stream)
    torch.accelerator.synchronize()
    with sim.held(stream):
        end.record(stream)
        with pytest.raises(RuntimeError, match="not ready|not reached|completed"):
            begin.elapsed_time(end)
        time.sleep(0.01)
    end.synchronize()
    assert begin.elapsed_time(end) >= 10
    with pytest.raises((RuntimeError, ValueError), match="timing"):
        torch.Event(DEVICE).elapsed_time(end)


def test_who_waits_is_counted(sim):
    data = torch.ones(4, device=DEVICE)
    torch.accelerator.synchronize()
    sim.reset_counters()
    data.add_(1)
    event = torch.accelerator.current_stream().record_event()
    assert sim.counters()["waits"] == 0
    event.synchronize()
    assert (sim.counters()["waits"], sim.counters()["operation_waits"]) == (1, 0)
    data.sum().item()
    assert (sim.counters()["waits"], sim.counters()["operation_waits"]) == (2, 1)
    torch.accelerator.synchronize()
    assert sim.counters()["waits"] == 3
    assert sim.counters()["launches"] == 2  # add_ and sum
    assert sim.counters(1)["waits"] == 0


def test_a_wait_can_be_forbidden(sim):
    data = torch.ones(4, device=DEVICE)
    torch.sim.set_sync_debug_mode("error")
    data.add_(1)
    with pytest.raises(RuntimeError, match="synchronizing operation.*item"):
        data[0].item()
    with pytest.raises(RuntimeError, match="synchronizing operation.*nonzero"):
        data.nonzero()
    torch.sim.set_sync_debug_mode("default")
    assert data[0].item() == 2


def test_what_fails_in_a_kernel_is_raised_by_the_next_wait(sim):
    table = torch.zeros(4, 2, device=DEVICE)
    index = torch.tensor([0, 9], device=DEVICE)
    torch.accelerator.synchronize()
    torch.nn.functional.embedding(index, table)
    table.add_(1)  # still launched
    with pytest.raises(torch.AcceleratorError, match="earlier kernel of device 0.*index out of range"):
        torch.accelerator.synchronize()
    assert table.sum().item() == 8


def test_shapes_are_refused_at_once(sim):
    with sim.held(torch.accelerator.current_stream()), pytest.raises(RuntimeError, match="must match"):
        torch.zeros(3, device=DEVICE) + torch.zeros(4, device=DEVICE)


@pytest.mark.parametrize(("slow", "delays"), [("all", 5), ("copies", 2), ("compute", 3)])
def test_delays_hold_up_one_side(sim, slow, delays):
    source, target = torch.ones(8, pin_memory=True), torch.zeros(8, device=DEVICE)
    torch.accelerator.synchronize()
    sim.reset_counters()
    sim.set_jitter(100, seed=3, slow=slow)
    target.copy_(source, non_blocking=True)
    target.add_(1).mul_(2).sub_(3)
    source.copy_(target, non_blocking=True)
    torch.accelerator.synchronize()
    assert sim.counters()["delays"] == delays
    assert set(source.tolist()) == {1.0}
