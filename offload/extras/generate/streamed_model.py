"""Inference model with weights streamed from files through engine slots, so they need not fit memory.

Units, slots and executor are the training classes. Weights within the budget stay; the rest is fetched again in every
pass, ahead of compute. One lane reads a tile from the files while another copies the previous tile to the device. An
offloaded parameter is a single NaN, expanded. Small modules outside the blocks are always resident.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_map_only

from offload.accelerators import Accelerator
from offload.amounts import Amount, Tell, tell_nobody
from offload.app.hf.sources import FusedSource
from offload.engine.recording.watching import WatchingMode
from offload.engine.units.find import find_units
from offload.engine.units.unit import CallTarget, Unit, open_units
from offload.errors import ConfigError
from offload.files.sources import Source
from offload.lanes.streams import open_lanes
from offload.lanes.timeline import Throttle
from offload.layout.build_regions import build_regions
from offload.layout.planes import DTYPES
from offload.layout.regions import ParameterInfo
from offload.layout.residence import Residence
from offload.modules import move_buffers
from offload.planning.disk import in_files
from offload.schedule.execute import Executor
from offload.tiers.counters import Counters, Ledger
from offload.tiers.device import open_device
from offload.tiers.model_files import ModelFiles
from offload.tiers.nvme import RING_TILES
from offload.tiers.slots import Slots
from offload.tiers.store import Store
from offload.tiers.tile import DeferredUpdates

SLOTS = "slots"
_TILE_NUMEL = 1 << 22
"""Elements per read."""
_PASS = "pass"


class ReadFromOutside(Exception):
    """A module read the offloaded weights of a unit outside the unit forward.

    Keep `unit` resident and repeat the pass.
    """

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit.name)
        self.unit = unit


class StreamedModel:
    """Installs weights when units are called. Use from one thread; end with `close`.

    total_bytes: bytes of all weights, tied weights counted once.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Callable[[str], Source | None],
        *,
        memory_bytes: int | None,
        accelerator: Accelerator | None,
        throttle: Mapping[str, Throttle] | None = None,
        tell: Tell = tell_nobody,
    ) -> None:
        """Take over `model`, whose parameters have no values yet.

        source: returns the values of a parameter, by first name.
        memory_bytes: weight budget on the accelerator, or on the CPU without one; None: no limit. Two units, the
            current and the next, always have room.
        throttle: links to slow down (see lanes/timeline.py).
        tell: receives the first read of the weights, which ends in the first pass.

        Raises ConfigError and read errors.
        """
        self._infos = _describe(model)
        self._source = source
        self._fused_values: tuple[int, torch.Tensor] | None = None
        # As in training, but without moments: weights alone stream.
        candidates = find_units(model, self._infos)
        regions = build_regions(self._infos, {each.name: each.parameters for each in candidates}, [()])
        self.ledger = Ledger("device")
        counters = Counters()
        device = open_device(accelerator, self.ledger, copies_aside=True)
        lanes = open_lanes(accelerator, throttle or {}, None, overlap=True)
        self._lanes = lanes
        tile_bytes = max(min(_TILE_NUMEL, r.numel) * r.plane("weights").dtype.itemsize for r in regions)
        host = Ledger("cpu")
        self._files = ModelFiles(RING_TILES * tile_bytes, host, lanes, counters, device.pinning)
        for info in self._infos:
            self._files.give(info.index, partial(self._read, info.index))
        rows = {region.index: in_files(region, _TILE_NUMEL) for region in regions}
        store = Store(
            regions,
            self._infos,
            device=device,
            host=host,
            lanes=lanes,
            residence=Residence(rows),
            files=self._files,
            counters=counters,
        )
        slots = Slots(store, DeferredUpdates(), slot_bytes=0, slot_name=SLOTS)  # sized below
        self._slots = slots
        self._executor = Executor(slots, 1, None, updates_at_end=lambda _: False)
        self._units = list(open_units(candidates, regions, slots, slots.parameters))
        self.target: CallTarget = self._call
        self._running_unit: Unit | None = None
        self._begin: Any = None
        total = sum(info.numel * DTYPES[info.compute].itemsize for info in self._infos)
        self.total_bytes = total
        files = self._files
        tell("reading the weights", lambda: Amount(min(files.bytes_read, total), total))
        placeholders = [_placeholder(info, device.torch_device) for info in self._infos]
        self._placeholder_units: dict[int, list[Unit]] = {}  # tied weights have several
        for unit in self._units:
            unit.placeholders.update({place.parameter: placeholders[place.parameter] for place in unit.places})
            for place in unit.places:
                self._placeholder_units.setdefault(placeholders[place.parameter].data_ptr(), []).append(unit)
            unit.install(unit.placeholders)
            if not unit.resident:
                unit.route(self)
        # Buffers are few and small, and belong to no unit.
        move_buffers(model, device.torch_device)
        # `generate` calls the model once a token: each call is a pass in the same order.
        model.register_forward_pre_hook(lambda *_: self._executor.begin(_PASS))
        # Also after an error: the next pass begins with the first unit.
        model.register_forward_hook(lambda *_: self._end_pass(), always_call=True)
        try:
            slots.resize(self._capacity(memory_bytes))
            for unit in self._units:
                if unit.resident:
                    self._make_resident(unit)
            self._set_order()
        except BaseException:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        """Weight bytes read so far."""
        return self._files.bytes_read

    def keep(self, unit: Unit) -> None:
        """Keep unit weights in memory from now on, even over budget, and read all weights again.

        The outside read may have modified weights in place (rwkv divides them once), and will do so again.
        """
        self._running_unit = None
        self._make_resident(unit)
        self._slots.refresh(always=True)
        self._slots.compute_after_resident()
        self._set_order()

    @contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """In this context, the first call to each module raises ReadFromOutside on a read from offloaded weights."""
        handles = []
        for module in modules:
            mode = _PlaceholderReads(self._placeholder_units)
            handles.append(module.register_forward_pre_hook(lambda *_, mode=mode: mode.begin()))
            handles.append(module.register_forward_hook(lambda *_, mode=mode: mode.end(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def close(self) -> None:
        """Stop the threads and release the memory."""
        self._lanes.close()
        self._slots.free()
        self._files.close()
        self.ledger.clear()

    # -- memory ----------------------------------------------------------------------------------------------

    def _capacity(self, memory_bytes: int | None) -> int:
        """Return the slot bytes: all streamed units, or the budget minus resident units, but at least two units."""
        sizes = [unit.weight_bytes for unit in self._units if not unit.resident]
        whole = sum(r.weight_bytes for r in {r for unit in self._units if not unit.resident for r in unit.regions})
        if memory_bytes is None or self.total_bytes <= memory_bytes:
            return whole
        staying = {r for unit in self._units if unit.resident for r in unit.regions}
        left = memory_bytes - sum(region.weight_bytes for region in staying)
        # In blocks of torch's allocator.
        return min(whole, max(left // 512 * 512, sum(sorted(sizes)[-2:])))

    def _make_resident(self, unit: Unit) -> None:
        """Make a unit resident. The module then runs without hooks."""
        unit.keep_on_device()
        self._slots.keep(unit.regions)
        self._slots.compute_after_resident()
        # The old order of fetches contains this unit.
        self._executor.reset()
        for other in self._units:
            if any(region in unit.regions for region in other.regions):
                other.forget_live()
        unit.install(unit.live())

    def _set_order(self) -> None:
        self._executor.suppose(_PASS, [unit.regions for unit in self._units if not unit.resident])
        self._executor.begin_fetches(_PASS, fetches_next=False)

    def _read(self, index: int, begin: int, end: int) -> torch.Tensor:
        """Return parameter elements. A parameter fused from several tensors is built once as a whole."""
        source = self._source(self._infos[index].name)
        assert source is not None, self._infos[index].name
        if not isinstance(source, FusedSource):
            return source.read(begin, end)
        # Reads of one parameter follow each other, tile by tile.
        if self._fused_values is None or self._fused_values[0] != index:
            self._fused_values = index, source.read(0, math.prod(source.shape))
        return self._fused_values[1][begin:end]

    # -- calls -----------------------------------------------------------------------------------------------

    def _call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the unit forward."""
        if self._running_unit is not None:  # units never nest
            raise ReadFromOutside(unit)
        self._executor.enter(unit.regions, backward=False)
        self._running_unit = unit
        begin = self._lanes.now()
        try:
            unit.install_live()
            result = unit.compute(*args, **kwargs)
        finally:
            unit.install_placeholders()
            self._running_unit = None
            self._executor.leave(unit.regions, self._lanes.record_compute(unit.name, begin))
        # A result may be a view of the weights, and the slot gets others.
        if any(isinstance(leaf, torch.Tensor) and self._slots.holds(leaf) for leaf in tree_iter(result)):
            return tree_map_only(torch.Tensor, lambda t: t.clone() if self._slots.holds(t) else t, result)
        return result

    def _end_pass(self) -> None:
        self._executor.end()
        self._executor.begin_fetches(_PASS, fetches_next=False)
        self._lanes.end_step()


class _PlaceholderReads(WatchingMode):
    """Detects operations on NaN placeholders for offloaded weights during the first module call."""

    def __init__(self, placeholder_units: dict[int, list[Unit]]) -> None:
        super().__init__()
        self._placeholder_units = placeholder_units
        self._calls = 0

    def begin(self) -> None:
        """The module is called."""
        self._calls += 1
        if self._calls == 1:
            self.__enter__()

    def end(self) -> None:
        """The call has ended."""
        if self._calls == 1:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                for unit in self._placeholder_units.get(leaf.untyped_storage().data_ptr(), ()):
                    if not unit.resident:
                        raise ReadFromOutside(unit)
        return func(*args, **(kwargs or {}))


def _describe(model: nn.Module) -> list[ParameterInfo]:
    """Return the parameters in torch order, tied names once. Raises ConfigError for an unsupported dtype."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    infos = []
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.dtype not in names:
            raise ConfigError(
                f"parameter {name} is {parameter.dtype}: only float32, bfloat16 and float16 weights stream. Load the "
                "model unquantized."
            )
        infos.append(ParameterInfo(index, name, tuple(parameter.shape), False, names[parameter.dtype], True))
    return infos


def _placeholder(info: ParameterInfo, device: torch.device) -> nn.Parameter:
    """Return the placeholder for a parameter: same device, dtype and shape, with NaN for stray reads."""
    nan = torch.full((), math.nan, dtype=DTYPES[info.compute], device=device)
    return nn.Parameter(nan.expand(info.shape), requires_grad=False)
