"""A forecast step moves exactly the bytes moved by an engine, in the same lanes."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import AdamW, Engine, Lion, MeZO, Placement
from offload.extras.plan.op_counter import OpCounter
from offload.extras.plan.simulated_step import simulate
from offload.extras.plan.timing import PlannedStep, compute_seconds, kernel_seconds
from offload.extras.plan.workload import Cost, Workload
from offload.machine.hardware import Hardware, Rates
from offload.planning import disk
from offload.planning.settings import Settings
from tests.engine.device import cpu_only
from tests.forecast.planned import Stack, batches, loss_of, planned, work, workload

pytestmark = cpu_only("what is forecast here is a CPU's step")

WIDTH, DEPTH = 16, 5
RATES = Rates(1e9, 1e9, 2e9, {"fp32": 1.0, "bf16": 1.0}, 1e9, 1e9, 0.0, 1e9, 1e9, moved_bytes_per_s=1e9)
MACHINE = Hardware("made up", "cpu", 1, None, 1 << 40, None, None, False, RATES)
THROTTLE = {"h2d": 1e12, "d2h": 1e12, "update": 1e12}
"""A throttle creates lanes beside compute."""
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings, placement; others are those of dry_engine.py
    "deferred": ({}, {}),
    "inline": ({"throttle": None}, {}),
    "bf16": ({"precision": "bf16"}, {}),
    "no lookahead": ({"prefetch": 0}, {}),
    "one ahead": ({"prefetch": 1}, {}),
    "a budget": ({}, {"device_memory": "100KiB"}),
    "a larger budget": ({}, {"device_memory": "130KiB"}),
    "weights stay": ({}, {"parameters": "device"}),
    "nvme": ({}, {"parameters": "nvme", "optimizer": "nvme"}),
    "nvme, no clipping": ({"max_grad_norm": None}, {"parameters": "nvme", "optimizer": "nvme"}),
    "nvme, bf16": ({"precision": "bf16"}, {"parameters": "nvme", "optimizer": "nvme"}),
    "gradients nvme": ({}, {"parameters": "nvme", "optimizer": "nvme", "gradients": "nvme"}),
    "update device, nvme": ({"update": "device"}, {"optimizer": "nvme"}),
    "update both": ({"update": "both"}, {"optimizer": "auto", "optimizer_memory": "40KiB"}),
    "update both, weights stay": (
        {"update": "both", "max_grad_norm": None},
        {"parameters": "device", "optimizer": "auto", "optimizer_memory": "40KiB"},
    ),
    "lion": ({"optimizer": Lion(lr=1e-4)}, {}),
    "int8": ({"optimizer": AdamW(lr=1e-4, states="int8")}, {}),
    "mezo": ({"optimizer": MeZO(lr=1e-4)}, {}),
    "mezo, directions": ({"optimizer": MeZO(lr=1e-4, num_perturbations=2)}, {}),
    "mezo, bf16": ({"optimizer": MeZO(lr=1e-4), "precision": "bf16"}, {}),
    "mezo, bf16, a budget": ({"optimizer": MeZO(lr=1e-4), "precision": "bf16"}, {"device_memory": "130KiB"}),
    "mezo, bf16, weights stay": ({"optimizer": MeZO(lr=1e-4), "precision": "bf16"}, {"parameters": "device"}),
    "mezo, bf16 alone": ({"optimizer": MeZO(lr=1e-4, master="bf16"), "precision": "bf16"}, {}),
    "mezo, bf16 alone, weights stay": (
        {"optimizer": MeZO(lr=1e-4, master="bf16"), "precision": "bf16"},
        {"parameters": "device"},
    ),
    "mezo, bf16 alone, nvme": (
        {"optimizer": MeZO(lr=1e-4, master="bf16"), "precision": "bf16"},
        {"parameters": "nvme", "optimizer": "nvme"},
    ),
    "mezo, update cpu": ({"optimizer": MeZO(lr=1e-4), "precision": "bf16", "update": "cpu"}, {}),
    "mezo, nvme": ({"optimizer": MeZO(lr=1e-4)}, {"parameters": "nvme", "optimizer": "nvme"}),
    "mezo, micro-batches": ({"optimizer": MeZO(lr=1e-4), "micro_batch_size": 2}, {}),
}


def of(name: str, folder: Path) -> Settings:
    """Return the settings of a case."""
    settings, placement = CASES[name]
    if "nvme" in placement.values():
        placement = placement | {"nvme_dir": str(folder)}
    return Settings(**{"throttle": THROTTLE, "clip": "deferred", **settings}, placement=Placement(**placement))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_step_moves_the_bytes_that_an_engine_moves(name: str, tmp_path: Path) -> None:
    settings = of(name, tmp_path)
    torch.manual_seed(0)
    model = Stack(WIDTH, DEPTH)
    its = planned(model, settings)
    step = PlannedStep(its, workload(WIDTH, DEPTH, settings), MACHINE)
    links = ("h2d", "d2h", "nvme_read", "nvme_write")
    seconds = {link: float if link in links else lambda _: 0.0 for link in step.seconds()}
    told = simulate(step.calls, step.simulated_plan(), seconds)
    with closing(Engine(model, settings=settings)) as engine:
        for batch in batches(7):
            engine.step(batch, loss_of)
        counters = engine.counters
        moved = [counters.h2d_bytes, counters.d2h_bytes, counters.nvme_read_bytes, counters.nvme_write_bytes]
    if settings.throttle is None:  # without lanes, compute makes all copies
        return
    assert [told.busy_s[link] for link in links] == moved
    assert [told.moved_bytes[link] for link in links] == moved


@pytest.mark.slow
@pytest.mark.parametrize("update", ["cpu", "device"])
def test_the_bytes_of_all_blocks_and_tiles_are_counted(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block read soon after its update comes from the update ring: how often, depends on the tiles."""
    monkeypatch.setattr(disk, "_LARGEST_TILE", 256)
    placement = Placement(parameters="nvme", optimizer="nvme", nvme_dir=str(tmp_path), device_memory="200KiB")
    settings = Settings(throttle=THROTTLE, clip="deferred", update=update, placement=placement)
    torch.manual_seed(0)
    model = Stack(WIDTH, 12)
    its = planned(model, settings)
    step = PlannedStep(its, workload(WIDTH, 12, settings), MACHINE)
    with closing(Engine(model, settings=settings)) as engine:
        for batch in batches(4):
            engine.step(batch, loss_of)
        counters = engine.counters
        moved = counters.h2d_bytes, counters.d2h_bytes, counters.nvme_read_bytes, counters.nvme_write_bytes
    told = step.lane_bytes()
    assert (told["h2d"], told["d2h"], told["nvme_read"], told["nvme_write"]) == moved
    assert step.simulate().moved_bytes["nvme_read"] != moved[2], "in a forecast of the time a region has few tiles"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_draws_the_noise_of_mezo_by_operations_of_torch(device: str) -> None:
    """A CPU reads the weights and writes both sides in one pass. Break: leave out the random numbers."""
    settings = Settings(optimizer=MeZO(lr=1e-4), precision="bf16", throttle=THROTTLE)
    its, found = planned(Stack(WIDTH, DEPTH), settings), workload(WIDTH, DEPTH, settings)
    step = PlannedStep(its, found, MACHINE.with_(device=device))
    (block,) = (unit.regions for unit in its.structure.units if unit.name == "blocks.1")
    perturbing_s, launching_s = step._perturbing_seconds(block)
    num_weights = sum(region.numel for region in block)
    bytes_per_weight = perturbing_s * RATES.elementwise / num_weights
    updating_s = step.seconds()["here"](sum(region.update_bytes(region.numel) for region in block))
    if device == "cpu":
        assert (bytes_per_weight, launching_s) == (pytest.approx(6), 0.0)
        assert updating_s * RATES.elementwise / num_weights == pytest.approx(8)
    else:
        assert bytes_per_weight > 500
        assert updating_s * RATES.elementwise / num_weights > 500


