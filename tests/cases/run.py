"""Train a case in a cell: in this process, or as one of several ranks. Loads with an older `offload` too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from offload import Engine, Placement
from tests.cases.features import ADAMW, LIMITS, Case, Cell, limits_of
from tests.cases.models import build, share
from tests.engine.device import set_seed


class Step(NamedTuple):
    """Numbers of a step. early_norm: in an own loop, the norm before the update. slopes: of MeZO."""

    loss: float
    norm: float
    tokens: int | None
    skipped: bool
    early_norm: float | None = None
    slopes: tuple[float, ...] = ()

    @classmethod
    def of(cls, result: Any, early_norm: float | None = None) -> Step:
        """result: `StepResult`."""
        slopes = () if result.measured is None else tuple(result.measured.slopes)
        return cls(result.loss.item(), result.grad_norm, result.tokens, result.skipped, early_norm, slopes)


@contextmanager
def registered(case: Case) -> Iterator[None]:
    """Register the stage of a case, if it has one, for the engines in this context."""
    if case.stage is None:
        yield
        return
    from offload.engine.units.stages import STAGES

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(STAGES, "_objects", {**STAGES._objects, "stage of the case": case.stage()})
        yield


@contextmanager
def small(case: Case = Case()) -> Iterator[None]:  # noqa: B008
    """Register the stage of a case, and make limits small enough for its small model."""
    with registered(case), pytest.MonkeyPatch.context() as patch:
        for limit in limits_of({**LIMITS, **case.limits}):
            patch.setattr(*limit)
        yield


@dataclass(frozen=True)
class Training:
    """A case in a cell. folder: for states on disk. rank: of `cell.ranks`."""

    case: Case
    cell: Cell
    folder: Path
    rank: int = 0

    @property
    def placement(self) -> Placement:
        place = {**self.case.placement, **self.cell.place}
        if "nvme" in place.values():
            place["nvme_dir"] = str(self.folder)
        return Placement(**place)

    @property
    def settings(self) -> dict[str, Any]:
        """Keywords for `Engine` without the placement."""
        return {"optimizer": ADAMW, "clip": "deferred", **self.case.settings, **self.cell.settings}

    def engine(self, seed: int = 0, fill: Callable[[nn.Module], Any] = lambda model: None, **settings: Any) -> Engine:
        """Open an engine on a new model. fill: returns the `fill` of the engine."""
        model = build(self.cell.make or self.case.make, seed)
        return self.open(model, fill=fill(model), **settings)

    def open(self, model: nn.Module, **settings: Any) -> Engine:
        """Open an engine on a model."""
        return Engine(model, placement=self.placement, **{**self.settings, **settings})

    def batch(self, number: int) -> Mapping[str, Tensor]:
        """Return this rank's rows."""
        rows, make = self.cell.rows, self.cell.batch or self.case.batch
        if isinstance(rows, int):
            num_shares = self.cell.ranks // self.cell.settings.get("sequence_parallel", 1)
            rows = [rows // num_shares] * num_shares
        whole = make(number, sum(rows)) if self.cell.length is None else make(number, sum(rows), self.cell.length)
        return share(whole, rows, self.rank * len(rows) // self.cell.ranks)

    def step(self, engine: Engine, number: int) -> Step:
        """Train on batch `number`."""
        set_seed(100 * self.rank + number)
        early_norm = None
        if self.cell.own_loop:
            engine.backward(engine.model(**self.batch(number)).loss)
            early_norm = engine.grad_norm()
            result = engine.update(0.5)
        else:
            result = engine.step(self.batch(number), loss_fn=self.case.loss(engine.model))
        assert (result.loss.dtype, result.loss.dim(), result.loss.device.type) == (torch.float32, 0, "cpu")
        return Step.of(result, early_norm)

    def train(self, engine: Engine, numbers: Iterable[int]) -> list[Step]:
        return [self.step(engine, number) for number in numbers]
