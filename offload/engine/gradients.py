"""A step's gradients, from the backward of a unit to the host: summed in fp32 where there are several contributions,
measured, rounded once.

A region whose only contribution comes from one use of one unit passes through a shared buffer and lands at once. A
region with several (tied weights, a unit used twice, weights that stay on the device) waits in an fp32 buffer on the
device and lands when the backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from offload import native
from offload.errors import ConfigError, OffloadError
from offload.partition.layout import ParameterInfo, Region
from offload.telemetry.counters import Counters
from offload.tiers.device import Device
from offload.tiers.store import Store

_CHUNK = 1 << 24
_FIX = "Raise --offload.device_memory; or --train.head_chunk_bytes, where it is the head that adds up over its chunks."


class GradientFlow:
    """Takes gradients parameter by parameter (so that one of them is alive at a time) and lands them region by region.

    `landed(region, flat)` is called as soon as a region's gradients are final when they are not kept (`Store` has no
    gradient planes). `touched[region.index][position]` tells which parameters received one; `squares[parameter]` is the
    fp64 sum of squares of its fp32 gradient.
    """

    def __init__(
        self,
        store: Store,
        infos: Sequence[ParameterInfo],
        regions: Sequence[Region],
        device: Device,
        counters: Counters,
        *,
        buffer_bytes: int,
        staging: torch.Tensor,
    ) -> None:
        self._store, self._infos, self._regions, self._device, self._counters = store, infos, regions, device, counters
        self.accumulates = False
        self.is_wide = False  # several micro-batches or chunks add up in the buffer, in fp32
        self._repeats = False
        self._end = 0
        self.landed: Callable[[Region, torch.Tensor], None] | None = None
        self._buffer = device.allocate("gradient buffer", buffer_bytes)
        self._staging = staging
        self._lasting: dict[int, torch.Tensor] = {}
        self._places: dict[int, tuple[Region, int]] = {
            index: (region, position) for region in regions for position, index in enumerate(region.parameters)
        }
        self._open: dict[int, torch.Tensor] = {}
        self._pending: list[tuple[Region, torch.Tensor]] = []
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
        self.touched: dict[int, list[bool]] = {}
        self.squares: list[float] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        self.touched = {region.index: [False] * len(region.parameters) for region in self._regions if region.trainable}
        self.squares = [0.0] * len(self._infos)
        self._landed: set[int] = set()
        self._pending.clear()
        self._open.clear()
        self.is_wide = self._repeats = False

    def accumulate(self, staging: torch.Tensor) -> None:
        """From now on sum over several backward passes, in the fp32 planes that the store holds."""
        self.accumulates, self._staging = True, staging

    def make_lasting(self, region: Region) -> None:
        """Give a region with several contributions its own fp32 buffer on the device."""
        if region.trainable and region.index not in self._lasting:
            flat = self._device.allocate("lasting gradients", 4 * region.numel, _FIX)
            self._lasting[region.index] = flat.view(torch.float32)

    def open(self, regions: Sequence[Region]) -> None:
        """Prepare for the backward of one use of a unit."""
        end = 0
        if self._repeats:
            if any(region.index in self._open for region in regions):
                return
            end = self._end
        for region in regions:
            if not region.trainable or region.index in self._lasting:
                continue
            dtype = torch.bfloat16 if region.is_split and not self.is_wide else torch.float32
            size = region.numel * dtype.itemsize
            if end + size > self._buffer.nbytes:
                self.make_lasting(region)
                continue
            flat = self._buffer[end : end + size].view(dtype)
            end += size
            if self.accumulates:  # a parameter without a gradient in this pass adds nothing
                flat.zero_()
            for span in self._ragged[region.index]:  # another unit's gradients lay here: padding must stay zero
                flat[span].zero_()
            self._open[region.index] = flat
        self._end = end

    @contextmanager
    def repeated(self, regions: Sequence[Region]) -> Iterator[None]:
        """Within, uses of the same units add up, and land at the end (the chunks of a head)."""
        was_wide = self.is_wide
        self._repeats, self.is_wide, self._end = True, True, 0
        try:
            yield
        finally:
            self._repeats, self.is_wide = False, was_wide
        self.close(regions)

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
        span = slice(region.offsets[position], region.offsets[position] + region.sizes[position])
        touched = self.touched[region.index]
        flat = self._lasting.get(region.index)
        if flat is None:
            flat = self._open[region.index]
        if touched[position]:
            flat[span].add_(gradient)
        else:
            flat[span].copy_(gradient)
        touched[position] = True

    def close(self, regions: Sequence[Region]) -> None:
        """Land what is final after the backward of one use of a unit."""
        if self._repeats:
            return
        for region in regions:
            flat = self._open.pop(region.index, None)
            if flat is not None and any(self.touched[region.index]):
                self._land(region, flat)

    def free(self) -> None:
        """Let go of every buffer."""
        self._buffer = self._staging = torch.empty(0, dtype=torch.uint8)
        self._lasting.clear()
        self._open.clear()

    def finish(self) -> None:
        """Land what waited on the device, sum and round what was accumulated: afterwards `squares` and the planes
        are final.
        """
        for index, flat in self._lasting.items():
            region = self._store.states[index].region
            if any(self.touched[index]):
                self._land(region, flat)
        if self.accumulates:
            self._device.wait()
            for state in self._store.states:
                if state.gradients is not None and any(self.touched[state.region.index]):
                    self._measure(state.region, state.gradients)
                    if state.region.is_split:
                        native.round_bf16_(state.gradients)
        self._device.wait()
        self._read_pending()

    def _land(self, region: Region, flat: torch.Tensor) -> None:
        if self.accumulates:
            self._add(region, flat)
            return
        if region.index in self._landed:
            raise OffloadError(
                f"unit {' = '.join(region.units)} gave a second gradient after its first had left the device: the "
                "model took another path than in the recording pass. Use engine.model and engine.backward, which add "
                "up any number of passes."
            )
        self._landed.add(region.index)
        self._measure(region, flat)
        target = self._store[region].gradients
        if target is None:
            target = self._staged(region)
        self._bring_down(target, flat)
        if self.landed is not None:
            self._device.wait()
            self._read_pending()
            self.landed(region, target)

    def _add(self, region: Region, flat: torch.Tensor) -> None:
        """Add a region's gradients to its fp32 plane."""
        plane = self._store[region].gradients
        assert plane is not None
        first = region.index not in self._landed
        self._landed.add(region.index)
        if region.index in self._lasting:  # summed over the whole step already
            self._bring_down(plane, flat)
            return
        source = flat
        if self._store.tier == "cpu":
            source = self._staged(region)
            self._bring_down(source, flat)
            self._device.wait()
        if first:
            plane.copy_(source)
        else:
            native.accumulate(plane, source)

    def _staged(self, region: Region) -> torch.Tensor:
        return self._staging[: region.weight_bytes].view(torch.bfloat16 if region.is_split else torch.float32)

    def _bring_down(self, target: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy a region's gradients to where they wait, rounded to its dtype, without a second copy of the whole."""
        for start in range(0, len(flat), _CHUNK):
            part = slice(start, start + _CHUNK)
            self._device.copy(target[part], flat[part].to(target.dtype))
        if self._store.tier == "cpu":
            self._counters.d2h_bytes += target.nbytes

    def _measure(self, region: Region, flat: torch.Tensor) -> None:
        """Take the sum of squares of every touched parameter; on a GPU it is read later, together with the copy."""
        if flat.device.type == "cpu":
            self._note(region, native.sum_squares_segments(flat, region.offsets, region.sizes))
        else:
            parts = [flat[offset : offset + size] for offset, size in zip(region.offsets, region.sizes, strict=True)]
            norms = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts])
            self._pending.append((region, norms.square().to("cpu", non_blocking=True)))

    def _read_pending(self) -> None:
        for region, squares in self._pending:
            self._note(region, squares.tolist())
        self._pending.clear()

    def _note(self, region: Region, squares: Sequence[float]) -> None:
        for index, value, touched in zip(region.parameters, squares, self.touched[region.index], strict=True):
            if touched:
                self.squares[index] = float(value)
