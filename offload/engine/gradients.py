"""A step's gradients, from the backward of a unit to the host: summed in fp32 where there are several contributions,
measured, rounded once.

A region whose only contribution comes from one use of one unit passes through a shared buffer and lands at once, behind
the compute of the next unit. A region with several (tied weights, a unit used twice, weights that stay on the device)
waits in an fp32 buffer on the device and lands when the backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from offload import native
from offload.engine.measures import Measures
from offload.engine.reduction import Reduction
from offload.errors import ConfigError, OffloadError
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.partition.layout import ParameterInfo, Region
from offload.telemetry.counters import Counters
from offload.tiers.device import Device
from offload.tiers.ring import Ring, Stretch
from offload.tiers.store import Store, plane_dtype

_CHUNK = 1 << 24
_FIX = "Raise --offload.device_memory; or --train.head_chunk_bytes, where it is the head that adds up over its chunks."


class GradientFlow:
    """Takes gradients parameter by parameter (so that one of them is alive at a time) and lands them region by region.

    `landed(region, flat, fence)` is called once a region's gradients are on their way to `flat` (over the elements that
    this rank updates), or to disk (None); `opens()`, once, before the first backward of a unit. Over several ranks they
    are summed on the way, and every trained region lands that was opened, as another rank may have what this one lacks.
    `measures` has what is known of all of them.
    """

    def __init__(
        self,
        store: Store,
        infos: Sequence[ParameterInfo],
        regions: Sequence[Region],
        device: Device,
        lanes: Lanes,
        counters: Counters,
        *,
        buffer_bytes: int,
        staging: torch.Tensor,
        shards_bytes: int = 0,
        scratch_bytes: int = 0,
        has_wide_buffer: bool = False,
        debug: bool = False,
    ) -> None:
        """`shards_bytes`, `scratch_bytes`: of the device, for sums over several ranks. `has_wide_buffer`: the plan has
        room in the buffer for any region in fp32.
        """
        self._has_wide_buffer = has_wide_buffer
        self._store, self._infos, self._regions, self._device, self._counters = store, infos, regions, device, counters
        self._lanes, self._debug = lanes, debug
        on_host = store.tier == "cpu"
        self._down, self._adding = (lanes.d2h, lanes.update) if on_host else (lanes.here, lanes.here)
        self.accumulates = False
        self.is_wide = False  # several micro-batches or chunks add up in the buffer, in fp32
        self._repeats = self.drops = False
        self.landed: Callable[[Region, torch.Tensor | None, Fence], None] | None = None
        self.opens: Callable[[], None] | None = None
        self._buffer = Ring(device.allocate("gradient buffer", buffer_bytes), "gradient buffer")
        self._staging = Ring(staging, "gradient staging")
        self._lasting: dict[int, torch.Tensor] = {}
        self._lasting_so_far: set[int] = set()  # of these, what is not for good
        self._places: dict[int, tuple[Region, int]] = {
            index: (region, position) for region in regions for position, index in enumerate(region.parameters)
        }
        self._open: dict[int, tuple[torch.Tensor, Stretch]] = {}
        self._tickets: list[Ticket] = []
        self.measures = Measures(store, infos, regions, device, lanes)
        self._reduction = None
        if store.comm.size > 1:
            self._reduction = Reduction(
                store,
                self.measures,
                lanes,
                counters,
                shards=device.allocate("gradient shards", shards_bytes),
                scratch=device.allocate("reduction scratch", scratch_bytes),
                debug=debug,
            )
        self._ragged = {
            region.index: [
                slice(offset + size, end)
                for offset, size, end in zip(
                    region.offsets, region.sizes, (*region.offsets[1:], region.numel), strict=True
                )
                if offset + size < end
            ]
            for region in regions
        }
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        self.measures.begin_step()
        self._landed: set[int] = set()
        self._tickets.clear()
        if self._reduction is not None:
            self._reduction.begin_step()
        self._open.clear()
        self._buffer.reset()
        self._staging.reset()
        self.is_wide = self._repeats = self.drops = False
        self.opens = None

    def accumulate(self, accumulates: bool, staging: torch.Tensor) -> None:
        """From now on sum over several backward passes, in the fp32 planes that the store holds; or no more. What lasts
        for the sake of a pass of the other kind does no longer: in which order is added must not depend on the past.
        """
        self.accumulates, self._staging = accumulates, Ring(staging, "gradient staging")
        for index in self._lasting_so_far:
            self._device.ledger.release("lasting gradients", self._lasting.pop(index).nbytes)
        self._lasting_so_far.clear()

    def lasts(self, region: Region) -> bool:
        """True where a region's gradients land only once the backward is over."""
        return region.index in self._lasting

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the device's buffer through which gradients pass."""
        return self._buffer.memory.nbytes

    def resize(self, num_bytes: int) -> None:
        """Let gradients pass through a buffer of another size, between two steps."""
        self._device.ledger.drop("gradient buffer")
        self._buffer = Ring(torch.empty(0, dtype=torch.uint8), "")
        self._buffer = Ring(self._device.allocate("gradient buffer", num_bytes), "gradient buffer")

    def make_lasting(self, region: Region, for_good: bool = True) -> None:
        """Give a region with several contributions its own fp32 buffer on the device; or, not `for_good`, until passes
        are of another kind.
        """
        if for_good:
            self._lasting_so_far.discard(region.index)
        if region.trainable and region.index not in self._lasting:
            flat = self._device.allocate("lasting gradients", 4 * region.numel, _FIX).view(torch.float32)
            if self.accumulates and region.index in self._landed:  # what this step has summed so far begins the sum
                plane = self._store[region].gradients
                assert plane is not None
                self._lanes.wait(self._tickets)
                flat[self._store.sharding.shard(region)].copy_(plane[self._summed_here(region)])
                touched = self.measures.touched[region.index]
                for position, has in enumerate(touched):  # another rank may have had what is summed here
                    touched[position] = has or bool(flat[self._store[region].span(position)].any())
            self._lasting[region.index] = flat
            if not for_good:
                self._lasting_so_far.add(region.index)

    def open(self, regions: Sequence[Region]) -> None:
        """Prepare for the backward of one use of a unit: compute may write its gradients once this returns."""
        opens, self.opens = self.opens, None
        if opens is not None:
            opens()
        if self._repeats and any(region.index in self._open for region in regions):
            return
        passing = [region for region in regions if region.trainable and region.index not in self._lasting]
        if not passing:
            return
        dtypes = [torch.bfloat16 if region.is_split and not self.is_wide else torch.float32 for region in passing]
        sizes = [region.numel * dtype.itemsize for region, dtype in zip(passing, dtypes, strict=True)]
        # Room that happens to be there must not decide in which order gradients land: clipping may go by it.
        is_too_wide = self._repeats and not self._has_wide_buffer and any(region.is_split for region in passing)
        stretch = None if is_too_wide else self._buffer.take(sum(sizes))
        if stretch is None:
            for region in passing:
                self.make_lasting(region, for_good=False)
            return
        self._lanes.compute_after((), behind=stretch.after)
        end = 0
        for region, dtype, size in zip(passing, dtypes, sizes, strict=True):
            flat = stretch.flat[end : end + size].view(dtype)
            end += size
            if self.accumulates:  # a parameter without a gradient in this pass adds nothing
                flat.zero_()
            for span in self._ragged[region.index]:  # another unit's gradients lay here: padding must stay zero
                flat[span].zero_()
            self._open[region.index] = flat, stretch

    @contextmanager
    def repeated(self, regions: Sequence[Region]) -> Iterator[None]:
        """Within, uses of the same units add up, and land at the end (the chunks of a head)."""
        was_wide = self.is_wide
        self._repeats, self.is_wide = True, True
        try:
            yield
        finally:
            self._repeats, self.is_wide = False, was_wide
        self.close(regions)

    @property
    def _sums_up(self) -> bool:
        """True where a gradient is one of several that are added."""
        return self.is_wide or self._repeats or self.accumulates

    def take(self, index: int, parameter: nn.Parameter) -> None:
        """Move the gradient of a Parameter (the model's parameter number `index`) out of autograd's hands."""
        if parameter.grad is None:  # it went into a unit as an argument, and the unit did not use it
            return
        region, position = self._places[index]
        if parameter.grad.is_sparse:
            raise ConfigError(
                f"parameter {self._infos[index].name} in unit {region.name} gets a sparse gradient: only dense ones "
                "are streamed. Make the module with sparse=False."
            )
        gradient, parameter.grad = parameter.grad.reshape(-1), None
        if self.drops:  # those of a recording, which an own loop may need in the middle of a step
            return
        span = slice(region.offsets[position], region.offsets[position] + region.sizes[position])
        touched = self.measures.touched[region.index]
        flat = self._lasting.get(region.index)
        is_all = flat is None and not self._sums_up and self._reduction is None
        if flat is None:
            flat = self._open[region.index][0]
        if touched[position]:
            self.measures.know(index, None)
            flat[span].add_(gradient)
        elif is_all and flat.is_cpu and flat.dtype == gradient.dtype:
            # Measure what autograd has just written, while it is in the cache.
            self.measures.know(index, native.copy_sum_squares(gradient, flat[span]))
        else:
            flat[span].copy_(gradient)
        touched[position] = True

    def close(self, regions: Sequence[Region]) -> None:
        """Land what is final after the backward of one use of a unit."""
        if self._repeats:
            return
        for region in regions:
            found = self._open.pop(region.index, None)
            if found is None:
                continue
            flat, stretch = found
            if self._lands(region):
                self._land(region, flat, stretch.fence)
            stretch.is_open = False

    def free(self) -> None:
        """Let go of every buffer."""
        empty = torch.empty(0, dtype=torch.uint8)
        self._buffer, self._staging = Ring(empty, ""), Ring(empty, "")
        if self._reduction is not None:
            self._reduction.free()
        self._lasting.clear()
        self._open.clear()

    def land_rest(self) -> None:
        """The backward is over: land what waited on the device."""
        for index, flat in self._lasting.items():
            region = self._store.states[index].region
            if self._lands(region):
                self._land(region, flat, Fence("lasting gradients"))

    def finish(self) -> None:
        """Wait until everything has landed, sum and round what was accumulated: afterwards the measures and the planes
        are final. The one wait of the host in a step.
        """
        self._lanes.wait(self._tickets)
        if self.accumulates:
            for state in self._store.states:
                if state.gradients is not None and state.region.index in self._landed:
                    self._finish_sum(state.region, state.gradients)
            self._lanes.wait(self._tickets)
        self._landed.clear()
        self.measures.finish()

    def _finish_sum(self, region: Region, plane: torch.Tensor) -> None:
        """Measure what was summed over several passes, and round it."""
        own = plane[self._summed_here(region)]
        if self._reduction is not None:
            self.measures.measure_shard(region, own, agrees=False)
        else:
            self._note(self.measures.measure(region, own))
        if region.is_split:
            native.round_bf16_(own)
        if len(own) < len(plane):
            what = f"all-gather of the gradients of {region.name}"
            store = self._store
            self._note(store.exchanges.submit(lambda: store.comm.all_gather(plane, own, what), name=what))
            self._counters.all_gather_elements += region.numel

    def _note(self, ticket: Ticket | None) -> None:
        if ticket is not None:
            self._tickets.append(ticket)

    def _lands(self, region: Region) -> bool:
        return self._reduction is not None or any(self.measures.touched[region.index])

    def _summed_here(self, region: Region) -> slice:
        """Return which of the elements that this rank updates it sums up itself: in stage 0 not all."""
        shard, begin = self._store.sharding.shard(region), self._store[region].begin
        return slice(shard.start - begin, shard.stop - begin)

    def _summed(
        self, region: Region, flat: torch.Tensor, source: Fence
    ) -> tuple[torch.Tensor, Fence, Sequence[Ticket]]:
        """Return what is to come down of a region's gradients, the fence of its memory, and after what it is there."""
        if self._reduction is None:
            return flat, source, self._lanes.mark()
        measure = None
        if not self.accumulates:  # else when all passes are over
            # Whoever updates in the backward needs the norm so far.
            measure = partial(self.measures.measure_shard, region, agrees=self.landed is not None)
        whole = not self.accumulates and self._store.sharding.num_ranges == 1
        flat, source, ticket = self._reduction.reduce(region, flat, source, measure=measure, whole=whole)
        return flat, source, (ticket,)

    def _land(self, region: Region, flat: torch.Tensor, source: Fence) -> None:
        if self.accumulates:
            self._add(region, flat, source)
            return
        if region.index in self._landed:
            raise OffloadError(
                f"unit {' = '.join(region.units)} gave a second gradient after its first had left the device: the "
                "model took another path than in the recording pass. Use engine.model and engine.backward, which add "
                "up any number of passes."
            )
        self._landed.add(region.index)
        if self._reduction is None:
            self._note(self.measures.measure(region, flat))
        flat, source, after = self._summed(region, flat, source)
        state = self._store[region]
        if state.lands_on_disk:
            for part in state.parts:
                loan = part.land("gradients")
                piece = flat[part.begin - state.begin : part.end - state.begin]
                loan.changed(self._bring_down(region, loan.planes["gradients"], piece, source, after, loan.behind))
            if self.landed is not None:
                self.landed(region, None, Fence("gradients on disk"))
            return
        target, fence, stretch = state.gradients, state.landing, None
        behind = fence.before_fill()
        if target is None:
            target, stretch = self._staged(flat, plane_dtype(region, "gradients"))
            fence, behind = stretch.fence, stretch.after
        fence.fill(self._bring_down(region, target, flat, source, after, behind))
        if self.landed is not None:
            self.landed(region, target, fence)
        if stretch is not None:
            stretch.is_open = False

    def _add(self, region: Region, flat: torch.Tensor, source: Fence) -> None:
        """Add a region's gradients to its fp32 plane."""
        state = self._store[region]
        plane, fence = state.gradients, state.landing
        assert plane is not None
        plane = plane[self._summed_here(region)]
        first = region.index not in self._landed
        self._landed.add(region.index)
        is_lasting = region.index in self._lasting  # summed over the whole step already
        flat, source, after = self._summed(region, flat, source)
        if is_lasting:
            fence.fill(self._bring_down(region, plane, flat, source, after, fence.before_fill()))
            return
        # What ranks have added up is rounded once, when all passes are over.
        dtype = plane_dtype(region, "gradients") if self._reduction is None else torch.float32
        staged, stretch = self._staged(flat, dtype)
        stretch.fence.fill(self._bring_down(region, staged, flat, source, after, stretch.after))

        def add() -> None:
            if first:
                plane.copy_(staged)
            else:
                native.accumulate(plane, staged)

        ticket = self._adding.submit(
            add, after=stretch.fence.before_read(), behind=fence.before_fill(), name=f"add {region.name}"
        )
        stretch.fence.read(ticket)
        stretch.is_open = False
        fence.fill(ticket)
        self._tickets.append(ticket)

    def _staged(self, flat: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Stretch]:
        stretch = self._staging.take(flat.numel() * dtype.itemsize)
        assert stretch is not None, "staging has room for the largest region"
        return stretch.flat.view(dtype), stretch

    def _bring_down(
        self,
        region: Region,
        target: torch.Tensor,
        flat: torch.Tensor,
        source: Fence,
        after: Sequence[Ticket],
        behind: Sequence[Ticket],
    ) -> Ticket:
        """Copy a region's gradients to where they wait, rounded to its dtype, without a second copy of the whole."""

        def copy() -> None:
            for start in range(0, len(flat), _CHUNK):
                part = slice(start, start + _CHUNK)
                self._device.copy(target[part], flat[part].to(target.dtype))
            if self._debug and source.kind == "gradient buffer":
                flat.fill_(float("nan"))

        ticket = self._down.submit(copy, after=after, behind=behind, name=region.name, num_bytes=target.nbytes)
        source.read(ticket)
        self._tickets.append(ticket)
        if self._store.tier == "cpu":
            self._counters.d2h_bytes += target.nbytes
        return ticket
