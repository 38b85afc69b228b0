"""Engines on the simulated accelerator: each test covers one finding from a review of the GPU code path."""

from __future__ import annotations

import gc
import json
import math
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from offload import AdamW, Engine, Placement
from offload.accelerators import Accelerator, own_accelerator
from offload.app.config.config import Config
from offload.app.training.trainer import Trainer
from offload.engine.gradients import norms
from offload.engine.units.activation_offload import HostActivationOffload
from offload.errors import DoesNotFitError, NonFiniteError, TornError
from offload.extras.generate.streamed_model import StreamedModel
from offload.extras.plan import probe
from offload.lanes.streams import StreamLanes, open_lanes
from offload.lanes.ticket import wait_until_done
from offload.native import device_update, kernels, torch_fallback
from offload.tiers import accelerator_device as device
from offload.tiers.counters import Counters, Ledger
from offload.tiers.device import open_device
from offload.tiers.host import Arena, Pinning
from tests.accelerator.control import H200
from tests.cases import models
from tests.cases.models import build, llama
from tests.engine.device import twin
from tests.engine.handmade import WIDTH, Block, Stack
from tests.engine.inside import memory_of, parts_of
from tests.lanes.patience import eventually
from tests.matrix import matrix, quick
from tests.run_folder import write_text

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]

RULE = AdamW(lr=1e-2)
tokens = partial(models.tokens, device="cpu")  # batches come from the host