@pytest.mark.parametrize(("is_cut", "runs"), [(True, 4), (False, 1)])
def test_what_runs_once_over_all_micro_batches_counts_once(is_cut: bool, runs: int) -> None:
    cost, gpu = Cost(2.0, 0.0, 3), MACHINE.with_(device="cuda", rates=replace(RATES, launch_s=0.5))
    use = replace(work("x", 0.0, 0.0), is_cut=is_cut)
    assert compute_seconds(use, [cost], 4, Settings(), gpu) == pytest.approx(((2.0 + 3 * 2.7e-6) * runs, 1.5 * runs))
    compiled = compute_seconds(use, [cost], 4, Settings(compile="always"), gpu)
    assert compiled == pytest.approx(((2.0 + 3 * 7.5e-6) * runs, 1.5 * runs))
    assert compute_seconds(use, [cost], 4, Settings(), replace(gpu, device="cpu")) == (2.0 * runs, 0.0)


def test_large_results_on_a_cpu_are_in_memory_that_the_system_fills_with_zeros() -> None:
    counter = OpCounter()
    small, large = (torch.empty(rows, 1 << 10, device="meta") for rows in (1 << 10, 1 << 13))
    with counter.watching():
        kept = small + 1, large * 2
    assert counter.cost.fresh_bytes == kept[1].nbytes == 32 << 20
    use, cost = work("x", 0.0, 0.0), Cost(2.0, 0.0, 3, fresh_bytes=4e9)
    cpu = replace(MACHINE, rates=replace(RATES, fresh_bytes_per_s=2e9))
    assert compute_seconds(use, [cost], 1, Settings(), cpu) == (4.0, 0.0)
    assert compute_seconds(use, [cost], 1, Settings(), MACHINE) == (2.0, 0.0), "an allocator that keeps memory"


