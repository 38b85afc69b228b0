"""Access to private engine state, for all engine tests."""

from __future__ import annotations

import gc
import inspect
import re
import textwrap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload import Engine
from offload.engine.flow import Flow
from offload.engine.loss.chunked_head import ChunkedHead
from offload.engine.memory import Memory
from offload.engine.recovery import Recovery
from offload.engine.steps import Steps
from offload.layout.planes import MASTER
from offload.tiers.accelerator_device import AcceleratorDevice
from offload.tiers.device import CpuDevice
from offload.tiers.store import Store
from tests.engine.device import own_device

LATE_BYTES = (CpuDevice if own_device().type == "cpu" else AcceleratorDevice).late_bytes


def parts_of(engine: Engine) -> Flow:
    return engine._flow


def memory_of(engine: Engine) -> Memory:
    return engine._memory


def steps_of(engine: Engine) -> Steps:
    return engine._steps


def believe_analyses(engine: Engine) -> None:
    """Let an engine use the analysis of another without trials: the other engine has made them, for this model."""
    steps = steps_of(engine)

    def note(inputs: Any) -> bool:
        steps.known.add_check(inputs, has_chunks=steps.losses.chunk_tokens(inputs) > 0)
        return False

    steps._refutes = note  # type: ignore[method-assign]


def head_of(engine: Engine) -> ChunkedHead | None:
    """Return the chunked head for any batch signature. None: no chunked head."""
    return next((found.head for found in steps_of(engine).known.results.values() if found.head), None)


def recovery_of(engine: Engine) -> Recovery:
    return parts_of(engine).recovery


def settle(engine: Engine) -> None:
    """Wait for all updates."""
    engine._settle("look inside")


@dataclass
class State:
    """Optimizer state and update count for one parameter, copied flat. others: planes that AdamW lacks."""

    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    num_steps: int
    others: dict[str, torch.Tensor | None] = field(default_factory=dict)


def states(engine: Engine) -> dict[str, State]:
    """Copy the optimizer states, by parameter name."""
    found = {}
    store = parts_of(engine).store
    settle(engine)
    for state in store.states.values():
        for position, index in enumerate(state.region.parameters):
            names = [plane.name for plane in state.region.table if plane.name not in (*MASTER, "gradients")]
            moments = {name: stored_plane(store, index, name) for name in names}
            adamw = [moments.pop(name, None) for name in ("exp_avg", "exp_avg_sq")]
            factors = {name: values.clone() for name, values in state.factors_of(position).items()}
            found[parts_of(engine).infos[index].name] = State(*adamw, state.steps[position], moments | factors)
    return found


def stored_plane(store: Store, index: int, name: str) -> torch.Tensor | None:
    """Copy a parameter's part from a plane, flat, in any tier. None: the region lacks the plane."""
    cut = store.values.region(index).plane(name).cut
    pieces = [
        planes[name][cut(mine)].to("cpu", copy=True)
        for planes, mine, _ in store.values.open_tiles(index, name)
        if name in planes
    ]
    return torch.cat(pieces) if pieces else None


def stored_factors(engine: Engine, name: str) -> dict[str, torch.Tensor]:
    """Copy a parameter's factors (rule state outside the planes), by name."""
    index = [info.name for info in parts_of(engine).infos].index(name)
    ((_, state, position),) = parts_of(engine).store.values._pieces[index]
    settle(engine)
    return {key: flat.clone() for key, flat in state.factors_of(position).items()}


def disk_files(engine: Engine, kind: str = "states") -> list[Path]:
    """Return paths to the open files of `states` or `activations`, which are unlinked."""
    return [Path(f"/proc/self/fd/{file.fd}") for file in getattr(memory_of(engine).nvme, f"_{kind}")._files]


def unit_names(engine: Engine) -> list[str]:
    return [unit.name for unit in parts_of(engine).units]


def resident_names(engine: Engine) -> list[str]:
    return [unit.name for unit in parts_of(engine).units if unit.resident]


def assert_parked(engine: Engine) -> None:
    """Check that an engine holds no memory of the device, and that torch's allocator has none in use.

    Other engines of the process must hold none.
    """
    assert not [name for tier, name, _ in engine.allocations if tier == "device"]
    if own_device().type != "cpu":
        gc.collect()
        assert torch.accelerator.memory_allocated() == torch.accelerator.memory_reserved() == 0


def planned_bytes(engine: Engine) -> dict[tuple[str, str], int]:
    """Return the bytes of each planned allocation, by tier and name."""
    return {(each.tier, each.name): each.num_bytes for each in parts_of(engine).plan.allocations}


def leave_spare_memory(engine: Engine) -> None:
    """Keep no units on the device in memory that steps leave unused. Otherwise fewer bytes move."""
    parts_of(engine).spare_memory.end_step = lambda peak_bytes: None  # type: ignore[method-assign]


def keep_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Return a dict that receives the gradients of every step before the update, flat, by parameter name."""
    flow, kept = parts_of(engine).gradients, {}
    finish = flow.transfer.finish

    def finish_and_keep() -> None:
        finish()
        for state in parts_of(engine).store.states.values():
            for position, index in enumerate(state.region.parameters):
                if state.gradients is not None:
                    kept[parts_of(engine).infos[index].name] = state.gradients[state.span(position)].clone()

    flow.transfer.finish = finish_and_keep
    return kept


def updating_device(engine: Engine) -> torch.device:
    """Return the optimizer update device."""
    state = parts_of(engine)
    return state.device.torch_device if state.plan.residence.common == "device" else torch.device("cpu")


def step_peak(engine: Engine, step: Callable[[], Any]) -> int:
    """Return the peak device memory in one step, in bytes.

    On the CPU this is the first step. An accelerator's allocator also counts the recording pass and the measurement:
    there it is the second step, without spare memory. Buffers freed while another stream uses them do not count,
    because their size depends on the load.
    """
    step()
    if own_device().type == "cpu":
        return engine.counters.peak_device_bytes
    device, found = parts_of(engine).device, []

    def look() -> int:
        found.append(torch.accelerator.max_memory_allocated(device.torch_device))
        return found[-1]

    device.take_recent_peak = look  # type: ignore[method-assign]
    torch.accelerator.reset_peak_memory_stats(device.torch_device)
    step()
    return max(found)


def lane_threads(engine: Engine) -> list[threading.Thread]:
    """Return the threads started by the engine's lanes."""
    found = [getattr(lane, "_thread", None) for lane in parts_of(engine).lanes._all]
    return [thread for thread in found if thread is not None]


def num_threads() -> int:
    """Return the number of lane threads in this process."""
    return sum(thread.name.startswith("offload ") for thread in threading.enumerate())


def run_example(module: Any, contract: type, **others: Any) -> dict[str, Any]:
    """Run the code in the docstring of a contract; return the names."""
    block = re.search(r"^    (?:.|\n(?=    |\n))+", inspect.getdoc(contract) or "", re.MULTILINE)
    names = {**vars(module), **others}
    exec(textwrap.dedent(block[0]), names)
    return names