@pytest.fixture
def engine(sim):
    """Yield a function that creates an engine on the simulated device. The engines are closed after the test."""
    made = []

    def make(model=llama, **settings):
        made.append(Engine(build(model), RULE, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()
    made.clear()
    gc.collect()


# -- the update on the device --------------------------------------------------------------------------------

MILLION = 1 << 20


def arrays(split, numel=MILLION):
    """Return kernel arguments on the device: master, two moments, and gradients in the matching dtype."""
    generator = torch.Generator().manual_seed(0)
    weights, m, v, grad = (torch.randn(numel, generator=generator) for _ in range(4))
    master = kernels.split(weights) if split else (weights,)
    grad = grad.bfloat16() if split else grad
    return [part.to("sim") for part in master], m.to("sim"), v.square_().to("sim"), grad.to("sim")


def update(kind, master, m, v, grad):
    master = tuple(master) if len(master) == 2 else master[0]
    how = {"lr": 1e-3, "betas": (0.9, 0.95)}
    if kind == "lion":
        return kernels.lion(master, m, grad, weight_decay=0.1, **how)
    if kind == "adamw":
        return kernels.adamw(master, m, v, grad, step=3, eps=1e-8, weight_decay=0.1, grad_scale=0.5, **how)
    return kernels.correct_adamw(master, m, v, grad, step=3, eps=1e-8, applied_scale=0.5, grad_scale=0.25, **how)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("kind", "most"), [("adamw", 30), ("correct", 50), ("lion", 30)])
def test_an_update_by_operations_takes_few_launches(sim, monkeypatch, kind, most, split):
    """Bits, and single launches: test_device_update.py."""
    monkeypatch.setattr(device_update, "update", lambda *arguments: None)
    given = arrays(split)
    update(kind, *arrays(split, 64))  # first use in torch
    sim.reset_counters()
    update(kind, *given)
    assert sim.counters()["operation_waits"] == 0
    assert sim.counters()["launches"] <= most


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "correct", "lion"])
def test_an_update_stays_within_its_scratch_memory(sim, monkeypatch, kind, split):
    scratch_bytes = 4 * MILLION
    monkeypatch.setattr(torch_fallback, "SCRATCH_BYTES", scratch_bytes)
    monkeypatch.setattr(device_update, "update", lambda *arguments: None)
    given = arrays(split, MILLION // 2)
    torch.sim.empty_cache()
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    update(kind, *given)
    peak = torch.sim.max_memory_allocated() - before
    assert scratch_bytes // 4 < peak <= scratch_bytes


# -- waits on the host -------------------------------------------------------------------------------------------

ON_DEVICE = Placement("device", "device")
NOT_OURS = ("masking_utils.py",)  # transformers queries the device about packed rows, even without offload


def asking(run):
    """Return file and line for each wait on the device inside an operation."""
    torch.sim.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    torch.sim.set_sync_debug_mode("default")
    return [f"{Path(found.filename).name}:{found.lineno}" for found in caught if "synchronizing" in str(found.message)]


@matrix(
    strength=1,
    precision=["fp32", "bf16"],
    settings={
        "": {},
        "micro-batches": {"micro_batch_size": 2},
        "head in chunks": {"head_chunk_bytes": 64 * 4 * 4 * 3},
        "states on the device": {"placement": ON_DEVICE},
        "unclipped": {"max_grad_norm": None},
    },
)
def test_a_step_waits_for_no_operation(engine, sim, precision, settings):
    one = engine(precision=precision, **settings)
    for seed in range(3):  # two of these steps first compare resident weights
        one.step(tokens(seed))
    sim.reset_counters()
    found = asking(lambda: one.step(tokens(3)))
    assert not [place for place in found if not place.startswith(NOT_OURS)]
    assert sim.counters()["pageable_copies"] == 0
    assert sim.counters()["operation_waits"] == len(found)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_update_on_the_device_that_overflows_is_reported_by_the_next_wait(engine, sim, clip):
    """The step itself returns before its updates are done."""
    one = engine(placement=ON_DEVICE, max_grad_norm=clip)
    one.step(tokens())
    one.lr = 3e38
    one.step(tokens(1))
    with pytest.raises((NonFiniteError, TornError), match=r"\d+ weights of unit .* lr 3e\+38"):
        one.finish()
    with pytest.raises(TornError, match=r"\d+ weights of unit .* lr 3e\+38"):
        one.step(tokens(2))


def test_what_is_brought_up_is_there_whatever_the_host_does_next(engine, sim):
    device = parts_of(engine()).device
    stream, given = torch.accelerator.current_stream(), torch.arange(6.0).view(2, 3).t()
    with sim.held(stream):
        found = []
        for _ in range(3):
            found.append(device.copy_to_device(given))
            given += 10
    assert [up.tolist() for up in found] == [(given - 10 * (3 - k)).tolist() for k in range(3)]
    assert found[0].is_sim
    torch.accelerator.synchronize()
    sizes = {size: len(free) for size, free in device._staging._free.items()}
    for _ in range(5):
        device.copy_to_device(given)
        torch.accelerator.synchronize()
    assert {size: len(free) for size, free in device._staging._free.items()} == sizes, "pinned memory is used again"


def test_what_is_brought_down_is_what_it_was_then(engine, sim):
    device = parts_of(engine()).device
    value = torch.tensor(3.0, device="sim")
    with sim.held(torch.accelerator.current_stream()):
        first = device.copy_to_host(value)
        value += 1
        second = device.copy_to_host(value)
        value += 1
    assert (second().item(), first().item(), value.item()) == (4.0, 3.0, 5.0)


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 16, 17])
def test_values_of_any_size_come_down_through_two_buffers(engine, sim, monkeypatch, numel):
    monkeypatch.setattr(device, "_STAGED_BYTES", 8 * 4)
    one = parts_of(engine()).device
    values = torch.arange(2.0 * numel, device="sim")[::2]
    one._staging._free.clear()  # buffers for the digests of the model's own buffers
    sim.reset_counters()
    assert one.to_host(values).tolist() == [2.0 * i for i in range(numel)]
    assert sim.counters()["pageable_copies"] == 0
    assert sum(map(len, one._staging._free.values())) <= 2 + (numel % 8 > 0)


def test_states_on_the_device_open_and_save_through_pinned_memory(sim, tmp_path):
    """Only buffers, of some bytes, are copied without staging, to the device when it opens."""
    model = build(llama)
    num_buffers = len(list(model.buffers()))
    sim.reset_counters()
    with Engine(model, RULE, precision="bf16", placement=ON_DEVICE) as engine:
        assert sim.counters()["pageable_copies"] == num_buffers
        before = {name: value.clone() for name, value in engine.named_parameters()}
        sim.reset_counters()
        engine.save_checkpoint(tmp_path / "checkpoint")
        assert sim.counters()["pageable_copies"] == 0
        engine.load_checkpoint(tmp_path / "checkpoint")
        assert all(torch.equal(before[name], value) for name, value in engine.named_parameters())


class Late:
    """Event completed only by a wait."""

    is_over = False

    def query(self):
        return self.is_over

    def synchronize(self):
        self.is_over = True


