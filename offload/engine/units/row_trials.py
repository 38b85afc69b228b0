"""Trial runs to find row-wise modules inside a unit, for runs over sequence tiles.

Names and classes are not used. A module runs on a few rows: whole, in tiles, reordered, with changed values at tile
borders and both ends, and with equal rows. The last test rejects a mixture of experts with capacity limits, where equal
rows get different results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from offload.engine.units.arguments import Arguments, run_over_copies
from offload.engine.units.belongings import Belongings
from offload.engine.units.drawn import Drawn
from offload.engine.units.rerouting import forwards_replaced
from offload.engine.units.tiles import RowModule, TiledForward, Tiles

_MOST_ROWS = 16
"""Maximum rows from a recorded call. The trial triples them, so modules with a reach beyond a few rows are detected."""
_MOST_WHOLE_ROWS = 64
"""Maximum rows for a trial of the whole unit, since this needs the memory saved by tiles."""
_LEAST_SHARE = 0.5
"""Minimum bytes saved by the graph, as a fraction of the module inputs, to justify recomputation."""
_APART = {False: 1e-5, True: 2**-6}
"""Result tolerance, as a fraction of the maximum. Key: True for 16-bit tensors."""
_GRADIENTS_APART = {False: (1e-4, 1e-6), True: (3e-2, 4e-3)}
"""Gradient tolerances. Key: True for 16-bit tensors.