def test_a_fill_does_not_read_what_it_overwrites() -> None:
    counter = OpCounter()
    target, source = torch.empty(64, device="meta"), torch.empty(64, dtype=torch.bfloat16, device="meta")
    with counter.watching():
        target.copy_(source)
        target.zero_()
        target[:32].copy_(target[32:])
        target[::2].copy_(target[1::2])
    assert counter.cost.moved_bytes == 2 * target.nbytes + source.nbytes + target.nbytes
    assert counter.cost.copied_bytes == target.nbytes, "one stretch of memory, as it is"


def test_a_fill_of_a_tensor_with_unknown_values_keeps_no_memory() -> None:
    """Break: take the filled tensor itself for its values."""
    counter = OpCounter()
    with counter.watching():
        tokens = torch.randint(0, 9, (64,), device="meta")
        tokens[8:] = 1
        del tokens
    assert counter.live_bytes == 0


@pytest.mark.parametrize(
    ("precision", "rows", "copied", "moved"),
    [
        ("fp32", 8, 4 + 4, 0),  # copied as it is
        ("bf16", 8, 2 + 2, 0),
        ("fp32", 2, 4 + 4, 3 * (4 + 8)),  # and three more are added: the sum is read and written
        ("bf16", 2, 0, 2 + 4 + 3 * (2 + 8)),  # converted to the fp32 sum
    ],
)
def test_gradients_are_copied_into_a_buffer_and_added_up_there(
    precision: str, rows: int, copied: int, moved: int
) -> None:
    """Break: read the sum for the first gradient too, or leave out its copy."""
    settings = Settings(precision=precision, micro_batch_size=rows)
    its = planned(Stack(WIDTH, DEPTH), settings)
    machine = MACHINE.with_(rates=replace(RATES, moved_bytes_per_s=64.0, device_bytes_per_s=96.0))
    step, plain = (PlannedStep(its, workload(WIDTH, DEPTH, settings), hardware) for hardware in (machine, MACHINE))
    for call, before in zip(step.calls, plain.calls, strict=True):
        numel = sum(region.numel for region in call.regions)
        taken_s = numel * (copied / 96.0 + moved / 64.0)
        assert call.backward_s - before.backward_s == pytest.approx(taken_s, rel=1e-3)
        assert call.forward_s == before.forward_s


