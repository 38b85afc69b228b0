"""What a run will hold and take, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from offload.config.config import Config
from offload.config.sections import DataSection
from offload.distributed.comm import ImaginedRanks
from offload.engine.assemble import EnginePlan, Structure
from offload.errors import DoesNotFitError
from offload.forecast.measure import BatchSpec, CannotMeasureError, measure
from offload.forecast.memory import OPERATIONS, Footprint, footprint
from offload.forecast.routed import told_experts
from offload.forecast.search import Placer
from offload.forecast.timing import PlannedStep, Timing
from offload.forecast.workload import Workload
from offload.hf.adapters import Adaptation
from offload.hf.freeze import freeze
from offload.hf.models import (
    BuiltModel,
    as_scorer,
    empty_model,
    is_pretrained,
    load_model_config,
    locate,
    max_positions,
    model_kind,
)
from offload.hf.quantized import quantization_of
from offload.hf.read import quantized_parameters
from offload.layout.quantized import Quantized
from offload.machine.hardware import Hardware
from offload.planning.from_config import settings
from offload.planning.machines import DescribedMachine, Machine
from offload.planning.plan import sharding_of
from offload.planning.settings import Settings

DAY_S = 86400.0
_SEARCHED = {
    **{
        f"offload.{key}": f"placement.{key}"
        for key in ("parameters", "optimizer", "gradients", "activations", "graphs")
    },
    "offload.update": "update",
    "offload.prefetch": "prefetch",
    "offload.zero_stage": "zero_stage",
    "offload.replicas": "replicas",
    "train.recompute": "recompute",
}
"""What the search decides, by its key, and where settings have it."""


@dataclass(frozen=True)
class Alternative:
    """Another way to run."""

    change: str
    """What is done, as words or flags."""
    step_seconds: float | None
    """The seconds of a step; None where they are not known."""
    tokens_per_second: float | None
    """The tokens of a second; None where they are not known."""
    fits: bool
    """True if it fits the machine."""


@dataclass(frozen=True)
class Forecast:
    """What a run will hold and take."""

    config: Config
    """The configuration of the run."""
    hardware: Hardware
    """The machine."""
    name: str
    """The name of the model."""
    num_parameters: int
    """The parameters of the model."""
    num_ranks: int
    """How many ranks a machine has; memory is told of one of them."""
    memory: Footprint
    """What is held, by tier and name."""
    timing: Timing | None
    """What a step takes; None where that is not known."""
    prepared: EnginePlan
    """What the engine would run on."""
    refusal: str = ""
    """What the engine would say if it refused; empty where it would not."""
    placed: str = ""
    """What the search chose of what the settings leave open, as flags; empty where that is as it was."""
    unplaced_seconds: float | None = None
    """The seconds of a step without that choice; None where it would not fit."""
    notes: tuple[str, ...] = ()
    """What else should be known, a line each."""
    fix: str = ""
    """The smallest change that fits, as flags, where the run does not; empty where none is known."""
    fix_bytes: Mapping[str, int] = field(default_factory=dict)
    """The bytes that each tier holds with that change."""
    alternatives: tuple[Alternative, ...] = ()
    """What else could be done, the fastest first."""

    @property
    def fits(self) -> bool:
        """True where neither the engine refuses nor a step passes a budget."""
        return not self.refusal and self.memory.fits

    @property
    def total_ranks(self) -> int:
        """Return how many ranks all machines have."""
        return self.num_ranks * self.hardware.num_machines

    @property
    def num_groups(self) -> int:
        """Return over how many groups of ranks, which share sequences, the rows of a step are cut."""
        return self.config.train.num_groups(self.total_ranks)

    @property
    def num_replicas(self) -> int:
        """Return how many replicas of the model there are."""
        return self.prepared.plan.layout.sharding.num_replicas

    @property
    def network_bytes(self) -> int:
        """Return the bytes that a step of a machine's ranks sends to other machines."""
        return 0 if self.timing is None else self.timing.network_bytes * self.num_ranks

    @property
    def written_bytes(self) -> int:
        """Return the bytes that a step of a machine's ranks writes to disk."""
        return 0 if self.timing is None else self.timing.nvme_written_bytes * self.num_ranks

    @property
    def tiers(self) -> dict[str, dict[str, Any]]:
        """Return what plan.json says of each tier: bytes, budget and allocations by name, of one rank. What operations
        hold of the host's memory is no budget's.
        """
        found: dict[str, dict[str, Any]] = {}
        for each in self.memory.allocations:
            if (each.tier, each.name) == ("cpu", OPERATIONS):
                continue
            budget = self.memory.budgets["cpu" if each.tier == "pinned" else each.tier]
            if each.tier in ("cpu", "pinned") and budget is None:
                budget = self.memory.host_bytes
            held = found.setdefault(each.tier, {"bytes": 0, "budget_bytes": budget, "allocations": []})
            held["bytes"] += each.num_bytes
            held["allocations"].append({"name": each.name, "bytes": each.num_bytes})
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        timing, day = self.timing, None
        if timing is not None and self.written_bytes:
            day = self.written_bytes / timing.step_seconds * DAY_S
        endurance = self.hardware.endurance_bytes
        return {
            "fits": self.fits,
            "model": self.name,
            "num_parameters": self.num_parameters,
            "machine": self.hardware.name,
            "ranks": self.num_ranks,
            "machines": self.hardware.num_machines,
            "replicas": self.num_replicas,
            "tiers": self.tiers,
            "loading_bytes": self.memory.loading_bytes,
            "operations_bytes": self.memory.operations_bytes,
            "shortfalls": self.memory.shortfalls,
            "step_seconds": None if timing is None else timing.step_seconds,
            "lane_seconds": {} if timing is None else dict(timing.lane_seconds),
            "exposed_seconds": {} if timing is None else dict(timing.exposed),
            "bound_by": None if timing is None else timing.bound_by,
            "tokens_per_second": None if timing is None else timing.tokens_per_second,
            "mfu": None if timing is None else timing.mfu,
            "hides_from_tokens": None if timing is None else timing.hides_from_tokens,
            "network_bytes_per_step": self.network_bytes,
            "nvme_written_bytes_per_step": self.written_bytes,
            "nvme_written_bytes_per_day": day,
            "nvme_endurance_days": endurance / day if endurance and day else None,
            "update": self.prepared.plan.update,
            "sequence_tile": self.prepared.settings.sequence_tile,
            "regions": len([region for region in self.prepared.structure.regions if region.trainable]),
            "regions_updated_on_device": len(self.prepared.plan.layout.streamed),
            "placement": self.placed or None,
            "refusal": self.refusal or None,
            "fix": self.fix or None,
            "fix_bytes": dict(self.fix_bytes),
            "notes": list(self.notes),
            "alternatives": [asdict(each) for each in self.alternatives],
            "levers": [
                {"change": each.change, "step_seconds": each.step_seconds}
                for each in self.alternatives
                if each.fits and each.step_seconds is not None
            ],
        }


