"""Trial runs to find row-wise modules inside a unit, for runs over sequence tiles.

Names and classes are not used. A module runs on a few rows: whole, in tiles, reordered, with changed values at tile
borders and both ends, and with equal rows. The last test rejects a mixture of experts with capacity limits, where equal
rows get different results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.engine.comparison import Sketch, are_near, are_near_gradients
from offload.engine.units.arguments import Arguments, run_over_copies
from offload.engine.units.recompute_policy import saved_tensors_watched
from offload.engine.units.trial import ENGINE_ERRORS, SavedBytes, Trial, gradients_of
from offload.extras.large.tiles import RowModule, TiledForward, Tiles
from offload.modules import forwards_replaced

_MOST_ROWS = 16
"""Maximum rows from a recorded call. The trial triples them, so modules with a reach beyond a few rows are detected."""
_MOST_WHOLE_ROWS = 64
"""Maximum rows for a trial of the whole unit, since this needs the memory saved by tiles."""
_LEAST_SHARE = 0.5
"""Minimum bytes saved by the graph, as a fraction of the module inputs, to justify recomputation."""


@dataclass
class _RecordedCall:
    """A recorded call of a module inside a unit."""

    forward: Callable[..., Any]
    """Original module forward."""
    arguments: Arguments
    """Arguments, with tensors copied and reduced to a few rows."""
    axis: int
    """Row axis; -1 if no tensor has rows."""
    cut: tuple[int, ...]
    """Indices of the tensors with a row axis."""

    def map_rows(
        self, change: Callable[[torch.Tensor], torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Apply `change` to each tensor with rows."""
        return [change(t) if i in self.cut else t for i, t in enumerate(tensors)]