@pytest.mark.parametrize(("is_block", "share"), [(True, 0.22), (False, 1.0)])
def test_what_is_no_product_takes_its_bytes_beside_the_products(is_block: bool, share: float) -> None:
    """Compiled blocks move fewer bytes outside the products. A GPU idles after each operation."""
    machine = MACHINE.with_(rates=replace(RATES, device_bytes_per_s=2.0, moved_bytes_per_s=4.0))
    gpu = machine.with_(device="cuda")
    use = replace(work("x", 0.0, 0.0), is_block=is_block)
    cost = Cost(flops=2.0, num_bytes=4.0, num_operations=0, moved_bytes=8.0)
    assert compute_seconds(use, [cost], 1, Settings(), machine)[0] == 2.0 + 2.0
    assert compute_seconds(use, [cost], 1, Settings(compile="always"), machine)[0] == pytest.approx(2.0 + 2.0 * share)
    seconds = compute_seconds(use, [replace(cost, num_operations=1000)], 1, Settings(compile="always"), gpu)[0]
    assert seconds == pytest.approx(2.0 + 2.0 * share + 0.0075)
    attention = replace(cost, flops=4.0, attention_flops=2.0)  # 0.63 of the rate of products, unless measured
    assert kernel_seconds(attention, Settings(precision="fp32"), machine.rates) == pytest.approx((2.0, 2.0 / 0.63, 2.0))
    measured = replace(machine.rates, attention_flops_per_s={"fp32": 0.5})
    assert kernel_seconds(attention, Settings(precision="fp32"), measured) == (2.0, 4.0, 2.0)


def test_each_run_of_a_use_costs_the_host() -> None:
    """Host time counts each micro-batch of a block, and each chunk of a head once, for any micro-batch size."""

    def host_s(rows: int | None, *, is_cut: bool) -> float:
        its, found = planned(Stack(WIDTH, DEPTH), Settings(micro_batch_size=rows)), workload(WIDTH, DEPTH, Settings())
        calls = [replace(call, is_cut=is_cut) for call in found.calls]
        found = replace(found, calls=calls, num_micro_batches=1 if rows is None else 4)
        step = PlannedStep(its, found, MACHINE)
        return sum(call.forward_host_s + call.backward_host_s for call in step.calls)

    assert host_s(1, is_cut=False) == host_s(None, is_cut=False) == host_s(None, is_cut=True) > 0.0
    assert host_s(1, is_cut=True) > 3.0 * host_s(None, is_cut=True)


def test_auto_is_what_the_engine_makes_of_clipped_gradients() -> None:
    """Break: simulate speculative clipping, with a time longer than a real run."""

    def seconds(clip: str, *, clips: bool = True) -> float:
        chosen = Settings(throttle=THROTTLE | {"update": 1e5}, clip=clip)  # type: ignore[arg-type]
        its, found = planned(Stack(WIDTH, DEPTH), chosen), workload(WIDTH, DEPTH, chosen)
        return PlannedStep(its, found, MACHINE, clips=clips).simulate().step_seconds

    assert seconds("auto") == seconds("deferred") < seconds("speculative")
    assert seconds("speculative", clips=False) < seconds("deferred", clips=False)


def test_a_throttle_stands_for_its_link() -> None:
    def seconds(**settings: Any) -> float:
        chosen = Settings(throttle={"h2d": 1e6, **THROTTLE} | settings.pop("throttle", {}), **settings)
        its = planned(Stack(WIDTH, DEPTH), chosen)
        work = workload(WIDTH, DEPTH, chosen)
        return PlannedStep(its, work, MACHINE).simulate().step_seconds

    assert seconds(throttle={"d2h": 1e4}) > 5 * seconds()


def times(found: Workload, factor: float) -> Workload:
    """Return the work for `factor` times as many tokens."""
    calls = [
        replace(
            call,
            forward=Cost(call.forward.flops * factor, 0, 0),
            backward=Cost(call.backward.flops * factor, 0, 0),
            input_bytes=round(call.input_bytes * factor),
        )
        for call in found.calls
    ]
    return replace(found, calls=tuple(calls), num_tokens=round(found.num_tokens * factor))


