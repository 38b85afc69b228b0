"""Host cost of an engine beyond plain PyTorch, for each unit and step, with kernels that take no time: calls of Python
functions and of C functions from Python; kernels, copies and events; and CPU time of the engine code. The simulated
accelerator works on threads that are not counted.

Every figure is a slope: the difference between a step of DEEP and SHALLOW layers, by layer. Plain PyTorch has the same
model on the device and runs equal passes: forward, backward, and with recomputation another forward without a graph.

OMP_NUM_THREADS=1 python -m benchmarks.overhead --out benchmarks/results/overhead.json
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from types import FrameType
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import harness
from offload import Engine, Placement
from offload.engine.gradients.flow import GradientFlow
from offload.engine.units.call import Router, UnitCall
from offload.engine.units.unit import Unit
from offload.extras.tools.benches.report import Result
from offload.planning.memory import SLOT
from tests import accelerator
from tests.engine.inside import parts_of

SUMMARY = "the host's work for a unit and step beyond plain PyTorch, on the simulated accelerator"
QUICK = {"cases": ["recompute"], "steps": 3}
SHALLOW, DEEP = 8, 24
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {  # engine settings, and placement settings
    "recompute": ({}, {}),
    "kept graphs": ({"recompute": "never"}, {}),
    "activations on the host": ({}, {"activations": "cpu"}),
    "two micro-batches": ({"micro_batch_size": 1}, {}),
}
COMPUTE = ("main", "autograd")
"""The threads that run model code."""
COUNTERS = ("launches", "copies", "waits", "operation_waits", "pageable_copies")


def model_of(num_layers: int) -> nn.Module:
    """Return a small Llama in bf16 with aligned sizes, like large models."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 128}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=num_layers, use_cache=False)).bfloat16().train()


def batch() -> dict[str, torch.Tensor]:
    """Return two rows of tokens, on the host."""
    ids = torch.arange(32).view(2, 16) % 64
    return {"input_ids": ids, "labels": ids}


@contextmanager
def engine_steps(case: str, num_layers: int) -> Iterator[Callable[[], object]]:
    """Yield a step of an engine with streamed units, lane work included. The engine has already taken the leftover
    memory, which happens after a step without a new peak.
    """
    settings, placement = CASES[case]
    engine = Engine(
        model_of(num_layers),
        placement=Placement(**placement),
        precision="bf16",
        clip="deferred",
        prefetch=2,
        **settings,
    )

    def step() -> None:
        engine.step(batch())
        parts_of(engine).lanes.finish()

    try:
        for _ in range(20):
            step()
            if parts_of(engine).slots.capacity_bytes == parts_of(engine).plan.range(SLOT)[1]:
                break
        else:
            raise RuntimeError("twenty steps have not shown what memory is left over")
        yield step
    finally:
        engine.close()


@contextmanager
def plain_steps(case: str, num_layers: int) -> Iterator[Callable[[], object]]:
    """Yield the passes of plain PyTorch."""
    model, num_rows = model_of(num_layers).to("sim"), CASES[case][0].get("micro_batch_size", 2)

    def step() -> None:
        given = {key: value.to("sim", non_blocking=True) for key, value in batch().items()}
        for first in range(0, 2, num_rows):
            part = {key: value[first : first + num_rows] for key, value in given.items()}
            if CASES[case][0].get("recompute") != "never":
                with torch.no_grad():
                    model(**part)
            model(**part).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    yield step


# -- counting ------------------------------------------------------------------------------------------------------