class RowTrials:
    """Trials for the modules inside one unit, during a use with the weights on the device.

    The caller restores generators and state changed by inner modules.
    """

    def __init__(self, trial: Trial) -> None:
        """`trial`: runs of the unit."""
        self._trial = trial
        self._module = trial.unit.module
        self._calls: dict[nn.Module, _RecordedCall] = {}  # the first of each inner module
        self._whole: dict[str, str] = {}  # reasons by name of a module
        self._num_rows = 0  # of the unit's input

    def find(self, unit_forward: Callable[..., Any], tensors: Sequence[torch.Tensor], rows: int) -> Tiles:
        """Examine a use of the unit with `unit_forward` and these tensors. `rows`: batch rows (0: unknown)."""
        number = next((i for i, t in enumerate(tensors) if t.is_floating_point() and t.dim() > 1), None)
        if number is None:
            return Tiles((), (("", "no input of the unit is a floating-point tensor with rows"),))
        unit_input = tensors[number]
        lengths = [
            axis for axis in range(unit_input.dim() - 1) if unit_input.dim() == 2 or unit_input.shape[axis] != rows
        ]
        axis = lengths[0] if rows and lengths else min(1, unit_input.dim() - 2)  # of tokens, not of the batch
        self._num_rows = unit_input.shape[axis]
        inner = [m for m in self._module.modules() if m is not self._module]
        with forwards_replaced({m: self._recording_forward(m) for m in inner}):
            self._trial.run(unit_forward, tensors)
        row_modules = list(self._outermost(self._module, ""))
        if self._num_rows > _MOST_WHOLE_ROWS:
            return Tiles(tuple(row_modules), tuple(self._whole.items()), number, axis)
        num_bytes, modules = self._try_unit(unit_forward, tensors, row_modules)
        saved_bytes = num_bytes / (unit_input.numel() // unit_input.shape[-1])
        return Tiles(modules, tuple(self._whole.items()), number, axis, saved_bytes, is_whole=True)

    def confirm(self, equal: Tiles, unit_forward: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Tiles | None:
        """Return the results `equal` of an equal unit for this unit; None if this unit behaves differently.

        Three runs of the unit, against some twenty of its modules and five of the unit in `find`. Results and gradients
        of inputs are compared: gradients of weights would take most of the time and memory, and the code that makes
        them was tried in the equal unit.
        """
        if not equal.modules:
            return equal
        if not equal.is_whole:
            return None
        self._num_rows = tensors[equal.input].shape[equal.axis]
        # The same places in this unit.
        modules = [replace(rows, module=self._module.get_submodule(rows.name)) for rows in equal.modules]
        tiled, needs = self._tiled(unit_forward, modules), [t.is_floating_point() for t in tensors]
        try:
            with self._trial.without_weight_gradients():
                whole = self._trial.run(unit_forward, tensors, needs, has_graph=True)
                results = self._trial.run(tiled, tensors).results
                gradients = self._trial.run(tiled.for_recomputation(), tensors, needs, has_graph=True).gradients
        except RuntimeError:
            return None
        if not all(map(are_near, whole.results, results)):
            return None
        if not are_near_gradients(whole.gradients, gradients, tensors):
            return None
        return replace(equal, modules=tuple(modules))

    # -- the modules inside ----------------------------------------------------------------------------------

    def _recording_forward(self, module: nn.Module) -> Callable[..., Any]:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if module not in self._calls:
                self._calls[module] = self._record_call(own, Arguments((args, kwargs)))
            return own(*args, **kwargs)

        return forward

    def _record_call(self, own: Callable[..., Any], arguments: Arguments) -> _RecordedCall:
        """Return a recorded call with copies of a few tensor rows."""
        axis, cut = self._find_rows(arguments.tensors)
        for number, tensor in enumerate(arguments.tensors):
            few = tensor.detach()
            if number in cut:
                few = few.narrow(axis, 0, min(_MOST_ROWS, tensor.shape[axis])).clone()
            arguments.tensors[number] = few
        return _RecordedCall(own, arguments, axis, cut)

    def _find_rows(self, tensors: Sequence[torch.Tensor]) -> tuple[int, tuple[int, ...]]:
        """Return the row axis of a call, and the indices of the tensors with rows; -1 and none without rows."""
        main = next((t for t in tensors if t.is_floating_point() and t.dim() > 1), None)
        if main is None:
            return -1, ()
        axes = [a for a in range(main.dim() - 1) if main.shape[a] == self._num_rows]
        if not axes and main.shape[0] % self._num_rows == 0:
            axes = [0]  # Batch rows are flattened into this axis.
        if not axes:
            return -1, ()
        axis = axes[0]
        return axis, tuple(i for i, t in enumerate(tensors) if t.dim() > axis and t.shape[axis] == main.shape[axis])

    def _outermost(self, parent: nn.Module, path: str) -> Iterator[RowModule]:
        """Yield the outermost modules that may run over tiles and save memory by tiling."""
        for key, child in parent.named_children():
            name, call = f"{path}{key}", self._calls.get(child)
            if call is None or call.axis < 0:
                yield from self._outermost(child, f"{name}.")
                continue
            try:
                refusal, saves = self._refusal(child, call)
            except ENGINE_ERRORS:
                raise
            except Exception as error:  # Raised by modules that cannot run on a few rows.
                refusal, saves = f"on a few rows it raises {type(error).__name__}", False
            if refusal:
                self._whole[name] = refusal
                yield from self._outermost(child, f"{name}.")  # a part may work by rows where the whole does not
            elif saves:
                yield RowModule(name, child, call.arguments.structure, call.cut, call.axis)

    def _refusal(self, module: nn.Module, call: _RecordedCall) -> tuple[str, bool]:
        """Return (reason against tiles or "", saves memory)."""
        submodules = [m for m in module.modules() if m is not module]
        # Hooks of the module itself see the whole call: tiles run inside of its forward.
        if any(
            m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in submodules
        ):
            return "its submodules have hooks, which would see tiles", False
        sample = call.map_rows(lambda t: _lengthen(t, call.axis), call.arguments.tensors)
        num_rows = sample[call.cut[0]].shape[call.axis]
        with torch.no_grad():
            if refusal := self._trace(module, call, sample):
                return refusal, False
            whole = self._results(call, sample)
            if any(t.dim() <= call.axis or t.shape[call.axis] != num_rows for t in whole):
                return "one of its results has no rows", False
            if not all(t.is_contiguous() and bool(t.isfinite().all()) for t in whole):
                return "its result is not contiguous, or not finite", False
            for rows, other, places in _variations(sample, call, num_rows):
                for one, result in zip(whole, self._results(call, other), strict=True):
                    if not are_near(_select_rows(one, call, rows), _select_rows(result, call, places)):
                        return "a row of its result depends on other rows, or on the position of the row", False
            equal = call.map_rows(lambda t: _first_row(t, call).expand_as(t).contiguous(), sample)
            for result in self._results(call, equal):
                if not are_near(_first_row(result, call).expand_as(result), result):
                    return "it gives different results for equal rows", False
        return self._find_gradient_difference(module, call, sample, num_rows)

    def _trace(self, module: nn.Module, call: _RecordedCall, sample: Sequence[torch.Tensor]) -> str:
        """Return the side effect or dependency found in a module run; empty for none."""
        own = [t.clone() for t in sample]
        versions = [t._version for t in own]  # they show a change even where the values stay
        before = self._trial.snapshot(module)
        result = run_over_copies(call.forward, call.arguments, own, call.arguments.others)
        after = before.capture_state()
        if before.has_sampled:
            return "it draws random numbers"
        if any(t._version != version for t, version in zip(own, versions, strict=True)):
            return "it changes its inputs in place"
        if any(before.state.differences(after)) or len(result.fill(result.tensors)) > 1:
            return "it changes state, or a list or dict of its caller"
        if not result.tensors:
            return "it returns no tensors"
        return ""

    def _results(self, call: _RecordedCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = call.arguments.fill(tensors)
        return Arguments(call.forward(*args, **kwargs)).tensors

    def _find_gradient_difference(
        self, module: nn.Module, call: _RecordedCall, sample: Sequence[torch.Tensor], num_rows: int
    ) -> tuple[str, bool]:
        """Return (reason if tiled gradients differ or "", True if tiles save enough graph memory)."""
        weights = [p for p in module.parameters() if p.requires_grad and self._trial.of_weights]
        leaves = call.map_rows(lambda t: t.clone().requires_grad_() if t.is_floating_point() else t, sample)
        wanted = [t for t in (*leaves, *weights) if t.requires_grad]
        saved = SavedBytes([*leaves, *module.parameters()], self._trial.device)
        with torch.enable_grad():
            with saved_tensors_watched(saved.add):
                whole = gradients_of(self._results(call, leaves), wanted)
            tiles = [self._results(call, part) for _, part in _tiles(leaves, call, num_rows)]
            joined = [torch.cat(parts, call.axis) for parts in zip(*tiles, strict=True)]
            if not are_near_gradients(whole, gradients_of(joined, wanted), leaves):
                return "its gradients differ over tiles", False
        return "", saved.num_bytes >= _LEAST_SHARE * sum(sample[i].nbytes for i in call.cut)

    # -- the unit as a whole ---------------------------------------------------------------------------------

    def _try_unit(
        self, unit_forward: Callable[..., Any], tensors: Sequence[torch.Tensor], row_modules: Sequence[RowModule]
    ) -> tuple[int, tuple[RowModule, ...]]:
        """Return (bytes saved by the unit graph, tileable modules with `is_idle` set).

        No modules if the tiled unit gives other results.
        """
        whole = self._trial.run(unit_forward, tensors, has_graph=True, counts_saved=True)
        if not row_modules:
            return whole.saved_bytes, ()
        try:
            tiled = self._trial.run(self._tiled(unit_forward, row_modules), tensors, has_graph=True)
            is_same = all(map(are_near, whole.results, tiled.results)) and are_near_gradients(
                whole.gradients, tiled.gradients, tensors
            )
        except RuntimeError:  # For example, a tensor saved by a tile is changed in place later.
            is_same = False
        if not is_same:
            self._whole |= {rows.name: "with it over tiles, the unit gives other results" for rows in row_modules}
            return whole.saved_bytes, ()
        return whole.saved_bytes, tuple(
            replace(rows, is_idle=self._is_idle(unit_forward, tensors, row_modules, rows, tiled.gradients))
            for rows in row_modules
        )

    def _tiled(self, unit_forward: Callable[..., Any], row_modules: Sequence[RowModule]) -> TiledForward:
        device_type = next(self._module.parameters()).device.type
        return TiledForward(unit_forward, row_modules, max(1, self._num_rows // 2), device_type)

    def _is_idle(
        self,
        unit_forward: Callable[..., Any],
        tensors: Sequence[torch.Tensor],
        row_modules: Sequence[RowModule],
        rows: RowModule,
        expected: Sequence[Sketch | None],
    ) -> bool:
        """True if gradients stay equal after replacing the module results in a recomputation by zeros and by NaN."""

        # NaN reaches the gradients through any operation that reads the result. An addition does not.
        def poisoned(*args: Any, **kwargs: Any) -> Any:
            forward = rows.module.forward

            def poison(*args: Any, **kwargs: Any) -> Any:
                result = Arguments(forward(*args, **kwargs))
                return result.fill([_Poison.apply(t) if t.is_floating_point() else t for t in result.tensors])

            with forwards_replaced({rows.module: poison}):
                return unit_forward(*args, **kwargs)

        idle = [replace(each, is_idle=each is rows) for each in row_modules]
        forwards = self._tiled(unit_forward, idle).for_recomputation(), self._tiled(poisoned, row_modules)
        try:
            others = [self._trial.run(forward, tensors, has_graph=True).gradients for forward in forwards]
        except RuntimeError:
            return False
        return all(
            theirs is mine or (mine is not None and theirs is not None and mine.equals(theirs))
            for other in others
            for mine, theirs in zip(expected, other, strict=True)
        )


class _Poison(torch.autograd.Function):
    """Replaces values by NaN; passes gradients through."""

    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, torch.nan)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _lengthen(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Return a tensor with three times the rows: original, mirrored (negated if floating point), shifted."""
    other = tensor.flip(axis)
    if tensor.is_floating_point():  # negative integers would be no tokens
        other = -other
    return torch.cat([tensor, other, tensor.roll(1, axis)], axis)


def _tile_size(num_rows: int) -> int:
    """Return the tile rows. The last tile is shorter if there are enough rows."""
    return max(1, num_rows // 3 - 1)


def _tiles(
    sample: Sequence[torch.Tensor], call: _RecordedCall, num_rows: int
) -> Iterator[tuple[range, list[torch.Tensor]]]:
    """Yield (rows, tensors) per tile."""
    size = _tile_size(num_rows)
    for begin in range(0, num_rows, size):
        rows = range(begin, min(begin + size, num_rows))
        yield rows, call.map_rows(partial(_narrow, call.axis, rows), sample)


def _variations(
    sample: Sequence[torch.Tensor], call: _RecordedCall, num_rows: int
) -> Iterator[tuple[Sequence[int], list[torch.Tensor], Sequence[int]]]:
    """Yield (sample rows, varied tensors, varied rows). A row-wise module has equal results at both."""
    everywhere = range(num_rows)
    for rows, tile in _tiles(sample, call, num_rows):
        yield rows, tile, range(len(rows))
    order = [*everywhere[::-2], *everywhere[-2::-2]]
    yield order, call.map_rows(lambda t: _select_rows(t, call, order), sample), everywhere
    border = _tile_size(num_rows)
    for changed in ((0, border - 1), (border, num_rows - 1)):
        for factor in (-8.0, 8.0):
            rest = [row for row in everywhere if row not in changed]
            yield rest, call.map_rows(partial(_change_rows, call, changed, factor), sample), rest


def _narrow(axis: int, rows: range, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.narrow(axis, rows.start, len(rows)).contiguous()


def _change_rows(call: _RecordedCall, rows: Sequence[int], factor: float, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with strongly changed values in some rows. Integer tensors stay unchanged."""
    if not tensor.is_floating_point():
        return tensor
    changed = tensor.clone()
    for row in rows:
        changed.select(call.axis, row).mul_(factor).add_(factor)
    return changed


def _first_row(tensor: torch.Tensor, call: _RecordedCall) -> torch.Tensor:
    """Return the first row in the first batch row, or in each batch row if the call has tensors without rows."""
    if len(call.cut) < len(call.arguments.tensors):  # such a tensor may differ from batch row to batch row
        return tensor.narrow(call.axis, 0, 1)
    return tensor[(slice(1),) * (call.axis + 1)]


def _select_rows(tensor: torch.Tensor, call: _RecordedCall, rows: Sequence[int]) -> torch.Tensor:
    return tensor.index_select(call.axis, torch.tensor(rows, dtype=torch.int64, device="cpu").to(tensor.device))
