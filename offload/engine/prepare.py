"""Plan an engine: the structure of a model in units and regions, and a plan for a machine. Nothing is allocated."""

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
from offload.engine.companions import companions_of
from offload.engine.units.attention import attention_for
from offload.engine.units.find import SPLITTINGS, Splitting, UnitCandidate, describe_parameters, find_units, regions_of
from offload.engine.units.stages import STAGES
from offload.errors import ConfigError, DoesNotFitError
from offload.layout.build_regions import build_regions
from offload.layout.codecs import Codec
from offload.layout.regions import ParameterInfo, Region
from offload.planning.machines import Machine, ThisMachine
from offload.planning.memory import UnitPlan
from offload.planning.plan import Plan, make_plan, sharding_of
from offload.planning.settings import Settings
from offload.tiers.placement import Placement

_HOOK_PREFIX = "make_inputs_require_grad"
"""Name prefix of the forward hooks with which transformers and PEFT make embedding outputs require a gradient."""
_DISABLE = "activation_checkpointing_disable", "gradient_checkpointing_disable", "disable_gradient_checkpointing"
"""Methods that turn it off, in transformers, transformers before 5.23, and diffusers."""


_SHARES = (4, 8, 16, 32, 64)
"""Device budget divisors for the largest unit weights, tried in order when whole units do not fit."""


