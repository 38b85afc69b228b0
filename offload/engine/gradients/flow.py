"""A step's gradients, from a unit's backward to the host: summed in fp32, measured, rounded once.

A region with one contribution (from one unit, used once) passes through a shared buffer and is copied to the host at
once, while the next unit computes. A region with several contributions (tied weights, a unit used twice, resident
weights) is summed in an fp32 device buffer and is copied when the backward ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from offload.engine.gradients.norms import Measures
from offload.engine.gradients.rank_sums import open_exchange
from offload.engine.gradients.transfer import GradientTransfer
from offload.errors import ConfigError
from offload.lanes.ticket import Fence
from offload.layout.regions import Piece, Region
from offload.native import kernels
from offload.planning.memory import BUFFER, EXPERT_BUFFER
from offload.planning.settings import Settings
from offload.tiers.lease import Ring, RingSlice
from offload.tiers.store import Store

_FIX = "Raise --offload.device_memory, or --train.head_chunk_bytes if the gradients of a chunked head are accumulated."


GradientObserver = Callable[[Piece, torch.Tensor], None]
"""Callback for a parameter piece and a gradient contribution [numel] in the compute dtype."""
_GRAD = vars(torch._C.TensorBase)["grad"]  # past `grad` of subclasses, which is the gradient in the engine


def take_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Take autograd's own gradient out of a Parameter over device weights."""
    gradient: torch.Tensor | None = _GRAD.__get__(parameter)
    _GRAD.__set__(parameter, None)
    return gradient


_LARGE_NUMEL = 1 << 20
"""Elements of a gradient from which a copy in fp32 matters more than the calls of a kernel of our own."""


