"""What a rank does in the tests of rules by matrix."""

from __future__ import annotations

import torch

from offload import Adafactor
from offload.distributed.joining import open_comm
from offload.errors import ConfigError
from offload.layout import regions
from offload.optim.rule import UpdateRule
from tests.engine.families import tokens
from tests.engine.ranks_child import CASES, opened, share, small_tiles


def saved(path: str, rule: UpdateRule, **settings: object) -> dict[str, torch.Tensor]:
    """Train two steps and save; then a third one, and return the weights."""
    with open_comm() as comm, small_tiles():
        engine = opened(comm, CASES["plain"], optimizer=rule, **settings)
        for seed in range(3):
            if seed == 2:
                engine.save_checkpoint(path)
            engine.step(share(tokens(seed), (2, 2), comm.rank))
        weights = dict(engine.named_parameters())
        engine.close()
    return weights


def loaded(path: str, rule: UpdateRule, **settings: object) -> dict[str, torch.Tensor]:
    """Go on from there."""
    with open_comm() as comm, small_tiles():
        engine = opened(comm, CASES["plain"], optimizer=rule, model_seed=7, **settings)
        engine.load_checkpoint(path)
        engine.step(share(tokens(2), (2, 2), comm.rank))
        weights = dict(engine.named_parameters())
        engine.close()
    return weights


def refused() -> str:
    """Make an engine whose ranges would be mostly padding; return the error."""
    regions._MOST_PADDING = 0
    try:
        with open_comm() as comm:
            try:
                opened(comm, CASES["plain"], optimizer=Adafactor(), zero_stage=3).close()
            except ConfigError as error:  # a rank that left the others with it would end their processes
                return str(error)
    finally:
        regions._MOST_PADDING = 1 << 21
    return ""
