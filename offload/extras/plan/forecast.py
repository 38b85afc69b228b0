"""Forecast memory use and step time of a run before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from offload.app.config.config import Config
from offload.app.config.sections import ModelSection
from offload.app.hf.companion import beside
from offload.app.hf.model_path import find_model
from offload.app.hf.models import (
    BuiltModel,
    embedding_width,
    empty_model,
    freeze,
    freeze_for_evaluation,
    is_decoder,
    is_pretrained,
    load_model_config,
    locate,
    max_positions,
    model_kind,
    trained_config,
    vocab_size,
    without_weights,
)
from offload.app.hf.names import CannotStream
from offload.app.hf.quantized import quantization_method, quantization_settings
from offload.app.hf.read import has_weights, planned_parameters, quantized_parameters, stored_dtype
from offload.app.training.decisions import resolve
from offload.app.training.objectives import OBJECTIVES
from offload.app.training.parts import make_settings
from offload.app.training.trainable import trainable_class
from offload.engine.loss.loss import as_loss
from offload.engine.prepare import EnginePlan, Structure
from offload.engine.units.recompute_policy import PRODUCTS
from offload.errors import ConfigError, DoesNotFitError, counted, format_bytes
from offload.extras.adapters.adapters import Adaptation
from offload.extras.large.dispatch import check_machines
from offload.extras.large.tiles import Tiles
from offload.extras.plan.machine_files import share_of_rank
from offload.extras.plan.measure import BatchSpec, CannotMeasureError, measure
from offload.extras.plan.memory import OPERATIONS, Footprint, footprint, with_copy
from offload.extras.plan.routed import describe_experts
from offload.extras.plan.search import PlacementSearch, Simulations, bound_seconds
from offload.extras.plan.simulated_ranks import SimulatedRanks
from offload.extras.plan.timing import PlannedStep, Timing
from offload.extras.plan.unit_use import FoundUses
from offload.extras.plan.workload import Workload
from offload.fused_attention import Capability
from offload.layout.codecs import Codec
from offload.layout.residence import DEVICE, DISK, HOST
from offload.machine.hardware import FP8, Hardware
from offload.planning.machines import Machine, SpecifiedMachine
from offload.planning.plan import sharding_of
from offload.planning.settings import Settings

DAY_S = 86400.0
TIER_NAMES = {DEVICE: "device", "pinned": "host, pinned", HOST: "host", DISK: "disk"}
"""Tier names in messages."""
_NUM_STEPS = 6
"""Simulated steps of a forecast."""
_BOUND_ERROR = 1e-3
"""Relative error of a bound: simulated times are extrapolated from fewer passes, and means of few steps."""
_SEARCH_OPTIONS = {
    **{
        f"offload.{key}": f"placement.{key}"
        for key in ("parameters", "optimizer", "gradients", "activations", "graphs")
    },
    "offload.update": "update",
    "offload.zero_stage": "zero_stage",
    "offload.replicas": "replicas",
    "train.recompute": "recompute",
}
"""Options the placement search decides: config key -> attribute path in `Settings`."""


@dataclass(frozen=True)
class Alternative:
    """A changed configuration with its forecast."""

    change: str
    """The change, in words or as flags."""
    step_seconds: float | None
    """Step time in seconds; None: unknown."""
    tokens_per_second: float | None
    """Throughput over all ranks; None: unknown."""
    fits: bool
    """True if the changed run fits the machine."""
    effect: str = ""
    """What the change does to the training; empty: nothing."""


@dataclass(frozen=True)
class Forecast:
    """Memory and step time forecast for a run."""

    config: Config
    """Run configuration."""
    hardware: Hardware
    """Target machine."""
    name: str
    """Model class name."""
    num_parameters: int
    """Number of model parameters."""
    num_ranks: int
    """Ranks per machine. Memory figures are for one rank."""
    memory: Footprint
    """Memory use by tier and name."""
    timing: Timing | None
    """Step timing; None: unknown."""
    step: PlannedStep | None
    """The simulated step; None: `timing` is unknown."""
    prepared: EnginePlan
    """Engine plan for this configuration."""
    refusal: str = ""
    """Error message of the engine if planning fails; empty otherwise."""
    placement_flags: str = ""
    """Options chosen by the placement search, as flags; empty: none changed."""
    seconds_without_search: float | None = None
    """Step time without the search result, in seconds; None: the run would not fit."""
    notes: tuple[str, ...] = ()
    """Further remarks, one line each."""
    fix: str = ""
    """Smallest change needed to fit, as flags; empty: the run fits, or no change is known."""
    fix_effect: str = ""
    """What the fix changes in the training; empty: nothing, or no fix."""
    fix_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes per tier with the fix applied."""
    untried_after: int | None = None
    """Forecasts after which the search for a fix ended, with changes untried; None: a fix, or nothing left to try."""
    alternatives: tuple[Alternative, ...] = ()
    """Other configurations to consider, fastest first."""

    @property
    def fits(self) -> bool:
        """True if planning succeeds and no tier exceeds the budget."""
        return not self.refusal and not self.memory.shortfalls

    @property
    def missing(self) -> str:
        """Missing memory by tier; empty: none, or a refusal."""
        if not self.memory.shortfalls:
            return ""
        short = " and ".join(
            f"{format_bytes(num_bytes)} ({num_bytes} bytes) of {TIER_NAMES[tier]} memory"
            for tier, num_bytes in self.memory.shortfalls.items()
        )
        before = [key for key, first in self.memory.before.items() if first.shortfalls]
        named = ""
        if before:
            named = f" ({before[0]} runs before the first step)"
        return f"{short} are missing{named}."

    @property
    def shortage(self) -> str:
        """Sentence about the missing memory, or the reason for refusal."""
        return f"it does not fit: {self.missing or self.refusal}"

    @property
    def total_ranks(self) -> int:
        """Number of ranks on all machines."""
        return self.num_ranks * self.hardware.num_machines

    @property
    def num_groups(self) -> int:
        """Number of sequence-parallel groups. The batch rows are divided between them."""
        return self.config.train.num_groups(self.total_ranks)

    @property
    def num_replicas(self) -> int:
        """Number of model replicas."""
        return self.prepared.plan.residence.sharding.num_replicas

    @property
    def network_bytes(self) -> int:
        """Bytes all ranks of one machine send to other machines per step."""
        return self._moved_bytes("network")

    @property
    def written_bytes(self) -> int:
        """Bytes all ranks of one machine write to disk per step."""
        return self._moved_bytes("nvme_write")

    def _moved_bytes(self, link: str) -> int:
        if self.timing is None:
            return 0
        return self.timing.moved_bytes[link] * self.num_ranks

    @property
    def tiers(self) -> dict[str, dict[str, Any]]:
        """Bytes, budget and allocations per tier for one rank, as in plan.json.

        Excludes operation memory on the host, since no budget covers it.
        """
        totals: dict[str, dict[str, Any]] = {}
        for each in self.memory.allocations:
            if (each.tier, each.name) == ("cpu", OPERATIONS):
                continue
            limited = HOST if each.tier == "pinned" else each.tier  # one budget for both kinds of host memory
            budget = self.memory.budgets[limited]
            if limited == HOST:
                budget = self.memory.host_bytes if budget is None else min(budget, self.memory.host_bytes)
            total = totals.setdefault(each.tier, {"bytes": 0, "budget_bytes": budget, "allocations": []})
            total["bytes"] += each.num_bytes
            total["allocations"].append({"name": each.name, "bytes": each.num_bytes})
        return totals

    def to_dict(self) -> dict[str, Any]:
        """Return all fields in JSON form."""
        timing, day = self.timing, None
        endurance = self.hardware.endurance_bytes
        if timing is not None and self.written_bytes:
            day = self.written_bytes / timing.step_seconds * DAY_S
        rates = ("bound_by", "tokens_per_second", "mfu", "hides_from_tokens")
        return {
            "fits": self.fits,
            "model": self.name,
            "num_parameters": self.num_parameters,
            "precision": self.config.train.precision,
            "rows": self.config.num_rows,
            "sequence_length": self.config.data.sequence_length,
            "machine": self.hardware.name,
            "ranks": self.num_ranks,
            "machines": self.hardware.num_machines,
            "replicas": self.num_replicas,
            "tiers": self.tiers,
            "loading_bytes": self.memory.loading_bytes,
            "operations_bytes": self.memory.operations_bytes,
            "lent_bytes": self.memory.lent_bytes,
            "copy_bytes": self.memory.copy_bytes,
            "before": {key: first.peaks for key, first in self.memory.before.items()},
            "shortfalls": self.memory.shortfalls,
            "step_seconds": getattr(timing, "step_seconds", None),
            "lane_seconds": {} if timing is None else dict(timing.lane_seconds),
            "lane_bytes": {} if self.step is None else self.step.lane_bytes(),
            "exposed_seconds": {} if timing is None else dict(timing.exposed),
            "compute_parts": {} if timing is None else dict(timing.compute_parts),
            **{name: getattr(timing, name, None) for name in rates},
            "network_bytes_per_step": self.network_bytes,
            "nvme_written_bytes_per_step": self.written_bytes,
            "nvme_written_bytes_per_day": day,
            "nvme_endurance_days": endurance / day if endurance and day else None,
            "update": self.prepared.plan.update,
            "sequence_tile": self.prepared.settings.sequence_tile,
            "regions": len([region for region in self.prepared.structure.regions if region.trainable]),
            "regions_updated_on_device": len(self.prepared.plan.residence.updated_on_device),
            "placement": self.placement_flags or None,
            "refusal": self.refusal or None,
            "fix": self.fix or None,
            "fix_effect": self.fix_effect or None,
            "fix_bytes": dict(self.fix_bytes),
            "untried_after": self.untried_after,
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
    """Forecasts one `meta` model for many configurations and machines. Structures and workloads are cached."""

    config: Config
    """Configuration with the model to load."""
    num_ranks: int
    """Ranks per machine."""
    architecture: PreTrainedConfig | None = None
    """Transformers model config; None: loaded on first use."""
    machine: Machine | None = None
    """Machine for planning; None: derived from the hardware figures."""
    plans_downloads: bool = False
    """Plan a model without weight files, such as a preset, like a download in the configuration's dtype, or bf16."""
    document_share: float | None = None
    """Mean of squared document lengths in a row, as a share of the squared row length; None: unknown."""
    _workloads: dict[Any, Workload | str] = field(default_factory=dict)
    _tiles: dict[tuple[str, str], dict[Hashable, Tiles]] = field(default_factory=dict)
    _uses: dict[Hashable, FoundUses] = field(default_factory=dict)
    _structures: dict[str, Structure | ConfigError] = field(default_factory=dict)
    _simulations: Simulations = field(default_factory=Simulations)
    _searches: dict[Hashable, PlacementSearch] = field(default_factory=dict)
    _forecasts: dict[str, Forecast] = field(default_factory=dict)
    _timed: dict[str, Forecast] = field(default_factory=dict)
    _made: set[tuple[str, bool]] = field(default_factory=set)
    _evaluates: bool = False
    """Plan for evaluations alone."""
    _companions: Mapping[str, BuiltModel] = field(default_factory=dict)
    _adapted: Forecaster | None = None
    """Forecaster of the same model under an adapter, or without its own one. None: not asked for yet."""
    _unplanned: str = ""
    """Why a quantization in the configuration is not planned; empty: planned, or none."""

    @cached_property
    def _files_architecture(self) -> Any:
        """Configuration of the model in the files."""
        return self.architecture or load_model_config(without_weights(self.config.model))

    @cached_property
    def _architecture(self) -> Any:
        return trained_config(self._files_architecture, self.config.train.method)

    @cached_property
    def _built(self) -> BuiltModel:
        """The trained model on `meta`, with its quantized checkpoint parameters."""
        section, architecture = self.config.model, self._architecture
        model = empty_model(section, architecture)
        freezes = self.config.lora.adapts or self.config.optimizer.freeze
        is_loaded, is_stand_in = self._origin()
        if freezes and self._files_dtype(is_loaded, is_stand_in) == torch.bfloat16:
            model.to(torch.bfloat16)  # frozen weights keep the checkpoint dtype
        quantized = self._find_quantized(model, is_loaded, is_stand_in)
        if self.config.lora.adapts:
            adaptation = Adaptation.of(self.config.lora, model_kind(architecture).name)
            adaptation.check_tier(self.config.offload.parameters)
            model = adaptation.apply_to_shapes(model)
            reduced = adaptation.reduced_weights(model)  # no longer the values of the files
            quantized = {each: codec for each, codec in quantized.items() if each not in reduced}
        freeze(model, self.config.optimizer.freeze)
        built = BuiltModel(model, quantized=quantized)
        self._companions = OBJECTIVES[self.config.train.method].companions(self.config, model, self._on_shapes)
        for name, companion in self._companions.items():
            built = beside(built, name, companion)
        return built

    @cached_property
    def _first(self) -> Mapping[str, Forecaster]:
        """Forecasters of the models that run alone before the first step, by setting."""
        try:
            kind, num_tokens = OBJECTIVES[self.config.train.method], vocab_size(self._architecture)
            models = kind.measured_first(self.config, self._on_shapes, num_tokens)
        except ConfigError:
            if self.machine is not None:  # a resumed run may do without the folder, and a new one refuses it itself
                return {}
            raise
        found = {}
        for key, built in models.items():
            freeze_for_evaluation(built.model)
            found[key] = Forecaster(self.config, self.num_ranks, built.model.config, self.machine)
            found[key]._evaluates = True
            found[key]._built = built
        return found

    def _origin(self) -> tuple[bool, bool]:
        """Return whether weights are read from files, and whether they are planned like a download."""
        section = self.config.model
        if section.init == "pretrained" and self.machine is not None:  # a resumed run may lack the folder
            return True, False
        folder = self._locate(section)
        is_loaded = is_pretrained(section, folder)
        is_download = self.plans_downloads or (folder is not None and not find_model(str(section.path)).exists())
        has_files = is_loaded and folder is not None and has_weights(folder)
        is_stand_in = is_download and section.init != "random" and not has_files
        return is_loaded and not is_stand_in, is_stand_in

    def _locate(self, section: ModelSection) -> Path | None:
        """Return the folder or file of a model. A plan downloads no weights; a run reads them anyway."""
        if self.machine is None:
            section = without_weights(section)
        return locate(section)

    def _on_shapes(self, section: ModelSection) -> BuiltModel:
        """Return a frozen model on `meta`, in the dtype of the files, with the quantized parameters.

        Raises ConfigError, DiskError.
        """
        folder, architecture = self._locate(section), load_model_config(without_weights(section))
        quantization = quantization_settings(architecture)
        model = empty_model(section, architecture)
        quantized: Mapping[nn.Parameter, Codec] = {}
        if folder is None or not has_weights(folder):
            model.to(architecture.dtype or torch.bfloat16)
            if quantization is not None:
                quantized = self._as_downloaded(model, section, architecture, quantization)
        else:
            model.to(architecture.dtype or stored_dtype(folder, quantization))
            if quantization is not None:
                quantized = quantized_parameters(model, folder, quantization)
        return BuiltModel(model, quantized=quantized)

    def _files_dtype(self, is_loaded: bool, is_stand_in: bool) -> torch.dtype | None:
        """Return the dtype of the weights in the model files, or in files that the configuration stands for.

        None: no files. Raises ConfigError, DiskError.
        """
        if not (is_loaded or is_stand_in):
            return None
        if is_loaded and self._architecture.dtype is None and (folder := self._locate(self.config.model)) is not None:
            return stored_dtype(folder, quantization_settings(self._architecture))
        return self._architecture.dtype or torch.bfloat16

    def _find_quantized(self, model: nn.Module, is_loaded: bool, is_stand_in: bool) -> dict[nn.Parameter, Codec]:
        """Return the quantized parameters of the model files, or of files that the configuration stands for.

        Records why a quantization in the configuration is left out. Raises ConfigError, DiskError.
        """
        section, quantization = self.config.model, quantization_settings(self._architecture)
        if quantization is None:
            return {}
        if is_loaded and (folder := self._locate(section)) is not None:
            return quantized_parameters(model, folder, quantization)
        if self.config.lora.adapts and is_stand_in:
            return self._as_downloaded(model, section, self._files_architecture, quantization)
        reason = "only an adapter trains over quantized weights. Set --lora.rank, such as 16, to plan one."
        if self.config.lora.adapts:
            reason = (
                f"{section.label} has no weight files, so the run begins with random weights. Set --model.path to the "
                "folder with the weights."
            )
        self._leave_out(quantization, reason)
        return {}

    def _as_downloaded(
        self, model: nn.Module, section: ModelSection, architecture: Any, quantization: Mapping[str, Any]
    ) -> dict[nn.Parameter, Codec]:
        """Return the quantized parameters of files that a configuration stands for. Records why there are none."""
        try:
            written = empty_model(section, architecture)  # a reward model has another head
            dtype = architecture.dtype or torch.bfloat16
            if found := planned_parameters(model, written, Path(section.label), quantization, dtype):
                return found
            reason = f"this format has no place for a weight of {type(model).__name__}."
        except (ConfigError, CannotStream) as error:
            reason = str(error)
        self._leave_out(quantization, reason)
        return {}

    def _leave_out(self, quantization: Mapping[str, Any], reason: str) -> None:
        self._unplanned = (
            f"the quantization in the configuration ({quantization_method(quantization)}) is not planned, the plan is "
            f"for unquantized weights: {reason}"
        )

    def of(self, config: Config) -> Forecaster:
        """Return the forecaster of the model that a configuration trains: another one, if it trains an adapter."""
        if config.lora.adapts == self.config.lora.adapts:
            return self
        if self._adapted is None:
            self._adapted = Forecaster(
                config,
                self.num_ranks,
                self._files_architecture,
                self.machine,
                self.plans_downloads,
                self.document_share,
            )
        return self._adapted

    @property
    def num_made(self) -> int:
        """Number of forecasts made, without repeated ones."""
        return len(self._made) + (self._adapted.num_made if self._adapted else 0)

    def predict(
        self, config: Config, hardware: Hardware, *, times: bool = True, worth_s: float | None = None
    ) -> Forecast:
        """Return the forecast for a configuration on a machine. Raises ConfigError.

        times: False skips the step simulation. worth_s: skip it also if the run does not fit, or if a step surely takes
            more seconds; None: never.
        """
        key = repr((list(config.items()), hardware))  # a search returns to the same configuration
        if key not in self._forecasts:
            self._forecasts[key] = self._predict(config, hardware)
        self._made.add((key, times))
        found = self._forecasts[key]
        if not times:
            return found
        if key not in self._timed:
            step = self._step(found)
            if worth_s is not None and not (found.fits and _may_take(step, worth_s)):
                return found
            self._timed[key] = self._simulate(found, step)
        return self._timed[key]

    def _step(self, found: Forecast) -> PlannedStep | None:
        """Return the step to simulate; None: the workload or the rates are unknown."""
        work = self._workload(found.config, found.prepared, found.total_ranks, found.hardware.capability)
        if isinstance(work, str) or _lacks_disk_rates(found.hardware, found.memory):
            return None
        return PlannedStep(found.prepared, work, share_of_rank(found.hardware, self.num_ranks))

    def _simulate(self, found: Forecast, step: PlannedStep | None) -> Forecast:
        """Return the forecast with the step time."""
        if step is None:
            return found
        try:
            return replace(found, step=step, timing=self._simulations.timing(step, _NUM_STEPS))
        except RuntimeError as error:  # a simulated buffer is mapped in one piece, maybe larger than memory
            if "allocate memory" not in str(error):
                raise
            note = "there is no step time, because the simulation needs a buffer larger than this machine's memory."
            return replace(found, notes=(*found.notes, note))

    def _predict(self, config: Config, hardware: Hardware) -> Forecast:
        """Return the forecast without the step time."""
        ranks = SimulatedRanks(self.num_ranks * hardware.num_machines, hardware.num_machines)
        config.check_ranks(ranks.size)
        has_accelerator = hardware.device != "cpu"
        config = resolve(
            config,
            has_accelerator=has_accelerator,
            has_bf16=hardware.rates.has_bf16,
            max_positions=max_positions(self._architecture),
            is_decoder=is_decoder(self._architecture),
            num_ranks=ranks.size,
        )
        settings, machine = make_settings(config), self.machine or SpecifiedMachine(hardware, self.num_ranks)
        if settings.matmul != "precision" and has_accelerator and FP8 not in hardware.rates.flops_per_s:
            raise ConfigError(
                f"train.matmul is {settings.matmul}, but {hardware.name} has no rate for FP8 products (they begin with "
                "compute capability 8.9): set --train.matmul precision, or give rates.flops_per_s.fp8 in the "
                "description of the machine."
            )
        if settings.dispatch == "always":
            check_machines(hardware.num_machines)
        structure_of, refusal = partial(self._structure, ranks=ranks), ""
        plan = partial(EnginePlan.fit, structure_of, settings, ranks)
        try:
            prepared = plan(machine)
        except DoesNotFitError as error:  # planned all the same, to show what is missing
            refusal, prepared = error.reason, plan(machine, checks=False)
        work = self._workload(config, prepared, ranks.size, hardware.capability)
        method_notes = OBJECTIVES[config.train.method].plan_notes(config, vocab_size(self._architecture))
        notes = [*hardware.notes, *method_notes]
        if isinstance(work, str):
            notes.append(f"the memory and time added by a step are unknown: {work}.")
        if has_accelerator and hardware.num_devices is not None and hardware.num_devices < self.num_ranks:
            notes.append(
                f"{hardware.name} has {counted(hardware.num_devices, 'device')}, and the plan is for --gpus "
                f"{self.num_ranks}, each rank with a device of its own."
            )
        if hardware.shares_memory:
            in_place = ""
            if prepared.plan.residence.uses_pages and prepared.plan.residence.common == HOST:
                in_place = ", and weights there are used without a copy"
            notes.append(f"the device uses the host's memory: moving states to the host frees no memory{in_place}.")
        if hardware.num_machines > 1 and hardware.rates.network_bytes_per_s is None:
            notes.append(f"the network rate of {hardware.name} is unknown: the step time does not include the network.")
        if self._unplanned:
            notes.append(self._unplanned)
        workload = None if isinstance(work, str) else work
        if workload is not None and (text := describe_experts(prepared.structure, workload)):
            notes.append(text)
        memory = footprint(prepared, workload, hardware, self.num_ranks)
        if config.checkpoint.every is not None or config.checkpoint.keep_best:
            memory = with_copy(memory, prepared, trainable_class(config).trained_only)
        if not self._evaluates:
            alone = config.with_resolved(optimizer__groups=())
            before = {key: first.predict(alone, hardware, times=False) for key, first in self._first.items()}
            memory = replace(memory, before={key: each.memory for key, each in before.items()})
            reasons = (f"{key}, before the first step: {each.refusal}" for key, each in before.items() if each.refusal)
            refusal = refusal or next(reasons, "")
        if _lacks_disk_rates(hardware, memory):  # the memory is known all the same, and shown
            notes.append(f"the disk rate of {hardware.name} is unknown, so there is no step time.")
        return Forecast(
            config,
            hardware,
            type(getattr(self._built.model, "get_base_model", lambda: self._built.model)()).__name__,
            sum(info.numel for info in prepared.structure.infos if not info.companion),
            self.num_ranks,
            memory,
            None,
            None,
            prepared,
            refusal,
            notes=tuple(notes),
        )

    def choose(self, prediction: Forecast, *, times: bool = True) -> dict[str, Any]:
        """Return the fastest placement for options left open in the config, by config key.

        Empty if the search keeps the current settings, nothing fits, or the workload is unknown. `times` False: return
        the first placement with enough room instead.
        """
        prepared, settings = prediction.prepared, prediction.prepared.settings
        work = self._workload(prediction.config, prepared, prediction.total_ranks, prediction.hardware.capability)
        if isinstance(work, str):
            return {}
        search = self._search(prediction, work)
        is_open = prediction.config.origin("offload.zero_stage") == "resolved"  # not set by the user
        chosen = search.choose(settings, cuts=is_open, times=times)
        values = {key: attrgetter(path)(chosen) for key, path in _SEARCH_OPTIONS.items()}
        return {key: value for key, value in values.items() if value != attrgetter(_SEARCH_OPTIONS[key])(settings)}

    def _search(self, prediction: Forecast, work: Workload) -> PlacementSearch:
        prepared, hardware = prediction.prepared, prediction.hardware
        read = prepared.settings.precision, prepared.settings.compile  # all the settings that the search itself reads
        key = tuple(prepared.structure.regions), work, read, repr(hardware), self.num_ranks
        if key not in self._searches:
            self._searches.clear()  # machines and batches come one after the other, and plans take memory
            machine = self.machine or SpecifiedMachine(hardware, self.num_ranks)
            share = share_of_rank(hardware, self.num_ranks)  # a step is that of one rank, beside the others
            found = PlacementSearch(prepared, work, share, machine, self.num_ranks, self._simulations)
            self._searches[key] = found
        return self._searches[key]

    def _structure(self, settings: Settings, share_bytes: int | None, ranks: SimulatedRanks) -> Structure:
        sharding, is_streamed = sharding_of(settings, ranks), settings.placement.experts == "streamed"
        cut = is_streamed, share_bytes, ranks.size, sharding.num_replicas, sharding.num_ranges
        codecs = settings.frozen_weights, settings.link_weights, settings.sequence_parallel
        # All that a structure depends on: a search has many placements over few structures.
        key = repr((settings.optimizer, settings.precision, settings.matmul, codecs, settings.delay, cut))
        if key not in self._structures:
            model, quantized = self._built.model, self._built.quantized
            try:
                self._structures[key] = Structure.of(model, settings, ranks, quantized, share_bytes)
            except ConfigError as error:  # a model without experts cannot stream them, in any forecast
                self._structures[key] = error
        found = self._structures[key]
        if isinstance(found, ConfigError):
            raise found.with_traceback(None)
        return found

    def _workload(
        self, config: Config, prepared: EnginePlan, num_ranks: int, capability: Capability | None = None
    ) -> Workload | str:
        """Return the workload for one rank, or the reason for a failed measurement."""
        settings, model_type = prepared.settings, model_kind(self._architecture).name
        # Of the rank with the most rows. A pass has at least one row on each rank.
        fewest, more = divmod(config.train.batch_size, config.train.num_groups(num_ranks))
        groups, passes = fewest + bool(more), max(1, min(settings.passes, fewest))
        rows = -(-groups // passes) * config.group  # of the largest pass
        data, shared_by = config.data, config.train.sequence_parallel
        length = -(-int(data.sequence_length or 0) // shared_by)  # tokens of a row on one rank
        batch = BatchSpec(model_type, rows, length, not data.packing, config.is_isolated, shared_by)
        if config.attends_documents:
            # Without data, one document takes the whole row but a token, so the forecast is an upper bound.
            share = 1.0 if self.document_share is None else self.document_share * length**2 / ((length - 1) ** 2 + 1)
            batch = replace(batch, document_length=length - 1, document_share=share)
        kernels = settings.matmul, settings.recompute == PRODUCTS, settings.compile, capability
        products = settings.precision, *kernels
        options = settings.micro_batch_size, products, settings.device, settings.sequence_tile
        # The whole batch, because a loss may compare its rows.
        key = batch, config.num_rows, passes, options, prepared.chunk_bytes, prepared.structure.splitting.share_bytes
        if key not in self._workloads:
            try:
                found_tiles = self._tiles.setdefault((settings.precision, settings.matmul), {})
                # All that a use depends on beside its shapes: the rest of a key is rows, chunks and passes.
                kind = replace(batch, rows=0), products, settings.device, settings.sequence_tile
                found_uses = self._uses.setdefault((*kind, tuple(prepared.structure.regions)), {})
                model, num_tokens = self._built.model, vocab_size(self._architecture)
                loss = OBJECTIVES[config.train.method].loss_over(config, model, self._companions, num_tokens)
                found = measure(model, batch, prepared, found_tiles, found_uses, loss, capability)
                if self._evaluates:
                    found = found.without_backward()
                width = embedding_width(self._architecture)
                loss_bytes = as_loss(loss).num_bytes(config.num_rows, rows, width)
                self._workloads[key] = replace(found, num_passes=passes, loss_bytes=loss_bytes)
            except CannotMeasureError as error:
                self._workloads[key] = str(error)
        return self._workloads[key]


def _lacks_disk_rates(hardware: Hardware, memory: Footprint) -> bool:
    return not hardware.rates.has_disk and any(each.tier == DISK for each in memory.allocations)


def _may_take(step: PlannedStep | None, seconds: float) -> bool:
    """Return False if a step surely takes more than some seconds."""
    if step is None or seconds == math.inf:
        return True
    has_bound = step.settings.optimizer.has_gradients and not step.plan.residence.sharding.dispatches
    return not has_bound or bound_seconds(step) <= (1 + _BOUND_ERROR) * seconds