def test_staging_does_not_grow_while_copies_are_late(sim):
    staging, like = device._Staging(own_accelerator("sim")), torch.zeros(6)
    taken = [staging.take(like) for _ in range(device._MOST_STAGED + 2)]  # copied to the host, not read yet
    for memory in taken:
        staging.give_back(memory, Late())
    for _ in range(5):
        staging.give_back(staging.take(like), Late())
    assert sum(map(len, staging._free.values())) == len(taken)


# -- norms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_exact_and_take_little_memory(sim, monkeypatch, dtype):
    piece = 1 << 14
    monkeypatch.setattr(norms, "_PART", piece)
    sizes = (20 * piece + 7, 3, 0, piece)
    offsets = [sum(sizes[:k]) for k in range(len(sizes))]
    whole = slice(0, sum(sizes))
    flat = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0)).mul_(1e3).to(dtype)
    flat[5] = 1e8
    region = SimpleNamespace(offsets=offsets, sizes=sizes, compute="bf16")
    on_device = flat.to("sim")
    sizes_of_norms, norm = [], torch._foreach_norm  # a CPU kernel converts on the fly, without a visible copy

    def foreach_norm(given, *how):
        sizes_of_norms.extend(part.numel() for part in given)
        return norm(given, *how)

    monkeypatch.setattr(torch, "_foreach_norm", foreach_norm)
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    found = norms._squares(region, on_device, whole)
    assert sum(sizes_of_norms) == sum(sizes)
    assert max(sizes_of_norms) == piece
    peak = torch.sim.max_memory_allocated() - before
    assert peak <= 8 * piece, "no copy in float64 of all that is measured"
    exact = [math.fsum(x * x for x in flat[o : o + n].double().tolist()) for o, n in zip(offsets, sizes, strict=True)]
    assert found.cpu().tolist() == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("settings", [{}, {"placement": ON_DEVICE}, {"micro_batch_size": 2}], ids=str)
def test_a_step_asks_for_no_pinned_memory(engine, sim, monkeypatch, settings):
    """torch's pinned allocator takes a lock and rounds up to powers of two."""
    one = engine(**settings)
    one.step(tokens())
    one.step(tokens(1))
    asked, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: asked.append(k) or empty(*a, **k))
    one.step(tokens(2))
    staged = sum(bool(how.get("pin_memory")) for how in asked)
    assert staged <= 2 < len(parts_of(one).regions), "none a region; of a batch's two tensors as many as were under way"


@pytest.mark.parametrize("agrees", [False, True])
def test_ranks_measure_states_on_the_device_without_a_wait_per_unit(engine, sim, agrees):
    state = parts_of(engine(placement=ON_DEVICE))
    measures, region = state.gradients.measures, state.regions[1]
    assert state.store.collective_lane is state.lanes.collective_on_compute
    measures.begin_step()
    measures.touched[region.index] = [True] * len(region.parameters)
    shard = torch.randn(region.numel, device="sim")
    sim.reset_counters()
    assert not asking(lambda: measures.measure_shard(region, shard, agrees=agrees))
    assert sim.counters()["operation_waits"] == sim.counters()["pageable_copies"] == 0
    measures.finish()
    for piece, offset in zip(region.pieces, region.offsets, strict=True):
        exact = shard[offset : offset + piece.numel].double().square().sum().item()
        assert measures.squares[piece] == pytest.approx(exact, rel=1e-12)


# -- activations -------------------------------------------------------------------------------------------------


@pytest.fixture
def lanes(sim):
    opened = open_lanes(own_accelerator(), {}, None, overlap=True)
    yield opened
    opened.close()


def test_activations_come_back_past_a_fetch_whose_slot_is_not_free(sim, lanes):
    device = open_device(own_accelerator(), Ledger("device"), copies_aside=True)
    offload = HostActivationOffload(device, lanes, Counters(), Ledger("cpu"))
    given = torch.arange(1000.0, device="sim")
    away = offload.put(given)
    slot, weights = torch.empty(100, device="sim"), torch.ones(100, pin_memory=True)
    reader = torch.sim.Stream()
    with sim.held(reader):
        with torch.sim.stream(reader):
            reads = lanes.mark()  # pending reads of the slot
        fetch = lanes.h2d.submit(lambda: device.copy(slot, weights), users=reads)
        wait_until_done(lanes.lock, [fetch])
        found, tickets, _ = offload.get(away)
        assert eventually(lambda: all(ticket.is_over for ticket in tickets)), "they wait behind the fetch"
        assert not fetch.is_over
    lanes.compute_after(tickets)
    assert torch.equal(found.cpu(), given.cpu())


