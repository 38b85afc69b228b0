"""Contracts for every feature. A contract takes one table cell and raises AssertionError."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import Analysis, Engine
from offload.distributed.joining import open_comm
from offload.files.sources import Fill
from tests.cases.features import CASES, PLACES, Case, Cell
from tests.cases.models import build
from tests.cases.run import Step, Training, small
from tests.disks import nameless
from tests.engine.compare import PROPORTIONAL, assert_same, assert_same_states, train_both, weights
from tests.engine.device import own_device, set_seed
from tests.engine.inside import (
    assert_parked,
    believe_analyses,
    lane_threads,
    leave_spare_memory,
    parts_of,
    planned_bytes,
    states,
)
from tests.engine.ranks import run
from tests.engine.reference import comparable
from tests.engine.sizes import tier_bytes
from tests.leaks import no_tensor_waits_for_collection

STAGES = dict(zip(PLACES, range(4), strict=True))
"""The ZeRO stage of ranks, by placement."""
CLIPS: dict[str, dict[str, Any]] = {
    "deferred": {"clip": "deferred", "max_grad_norm": 0.2},
    "speculative": {"clip": "speculative", "max_grad_norm": 1e6},
    "none": {"clip": "auto", "max_grad_norm": None},
}
_ANALYSES: dict[str, Analysis] = {}
"""Analyses by case, precision and with or without micro-batches: later engines run no trials."""
NUM_STEPS = 2


@dataclass(frozen=True)
class Run:
    """Numbers of all steps. Weights and optimizer states (flat, by parameter) after the last step."""

    steps: list[Step]
    weights: dict[str, Tensor]
    states: dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A case with one placement, precision and clipping mode, where the case does not fix them."""

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

    def training(self, place: str | None = None) -> Training:
        cell = Cell({**PLACES[place or self.place], **self.case.placement}, self.settings, rows=4 * self.case.group)
        return Training(self.case, cell, self.folder)

    @contextmanager
    def engine(self, place: str | None = None, **settings: Any) -> Iterator[Engine]:
        """Open an engine on a new model. All engines share analyses, and only the first runs trials."""
        told = {**self.settings, **settings}
        key = f"{self.name}: {told['precision']}, {told.get('micro_batch_size')}"
        analysis = _ANALYSES.get(key)
        with self.training(place).engine(analysis=analysis, **settings) as engine:
            if analysis is not None:
                believe_analyses(engine)
            yield engine
            _ANALYSES[key] = engine.analysis

    def step(self, engine: Engine, number: int) -> Step:
        return self.training().step(engine, number)

    def train(self, engine: Engine, numbers: Iterable[int] = range(NUM_STEPS)) -> Run:
        return self.concluded(engine, self.training().train(engine, numbers))

    def concluded(self, engine: Engine, steps: list[Step]) -> Run:
        if parts_of(engine).gradients.has_sums:  # measured where they are: an accelerator adds squares in another order
            steps = [step._replace(norm=comparable(step.norm)) for step in steps]
        return Run(steps, weights(engine), states(engine))

    @property
    def undisturbed(self) -> Run:
        """Two steps with all states in host memory, run once for all contracts of a case."""
        return _undisturbed(self.name, self.precision, self.clip)


@cache
def _undisturbed(name: str, precision: str, clip: str) -> Run:
    place = "cpu" if own_device().type == "cpu" else "device"  # an accelerator's update differs in bits
    setting = Setting(name, place, precision, clip, Path())
    with small(setting.case), setting.engine() as engine:
        return setting.train(engine)


def assert_equal(found: Run, wanted: Run) -> None:
    """Compare runs bit for bit: losses, norms, weights, optimizer states."""
    assert found.steps == wanted.steps
    assert_same(found.weights, wanted.weights)
    assert_same_states(found.states, wanted.states)


# -- the contracts ---------------------------------------------------------------------------------------------------


