"""Build the engine state from a model and settings, and move the model weights into the engine. Nothing is allocated
before the plan is complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from offload.accelerators import own_accelerator
from offload.distributed.comm import Comm
from offload.doors import Door
from offload.engine.prepare import engine_device, prepare
from offload.engine.state import EngineState
from offload.errors import ConfigError, first_names, warn
from offload.files.safetensors_file import TensorFile, tensor_reader
from offload.files.sources import Fill, Source
from offload.lanes.timeline import DISK_LANES
from offload.layout.codecs import Codec
from offload.layout.residence import FILES
from offload.planning.machines import ThisMachine
from offload.planning.settings import Settings
from offload.tiers.counters import Counters
from offload.tiers.host import trim_heap

MODEL_FORMS: Door[Any] = Door("model form", {"plain": lambda *given: nullcontext(given[1:3])})
"""Functions (model, settings, comm, fill, quantized) -> context with settings and comm for an engine: plain parameters
are in the model meanwhile. tensors: in place of those of another tensor class, such as DTensor.
"""


def take_over(state: EngineState, fill: Fill | None) -> None:
    """Move the weights into the store and reroute the units."""
    flow = state.flow
    flow.caches.turn(on=False)
    try:
        _store_weights(state, fill)
        flow.ownership.guard()
        state.memory.lanes.drain_updates()  # a disk failure is raised here
        state.memory.lanes.timeline.discount(*DISK_LANES)
        trim_heap()
        flow.stages.divert()  # before units: a module inside of a block may be a unit
        for unit in flow.units:
            if unit.resident:
                flow.keep(unit)
            elif not unit.in_records:
                unit.route(flow.router)
        flow.attention.divert()
        for region in state.weights.regions:
            if len(region.units) > 1:
                state.weights.gradients.make_lasting(region)
    except BaseException:
        if any(unit.placeholders for unit in flow.units):
            flow.ownership.invalidate(failed=True)
        flow.caches.turn(on=True)
        state.memory.end_lanes()
        state.memory.store.close()
        raise


def _store_weights(state: EngineState, fill: Fill | None) -> None:
    """Move the weights into the store, unit by unit, and replace the parameters by stand-ins."""

    def reopen(file: TensorFile) -> TensorFile:
        """Open a model file again for the engine: the builder of the model may close the first handle."""
        if file.path not in reopened:
            assert files is not None
            reopened[file.path] = file.reopened_as(files.open(file.path))
        return reopened[file.path]

    # A parent unit with only its direct parameters comes last: filling the parent also fills the children, already
    # taken by then. The ranks take turns at calling `fill`, so each file is read once, and broadcast the weights.
    flow, store = state.flow, state.memory.store
    files = state.memory.files
    sources = dict[nn.Parameter, Source]()
    reopened = dict[Path, TensorFile]()
    stored: set[int] = set()
    noncontiguous: list[str] = []
    # The call for a block also fills the experts, and the call for a cut layer the row blocks, which follow directly.
    source, turns = 0, itertools.cycle(range(store.comm.size))
    for unit in sorted(flow.units, key=lambda unit: not (unit.whole or unit.in_records)):
        if fill is not None and unit.layer == unit.name and not unit.in_records:
            source = next(turns)
            if source == store.comm.rank or files is not None:
                sources.update(fill(unit.name, unit.module) or {})  # may include children taken later
        for place in unit.places:
            parameter = place.module._parameters[place.key]
            assert parameter is not None
            if place.parameter not in stored:
                stored.add(place.parameter)
                parameter_source, info = sources.pop(parameter, None), store.infos[place.parameter]
                if not parameter.is_contiguous():
                    noncontiguous.append(info.name)
                if files is not None and not info.trainable:
                    if parameter_source is None:
                        raise ConfigError(
                            f"offload.parameters is files, but the frozen parameter {info.name} cannot be read "
                            "directly from the model's files: it combines several of their tensors, or is in none. "
                            "Set --offload.parameters cpu (or nvme)."
                        )
                    files.give(info.index, info.codec.reader(info.name, parameter_source.reopen_files(reopen), None))
                else:
                    read = tensor_reader(parameter)
                    if source == store.comm.rank:
                        read = info.codec.reader(info.name, parameter_source, read)
                    store.values.write(info.index, read, parameter.dtype, source)
            unit.placeholders[place.parameter] = flow.ownership.placeholders[place.parameter]
        unit.install(unit.placeholders)
    if noncontiguous:
        listed = first_names(noncontiguous, 1, " and {} others")
        warn(
            f"parameter {listed} is not contiguous (a transposed view, or channels_last). The engine "
            "computes with contiguous weights, for which torch may choose other kernels, so the last bits of results "
            "can differ from plain PyTorch. For equal bits make the parameter contiguous in both (parameter.data = "
            "parameter.data.contiguous())."
        )


def assemble(
    model: nn.Module,
    settings: Settings,
    counters: Counters,
    fill: Fill | None,
    comm: Comm,
    quantized: Mapping[nn.Parameter, Codec],
) -> EngineState:
    """Prepare, allocate, and take the weights over. `quantized`: see `Structure.of`. Collective."""
    # CPU weights are freed as the engine takes them over. Weights still to be filled use no memory yet.
    cpu_weight_bytes = {p.data_ptr(): p.nbytes for p in model.parameters() if fill is None and p.device.type == "cpu"}
    machine = ThisMachine(own_accelerator(str(engine_device(settings, comm))), sum(cpu_weight_bytes.values()))
    prepared = prepare(model, settings, comm, machine, quantized)
    if prepared.plan.residence.indices_on(FILES) and fill is None:
        raise ConfigError(
            "offload.parameters is files, but the weights of this model are already in memory and come from no model "
            "files: build the model from its folder (build_model or read_model, and fill=), or set "
            "--offload.parameters cpu."
        )
    for name, buffer in model.named_buffers():
        if comm.size > 1 and buffer.numel():  # rank 0's, like the weights
            value = buffer.detach().cpu().contiguous().reshape(-1)
            comm.broadcast(value, 0, f"buffer {name}")
            buffer.copy_(value.view(buffer.shape))
    state = EngineState(model, prepared, counters, comm)
    take_over(state, fill)
    return state