Values: (fraction of each gradient norm, fraction of the total norm). The second covers rounding in gradients with
mutually cancelling terms.
"""


@dataclass
class _Called:
    """A recorded call of a module inside a unit."""

    forward: Callable[..., Any]
    """Original module forward."""
    arguments: Arguments
    """Arguments, with tensors copied and reduced to a few rows."""
    axis: int
    """Row axis; -1 if no tensor has rows."""
    cut: tuple[int, ...]
    """Indices of the tensors with a row axis."""
    structure: Hashable
    """Argument structure."""


class RowTrials:
    """Trials for the modules inside one unit, during a use with the weights on the device.

    The caller restores generators and changed state.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[Callable[..., Any], Sequence[torch.Tensor]], list[torch.Tensor]],
        ignores: Callable[[torch.Tensor], bool],
        random: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        """`run`: runs the unit by a forward on given tensors and returns the result tensors.

        `ignores`: True for a tensor over weights. `random`: returns the device generator states.
        """
        self._module, self._run_unit, self._ignores, self._random = module, run, ignores, random
        self._calls: dict[nn.Module, _Called] = {}
        self._whole: dict[str, str] = {}
        self._num_rows = 0

    def find(self, own: Callable[..., Any], tensors: Sequence[torch.Tensor], rows: int) -> Tiles:
        """Examine a use of the unit with forward `own` and these tensors. `rows`: batch rows (0: unknown)."""
        number = next((i for i, t in enumerate(tensors) if t.is_floating_point() and t.dim() > 1), None)
        if number is None:
            return Tiles((), (("", "no input of the unit is a floating-point tensor with rows"),))
        of_unit = tensors[number]
        lengths = [axis for axis in range(of_unit.dim() - 1) if of_unit.dim() == 2 or of_unit.shape[axis] != rows]
        axis = lengths[0] if rows and lengths else min(1, of_unit.dim() - 2)
        self._num_rows = of_unit.shape[axis]
        with (
            torch.no_grad(),
            forwards_replaced({m: self._noting(m) for m in self._module.modules() if m is not self._module}),
        ):
            self._run_unit(own, tensors)
        found = list(self._outermost(self._module, ""))
        saved, modules, is_whole = 0.0, tuple(found), _tries_whole(of_unit, axis)
        if is_whole:
            num_bytes, modules = self._as_a_unit(own, tensors, found)
            saved = num_bytes / (of_unit.numel() // of_unit.shape[-1])
        return Tiles(modules, tuple(self._whole.items()), number, axis, saved, is_whole)

    # -- the modules inside ----------------------------------------------------------------------------------

    def _noting(self, module: nn.Module) -> Callable[..., Any]:
        own = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if module not in self._calls:
                self._calls[module] = self._called(own, Arguments((args, kwargs)))
            return own(*args, **kwargs)

        return forward

    def _called(self, own: Callable[..., Any], arguments: Arguments) -> _Called:
        """Return a recorded call with copies of a few tensor rows."""
        given, structure = list(arguments.tensors), arguments.structure
        main = next((t for t in given if t.is_floating_point() and t.dim() > 1), None)
        axes = [] if main is None else [a for a in range(main.dim() - 1) if main.shape[a] == self._num_rows]
        if main is not None and not axes and main.shape[0] % self._num_rows == 0:
            axes = [0]  # Batch rows are flattened into this axis.
        axis, cut = axes[0] if axes else -1, tuple[int, ...]()
        if main is not None and axes:
            cut = tuple(i for i, t in enumerate(given) if t.dim() > axis and t.shape[axis] == main.shape[axis])
        few = [t.narrow(axis, 0, min(_MOST_ROWS, t.shape[axis])) if i in cut else t for i, t in enumerate(given)]
        arguments.tensors[:] = [t.detach().clone() if i in cut else t.detach() for i, t in enumerate(few)]
        return _Called(own, arguments, axis, cut, structure)

    def _outermost(self, parent: nn.Module, path: str) -> Iterator[RowModule]:
        """Yield the outermost modules that may run over tiles and save memory by tiling."""
        for key, child in parent.named_children():
            name, called = f"{path}{key}", self._calls.get(child)
            if called is None or called.axis < 0:
                yield from self._outermost(child, f"{name}.")
                continue
            try:
                refusal, saves = self._refusal(child, called)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # Raised by modules that cannot run on a few rows.
                refusal, saves = f"on a few rows it raises {type(error).__name__}", False
            if refusal:
                self._whole[name] = refusal
                yield from self._outermost(child, f"{name}.")
            elif saves:
                yield RowModule(name, child, called.structure, called.cut, called.axis)

    def _refusal(self, module: nn.Module, called: _Called) -> tuple[str, bool]:
        """Return (reason against tiles or "", saves memory)."""
        below = [m for m in module.modules() if m is not module]
        if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in below):
            return "its submodules have hooks, which would see tiles", False
        sample = [_longer(t, called.axis) if i in called.cut else t for i, t in enumerate(called.arguments.tensors)]
        num_rows = sample[called.cut[0]].shape[called.axis]
        with torch.no_grad():
            if refusal := self._trace(module, called, sample):
                return refusal, False
            whole = self._results(called, sample)
            if any(t.dim() <= called.axis or t.shape[called.axis] != num_rows for t in whole):
                return "one of its results has no rows", False
            if not all(t.is_contiguous() and bool(t.isfinite().all()) for t in whole):
                return "its result is not contiguous, or not finite", False
            for rows, other, places in _variations(sample, called, num_rows):
                for one, result in zip(whole, self._results(called, other), strict=True):
                    if not is_near(_select(one, called, rows), _select(result, called, places)):
                        return "a row of its result depends on other rows, or on the position of the row", False
            for result in self._results(called, _of_one_row(sample, called)):
                if not is_near(_first(result, called).expand_as(result), result):
                    return "it gives different results for equal rows", False
        return self._differing_gradient(module, called, sample, num_rows)

    def _trace(self, module: nn.Module, called: _Called, sample: Sequence[torch.Tensor]) -> str:
        """Return the side effect or dependency found in a module run; empty for none."""
        own = [t.clone() for t in sample]
        before, random, drawn = Belongings({"": module}, self._ignores), self._random(), Drawn.so_far()
        versions = [t._version for t in own]
        made = run_over_copies(called.forward, called.arguments, own, called.arguments.others)
        after = Belongings({"": module}, self._ignores)
        is_drawn = not all(map(torch.equal, random, self._random())) or not drawn.is_as(Drawn.so_far())
        if is_drawn:
            return "it draws random numbers"
        if any(t._version != version for t, version in zip(own, versions, strict=True)):
            return "it changes its inputs in place"
        if next(before.differences(after), None) is not None or len(made.fill(made.tensors)) > 1:
            return "it changes state, or a list or dict of its caller"
        return "" if made.tensors else "it returns no tensors"

    def _results(self, called: _Called, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        args, kwargs = called.arguments.fill(tensors)
        return Arguments(called.forward(*args, **kwargs)).tensors

    def _differing_gradient(
        self, module: nn.Module, called: _Called, sample: Sequence[torch.Tensor], num_rows: int
    ) -> tuple[str, bool]:
        """Return (reason if tiled gradients differ or "", True if tiles save enough graph memory)."""
        weights = [p for p in module.parameters() if p.requires_grad]
        leaves = [
            t.clone().requires_grad_() if t.is_floating_point() and i in called.cut else t for i, t in enumerate(sample)
        ]
        wanted = [t for t in (*leaves, *weights) if t.requires_grad]
        saved = _Saved([*leaves, *module.parameters()])
        with torch.enable_grad():
            with saved.hooks():
                whole = _gradients(self._results(called, leaves), wanted)
            tiles = [self._results(called, part) for _, part in _tiles(leaves, called, num_rows)]
            joined = [torch.cat(parts, called.axis) for parts in zip(*tiles, strict=True)]
            if not _near_gradients(whole, _gradients(joined, wanted)):
                return "its gradients differ over tiles", False
        return "", saved.num_bytes >= _LEAST_SHARE * sum(sample[i].nbytes for i in called.cut)

    # -- the unit as a whole ---------------------------------------------------------------------------------

    def _as_a_unit(
        self, own: Callable[..., Any], tensors: Sequence[torch.Tensor], found: Sequence[RowModule]
    ) -> tuple[int, tuple[RowModule, ...]]:
        """Return (bytes saved by the unit graph, tileable modules with `is_idle` set).

        No modules if the tiled unit gives other results.
        """
        saved = _Saved([*tensors, *self._module.parameters()])
        with saved.hooks():
            whole = self._made(own, tensors)
        if not found:
            return saved.num_bytes, ()
        try:
            tiled = self._made(self._tiled(own, found), tensors)
            is_same = all(map(is_near, whole[0], tiled[0])) and _near_gradients(whole[1], tiled[1])
        except RuntimeError:  # For example, a tensor saved by a tile is changed in place later.
            is_same = False
        if not is_same:
            self._whole |= {rows.name: "with it over tiles, the unit gives other results" for rows in found}
            return saved.num_bytes, ()
        return saved.num_bytes, tuple(
            replace(rows, is_idle=self._is_idle(own, tensors, found, rows, tiled[1])) for rows in found
        )

    def _tiled(self, own: Callable[..., Any], found: Sequence[RowModule]) -> TiledForward:
        kind = next(self._module.parameters()).device.type
        return TiledForward(own, found, max(1, self._num_rows // 2), kind)

    def _is_idle(
        self,
        own: Callable[..., Any],
        tensors: Sequence[torch.Tensor],
        found: Sequence[RowModule],
        rows: RowModule,
        expected: Sequence[torch.Tensor | None],
    ) -> bool:
        """True if gradients stay equal after replacing the module results in a recomputation by zeros and by NaN."""

        def poisoned(*args: Any, **kwargs: Any) -> Any:
            forward = rows.module.forward

            def poison(*args: Any, **kwargs: Any) -> Any:
                made = Arguments(forward(*args, **kwargs))
                return made.fill([_Poison.apply(t) if t.is_floating_point() else t for t in made.tensors])

            with forwards_replaced({rows.module: poison}):
                return own(*args, **kwargs)

        idle = [replace(each, is_idle=each is rows) for each in found]
        ways = self._tiled(own, idle).again(), self._tiled(poisoned, found)
        try:
            others = [self._made(way, tensors)[1] for way in ways]
        except RuntimeError:
            return False
        return all(_same(mine, theirs) for other in others for mine, theirs in zip(expected, other, strict=True))

    def _made(
        self, forward: Callable[..., Any], tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Return the unit results by a forward, and the gradients of inputs and weights."""
        with torch.enable_grad():
            leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
            wanted = [t for t in (*leaves, *self._module.parameters()) if t.requires_grad]
            results = self._run_unit(forward, [leaf.clone() for leaf in leaves])
            return [t.detach() for t in results], _gradients(results, wanted)


def _tries_whole(tensor: torch.Tensor, axis: int) -> bool:
    """True if the unit is short enough for a trial as a whole."""
    return tensor.shape[axis] <= _MOST_WHOLE_ROWS


class _Saved:
    """Counts bytes saved by autograd, except known tensors."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        self._known = {t.untyped_storage().data_ptr() for t in known}
        self.num_bytes = 0

    def hooks(self) -> AbstractContextManager[Any]:
        """Return a context to count saved storages, each once."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() not in self._known:
                self._known.add(tensor.untyped_storage().data_ptr())
                self.num_bytes += tensor.untyped_storage().nbytes()
            return tensor.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


class _Poison(torch.autograd.Function):
    """Replaces values by NaN; passes gradients through."""

    @staticmethod
    def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, torch.nan)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _longer(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Return a tensor with three times the rows: original, mirrored (negated if floating point), shifted."""
    other = tensor.flip(axis)
    return torch.cat([tensor, -other if tensor.is_floating_point() else other, tensor.roll(1, axis)], axis)


def _size(num_rows: int) -> int:
    """Return the tile rows. The last tile is shorter if there are enough rows."""
    return max(1, num_rows // 3 - 1)


def _tiles(
    sample: Sequence[torch.Tensor], called: _Called, num_rows: int
) -> Iterator[tuple[range, list[torch.Tensor]]]:
    """Yield (rows, tensors) per tile."""
    size = _size(num_rows)
    for begin in range(0, num_rows, size):
        rows = range(begin, min(begin + size, num_rows))
        yield (
            rows,
            [
                t.narrow(called.axis, begin, len(rows)).contiguous() if i in called.cut else t
                for i, t in enumerate(sample)
            ],
        )


def _variations(
    sample: Sequence[torch.Tensor], called: _Called, num_rows: int
) -> Iterator[tuple[Sequence[int], list[torch.Tensor], Sequence[int]]]:
    """Yield (sample rows, varied tensors, varied rows). A row-wise module has equal results at both."""
    everywhere = range(num_rows)
    for rows, tile in _tiles(sample, called, num_rows):
        yield rows, tile, range(len(rows))
    order = [*everywhere[::-2], *everywhere[-2::-2]]
    yield order, [_select(t, called, order) if i in called.cut else t for i, t in enumerate(sample)], everywhere
    border = _size(num_rows)
    for changed in ((0, border - 1), (border, num_rows - 1)):
        for factor in (-8.0, 8.0):
            rest = [row for row in everywhere if row not in changed]
            yield (
                rest,
                [_changed(t, called, changed, factor) if i in called.cut else t for i, t in enumerate(sample)],
                rest,
            )


def _changed(tensor: torch.Tensor, called: _Called, rows: Sequence[int], factor: float) -> torch.Tensor:
    """Return a copy with strongly changed values in some rows. Integer tensors stay unchanged."""
    if not tensor.is_floating_point():
        return tensor
    changed = tensor.clone()
    for row in rows:
        changed.select(called.axis, row).mul_(factor).add_(factor)
    return changed


def _of_one_row(sample: Sequence[torch.Tensor], called: _Called) -> list[torch.Tensor]:
    """Return tensors with every row equal to the first."""
    return [_first(t, called).expand_as(t).contiguous() if i in called.cut else t for i, t in enumerate(sample)]


def _first(tensor: torch.Tensor, called: _Called) -> torch.Tensor:
    """Return the first row in the first batch row, or in each batch row if the call has tensors without rows."""
    if len(called.cut) < len(called.arguments.tensors):
        return tensor.narrow(called.axis, 0, 1)
    return tensor[(slice(1),) * (called.axis + 1)]


def _select(tensor: torch.Tensor, called: _Called, rows: Sequence[int]) -> torch.Tensor:
    return tensor.index_select(called.axis, torch.tensor(rows, dtype=torch.int64, device="cpu").to(tensor.device))


def _gradients(results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of a weighted sum over all result elements."""
    roots = [t for t in results if t.requires_grad]
    if not roots or not wanted:
        return [None] * len(wanted)
    weights = [torch.arange(t.numel(), device=t.device).cos().view(t.shape).to(t.dtype) for t in roots]
    return list(torch.autograd.grad(roots, wanted, weights, allow_unused=True))


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if results are equal up to rounding; NaN equals NaN."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    one, other = one.nan_to_num(), other.nan_to_num()
    most = float(one.abs().max()) if one.numel() else 0.0
    return bool(((one.float() - other.float()).abs() <= _APART[_is_half(one)] * most).all())


def _near_gradients(some: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> bool:
    """True if gradients are equal up to summation order. None equals zeros."""
    norms = [0.0 if t is None else float(t.double().norm()) for t in some]
    whole = math.hypot(*norms, 0.0)
    for one, other, norm in zip(some, others, norms, strict=True):
        given = other if one is None else one
        if given is not None:
            share, of_all = _GRADIENTS_APART[_is_half(given)]
            mine, theirs = (given.new_zeros(()) if t is None else t for t in (one, other))
            if not float((mine.double() - theirs.double()).norm()) <= share * norm + of_all * whole:
                return False
    return True


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
