"""Jobs of the rank pool, and rank processes that end in different ways.

python -m tests.engine.ranks_child serve | steps WAY STAGE FOLDER [DISPATCH]
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offload import AdamW, Engine, Placement
from offload.distributed.comm import Comm
from offload.distributed.joining import open_comm
from offload.distributed.watchdog import WatchdogLimits
from offload.errors import ConfigError, NonFiniteError, OffloadError, RankLostError
from offload.lanes.streams import StreamLanes
from offload.lanes.ticket import Fence
from tests import accelerator
from tests.cases.features import BF16, HANDMADE, Case, Cell
from tests.cases.models import build, freeze, gpt2, llama, tokens
from tests.cases.run import Step, Training, small
from tests.engine.handmade import OneBlockInManyPlaces, Shifting, words
from tests.engine.inside import leave_spare_memory, parts_of
from tests.engine.ranks import serve
from tests.engine.reference import Batch, comparable
from tests.engine.shared_child import SHARED
from tests.engine.test_clipping import Spiking
from tests.engine.test_micro_batches import Centring
from tests.engine.test_parameters import Mixture, mixed

JOB = WatchdogLimits(beat_s=0.2, silence_s=20, grace_s=1, stall_s=60, start_s=100)
"""Comm times for jobs: patient on a busy machine, but a stalled rank is reported well before the job timeout."""
SMOOTH = AdamW(
    lr=0.05,
    betas=(0.9, 0.99),
    eps=1.0,
    weight_decay=0.1,
    groups=[("up|q_proj|c_attn|0.norm.weight", {"lr_scale": 0.5}), ("norm|ln_", {})],
)
"""An update as precise as the gradients, with optimizer state.

