"""Build what an engine runs on: units, plan, tiers, weights taken from the model one unit at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offload.engine.checkpoints import HostCheckpoints
from offload.engine.discover import Candidate, describe_parameters, find_units
from offload.engine.gradients import GradientFlow
from offload.engine.keeping import Keeping
from offload.engine.stream import Stream
from offload.engine.unit import Unit, put_parameter, resting_parameter
from offload.errors import format_bytes
from offload.optim.adamw import AdamW
from offload.partition.layout import ParameterInfo, Region, build_regions
from offload.planning.memory import Allocation, UnitPlan, check_budgets, plan_memory, resident_regions, slot_bytes
from offload.telemetry.counters import Counters
from offload.tiers.device import open_device
from offload.tiers.host import trim_heap
from offload.tiers.ledger import Ledger
from offload.tiers.placement import Placement
from offload.tiers.slots import Slots
from offload.tiers.store import Store


class Assembly:
    """A model whose parameters stream. `standing[index]` is what hangs in the model for a parameter between its
    uses.
    """

    def __init__(
        self,
        model: nn.Module,
        infos: list[ParameterInfo],
        candidates: Sequence[Candidate],
        regions: Sequence[Region],
        plan: Sequence[Allocation],
        placement: Placement,
        tiers: tuple[str, str],
        *,
        waits: bool,
        recompute: str,
        counters: Counters,
        seed: int,
        debug: bool,
        fill: Callable[[str, nn.Module], None] | None,
    ) -> None:
        self.model, self.infos, self.regions, self.plan = model, infos, regions, plan
        self.closed = False
        device_ledger = Ledger("device", _bytes(placement.device_memory), "offload.device_memory")
        self.host = Ledger("cpu", _bytes(placement.host_memory), "offload.host_memory")
        self.device = open_device(device_ledger)
        counters.peaks = lambda: (self.device.peak_bytes, self.host.peak_bytes, self.store.pinned_bytes)
        self._dtypes = [parameter.dtype for _, parameter in model.named_parameters()]
        self._configs = _freeze_cache(model)
        _put_buffers(model, self.device.torch_device)

        self.store = Store(regions, infos, tier=tiers[1], device=self.device, host=self.host)
        if waits:
            self.store.hold_gradients(accumulates=False)
        sizes = {(a.tier, a.name.split(" (")[0]): a for a in plan}
        slot = sizes.get(("device", "unit slot"))
        self.slots = Slots(
            self.store,
            infos,
            self.device,
            counters,
            slot_bytes=slot.num_bytes if slot else 0,
            slot_name=slot.name if slot else "",
        )
        buffer = sizes.get(("device", "gradient buffer"))
        self.gradients = GradientFlow(
            self.store,
            infos,
            regions,
            self.device,
            counters,
            buffer_bytes=buffer.num_bytes if buffer else 0,
            staging=self._stage() if not waits else torch.empty(0, dtype=torch.uint8),
        )
        self.stream = Stream(
            self.device,
            self.slots,
            self.gradients,
            Keeping(recompute, device_ledger, self._is_weight),
            HostCheckpoints(self.device, self.host, counters) if placement.activations == "cpu" else None,
            seed=seed,
            debug=debug,
        )
        self.units: list[Unit] = []
        self.standing: dict[int, nn.Parameter] = {}
        for number, candidate in enumerate(candidates):
            mine = [region for region in regions if candidate.name in region.units]
            self.units.append(Unit(number, candidate, mine, self.stream))
        self._take(fill)
        trim_heap()
        if tiers[0] == "device":
            self.slots.keep(regions)
        for unit in self.units:
            if unit.resident:
                self._settle(unit)
            else:
                unit.route()
        for region in regions:
            if len(region.units) > 1:
                self.gradients.make_lasting(region)

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        return self.stream.is_weight(tensor)

    def _take(self, fill: Callable[[str, nn.Module], None] | None) -> None:
        """Move the weights into the store, unit by unit; what was a parameter becomes one NaN."""
        # A parent that keeps only its own parameters comes last: to fill it is to fill what is below it, which by then
        # was taken.
        for unit in sorted(self.units, key=lambda unit: not unit.whole):
            if fill is not None:
                fill(unit.name, unit.module)
            for place in unit.places:
                parameter = place.module._parameters[place.key]
                assert parameter is not None
                if place.parameter not in self.standing:
                    self.store.write(place.parameter, parameter)
                    self.standing[place.parameter] = resting_parameter(
                        self.infos[place.parameter], self.device.torch_device
                    )
                unit.resting[place.parameter] = self.standing[place.parameter]
            unit.install(unit.resting)

    def indices(self) -> dict[int, int]:
        """Return the index of whatever hangs in the model for a parameter, by its id. (Where a tied weight stays on the
        device for one unit and streams for another, two things hang for one parameter.)
        """
        hanging = [*self.standing.items(), *(item for unit in self.units for item in unit.resting.items())]
        return {id(parameter): index for index, parameter in hanging}

    def make_resident(self, names: set[str]) -> None:
        """Units that are read from outside stay on the device, if it has room."""
        for unit in self.units:
            if unit.name in names:
                size = sum(r.weight_bytes for r in unit.regions if not self.slots.is_resident(r))
                warnings.warn(
                    f"unit {unit.name} is read from outside itself: its weights stay on the device "
                    f"({format_bytes(size)}).",
                    stacklevel=2,
                )
                self._settle(unit)
                unit.resident = True

    def _settle(self, unit: Unit) -> None:
        """Give a unit its weights on the device for good; its module runs as it is."""
        unit.unroute()
        self.slots.keep(unit.regions)
        for other in self.units:
            if any(region in unit.regions for region in other.regions):
                other.forget_live()
        for region in unit.regions:
            self.gradients.make_lasting(region)
        live = unit.live()
        unit.install(live)
        self.standing.update(live)

    def accumulate(self) -> None:
        """Make room for gradients that are summed over several backward passes."""
        if not self.gradients.accumulates:
            self.store.hold_gradients(accumulates=True)
            self.gradients.accumulate(self._stage())

    def _stage(self) -> torch.Tensor:
        """Return host memory for one region's gradients on their way."""
        num_bytes = max((region.weight_bytes for region in self.regions if region.trainable), default=0)
        if self.store.tier == "device":
            return self.device.allocate("gradient staging", num_bytes)
        if "gradient staging" not in self.host.allocations:
            self.host.reserve("gradient staging", num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.device.pins_host_memory)

    @contextmanager
    def unchanged_config(self) -> Iterator[None]:
        """Show the model's configuration as it was given."""
        now = [(config, config.use_cache) for config, _ in self._configs]
        for config, value in self._configs:
            config.use_cache = value
        try:
            yield
        finally:
            for config, value in now:
                config.use_cache = value

    def close(self, restore: bool) -> None:
        """Undo the rerouting; put real parameters back with `restore`; free the tiers."""
        made: dict[int, nn.Parameter] = {}
        for unit in self.units:
            unit.unroute()
            for place in unit.places:
                index = place.parameter
                if restore and index not in made:
                    value = self.store.read(index).to(self.device.torch_device, self._dtypes[index])
                    made[index] = nn.Parameter(value, requires_grad=self.infos[index].trainable)
                put_parameter(place.module, place.key, made[index] if restore else unit.resting[index])
            unit.forget_live()
        for config, used in self._configs:
            config.use_cache = used
        self.stream.close()
        self.slots.free()
        self.gradients.free()
        self.store.close()
        self.device.ledger.clear()
        self.host.clear()
        self.closed = True


