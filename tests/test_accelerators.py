"""Accelerator selection in one place: the choice, the torch calls, and a check for other places."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import offload
from offload.accelerators import (
    Accelerator,
    CudaAccelerator,
    accelerators,
    has_bf16,
    open_accelerator,
    own_accelerator,
    unusable_gpu,
)
from offload.distributed.comm import Comm
from offload.engine.prepare import engine_device
from offload.errors import ConfigError
from offload.extras.plan.probe import _precisions
from offload.planning.settings import Settings
from offload.tiers.counters import Ledger
from offload.tiers.device import CpuDevice, open_device

NAMED = re.compile(
    r"torch\.(cuda|xpu|mps|accelerator)\b|get_device_module|\bis_(cuda|xpu)\b|\.type [!=]= .(cuda|xpu)"
    r"|\bfrom torch import .*(cuda|xpu|accelerator)|device\(.(cuda|xpu)|backend=.nccl"
)


def names_a_kind(text: str) -> bool:
    return NAMED.search(text) is not None


def test_no_other_file_names_a_kind_of_accelerator() -> None:
    root = Path(offload.__file__).parent
    texts = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    assert len(texts) > 100
    assert [name for name, text in texts.items() if names_a_kind(text)] == ["accelerators.py"]


@pytest.mark.parametrize(
    "text",
    ["torch.cuda.Event()", "tensor.is_cuda", 'device.type == "cuda"', 'torch.device("cuda", 0)', "torch.accelerator.x"],
)
def test_a_kind_that_is_named_is_seen(text: str) -> None:
    assert names_a_kind(text)


# -- selection -----------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives torch `count` devices of a type, with a recording device module."""

    def has(kind: str, count: int) -> SimpleNamespace:
        module = SimpleNamespace(device_count=lambda: count)
        if kind == "cuda":
            module.cudart = lambda: None
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        return module

    return has


@pytest.mark.parametrize(("rank", "index"), [(None, 0), ("", 0), ("0", 0), ("2", 2), ("4", 1)])
def test_a_process_has_the_one_of_its_local_rank(
    machine: Any, monkeypatch: pytest.MonkeyPatch, rank: str | None, index: int
) -> None:
    machine("cuda", 3)
    environ = {} if rank is None else {"LOCAL_RANK": rank}
    found = own_accelerator(environ=environ)
    assert isinstance(found, CudaAccelerator)
    assert found.device == torch.device("cuda", index)
    assert [each.device.index for each in accelerators()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "current", "rank", "wanted"),
    [
        ("cpu", 1, "2", None),
        ("cuda", 0, None, 0),
        ("cuda", 0, "2", 2),
        ("cuda:1", 0, "2", 1),
        ("cuda:0", 2, "1", 0),
        (None, 2, None, 2),
        (None, 2, "1", 2),
    ],
)
def test_a_device_may_be_named_or_be_the_one_that_the_thread_has_chosen(
    machine: Any, monkeypatch: pytest.MonkeyPatch, name: str | None, current: int, rank: str | None, wanted: int | None
) -> None:
    machine("cuda", 3)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    found = own_accelerator(name, {} if rank is None else {"LOCAL_RANK": rank})
    assert (None if found is None else found.device.index) == wanted


@pytest.mark.parametrize(
    ("name", "count", "match"),
    [
        ("gpu", 1, "offload.device is 'gpu', which torch does not accept as a device"),
        ("cuda:3", 3, r"finds 3 of this kind: give cuda:0 to cuda:2"),
        ("xpu", 1, "finds cuda alone"),
        ("cuda", 0, "only the CPU: give cpu, or nothing"),
    ],
)
def test_a_device_that_is_not_there_is_refused(machine: Any, name: str, count: int, match: str) -> None:
    machine("cuda", count)
    with pytest.raises(ConfigError, match=match):
        own_accelerator(name)


@pytest.mark.parametrize(("kind", "count"), [("mps", 1), ("cuda", 0)])
def test_what_has_no_streams_or_is_not_there_is_none(machine: Any, kind: str, count: int) -> None:
    machine(kind, count)
    assert accelerators() == []
    assert own_accelerator(environ={"LOCAL_RANK": "1"}) is None
    assert isinstance(open_device(None, Ledger("device"), False), CpuDevice)


@pytest.mark.parametrize("name", [None, "cuda:2"])
def test_an_engine_computes_where_its_ranks_exchange(machine: Any, name: str | None) -> None:
    machine("cuda", 3)
    comm = Comm()
    comm.size, comm.device = 2, torch.device("cuda", 2)
    assert engine_device(Settings(device=name), comm) == torch.device("cuda", 2)
    with pytest.raises(
        ConfigError, match=r"offload.device is cpu, but the comm .* for cuda:2: leave out the device, or"
    ):
        engine_device(Settings(device="cpu"), comm)


