"""Sums over replicas with gradients in quantized format."""

from __future__ import annotations

from abc import abstractmethod

import torch

from offload.distributed.comm import pieces_of
from offload.engine.gradients.rank_sums import ExactSums
from offload.engine.gradients.transfer import Measure, round_sum
from offload.layout.codecs import QuantizedCodec
from offload.tiers.tile import RegionState


class GradientCodec(QuantizedCodec):
    """A codec for gradients between replicas."""

    @abstractmethod
    def encode_rest(self, values: torch.Tensor, error: torch.Tensor, out: torch.Tensor) -> None:
        """Quantize values plus error feedback into the records `out`, and store the new quantization error in `error`.

        `values`: fp32 or bf16 [n]. `error`: bf16 [n]. All tensors are on one device, and n is a multiple of `block`. An
        all-zero block keeps the old error. A non-finite block gets error 0.
        """

    def replica_sums(self, exact: ExactSums, shares_sums: bool) -> ExactSums:
        return QuantizedSums(exact, self, shares_sums)


class Residual:
    """Quantizes a shard's gradients, after adding each weight's error from earlier quantizations."""

    def __init__(self, codec: GradientCodec, error: torch.Tensor, keeps: bool) -> None:
        """`error`: plane `ERROR` for the whole shard.

        `keeps`: update the errors; False if the sum is discarded after measuring.
        """
        # The exchange cuts between records by these two.
        self.block = codec.block
        self.record_bytes = codec.record_bytes
        self._codec = codec
        self._error = error
        self._keeps = keeps

    def encode(self, values: torch.Tensor, begin: int, records: torch.Tensor) -> None:
        """Quantize shard values, from element `begin` on, into flat `records`."""
        error = self._error[begin : begin + len(values)]
        # A copy for a measurement: the errors stay for the next step.
        rest = error.to(values.device, copy=not self._keeps)
        self._codec.encode_rest(values, rest, records)
        if self._keeps and rest is not error:
            error.copy_(rest)

    def decode(self, records: torch.Tensor, out: torch.Tensor) -> None:
        """Dequantize flat `records` into `out`."""
        self._codec.decode(records, out, records.new_empty(self._codec.workspace_bytes(len(out))))


class QuantizedSums(ExactSums):
    """The same sum in quantized format: both the terms sent to a rank and the sum sent back are quantized.

    All replicas, including the sender, use the dequantized sum, so all have equal bits. A sum no other rank needs is
    not sent and stays exact.

    Each rank keeps two errors: for other ranks' pieces the error in the terms, for its own piece the error in the sum.
    Both are added before the next step's quantization.
    """

    def __init__(self, exact: ExactSums, codec: GradientCodec, shares_sums: bool) -> None:
        """`shares_sums`: other ranks need the sum."""
        super().__init__(exact.between, exact.device, exact.scratch)
        self._codec = codec
        self._shares_sums = shares_sums

    def sent_bytes(self, terms: torch.Tensor, into: torch.Tensor) -> int:
        step = len(terms) // self.between.size
        num_sent = step
        if len(into) > step:  # other ranks need the sum as well as the terms
            num_sent += step
        return num_sent // self._codec.block * self._codec.record_bytes

    def run(
        self, state: RegionState, terms: torch.Tensor, own_sum: torch.Tensor, target: torch.Tensor, measure: Measure
    ) -> None:
        between, label = self.between, f"sum over replicas of {state.region.name}"
        assert state.error is not None
        residual = Residual(self._codec, state.error, keeps=len(target) > 0)
        between.reduce_scatter(own_sum, terms, label, self.scratch, residual)
        if not self._shares_sums:
            measure(own_sum)
            if len(target):
                self.keep(state.region, own_sum, target)
            return
        block, width = self._codec.block, self._codec.record_bytes
        # In parts as large as the exchange's memory, whatever the size of the region.
        most = len(self.scratch) // (between.size * width) * block
        for begin in range(0, len(own_sum), most):
            chunk = own_sum[begin : begin + most]
            records = self.scratch[: between.size * (len(chunk) // block * width)]
            own = pieces_of(records, between.size)[between.rank]
            residual.encode(chunk, between.rank * len(own_sum) + begin, own)
            # The sender decodes the sent records too: all replicas use the same numbers.
            residual.decode(own, chunk)
            if len(target):
                between.all_gather(records, own, label)
                for piece, piece_records in zip(
                    pieces_of(target, between.size), pieces_of(records, between.size), strict=True
                ):
                    residual.decode(piece_records, piece[begin : begin + most])
        measure(own_sum)
        round_sum(state.region, target)
