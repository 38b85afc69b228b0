"""The engine broken on purpose, each time in another mechanism: what the fuzzer has to find.

A mutation is a function that takes one thing away at run time, of the twin as well as of the engine that is tested: a
mistake in the engine would be in both.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from offload.checkpoint.reader import Reader
from offload.engine.gradients import policies, updates
from offload.engine.gradients.flow import GradientFlow
from offload.engine.gradients.tile_updates import TileUpdates
from offload.engine.gradients.updates import Updates
from offload.engine.loss import parts as losses
from offload.engine.methods import interleaved, slot_updates, zeroth_order_update
from offload.engine.methods.method import Method
from offload.engine.methods.perturbed import Perturbed
from offload.engine.methods.slot_updates import SlotUpdates
from offload.engine.methods.zeroth_order_update import ZerothOrderUpdate
from offload.engine.recording.judge import Judge
from offload.engine.units import call, condition, router
from offload.engine.units.unit import Unit
from offload.integrations.optimizer import OffloadOptimizer
from offload.lanes.ticket import Fence
from offload.layout.regions import Piece
from offload.optim import update
from offload.optim.mezo import MeZO
from offload.tiers.nvme import Stripes
from offload.tiers.ring import Ring, RingSlice
from offload.tiers.slots import Slots
from offload.tiers.tile import RegionState

Change = Callable[[pytest.MonkeyPatch], None]
MUTATIONS: dict[str, Change] = {}


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Within, the engine is broken in this way."""
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[name](patch)
        yield


@contextmanager
def _as_it_is(*_: Any) -> Iterator[None]:
    yield


def mutation(change: Change) -> Change:
    MUTATIONS[change.__name__.replace("_", "-")] = change
    return change