def _add(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient to a sum in place. On a CPU, torch would first make a copy of the whole gradient in fp32."""
    is_copied = total.is_cpu and gradient.dtype != torch.float32 and total.dtype == torch.float32
    if is_copied and gradient.numel() >= _LARGE_NUMEL and gradient.is_contiguous():
        kernels.accumulate(total, gradient)
    else:
        total.add_(gradient)


class GradientFlow:
    """Takes gradients out of autograd one parameter at a time (only one is in memory), and sends them on region by
    region.

    `measures`: norms over all gradients. `are_complete`: gradients are summed and measured, and no more may be added.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        staging: torch.Tensor,
        sizes: Mapping[str, int],
        measures: Measures,
    ) -> None:
        """`staging`: memory on the tier of the states, for gradients on their way.

        `sizes`: device buffer sizes in bytes, by plan name.
        """
        self._store = store
        self._infos = store.infos
        self._device = store.device
        self._lanes = store.lanes
        self._exist = settings.optimizer.has_gradients

        # The present step.
        self.sums_in_fp32 = False
        """Micro-batches or chunks are summed in the buffer, in fp32."""
        self._repeats = False
        self.are_complete = False
        self._observer: GradientObserver | None = None

        # Device memory: a ring for gradients that leave at once, buffers for those with several contributions.
        num_pieces = Counter(parameter for region in store.states for parameter in region.parameters)
        self._planned_wide = {
            region
            for region in store.states
            if settings.splits or any(num_pieces[parameter] > 1 for parameter in region.parameters)
        }
        """Regions with planned room in the ring in fp32."""
        self._buffer = Ring(self._device.allocate(BUFFER, sizes[BUFFER]), BUFFER)
        self._record_buffer = Ring(self._device.allocate(EXPERT_BUFFER, sizes.get(EXPERT_BUFFER, 0)), EXPERT_BUFFER)
        self._open: dict[Region, tuple[torch.Tensor, RingSlice]] = {}
        self._lasting: dict[Region, torch.Tensor] = {}
        self._lasting_so_far: set[Region] = set()
        """Keys in `_lasting` for this step only."""
        self._idle: dict[Region, torch.Tensor] = {}
        """Unused buffers from earlier steps."""

        # The way on, to the update.
        self.measures = measures
        self.exchange = open_exchange(store, measures, sizes, settings)
        self.transfer = GradientTransfer(store, measures, self.exchange, staging)

        # Places of parameters in their regions.
        self._places: dict[Piece, tuple[Region, int, slice]] = {}
        self._ragged: dict[Region, list[slice]] = {}
        """Padding behind the pieces, by region."""
        for region, state in store.states.items():
            spans = [state.span(position) for position in range(len(state.region.pieces))]
            for position, (piece, span) in enumerate(zip(region.pieces, spans, strict=True)):
                self._places[piece] = region, position, span
            padding = zip(spans, (*region.offsets[1:], region.numel), strict=True)
            self._ragged[region] = [slice(span.stop, end) for span, end in padding if span.stop < end]
        self.end_step()

    def begin_step(self) -> None:
        self._end_lasting()
        self.measures.begin_step()
        self.transfer.begin_step()
        self._open.clear()
        self._buffer.reset()
        self._record_buffer.reset()
        self.sums_in_fp32 = False
        self._repeats = False
        self.are_complete = False
        self._observer = None

    def end_step(self) -> None:
        """Drop the gradients of a step given up, and take none until the next step begins."""
        self.begin_step()
        self.are_complete = True

    def accumulate(self, indices: Collection[int], staging: torch.Tensor) -> None:
        """Sum the contributions to the regions with these indices, and no others, in the store's fp32 planes."""
        self._end_lasting()
        self.transfer.accumulate(indices, staging)
        for flat in self._idle.values():
            self._device.ledger.release("accumulated gradients", flat.nbytes)
        self._idle.clear()

    def _end_lasting(self) -> None:
        """Release buffers that last for one step only.

        The copy and summation order must not depend on earlier steps: a resumed run has not made them.
        """
        self._idle |= {region: self._lasting.pop(region) for region in self._lasting_so_far}
        self._lasting_so_far.clear()

    @property
    def has_sums(self) -> bool:
        """True if the gradients of some regions are summed in the store, so they are complete only at the end."""
        return bool(self.transfer.accumulated)

    def accumulates(self, region: Region) -> bool:
        """Return whether the gradients of a region are summed in the store."""
        return region.index in self.transfer.accumulated

    def lasts(self, region: Region) -> bool:
        """Return whether gradients of a region stay on the device until the whole backward pass has ended."""
        return region in self._lasting

    @property
    def buffer_bytes(self) -> int:
        """Size in bytes: device buffer for passing gradients."""
        return self._buffer.memory.nbytes

    def resize(self, num_bytes: int) -> None:
        """Replace the buffer by another one with `num_bytes` bytes, between two steps."""
        self._device.ledger.drop(BUFFER)  # before the new one: a ledger counts against the budget
        self._buffer.free()
        self._buffer = Ring(self._device.allocate(BUFFER, num_bytes), BUFFER)

    def make_lasting(self, region: Region, for_good: bool = True) -> None:
        """Give a region with several contributions its own fp32 device buffer, permanently or for this step."""
        if not self._exist or (self._observer is not None and not for_good):
            return
        if for_good:
            self._lasting_so_far.discard(region)
        if region.trainable and region not in self._lasting:
            flat = self._idle.pop(region, None)
            if flat is None:
                flat = self._device.allocate("accumulated gradients", 4 * region.numel, _FIX).view(torch.float32)
            so_far = self.transfer.sum_so_far(region)
            if so_far is not None:  # the sum starts with this step's earlier passes
                flat[self._store.sharding.shard(region)].copy_(so_far)
                touched = self.measures.touched[region.index]
                for position, has in enumerate(touched):  # another rank may have had the gradients summed here
                    touched[position] = has or bool(flat[self._store.states[region].span(position)].any())
            self._lasting[region] = flat
            if not for_good:
                self._lasting_so_far.add(region)

    def open(self, regions: Sequence[Region]) -> None:
        """Prepare a backward for one unit use. After the return, compute may write the unit's gradients."""
        if self._observer is not None:
            return
        self.transfer.policy.open()
        # Chunks of a head add to the gradients of the first one.
        if self._repeats and any(region in self._open for region in regions):
            return
        passing = [region for region in regions if region.trainable and region not in self._lasting]
        if not passing:
            return
        # Spare room by chance must not change the gradient order: clipping may depend on this order.
        is_too_wide = self._repeats and any(region.is_short and region not in self._planned_wide for region in passing)
        stretch = None
        if not is_too_wide:
            stretch = self._buffer.take(sum(map(self._passing_bytes, passing)))
        if stretch is None:
            for region in passing:
                self.make_lasting(region, for_good=False)
            return
        self._lanes.compute_after((), users=stretch.users)
        self._lay_out(passing, stretch)
        for region in passing:
            flat = self._open[region][0]
            if self.accumulates(region):  # a parameter without a gradient in this pass adds nothing
                flat.zero_()
            for span in self._ragged[region]:  # padding must stay zero, but held another unit's gradients
                flat[span].zero_()

    def open_record(self, regions: Sequence[Region]) -> None:
        """Prepare the backward for an expert record, inside the unit's backward.

        Its gradients start at 0: some experts may have no tokens.
        """
        if self._observer is None:
            passing = [region for region in regions if region.trainable]
            stretch = self._record_buffer.take_planned(sum(map(self._passing_bytes, passing)))
            self._lanes.compute_after((), users=stretch.users)
            self._lay_out(passing, stretch)
            stretch.flat.zero_()

    def close_record(self, regions: Sequence[Region], frozen: frozenset[int]) -> None:
        """Send on an expert record's gradients, except for the parameters in `frozen`."""
        if self._observer is None:
            # First: regions without any gradient are not sent.
            self.measures.touch(regions, frozen)
            self.close(regions)

    def send_zeros(self, regions: Sequence[Region], frozen: frozenset[int]) -> None:
        """Record zero gradients for an expert record without tokens, without a D2H copy."""
        if self._observer is None:
            self.measures.touch(regions, frozen)
            for region in regions:
                if region.trainable and any(self.measures.touched[region.index]):
                    self.transfer.send_zeros(region)

    def _passing_dtype(self, region: Region) -> torch.dtype:
        if self.sums_in_fp32:
            return torch.float32
        return region.dtype

    def _passing_bytes(self, region: Region) -> int:
        return region.numel * self._passing_dtype(region).itemsize

    def _lay_out(self, regions: Sequence[Region], stretch: RingSlice) -> None:
        """Open regions one after the other in a buffer stretch."""
        end = 0
        for region in regions:
            begin, end = end, end + self._passing_bytes(region)
            self._open[region] = stretch.flat[begin:end].view(self._passing_dtype(region)), stretch

    @contextmanager
    def repeated(self, regions: Sequence[Region]) -> Iterator[None]:
        """Context: gradients from repeated unit uses add up, and leave the device at the end (head chunks)."""
        summed_in_fp32 = self.sums_in_fp32
        self._repeats = True
        self.sums_in_fp32 = True  # a sum over many chunks would lose digits in 16 bits
        try:
            yield
        finally:
            self._repeats = False
            self.sums_in_fp32 = summed_in_fp32
        self.close(regions)

    def take(self, piece: Piece, parameter: nn.Parameter) -> None:
        """Take a Parameter's gradient out of autograd. `piece`: the Parameter's place in the model parameter."""
        gradient = take_gradient(parameter)
        if gradient is None:  # an argument the unit did not use
            return
        region, position, span = self._places[piece]
        index = piece.parameter
        if gradient.is_sparse:
            raise ConfigError(
                f"parameter {self._infos[index].name} in unit {region.name} has a sparse gradient, but only dense "
                "gradients are supported. Build the module with sparse=False."
            )
        gradient = gradient.reshape(-1)
        if self._observer is not None:
            self._observer(piece, gradient)
            return
        if self.are_complete:
            raise ConfigError(
                f"parameter {self._infos[index].name} in unit {region.name} received a gradient outside a step: before "
                "a first forward, or after engine.grad_norm(), a read of parameter.grad or an update had measured the "
                "gradients of this step. Begin each step with a forward of the model, and read and clip after the last "
                "backward."
            )
        touched = self.measures.touched[region.index]
        lasts = region in self._lasting
        # The gradient may be one of several to be added, on this rank or over ranks.
        is_summed = lasts or self.sums_in_fp32 or self._repeats or self.accumulates(region) or self.measures.has_peers
        flat = self._lasting[region] if lasts else self._open[region][0]
        if touched[position]:
            self.measures.record_square(piece, None)  # a square of the first contribution alone is wrong
            _add(flat[span], gradient)
        elif flat.is_cpu and flat.dtype == gradient.dtype and not is_summed:
            # Measure the gradient while it is still in the cache.
            self.measures.record_square(piece, kernels.copy_sum_squares(gradient, flat[span]))
        else:
            flat[span].copy_(gradient)
        touched[position] = True

    def close(self, regions: Sequence[Region]) -> None:
        """Hand the final gradients to the reduction and the copy to the host. Call it after the backward of a unit."""
        if self._repeats or self._observer is not None:
            return
        for region in regions:
            buffer = self._open.pop(region, None)
            if buffer is None:
                continue
            flat, stretch = buffer
            if self.transfer.sends(region):
                self.transfer.send(region, flat, stretch.fence)
            stretch.close()

    @property
    def discards_gradients(self) -> bool:
        """True if gradients are from a trial, or only their norm is needed."""
        return self._observer is not None or self.transfer.policy.drops

    @property
    def is_observed(self) -> bool:
        """True in a trial: the gradients are compared, and no update follows."""
        return self._observer is not None

    def observe(self, observer: GradientObserver | None) -> None:
        """Pass gradients to `observer` instead of the host, for trials (also during an own loop's step).

        None: end this.
        """
        self._observer = observer

    def free(self) -> None:
        self._buffer.free()
        self._record_buffer.free()
        self.transfer.free()
        self._lasting.clear()
        self._idle.clear()
        self._open.clear()

    def finish(self) -> None:
        """Wait until the measures are final. All gradients are on their way. Collective."""
        if not self.are_complete:
            self.transfer.finish()
            self.are_complete = True

    def send_rest(self) -> None:
        """Send on the gradients summed on the device, after the backward."""
        if self.are_complete:
            return
        for region, flat in self._lasting.items():
            if self.transfer.sends(region):
                # A new fence: these buffers belong to one region and are written by compute alone.
                self.transfer.send(region, flat, Fence("accumulated gradients"), is_final=True)