AdamW divides by the gradient magnitude: a rounding difference in a near-zero gradient (another summation order) becomes
a full step. With eps far above all gradients the step is m / (sqrt(v) + 1), and a gradient change grows by at most lr.
sqrt(v), a norm over past gradients, changes at most as much as the gradients. Two learning rates, and no weight decay
for 1-D parameters, cut regions into segments with ends anywhere in a shard.
"""


# -- models ----------------------------------------------------------------------------------------------------------

ODD = {
    "hidden_size": 40,
    "intermediate_size": 53,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "max_position_embeddings": 32,
}
"""Sizes not divisible by 2, 3 or 4 ranks. Shards end inside parameters, and some ranks hold only padding of small
regions.
"""


def odd_llama(**settings: Any) -> nn.Module:
    return llama(**ODD | settings)


def deep_llama() -> nn.Module:
    return odd_llama(num_hidden_layers=5)


def tied_llama() -> nn.Module:
    return odd_llama(tie_word_embeddings=True)


def frozen_llama() -> nn.Module:
    """Return a model with frozen units at the front and a partly frozen unit."""
    return freeze(odd_llama(), "embed_tokens", "layers.0.", "q_proj")


def routed(seed: int, rows: int) -> dict[str, Tensor]:
    """Return words whose rows nearly all select expert 0.

    The last row, held by one rank, selects expert 1 in every second batch. From seed 3 on, the first row selects expert
    2.
    """
    batch = words(seed, rows)
    batch["x"][:, 0] = 0
    batch["x"][-1, 0] = seed % 2
    if seed >= 3:
        batch["x"][0, 0] = 2
    return batch


def plain_dropout() -> nn.Module:
    return gpt2(n_layer=1)


CASES = {
    "plain": Case(odd_llama),
    "tied": Case(tied_llama),
    "frozen in bf16": Case(frozen_llama, BF16),
    "experts": Case(Mixture, **HANDMADE | {"batch": routed}),
    "two dtypes": Case(mixed, BF16, **HANDMADE, reference=lambda precision: {"kept": lambda name: "norm" in name}),
    "mixes rows": Case(Centring, **HANDMADE),
    **SHARED,
    "spiking": Case(Spiking, **HANDMADE),
    "moving buffers": Case(Shifting, {"optimizer": AdamW()}, **HANDMADE),
    "used twice": Case(OneBlockInManyPlaces, **HANDMADE),
}
WITHIN = {"fp32": 1e-6, "bf16": 4e-3}
"""Allowed distance from plain PyTorch, as a share of the layer's scale. In bf16 another order of sums may round to the
adjacent value.
"""


COUNTED = (
    "h2d_bytes",
    "d2h_bytes",
    "nvme_read_bytes",
    "nvme_write_bytes",
    "all_gather_elements",
    "reduce_scatter_elements",
    "network_bytes",
    "all_to_all_elements",
)


# -- jobs ------------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """Results from one run on one rank.

    moved: the `COUNTED` counters per step; local: losses on this rank;
    kinds: the fence kinds created in the run.
    """

    steps: list[Step] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    allocations: list[tuple[str, str, int]] = field(default_factory=list)
    moved: list[dict[str, int]] = field(default_factory=list)
    peak_host_bytes: int = 0
    local: list[float] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    error: tuple[str, str] | None = None

    @property
    def results(self) -> str:
        """All numbers as text, so NaN equals NaN."""
        return f"{self.steps} {self.evaluated} {self.error}"


def opened(comm: Comm | None, case: Case, *, folder: str = "", delays: int | None = None, **settings: Any) -> Engine:
    """Return an engine on this rank.

    placement: keyword arguments of Placement; delays: base seed for the delays on each rank; by_rank: settings per
    rank.
    """
    rank = comm.rank if comm else 0
    settings = {"optimizer": SMOOTH, "clip": "auto", **case.settings, **settings}
    settings |= settings.pop("by_rank", {}).get(rank, {})
    if delays is not None:
        settings["debug"] = 10 * delays + rank + 1
    seed, make = settings.pop("model_seed", 0), settings.pop("make", None)
    cell = Cell(settings.pop("placement", {}), settings, make)
    return Training(case, cell, Path(folder), rank).engine(seed, comm=comm)


def train(comm: Comm | None, case: str, rows: Sequence[int], num_steps: int, **settings: Any) -> Found:
    """Train on this rank's `rows[rank]` rows in every batch. `comm` None: the engine opens one.

    seeds: batch seeds, one per step; skipping: the step to leave out; evaluate: the step before an evaluation;
    is_counted: compare moved bytes, so spare accelerator memory keeps no units; spike: (step, rank, factor) for a
    gradient; unlabelled: the rank without targets. A step with gradients that are not finite ends with an error in the
    results.
    """
    known, found = CASES[case], Found()
    seeds = settings.pop("seeds", range(num_steps))
    evaluate, spike = settings.pop("evaluate", None), settings.pop("spike", (None, None, 1.0))
    is_counted = settings.pop("is_counted", False)
    unlabelled = settings.pop("unlabelled", None)
    engine = opened(comm, known, **settings)
    rank = engine.rank
    assert comm is None or (rank, engine.world_size) == (comm.rank, comm.size)
    if is_counted:
        leave_spare_memory(engine)
    training = training_of(known, rows, engine, unlabelled)
    for step, seed in enumerate(seeds):
        if spike[0] is not None:
            engine.model.factor = spike[2] if spike[:2] == (step, rank) else 1.0
        try:
            found.steps.append(training.step(engine, seed))
        except NonFiniteError as caught:
            found.error = type(caught).__name__, str(caught)
        found.moved.append(numbers(engine.counters))
        if evaluate == step:
            batch = training_of(known, rows, engine).batch(99)
            found.evaluated.append(engine.evaluate(batch, known.loss_fn).item())
            assert numbers(engine.counters) == found.moved[-1], "evaluation leaves the counters alone"
    found.weights = dict(engine.named_parameters())
    assert numbers(engine.counters) == found.moved[-1], "reading weights leaves the counters alone"
    found.allocations, found.peak_host_bytes = list(engine.allocations), engine.counters.peak_host_bytes
    engine.close()
    return found


def training_of(case: Case, rows: Sequence[int], engine: Engine, unlabelled: int | None = None) -> Training:
    """Return steps on this rank's rows. unlabelled: the rank without targets."""

    def batch(seed: int, num_rows: int) -> Batch:
        whole = case.batch(seed, num_rows)
        return whole if unlabelled is None else without_targets(whole, rows, unlabelled)

    return Training(case, Cell(batch=batch, rows=rows, ranks=engine.world_size), Path(), engine.rank)


def numbers(counters: Any) -> dict[str, int]:
    return {name: getattr(counters, name) for name in COUNTED}


def without_targets(batch: Batch, rows: Sequence[int], rank: int) -> dict[str, Tensor]:
    """Return a batch without targets in one rank's rows."""
    labels = batch["labels"].clone()
    labels[sum(rows[:rank]) : sum(rows[: rank + 1])] = -100
    return {**batch, "labels": labels}


def trained(runs: Sequence[Mapping[str, Any]]) -> list[Found]:
    """Train the runs one after another over one comm."""
    with open_comm(times=JOB) as comm, small():
        return [train(comm, **run) for run in runs]


