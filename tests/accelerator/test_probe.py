"""The probe measures a simulated device: links, memory and products run at the given rates, or slower on a busy
machine.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from offload import Engine, Placement, system
from offload.accelerators import Accelerator
from offload.errors import DoesNotFitError
from offload.extras.plan.probe import Sizes, probe
from tests.accelerator.control import Control
from tests.accelerator.test_cost import SIMPLE
from tests.engine.inside import parts_of
from tests.machine.groups import second_version

pytestmark = pytest.mark.accelerator

SLOW = replace(
    SIMPLE,
    half_flops_per_s=2e10,
    single_flops_per_s=1e10,
    memory_bytes_per_s=4e9,
    to_device_bytes_per_s=4e8,
    to_host_bytes_per_s=8e8,
)
SIZES = Sizes(core_bytes=1 << 20, device_bytes=32 << 20)


def test_a_device_s_rates_are_found(sim: Control, tmp_path: Path) -> None:
    sim.set_cost(SLOW)
    found = probe("sim:1", sizes=SIZES, cache_dir=tmp_path)
    assert (found.device, found.num_devices, found.shares_memory) == ("sim", 2, False)
    assert found.device_bytes
    rates = found.rates
    at_most = {
        "h2d_bytes_per_s": SLOW.to_device_bytes_per_s,
        "d2h_bytes_per_s": SLOW.to_host_bytes_per_s,
        "both_ways_bytes_per_s": 2 * SLOW.to_device_bytes_per_s,  # equal bytes each way; the slower direction decides
        "device_bytes_per_s": SLOW.memory_bytes_per_s,
    }
    for name, rate in at_most.items():
        assert getattr(rates, name) <= 1.05 * rate, name
    assert rates.flops_per_s["fp32"] <= 1.05 * SLOW.single_flops_per_s
    assert rates.flops_per_s["bf16"] <= 1.05 * SLOW.half_flops_per_s
    assert rates.both_ways_bytes_per_s >= max(rates.h2d_bytes_per_s, rates.d2h_bytes_per_s)


def test_an_integrated_device_s_memory_is_the_host_s(
    sim: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_engine() -> Engine:
        shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **shape))
        return Engine(model, placement=Placement("cpu", "cpu"), device="sim", update="cpu")

    with open_engine() as engine:
        on_host = sum(num_bytes for tier, _, num_bytes in engine.allocations if tier == "cpu")
        given = 4 * sum(parameter.numel() for _, parameter in engine.named_parameters())
    monkeypatch.setattr(system, "ROOT", second_version(tmp_path, {"/": (on_host, 0, 0)}))
    open_engine().close()
    monkeypatch.setattr(Accelerator, "is_integrated", True)
    second_version(tmp_path, {"/": (on_host - given, 0, 0)})  # the model's freed memory just has room for the states
    with pytest.raises(DoesNotFitError, match=r"gradient buffer .*memory\.max"):
        open_engine()
    second_version(tmp_path, {"/": (on_host + (8 << 20), 0, 0)})
    with open_engine() as engine:
        assert parts_of(engine).device.ledger.budget_bytes == int(0.9 * ((8 << 20) + given))