def test_ever_new_lengths_pin_no_more_than_the_longest(engine, sim):
    placement = Placement(activations="cpu")
    longest = engine(placement=placement)
    longest.step(tokens(length=16))
    most = memory_of(longest).host.allocations["activation checkpoints"]
    one, host = engine(placement=placement), []
    ranges = []
    for length in (8, 16, 9, 10, 11, 12, 13, 14, 15, 7, 16):
        one.step(tokens(length, length=length))
        ranges.append(sim.registered())
        host.append(memory_of(one).host.allocations["activation checkpoints"])
    assert set(ranges[1:]) == {ranges[1]}
    assert host[0] < host[1] == most
    assert set(host[1:]) == {most}


def test_nothing_is_registered_in_the_midst_of_a_step(engine, sim, monkeypatch):
    """Memory registration in the driver blocks all streams."""
    one, within = engine(placement=Placement(activations="cpu")), []
    one.step(tokens(length=8))
    held, put = sim.registered(), HostActivationOffload.put
    monkeypatch.setattr(HostActivationOffload, "put", lambda *given: (within.append(sim.registered()), put(*given))[1])
    one.step(tokens(length=16))
    assert len(within) > 1
    assert all(found <= held for found in within)
    assert sim.registered()[1] > held[1], "behind it"
    one.step(tokens(1, length=16))  # first compares resident weights
    sim.reset_counters()
    one.step(tokens(2, length=16))
    assert sim.counters()["pageable_copies"] == 0


# -- fixes made before a device was available ---------------------------------------------------------------------


@pytest.mark.parametrize(("ends", "activations"), [("closed", "cpu"), ("dropped", "device"), ("failed", "cpu")])
def test_no_range_stays_registered(sim, ends, activations):
    one = Engine(build(llama), RULE, placement=Placement(activations=activations))
    one.step(tokens())
    assert sim.registered()[0] > 0
    if ends == "failed":
        with pytest.raises(ZeroDivisionError):
            one.step(tokens(1), lambda outputs, _: 1 / 0)
    elif ends == "closed":
        one.close()
    del one
    assert eventually(lambda: gc.collect() >= 0 and sim.registered() == (0, 0))


def test_memory_that_is_pinned_in_pieces_is_copied_within_them(engine, sim, monkeypatch):
    whole = engine()
    losses, (num_ranges, _) = [whole.step(tokens(seed)).loss for seed in range(2)], sim.registered()
    whole.close()
    monkeypatch.setattr("offload.tiers.accelerator_device.Pinning", lambda accelerator: Pinning(accelerator, 1 << 14))
    pieces = engine()
    assert sim.registered()[0] > num_ranges
    assert [pieces.step(tokens(seed)).loss for seed in range(2)] == losses


@pytest.mark.parametrize("largest_mib", quick([64 << 10, 256], [256]))
def test_an_arena_of_3_gib_is_copied_from_wherever_its_pieces_end(sim, largest_mib):
    mib, sizes = 1 << 20, [700 << 20, 4096, 1 << 30, (1348 << 20) - 4096]
    arena = Arena(3 << 30, Pinning(own_accelerator(), largest_mib * mib))
    tensors = [arena.take(size, torch.uint8) for size in sizes]
    assert arena.pinned_bytes == sum(sizes) == 3 << 30
    assert sim.registered() == (4 if largest_mib == 256 else 1, 3 << 30)
    sim.reset_counters()
    num_places = 0
    for tensor in tensors:
        for place in {0, tensor.nbytes - 2000, *range(256 * mib - 1000, tensor.nbytes - 2000, 256 * mib)}:
            its = tensor[max(0, place) : place + 2000]
            its.copy_(torch.arange(len(its)) % 251)
            assert its.to("sim", non_blocking=True).cpu().equal(its)
            num_places += 1
    assert sim.counters()["pageable_copies"] == num_places, "on the way back alone"
    del tensors, its, tensor
    arena.close()
    assert sim.registered() == (0, 0)


