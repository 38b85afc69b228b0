"""Figures printed in papers, reproduced by the layout, plan and simulation of this project, without separate formulas.

ZeRO: Rajbhandari et al., arXiv:1910.02054. ZeRO-Offload: Ren et al., arXiv:2101.06840. ZeRO-Infinity: Rajbhandari et
al., arXiv:2104.07857. GB is 1e9 bytes in ZeRO; TB and GB are 2^40 and 2^30 in ZeRO-Infinity.

The papers keep an fp32 master beside the half-precision weights. This project stores only the missing half, two bytes
less. To reproduce the printed figures, an extra plane adds these two bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from offload.engine.prepare import EnginePlan, Structure
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.measure import BatchSpec, measure
from offload.extras.plan.simulated_ranks import SimulatedRanks
from offload.extras.plan.simulated_step import SimulatedCall, SimulatedPlan, SimulatedStep, simulate
from offload.extras.plan.workload import UnitWork
from offload.lanes.timeline import Throttle
from offload.layout.build_regions import build_regions
from offload.layout.planes import Plane
from offload.layout.regions import ParameterInfo, Region
from offload.layout.residence import DEVICE, Residence
from offload.layout.sharding import Sharding
from offload.planning.machines import SpecifiedMachine
from offload.planning.memory import BUFFER, SLOT, Allocation, UnitPlan, plan_memory
from offload.planning.settings import Settings
from offload.tiers.placement import Placement

GB, GIB, TIB = 1e9, 2.0**30, 2.0**40
ADAM = (Plane("exp_avg", torch.float32), Plane("exp_avg_sq", torch.float32))
WHOLE_MASTER = Plane("rest_of_master", torch.int16)
FP32_GRADIENT = Plane("fp32_gradient", torch.float32)


def regions(
    units: Sequence[Sequence[tuple[int, ...]]], ranks: int = 1, extra: Sequence[Plane] = ()
) -> tuple[Region, ...]:
    """Return regions for units with these bf16 parameter shapes, Adam states and the planes `extra`."""
    infos, its = [], {}
    for number, shapes in enumerate(units):
        its[f"unit {number}"] = range(len(infos), len(infos) + len(shapes))
        infos += [ParameterInfo(len(infos) + n, f"{number}.{n}", s, True, "bf16", True) for n, s in enumerate(shapes)]
    return build_regions(infos, its, [(*ADAM, *extra)], ranks)


def allocations(its: Sequence[Region], residence: Residence) -> list[Allocation]:
    """Return the planned allocations, with one unit per region."""
    units = [UnitPlan(region.name, (region,), resident=False) for region in its]
    return plan_memory(units, its, residence, keeps_gradients=True, splits=False)


def state_bytes(numel: float, ranks: int, stage: int) -> float:
    """Return the planned bytes of model states per device, with all states on the device."""
    its = regions([[(round(numel),)]], ranks, [WHOLE_MASTER])
    residence = Residence(sharding=Sharding(0, ranks, stage), common=DEVICE)
    states = {plane.label for plane in its[0].planes}
    return sum(a.num_bytes for a in allocations(its, residence) if a.name in states)


# ZeRO, Table 1: memory per device in GB for stages 1, 2 and 3, by parameters and data-parallel degree.
ZERO_TABLE_1 = {
    7.5e9: {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    128e9: {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    1e12: {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}


@pytest.mark.parametrize("numel", ZERO_TABLE_1)
def test_zero_table_1(numel: float) -> None:
    for ranks, row in ZERO_TABLE_1[numel].items():
        for stage, printed in enumerate(row, start=1):
            last_digit = 10.0 ** -len(printed.partition(".")[2])  # the paper rounds some cells and truncates others
            assert state_bytes(numel, ranks, stage) / GB == pytest.approx(float(printed), abs=last_digit * 1.0001)


def test_zero_table_2() -> None:
    # Theoretical half: billions of parameters on 32 GB, stages 0 to 3 over 64 devices, no model parallelism.
    for stage, printed in enumerate((2, 7.6, 14.4, 128)):
        assert 32 * GB / (state_bytes(1e9, 64, stage) / 1e9) / 1e9 == pytest.approx(printed, abs=0.05)


def test_what_a_split_master_saves() -> None:
    assert sum(plane.num_bytes(2048) for plane in regions([[(2048,)]])[0].planes) == 14 * 2048


def played(
    its: tuple[Region, ...], capacity: int = 1, rates: Mapping[str, float] | None = None, saved_bytes: int = 0
) -> SimulatedStep:
    """Simulate a step whose compute takes no time. Without `rates`, links run at one byte per second."""
    size = max(region.weight_bytes for region in its)
    placement = Placement(activations="cpu" if saved_bytes else "device")
    plan = SimulatedPlan(
        regions=its,
        settings=Settings(placement=placement, clip="deferred"),
        residence=Residence(),
        buffer_bytes=2 * size,
        shard_bytes=8 * size,
        capacity_bytes=capacity * size,
        lookahead=capacity - 1,
        max_cargoes=None,
    )
    links = ("h2d", "d2h", "update", "update_on_device", "here", "nvme_read", "nvme_write", "collective")
    given = rates or dict.fromkeys(links, 1.0)
    seconds = {link: Throttle(given.get(link, math.inf)).seconds for link in links}
    calls = [SimulatedCall((region,), 0.0, 0.0, saved_bytes=saved_bytes) for region in its]
    return simulate(calls, plan, seconds)


def test_zero_offload_table_1_and_traffic() -> None:
    # Table 1: 16 bytes per parameter on the GPU with everything there, 2 with gradients and updates on the CPU. (This
    # project has no placement that separates these two.) Section 3.2: 4 bytes per parameter over PCIe.
    depth, numel = 8, 1 << 20
    assert state_bytes(1e9, 1, 0) / 1e9 == pytest.approx(16, abs=0.001)
    its = regions([[(numel,)]] * depth)
    plan = allocations(its, Residence(keeps_weights=True))
    lasting = [a.num_bytes for a in plan if a.tier == "device" and a.name != BUFFER]
    assert sum(lasting) == 2 * depth * numel
    moved = played(its, capacity=depth)
    assert moved.busy_s["h2d"] + moved.busy_s["d2h"] == 4 * depth * numel


# ZeRO-Infinity, Figure 2(a): layers, hidden dimension in 1024; trillions of parameters, TB for model states, TB for
# activation checkpoints at batch 32 and sequence 1024, GB for model state working memory.
INFINITY_FIGURE_2A = (
    (80, 10, 0.10, 1.83, 0.05, None),
    (100, 20, 0.50, 9.16, 0.12, 6.25),
    (128, 25, 1.01, 18.31, 0.20, 9.77),
    (195, 64, 10.05, 182.81, 0.76, 64.00),
    (315, 160, 101.47, 1845.70, 3.08, 400.00),
)


@pytest.mark.parametrize(("layers", "hidden", "trillions", "states", "checkpoints", "working"), INFINITY_FIGURE_2A)
def test_zero_infinity_figure_2a(
    layers: int, hidden: int, trillions: float, states: float, checkpoints: float, working: float | None
) -> None:
    width = hidden * 1024
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    (region,) = regions([block], extra=[WHOLE_MASTER, FP32_GRADIENT])
    assert layers * sum(region.sizes) / 1e12 == pytest.approx(trillions, abs=0.01)
    assert layers * sum(p.num_bytes(region.numel) for p in region.planes) / TIB == pytest.approx(states, abs=0.01)
    saved = played(regions([[(2048,)]]), saved_bytes=32 * 1024 * width * 2, rates={"d2h": 1.0})
    assert layers * (saved.busy_s["d2h"] - 2 * 2048) / TIB == pytest.approx(checkpoints, abs=0.01)
    if working is not None:  # largest operator as a unit: weights and gradient
        plan = allocations(regions([[(width, 4 * width)]]), Residence())
        held = sum(a.num_bytes for a in plan if a.name.partition(" (")[0] in (SLOT, BUFFER))
        assert held / GIB == pytest.approx(working, abs=0.01)


# ZeRO-Infinity, Figure 2a: hidden size in K, heads, layers; full activations in TB per node (16 GPUs) and activation
# working memory in GB per GPU, both at 4 rows with 1024 tokens.
INFINITY_ACTIVATIONS = (
    (10, 128, 80, 2.03, 1.63),
    (20, 160, 100, 3.91, 2.50),
    (25, 256, 128, 7.13, 3.56),
    (64, 512, 195, 24.38, 8.00),
    (160, 1024, 315, 88.59, 18.00),
)


def block_work(width: int, heads: int, rows: int, length: int) -> UnitWork:
    """Return the measured work of a GPT-2 block with score matrices, without dropout."""
    config = GPT2Config(
        n_embd=width,
        n_head=heads,
        n_layer=2,
        n_positions=length,
        vocab_size=64,
        bos_token_id=1,
        eos_token_id=1,
        activation_function="gelu",
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    machine = SpecifiedMachine(read_machine("h200"), 1)
    settings = Settings(precision="bf16", compile="never")
    prepared = EnginePlan.of(
        Structure.of(model, settings, SimulatedRanks(1), {}), settings, SimulatedRanks(1), machine, checks=False
    )
    work = measure(model, BatchSpec("causal", rows, length), prepared)
    return next(call for call in work.calls if call.name == "transformer.h.1")


@pytest.mark.parametrize(("hidden", "heads", "layers", "full", "working"), INFINITY_ACTIVATIONS)
def test_zero_infinity_figure_2a_activations(hidden: int, heads: int, layers: int, full: float, working: float) -> None:
    """Equation (5) counts rows * length * (16 hidden + 2 heads * length) bytes per block: one score matrix and, in half
    precision, eight tensors with the width of the hidden state.

    Autograd saves the same matrix and sixteen tensors: the inputs to the block, the query/key/value product, the
    attention projection, the second norm and the MLP; query, key and value; 4 before the activation function and 4
    after. The forecast is therefore the published figure plus eight tensors, a factor from 1.38 to 1.56.
    """
    width, rows, length = hidden * 1024, 4, 1024
    work = block_work(width, heads, rows, length)
    held, tensor_bytes = work.input_bytes + work.saved_bytes, 2 * rows * length * width
    assert (held - 8 * tensor_bytes) / GIB == pytest.approx(working, abs=0.01)
    assert 16 * layers * (held - 8 * tensor_bytes) / TIB == pytest.approx(full, abs=0.01)
    assert held == pytest.approx(16 * tensor_bytes + 2 * rows * heads * length**2, rel=1e-4)
    assert 1.38 < held / GIB / working < 1.57
