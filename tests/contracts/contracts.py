"""Contracts for every feature. A contract takes one table cell and raises AssertionError."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import Analysis, Engine, Placement
from offload.distributed.joining import open_comm
from offload.files.sources import Fill
from tests.contracts.cases import CASES, Case
from tests.disks import nameless
from tests.engine.compare import PROPORTIONAL, assert_same, train_both, weights
from tests.engine.device import own_device, set_seed
from tests.engine.families import build
from tests.engine.inside import lane_threads, parts_of, states
from tests.engine.ranks import run
from tests.engine.ranks_child import share
from tests.engine.sizes import tier_bytes
from tests.leaks import no_tensor_waits_for_collection

PLACES: dict[str, dict[str, str]] = {
    "device": {"parameters": "device", "optimizer": "device"},
    "cpu": {"parameters": "cpu", "optimizer": "cpu"},
    "moments on nvme": {"parameters": "cpu", "optimizer": "nvme"},
    "nvme": {"parameters": "nvme", "optimizer": "nvme", "gradients": "nvme", "activations": "nvme"},
}
STAGES = dict(zip(PLACES, range(4), strict=True))
"""The ZeRO stage of ranks, by placement."""
CLIPS: dict[str, dict[str, Any]] = {
    "deferred": {"clip": "deferred", "max_grad_norm": 0.2},
    "speculative": {"clip": "speculative", "max_grad_norm": 1e6},
    "none": {"max_grad_norm": None},
}
_ANALYSES: dict[str, Analysis] = {}
"""Analyses by case, precision and with or without micro-batches: later engines run no trials."""
ROWS = 4
NUM_STEPS = 2


@dataclass(frozen=True)
class Run:
    """Losses and norms of each step. Weights and optimizer states (flat, by parameter) after the last step."""

    numbers: list[float]
    weights: dict[str, Tensor]
    states: dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A case with one placement, precision and clipping mode."""

    name: str
    place: str
    precision: str
    clip: str
    folder: Path

    @property
    def case(self) -> Case:
        return CASES[self.name]

    @property
    def settings(self) -> dict[str, Any]:
        """Keywords for `Engine` without the placement."""
        clip = dict(CLIPS[self.clip])
        if self.clip == "speculative" and not self._speculates:
            clip["clip"] = "auto"
        return {"precision": self.precision, **clip, **self.case.settings}

    @property
    def _speculates(self) -> bool:
        return self.place == "cpu" and "optimizer" not in self.case.settings and "delay" not in self.case.settings

    def placement(self, place: str | None = None) -> Placement:
        tiers = {**PLACES[place or self.place], **self.case.placement}
        return Placement(**tiers, nvme_dir=str(self.folder) if "nvme" in tiers.values() else None)

    @contextmanager
    def engine(self, place: str | None = None, **settings: Any) -> Iterator[Engine]:
        """Open an engine on a new model. Engines of one process share analyses, and those over several ranks do not."""
        told, model = {**self.settings, **settings}, build(self.case.make)
        with_ranks = "comm" in told
        key = f"{self.name}: {told['precision']}, {told.get('micro_batch_size')}"
        analysis, fill = (None, filling(model)) if with_ranks else (_ANALYSES.get(key), None)
        with Engine(model, fill=fill, placement=self.placement(place), analysis=analysis, **told) as engine:
            yield engine
            if not with_ranks:
                _ANALYSES[key] = engine.analysis

    def batch(self, seed: int) -> Mapping[str, Tensor]:
        return self.case.batch(seed, ROWS)

    def step(self, engine: Engine, seed: int) -> list[float]:
        """Take a step on the batch with this seed. Return the loss and the norm."""
        set_seed(100 + seed)
        result = engine.step(self.batch(seed), loss_fn=self.case.loss_fn)
        return [float(result.loss), float(result.grad_norm or 0)]

    def train(self, engine: Engine, seeds: Sequence[int] = range(NUM_STEPS)) -> Run:
        return self.concluded(engine, [number for seed in seeds for number in self.step(engine, seed)])

    def concluded(self, engine: Engine, numbers: list[float]) -> Run:
        return Run(numbers, weights(engine), states(engine))

    @property
    def undisturbed(self) -> Run:
        """Two steps with all states in host memory, run once for all contracts of a case."""
        return _undisturbed(self.name, self.precision, self.clip)


@cache
def _undisturbed(name: str, precision: str, clip: str) -> Run:
    place = "cpu" if own_device().type == "cpu" else "device"  # an accelerator's update differs in bits
    with pytest.MonkeyPatch.context() as patch:
        CASES[name].patch(patch)
        cell = Cell(name, place, precision, clip, Path())
        with cell.engine() as engine:
            return cell.train(engine)