@pytest.mark.filterwarnings("ignore:the driver refused")
def test_a_refused_registration_does_not_fail_the_next_kernel(sim):
    pinning = Pinning(own_accelerator())
    arena = Arena(1 << 16, pinning)
    memory = arena.take(1 << 16, torch.uint8)
    assert not pinning.register(memory.data_ptr(), 100)
    assert torch.ones(3, device="sim").sum().item() == 3


def test_an_update_on_the_device_takes_the_time_of_its_kernels(sim, lanes):
    values, seconds = torch.zeros(1000, device="sim"), 0.05
    torch.accelerator.synchronize()
    sim.set_cost(replace(H200, memory_bytes_per_s=2 * values.nbytes / seconds))
    lanes.timeline.begin_step()
    with sim.held(torch.accelerator.current_stream()):
        lanes.on_compute.submit(lambda: values.add_(1), name="update")
        assert not torch.accelerator.current_stream().query(), "the caller does not wait for the kernel"
    _, _, spans = lanes.end_step()
    (span,) = (span for span in spans if span.name == "update")
    assert span.end - span.begin >= seconds


class MakesTensors(Block):
    def forward(self, h):
        return super().forward(h) + torch.ones(WIDTH)


def test_a_recompute_has_the_callers_default_device(sim):
    one = Engine(build(lambda: Stack(MakesTensors)), RULE, recompute="always")
    x = torch.arange(20).view(2, 10) % 32
    with torch.device("sim"):
        result = one.step({"x": x, "y": x}, lambda logits, batch: cross_entropy(logits.mT, batch["y"]))
    assert math.isfinite(result.loss)
    one.close()


# -- device memory -------------------------------------------------------------------------------------------------


ROWS = 400


def losses(one, seeds):
    return [one.step(tokens(seed, rows=ROWS)).loss.item() for seed in seeds]


@pytest.fixture(scope="module")
def large(loaded):
    """Return the losses for five batches with activations larger than the weights, and the peak device bytes with full
    recomputation (`least`) and without (`most`).
    """
    found, peaks = [], []
    for recompute in ("always", "never"):
        one = Engine(build(llama), RULE, recompute=recompute)
        found.append(losses(one, range(5)))
        peaks.append(one.counters.peak_device_bytes)
        one.close()
    assert found[0] == found[1]
    assert peaks[1] > 1.5 * peaks[0]
    return SimpleNamespace(losses=found[0], least=peaks[0], most=peaks[1])


@pytest.mark.parametrize(("share", "num_kept"), [(0, 0), (0.6, 1), (1, 2)])
def test_graphs_are_kept_as_far_as_the_devices_memory_goes(engine, large, monkeypatch, share, num_kept):
    """Without a budget, free memory is the limit, shared with temporaries."""
    free = int(large.least + share * (large.most - large.least)) + (256 << 10)
    monkeypatch.setattr(Accelerator, "free_bytes", free / device._SHARE_OF_FREE_MEMORY)
    one = engine(recompute="auto")
    assert losses(one, range(5)) == large.losses
    assert len(parts_of(one).runner.saved.policy.on_device) == num_kept
    assert one.counters.peak_device_bytes <= free


