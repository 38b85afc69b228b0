"""An integrated device computes over weights in host memory: no slots, no copies, and the bits of copied weights."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload import AdamW, Engine, Placement
from offload.accelerators import Accelerator, CudaAccelerator, _loaded_runtime, open_accelerator
from offload.errors import OffloadError
from offload.lanes.ticket import Ticket
from offload.layout.residence import DEVICE
from offload.tiers.host import Arena, Pinning
from tests.accelerator.control import Control
from tests.cases.models import build, llama, tokens
from tests.engine.inside import parts_of

pytestmark = pytest.mark.accelerator

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # tier of the optimizer states, settings
    "host": ("cpu", {}),
    "updates in the backward": ("cpu", {"max_grad_norm": None}),
    "disk below": ("nvme", {"prefetch": 2}),
    "saved graphs": ("cpu", {"recompute": "never", "micro_batch_size": 2}),
    "updates on the device": ("cpu", {"update": "device"}),
}


def run(folder: Path, case: str) -> tuple[list[torch.Tensor], int, set[str]]:
    """Return losses and weights, the bytes copied to the device in the last pass, and the device allocations."""
    tier, settings = CASES[case]
    folder.mkdir()
    with Engine(
        build(partial(llama, num_hidden_layers=3)),
        AdamW(lr=0.01),
        placement=Placement("cpu", tier, nvme_dir=str(folder) if tier == "nvme" else None),
        device="sim",
        precision="bf16",
        **{"update": "cpu"} | settings,
    ) as engine:
        found = [engine.step(tokens(seed)).loss for seed in range(2)]
        engine.save_checkpoint(folder / "saved")
        found += [engine.step(tokens(5)).loss, engine.evaluate(tokens(9))]
        engine.load_checkpoint(folder / "saved")
        found += [engine.evaluate(tokens(9)), engine.step(tokens(2)).loss]
        counters = parts_of(engine).counters
        names = {name.split(" (")[0] for tier, name, _ in engine.allocations if tier == DEVICE}
        weights = [parameter.detach().clone() for _, parameter in engine.named_parameters()]
        return [each.cpu() for each in (*found, *weights)], counters.h2d_bytes, names


def is_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, wanted))


QUICK = "disk below"


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case != QUICK)) for case in CASES])
def test_weights_are_used_where_they_are_stored(
    sim: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Break: `uses_pages` false."""
    copied, _, copies = run(tmp_path / "copied", case)
    monkeypatch.setattr(Accelerator, "is_integrated", True)
    used, h2d_bytes, names = run(tmp_path / "used", case)
    assert is_same(used, copied)
    weights = {"unit slot", "resident weights"}
    assert weights <= copies
    assert not weights & names
    assert (h2d_bytes == 0) == (case != "updates on the device"), "states, and no weights"


def test_the_fences_of_states_order_compute_and_updates(sim: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: no fences of pages in `Slots.use`, in `Slots.release`, or for weights that stay."""
    monkeypatch.setattr(Accelerator, "is_integrated", True)
    with Engine(build(llama), AdamW(lr=0.01), placement=Placement("cpu", "cpu"), device="sim") as engine:
        flow = parts_of(engine)
        layer, norm = (
            next(unit for unit in flow.units if unit.name == name) for name in ("model.layers.0", "model.norm")
        )
        waits: list[Ticket] = []
        monkeypatch.setattr(flow.lanes, "compute_after", lambda tickets, **_: waits.extend(tickets))
        for unit, wait in (
            (layer, lambda: flow.slots.use(0, layer.regions)),
            (norm, flow.slots.compute_after_resident),
        ):
            fence = flow.store.states[unit.regions[0]].tiles[0].fence
            update = Ticket("update", is_done=True)
            fence.record_writer(update)
            wait()
            assert update in waits
        (mark,) = flow.lanes.mark()
        flow.slots.release(0, layer.regions, (mark,))
        assert mark in flow.store.states[layer.regions[0]].tiles[0].lend("weights").users


def test_a_view_of_host_memory(sim: Control) -> None:
    """It keeps the memory alive. Breaks: no finalizer; no look at the registration."""
    accelerator = open_accelerator(torch.device("sim", 0))
    with pytest.raises(OffloadError, match=r"has not registered 16 B of them\. Raise .*--offload.parameters device"):
        accelerator.over(torch.zeros(4))
    arena = Arena(1 << 16, Pinning(accelerator))
    host = arena.take(1 << 15, torch.bfloat16)
    view = accelerator.over(host)
    host.fill_(3)
    assert (view.sum().cpu(), view.dtype, view.shape) == (3 * host.numel(), host.dtype, host.shape)
    view.fill_(2)
    accelerator.wait()
    assert host[-1] == 2
    part = view[8:16].data
    del host, arena, view
    gc.collect()
    assert part.sum().cpu() == 16


def test_kernels_get_the_device_address(sim: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered memory lies elsewhere for an AMD GPU. Break: take the host address."""
    accelerator = open_accelerator(torch.device("sim", 0))
    arena = Arena(1 << 16, Pinning(accelerator))
    host = arena.take(1 << 15, torch.bfloat16)

    def elsewhere(found: Any, address: Any, _flags: int) -> int:
        found._obj.value = address.value + 32
        return 0

    runtime = torch.sim.cudart()  # type: ignore[attr-defined]
    monkeypatch.setattr(runtime, "cudaHostGetDevicePointer", elsewhere)
    view = accelerator.over(host[:8])
    host[16:24] = 5  # 32 bytes on
    assert (view.cpu() == 5).all()
    monkeypatch.setattr(runtime, "cudaHostGetDevicePointer", lambda *_: 1)
    with pytest.raises(OffloadError, match=r"no address.*HostGetDevicePointer returns error 1\).*--offload.parameters"):
        accelerator.over(host[:8])


def test_a_runtime_that_is_not_loaded_is_named() -> None:
    assert _loaded_runtime() is None, "torch for CPUs"
    module: Any = SimpleNamespace(cudart=lambda: None)
    with pytest.raises(OffloadError, match="its runtime is not loaded"):
        CudaAccelerator(torch.device("cuda", 0), module).device_address(1)
