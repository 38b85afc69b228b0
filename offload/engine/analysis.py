"""The analysis of a model: a JSON value with all results of the trial runs, for a second engine of the same model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn

from offload.distributed.comm import digest
from offload.engine.flow import Flow
from offload.engine.loss.loss import LossFunction
from offload.engine.recording.known import KnownPasses, code_hash, loss_key
from offload.engine.units.execution_mode import ExecutionMode
from offload.engine.units.stages import Stage
from offload.engine.units.traits import GraphTraits, UnitTraits
from offload.engine.units.unit import Unit
from offload.errors import ConfigError
from offload.planning.settings import Settings

_INDICES = ("mutated", "stale", "shared", "changed")
_OPTIONS = (bool, int, float, str)
_CONFIG_OPTIONS = (*_OPTIONS, list, tuple, dict, type(None))
_NO_OPTIONS = ("name_or_path", "_name_or_path", "training")  # the training mode is a part of the kinds of batches
_PLAIN = ("rewrites", "needs_graph", "keeps", "inputs", "others", "outputs", "is_compared", "splits", "copied_bytes")


@dataclass(frozen=True, repr=False)
class Analysis:
    """Results of the trial runs of one engine. `repr` is JSON; `Engine(analysis=...)` only checks these results.

    text = repr(engine.analysis)
    engine = Engine(model, analysis=Analysis.from_json(text))
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    """Hashes of everything that the results depend on: code, parameters, versions, settings, device."""
    mode: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the `ExecutionMode`."""
    resident: Sequence[str] = ()
    """Names of the units with weights on the device."""
    losses: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Loss decisions (shifts labels, takes the target count, vocabulary of a head in chunks) by kind of batch."""
    checks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Integers of the batches in equivalence checks, by kind of pass."""
    kinds: Mapping[str, Any] = field(default_factory=dict)
    """`KnownPasses.kinds`. Empty: kinds of batches are recorded again."""
    uses: Sequence[Any] = ()
    """(unit names, argument structure, traits) for all recorded uses; units with equal traits share one entry."""
    writes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Parameters to check for writes by a forward, by unit name."""

    def __repr__(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> Analysis:
        """Return the value from its JSON. Raises ConfigError."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the text is no analysis of this version of offload ({error}).") from error

    @classmethod
    def of_decisions(cls, decisions: Mapping[str, Any]) -> Analysis:
        """Return the analysis in a checkpoint, also from checkpoints with decisions alone."""
        if "analysis" in decisions:
            return cls(**decisions["analysis"])
        # The names are those of old checkpoints.
        mode = ExecutionMode()
        if decisions.get("plain"):
            mode = ExecutionMode(cut="calls")
        fields = decisions.get("way") or asdict(mode)
        resident, losses, checks = (decisions.get(key, {}) for key in ("resident", "losses", "judged"))
        return cls(mode=fields, resident=list(resident), losses=losses, checks=checks)


class Analyst:
    """Collects the `Analysis` of an engine, and gives an engine the results from another analysis."""

    def __init__(self, flow: Flow, known: KnownPasses, settings: Settings) -> None:
        self._flow = flow
        self._known = known
        self._model = _describe_model(flow, known.configs, settings)  # now: a forward may change attributes

    def collect(self, losses: Mapping[str, Sequence[int]]) -> Analysis:
        """Return everything known so far. `losses`: loss decisions."""
        flow = self._flow
        recorded = [(unit, *item) for unit in flow.units for item in unit.variants.items()]
        kinds = self._known.kinds()
        # Objects of a stage (sequence tiles) are no JSON: other engines record such units again.
        if any(traits.learned for _, _, traits in recorded):
            recorded = []
            kinds = {}
        # Units of one kind have equal traits, so each is written once, with all names.
        uses: dict[str, tuple[list[str], str, Any]] = {}
        for unit, structure, traits in recorded:
            text = str(structure)  # a string already, if adopted from another analysis
            value = _encode(unit, traits)
            uses.setdefault(repr((text, value)), ([], text, value))[0].append(unit.name)
        values = {
            "model": self._model,
            "mode": vars(flow.execution_mode),
            "resident": [unit.name for unit in flow.units if unit.resident],
            "losses": losses,
            "checks": self._known.checks,
            "kinds": kinds,
            "uses": list(uses.values()),
            "writes": {unit.name: indices for unit, indices in flow.runner.writes.parameters.items()},
        }
        # Through the JSON, so an engine in this process gets the same values as one in another. Sets become lists.
        return Analysis.from_json(json.dumps(values, default=sorted))

    def differences(self, analysis: Analysis) -> list[str]:
        """Return the keys of `Analysis.model` with other values for this model, on the first such rank. Collective."""
        own = [key for key in self._model if analysis.model.get(key) != self._model[key]]
        return next(filter(None, self._flow.comm.gather_objects(own, "model of the analysis")), [])

    def adopt(self, analysis: Analysis) -> None:
        """Take over decisions, and for the same model all recorded kinds of passes. Recordings must be empty.

        The equivalence checks are not taken over: the hashes do not see everything that a forward reads.
        """
        flow = self._flow
        self._known.claims = set()  # to be checked before their first use
        flow.execution_mode.adopt(ExecutionMode(**analysis.mode))
        flow.make_resident({*analysis.resident} - {unit.name for unit in flow.units if unit.resident})
        if not analysis.kinds or self.differences(analysis):
            return
        self._known.adopt(analysis.kinds)
        units = {unit.name: unit for unit in flow.units}
        for names, structure, value in analysis.uses:
            for unit in map(units.__getitem__, names):
                unit.variants[structure] = _decode(unit, value)  # by the text of the structure, until `Unit.recall`
        for name, indices in analysis.writes.items():
            if not flow.runner.writes.parameters.get(units[name], set()).issuperset(indices):
                flow.runner.writes.add(units[name], indices)


def _encode(unit: Unit, traits: UnitTraits) -> dict[str, Any]:
    """Return traits as JSON values and sets, without the names of the unit."""
    return {
        **{name: getattr(traits, name) for name in (*_INDICES, *_PLAIN)},
        "buffers": sorted((unit.modules.index(module), key) for module, key in traits.buffers),
        "graphs": [
            [needs, frozen, graph.detached, graph.keeps_nothing, graph.reads_weights]
            for (needs, frozen), graph in traits.graphs.items()
        ],
    }


def _decode(unit: Unit, value: Mapping[str, Any]) -> UnitTraits:
    """Return the traits from `_encode`."""
    own: dict[str, Any] = {name: value[name] for name in _PLAIN}
    own |= {name: set(value[name]) for name in _INDICES}
    traits = UnitTraits(**own)
    traits.buffers = {(unit.modules[number], key) for number, key in value["buffers"]}
    for needs, frozen, detached, *graph in value["graphs"]:
        traits.graphs[tuple(needs), frozenset(frozen)] = GraphTraits(frozenset(detached), *graph)
    return traits


def _describe_model(flow: Flow, configs: Iterable[Any], settings: Settings) -> dict[str, Any]:
    """Return hashes of the model, the versions and the settings that the results of trial runs depend on."""
    model, device = flow.model, flow.device.torch_device
    modules = [(name, _hash_class(each.__class__), _options(each)) for name, each in model.named_modules()]
    parameters = [(i.name, *i.shape, str(i.compute), i.trainable, i.codec.name) for i in flow.infos]
    buffers = [(name, *buffer.shape, str(buffer.dtype)) for name, buffer in model.named_buffers()]
    units = [(unit.name, unit.is_block, [region.name for region in unit.regions]) for unit in flow.units]
    packages = {"offload", "torch", *(type(module).__module__.partition(".")[0] for module in model.modules())}
    rows: Iterable[Any] = settings.rows or ()
    if isinstance(rows, Mapping):
        rows = map(_describe_row, rows.items())
    rule = settings.optimizer
    return {
        "code": digest(modules),
        "parameters": digest(parameters),
        "buffers": digest(buffers),
        "units": digest(units),
        "config": digest(repr([_options(config, _CONFIG_OPTIONS) for config in configs]).encode()),
        "versions": {name: getattr(sys.modules.get(name), "__version__", "") for name in sorted(packages)},
        "settings": {
            "ranks": [flow.comm.size, settings.sequence_parallel],
            "precision": settings.precision,
            "matmul": settings.matmul,
            "micro-batches": settings.micro_batch_size is not None or settings.passes > 1,
            "recompute": settings.recompute,
            "method": rule.method,
            "stages": list(_stage_names(flow.stages)),
            "rows": list(map(str, rows)),
        },
        "device": [device.type, torch.backends.cpu.get_cpu_capability(), *_kernel_choices(device)],
    }


def _options(owner: Any, types: tuple[type, ...] = _OPTIONS) -> list[tuple[str, Any]]:
    """Return the attributes of a module or a configuration with values of these types."""
    return [(k, v) for k, v in sorted(vars(owner).items()) if isinstance(v, types) and k not in _NO_OPTIONS]


def _stage_names(stage: Stage) -> Iterator[str]:
    """Yield the class names of stages: a recording may do more with another stage."""
    while stage.inner is not stage:
        yield type(stage).__name__
        stage = stage.inner


def _kernel_choices(device: torch.device) -> list[Any]:
    """Return the device name and the switches of torch by which kernels are chosen."""
    name = getattr(getattr(torch, device.type, None), "get_device_name", lambda _: "")(device)
    backends, precision = torch.backends.cuda, torch.get_float32_matmul_precision()
    kernels = [backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled()]
    return [name, torch.are_deterministic_algorithms_enabled(), precision, *kernels]


def _describe_row(row: tuple[str, LossFunction | str | int | None]) -> tuple[str, str]:
    name, axis = row
    if callable(axis):
        return name, loss_key(axis)
    return name, str(axis)


@cache
def _hash_class(owner: Any) -> int:
    """Return a hash of the code of a module class, with all base classes below `nn.Module`."""
    classes = [each for each in owner.__mro__ if each not in nn.Module.__mro__]
    functions: Iterable[tuple[str, Any]] = (item for each in classes for item in sorted(vars(each).items()))
    hashes = [(name, code_hash(value.__code__)) for name, value in functions if isinstance(value, FunctionType)]
    return digest([f"{owner.__module__}.{owner.__qualname__}", hashes])
