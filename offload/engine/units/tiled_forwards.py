"""Unit forwards with inner modules run over sequence tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from offload.engine.units.arguments import Arguments
from offload.engine.units.forwards import CompiledForwards, Forward, OwnForwards, Runner
from offload.engine.units.row_trials import RowTrials, is_near
from offload.engine.units.tiles import ComparedForward, TiledForward, Tiles, tile_rows
from offload.engine.units.unit import Unit
from offload.errors import ConfigError, warn

_GRADIENTS_SHARE = 1.5
"""Backward memory (with gradients) as a multiple of the saved graph bytes."""


class TiledForwards(OwnForwards):
    """Runs row-wise block modules over tiles of `size` rows.

    With `size` None, only units above `room_bytes` are tiled, with a suitable size. Untiled units use `others`.
    """

    looks_at_few = True

    def __init__(self, size: int | None, room_bytes: int | None, others: OwnForwards) -> None:
        self._size, self._room_bytes, self._others = size, room_bytes, others
        self._found: dict[str, Tiles] = {}
        self._sizes: dict[str, int] = {}
        self._has_warned = False

    @property
    def num_graphs(self) -> int:  # type: ignore[override]
        return self._others.num_graphs

    @property
    def compiled(self) -> frozenset[type]:
        return self._others.compiled

    @contextmanager
    def paused(self) -> Iterator[None]:
        with super().paused(), self._others.paused():
            yield

    def of(
        self,
        unit: Unit,
        runner: Runner,
        arguments: Arguments,
        tensors: Sequence[torch.Tensor],
        others: Sequence[Any],
        needs: Sequence[bool] | None = None,
    ) -> Forward:
        tiled = None if self._is_paused else self._tiled(unit, tensors)
        if tiled is not None and self._compare(unit, runner, arguments, tensors, others):
            tiled = self._tiled(unit, tensors)
        return tiled or self._others.of(unit, runner, arguments, tensors, others, needs)

    def again(self, forward: Forward) -> Forward:
        return forward.again() if isinstance(forward, TiledForward) else self._others.again(forward)

    def record(self, unit: Unit, runner: Runner, arguments: Arguments, rows: int | None) -> Forward:
        """Find the row-wise modules of a block."""
        known = unit.traits.tiles
        if rows is not None and unit.is_block and (known is None or not known.is_whole):

            def run(forward: Forward, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                with runner.undone(unit):
                    return runner.run(unit, arguments, tensors, arguments.others, forward).tensors

            with runner.undone(unit):
                trials = RowTrials(unit.module, run, runner.is_weight, runner.device.random_state)
                found = trials.find(unit.forward, arguments.tensors, rows)
            unit.traits.learn_tiles(found)
            self._found[unit.name] = found
        return self._tiled(unit, arguments.tensors) or unit.forward

    def check(self) -> None:
        if self._size is not None and self._found and not any(tiles.modules for tiles in self._found.values()):
            raise ConfigError(
                f"train.sequence_tile is {self._size}, but none of the modules in the {len(self._found)} blocks of the "
                f"model saves memory over tiles of the sequence: {self._told_whole() or 'tiles are no smaller'}. Set "
                "--train.sequence_tile none (or auto, which tiles only where possible and needed)."
            )

    @property
    def told(self) -> str:
        modules: dict[str, int] = {}
        for name in self._sizes:
            for rows in self._found[name].modules if name in self._found else ():
                modules[rows.name] = modules.get(rows.name, 0) + 1
        if not modules:
            return ""
        shown = ", ".join(f"{name} of {count} blocks" for name, count in modules.items())
        sizes = ", ".join(map(str, sorted(set(self._sizes.values()))))
        whole = f"; whole: {told}" if (told := self._told_whole()) else ""
        return (
            f"{shown} run over tiles of {sizes} tokens, each recomputed in the backward{whole}. Losses equal those of "
            "whole sequences, and gradients too, up to the summation order"
        )

    def _told_whole(self) -> str:
        """Return the modules run whole, with reasons."""
        reasons: dict[str, list[str]] = {}
        for tiles in self._found.values():
            for name, why in tiles.whole:
                names = reasons.setdefault(why, [])
                if name not in names:
                    names.append(name)
        return "; ".join(f"{', '.join(filter(None, names)) or 'all'} ({why})" for why, names in reasons.items())

    def _compare(
        self,
        unit: Unit,
        runner: Runner,
        arguments: Arguments,
        tensors: Sequence[torch.Tensor],
        others: Sequence[Any],
    ) -> bool:
        """Compare tiled and whole results, without gradients, in a use longer than all before.

        Returns True if a comparison ran. Recording saw only a few rows, and a module may behave differently or reach
        farther on long sequences.
        """
        tiles = unit.traits.tiles
        assert tiles is not None
        given = tensors[tiles.input]
        length = given.shape[tiles.axis]
        if length <= tiles.tried_rows:
            return False
        most, size = length, self._sizes[unit.name]
        if self._room_bytes is not None and tiles.saved_bytes:
            bytes_a_row = tiles.saved_bytes * given.numel() / given.shape[-1] / length
            most = max(2 * size, int(self._room_bytes / bytes_a_row))
        compared = ComparedForward(unit.forward, tiles.modules, size, given.device.type, most, is_near)
        with runner.undone(unit), torch.no_grad():
            runner.run(unit, arguments, [t.clone() for t in tensors], others, compared)
        why = f"over {min(length, most)} rows its results differ from those over tiles of {size}"
        modules = tuple(rows for rows in tiles.modules if rows.name not in compared.differing)
        whole = tuple((name, why) for name in sorted(compared.differing))
        self._found[unit.name] = replace(tiles, modules=modules, whole=(*tiles.whole, *whole), tried_rows=length)
        unit.traits.learn_tiles(self._found[unit.name])
        if not modules:
            del self._sizes[unit.name]
        if whole and not self._has_warned:
            self._has_warned = True
            warn(
                f"{', '.join(name for name, _ in whole)} of unit {unit.name} runs on the whole sequence from here on, "
                f"not over tiles: {why}. This takes more memory."
            )
        return True

    def _tiled(self, unit: Unit, tensors: Sequence[torch.Tensor]) -> TiledForward | None:
        """Return the tiled unit forward. None: untiled."""
        tiles = unit.traits.tiles
        if tiles is None or not tiles.modules:
            return None
        given = tensors[tiles.input]
        length, num_tokens = given.shape[tiles.axis], given.numel() // given.shape[-1]
        size = self._size
        if size is None and self._room_bytes is not None:
            needed_bytes = _GRADIENTS_SHARE * tiles.saved_bytes * num_tokens
            size = tile_rows(length) if needed_bytes > self._room_bytes else None
        if size is None or length <= size:
            return None
        self._sizes[unit.name] = size
        return TiledForward(unit.forward, tiles.modules, size, given.device.type)


def open_forwards(mode: str, tile: int | str, room_bytes: int | None) -> OwnForwards:
    """Return the forwards for unit uses.

    `mode`: compilation, "never" or "auto". `tile`: rows per sequence tile, "none" or "auto". `room_bytes`: device
    memory for a computing unit; None: unlimited.
    """
    forwards = CompiledForwards() if mode == "auto" else OwnForwards()
    if tile == "none" or (tile == "auto" and room_bytes is None):
        return forwards
    return TiledForwards(tile if isinstance(tile, int) else None, room_bytes, forwards)
