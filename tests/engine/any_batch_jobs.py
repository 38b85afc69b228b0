"""What a rank does in the tests of batches of any kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offload import Engine
from offload.distributed.joining import open_comm
from offload.errors import ConfigError
from tests.engine.any_batch import KINDS, Kind, made, on_device, pictures_in_rows
from tests.engine.compare import PROPORTIONAL, weights
from tests.engine.families import build


def trained(name: str, rows: tuple[int, ...], micro_batch_size: int | None) -> Any:
    """Train on this rank's rows of batches; return (loss, norm) of each step, and the weights; or what was refused."""

    def batch_of(step: int, rank: int) -> dict[str, Any]:
        if name == "Qwen2-VL":
            return made(name, 2 * step + rank, rows[rank])
        return share(made(name, step, sum(rows)), rows, rank)

    return _trained(KINDS[name], batch_of, 2, micro_batch_size)


def with_pictures(of_rows: Sequence[Sequence[int]], micro_batch_size: int | None) -> Any:
    """The same, of rows of which each has so many pictures."""

    def batch_of(step: int, rank: int) -> dict[str, Any]:
        return on_device(pictures_in_rows(2 * step + rank, of_rows[rank]))

    return _trained(KINDS["LLaVA"], batch_of, 3, micro_batch_size)


def _trained(
    kind: Kind, batch_of: Callable[[int, int], dict[str, Any]], num_steps: int, micro_batch_size: int | None
) -> Any:
    with open_comm() as comm:
        engine = Engine(build(kind.make), PROPORTIONAL, comm=comm, micro_batch_size=micro_batch_size)
        steps = []
        for step in range(num_steps):
            batch = batch_of(step, comm.rank)
            try:
                result = engine.step(batch, kind.loss_fn)
            except ConfigError as error:
                engine.close()
                return str(error)
            steps.append((result.loss.item(), result.grad_norm))
        found = weights(engine)
        engine.close()
    return steps, found


def share(batch: dict[str, Any], rows: tuple[int, ...], rank: int) -> dict[str, Any]:
    """Return a rank's rows of what has as many as all ranks together."""
    begin = sum(rows[:rank])
    return {
        key: value[begin : begin + rows[rank]]
        if isinstance(value, torch.Tensor | list)
        and (not isinstance(value, torch.Tensor) or value.dim())
        and len(value) == sum(rows)
        else value
        for key, value in batch.items()
    }
