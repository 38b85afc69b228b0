"""A model for inference whose weights need not fit the memory: what the budget holds stays, the rest is read again for
every pass, one unit ahead of compute.

Units are those of training (`engine/units/find.py`). At rest a parameter is one NaN, expanded. When a unit is called,
its weights are put in place; when it returns, they are let go of, unless they stay. Small modules outside the blocks
are always in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from offload.accelerators import Accelerator
from offload.engine.units.find import Place, describe_parameters, find_units
from offload.engine.units.unit import put_parameters
from offload.hf.sources import Source
from offload.lanes.streams import open_lanes
from offload.lanes.ticket import Ticket
from offload.lanes.waiting import wait_until_done
from offload.optim.adamw import AdamW
from offload.tiers.device import open_device
from offload.tiers.host import trim_heap
from offload.tiers.ledger import Ledger


class ReadFromOutside(Exception):
    """A module read the resting weights of a unit that was not called; `unit` is to be kept, and the pass repeated."""

    def __init__(self, unit: StreamedUnit) -> None:
        super().__init__(unit.name)
        self.unit = unit


@dataclass(eq=False)
class Cargo:
    """Parameters that the same units use (tied weights, or a unit's own): they come and go together.

    users: calls of units that are under way. ticket: of its reading; None where it is not in memory.
    """

    parameters: tuple[int, ...]
    num_bytes: int
    stays: bool = False
    users: int = 0
    ticket: Ticket | None = None
    values: dict[int, nn.Parameter] = field(default_factory=dict)


@dataclass(eq=False)
class StreamedUnit:
    """A module whose parameters come when it is called. `depth`: its calls under way, the first since `begin`;
    `is_settled`: they stay.
    """

    number: int
    name: str
    module: nn.Module
    places: list[Place]
    cargoes: list[Cargo]
    depth: int = 0
    begin: Any = None
    is_settled: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(cargo.num_bytes for cargo in self.cargoes)


class WeightStream:
    """Puts weights in place when units are called. Used from one thread; ended by `close`.

    bytes_read: so far. total_bytes: of all weights, tied ones once.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Callable[[str], Source | None],
        *,
        memory_bytes: int | None,
        accelerator: Accelerator | None,
    ) -> None:
        """Take over `model`, whose parameters are not filled; `source` has the values of each, by its first name.

        memory_bytes: for weights on the accelerator, or on the CPU without one; None for no limit; two units, the one
        in use and the next, are there in any case. Raises what reading raises.
        """
        named = list(model.named_parameters())
        candidates = find_units(model, describe_parameters(model, AdamW(), "bf16"))
        self._names = [name for name, _ in named]
        self._source, self._memory_bytes = source, memory_bytes
        self._device = open_device(accelerator, Ledger("device"), copies_aside=True)
        device = self._device.torch_device
        self._resting = [_resting(parameter, device) for _, parameter in named]
        users: dict[int, tuple[int, ...]] = {}
        for number, candidate in enumerate(candidates):
            for index in candidate.parameters:
                users[index] = (*users.get(index, ()), number)
        cargoes: dict[tuple[int, ...], Cargo] = {}
        for together in dict.fromkeys(users.values()):
            parameters = tuple(index for index, its in users.items() if its == together)
            stays = any(candidates[number].resident for number in together)
            cargoes[together] = Cargo(parameters, sum(named[index][1].nbytes for index in parameters), stays)
        self._cargoes = list(cargoes.values())
        self._units = [
            StreamedUnit(
                number,
                candidate.name,
                candidate.module,
                candidate.places,
                [cargo for together, cargo in cargoes.items() if number in together],
            )
            for number, candidate in enumerate(candidates)
        ]
        self.total_bytes = sum(cargo.num_bytes for cargo in self._cargoes)
        self.bytes_read = 0
        streamed = [unit for unit in self._units if not all(cargo.stays for cargo in unit.cargoes)]
        self._spare_bytes = 2 * max((unit.num_bytes for unit in streamed), default=0)
        self._storages = {self._resting[p.parameter].data_ptr(): unit for unit in streamed for p in unit.places}
        self._last = (-1, -1)
        self._followed: dict[tuple[int, int], int] = {}  # the unit that came after two others
        self._held: set[Cargo] = set()  # in memory, or on the way, for what comes next
        self._lanes = open_lanes(accelerator, {}, None, overlap=True)
        for unit in self._units:
            self._put(unit, self._resting)
        for owner in model.modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[key] = buffer.to(device)
        for unit in streamed:
            unit.module.register_forward_pre_hook(lambda *_, unit=unit: self._enter(unit))
            unit.module.register_forward_hook(lambda *_, unit=unit: self._leave(unit), always_call=True)
        self._always = [unit for unit in self._units if unit not in streamed]
        try:
            self._fill(self._always)
        except BaseException:
            self.close()
            raise

    def keep(self, unit: StreamedUnit) -> None:
        """Have a unit's weights in memory from now on, whatever the budget. All weights are read anew: what read these
        from outside may have changed some of them in place (rwkv divides them, once), and will do so again.
        """
        for cargo in self._cargoes:
            self._drop(cargo)
        for each in self._units:
            self._put(each, self._resting)
            each.is_settled = False
        self._always.append(unit)
        self._fill(self._always)

    @contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Within, the first call of each of the modules raises ReadFromOutside where it reads weights at rest."""
        handles = []
        for module in modules:
            mode = _Reads(self._storages)
            handles.append(module.register_forward_pre_hook(lambda *_, mode=mode: mode.begin()))
            handles.append(module.register_forward_hook(lambda *_, mode=mode: mode.end(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def close(self) -> None:
        """End the thread that reads."""
        self._lanes.close()

    # -- calls -----------------------------------------------------------------------------------------------

    def _enter(self, unit: StreamedUnit) -> None:
        """Bring a unit's weights, and have those of the next one that lacks some on their way."""
        if not unit.depth:
            unit.begin = self._lanes.now()
        unit.depth += 1
        for cargo in unit.cargoes:
            cargo.users += 1
            self._begin(cargo)
        self._followed[self._last] = unit.number
        self._last = (self._last[1], unit.number)
        self._held = set()
        for following in islice(self._upcoming(), len(self._units)):
            self._held.update(following.cargoes)
            if not all(cargo.stays or cargo.users for cargo in following.cargoes):
                break  # one unit ahead, however far off; what is in use now may be needed again before it
        for cargo in self._cargoes:
            self._let_go(cargo)
        for cargo in self._held:
            self._begin(cargo)
        if not unit.is_settled:
            self._install(unit)

    def _leave(self, unit: StreamedUnit) -> None:
        unit.depth -= 1
        for cargo in unit.cargoes:
            cargo.users -= 1
        if not unit.depth:
            self._lanes.computed(unit.name, unit.begin)
        if not unit.depth and not unit.is_settled:
            self._put(unit, self._resting)
            for cargo in unit.cargoes:
                self._let_go(cargo)

    def _upcoming(self) -> Iterator[StreamedUnit]:
        """Yield the units that come next: what came the last time, else in the order of the modules."""
        before, now = self._last
        while True:
            following = self._followed.get((before, now), (now + 1) % len(self._units))
            yield self._units[following]
            before, now = now, following

    # -- weights ---------------------------------------------------------------------------------------------

    def _begin(self, cargo: Cargo) -> None:
        """Have a cargo read, if it is not there."""
        if cargo.ticket is None:
            cargo.stays = cargo.stays or self._may_stay(cargo)
            cargo.ticket = self._lanes.h2d.submit(partial(self._read, cargo, self._lanes.mark()))

    def _may_stay(self, cargo: Cargo) -> bool:
        if self._memory_bytes is None or self.total_bytes <= self._memory_bytes:
            return True
        staying = sum(each.num_bytes for each in self._cargoes if each.stays)
        return staying + cargo.num_bytes + self._spare_bytes <= self._memory_bytes

    def _read(self, cargo: Cargo, marks: Sequence[Ticket]) -> None:
        """Read a cargo; on the lane, which waits for compute up to `marks`: what was let go of is free only then, and
        the host may be far ahead.
        """
        self._lanes.wait(marks)
        for index in cargo.parameters:
            source = self._source(self._names[index])
            assert source is not None, self._names[index]
            value = source.read(0, math.prod(source.shape)).view(source.shape)
            cargo.values[index] = nn.Parameter(self._device.bring_up(value), requires_grad=False)
            self.bytes_read += value.nbytes

    def _fill(self, units: list[StreamedUnit]) -> None:
        """Put weights in place for good."""
        for unit in units:
            for cargo in unit.cargoes:
                cargo.stays = True
                self._begin(cargo)
            self._install(unit)

    def _install(self, unit: StreamedUnit) -> None:
        """Wait for a unit's weights and put them in place."""
        self._lanes.compute_after([cargo.ticket for cargo in unit.cargoes if cargo.ticket is not None])
        values = {index: value for cargo in unit.cargoes for index, value in cargo.values.items()}
        for value in values.values():
            self._device.lend(value)
        self._put(unit, values)
        unit.is_settled = all(cargo.stays for cargo in unit.cargoes)

    def _let_go(self, cargo: Cargo) -> None:
        """Free a cargo that nothing needs now or next."""
        if not (cargo.stays or cargo.users or cargo in self._held):
            self._drop(cargo)

    def _drop(self, cargo: Cargo) -> None:
        if cargo.ticket is not None:
            wait_until_done(self._lanes.lock, [cargo.ticket])
            cargo.ticket, cargo.values = None, {}
            trim_heap()  # malloc would keep most of it

    def _put(self, unit: StreamedUnit, parameters: Any) -> None:
        put_parameters(unit.places, parameters)


class _Reads(TorchDispatchMode):
    """Notices an operation on the NaN that stands for weights at rest, in the first call of a module."""

    def __init__(self, storages: dict[int, StreamedUnit]) -> None:
        super().__init__()
        self._storages, self._calls = storages, 0

    def begin(self) -> None:
        self._calls += 1
        if self._calls == 1:
            self.__enter__()

    def end(self) -> None:
        if self._calls == 1:
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                unit = self._storages.get(leaf.untyped_storage().data_ptr())
                if unit is not None and not unit.is_settled:
                    raise ReadFromOutside(unit)
        return func(*args, **(kwargs or {}))


def _resting(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Return what hangs in the place of a parameter: of its device, dtype and shape, and a stray read is NaN."""
    nan = torch.full((), math.nan, dtype=parameter.dtype, device=device)
    return nn.Parameter(nan.expand(parameter.shape), requires_grad=False)