def assemble(
    model: nn.Module,
    *,
    optimizer: AdamW,
    placement: Placement,
    precision: str,
    waits: bool,
    splits: bool,
    recompute: str,
    counters: Counters,
    seed: int,
    debug: bool,
    fill: Callable[[str, nn.Module], None] | None,
) -> Assembly:
    """Find the units, plan, check the budgets, and only then allocate."""
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        # Units recompute already; the second name is what transformers called it before 5.23.
        disable: Any = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
        disable()
    infos = describe_parameters(model, optimizer, precision)
    candidates = find_units(model, infos)
    regions = build_regions(infos, {unit.name: unit.parameters for unit in candidates})
    units = [UnitPlan(c.name, tuple(r for r in regions if c.name in r.units), c.resident) for c in candidates]

    def plan_for(parameters: str, states: str) -> list[Allocation]:
        return plan_memory(
            units, regions, parameters_tier=parameters, optimizer_tier=states, keeps_gradients=waits, splits=splits
        )

    tiers = _choose_tiers(placement, plan_for)
    plan = plan_for(*tiers)
    resident = resident_regions(units)
    largest = max(units, key=lambda unit: slot_bytes(unit, resident))
    floor = f"The largest unit is {largest.name} ({format_bytes(slot_bytes(largest, resident))} of weights). "
    check_budgets(plan, {"device": _bytes(placement.device_memory), "cpu": _bytes(placement.host_memory)}, floor)
    return Assembly(
        model,
        infos,
        candidates,
        regions,
        plan,
        placement,
        tiers,
        waits=waits,
        recompute=recompute,
        counters=counters,
        seed=seed,
        debug=debug,
        fill=fill,
    )


def _choose_tiers(placement: Placement, plan_for: Callable[[str, str], list[Allocation]]) -> tuple[str, str]:
    """Resolve `auto`: all on the device where it fits its budget (or the GPU's free memory), else on the cpu."""
    wants = (placement.parameters, placement.optimizer)
    if "auto" not in wants:
        return wants
    budget = _bytes(placement.device_memory)
    if budget is None and torch.cuda.is_available():
        budget = int(torch.cuda.mem_get_info()[0] * 0.6)  # the rest is for activations
    needed = sum(allocation.num_bytes for allocation in plan_for("device", "device") if allocation.tier == "device")
    choice = "device" if budget is None or needed <= budget else "cpu"
    parameters = choice if wants[0] == "auto" else wants[0]
    states = ("cpu" if parameters == "cpu" else choice) if wants[1] == "auto" else wants[1]
    return ("device" if states == "device" else parameters), states


def _bytes(value: Any) -> int | None:
    return None if value is None else int(value)


def _put_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers live on the device, in their own dtype."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


def _freeze_cache(model: nn.Module) -> list[tuple[Any, bool]]:
    """Turn key-value caches off (a recompute would append to them); return the configurations and what they said."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "use_cache", None) is not None:
            configs[id(config)] = config
    found = [(config, config.use_cache) for config in configs.values()]
    for config, _ in found:
        config.use_cache = False
    return found
