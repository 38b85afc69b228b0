"""From a model and its settings to what an engine runs on. Nothing is allocated before the plan stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from offload.accelerators import device_of, own_accelerator
from offload.distributed.comm import Comm
from offload.engine.state import EngineState
from offload.engine.take_over import share_buffers, take_over
from offload.engine.units.cut_experts import cut_experts
from offload.engine.units.cutting import Cutting
from offload.engine.units.find import Candidate, describe_parameters, find_units, regions_of
from offload.engine.units.row_blocks import RowBlocks
from offload.engine.units.shared_attention import check_shared
from offload.errors import ConfigError, DoesNotFitError
from offload.hf.sources import Fill
from offload.layout.codecs import Codec
from offload.layout.regions import ParameterInfo, Region, build_regions
from offload.planning.machines import Machine, ThisMachine
from offload.planning.memory import UnitPlan
from offload.planning.plan import Plan, make_plan, sharding_of, told_frozen_weights, told_links
from offload.planning.settings import Settings
from offload.telemetry.counters import Counters
from offload.tiers.placement import Placement

_ASKING = "make_inputs_require_grad"
"""How the names of hooks begin that let results of embeddings ask for a gradient."""


_SHARES = (4, 8, 16, 32, 64)
"""Of the device's budget, what a unit's weights have of it where whole units do not fit: one of so many parts."""


@dataclass(frozen=True)
class Structure:
    """What an engine makes of a model, on whatever machine."""

    infos: list[ParameterInfo]
    """The parameters."""
    candidates: list[Candidate]
    """The units, in module order."""
    regions: Sequence[Region]
    """How the parameters lie."""
    units: list[UnitPlan]
    """What the plan knows of each unit."""
    cutting: Cutting
    """How units are cut for which the device has no room."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        settings: Settings,
        comm: Comm,
        quantized: Mapping[nn.Parameter, Codec],
        share_bytes: int | None = None,
    ) -> Structure:
        """Find the units of a model, which may be on `meta`, and lay out their parameters for the ranks of `comm`.
        `quantized`: the codecs of what its files have in few bits. `share_bytes`: of weights, which the device has for
        a unit; None for as many as the largest has. Collective. Raises ConfigError.
        """
        leave_off_checkpointing(model)
        comm.group_of(settings.sequence_parallel)
        check_shared(model, settings.sequence_parallel)
        infos = describe_parameters(
            model, settings.optimizer, settings.precision, settings.frozen_weights, quantized, settings.link_weights
        )
        cutting = Cutting() if share_bytes is None else Cutting.of(model, infos, settings.optimizer, share_bytes)
        candidates = find_units(model, infos, cutting)
        rules, sharding = settings.optimizer.parts, sharding_of(settings, comm)
        if settings.placement.experts == "streamed":
            candidates = cut_experts(candidates, infos, settings.optimizer, sharding.num_replicas)
        regions = build_regions(
            infos,
            {name: its for unit in candidates for name, its in unit.cargoes.items()},
            [rule.moments for rule in rules],
            comm.size,
            delays=settings.delay > 0,
            factors={number: rule.factors for number, rule in enumerate(rules) if rule.by_matrix},
            num_ranges=sharding.num_ranges,
            without_low=[number for number, rule in enumerate(rules) if not rule.has_low],
        )
        uses = Counter[RowBlocks | None](cutting.blocks.values())
        units = [
            UnitPlan(c.name, regions_of(c, regions), c.resident, bool(c.records), uses[c.blocks] if c.layer else 0)
            for c in candidates
        ]
        return cls(infos, candidates, regions, units, cutting)