@pytest.mark.parametrize("activations", ["device", "cpu"])
def test_from_so_many_tokens_on_a_step_computes_for_as_long_as_links_work(activations: str) -> None:
    """Compute grows with the tokens, as do inputs stored on the host. Weights and gradients do not."""
    settings = Settings(throttle=THROTTLE | {"h2d": 2e6}, placement=Placement(activations=activations))
    its, found = planned(Stack(WIDTH, DEPTH), settings), workload(WIDTH, DEPTH, settings)

    foretold = PlannedStep(its, found, MACHINE).simulate().hides_from_tokens
    assert foretold is not None
    below, above = (times(found, share * foretold / found.num_tokens) for share in (0.9, 1.1))
    assert PlannedStep(its, below, MACHINE).simulate().bound_by == "h2d"
    assert PlannedStep(its, above, MACHINE).simulate().bound_by == "compute"


def test_no_number_of_tokens_hides_what_grows_as_fast_as_compute() -> None:
    settings = Settings(throttle=THROTTLE | {"d2h": 1e4}, placement=Placement(activations="cpu"))
    step = PlannedStep(planned(Stack(WIDTH, DEPTH), settings), workload(WIDTH, DEPTH, settings), MACHINE)
    assert step.simulate().hides_from_tokens is None


@pytest.mark.parametrize("by", ["cache", "disk"])
def test_a_base_in_its_files_hides_by_the_disk_or_by_memory(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Base reads run at disk rate, or at memory rate from the page cache."""
    if by == "disk":
        monkeypatch.setattr(disk, "_CACHED_SHARE", math.inf)
    settings = Settings(placement=Placement(parameters="files"), throttle={"update": 1e12})
    model = Stack(WIDTH, DEPTH)
    model.blocks.requires_grad_(False)
    its, found = planned(model, settings), workload(WIDTH, DEPTH, settings)
    machine = replace(MACHINE, rates=replace(RATES, host_bytes_per_s=2e6, nvme_read_bytes_per_s=2e5))
    timing = PlannedStep(its, found, machine).simulate()
    regions = [region for region in its.structure.regions if not region.trainable]
    once = sum(region.travelling_bytes for region in regions) / (1e6 if by == "cache" else 2e5)
    assert once < timing.lane_seconds["nvme_read"] < 2 * once, "for the forward and the backward, but for the last"
    least = timing.hides_from_tokens
    assert least is not None
    below, above = (times(found, share * least / found.num_tokens) for share in (0.9, 1.1))
    assert PlannedStep(its, below, machine).simulate().bound_by == "nvme_read"
    assert PlannedStep(its, above, machine).simulate().bound_by == "compute"


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_parts_of_compute_are_the_compute_of_a_step(recompute: str) -> None:
    """Break: leave out a part, or count a use of a head in chunks once."""
    settings = Settings(micro_batch_size=2, recompute=recompute)
    its, found = planned(Stack(WIDTH, DEPTH), settings), workload(WIDTH, DEPTH, settings)
    calls = [replace(call, forward=replace(call.forward, num_operations=9)) for call in found.calls]
    machine = MACHINE.with_(device="cuda", rates=replace(RATES, moved_bytes_per_s=64.0))
    step = PlannedStep(its, replace(found, calls=tuple(calls)), machine)
    parts = step.compute_parts
    assert sum(parts.values()) == pytest.approx(sum(call.forward_s + call.backward_s for call in step.calls))
    assert (parts.get("recomputed", 0.0) > 0) == (recompute == "always")
    assert min(parts["products"], parts["gradients"], parts["gaps"]) > 0


@pytest.mark.parametrize("num_perturbations", [1, 2])
def test_noise_is_a_part_of_the_compute_of_a_step_without_backward(num_perturbations: int) -> None:
    """Break: leave out the noise, or count it once for all directions."""
    rule = MeZO(lr=1e-4, num_perturbations=num_perturbations)
    settings = Settings(optimizer=rule, precision="bf16", micro_batch_size=2)
    its, found = planned(Stack(WIDTH, DEPTH), settings), workload(WIDTH, DEPTH, settings)
    machine = MACHINE.with_(device="cuda", rates=replace(RATES, moved_bytes_per_s=64.0))
    step = PlannedStep(its, found, machine)
    parts = step.compute_parts
    assert sum(parts.values()) == pytest.approx(sum(call.forward_s for call in step.calls))
    assert min(parts["products"], parts["noise"]) > 0