@contextmanager
def beside_reference(at: Setting) -> Iterator[Engine]:
    """Train an engine beside plain PyTorch: losses, norms and weights are equal, and the loss of an evaluation."""
    case, training = at.case, at.training()
    assert case.reference is not None
    within = case.within
    if within is not None and at.settings["precision"] != "fp32":
        within = 2e-2
    engine, reference = train_both(
        build(case.make),
        [training.batch(number) for number in range(NUM_STEPS)],
        loss_fn=case.loss_fn,
        count=case.count,
        within=within,
        placement=training.placement,
        **{**training.settings, **case.reference(at.precision)},
    )
    with engine:
        batch = training.batch(NUM_STEPS)
        set_seed(7)
        found = float(engine.evaluate(batch, case.loss_fn))
        set_seed(7)
        reference.model.eval()
        reference.rows = None  # an evaluation takes the batch whole
        with torch.no_grad():
            (loss,) = reference.losses(batch, case.loss_fn, case.count)
        wanted = float(loss.float())
        assert found == (wanted if within is None else pytest.approx(wanted, rel=within))
        yield engine


def equals_reference(at: Setting) -> None:
    """Losses, norms and weights equal plain PyTorch, and the loss of an evaluation."""
    with beside_reference(at):
        pass


def place_changes_no_bit(at: Setting) -> None:
    """Tiers, timing and poisoned buffers do not change results."""
    with at.engine(debug=3, prefetch=0) as engine:
        assert_equal(at.train(engine), at.undisturbed)


def resumes_as_if_never_stopped(at: Setting) -> None:
    """A run resumes from a checkpoint with another placement."""
    other = "cpu" if at.place != "cpu" and own_device().type == "cpu" else at.place
    with at.engine() as engine:
        steps = [at.step(engine, 0)]
        engine.save_checkpoint(at.folder / "saved", **at.case.saves)
    with at.engine(other) as engine:
        engine.load_checkpoint(at.folder / "saved")
        assert_equal(at.concluded(engine, [*steps, at.step(engine, 1)]), at.undisturbed)


def ranks_are_one(at: Setting) -> None:
    """Two ranks with uneven batch shares equal one process, except for summation order, in a ZeRO stage by placement.

    Both ranks have the same bits. They take turns in reading the weights.
    """
    settings = {"precision": "fp32", "max_grad_norm": 0.2, "optimizer": PROPORTIONAL, **at.case.settings}
    place = "cpu" if at.clip == "speculative" else at.place
    job = {"name": at.name, "place": place, "folder": str(at.folder), "settings": settings}
    one = train_on_rank(1, **job)
    found, other = run(2, train_on_rank, num_ranks=2, **job)
    assert_equal(other, found)
    for several, alone in zip(found.steps, one.steps, strict=True):
        assert several[:2] == pytest.approx(alone[:2], rel=5 * at.case.ranks_within)
    assert_same(found.weights, one.weights, within=at.case.ranks_within)


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
    """Job for one of `num_ranks` ranks: rank 0 has three quarters of the rows of each batch."""
    case = CASES[name]
    case = replace(case, batch=case.ranks_batch or case.batch)
    shares = [4] if num_ranks == 1 else [3, 1]
    rows = [case.group * each for each in shares]
    cell = Cell({**PLACES[place], **case.placement}, settings, ranks=num_ranks, rows=rows)
    with small(case):
        if num_ranks == 1:
            return _trained(Training(case, cell, Path(folder)))
        with open_comm() as comm:
            training = Training(case, cell, Path(folder), comm.rank)
            return _trained(training, comm=comm, fill=filling, zero_stage=STAGES[place])


def _trained(training: Training, **how: Any) -> Run:
    with training.engine(**how) as engine:
        return Run(training.train(engine, range(2)), weights(engine), {})


def micro_batches_add_up(at: Setting) -> None:
    """Micro-batches equal the whole batch, except for summation order."""
    found = []
    rule = {} if "optimizer" in at.case.settings else {"optimizer": PROPORTIONAL}
    for rows in (None, 3 * at.case.group):
        with at.engine(micro_batch_size=rows, **rule) as engine:
            found.append(at.train(engine, range(1)))
    one, other = found
    is_coarse = at.settings["precision"] != "fp32" or "optimizer" in at.case.settings
    for parts, whole in zip(other.steps, one.steps, strict=True):
        assert parts[:2] == pytest.approx(whole[:2], rel=2e-2 if is_coarse else 1e-5)
    if "optimizer" not in at.case.settings:
        assert_same(other.weights, one.weights, within=2e-2 if is_coarse else 1e-5)


