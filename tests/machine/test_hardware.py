"""Machine specifications in files: shipped files, valid values, refused values."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from offload.app.config.config import Config
from offload.errors import ConfigError
from offload.extras.plan.forecast import Forecaster
from offload.extras.plan.machine_files import builtin_names, parse_link, read_machine, share_of_rank
from offload.machine.hardware import Hardware, Rates

SHIPPED = {
    "a100-40": 40, "a100-80": 80, "a6000": 48, "b200": 180, "gb10": 128, "gh200": 96, "h100": 80, "h200": 141,
    "l40s": 48, "p100": 16,
    "rtx-3090": 24, "rtx-4070": 12, "rtx-4080": 16, "rtx-4090": 24, "rtx-5060ti-16gb": 16, "rtx-5090": 32,
    "rtx-pro-6000": 96, "strix-halo": 128, "t4": 16, "v100": 16,
}  # fmt: skip
"""Memory of the card in its name, in GB (makers mean GB or GiB)."""
ONE_MEMORY = ("gb10", "strix-halo")
BEFORE_AMPERE = ("p100", "t4", "v100")
LEAST: dict[str, Any] = {
    "name": "mine",
    "device": "cuda",
    "device_bytes": "24GiB",
    "host_bytes": "68 GiB",
    "rates": {
        "h2d_bytes_per_s": "12GB",
        "d2h_bytes_per_s": 12e9,
        "both_ways_bytes_per_s": "20GB",
        "flops_per_s": {"fp32": 1e13, "bf16": "5e13"},
        "device_bytes_per_s": "500GB",
        "host_bytes_per_s": "20GB",
        "launch_s": 1e-5,
    },
}


@pytest.mark.parametrize(
    ("read", "write", "both", "share"),
    [(4.0, 4.0, 4.0, 1.0), (4.0, 4.0, 8.0, 0.5), (4.0, 12.0, 6.0, 1.0), (4.0, 4.0, 3.0, 1.0), (4.0, 4.0, 16.0, 0.25)],
)
def test_a_disk_s_share_of_a_transfer(read: float, write: float, both: float | None, share: float) -> None:
    rates = read_machine("rtx-4090").rates
    disk = {"nvme_read_bytes_per_s": read, "nvme_write_bytes_per_s": write, "nvme_both_ways_bytes_per_s": both}
    assert replace(rates, **disk).disk_shares == pytest.approx(dict.fromkeys(("nvme_read", "nvme_write"), share))


def test_all_are_shipped_and_named_on_the_page() -> None:
    assert set(builtin_names()) == set(SHIPPED)
    page = (Path(__file__).parents[2] / "docs/how-to/plan-and-report.md").read_text()
    listed = page.partition("Named machines: ")[2].partition("The files")[0]
    assert set(re.findall(r"`([^`]+)`", listed)) == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_machine_has_a_source_for_every_figure(name: str) -> None:
    machine = read_machine(name)
    values = {each.name: getattr(machine, each.name) for each in fields(Hardware)}
    values |= {each.name: getattr(machine.rates, each.name) for each in fields(Rates)}
    words = (
        "name",
        "device",
        "capability",
        "num_devices",
        "num_machines",
        "network_latency_s",
        "shares_memory",
        "system_bytes",
        "rates",
        "sources",
        "notes",
    )
    figures = {key for key, value in values.items() if value is not None and key not in words}
    assert figures == set(machine.sources)
    rates = machine.rates
    assert machine.num_devices is None, "the machine is planned with a device for each rank"
    assert rates.both_ways_bytes_per_s <= rates.h2d_bytes_per_s + rates.d2h_bytes_per_s
    assert rates.both_ways_bytes_per_s >= max(rates.h2d_bytes_per_s, rates.d2h_bytes_per_s)
    assert rates.has_bf16 is (name not in BEFORE_AMPERE)
    half = rates.flops_per_s.get("bf16") or rates.flops_per_s["fp16"]
    assert half >= rates.flops_per_s["fp32"] > 1e12
    assert 1e-6 < rates.launch_s < 1e-4
    assert machine.shares_memory is (name in ONE_MEMORY)
    assert (machine.capability is None) is (name == "strix-halo"), "no NVIDIA GPU"
    assert machine.capability is None or (machine.capability < (8, 0)) is (name in BEFORE_AMPERE)
    assert 0.85e9 * SHIPPED[name] < (machine.device_bytes or 0) < 2**30 * SHIPPED[name]


@pytest.mark.parametrize("name", [*BEFORE_AMPERE, "rtx-4070"])
def test_an_emulated_bf16_is_never_chosen(name: str) -> None:
    config = Config.load(None, {"data.sequence_length": 64})
    found = Forecaster(config, 1).predict(config, read_machine(name)).config.train.precision
    assert found == ("fp16" if name in BEFORE_AMPERE else "bf16")


def test_ranks_share_what_is_there_once() -> None:
    machine = read_machine("rtx-4090")
    assert share_of_rank(machine, 1) is machine
    one, four = machine.rates, share_of_rank(machine, 4).rates
    assert (four.h2d_bytes_per_s, four.flops_per_s) == (one.h2d_bytes_per_s, one.flops_per_s)
    for name in ("host_bytes_per_s", "nvme_read_bytes_per_s", "nvme_write_bytes_per_s"):
        assert getattr(four, name) == getattr(one, name) / 4
    memory = share_of_rank(machine.with_(disk_bytes=1000), 4)
    assert (memory.host_bytes, memory.disk_bytes) == (machine.host_bytes // 4, 250)
    alone = replace(one, nvme_read_bytes_per_s=None, nvme_write_bytes_per_s=None, collective_bytes_per_s=None)
    cpu = share_of_rank(machine.with_(device="cpu", rates=alone), 2).rates
    assert cpu.flops_per_s["fp32"] == one.flops_per_s["fp32"] / 2
    assert cpu.attention("fp32") == pytest.approx(one.attention("fp32") / 2)
    assert cpu.elementwise == pytest.approx(one.elementwise / 2)
    assert cpu.nvme_read_bytes_per_s is None
    assert cpu.collective_bytes_per_s == pytest.approx(0.8 * one.h2d_bytes_per_s / 2)


@pytest.mark.parametrize("said", ["RTX 4090", "rtx_4090", "rtx-4090", "RTX  4090"])
def test_names_are_taken_as_people_write_them(said: str) -> None:
    assert read_machine(said).name == "RTX 4090"


def written(folder: Path, **changes: Any) -> Path:
    """Write a specification with changed values. `...` removes a key; a `rates_` prefix selects a key below rates."""
    values = LEAST | {"rates": dict(LEAST["rates"])}
    for key, value in changes.items():
        table = values["rates"] if key.startswith("rates_") else values
        table[key.removeprefix("rates_")] = value
    path = folder / "mine.yaml"
    values["rates"] = {k: v for k, v in values["rates"].items() if v is not ...} if values["rates"] is not ... else ...
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not ...}))
    return path


def test_the_least_that_a_file_has_to_say(tmp_path: Path) -> None:
    machine = read_machine(written(tmp_path))
    assert (machine.device_bytes, machine.host_bytes, machine.num_devices) == (24 << 30, 64 << 30, None)
    assert (machine.disk_bytes, machine.endurance_bytes, machine.shares_memory) == (None, None, False)
    assert machine.rates.flops_per_s == {"fp32": 1e13, "bf16": 5e13}
    assert (machine.rates.h2d_bytes_per_s, machine.rates.launch_s) == (12e9, 1e-5)
    assert machine.rates.nvme_read_bytes_per_s is None
    assert machine.sources == {}
    assert read_machine(written(tmp_path, device="cpu", device_bytes=...)).device_bytes is None
    rates = read_machine(written(tmp_path, rates_launch_s="1e-5", rates_h2d_bytes_per_s="2e9")).rates
    assert (rates.launch_s, rates.h2d_bytes_per_s) == (1e-5, 2e9), "numbers that YAML takes for a text"


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        *((said, 3.125e9) for said in ("25Gbit", "25gbit/s", "25 Gbps", "25Gb/s", "25Gb", "3.125GB", "3.125 GB/s")),
        ("25gb", 25e9),
        ("100bit", 12.5),
    ],
)
def test_a_link_is_as_fast_as_networks_are_called(said: str, wanted: float, tmp_path: Path) -> None:
    """Break: read "25Gb/s" as bytes."""
    assert parse_link(said) == wanted
    machine = read_machine(written(tmp_path, num_machines=2, rates_network_bytes_per_s=said))
    assert (machine.num_machines, machine.rates.network_bytes_per_s) == (2, wanted)
    assert share_of_rank(machine, 4).rates.network_bytes_per_s == wanted / 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_device": 2}, ["num_device ", "did you mean num_devices?"]),
        ({"rates_h2d_byte_per_s": 2}, ["rates.h2d_byte_per_s", "did you mean h2d_bytes_per_s?"]),
        ({"rates_flops_per_s": {"fp32": 1e12, "bf61": 1e12}}, ["rates.flops_per_s.bf61", "did you mean bf16?"]),
        ({"rates_flops_per_s": {"fp32": 1e12}}, ["lacks rates.flops_per_s.bf16"]),
        ({"sources": {"host_byte": "x"}}, ["sources.host_byte", "did you mean host_bytes?"]),
        ({"sources": {"host_bytes": 5}}, ["sources.host_bytes is 5", "a text"]),
        ({"name": ..., "rates_launch_s": ...}, ["lacks name"]),
        ({"rates_launch_s": ...}, ["lacks rates.launch_s"]),
        ({"rates": ...}, ["lacks rates"]),
        ({"device_bytes": ...}, ["device_bytes is None", "all devices but a CPU"]),
        ({"device": "gpu"}, ["device is 'gpu'", '"cuda" or "cpu"']),
        ({"device": "cuda:1"}, ["device is 'cuda:1'", "without a number"]),
        ({"device": 5}, ["device is 5"]),
        ({"host_bytes": "64 gigs"}, ["host_bytes is '64 gigs'", "24GiB"]),
        ({"host_bytes": 0}, ["host_bytes is 0", "above 0"]),
        ({"rates_host_bytes_per_s": -1.0}, ["rates.host_bytes_per_s is -1.0"]),
        ({"rates_host_bytes_per_s": math.inf}, ["rates.host_bytes_per_s is inf"]),
        ({"rates_launch_s": True}, ["rates.launch_s is True"]),
        ({"num_devices": 1.5}, ["num_devices is 1.5"]),
        ({"shares_memory": "perhaps"}, ["shares_memory is 'perhaps'", "true or false"]),
        ({"capability": "new"}, ["capability is 'new'", "8.9"]),
    ],
)
def test_a_wrong_description_is_explained(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    path = written(tmp_path, **changes)
    with pytest.raises(ConfigError) as refusal:
        read_machine(path)
    assert not [word for word in [str(path), *words] if word not in str(refusal.value)], str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, r"x\.yaml") for text in ("- 5", "name: [", "5", "", "[" * 1500, "\0")),
        ("secret:x:0\nbin:x:1\n", "not a mapping of name, device"),
        ('a: [secret\nb: "x', "cannot be read: .*, line 2"),
    ],
)
def test_what_is_no_description_is_refused_and_not_shown(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said) as refusal:
        read_machine(tmp_path / "x.yaml")
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("h10", "did you mean h100?"),
        ("none.yaml", "cannot be read"),
        ("", "''"),
        ("a" * 300, "neither a YAML file"),
        ("~nobody-of-this-name/x.yaml", "neither a YAML file"),
    ],
)
def test_a_name_that_is_not_known(given: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_machine(given)
    assert words in str(refusal.value)