@dataclass(frozen=True)
class EnginePlan:
    """An engine before anything is allocated."""

    settings: Settings
    """With the device that computes, and this rank's part of the budgets."""
    structure: Structure
    """What the engine makes of the model."""
    plan: Plan
    """The list of allocations, and what was decided on the way to it."""

    @classmethod
    def of(
        cls, structure: Structure, settings: Settings, comm: Comm, machine: Machine, *, checks: bool = True
    ) -> EnginePlan:
        """Plan for a machine, and check the budgets, unless it `checks` nothing. Nothing is allocated. Collective.
        Raises ConfigError and DoesNotFitError.
        """
        settings = replace(settings, device=machine.device, placement=settings.placement.share(comm.local_size))
        plan = make_plan(settings, structure.units, structure.regions, comm, machine, checks=checks)
        return cls(settings, structure, plan)

    @classmethod
    def fitting(
        cls,
        structure_of: Callable[[Settings, int | None], Structure],
        settings: Settings,
        comm: Comm,
        machine: Machine,
        *,
        checks: bool = True,
    ) -> EnginePlan:
        """Plan as `of` does. Where the device does not hold the largest unit, experts come up one record at a time, if
        they may (`auto`, on one rank), or else units are cut, into the largest that leave a third of the device to
        activations, or that it holds at all; without `checks` nothing is. Nothing is cut for the sake of a prefetch
        that was asked for. `structure_of`: settings, with units of at most so many bytes of weights.
        """

        @cache
        def structure(how: str, share_bytes: int | None) -> tuple[Structure, Settings]:
            told = replace(settings, placement=replace(settings.placement, experts=how))
            return structure_of(told, share_bytes), told

        def plan(how: str, share_bytes: int | None = None, checks: bool = checks) -> EnginePlan:
            return cls.of(*structure(how, share_bytes), comm, machine, checks=checks)

        if settings.placement.experts == "streamed":
            return plan("streamed")
        refusal: DoesNotFitError | None = None
        try:
            whole = plan("whole")
        except DoesNotFitError as error:
            refusal, whole = error, plan("whole", checks=False)
        if refusal is not None and settings.placement.experts == "auto" and comm.size == 1:
            with suppress(ConfigError):  # there are no experts, or they cannot be cut, or tiles are asked for
                return plan("streamed")
        if not checks or whole.plan.fits_device:
            if refusal is not None:
                raise refusal
            return whole
        if refusal is not None and isinstance(settings.prefetch, int) and settings.prefetch:
            nearer = cls.of(whole.structure, replace(settings, prefetch=0), comm, machine, checks=False)
            if nearer.plan.fits_device:
                raise refusal
        budget, cut = whole.plan.device_bytes or 0, list[EnginePlan]()
        for part in _SHARES:
            cut.append(plan("whole", budget // part, checks=False))
            if (cut[-1].plan.device_room_bytes or 0) >= budget // 3:
                break
        chosen = max(cut, key=lambda each: each.plan.device_room_bytes or 0)
        if chosen.plan.fits_device:
            return cls.of(chosen.structure, chosen.settings, comm, machine)
        if refusal is not None:
            raise DoesNotFitError(f"{refusal}{chosen.structure.cutting.told_whole}") from refusal
        return whole

    @property
    def told_frozen_weights(self) -> str:
        """As of `told_frozen_weights` in `planning/plan.py`."""
        return told_frozen_weights(self.structure.infos, self.structure.regions, self.plan.layout)

    @property
    def told_links(self) -> str:
        """As of `told_links` in `planning/plan.py`."""
        return told_links(self.structure.regions, self.plan.layout.sharding)

    @property
    def chunk_bytes(self) -> int | None:
        """Bytes of logits that may exist at once; None for all."""
        return self.settings.chunk_bytes(self.plan.device_bytes)


def prepare(
    model: nn.Module,
    settings: Settings,
    comm: Comm,
    machine: Machine | None = None,
    quantized: Mapping[nn.Parameter, Codec] | None = None,
) -> EnginePlan:
    """Find the units, and plan for a machine (None: this one), as all ranks do. The model may be on `meta`.
    `quantized`: as of `Structure.of`. Collective. Raises ConfigError and DoesNotFitError.
    """
    machine = machine or ThisMachine(own_accelerator(str(engine_device(settings, comm))))
    comm.agree("the engine's settings", _shown(settings, ignored=("throttle", "debug", "device")))

    def structure_of(settings: Settings, share_bytes: int | None) -> Structure:
        structure = Structure.of(model, settings, comm, quantized or {}, share_bytes)
        shown = {info.name: _shown(info) for info in structure.infos} | {u.name: _shown(u) for u in structure.units}
        comm.agree("the model", shown)
        return structure

    prepared = EnginePlan.fitting(structure_of, settings, comm, machine)
    layout = prepared.plan.layout
    comm.agree(
        "the plan", _shown(prepared.plan, ignored=("layout",)) | {"layout": repr((layout.planes, layout.staying))}
    )
    return prepared


def assemble(
    model: nn.Module,
    settings: Settings,
    counters: Counters,
    fill: Fill | None,
    comm: Comm,
    quantized: Mapping[nn.Parameter, Codec],
) -> EngineState:
    """Prepare, and only then allocate. `quantized`: as of `Structure.of`. Collective."""
    # Weights that are there go as the engine takes them; those to be filled take no memory yet.
    given = {p.data_ptr(): p.nbytes for p in model.parameters() if fill is None and p.device.type == "cpu"}
    machine = ThisMachine(own_accelerator(str(engine_device(settings, comm))), sum(given.values()))
    prepared = prepare(model, settings, comm, machine, quantized)
    if prepared.plan.layout.files and fill is None:
        raise ConfigError(
            "offload.parameters is files, and Engine() was given a model that has its weights already, from no files: "
            "build it of its folder (build_model or read_model, and fill=), or set --offload.parameters cpu."
        )
    share_buffers(model, comm)
    state = EngineState(
        model,
        prepared.settings,
        prepared.structure.infos,
        prepared.structure.candidates,
        prepared.structure.regions,
        prepared.structure.cutting,
        prepared.plan,
        counters,
        comm,
    )
    take_over(state, fill)
    return state


def engine_device(settings: Settings, comm: Comm) -> torch.device:
    """Return where the engine computes: where its ranks exchange tensors, if there are several. Raises ConfigError."""
    device = device_of(own_accelerator(settings.device))
    if comm.size == 1 or comm.device == device:
        return device
    if settings.device is not None:
        raise ConfigError(
            f"offload.device is {settings.device}, and the comm that the engine was given is for {comm.device}: give "
            f"no device, or a comm of open_comm(device={settings.device!r})."
        )
    return comm.device


def _shown(value: Any, ignored: Sequence[str] = ()) -> dict[str, str]:
    """Return the fields of a dataclass as text that is the same wherever they are the same."""
    shown = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in ignored}
    placement = shown.get("placement")
    if isinstance(placement, Placement):
        # Folders may have other names, and machines other numbers of ranks; the plans are compared as well.
        folder = None if placement.nvme_dir is None else "given"
        shown["placement"] = replace(placement, nvme_dir=folder, host_memory=None, nvme_memory=None)
    return {name: repr(found) for name, found in shown.items()}


def leave_off_checkpointing(model: nn.Module) -> None:
    """Turn transformers' gradient checkpointing off: units recompute already. With it go the hooks by which embeddings'
    results ask for a gradient for its sake: the backward would go down to them, and not end at the first trained unit.
    """
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return
    name = "activation_checkpointing_disable"  # the other one is what transformers called it before 5.23
    disable: Any = getattr(model, name, None) or model.gradient_checkpointing_disable
    disable()
    for module in model.modules():
        hooks = module._forward_hooks  # transformers knows only the last of them, and PEFT has one of its own
        for key in [key for key, hook in hooks.items() if getattr(hook, "__name__", "").startswith(_ASKING)]:
            del hooks[key]
