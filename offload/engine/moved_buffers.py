"""Buffers a checkpoint needs in addition to rank 0's state dict.

These are running values outside every `state_dict`, and buffers with different values on the ranks, because each rank
sees other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from offload.checkpoint.manifest import MOVED, Entry, raw
from offload.checkpoint.reader import Reader, Span
from offload.checkpoint.writer import Writer
from offload.distributed.comm import Comm, digest

ToHost = Callable[[torch.Tensor], torch.Tensor]


class MovedBuffers:
    """Finds the buffers changed since the start, when they were equal on all ranks.

    A checkpoint has one plane per rank, `moved-RANK`, under the buffer name.
    """

    def __init__(self, model: nn.Module, to_host: ToHost) -> None:
        """`to_host`: returns a tensor of the device in host memory."""
        self._model = model
        self._to_host = to_host
        self._at_start = digests_of(model, to_host)

    def find(self, comm: Comm, saved: Mapping[str, torch.Tensor]) -> dict[str, Entry]:
        """Return the planes to write, by buffer name.

        `saved`: buffers always written, with rank 0's values. Collective.
        """
        first, *others = comm.gather_objects(digests_of(self._model, self._to_host), "buffers that have moved")
        entries: dict[str, Entry] = {}
        for name, buffer in self._model.named_buffers():
            ranks = []
            if name not in saved and first[name] != self._at_start.get(name):
                ranks.append(0)
            # Of other ranks only those with other values than rank 0.
            ranks += [rank for rank, other in enumerate(others, 1) if other[name] != first[name]]
            if ranks:
                entries[name] = Entry(tuple(buffer.shape), {f"{MOVED}{rank}": buffer.dtype for rank in ranks})
        return entries

    def write(self, writer: Writer, rank: int, entries: Mapping[str, Entry]) -> None:
        """Write this rank's values of the planes from `find`."""
        plane = f"{MOVED}{rank}"
        for name, buffer in self._model.named_buffers():
            if name in entries and plane in entries[name].planes:
                writer.write(name, plane, 0, buffer.detach().cpu().contiguous())

    def spans(self, reader: Reader, rank: int, has_same_ranks: bool) -> Iterator[Span]:
        """Yield the spans `load` reads."""
        # A rank without values of its own had those of rank 0.
        wanted = [f"{MOVED}0"]
        if has_same_ranks:
            wanted = [f"{MOVED}{rank}", *wanted]
        for name, entry in reader.contents.items():
            plane = next((plane for plane in wanted if plane in entry.planes), None)
            if plane is not None:
                yield name, plane, 0, entry.count(plane)

    def load(self, reader: Reader, rank: int, has_same_ranks: bool) -> None:
        """Restore this rank's buffers; with another number of ranks, rank 0's buffers."""
        buffers = dict(self._model.named_buffers())
        for name, plane, _, _ in self.spans(reader, rank, has_same_ranks):
            entry = reader.contents[name]
            value = torch.empty(entry.shape, dtype=entry.planes[plane])
            reader.read(name, plane, 0, value)
            owner, _, key = name.rpartition(".")
            if buffers[name].shape == value.shape:
                buffers[name].copy_(value)
            else:  # a table that had grown
                self._model.get_submodule(owner)._buffers[key] = value.to(buffers[name].device)


def digests_of(model: nn.Module, to_host: ToHost) -> dict[str, int]:
    """Return a content hash for each buffer, by name."""
    buffers = model.named_buffers()
    return {name: digest(raw(to_host(buffer.detach()).contiguous()).tobytes()) for name, buffer in buffers}