def trained_on_simulated_devices(
    runs: Sequence[Mapping[str, Any]], broken: bool = False
) -> tuple[list[Found], list[bool]]:
    """Run `trained`. Also return, per simulated device, if any thread of this rank has a context there.

    `broken`: lane threads stay on the initial device of a thread.
    """
    control = accelerator.load()
    with pytest.MonkeyPatch.context() as patch:
        if broken:
            patch.setattr(StreamLanes, "enter", lambda self: None)
        found = trained(runs)
    return found, [control.has_context(number) for number in range(control.num_devices)]


def own_loop(case: str, num_steps: int, **settings: Any) -> Found:
    """Train with two backward calls per step on each rank. Each rank has different rows."""
    known, found = CASES[case], Found()
    with open_comm(times=JOB) as comm, small():
        engine = opened(comm, known, **settings)
        for step in range(num_steps):
            for part in range(2):
                engine.backward(own_loss(engine.model, known, own_seed(step, part, comm.rank)))
            found.steps.append(Step.of(engine.update()))
        found.weights = dict(engine.named_parameters())
        engine.close()
    return found


def own_seed(step: int, part: int, rank: int) -> int:
    return 100 * step + 10 * part + rank


def own_loss(model: nn.Module, case: Case, seed: int) -> Tensor:
    batch = case.batch(seed, 2 + seed % 2)
    if case.loss_fn is None:
        return model(**batch).loss
    return case.loss_fn(model(batch["x"]), batch)


def dropped_out(stages: Sequence[int], num_steps: int) -> list[Found]:
    """Train on the same rows and from the same generator state on every rank.

    Record the local losses and the loss of one evaluation.
    """
    runs = []
    with open_comm(times=JOB) as comm:
        for stage in stages:
            engine, found = Engine(build(plain_dropout), zero_stage=stage, comm=comm), Found()
            seen: list[float] = []

            def loss_fn(outputs: Any, batch: Batch, seen: list[float] = seen) -> Tensor:
                loss = functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
                seen.append(loss.item())
                return loss

            for step in range(num_steps):
                torch.manual_seed(step)
                result = engine.step(tokens(step), loss_fn=loss_fn)
                found.local.append(seen[-1])
                found.steps.append(Step.of(result))
            engine.evaluate(tokens(0), loss_fn)
            found.evaluated.append(seen[-1])
            found.weights = dict(engine.named_parameters())
            engine.close()
            runs.append(found)
    return runs


def refused(way: str, zero_stage: int = 3) -> tuple[str, str]:
    """Let rank 1 differ by `way`, or all ranks have no targets. Return the error on this rank.

    All ranks refuse the call together. Afterwards they train.
    """
    with open_comm(times=JOB) as comm:
        other = comm.rank == 1
        settings: dict[str, Any] = {"zero_stage": zero_stage}
        if other:
            settings |= OTHER_SETTINGS.get(way, {})
        case = CASES["plain"]
        error: tuple[str, str] | None = None
        try:
            engine = opened(comm, case, **settings)
        except OffloadError as caught:
            error = type(caught).__name__, str(caught)
            engine = opened(comm, case, zero_stage=zero_stage)
        if error is None:
            engine.step(tokens(0))
            try:
                if way == "no targets":
                    batch = tokens(1)
                    engine.step(batch | {"labels": torch.full_like(batch["labels"], -100)})
                elif way == "evaluates" and other:
                    engine.evaluate(tokens(1))
                elif way == "updates" and other:
                    engine.backward(engine.model(**tokens(1)).loss)
                else:
                    engine.step(OTHER_BATCHES[way](tokens(1)) if other and way in OTHER_BATCHES else tokens(1))
            except OffloadError as caught:
                error = type(caught).__name__, str(caught)
        assert error is not None, "it was not refused"
        assert math.isfinite(engine.step(tokens(2)).loss.item())
        engine.close()
    return error


OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "lr": {"optimizer": replace(SMOOTH, lr=0.06)},
    "stage": {"zero_stage": 2},
    "precision": {"precision": "bf16"},
    "clipping": {"max_grad_norm": 0.5},
    "frozen": {"make": frozen_llama},
    "layers": {"make": lambda: odd_llama(num_hidden_layers=3)},
    "width": {"make": lambda: odd_llama(intermediate_size=54)},
}
OTHER_BATCHES: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "keys": lambda batch: batch | {"attention_mask": torch.ones_like(batch["labels"])},
    "no rows": lambda batch: {key: value[:0] for key, value in batch.items()},
    "misspelt": lambda batch: {"input_idz": batch["input_ids"], "labels": batch["labels"]},
}


