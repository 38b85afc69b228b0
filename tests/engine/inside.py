"""The only place where these tests look into an engine: states that the contract does not show."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from offload import Engine
from offload.engine.loss.chunked_head import ChunkedHead
from offload.engine.recovery import Recovery
from offload.engine.state import EngineState
from offload.engine.steps import Steps
from offload.layout.planes import MASTER
from offload.tiers.store import Store
from tests.engine.device import own_device


def parts_of(engine: Engine) -> EngineState:
    """Return what an engine is made of."""
    return engine._state


def steps_of(engine: Engine) -> Steps:
    """Return what makes the steps of an engine."""
    return engine._steps


def head_of(engine: Engine) -> ChunkedHead | None:
    """Return the head that is used in chunks, of some kind of batch."""
    return next((found.head for found in steps_of(engine).trial_runs._found.values() if found.head), None)


def recovery_of(engine: Engine) -> Recovery:
    """Return what an engine does about what failed."""
    return parts_of(engine).recovery


def settle(engine: Engine) -> None:
    """Let every update arrive."""
    engine._settle("look inside")


@dataclass
class State:
    """A copy of what is stored for one parameter, flat, and how often it was updated. others: what rules other than
    AdamW have, by plane."""

    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    num_steps: int
    others: dict[str, torch.Tensor | None] = field(default_factory=dict)


def states(engine: Engine) -> dict[str, State]:
    """Return copies of the optimizer states by parameter name."""
    found = {}
    store = parts_of(engine).store
    settle(engine)
    for state in store.states:
        for position, index in enumerate(state.region.parameters):
            names = [plane.name for plane in state.region.table if plane.name not in (*MASTER, "gradients")]
            moments = {name: stored_plane(store, index, name) for name in names}
            adamw = [moments.pop(name, None) for name in ("exp_avg", "exp_avg_sq")]
            factors = {name: values.clone() for name, values in state.factors_of(position).items()}
            found[parts_of(engine).infos[index].name] = State(*adamw, state.steps[position], moments | factors)
    return found


def stored_plane(store: Store, index: int, name: str) -> torch.Tensor | None:
    """Return a copy of a parameter's share of a plane, flat, wherever it rests; None where there is none."""
    cut = store.values.region(index).plane(name).cut
    pieces = [
        planes[name][cut(mine)].to("cpu", copy=True)
        for planes, mine, _ in store.values.opened(index, name)
        if name in planes
    ]
    return torch.cat(pieces) if pieces else None


def stored_factors(engine: Engine, name: str) -> dict[str, torch.Tensor]:
    """Return copies of what the rule keeps of a parameter beside the planes, by name."""
    index = [info.name for info in parts_of(engine).infos].index(name)
    ((_, state, position),) = parts_of(engine).store.values._homes[index]
    settle(engine)
    return {key: flat.clone() for key, flat in state.factors_of(position).items()}


def disk_files(engine: Engine, kind: str = "states") -> list[Path]:
    """Return the files of `states` or `activations`, which have no names, as paths to open them by."""
    return [Path(f"/proc/self/fd/{file.fd}") for file in getattr(parts_of(engine)._nvme, f"_{kind}")._files]


def unit_names(engine: Engine) -> list[str]:
    return [unit.name for unit in parts_of(engine).units]


def resident_names(engine: Engine) -> list[str]:
    return [unit.name for unit in parts_of(engine).units if unit.resident]


def keep_gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Return what will hold every step's gradients by parameter, flat, as they are before the update."""
    flow, kept = parts_of(engine).gradients, {}
    finish = flow.landing.finish

    def finish_and_keep() -> None:
        finish()
        for state in parts_of(engine).store.states:
            for position, index in enumerate(state.region.parameters):
                if state.gradients is not None:
                    kept[parts_of(engine).infos[index].name] = state.gradients[state.span(position)].clone()

    flow.landing.finish = finish_and_keep
    return kept


def updating_device(engine: Engine) -> torch.device:
    """Return where the optimizer states are updated."""
    state = parts_of(engine)
    return state.device.torch_device if state.plan.tiers[1] == "device" else torch.device("cpu")


def step_peak(engine: Engine, step: Callable[[], Any]) -> int:
    """Return the most device bytes that a step takes, the first one. An accelerator's allocator counts what a recording
    and a measurement take as well: there it is the second step, without what is left over. What was freed while another
    stream still used it does not count: how much that is depends on the load.
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
    """Return the threads that the lanes of an engine have begun."""
    found = [getattr(lane, "_thread", None) for lane in parts_of(engine).lanes._all]
    return [thread for thread in found if thread is not None]


def num_threads() -> int:
    """Return how many threads of lanes there are."""
    return sum(thread.name.startswith("offload ") for thread in threading.enumerate())