def _replace(change: tuple[Any, str, Any], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(*change)


_ATTRIBUTES: dict[str, tuple[Any, str, Any]] = {
    # Nobody waits for what fills a buffer.
    "read-before-filled": (Fence, "before_read", lambda self: ()),
    # Who fills a buffer waits for whoever filled it before, and for none of its readers.
    "filled-before-read": (Fence, "before_fill", lambda self: self._filled),
    # What lies in the ring of updates is taken for what lay there.
    "weights-from-a-place-that-others-have": (
        RingSlice,
        "is_whole",
        property(lambda self: True, lambda self, is_whole: None),
    ),
    # Of a batch's parts, and of ranks, all count the same, whatever their targets.
    "micro-batches-weighted-alike": (losses, "_scaled", lambda loss, share: loss * (0.5 if share != 1.0 else 1.0)),
    # A recompute begins from what the forward has left in attributes.
    "kept-numbers-counted-twice": (condition.Condition, "attributes_again", _as_it_is),
    # What a unit puts into a mapping of its caller's stays in a copy.
    "results-written-into-arguments-lost": (router, "deliver", lambda filled, *_: filled[0]),
    # What is frozen or thawed between steps is trained as at first.
    "frozen-parameters-not-seen": (Unit, "freeze", lambda self, frozen: None),
    # Of a unit that no pass calls, all weights move.
    "thresholds-of-what-was-called-alone": (
        ZerothOrderUpdate,
        "_find_thresholds",
        lambda self, touched, thresholds: None,
    ),
    "rates-of-schedulers-not-followed": (OffloadOptimizer, "_prepare", lambda self: None),
    # Who reads, a checkpoint too, sees the weights from before the last step, and so does the next one.
    "update-that-was-put-off-dropped": (Updates, "flush", lambda self: self._due.in_slot.clear()),
    "update-that-was-put-off-outlives-a-load": (SlotUpdates, "forget", lambda self: None),
    "weights-updated-in-a-slot-do-not-go-down": (slot_updates, "copy_planes", lambda device, targets, sources: None),
    "losses-of-each-rank-alone": (Method, "sum", lambda self, *values: list(values)),
}
"""Mutations that put something else in the place of one attribute."""

MUTATIONS.update({name: partial(_replace, change) for name, change in _ATTRIBUTES.items()})


# -- waits -----------------------------------------------------------------------------------------------------------


@mutation
def ring_given_back_early(patch: pytest.MonkeyPatch) -> None:
    """A stretch is lent again while its last borrower uses it."""
    take = Ring.take

    def taken(self: Ring, num_bytes: int) -> Any:
        stretch = take(self, num_bytes)
        if stretch is not None:
            stretch.fills.clear()
        return stretch

    patch.setattr(Ring, "take", taken)


# -- the norm, clipping, updates -------------------------------------------------------------------------------------


@mutation
def norm_without_the_last_parameter(patch: pytest.MonkeyPatch) -> None:
    total = updates.total_norm
    for module in (policies, updates):
        patch.setattr(module, "total_norm", lambda squares: total(list(squares)[:-1] if len(squares) > 1 else squares))


@mutation
def norm_in_single_precision(patch: pytest.MonkeyPatch) -> None:
    def total(squares: Sequence[float]) -> float:
        found = 0.0
        for value in squares:
            found = struct.unpack("f", struct.pack("f", found + value))[0]
        return float(found**0.5)

    for module in (policies, updates):
        patch.setattr(module, "total_norm", total)


@mutation
def clip_coefficient_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    coefficient, last = policies.clip_coefficient, [1.0]

    def stale(norm: float, limit: float | None) -> float:
        last.append(coefficient(norm, limit))
        return last.pop(0)

    patch.setattr(policies, "clip_coefficient", stale)


@mutation
def steps_of_first_parameters_not_counted(patch: pytest.MonkeyPatch) -> None:
    count = RegionState.count

    def counted(self: RegionState, touched: Sequence[bool]) -> None:
        count(self, [False, *touched[1:]] if len(touched) > 1 else touched)

    patch.setattr(RegionState, "count", counted)


@mutation
def correction_skipped_for_one_region(patch: pytest.MonkeyPatch) -> None:
    """Of the speculative updates of a step, the one of region 1 stays as it was."""
    correct = TileUpdates.correct

    def corrected(self: TileUpdates, landed: Any, touched: Sequence[bool], scale: float) -> None:
        if landed.region.index != 1:
            correct(self, landed, touched, scale)

    patch.setattr(TileUpdates, "correct", corrected)


@mutation
def shard_cut_short(patch: pytest.MonkeyPatch) -> None:
    """Where a region is cut over ranks or in tiles, the last block of a piece that another follows is left out."""
    runs = update._runs

    def cut(state: Any, part: Any, touched: Sequence[bool], infos: Any, one_by_one: bool) -> Iterator[Any]:
        for span, alike in runs(state, part, touched, infos, one_by_one):
            end = min(span.stop, part.end - part.begin - 8) if part.end < state.region.numel else span.stop
            if span.start < end:
                yield slice(span.start, end), alike

    patch.setattr(update, "_runs", cut)


# -- gradients -------------------------------------------------------------------------------------------------------


@mutation
def second_contribution_added_twice(patch: pytest.MonkeyPatch) -> None:
    take = GradientFlow.take

    def taken(self: GradientFlow, piece: Piece, parameter: Any) -> None:
        region, position, _ = self._places[piece]
        if parameter.grad is not None and self.measures.touched[region.index][position]:
            parameter.grad = parameter.grad * 2
        take(self, piece, parameter)

    patch.setattr(GradientFlow, "take", taken)


@mutation
def tied_gradient_landed_early(patch: pytest.MonkeyPatch) -> None:
    """Gradients with several contributions land after the first one; the others come too late."""
    close, rest = GradientFlow.close, GradientFlow.land_rest

    def closed(self: GradientFlow, regions: Any) -> None:
        close(self, regions)
        for region in regions:
            early = region.index in self._lasting and region.index not in self.landing._landed and not self.accumulates
            if early and any(self.measures.touched[region.index]):
                lasting = self._lasting[region.index].clone()
                self.landing.land(region, lasting, Fence("accumulated gradients"), is_final=True)

    def landed_rest(self: GradientFlow) -> None:
        kept = dict(self._lasting)
        for index in self.landing._landed:
            if not self.accumulates:
                self._lasting.pop(index, None)
        rest(self)
        self._lasting = kept

    patch.setattr(GradientFlow, "close", closed)
    patch.setattr(GradientFlow, "land_rest", landed_rest)


@mutation
def padding_not_zeroed(patch: pytest.MonkeyPatch) -> None:
    begin = GradientFlow.begin_step

    def begun(self: GradientFlow) -> None:
        begin(self)
        self._ragged = {index: [] for index in self._ragged}

    patch.setattr(GradientFlow, "begin_step", begun)


# -- recompute and kept graphs ---------------------------------------------------------------------------------------


@mutation
def moving_buffers_not_put_back(patch: pytest.MonkeyPatch) -> None:
    """The judge would find it, and have graphs kept."""
    patch.setattr(Judge, "_compare", lambda *_, **__: "")
    patch.setattr(condition.Condition, "values_again", _as_it_is)


@mutation
def generator_not_put_back_in_recompute(patch: pytest.MonkeyPatch) -> None:
    recompute = call.Call._recompute

    def without(self: call.Call, number: int) -> Any:
        self._micro_batches[number].before.random = self._runner.device.random_state()
        return recompute(self, number)

    patch.setattr(call.Call, "_recompute", without)


@mutation
def kept_graph_over_a_stale_offset(patch: pytest.MonkeyPatch) -> None:
    """Weights that a kept graph saved are looked for where the unit lay when it was first asked for."""
    view = Slots.view

    def stale(self: Slots, cargo: int, dtype: torch.dtype, distance: int, shape: Any, stride: Any) -> torch.Tensor:
        places = self.__dict__.setdefault("_mutated", {})
        slot = self._lying.get(cargo)
        assert slot is not None
        begin = min(places.setdefault(cargo, slot.begin), self._memory.nbytes - (slot.end - slot.begin))
        own, slot.begin, slot.end = (slot.begin, slot.end), begin, begin + slot.end - slot.begin
        try:
            return view(self, cargo, dtype, distance, shape, stride)
        finally:
            slot.begin, slot.end = own

    patch.setattr(Slots, "view", stale)


# -- habits of users' code -------------------------------------------------------------------------------------------


@mutation
def frozen_parameters_moved_by_forwards(patch: pytest.MonkeyPatch) -> None:
    touched = ZerothOrderUpdate.touched
    patch.setattr(ZerothOrderUpdate, "touched", lambda self, step, seed, frozen=(): touched(self, step, seed))


# -- without a backward ----------------------------------------------------------------------------------------------


@mutation
def update_that_was_put_off_made_twice(patch: pytest.MonkeyPatch) -> None:
    put = SlotUpdates.put

    def put_twice(self: SlotUpdates, works: Any) -> None:
        put(self, {region: lambda *how, work=work: (work(*how), work(*how))[1] for region, work in works.items()})

    patch.setattr(SlotUpdates, "put", put_twice)


@mutation
def update_along_the_directions_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    estimate = zeroth_order_update.ZerothOrderStep
    patch.setattr(zeroth_order_update, "ZerothOrderStep", lambda step, *rest: estimate(step - 1, *rest))


@mutation
def update_of_blocks_that_were_not_chosen(patch: pytest.MonkeyPatch) -> None:
    update_of = ZerothOrderUpdate.update

    def updated(self: ZerothOrderUpdate, *how: Any) -> None:
        rule, self.rule = self.rule, replace(self.rule, layer_fraction=1.0)
        try:
            update_of(self, *how)
        finally:
            self.rule = rule

    patch.setattr(ZerothOrderUpdate, "update", updated)


@mutation
def mask_by_weights_that_have_moved(patch: pytest.MonkeyPatch) -> None:
    """Which weights are small is found from one side of them."""
    threshold = MeZO.threshold
    patch.setattr(MeZO, "threshold", lambda self, weights: threshold(self, weights + self.eps))


@mutation
def all_directions_are_the_first(patch: pytest.MonkeyPatch) -> None:
    """Of those along which the loss is measured."""
    fill = Perturbed._fill
    patch.setattr(Perturbed, "_fill", lambda self, unit, _direction, place: fill(self, unit, 0, place))


@mutation
def passes_draw_from_one_generator(patch: pytest.MonkeyPatch) -> None:
    put_back = interleaved._PassState.put_back

    def without(self: Any, now: Any) -> None:
        self._random = now._random
        put_back(self, now)

    patch.setattr(interleaved._PassState, "put_back", without)


# -- disk and checkpoints --------------------------------------------------------------------------------------------


@mutation
def tail_of_a_record_not_written(patch: pytest.MonkeyPatch) -> None:
    write = Stripes.write

    def cut(self: Stripes, offset: int, memory: torch.Tensor) -> None:
        write(self, offset, memory[:-4096] if memory.nbytes > 4096 else memory)

    patch.setattr(Stripes, "write", cut)


@mutation
def low_halves_not_loaded(patch: pytest.MonkeyPatch) -> None:
    read = Reader.read

    def without(self: Reader, name: str, plane: str, begin: int, into: torch.Tensor) -> None:
        read(self, name, plane, begin, into)
        if plane == "low":
            into.zero_()

    patch.setattr(Reader, "read", without)


@mutation
def second_moments_not_loaded(patch: pytest.MonkeyPatch) -> None:
    read = Reader.read

    def without(self: Reader, name: str, plane: str, begin: int, into: torch.Tensor) -> None:
        if plane != "exp_avg_sq":
            read(self, name, plane, begin, into)

    patch.setattr(Reader, "read", without)
