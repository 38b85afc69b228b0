"""Disks and checkpoints."""

from __future__ import annotations

import pytest
import torch

from offload.checkpoint.reader import Reader
from offload.tiers.nvme import Stripes
from tests.mutations import mutation


@mutation("tests/engine/test_nvme.py", fuzzed=True)
def tail_of_a_record_not_written(patch: pytest.MonkeyPatch) -> None:
    write = Stripes.write

    def cut(self: Stripes, offset: int, memory: torch.Tensor) -> None:
        write(self, offset, memory[:-4096] if memory.nbytes > 4096 else memory)

    patch.setattr(Stripes, "write", cut)


@mutation("tests/engine/test_saving.py", fuzzed=True)
def low_halves_not_loaded(patch: pytest.MonkeyPatch) -> None:
    read = Reader.read

    def without(self: Reader, name: str, plane: str, begin: int, into: torch.Tensor) -> None:
        read(self, name, plane, begin, into)
        if plane == "low":
            into.zero_()

    patch.setattr(Reader, "read", without)


@mutation("tests/engine/test_saving.py", fuzzed=True)
def second_moments_not_loaded(patch: pytest.MonkeyPatch) -> None:
    read = Reader.read

    def without(self: Reader, name: str, plane: str, begin: int, into: torch.Tensor) -> None:
        if plane != "exp_avg_sq":
            read(self, name, plane, begin, into)

    patch.setattr(Reader, "read", without)