def test_ranks_exchange_by_what_torch_has_for_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", {"nccl", "xccl"}.__contains__)
    assert [open_accelerator(torch.device(kind, 0)).backend for kind in ("cuda", "xpu")] == ["nccl", "xccl"]
    monkeypatch.setattr(torch.distributed, "is_backend_available", {"xccl"}.__contains__)
    with pytest.raises(ConfigError, match=r"cuda devices .* over nccl, and torch .* was built without it: install"):
        _ = open_accelerator(torch.device("cuda", 0)).backend
    assert open_accelerator(torch.device("xpu", 0)).backend == "xccl"


# -- torch calls ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Accelerator, CudaAccelerator])
def test_only_an_event_that_somebody_waits_for_blocks_and_only_where_the_kind_can(kind: type[Accelerator]) -> None:
    asked: list[dict[str, bool]] = []
    found = kind(torch.device("xpu", 0), SimpleNamespace(Event=lambda **flags: asked.append(flags)))
    found.event()
    found.event(is_timed=True, sleeps=True)
    blocks = {"blocking": True} if kind is CudaAccelerator else {}
    assert asked == [{"enable_timing": False}, {"enable_timing": True} | blocks]


def test_memory_is_registered_with_the_device_as_the_threads() -> None:
    """A finalizer can run in any thread, with another current device."""
    calls: list[tuple[Any, ...]] = []
    current: list[int] = [0]

    @contextmanager
    def device(found: torch.device) -> Any:
        current.append(found.index)
        yield
        current.pop()

    def call(*words: Any) -> int:
        calls.append((current[-1], *words))
        return 712

    runtime = SimpleNamespace(
        cudaHostRegister=lambda *words: call("register", *words),
        cudaHostUnregister=lambda *words: call("unregister", *words),
    )
    found = CudaAccelerator(torch.device("cuda", 3), SimpleNamespace(device=device, cudart=lambda: runtime))
    assert found.register(4096, 100) == found.unregister(4096) == 712
    assert calls == [(3, "register", 4096, 100, 0), (3, "unregister", 4096)]


def test_what_torch_does_not_tell_of_a_kind_is_left_out() -> None:
    told = {"name": "one", "total_memory": 80, "major": 9, "minor": 0}
    pci = {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}
    described = []
    for properties in (told | pci, told, {"name": "one", "total_memory": 80}):
        found = SimpleNamespace(**properties)
        module = SimpleNamespace(get_device_properties=lambda device, found=found: found)
        described.append(CudaAccelerator(torch.device("cuda", 0), module).describe())
        assert not CudaAccelerator(torch.device("cuda", 0), module).is_integrated
        found.is_integrated = 1
        ways = []
        for kind in (Accelerator, CudaAccelerator):
            accelerator = kind(torch.device("cuda", 0), module)
            assert accelerator.is_integrated
            assert accelerator.uses_pages is accelerator.can_register
            ways.append(accelerator.describe()["weights_in_host_memory"])
        assert ways == ["copied", "used in place"]
    least = {"name": "one", "memory_bytes": 80, "runtime": f"CUDA {torch.version.cuda}"}
    assert described == [
        least | {"capability": "9.0", "pci": "0000:3b:00.0"},
        least | {"capability": "9.0"},
        least,
    ]


def test_a_gpu_that_torch_cannot_use_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unusable_gpu({}, tmp_path) is None
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert unusable_gpu({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) is None, "hidden on purpose"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA: install one" in str(unusable_gpu({}, tmp_path))
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08\n")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    told = str(unusable_gpu({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path))
    assert "NVIDIA GPU (535.161.08)" in told
    assert "for CUDA 13.0: the driver may be too old" in told


@pytest.mark.parametrize(
    ("capability", "hip", "expected"),
    [((6, 0), None, False), ((7, 0), None, False), ((7, 5), None, False), ((8, 0), None, True), ((9, 0), "6.4", True)],
)
def test_gpus_before_ampere_emulate_bf16(
    capability: tuple[int, int], hip: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    found = SimpleNamespace(major=capability[0], minor=capability[1])
    module = SimpleNamespace(get_device_properties=lambda _device: found)
    accelerator = CudaAccelerator(torch.device("cuda"), module)
    assert has_bf16(accelerator) == expected
    # A measured machine has a rate of bf16 only where the card computes in it: the plan takes its precision from there.
    assert _precisions(accelerator) == ("fp32", "bf16" if expected else "fp16")
    assert has_bf16(Accelerator(torch.device("xpu"), module))
    assert has_bf16(None)
