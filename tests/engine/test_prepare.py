"""Allocations prepared on `meta` for a specified machine equal a real engine's allocations."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offload import LOMO, SGD, Adafactor, AdaLomo, AdamW, Engine, Lion, MeZO, Muon, Placement
from offload.distributed.comm import Comm
from offload.engine.prepare import prepare
from offload.errors import ConfigError
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.simulated_ranks import SimulatedRanks
from offload.machine.hardware import Hardware, Rates
from offload.planning.machines import SpecifiedMachine
from offload.planning.memory import bytes_on
from offload.planning.plan import Plan
from offload.planning.settings import Settings

GPU = Hardware(
    "a GPU", "cuda", 1, 1 << 24, 1 << 26, None, None, False, Rates(20e9, 20e9, 40e9, {"bf16": 1e14}, 1e12, 1e11, 1e-5)
)
CPU = replace(GPU, name="a CPU", device="cpu", device_bytes=None)


@pytest.mark.parametrize("kind", [AdamW, Lion, SGD, Adafactor, AdaLomo, LOMO, Muon, MeZO, Placement, Settings])
def test_an_argument_of_another_type_is_refused_by_name(kind: Any) -> None:
    for field in fields(kind):
        with pytest.raises(ConfigError, match=rf"{field.name} is <object"):
            kind(**{field.name: object()})


def test_so_are_those_of_an_engine() -> None:
    for name in ("model", "fill", "comm", "settings"):
        with pytest.raises(ConfigError, match=rf"Engine\.{name} is 'x'"):
            Engine(**{"model": torch.nn.Linear(2, 2)} | {name: "x"})


def test_groups_may_be_a_mapping_as_in_a_configuration() -> None:
    assert AdamW(groups={"a": {"lr_scale": 2.0}}) == AdamW(groups=(("a", {"lr_scale": 2.0}),))


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )


def on_meta() -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(config())


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_are_not_there_share_the_machine(stage: int) -> None:
    settings = Settings(placement=Placement(host_memory="64MiB"), zero_stage=stage)
    one, four = (prepare(on_meta(), settings, SimulatedRanks(n), SpecifiedMachine(CPU, n)) for n in (1, 4))
    assert four.settings.placement.host_memory == (64 << 20) // 4
    share = 4 if stage else 1
    for label in ("exp_avg", "exp_avg_sq"):
        assert four.plan.of("cpu", label).num_bytes * share == pytest.approx(
            one.plan.of("cpu", label).num_bytes, rel=0.01
        )


def test_a_described_device_has_the_memory_that_is_written_there() -> None:
    settings = Settings(placement=Placement("auto", "auto"), precision="bf16")
    small, large = (
        prepare(on_meta(), settings, Comm(), SpecifiedMachine(replace(GPU, device_bytes=size)))
        for size in (1 << 20, 1 << 30)
    )
    assert (small.plan.residence.common, large.plan.residence.common) == ("cpu", "device")
    assert (small.settings.device, small.plan.overlap, small.plan.device_bytes is None) == ("cuda", True, False)


def test_one_memory_for_both_tiers_has_all_states_once(tmp_path: Path) -> None:
    """Breaks: a share for states as on other devices; optimizer states on the device beside others on the host."""

    def planned(memory_bytes: int, **more: Any) -> Plan:
        machine = replace(read_machine("gb10"), device_bytes=memory_bytes, host_bytes=memory_bytes, **more)
        placement = Placement("auto", "auto", nvme_dir=str(tmp_path) if memory_bytes < needed else None)
        settings = Settings(placement=placement, precision="bf16")
        return prepare(on_meta(), settings, Comm(), SpecifiedMachine(machine)).plan

    needed = 0
    needed = bytes_on("device", planned(1 << 30).allocations)
    one = planned(int(needed / 0.8))
    assert (one.residence.common, bytes_on("cpu", one.allocations)) == ("device", 0)
    two = planned(int(needed / 0.8), shares_memory=False)
    assert two.residence.common == "cpu"
    assert two.of("device", "unit slot").num_bytes
    below = planned(int(needed * 0.8))
    assert bytes_on("nvme", below.allocations)
    assert 0 < bytes_on("cpu", below.allocations) < 0.65 * int(needed * 0.8)
    on_device = {each.name for each in below.allocations if each.tier == "device"}
    assert on_device == {"gradient buffer", "accumulated gradients"}, "no slot"
