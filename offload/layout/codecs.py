"""Codecs: storage and copy formats for weights. `EXACT` stores weights unchanged; other codecs store records with equal
length, decoded on the device where weights are used. Codecs are pure functions, and have names in three doors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from offload.doors import Door

PIECE_NUMEL = 1 << 20
"""Weights decoded at once, a multiple of every codec block. Limits the workspace."""
LEAST_NUMEL = 4096
"""Minimum quantized parameter size in elements. Smaller parameters stay exact, since they save almost nothing."""

EncodedPieces = Iterator[tuple[int, int, Tensor]]
"""Iterator over (begin, end, data): element range in a parameter, and the flat stored data."""


class Codec:
    """Exact format: weights are stored, copied and used unchanged. Base class for all codecs.

    A codec with one byte per weight, in a door:

        class Float8(QuantizedCodec):
            name, block, record_bytes = "float8", 1, 1

            def records(self, weights):
                return weights.cpu().to(torch.float8_e4m3fn).view(torch.uint8)

            def decode(self, records, out, workspace):
                out.copy_(records.clone().view(torch.float8_e4m3fn))

        CODECS.register("float8", Float8())
        Engine(model, frozen_weights="float8")
    """

    name = "exact"
    """Name in settings."""
    title = ""
    """Name in region names. Empty: the region has no name for the format."""
    block = 1
    """Neighbouring weights per record."""
    decodes = False
    """True if weights are decoded before use."""
    choice = f"matrices in blocks with {LEAST_NUMEL} elements or more"
    """Frozen weights in this format, for messages."""

    def __repr__(self) -> str:
        return self.name

    @property
    def unsaved_reason(self) -> str:
        """Reason against frozen weights in a full checkpoint, for messages; empty if there is none."""
        return ""

    def choose(self, blocks: Iterable[nn.Module], kept: Collection[int]) -> Iterator[nn.Parameter]:  # noqa: ARG002
        """Yield the parameters of blocks for this format. Vectors and small ones stay exact in any case.

        kept: ids of parameters that compute in fp32 at any precision.
        """
        for block in blocks:
            yield from block.parameters()

    def storage_format(self, dtype: torch.dtype) -> tuple[torch.dtype, int]:
        """Return the storage dtype for weights used in `dtype`, and the storage elements per record."""
        return dtype, 1

    def input_format(self, dtype: torch.dtype) -> tuple[torch.dtype, int, int]:
        """Return the input format for `encoded`, given weights in `dtype`: input dtype, weights per block, input
        elements per block.
        """
        return dtype, 1, 1

    def encoded(self, pieces: Iterable[Tensor]) -> EncodedPieces:
        """Yield the stored data for one parameter. Weights come in flat pieces with any float dtype; every piece except
        the last is a multiple of `block`.
        """
        end = 0
        for piece in pieces:
            begin, end = end, end + piece.numel()
            yield begin, end, self.records(piece)

    def records(self, weights: Tensor) -> Tensor:
        """Return the stored data for flat weights, flat. A codec with values over the whole parameter overrides
        `encoded` instead.
        """
        return weights

    def reader(self, name: str, source: Any, memory: Any) -> Any:  # noqa: ARG002
        """Return the `ReadRange` for the initial data of parameter `name`: of its `source` in model files, or `memory`,
        the reader of the built parameter, if `source` is None. Raises ConfigError.
        """
        if source is None:
            return memory
        return source.read

    def read(self, stored: Tensor, place: slice, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """Return the weights at `place` in the stored data `stored`, on the CPU, with dtype `dtype`. May be a view."""
        return stored[place].cpu()

    @property
    def tables(self) -> Tensor:
        """Lookup tables at the start of a workspace on any device, uint8 [n] with n a multiple of 512."""
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def workspace_bytes(self, numel: int) -> int:  # noqa: ARG002
        """Return the workspace bytes for decoding `numel` weights."""
        return 0

    def replica_sums(self, exact: Any, shares_sums: bool) -> Any:  # noqa: ARG002
        """Return the sums over replicas of gradients in this format, given `ExactSums`. For `GRADIENT_CODECS`."""
        return exact


EXACT = Codec()


class QuantizedCodec(Codec, ABC):
    """Quantized codec: a record has codes and scales for `block` weights, uint8 [`record_bytes`]."""

    record_bytes: int
    """Bytes per record."""
    decodes = True
    between_bytes = 0
    """Intermediate bytes per weight, written and read again during decoding on an accelerator. 0: decoded at once."""

    @property
    def title(self) -> str:  # type: ignore[override]
        """Name in region names."""
        return self.name

    @property
    def unsaved_reason(self) -> str:
        return f"offload.frozen_weights is {self.name}, so frozen weights are stored quantized"

    def storage_format(self, dtype: torch.dtype) -> tuple[torch.dtype, int]:  # noqa: ARG002
        return torch.uint8, self.record_bytes

    def read(self, stored: Tensor, place: slice, dtype: torch.dtype) -> Tensor:
        # Whole records around the place: a weight alone cannot be decoded.
        first = place.start // self.block
        last = -(-place.stop // self.block)
        records = stored[first * self.record_bytes : last * self.record_bytes].cpu()
        weights = torch.empty((last - first) * self.block, dtype=dtype, device="cpu")
        self.decode(records, weights, self.workspace(weights.numel()))
        return weights[place.start - first * self.block : place.stop - first * self.block]

    def workspace(self, numel: int) -> Tensor:
        """Return a CPU workspace for decoding `numel` weights."""
        memory = torch.empty(self.workspace_bytes(numel), dtype=torch.uint8, device="cpu")
        memory[: self.tables.nbytes] = self.tables  # `decode` looks for them there
        return memory

    @abstractmethod
    def decode(self, records: Tensor, out: Tensor, workspace: Tensor) -> None:
        """Decode flat records into `out`, flat weights in any float dtype on the same device. Records may lie at the
        end of `out`: decoding goes forward and reads each record before the weights overwrite it.
        """

    def encode(self, weights: Tensor, low: Tensor | None, out: Tensor) -> None:
        """Quantize flat master weights into the records `out`, on one device. `low`: low half of the masters (None: no
        split). For `LINK_CODECS`.
        """
        raise NotImplementedError


CODECS: Door[Codec] = Door("codec", {EXACT.name: EXACT})
"""Codecs for frozen weights by setting name."""
LINK_CODECS: Door[Codec] = Door("link codec", {EXACT.name: EXACT})
"""Codecs for copies of trainable weights by setting name."""
GRADIENT_CODECS: Door[Codec] = Door("gradient codec", {EXACT.name: EXACT})
"""Codecs for gradients between replicas by setting name."""


def decoded(codec: Codec, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a whole parameter after encoding and decoding: the flat weights seen by the device, on the CPU."""
    # In the pieces of the engine: the values of a codec over a whole parameter may depend on them.
    stored = torch.cat([stretch for *_, stretch in codec.encoded(weights.split(PIECE_NUMEL))])
    return codec.read(stored, slice(0, weights.numel()), dtype).to(dtype)