def bytes_are_as_planned(at: Setting) -> None:
    """Tiers hold the planned bytes before and after a step, below the peaks. Equal steps move equal bytes.

    A step frees all tensors by reference counts.
    """
    with at.engine(prefetch=0) as engine:
        leave_spare_memory(engine)
        at.step(engine, 0)
        moved = []
        for seed in range(1, 4):  # seed 1 still fetches for the recording pass
            with no_tensor_waits_for_collection() if seed == 3 else nullcontext():
                at.step(engine, seed)
            counters = engine.counters
            moved.append((counters.h2d_bytes, counters.d2h_bytes))
        if "experts" not in at.case.placement:  # the router selects the experts to copy
            assert moved[1] == moved[2]
        planned = planned_bytes(engine)
        for where, name, num_bytes in engine.allocations:
            assert where == "device" or num_bytes == planned.get((where, name), num_bytes), name
        assert engine.counters.peak_host_bytes >= sum(tier_bytes(engine, "cpu").values())
        if at.place == "device" and not at.case.placement:
            assert moved[1] == (0, 0)


def reads_are_true(at: Setting) -> None:
    """Weights read by a script between steps equal the engine's weights, and reads change nothing."""
    with at.engine() as engine:
        model = parts_of(engine).model
        steps: list[Step] = []
        for seed in range(NUM_STEPS):
            steps.append(at.step(engine, seed))
            masters = weights(engine)
            for name, value in list(model.state_dict(keep_vars=True).items())[:3]:
                if name in masters and value.requires_grad:
                    shown = value.detach().float().cpu()
                    assert shown.shape == masters[name].shape, name
                    if at.settings["precision"] == "fp32" and "link_weights" not in at.case.settings:
                        assert torch.equal(shown, masters[name]), name
        assert_equal(at.concluded(engine, steps), at.undisturbed)


class Failure(Exception):
    """An error in a forward, on purpose."""


def leaves_nothing_after_failure(at: Setting) -> None:
    """A step with an error or Ctrl-C in its forward leaves the engine unchanged. After close no thread and no file
    remains.
    """
    with at.engine() as engine:
        model = parts_of(engine).model
        own = model.forward
        steps = [at.step(engine, 0)]

        for kind in (Failure, KeyboardInterrupt):

            @wraps(own)  # the signature names the input tensors of a batch
            def fail(*args: Any, kind: type[BaseException] = kind, **kwargs: Any) -> Any:
                own(*args, **kwargs)
                if kind is KeyboardInterrupt:
                    signal.raise_signal(signal.SIGINT)
                raise kind

            model.forward = fail
            with pytest.raises(kind):
                at.step(engine, 1)
            del model.forward
        steps += at.training().train(engine, range(1, NUM_STEPS))
        assert_equal(at.concluded(engine, steps), at.undisturbed)
        threads = lane_threads(engine)
    assert not any(thread.is_alive() for thread in threads)
    assert not nameless(at.folder)


def evaluation_leaves_no_trace(at: Setting) -> None:
    """Evaluations before and between steps change no bits, counters, modes and generator state. Two evaluations give
    the same loss.
    """
    with at.engine() as engine:
        modes = [module.training for module in engine.model.modules()]
        steps: list[Step] = []
        for seed in range(NUM_STEPS):
            before, moved = torch.get_rng_state(), (engine.counters.h2d_bytes, engine.counters.d2h_bytes)
            losses = [engine.evaluate(at.training().batch(9), at.case.loss(engine.model)) for _ in range(2)]
            assert [(loss.dtype, loss.dim(), loss.device.type) for loss in losses] == [(torch.float32, 0, "cpu")] * 2
            assert float(losses[0]) == float(losses[1])
            assert not losses[0].requires_grad
            assert torch.equal(before, torch.get_rng_state())
            assert (engine.counters.h2d_bytes, engine.counters.d2h_bytes) == moved
            assert [module.training for module in engine.model.modules()] == modes
            steps.append(at.step(engine, seed))
        assert_equal(at.concluded(engine, steps), at.undisturbed)


def parks_change_no_bit(at: Setting) -> None:
    """Between two parks an engine holds no byte of the device, by its ledger and by torch's count. Reads see the states
    meanwhile, and later steps have the same bits.
    """
    with at.engine() as engine:
        steps: list[Step] = []
        for seed in range(NUM_STEPS):
            steps.append(at.step(engine, seed))
            before = weights(engine)
            with engine.parked():
                assert_parked(engine)
                assert_same(weights(engine), before)
        assert_equal(at.concluded(engine, steps), at.undisturbed)


CONTRACTS: dict[str, Callable[[Setting], None]] = {
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
        evaluation_leaves_no_trace,
        parks_change_no_bit,
    )
}
