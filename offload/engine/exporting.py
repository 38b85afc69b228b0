"""Export of a streamed model as a Hugging Face folder, read piece by piece from any tier and all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_outcome
from offload.engine.companions import without_companions
from offload.engine.state import EngineState
from offload.errors import ConfigError
from offload.files.sources import FORMAT, MODEL_FORMATS, ReadValues
from offload.layout.planes import DTYPES

_END = -1


class DerivedModel(Protocol):
    """Another model to export, with weights computed from the engine's weights."""

    model: nn.Module
    """The model to write, without weights."""

    def get_reader(self, get: ReadValues) -> ReadValues:
        """Return a reader for the weights of `model`. `get` reads the engine's weights in fp32."""


def export_model(
    state: EngineState,
    folder: Path,
    dtype: torch.dtype | None,
    shard_bytes: int,
    files: Mapping[str, bytes] | None,
    replace: bool,
    derived_model: DerivedModel | None = None,
) -> None:
    """Write the engine's model, or `derived_model`, as a folder (see `write_model`). Collective; no update may be
    pending. Rank 0 writes, and broadcasts the next (parameter, range) to read.

    Raises, on all ranks, ConfigError, DiskError, or any error from `share_outcome` if rank 0 cannot write.
    """
    if dtype is not None and dtype not in DTYPES.values():
        raise ConfigError(f"the export's dtype is {dtype}; it must be float32, bfloat16 or float16, or None.")
    comm, flow = state.memory.comm, state.flow

    def read(index: int, begin: int, end: int) -> torch.Tensor:
        source = torch.float32
        # Rounded as on the device; any other dtype comes from the fp32 masters.
        computed = DTYPES[state.weights.infos[index].compute]
        if derived_model is None and dtype in (None, computed):
            source = computed
        return state.memory.store.values.read_range(index, begin, end, source)

    if comm.rank:
        while (wanted := _broadcast_range(comm, _END, 0, 0))[0] != _END:
            read(*wanted)
        share_outcome(comm, None, "export")
        return
    index_of = {info.name: info.index for info in state.weights.infos}
    failure: Exception | None = None
    is_reading = False

    def get(name: str, begin: int, end: int) -> torch.Tensor:
        nonlocal is_reading
        is_reading = True
        values = read(*_broadcast_range(comm, index_of[name], begin, end))
        is_reading = False
        return values

    try:
        model = flow.model
        get_weights: ReadValues = get
        if derived_model is not None:
            model, get_weights = derived_model.model, derived_model.get_reader(get)
        with flow.caches.with_original_flags(), flow.with_placeholders(), without_companions(model):
            write_model = MODEL_FORMATS[FORMAT].write_model
            write_model(
                model,
                get_weights,
                folder,
                dtype=dtype,
                shard_bytes=shard_bytes,
                files=files,
                replace=replace,
                tell=flow.tell,
            )
    except Exception as error:
        if is_reading:  # the other ranks are in another collective
            raise
        failure = error
    _broadcast_range(comm, _END, 0, 0)
    share_outcome(comm, failure, "export")


def _broadcast_range(comm: Comm, index: int, begin: int, end: int) -> tuple[int, int, int]:
    """Return rank 0's three numbers."""
    numbers = torch.tensor([index, begin, end])
    comm.broadcast(numbers, 0, "name of the next export")
    return tuple(numbers.tolist())