class Calls:
    """Counts the calls on autograd's thread, on this thread, and on all threads started by Python since `begin`."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.python: Counter[tuple[str, str]] = Counter()
        """Calls by (thread, function), resumed generators included."""
        self.c: Counter[tuple[str, str]] = Counter()
        self._is_on = False

    def begin(self) -> None:
        """Call before the engine's threads start."""
        threading.setprofile(self._note)
        in_autograd(lambda: sys.setprofile(self._note))
        sys.setprofile(self._note)

    def end(self) -> None:
        threading.setprofile(None)  # type: ignore[arg-type]
        in_autograd(lambda: sys.setprofile(None))
        sys.setprofile(None)

    def during(self, run: Callable[[], object]) -> None:
        """Count the calls of a step."""
        self.python.clear()
        self.c.clear()
        self._is_on = True
        try:
            run()
        finally:
            self._is_on = False

    def _note(self, frame: FrameType, event: str, function: Any) -> None:
        if not self._is_on:
            return
        name = thread_name(threading.get_ident())
        thread = "compute" if name in COMPUTE else name
        if event == "call":
            self.python[thread, f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
        elif event == "c_call":
            self.c[thread, getattr(function, "__qualname__", str(function))] += 1


_autograd: list[int] = []


def in_autograd(run: Callable[[], object]) -> None:
    """Call a function on the autograd thread of the device."""

    def hook(_gradient: torch.Tensor) -> None:
        _autograd[:] = [threading.get_ident()]
        run()

    x = torch.zeros(1, device="sim", requires_grad=True)
    y = x * 1
    y.register_hook(hook)
    y.backward()


def thread_name(ident: int) -> str:
    """Return "main", "autograd", or the name of one of the engine's threads."""
    if ident in _autograd:
        return "autograd"
    thread = threading._active.get(ident)  # type: ignore[attr-defined]
    return "main" if thread is threading.main_thread() else getattr(thread, "name", "other")


def cpu_seconds() -> dict[str, float]:
    """Return the CPU time of each Python thread so far."""
    idents = {thread_name(ident): ident for ident in (*_autograd, *threading._active)}  # type: ignore[attr-defined]
    return {name: time.clock_gettime(time.pthread_getcpuclockid(ident)) for name, ident in idents.items()}


def counts_of(sim: Any, steps: Callable[..., Any], case: str, num_layers: int) -> tuple[dict[str, float], Calls]:
    """Return the counts of one step in the steady state: the step of three with the fewest launches."""
    calls = Calls()
    calls.begin()
    try:
        with steps(case, num_layers) as step:
            for _ in range(3):
                step()
            gc.collect()  # finalizers of earlier engines launch kernels too
            gc.disable()
            measured = []
            for _ in range(3):
                torch.accelerator.synchronize()
                sim.reset_counters()
                calls.during(step)
                torch.accelerator.synchronize()
                measured.append(
                    ({name: sim.counters()[name] for name in COUNTERS}, calls.python.copy(), calls.c.copy())
                )
    finally:
        gc.enable()
        calls.end()
    found: dict[str, float]
    found, calls.python, calls.c = min(
        measured, key=lambda each: each[0]["launches"]
    )  # work from before may end in one
    for kind, counted in (("Python calls", calls.python), ("C calls", calls.c)):
        for (thread, _), number in counted.items():
            name = f"{kind} in {'compute' if thread == 'compute' else 'lanes'}"
            found[name] = found.get(name, 0) + number
    found["events"] = sum(n for (_, name), n in calls.c.items() if name.endswith(("Event.record", "EventBase.record")))
    return found, calls


def slope(deep: Mapping[Any, float], shallow: Mapping[Any, float]) -> dict[Any, float]:
    """Return the increase for each layer."""
    return {name: (deep[name] - shallow.get(name, 0)) / (DEEP - SHALLOW) for name in deep}


def added_counts(sim: Any, case: str, kind: str = "") -> dict[Any, float]:
    """Return the engine's counts beyond plain PyTorch for each unit and step.

    kind: "python" or "c": calls by thread and function instead.
    """

    def counted(steps: Callable[..., Any], depth: int) -> Mapping[Any, float]:
        counts, calls = counts_of(sim, steps, case, depth)
        return getattr(calls, kind) if kind else counts

    ours, plain = (slope(counted(steps, DEEP), counted(steps, SHALLOW)) for steps in (engine_steps, plain_steps))
    return {name: ours[name] - plain.get(name, 0) for name in ours}


class OwnTime:
    """Sums the CPU time of the engine code on the compute threads: a unit's forward and backward without module code
    and without autograd code.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = threading.local()
        for owner, name in ((Router, "stream"), (UnitCall, "backward"), (GradientFlow, "take")):
            setattr(owner, name, self._timed(getattr(owner, name), True))
        torch.autograd.backward = self._timed(torch.autograd.backward, False)
        forward = Unit.forward.fget
        Unit.forward = property(lambda unit: self._timed(forward(unit), False))  # type: ignore[misc, assignment]

    def _timed(self, function: Callable[..., Any], is_own: bool) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._thread.owners.append(is_own)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._thread.owners.pop()

        return timed

    def _switch(self) -> None:
        """Add the time since the last switch to its owner."""
        thread, now = self._thread, time.thread_time()
        if not hasattr(thread, "owners"):
            thread.owners, thread.since = [False], now
        self.seconds += (now - thread.since) * thread.owners[-1]
        thread.since = now


def cpu_of(sim: Any, own: OwnTime, case: str, num_steps: int) -> dict[str, float]:
    """Return CPU milliseconds for each unit and step: medians of steps without compute."""
    found: dict[int, dict[str, float]] = {}
    for depth in (DEEP, SHALLOW):
        with engine_steps(case, depth) as step:
            for _ in range(3):
                step()
            sim.set_computing(False)
            times = []
            for _ in range(num_steps):
                before, own.seconds = cpu_seconds(), 0.0
                step()
                lanes = {name: now - before[name] for name, now in cpu_seconds().items() if name not in COMPUTE}
                times.append(lanes | {"compute": own.seconds})
            sim.set_computing(True)
        found[depth] = {name: median(each[name] for each in times) * 1e3 for name in times[0]}
    return slope(found[DEEP], found[SHALLOW])


def calls_by_function(sim: Any, case: str, kind: str) -> list[Result]:
    """Return the calls of an engine step by function, for each layer."""
    most = sorted(added_counts(sim, case, kind).items(), key=lambda item: -item[1])
    return [Result(" ".join(place), number, "calls") for place, number in most if number > 0.5]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=31, help="for the CPU times (default %(default)s)")
    parser.add_argument("--functions", choices=("python", "c"), help="the calls of the first case by function instead")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Return counts and CPU times by case."""
    sim = accelerator.load(num_devices=1)
    sim.enter(0)
    if arguments.functions:
        return calls_by_function(sim, arguments.cases[0], arguments.functions)
    results = []
    for case in arguments.cases:
        counts = added_counts(sim, case)
        results += [Result(f"{case}: {name}", number, "a unit") for name, number in counts.items()]
    own = OwnTime()  # changes the engine's classes: after all counts
    for case in arguments.cases:
        times = cpu_of(sim, own, case, arguments.steps)
        results += [Result(f"{case}: CPU time, {name}", ms, "ms a unit") for name, ms in times.items()]
    return results


if __name__ == "__main__":
    harness.begin(sys.modules[__name__])
