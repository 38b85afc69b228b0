"""Mutations in disks and checkpoints."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.checkpoint import reader, writer
from offload.checkpoint.reader import Reader
from offload.engine.checkpoint_load import StateLoader
from offload.tiers.nvme import Stripes
from tests.mutations import mutation


@mutation("tests/engine/test_nvme.py", fuzzed=True)
def tail_of_a_record_not_written(patch: pytest.MonkeyPatch) -> None:
    write = Stripes.write

    def cut(self: Stripes, offset: int, memory: torch.Tensor) -> None:
        write(self, offset, memory[:-4096] if memory.nbytes > 4096 else memory)

    patch.setattr(Stripes, "write", cut)


@mutation("tests/contracts/test_contracts.py", fuzzed=True)
def low_halves_not_loaded(patch: pytest.MonkeyPatch) -> None:
    read = Reader.read

    def without(self: Reader, name: str, plane: str, begin: int, into: torch.Tensor) -> None:
        read(self, name, plane, begin, into)
        if plane == "low":
            into.zero_()

    patch.setattr(Reader, "read", without)


@mutation("tests/contracts/test_contracts.py", fuzzed=True)
def second_moments_not_loaded(patch: pytest.MonkeyPatch) -> None:
    read = Reader.read

    def without(self: Reader, name: str, plane: str, begin: int, into: torch.Tensor) -> None:
        if plane != "exp_avg_sq":
            read(self, name, plane, begin, into)

    patch.setattr(Reader, "read", without)


@mutation("tests/engine/test_nvme.py")
def disk_read_at_the_wrong_offset(patch: pytest.MonkeyPatch) -> None:
    read = Stripes.read
    patch.setattr(Stripes, "read", lambda self, offset, memory: read(self, max(0, offset - 4096), memory))


@mutation("tests/engine/test_nvme.py")
def every_third_write_to_disk_lost(patch: pytest.MonkeyPatch) -> None:
    write, numbers = Stripes.write, itertools.count(1)

    def lossy(self: Stripes, offset: int, memory: torch.Tensor) -> None:
        if next(numbers) % 3:
            write(self, offset, memory)

    patch.setattr(Stripes, "write", lossy)


@mutation("tests/checkpoint/test_atomic.py::test_what_is_on_disk_when_it_takes_its_name")
def manifest_not_synced(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint gets the final name before the manifest is on disk."""
    patch.setattr(writer, "os", SimpleNamespace(**{**vars(os), "fsync": lambda descriptor: None}))


@mutation("tests/checkpoint/test_damage.py")
def checksums_not_verified(patch: pytest.MonkeyPatch) -> None:
    class AnyChecksum(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

    patch.setattr(reader, "checksum", lambda data: AnyChecksum())


@mutation("tests/checkpoint/test_atomic.py::TestReplace::test_the_same_step_again")
def slices_of_another_rank_read(patch: pytest.MonkeyPatch) -> None:
    """All slices of a parameter are read from the first rank's file."""
    stretches = Reader._stretches

    def first(self: Reader, span: Any) -> Iterator[tuple[str, int, int]]:
        found = list(stretches(self, span))
        yield from (found[0][:2] + each[2:] for each in found)

    patch.setattr(Reader, "_stretches", first)


@mutation("tests/contracts/test_contracts.py")
def counts_of_updates_not_loaded(patch: pytest.MonkeyPatch) -> None:
    load = StateLoader.load

    def without(self: StateLoader) -> Any:
        found = load(self)
        for state in self._engine.memory.store.states.values():
            state.steps[:] = [0] * len(state.steps)
        return found

    patch.setattr(StateLoader, "load", without)


@mutation("tests/engine/test_saving.py::test_dropout_goes_on_where_it_was")
def generators_not_loaded(patch: pytest.MonkeyPatch) -> None:
    load = StateLoader.load

    def without(self: StateLoader) -> Any:
        before = self._engine.memory.device.random_state()
        found = load(self)
        self._engine.memory.device.set_random_state(before)
        return found

    patch.setattr(StateLoader, "load", without)


@mutation("tests/engine/test_saving.py::test_dropout_goes_on_where_it_was")
def number_of_the_step_not_loaded(patch: pytest.MonkeyPatch) -> None:
    """The step number seeds random numbers in micro-batches and units."""
    load = StateLoader.load

    def without(self: StateLoader) -> Any:
        before = self._engine.flow.runner.step_number
        found = load(self)
        self._engine.flow.runner.step_number = before
        return found

    patch.setattr(StateLoader, "load", without)