def assert_equal(found: Run, wanted: Run) -> None:
    """Compare runs bit for bit: losses, norms, weights, optimizer states."""
    assert found.numbers == wanted.numbers
    assert_same(found.weights, wanted.weights)
    assert {name: state.num_steps for name, state in found.states.items()} == {
        name: state.num_steps for name, state in wanted.states.items()
    }
    for name, state in wanted.states.items():
        other = found.states[name]
        for mine, theirs in zip(
            (state.exp_avg, state.exp_avg_sq, *state.others.values()),
            (other.exp_avg, other.exp_avg_sq, *other.others.values()),
            strict=True,
        ):
            assert (mine is None) == (theirs is None), name
            assert mine is None or torch.equal(mine, theirs), name


# -- the contracts ---------------------------------------------------------------------------------------------------


def equals_reference(cell: Cell) -> None:
    """Losses, norms and weights equal plain PyTorch."""
    case = cell.case
    assert case.reference is not None
    settings = {**cell.settings, **case.reference(cell.precision)}
    train_both(
        build(case.make),
        [cell.batch(seed) for seed in range(2)],
        loss_fn=case.loss_fn,
        count=case.count,
        within=case.within,
        placement=cell.placement(),
        **settings,
    )[0].close()


def place_changes_no_bit(cell: Cell) -> None:
    """Tiers, timing and poisoned buffers do not change results."""
    with cell.engine(debug=3, prefetch=0) as engine:
        assert_equal(cell.train(engine), cell.undisturbed)


def resumes_as_if_never_stopped(cell: Cell) -> None:
    """A run resumes from a checkpoint with another placement."""
    other = "cpu" if cell.place != "cpu" and own_device().type == "cpu" else cell.place
    with cell.engine() as engine:
        numbers = cell.step(engine, 0)
        engine.save_checkpoint(cell.folder / "saved", **cell.case.saves)
    with cell.engine(other) as engine:
        engine.load_checkpoint(cell.folder / "saved")
        assert_equal(cell.concluded(engine, numbers + cell.step(engine, 1)), cell.undisturbed)


def ranks_are_one(cell: Cell) -> None:
    """Two ranks with uneven batch shares equal one process, except for summation order, in a ZeRO stage by placement.

    Both ranks have the same bits. They take turns in reading the weights.
    """
    settings = {"precision": "fp32", "max_grad_norm": 0.2, "optimizer": PROPORTIONAL, **cell.case.settings}
    place = "cpu" if cell.clip == "speculative" else cell.place
    job = {"name": cell.name, "place": place, "folder": str(cell.folder), "settings": settings}
    one = train_on_rank(1, **job)
    found, other = run(2, train_on_rank, num_ranks=2, **job)
    assert_equal(other, found)
    assert found.numbers == pytest.approx(one.numbers, rel=5 * cell.case.ranks_within)
    assert_same(found.weights, one.weights, within=cell.case.ranks_within)