def test_graphs_are_recomputed_where_others_have_taken_the_room(engine, large, sim):
    one = engine(recompute="auto")
    found = losses(one, range(3))
    policy = parts_of(one).runner.saved.policy
    assert len(policy.on_device) == 2
    torch.accelerator.synchronize()
    torch.sim.empty_cache()
    # More than the minimum, since fragmented blocks do not always fit the next tensor.
    sim.set_memory_limit(torch.sim.memory_reserved() + large.least + (large.most - large.least) // 4)
    assert found + losses(one, (3, 4)) == large.losses
    assert len(policy.on_device) < 2


def test_units_give_way_to_a_step_that_runs_out_of_memory(engine):
    one, other = engine(), engine()
    slots = parts_of(one).slots
    least = slots.capacity_bytes
    for seed in range(20):  # spare memory is lent after steps with equal peaks, and streams make peaks differ
        one.step(tokens(seed))
        other.step(tokens(seed))
        if slots.capacity_bytes > least:
            break
    full = slots.capacity_bytes
    fails = iter([True])  # an iterator: a list would be restored after the trial run

    def loss_fn(outputs, batch):
        if next(fails, False):
            raise torch.OutOfMemoryError("of another kind of batch")
        return outputs.loss

    for seed in range(3, 6):
        assert one.step(tokens(seed), loss_fn).loss == other.step(tokens(seed), lambda outputs, _: outputs.loss).loss
    assert next(fails, None) is None
    assert slots.capacity_bytes < full


def test_a_batch_that_does_not_fit_is_refused_with_what_to_change_and_the_next_one_runs(engine, large, sim):
    one = engine()
    found = losses(one, range(2))
    sim.set_memory_limit(torch.sim.memory_reserved() + large.least)
    with pytest.raises(DoesNotFitError, match=r"this batch does not fit into the device memory: .*--train.batch_size"):
        one.step(tokens(9, rows=10 * ROWS))
    assert found + losses(one, range(2, 5)) == large.losses


def test_what_a_stream_still_uses_counts_as_held(engine, sim):
    device = parts_of(engine()).device
    device.take_recent_peak()
    side = torch.sim.Stream()
    with sim.held(side):
        for _ in range(3):
            memory = torch.empty(1 << 20, dtype=torch.uint8, device="sim")
            memory.record_stream(side)
            del memory
    assert device.take_recent_peak() >= 3 << 20


@pytest.fixture
def limits(sim, monkeypatch):
    """Yield the limits set on the allocator from now on: bytes above other allocations, and 1.0 for no limit."""
    gc.collect()
    torch.sim.empty_cache()
    found, set_fraction, others = [], torch.sim.set_per_process_memory_fraction, torch.sim.memory_allocated()

    def note(share, device):
        set_fraction(share, device)
        found.append(share if share == 1 else round(share * torch.sim.mem_get_info()[1]) - others)

    monkeypatch.setattr(torch.sim, "set_per_process_memory_fraction", note)
    return found


@pytest.mark.parametrize("ends", ["closed", "dropped"])
def test_engines_bound_the_allocator_to_their_budgets_as_long_as_they_are_there(limits, ends):
    first, second = (Engine(build(llama), RULE, Placement(device_memory=f"{size}MiB")) for size in (16, 32))
    room = device.ROUNDING_BYTES
    both = (48 << 20) + 2 * room
    assert limits == [(16 << 20) + room, both]
    with pytest.raises(torch.OutOfMemoryError, match="may be used"):
        torch.empty(both, dtype=torch.uint8, device="sim")
    for engine in (first, second):
        if ends == "closed":
            engine.close()
    del first, second, engine
    assert eventually(lambda: gc.collect() >= 0 and limits[-1] == 1)
    assert limits[2:] in ([(32 << 20) + room, 1], [(16 << 20) + room, 1])
    torch.empty(both, dtype=torch.uint8, device="sim")


def test_an_engine_without_a_budget_bounds_nothing(limits, engine):
    engine()
    assert not limits


def test_a_step_beyond_the_budget_is_refused_by_the_flag(limits, engine, monkeypatch):
    monkeypatch.setattr(device, "ROUNDING_BYTES", 4 << 20)
    one = engine(placement=Placement(device_memory="4MiB"))
    one.step(tokens(0))
    with pytest.raises(DoesNotFitError, match=r"of which 8\d{6} may be used.*raise --offload.device_memory"):
        one.step(tokens(1, rows=20 * ROWS))


def test_a_training_run_holds_no_more_than_its_budget_what_the_allocator_keeps_included(limits, tmp_path):
    text = str(write_text(tmp_path))
    given = {"model.path": str(tmp_path / "config.json"), "run.dir": str(tmp_path / "run"), "data.source": text}
    given |= {"train.steps": 2, "train.batch_size": 4, "data.sequence_length": 32, "offload.device_memory": "64MiB"}
    models.llama(vocab_size=384).config.save_pretrained(tmp_path)
    Trainer(Config.load(None, given)).run()
    assert limits == [(64 << 20) + device.ROUNDING_BYTES, 1]


GRAPHS_BELOW = {"offload.graphs": "cpu", "offload.graphs_memory": "17MiB"}


def test_the_built_in_run_trains_on_an_accelerator(sim, tmp_path):
    """The budget is meant for the CPU, without room for the temporaries on an accelerator."""
    given = {"run.dir": str(tmp_path / "run"), "train.steps": 2, "checkpoint.export": False}
    assert math.isfinite(Trainer(Config.load(None, given)).run().loss)


@pytest.mark.parametrize("graphs", quick([{}, GRAPHS_BELOW], [GRAPHS_BELOW]))
def test_a_step_that_only_another_placement_fits_into_the_budget_is_trained_so(sim, tmp_path, monkeypatch, graphs):
    """The states alone fit on the device, but leave no room for a step. The first measurement exceeds the budget, and
    must leave no memory behind. Allocator fragments also displace some offloaded graphs.
    """
    monkeypatch.setattr(probe, "_user_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr(device, "ROUNDING_BYTES", 4 << 20)
    gc.collect()
    torch.sim.empty_cache()
    most = torch.sim.memory_allocated() + (40 << 20) + device.ROUNDING_BYTES
    given = {"run.dir": str(tmp_path / "run"), "train.steps": 2, "train.batch_size": 4, "checkpoint.export": False}
    given |= {"offload.device_memory": "40MiB", **graphs}
    assert math.isfinite(Trainer(Config.load(None, given)).run().loss)
    plan, decided = (tmp_path / "run" / name for name in ("plan.json", "config.yaml"))
    assert json.loads(plan.read_text())["tiers"]["device"]["bytes"] <= 40 << 20
    assert "optimizer: cpu  # resolved" in decided.read_text()
    assert torch.sim.memory_reserved() <= most


# -- streamed weights for inference --------------------------------------------------------------------------------


class Kept:
    def __init__(self, value):
        self.shape, self.dtype, self._flat = tuple(value.shape), value.dtype, value.detach().clone().reshape(-1)

    def read(self, begin, end):
        return self._flat[begin:end].clone()


@pytest.fixture
def stream(sim, monkeypatch):
    """Yield a check: logits from a streamed model equal logits with all weights on the device."""
    monkeypatch.setattr(device, "_STAGED_BYTES", 1 << 10)  # most weights take several pieces
    model, ids = build(lambda: models.llama(num_hidden_layers=6)).eval(), tokens()["input_ids"].to("sim")
    with torch.no_grad():
        expected = twin(model, ids.device)(input_ids=ids).logits.cpu()
    sources = {name: Kept(parameter) for name, parameter in model.named_parameters()}
    made = StreamedModel(model, sources.get, memory_bytes=0, accelerator=own_accelerator())
    yield lambda: model(input_ids=ids).logits.cpu().equal(expected)
    made.close()


@pytest.mark.parametrize("slow", ["compute", "copies"])
def test_weights_for_inference_come_up_beside_compute(stream, sim, slow):
    sim.set_jitter(200, 1, slow)
    sim.reset_counters()
    with torch.no_grad():
        assert [stream() for _ in range(5)] == 5 * [True]
    assert sim.counters()["pageable_copies"] == 5, "of the logits, to be compared"


@pytest.mark.parametrize(("slow", "missing"), [("compute", "computed"), ("copies", "compute_after")])
def test_the_waits_of_inference_are_needed(stream, sim, monkeypatch, slow, missing):
    if missing == "computed":
        monkeypatch.setattr(StreamLanes, "record_compute", lambda *_: ())
    else:
        monkeypatch.setattr(StreamLanes, "compute_after", lambda lanes, tickets: wait_until_done(lanes.lock, tickets))
    sim.set_jitter(3000, 1, slow)
    with torch.no_grad():
        assert not all(stream() for _ in range(5))


@pytest.mark.parametrize("memory_bytes", [0, 300_000])
def test_weights_for_inference_take_their_memory_however_far_behind_compute_is(sim, memory_bytes):
    peaks = []
    for limit in (None, memory_bytes):
        model, ids = build(lambda: models.llama(num_hidden_layers=24)).eval(), tokens()["input_ids"].to("sim")
        sources = {name: Kept(parameter) for name, parameter in model.named_parameters()}
        gc.collect()
        torch.accelerator.synchronize()
        before = torch.sim.memory_allocated()
        torch.sim.reset_peak_memory_stats()
        made = StreamedModel(model, sources.get, memory_bytes=limit, accelerator=own_accelerator())
        sim.set_jitter(1000, 1, "compute")
        with torch.no_grad():
            for _ in range(2):
                model(input_ids=ids, use_cache=False)
        torch.accelerator.synchronize()
        peaks.append(torch.sim.memory_stats()["active_bytes.all.peak"] - before)
        held = made.ledger.current_bytes
        made.close()
    assert held < made.total_bytes / 1.5
    assert peaks[0] - peaks[1] > 0.9 * (made.total_bytes - held), "beside what the pass itself takes"