@dataclass
class Forecaster:
    """Makes forecasts of one model, which is on `meta`, under many configurations and on many machines."""

    config: Config
    """The configuration that names the model."""
    num_ranks: int
    """How many ranks a machine has."""
    architecture: PreTrainedConfig | None = None
    """The model's own configuration, where it was read already."""
    machine: Machine | None = None
    """What plans ask; None for machines by their figures."""
    _works: dict[Any, Workload | str] = field(default_factory=dict)
    _structures: dict[str, Structure] = field(default_factory=dict)

    @cached_property
    def _architecture(self) -> Any:
        found = self.architecture or load_model_config(self.config.model.model_copy(update={"init": "random"}))
        return as_scorer(found) if self.config.train.method == "reward" else found

    @cached_property
    def _model(self) -> nn.Module:
        return self._built.model

    @cached_property
    def _built(self) -> BuiltModel:
        """The model that is trained, on `meta`, with what of it its files have in few bits."""
        section, architecture = self.config.model, self._architecture
        model, quantized = empty_model(section, architecture), dict[nn.Parameter, Quantized]()
        freezes = self.config.adapts or self.config.optimizer.freeze
        if freezes and architecture.dtype == torch.bfloat16 and is_pretrained(section, locate(section)):
            model.to(architecture.dtype)  # a frozen weight takes what its files have
        quantization = quantization_of(architecture)
        folder = None if quantization is None else locate(section)
        if quantization is not None and folder is not None and is_pretrained(section, folder):
            quantized |= quantized_parameters(model, folder, quantization)
        if self.config.adapts:
            adaptation = Adaptation.of(self.config.lora, model_kind(architecture).name)
            adaptation.check_rest(self.config.offload.parameters)
            model = adaptation.over_shapes(model)
            taken = adaptation.taken_from(model)
            quantized = {each: codec for each, codec in quantized.items() if each not in taken}
        freeze(model, self.config.optimizer.freeze)
        return BuiltModel(model, lambda _name, _module: None, None, quantized=quantized)

    def tell(self, config: Config, hardware: Hardware, *, times: bool = True) -> Forecast:
        """Return what a configuration comes to on a machine; without the `times` if told so. Raises ConfigError."""
        ranks = self._ranks(hardware)
        config.check_ranks(ranks.size)
        has_accelerator = hardware.device != "cpu"
        config = config.resolve(has_accelerator=has_accelerator, max_positions=max_positions(self._architecture))
        told, machine = settings(config), self.machine or DescribedMachine(hardware, self.num_ranks)
        structure_of, refusal = partial(self._structure, ranks=ranks), ""
        plan = partial(EnginePlan.fitting, structure_of, told, ranks)
        try:
            prepared = plan(machine)
        except DoesNotFitError as error:
            refusal, prepared = str(error), plan(machine, checks=False)
        work, notes = self._work(config, prepared, ranks.size), list[str]()
        if isinstance(work, str):
            notes.append(f"what a step adds is not known: {work}.")
        if hardware.shares_memory:
            notes.append("the device computes in the host's memory: what is moved to the host is no memory won.")
        if hardware.num_machines > 1 and hardware.rates.network_bytes_per_s is None:
            notes.append(
                f"how fast the network of {hardware.name} is, is not known: a step is told as if it took no time."
            )
        known = None if isinstance(work, str) else work
        if known is not None:
            notes += told_experts(prepared.structure, known)
        memory, timing = footprint(prepared, known, hardware, self.num_ranks), None
        if not hardware.rates.has_disk and any(each.tier == "nvme" for each in memory.allocations):
            notes.append(f"how fast a disk of {hardware.name} is, is not known, and so is no step.")
            times = False
        if known is not None and times:
            try:
                timing = PlannedStep(prepared, known, hardware.of_a_rank(self.num_ranks)).play()
            except RuntimeError as error:  # whose pieces are mapped one by one, and not touched
                if "allocate memory" not in str(error):
                    raise
                notes.append(
                    "what a step takes is not known: one piece of what it holds is more than this machine has."
                )
        return Forecast(
            config,
            hardware,
            type(getattr(self._model, "get_base_model", lambda: self._model)()).__name__,
            sum(info.numel for info in prepared.structure.infos),
            self.num_ranks,
            memory,
            timing,
            prepared,
            refusal,
            notes=tuple(notes),
        )

    def choose(self, found: Forecast, *, times: bool = True) -> dict[str, Any]:
        """Return what the search finds fastest (or, without the `times`, the first that fits) where a forecast's
        configuration leaves it open, by key; nothing where that is what was told, nothing fits, or a step is not known.
        """
        prepared, work = found.prepared, self._work(found.config, found.prepared, found.total_ranks)
        told = prepared.settings
        if isinstance(work, str):
            return {}
        asked = self.machine or DescribedMachine(found.hardware, self.num_ranks)
        placer = Placer(prepared, work, found.hardware.of_a_rank(self.num_ranks), asked, self.num_ranks)
        is_limited = found.hardware.device != "cpu" or told.placement.device_memory is not None
        is_open = found.config.origin("offload.zero_stage") == "resolved"
        chosen = placer.choose(told, limited=is_limited, cuts=is_open, times=times)
        values = {key: attrgetter(path)(chosen) for key, path in _SEARCHED.items()}
        return {key: value for key, value in values.items() if value != attrgetter(_SEARCHED[key])(told)}

    def _ranks(self, hardware: Hardware) -> ImaginedRanks:
        """Return the ranks of all machines."""
        return ImaginedRanks(self.num_ranks * hardware.num_machines, hardware.num_machines)

    def _structure(self, told: Settings, share_bytes: int | None, ranks: ImaginedRanks) -> Structure:
        sharding = sharding_of(told, ranks)
        cut = told.placement.experts == "streamed", share_bytes, ranks.size, sharding.num_replicas, sharding.num_ranges
        coded = told.frozen_weights, told.link_weights
        key = repr((told.optimizer, told.precision, coded, told.delay, cut))
        if key not in self._structures:
            self._structures[key] = Structure.of(self._model, told, ranks, self._built.quantized, share_bytes)
        return self._structures[key]

    def _work(self, config: Config, prepared: EnginePlan, num_ranks: int) -> Workload | str:
        """Return what a step computes on one of so many ranks, or why that is not known."""
        told, kind = prepared.settings, model_kind(self._architecture).name
        rows = -(-config.train.batch_size // config.train.num_groups(num_ranks)) * config.train.group
        shared_by = config.train.sequence_parallel
        length = -(-int(config.data.sequence_length or 0) // shared_by)
        batch = BatchSpec(kind, rows, length, is_padded=_has_mask(config.data), shared_by=shared_by)
        how = told.micro_batch_size, prepared.chunk_bytes, told.precision, told.device, told.sequence_tile
        key = batch, how, prepared.structure.cutting.share_bytes
        if key not in self._works:
            try:
                self._works[key] = measure(self._model, batch, prepared)
            except CannotMeasureError as error:
                self._works[key] = str(error)
        return self._works[key]


def _has_mask(data: DataSection) -> bool:
    """True where attention needs a mask: for padding, or to keep documents apart."""
    return not data.packing or data.packing_isolated is True
