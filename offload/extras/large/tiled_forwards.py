"""Unit forwards with inner modules run over sequence tiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from offload.engine.units.arguments import Arguments
from offload.engine.units.stages import Host, Stage
from offload.engine.units.trial import Trial
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, ForwardRunner, Use
from offload.errors import ConfigError, warn
from offload.extras.large.compiled_forwards import build_key
from offload.extras.large.row_trials import RowTrials
from offload.extras.large.tiles import ComparedForward, TiledForward, Tiles, tile_rows
from offload.planning.settings import Settings

_GRADIENTS_SHARE = 1.5
"""Backward memory (with gradients) as a multiple of the saved graph bytes."""


class TiledForwards(Stage):
    """Runs row-wise block modules over tiles of `size` rows.

    With `size` None, only units above `room_bytes` are tiled, with a suitable size. Untiled units use `inner`.
    """

    needs_short_recording = True

    def __init__(self, inner: Stage, size: int | None, room_bytes: int | None) -> None:
        super().__init__(inner)
        self._size = size
        self._room_bytes = room_bytes
        self._tiles: dict[str, Tiles] = {}  # by unit; the unit's traits have them too
        self._sizes: dict[str, int] = {}  # of the last tiled use, by unit
        self._by_build: dict[Hashable, Tiles] = {}
        """Trial results of the first unit of each build (`build_key`), by build and inputs."""
        self._has_warned = False

    @classmethod
    def over(cls, inner: Stage, host: Host, settings: Settings) -> Stage:
        tile, room_bytes = settings.sequence_tile, host.plan.device_room_bytes
        if tile == "auto" and room_bytes is None:
            return inner
        return cls(inner, tile if isinstance(tile, int) else None, room_bytes)

    def forward_of(self, unit: Unit, use: Use) -> Forward:
        if self.is_paused:
            return self.inner.forward_of(unit, use)
        tiled = self._tiled(unit, use.tensors)
        if tiled is not None and self._compare(unit, use, tiled):
            tiled = self._tiled(unit, use.tensors)  # without the modules that differed
        return tiled or self.inner.forward_of(unit, use)

    def for_recomputation(self, forward: Forward) -> Forward:
        if isinstance(forward, TiledForward):
            return forward.for_recomputation()
        return self.inner.for_recomputation(forward)

    def record(self, unit: Unit, runner: ForwardRunner, arguments: Arguments, rows: int | None) -> Forward:
        """Find the row-wise modules of a block."""
        # A second recording, with fewer tokens, may try the unit as a whole.
        known_tiles: Tiles | None = unit.traits.learned.get("tiles")
        if rows is not None and unit.is_block and (known_tiles is None or not known_tiles.is_whole):
            self._learn(unit, self._find(Trial(runner, unit, arguments), arguments, rows))
        return self._tiled(unit, arguments.tensors) or self.inner.record(unit, runner, arguments, rows)

    def _find(self, trial: Trial, arguments: Arguments, rows: int) -> Tiles:
        """Return the trial results for a unit: those of an equal unit, confirmed by a trial on the whole unit."""
        unit, tensors = trial.unit, arguments.tensors
        key = build_key(unit), arguments.structure, tuple([(t.shape, t.dtype, t.requires_grad) for t in tensors])
        with trial.restoring():
            trials, equal = RowTrials(trial), self._by_build.get(key)
            found = equal and trials.confirm(equal, unit.compute, tensors)
            tiles = found or trials.find(unit.compute, tensors, rows)
        self._by_build.setdefault(key, tiles)  # the first unit stays the example for all of its build
        return tiles

    def check(self) -> None:
        if self._size is not None and self._tiles and not any(tiles.modules for tiles in self._tiles.values()):
            raise ConfigError(
                f"train.sequence_tile is {self._size}, but none of the modules in the {len(self._tiles)} blocks of the "
                f"model saves memory over tiles of the sequence: {self._describe_whole() or 'tiles are no smaller'}. "
                "Set --train.sequence_tile none (or auto, which tiles only where possible and needed)."
            )

    @property
    def description(self) -> str:
        modules = Counter(
            rows.name for name in self._sizes if name in self._tiles for rows in self._tiles[name].modules
        )
        if not modules:
            return ""
        shown = ", ".join(f"{name} of {count} blocks" for name, count in modules.items())
        sizes = ", ".join(map(str, sorted(set(self._sizes.values()))))
        whole = ""
        if reasons := self._describe_whole():
            whole = f"; whole: {reasons}"
        return (
            f"{shown} run over tiles of {sizes} tokens, each recomputed in the backward{whole}. Losses equal those of "
            "whole sequences, and gradients too, up to the summation order"
        )

    def _describe_whole(self) -> str:
        """Return the modules run whole, with reasons."""
        reasons: dict[str, list[str]] = {}
        for tiles in self._tiles.values():
            for name, reason in tiles.whole:
                names = reasons.setdefault(reason, [])
                if name not in names:
                    names.append(name)
        return "; ".join(f"{', '.join(filter(None, names)) or 'all'} ({reason})" for reason, names in reasons.items())

    def _learn(self, unit: Unit, tiles: Tiles) -> None:
        unit.traits.learned["tiles"] = self._tiles[unit.name] = tiles

    def _compare(self, unit: Unit, use: Use, tiled: TiledForward) -> bool:
        """Compare tiled and whole results, without gradients, in a use longer than all before.

        Returns True if a comparison ran. Recording saw only a few rows, and a module may behave differently or reach
        farther on long sequences.
        """
        tiles: Tiles = unit.traits.learned["tiles"]
        unit_input = use.tensors[tiles.input]
        length = unit_input.shape[tiles.axis]
        if length <= tiles.tried_rows:
            return False
        most, size = length, tiled.size
        if self._room_bytes is not None and tiles.saved_bytes:  # a whole module may not fit: that is why tiles run
            row_bytes = tiles.saved_bytes * unit_input.numel() / unit_input.shape[-1] / length
            most = max(2 * size, int(self._room_bytes / row_bytes))
        compared = ComparedForward(tiled, most)
        Trial(use.runner, unit, use.arguments, use.others).run(compared, use.tensors)
        reason = f"over {min(length, most)} rows its results differ from those over tiles of {size}"
        modules = tuple(rows for rows in tiles.modules if rows.name not in compared.differing)
        whole = tuple((name, reason) for name in sorted(compared.differing))
        self._learn(unit, replace(tiles, modules=modules, whole=(*tiles.whole, *whole), tried_rows=length))
        if not modules:
            del self._sizes[unit.name]
        if whole and not self._has_warned:
            self._has_warned = True
            warn(
                f"{', '.join(name for name, _ in whole)} of unit {unit.name} runs on the whole sequence from here on, "
                f"not over tiles: {reason}. This takes more memory."
            )
        return True

    def _tiled(self, unit: Unit, tensors: Sequence[torch.Tensor]) -> TiledForward | None:
        """Return the tiled unit forward. None: untiled."""
        tiles: Tiles | None = unit.traits.learned.get("tiles")
        if tiles is None or not tiles.modules:
            return None
        unit_input = tensors[tiles.input]
        length, num_tokens = unit_input.shape[tiles.axis], unit_input.numel() // unit_input.shape[-1]
        size = self._size
        if size is None and self._room_bytes is not None:
            needed_bytes = _GRADIENTS_SHARE * tiles.saved_bytes * num_tokens
            if needed_bytes > self._room_bytes:
                size = tile_rows(length)
        if size is None or length <= size:
            return None
        self._sizes[unit.name] = size
        return TiledForward(unit.compute, tiles.modules, size, unit_input.device.type)