def frozen_later(**settings: Any) -> bool:
    """Compare freezing after the engine is built with freezing before. Return True for equal results."""
    found = []
    with open_comm(times=JOB) as comm:
        for make in (frozen_llama, odd_llama):
            engine = opened(comm, replace(CASES["plain"], make=make), **settings)
            for known, parameter in zip(frozen_llama().parameters(), engine.model.parameters(), strict=True):
                parameter.requires_grad_(known.requires_grad)
            results = [engine.step(tokens(step)) for step in range(2)]
            found.append(([(r.loss.item(), comparable(r.grad_norm)) for r in results], dict(engine.named_parameters())))
            engine.close()
    (wanted, weights), (others, theirs) = found
    return wanted == others and all(torch.equal(weights[name], theirs[name]) for name in weights)


def two_engines() -> tuple[str, str]:
    """Return the error of a second engine over the comm of an open one.

    The first engine still trains, and a new engine opens after `close`.
    """
    with open_comm(times=JOB) as comm:
        engine = opened(comm, CASES["plain"])
        with pytest.raises(OffloadError) as caught:
            opened(comm, CASES["plain"])
        assert math.isfinite(engine.step(tokens(0)).loss.item())
        engine.close()
        opened(comm, CASES["plain"]).close()
    return type(caught.value).__name__, str(caught.value)


def refusal(**settings: Any) -> str:
    """Return the error of an engine, or an empty text."""
    with open_comm(times=JOB) as comm, small():
        try:
            opened(comm, CASES["plain"], **settings).close()
        except OffloadError as caught:
            return f"{type(caught).__name__}: {caught}"
    return ""


# -- races -----------------------------------------------------------------------------------------------------------

Wait = tuple[str, ...]
"""A function of test_races that removes a wait, by name, and the arguments."""


def raced(runs: Sequence[Mapping[str, Any]], wait: Wait = ()) -> list[Found]:
    """Run `trained` without one wait. Errors are results as well, and end the list."""
    from tests.engine import test_races

    found, made, kinds = [], Fence.__init__, set()
    # Without the wait one rank may stall: the short stall time ends the others soon.
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch, small():
        patch.setattr(Fence, "__init__", lambda self, kind: (kinds.add(kind), made(self, kind))[1])
        if wait:
            getattr(test_races, wait[0])(*wait[1:])(patch)
        comm = stack.enter_context(open_comm(times=replace(JOB, stall_s=8)))
        for run in runs:
            try:
                found.append(train(comm, **run))
            except RankLostError:  # the other ranks have another result
                raise
            except OffloadError as error:  # such as a gradient that is not finite; all ranks raise
                found.append(Found(error=(type(error).__name__, str(error))))
            found[-1].kinds = set(kinds)
            if found[-1].error:
                break
    return found


# -- processes that end ----------------------------------------------------------------------------------------------


def steps(way: str, stage: int, folder: str, dispatch: str = "never") -> None:
    """Train on disk without end. Rank 1 fails, closes or waits in the fourth step, as `way` says."""
    placement = Placement(parameters="nvme", optimizer="nvme", nvme_dir=folder)
    if way == "bare exception":  # raises in the exchange thread as well
        placement = Placement()
    engine = Engine(build(odd_llama), zero_stage=stage, placement=placement, dispatch=dispatch)
    lost = threading.Event()
    engine.comm.on_lost(lambda _error: lost.set())
    number = 0

    def loss_fn(outputs: Any, batch: Batch) -> Tensor:
        if number == 3 and outputs.logits.requires_grad:
            print("steady", flush=True)
            if engine.rank == 1:
                leave(way)
            if engine.rank == 1 and way == "update":
                parts_of(engine).updates.tiles.store.states[parts_of(engine).regions[-1]].count = leave
        return functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    for number in range(10**9):
        if way == "closes" and number == 3 and engine.rank == 1:
            engine.close()
            return
        try:
            engine.step(tokens(number), loss_fn=loss_fn)
        except ConfigError:
            lost.wait()  # so this rank ends only after the report of the other rank's end
            raise


def leave(way: Any) -> None:
    if way in ("exception", "bare exception") or not isinstance(way, str):
        raise ValueError("these data are bad")
    if way == "exit":
        sys.exit(3)
    while way == "waits":  # the GIL is free, so heartbeats go on
        time.sleep(0.1)


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    mode, *arguments = sys.argv[1:]
    if mode == "serve":
        serve(Connection(os.dup(sys.stdin.fileno())))
    else:
        steps(arguments[0], int(arguments[1]), *arguments[2:])


if __name__ == "__main__":
    main()
