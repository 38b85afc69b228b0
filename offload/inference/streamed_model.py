"""A model for inference whose weights need not fit the memory: they stream from its files through an engine's slots.

Units, slots and the executor are those of training: what the budget holds stays, and the rest comes up again in every
pass, ahead of compute. A tile is read from the files on one lane while the one before it goes up on another. At rest a
parameter is one NaN, expanded. Small modules outside the blocks are always in memory.
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
from offload.engine.recording.watching import WatchingMode
from offload.engine.units.find import find_units
from offload.engine.units.unit import Unit, open_units
from offload.errors import ConfigError
from offload.hf.sources import Fused, Source
from offload.lanes.streams import open_lanes
from offload.lanes.throttle import Throttle
from offload.layout.planes import DTYPES
from offload.layout.regions import DiskLayout, ParameterInfo, build_regions
from offload.schedule.execute import Executor
from offload.telemetry.counters import Counters
from offload.tiers.device import open_device
from offload.tiers.due import Due
from offload.tiers.ledger import Ledger
from offload.tiers.model_files import ModelFiles
from offload.tiers.nvme import RING_TILES
from offload.tiers.slots import Slots
from offload.tiers.store import Store

SLOTS = "slots"
_TILE_NUMEL = 1 << 22
"""Elements that are read at once."""
_PASS = "pass"


class ReadFromOutside(Exception):
    """A module read the resting weights of a unit that was not called; `unit` is to be kept, and the pass repeated."""

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit.name)
        self.unit = unit


class StreamedModel:
    """Puts weights in place when units are called. Used from one thread; ended by `close`.

    total_bytes: of all weights, tied ones once.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Callable[[str], Source | None],
        *,
        memory_bytes: int | None,
        accelerator: Accelerator | None,
        throttle: Mapping[str, Throttle] | None = None,
    ) -> None:
        """Take over `model`, whose parameters are not filled; `source` has the values of each, by its first name.

        memory_bytes: for weights on the accelerator, or on the CPU without one; None for no limit; two units, the one
        in use and the next, are there in any case. throttle: how slow links are made to be (see lanes/throttle.py).
        Raises ConfigError, and what reading raises.
        """
        self._infos = _describe(model)
        self._source = source
        self._whole: tuple[int, torch.Tensor] | None = None
        candidates = find_units(model, self._infos)
        regions = build_regions(self._infos, {each.name: each.parameters for each in candidates}, [()])
        self.ledger, counters = Ledger("device"), Counters()
        device = open_device(accelerator, self.ledger, copies_aside=True)
        self._lanes = lanes = open_lanes(accelerator, throttle or {}, None, overlap=True)
        tile_bytes = max(min(_TILE_NUMEL, r.numel) * r.plane("weights").dtype.itemsize for r in regions)
        host = Ledger("cpu")
        self._files = ModelFiles(RING_TILES * tile_bytes, host, lanes, counters, device.pinning)
        for info in self._infos:
            self._files.give(info.index, partial(self._read, info.index))
        layout = DiskLayout(files=frozenset(region.index for region in regions), file_tile_numel=_TILE_NUMEL)
        store = Store(
            regions,
            self._infos,
            tier="cpu",
            device=device,
            host=host,
            lanes=lanes,
            layout=layout,
            files=self._files,
            counters=counters,
        )
        self._slots = slots = Slots(store, device, Due(), lanes, counters, slot_bytes=0, slot_name=SLOTS)
        self._executor = Executor(slots, 1, None, lands_late=lambda _: False)
        self._units = list(open_units(candidates, regions, slots, slots.parameters))
        self._inside: Unit | None = None
        self._begin: Any = None
        self.total_bytes = sum(info.numel * DTYPES[info.compute].itemsize for info in self._infos)
        resting = [_resting(info, device.torch_device) for info in self._infos]
        self._at_rest: dict[int, list[Unit]] = {}  # of tied weights there are several
        for unit in self._units:
            unit.resting.update({place.parameter: resting[place.parameter] for place in unit.places})
            for place in unit.places:
                self._at_rest.setdefault(resting[place.parameter].data_ptr(), []).append(unit)
            unit.install(unit.resting)
            if not unit.resident:
                unit.route(self._call)
        for owner in model.modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[key] = buffer.to(device.torch_device)
        model.register_forward_pre_hook(lambda *_: self._executor.begin(_PASS))
        model.register_forward_hook(lambda *_: self._end_pass(), always_call=True)
        try:
            slots.resize(self._capacity(memory_bytes))
            for unit in self._units:
                if unit.resident:
                    self._stay(unit)
            self._suppose_order()
        except BaseException:
            self.close()
            raise

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that were read so far."""
        return self._files.bytes_read

    def keep(self, unit: Unit) -> None:
        """Have a unit's weights in memory from now on, whatever the budget. All weights are read anew: what read these
        from outside may have changed some of them in place (rwkv divides them, once), and will do so again.
        """
        self._inside = None
        self._stay(unit)
        self._slots.refresh(always=True)
        self._slots.settle()
        self._suppose_order()

    @contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Within, the first call of each of the modules raises ReadFromOutside where it reads weights at rest."""
        handles = []
        for module in modules:
            mode = _Reads(self._at_rest)
            handles.append(module.register_forward_pre_hook(lambda *_, mode=mode: mode.begin()))
            handles.append(module.register_forward_hook(lambda *_, mode=mode: mode.end(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def close(self) -> None:
        """End the threads, and let go of the memory."""
        self._lanes.close()
        self._slots.free()
        self._files.close()
        self.ledger.clear()

    # -- memory ----------------------------------------------------------------------------------------------

    def _capacity(self, memory_bytes: int | None) -> int:
        """Return the bytes through which units stream: room for all of them, or what the budget leaves beside what
        stays, and two units at least.
        """
        sizes = [unit.weight_bytes for unit in self._units if not unit.resident]
        whole = sum(r.weight_bytes for r in {r for unit in self._units if not unit.resident for r in unit.regions})
        if memory_bytes is None or self.total_bytes <= memory_bytes:
            return whole
        staying = {r for unit in self._units if unit.resident for r in unit.regions}
        left = memory_bytes - sum(region.weight_bytes for region in staying)
        return min(whole, max(left // 512 * 512, sum(sorted(sizes)[-2:])))

    def _stay(self, unit: Unit) -> None:
        """Give a unit its weights for good; its module runs as it is."""
        unit.stay()
        self._slots.keep(unit.regions)
        self._slots.settle()
        self._executor.reset()
        for other in self._units:
            if any(region in unit.regions for region in other.regions):
                other.forget_live()
        unit.install(unit.live())

    def _suppose_order(self) -> None:
        self._executor.suppose(_PASS, [unit.regions for unit in self._units if not unit.resident])
        self._executor.expect(_PASS, wraps=False)

    def _read(self, index: int, begin: int, end: int) -> torch.Tensor:
        """Return elements of a parameter. One that is made of several tensors is made as a whole, once."""
        source = self._source(self._infos[index].name)
        assert source is not None, self._infos[index].name
        if not isinstance(source, Fused):
            return source.read(begin, end)
        if self._whole is None or self._whole[0] != index:
            self._whole = index, source.read(0, math.prod(source.shape))
        return self._whole[1][begin:end]

    # -- calls -----------------------------------------------------------------------------------------------

    def _call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit's forward, as the module would."""
        if self._inside is not None:  # one unit computes at a time
            raise ReadFromOutside(unit)
        self._executor.enter(unit.regions, backward=False)
        self._inside, begin = unit, self._lanes.now()
        try:
            unit.hang()
            result = unit.forward(*args, **kwargs)
        finally:
            unit.rest()
            self._inside = None
            self._executor.leave(unit.regions, self._lanes.computed(unit.name, begin))
        if any(isinstance(leaf, torch.Tensor) and self._slots.holds(leaf) for leaf in tree_iter(result)):
            return tree_map_only(torch.Tensor, lambda t: t.clone() if self._slots.holds(t) else t, result)
        return result

    def _end_pass(self) -> None:
        self._executor.end()
        self._executor.expect(_PASS, wraps=False)
        self._lanes.end_step()


class _Reads(WatchingMode):
    """Notices an operation on the NaN that stands for weights at rest, in the first call of a module."""

    def __init__(self, at_rest: dict[int, list[Unit]]) -> None:
        super().__init__()
        self._at_rest, self._calls = at_rest, 0

    def begin(self) -> None:
        """The module is called."""
        self._calls += 1
        if self._calls == 1:
            self.__enter__()

    def end(self) -> None:
        """The call is over."""
        if self._calls == 1:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                for unit in self._at_rest.get(leaf.untyped_storage().data_ptr(), ()):
                    if not unit.resident:
                        raise ReadFromOutside(unit)
        return func(*args, **(kwargs or {}))


def _describe(model: nn.Module) -> list[ParameterInfo]:
    """Return the parameters in torch's order, tied names once. Raises ConfigError for a dtype that does not stream."""
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


def _resting(info: ParameterInfo, device: torch.device) -> nn.Parameter:
    """Return what hangs in the place of a parameter: of its device, dtype and shape, and a stray read is NaN."""
    nan = torch.full((), math.nan, dtype=DTYPES[info.compute], device=device)
    return nn.Parameter(nan.expand(info.shape), requires_grad=False)