def filling(model: nn.Module) -> Fill:
    """Replace all weights by NaN. Return a function that fills them unit by unit, like a model folder reader."""
    values = {parameter: parameter.detach().clone() for parameter in model.parameters()}
    for parameter in values:
        parameter.data.fill_(torch.nan)

    def fill(_name: str, module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter in values:
                parameter.data.copy_(values.pop(parameter))

    return fill


def train_on_rank(num_ranks: int, name: str, place: str, folder: str, settings: Mapping[str, Any]) -> Run:
    """Job for one of `num_ranks` ranks: rank 0 has the first 3 rows of each batch, rank 1 the last row."""
    cell = Cell(name, place, "fp32", "deferred", Path(folder))
    with pytest.MonkeyPatch.context() as patch:
        cell.case.patch(patch)
        if num_ranks == 1:
            with cell.engine(**settings) as engine:
                return _shared(cell, engine, 0, [ROWS])
        with open_comm() as comm, cell.engine(comm=comm, zero_stage=STAGES[place], **settings) as engine:
            return _shared(cell, engine, comm.rank, [ROWS - 1, 1])


def _shared(cell: Cell, engine: Engine, rank: int, rows: Sequence[int]) -> Run:
    numbers = []
    for seed in range(2):
        result = engine.step(share(cell.batch(seed), rows, rank), loss_fn=cell.case.loss_fn)
        numbers += [float(result.loss), float(result.grad_norm or 0)]
    return Run(numbers, weights(engine), {})


def micro_batches_add_up(cell: Cell) -> None:
    """Micro-batches equal the whole batch, except for summation order."""
    found = []
    rule = {} if "optimizer" in cell.case.settings else {"optimizer": PROPORTIONAL}
    for rows in (None, 3):
        with cell.engine(micro_batch_size=rows, **rule) as engine:
            found.append(cell.train(engine, range(1)))
    one, other = found
    is_coarse = cell.settings["precision"] == "bf16" or "optimizer" in cell.case.settings
    assert other.numbers == pytest.approx(one.numbers, rel=2e-2 if is_coarse else 1e-5)
    if "optimizer" not in cell.case.settings:
        assert_same(other.weights, one.weights, within=2e-2 if is_coarse else 1e-5)


def bytes_are_as_planned(cell: Cell) -> None:
    """Tiers hold the planned bytes before and after a step, below the peaks. Equal steps move equal bytes.

    A step frees all tensors by reference counts.
    """
    with cell.engine(prefetch=0) as engine:
        parts_of(engine).spare_memory.end_step = lambda peak_bytes: None  # type: ignore[method-assign]
        cell.step(engine, 0)
        moved = []
        for seed in range(1, 4):  # seed 1 still fetches for the recording pass
            with no_tensor_waits_for_collection() if seed == 3 else nullcontext():
                cell.step(engine, seed)
            counters = engine.counters
            moved.append((counters.h2d_bytes, counters.d2h_bytes))
        if "experts" not in cell.case.placement:  # the router selects the experts to copy
            assert moved[1] == moved[2]
        planned = {(each.tier, each.name): each.num_bytes for each in parts_of(engine).plan.allocations}
        for where, name, num_bytes in engine.allocations:
            assert where == "device" or num_bytes == planned.get((where, name), num_bytes), name
        assert engine.counters.peak_host_bytes >= sum(tier_bytes(engine, "cpu").values())
        if cell.place == "device" and not cell.case.placement:
            assert moved[1] == (0, 0)


def reads_are_true(cell: Cell) -> None:
    """Weights read by a script between steps equal the engine's weights, and reads change nothing."""
    with cell.engine() as engine:
        model = parts_of(engine).model
        numbers: list[float] = []
        for seed in range(NUM_STEPS):
            numbers += cell.step(engine, seed)
            masters = weights(engine)
            for name, value in list(model.state_dict(keep_vars=True).items())[:3]:
                if name in masters and value.requires_grad:
                    shown = value.detach().float().cpu()
                    assert shown.shape == masters[name].shape, name
                    if cell.settings["precision"] == "fp32" and "link_weights" not in cell.case.settings:
                        assert torch.equal(shown, masters[name]), name
        assert_equal(cell.concluded(engine, numbers), cell.undisturbed)


def leaves_nothing_after_failure(cell: Cell) -> None:
    """A failed step leaves the engine unchanged. After close no thread and no file remains."""

    class Failure(Exception):
        pass

    _disturbed(cell, Failure)


def leaves_nothing_after_interrupt(cell: Cell) -> None:
    """Ctrl-C in a forward leaves the engine as before the step."""
    _disturbed(cell, KeyboardInterrupt)


def _disturbed(cell: Cell, kind: type[BaseException]) -> None:
    with cell.engine() as engine:
        model = parts_of(engine).model
        own = model.forward
        numbers = cell.step(engine, 0)

        @wraps(own)  # the signature names the input tensors of a batch
        def fail(*args: Any, **kwargs: Any) -> Any:
            own(*args, **kwargs)
            if kind is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise kind("on purpose")

        model.forward = fail
        with pytest.raises(kind):
            cell.step(engine, 1)
        del model.forward
        numbers += [number for seed in range(1, NUM_STEPS) for number in cell.step(engine, seed)]
        assert_equal(cell.concluded(engine, numbers), cell.undisturbed)
        threads = lane_threads(engine)
    assert not any(thread.is_alive() for thread in threads)
    assert not nameless(cell.folder)


def evaluation_leaves_no_trace(cell: Cell) -> None:
    """Evaluations before and between steps change no bits, counters, modes and generator state. Two evaluations give
    the same loss.
    """
    with cell.engine() as engine:
        modes = [module.training for module in engine.model.modules()]
        numbers: list[float] = []
        for seed in range(NUM_STEPS):
            before, moved = torch.get_rng_state(), (engine.counters.h2d_bytes, engine.counters.d2h_bytes)
            losses = [engine.evaluate(cell.batch(9), cell.case.loss_fn) for _ in range(2)]
            assert [(loss.dtype, loss.dim(), loss.device.type) for loss in losses] == [(torch.float32, 0, "cpu")] * 2
            assert float(losses[0]) == float(losses[1])
            assert not losses[0].requires_grad
            assert torch.equal(before, torch.get_rng_state())
            assert (engine.counters.h2d_bytes, engine.counters.d2h_bytes) == moved
            assert [module.training for module in engine.model.modules()] == modes
            numbers += cell.step(engine, seed)
        assert_equal(cell.concluded(engine, numbers), cell.undisturbed)


CONTRACTS: dict[str, Callable[[Cell], None]] = {
    contract.__name__: contract
    for contract in (
        equals_reference,
        place_changes_no_bit,
        resumes_as_if_never_stopped,
        ranks_are_one,
        micro_batches_add_up,
        bytes_are_as_planned,
        reads_are_true,
        leaves_nothing_after_failure,
        leaves_nothing_after_interrupt,
        evaluation_leaves_no_trace,
    )
}
