"""Transfer of the model weights into the engine, one unit at a time."""

from __future__ import annotations

import itertools
from pathlib import Path

from torch import nn

from offload.distributed.comm import Comm
from offload.engine.state import EngineState
from offload.errors import ConfigError, warn
from offload.files.safetensors_file import ReadRange, TensorFile, tensor_reader
from offload.files.sources import Fill, QuantizedSource, Source
from offload.layout.regions import ParameterInfo
from offload.tiers.host import trim_heap
from offload.tiers.model_files import ModelFiles


def take_over(state: EngineState, fill: Fill | None) -> None:
    """Move the weights into the store and reroute the units."""
    state.caches.turn_off()
    try:
        _store_weights(state, fill)
        state.ownership.guard()
        state.lanes.drain_updates()  # a disk failure is raised here
        state.lanes.timeline.discount("nvme_read", "nvme_write")
        trim_heap()
        for unit in state.units:
            if unit.resident:
                state.keep(unit)
            elif not unit.in_records:
                unit.route(state.router)
        state.runner.stages.divert()
        state.attention.divert()
        for region in state.regions:
            if len(region.units) > 1:
                state.gradients.make_lasting(region)
    except BaseException:
        if any(unit.placeholders for unit in state.units):
            state.ownership.invalidate(failed=True)
        state.caches.restore()
        state.end_lanes()
        state.store.close()
        raise


def _store_weights(state: EngineState, fill: Fill | None) -> None:
    """Move the weights into the store, unit by unit, and replace the parameters by stand-ins."""
    # A parent unit with only its direct parameters comes last: filling the parent also fills the children, already
    # taken by then. The ranks take turns at calling `fill`, so each file is read once, and broadcast the weights.
    sources, files = dict[nn.Parameter, Source](), state.files
    reopened = _ReopenedFiles(files) if files is not None else None
    stored: set[int] = set()
    noncontiguous: list[str] = []
    # The call for a block also fills the experts, and the call for a cut layer the row blocks, which follow directly.
    source, turns = 0, itertools.cycle(range(state.comm.size))
    for unit in sorted(state.units, key=lambda unit: not (unit.whole or unit.in_records)):
        if fill is not None and unit.layer == unit.name and not unit.in_records:
            source = next(turns)
            if source == state.comm.rank or files is not None:
                sources.update(fill(unit.name, unit.module) or {})  # may include children taken later
        for place in unit.places:
            parameter = place.module._parameters[place.key]
            assert parameter is not None
            if place.parameter not in stored:
                stored.add(place.parameter)
                parameter_source, info = sources.pop(parameter, None), state.infos[place.parameter]
                if not parameter.is_contiguous():
                    noncontiguous.append(info.name)
                is_source = source == state.comm.rank
                if files is not None and reopened is not None and not info.trainable:
                    files.give(
                        info.index, _stored_reader(_file_source(parameter_source, info).reopen_files(reopened), info)
                    )
                else:
                    read = _weight_reader(parameter_source, parameter, info) if is_source else tensor_reader(parameter)
                    state.store.values.write(info.index, read, parameter.dtype, source)
            unit.placeholders[place.parameter] = state.ownership.placeholders[place.parameter]
        unit.install(unit.placeholders)
    if noncontiguous:
        more = f" and {len(noncontiguous) - 1} others" if len(noncontiguous) > 1 else ""
        warn(
            f"parameter {noncontiguous[0]}{more} is not contiguous (a transposed view, or channels_last). The engine "
            "computes with contiguous weights, for which torch may choose other kernels, so the last bits of results "
            "can differ from plain PyTorch. For equal bits make the parameter contiguous in both (parameter.data = "
            "parameter.data.contiguous())."
        )


class _ReopenedFiles:
    """Opens the model files again for the engine: the builder of the model may close the first handles."""

    def __init__(self, files: ModelFiles) -> None:
        self._files, self._reopened = files, dict[Path, TensorFile]()

    def __call__(self, file: TensorFile) -> TensorFile:
        if file.path not in self._reopened:
            self._reopened[file.path] = file.reopened_as(self._files.open(file.path))
        return self._reopened[file.path]


def _file_source(source: Source | None, info: ParameterInfo) -> Source:
    """Return the place in the model files that holds a frozen parameter. Raises ConfigError if no file does."""
    if source is None:
        raise ConfigError(
            f"offload.parameters is files, but the frozen parameter {info.name} cannot be read directly from the "
            "model's files: it combines several of their tensors, or is in none. Set --offload.parameters cpu (or "
            "nvme)."
        )
    return source


def _weight_reader(source: Source | None, parameter: nn.Parameter, info: ParameterInfo) -> ReadRange:
    """Return the reader for a parameter stored by the engine. Raises ConfigError."""
    is_in_memory = source is None and not info.codec.is_from_files
    return tensor_reader(parameter) if is_in_memory else _stored_reader(source, info)


def _stored_reader(source: Source | None, info: ParameterInfo) -> ReadRange:
    """Return a reader for quantized records, or for plain weights of an unquantized parameter.

    Raises ConfigError for a quantized parameter without records in the files.
    """
    if isinstance(source, QuantizedSource) and info.codec == source.codec:
        return source.records
    if source is None or info.codec.is_from_files:
        raise ConfigError(
            f"{info.name} is quantized in the model's files ({info.codec.name}), but its values were changed after "
            "loading, for example by an adapter whose initialization changes the base weights, and changed values "
            "cannot be stored quantized. Leave the parameter unchanged (fill= of the same model), or leave out "
            "quantized=."
        )
    return source.read


def share_buffers(model: nn.Module, comm: Comm) -> None:
    """Copy rank 0's buffers to all ranks, like the weights."""
    for name, buffer in model.named_buffers() if comm.size > 1 else ():
        if buffer.numel():
            value = buffer.detach().cpu().contiguous().reshape(-1)
            comm.broadcast(value, 0, f"buffer {name}")
            buffer.copy_(value.view(buffer.shape))