@dataclass(frozen=True)
class Structure:
    """Model structure for the engine: units, regions, parameters. Independent from the machine."""

    infos: list[ParameterInfo]
    """Model parameters."""
    dtypes: list[torch.dtype]
    """Dtypes in the original model, by parameter index."""
    candidates: list[UnitCandidate]
    """Units, in module order."""
    regions: Sequence[Region]
    """Regions: storage layout of the parameters."""
    units: list[UnitPlan]
    """Planning properties for each unit."""
    splitting: Splitting
    """Split of layers too large for the device."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        settings: Settings,
        comm: Comm,
        quantized: Mapping[nn.Parameter, Codec],
        share_bytes: int | None = None,
    ) -> Structure:
        """Find the units in a model (possibly on `meta`) and lay out the parameters for the ranks in `comm`.

        `quantized`: codecs for parameters quantized in the model files. `share_bytes`: limit for unit weights in bytes;
        None: no limit. Collective. Raises ConfigError.
        """
        disable_checkpointing(model)
        comm.group_of(settings.sequence_parallel)
        attention_for(settings.sequence_parallel).check_model(model, settings.sequence_parallel)
        infos = describe_parameters(
            model, settings.optimizer, settings.precision, settings.frozen_weights, quantized, settings.link_weights
        )
        splitting = Splitting()
        if share_bytes is not None:
            splitting = SPLITTINGS["rows"].of(model, infos, settings.optimizer, share_bytes)
        candidates = find_units(model, infos, splitting)
        rules, sharding = settings.optimizer.parts, sharding_of(settings, comm)
        if settings.placement.experts == "streamed":
            candidates = SPLITTINGS["experts"](candidates, infos, settings.optimizer, sharding.num_replicas)
        regions = build_regions(
            infos,
            {name: cargo for unit in candidates for name, cargo in unit.cargoes.items()},
            [rule.moments for rule in rules],
            sharding.num_ranks,
            delays=settings.delay > 0,
            factors={number: rule.factors for number, rule in enumerate(rules) if rule.by_matrix},
            num_ranges=sharding.num_ranges,
            without_low=[number for number, rule in enumerate(rules) if not rule.has_low],
        )
        uses = Counter[Any](splitting.blocks.values())
        companions = companions_of(model)
        # Whether blocks are compiled is settled later, and that needs nothing beside a unit.
        eager = replace(settings, compile="never")
        beside = [stage.beside(model, settings) for stage in STAGES.used_with(eager)]
        units = [
            UnitPlan(
                c.name,
                regions_of(c, regions),
                c.resident,
                bool(c.records),
                uses[c.blocks] if c.layer else 0,
                sum(num_bytes(c) for num_bytes in beside),
                next(filter(c.name.startswith, companions), ""),
            )
            for c in candidates
        ]
        dtypes = [parameter.dtype for parameter in model.parameters()]
        return cls(infos, dtypes, candidates, regions, units, splitting)


@dataclass(frozen=True)
class EnginePlan:
    """A planned engine, before any allocation."""

    settings: Settings
    """Settings with the compute device, the choice of `compile` there, and this rank's share in the budgets."""
    structure: Structure
    """Units and regions."""
    plan: Plan
    """All allocations, and the decisions made during planning."""

    @classmethod
    def of(
        cls, structure: Structure, settings: Settings, comm: Comm, machine: Machine, *, checks: bool = True
    ) -> EnginePlan:
        """Plan for a machine and, with `checks`, compare the plan with the budgets.

        Allocates nothing. Collective. Raises ConfigError and DoesNotFitError.
        """
        placement = settings.placement.share(comm.most_local)
        compiles = settings.compile_on(machine.device, machine.capability)
        settings = replace(settings, device=machine.device, placement=placement, compile=compiles)
        plan = make_plan(settings, structure.units, structure.regions, comm, machine, checks=checks)
        return cls(settings, structure, plan)

    @classmethod
    def fit(
        cls,
        structure_of: Callable[[Settings, int | None], Structure],
        settings: Settings,
        comm: Comm,
        machine: Machine,
        *,
        checks: bool = True,
    ) -> EnginePlan:
        """Plan like `of`, and split units when the device cannot hold the largest one.

        First choice: stream experts one record at a time (`experts: auto`, one rank). Second choice: split units, and
        take the largest parts that leave a third of the device for activations, or else the plan with the most room.
        With `checks` off nothing is refused. An explicit prefetch depth is never a reason to split: if the whole units
        fit with prefetch 0, DoesNotFitError is raised. `structure_of`: builds the structure from (settings, unit weight
        limit in bytes or None).
        """

        @cache
        def structure(experts: str, share_bytes: int | None) -> tuple[Structure, Settings]:
            expert_settings = replace(settings, placement=replace(settings.placement, experts=experts))
            return structure_of(expert_settings, share_bytes), expert_settings

        def plan(experts: str, share_bytes: int | None = None, checks: bool = checks) -> EnginePlan:
            return cls.of(*structure(experts, share_bytes), comm, machine, checks=checks)

        if settings.placement.experts == "streamed":
            return plan("streamed")
        refusal: DoesNotFitError | None = None
        try:
            whole = plan("whole")
        except DoesNotFitError as error:
            refusal, whole = error, plan("whole", checks=False)
        if refusal is not None and settings.placement.experts == "auto" and comm.size == 1:
            with suppress(ConfigError):  # no experts in the model, experts cannot be split, or sequence tiles are set
                return plan("streamed")
        if whole.plan.fits_device:
            if refusal is not None:
                raise refusal
            return whole
        if refusal is not None and isinstance(settings.prefetch, int) and settings.prefetch:
            without_prefetch = cls.of(whole.structure, replace(settings, prefetch=0), comm, machine, checks=False)
            if without_prefetch.plan.fits_device:
                raise refusal
        budget, cut_plans = whole.plan.device_bytes or 0, list[EnginePlan]()
        for part in _SHARES:
            cut_plans.append(plan("whole", budget // part, checks=False))
            if (cut_plans[-1].plan.device_room_bytes or 0) >= budget // 3:
                break
        chosen = max(cut_plans, key=lambda each: each.plan.device_room_bytes or 0)
        if chosen.plan.fits_device:
            return cls.of(chosen.structure, chosen.settings, comm, machine, checks=checks)
        if refusal is not None:
            reason = f"{refusal.reason}{chosen.structure.splitting.whole_description}"
            raise DoesNotFitError(reason, refusal.advice) from refusal
        return whole

    @property
    def chunk_bytes(self) -> int | None:
        """Limit for logits in memory at a time, in bytes; None: no limit."""
        return self.settings.chunk_bytes(self.plan.full_device_bytes)


def prepare(
    model: nn.Module,
    settings: Settings,
    comm: Comm,
    machine: Machine | None = None,
    quantized: Mapping[nn.Parameter, Codec] | None = None,
) -> EnginePlan:
    """Divide a model into units (modules that are fetched one at a time), and plan the memory of a machine. Collective.

    All ranks check for equal settings, models and plans. The model may be on `meta`. `machine`: None for this machine.
    `quantized`: see `Structure.of`. Raises ConfigError and DoesNotFitError.
    """
    machine = machine or ThisMachine(own_accelerator(str(engine_device(settings, comm))))
    comm.agree("the engine's settings", _field_texts(settings, ignored=("throttle", "debug", "device")))

    def structure_of(settings: Settings, share_bytes: int | None) -> Structure:
        structure = Structure.of(model, settings, comm, quantized or {}, share_bytes)
        shown = {info.name: _field_texts(info) for info in structure.infos} | {
            u.name: _field_texts(u) for u in structure.units
        }
        comm.agree("the model", shown)
        return structure

    prepared = EnginePlan.fit(structure_of, settings, comm, machine)
    residence = prepared.plan.residence
    row_tiers = {index: row.tiers for index, row in residence.rows.items()}
    residence_text = repr((residence.common, residence.keeps_weights, row_tiers))
    plan_texts = _field_texts(prepared.plan, ignored=("residence",))
    comm.agree("the plan", {**plan_texts, "residence": residence_text})
    return prepared


def engine_device(settings: Settings, comm: Comm) -> torch.device:
    """Return the compute device; with several ranks, the communicator's device. Raises ConfigError."""
    device = device_of(own_accelerator(settings.device))
    if comm.size == 1 or comm.device == device:
        return device
    if settings.device is not None:
        raise ConfigError(
            f"offload.device is {settings.device}, but the comm passed to Engine() is for {comm.device}: leave out the "
            f"device, or pass comm=open_comm(device={settings.device!r})."
        )
    return comm.device


def _field_texts(value: Any, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """Return dataclass fields as text, equal on all ranks for equal values. A placement is a mapping of such texts."""
    texts: dict[str, Any] = {f.name: repr(getattr(value, f.name)) for f in fields(value) if f.name not in ignored}
    placement = getattr(value, "placement", None)
    if isinstance(placement, Placement):
        folder = None  # names of folders may differ between ranks
        if placement.nvme_dir is not None:
            folder = "given"
        texts["placement"] = _field_texts(replace(placement, nvme_dir=folder))
    return texts


def disable_checkpointing(model: nn.Module) -> None:
    """Turn off the gradient checkpointing that transformers or diffusers does: units already recompute.

    The topmost modules with a method for it are asked. Other checkpoints stay, and run within the units.
    Also remove the hooks with which embedding outputs require a gradient. With the hooks, the backward would continue
    down to the embeddings instead of ending at the first trainable unit.
    """
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return
    disable: Any = next(filter(None, (getattr(model, name, None) for name in _DISABLE)), None)
    if disable is None:
        for child in model.children():
            disable_checkpointing(child)
        return
    disable()
    for module in model.modules():
        hooks = module._forward_hooks  # transformers tracks only the last one, and PEFT adds another
        for key in [key for key, hook in hooks.items() if getattr(hook, "__name__", "").startswith(_HOOK_PREFIX)]:
            del hooks[key]
