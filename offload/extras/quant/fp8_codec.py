"""FP8 codes for frozen weights that multiply in FP8: the cast of their products, made once when weights are stored.

The scale s of a weight is its largest magnitude in bf16 over 448. A code c is decoded to c s, rounded to bf16. Its
largest magnitude is the weight's again, and rounding moves c s by less than half the distance of two codes. So
`fp8_tensorwise` casts the decoded weight to the same codes and scale, and products keep all bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from offload.extras.quant import device_kernels, products
from offload.extras.quant.casts import scale_of
from offload.extras.quant.codecs import copied_pieces, copy_bytes, in_blocks
from offload.layout.codecs import EncodedPieces, QuantizedCodec
from offload.native.kernels import split

_SCALE_BYTES = 4


class Fp8Codec(QuantizedCodec):
    """E4M3 numbers (arXiv:2209.05433), one byte each, and one scale for a whole parameter. A record has 1,024 codes and
    then the fp32 scale.
    """

    name = "fp8"
    block = 1024
    record_bytes = block + _SCALE_BYTES
    choice = (
        f"linear layers in blocks with {products.LEAST_SIZE} inputs and outputs or more, in multiples of "
        f"{products.MULTIPLE}"
    )

    def choose(self, blocks: Iterable[nn.Module], kept: Collection[int]) -> Iterator[nn.Parameter]:
        for layer in products.find_layers(blocks):
            weight = layer._parameters.get("weight")  # a parametrization computes it
            if weight is not None and id(weight) not in kept:  # others multiply in fp32, which needs exact weights
                yield weight

    def encoded(self, pieces: Iterable[Tensor]) -> EncodedPieces:
        # The scale is the largest magnitude of the parameter, so no record is complete before the last piece.
        weights = [_as_used(piece) for piece in pieces]
        amax = torch.stack([part for piece in weights for part in torch.aminmax(piece)]).float().abs().amax()
        scale = scale_of(amax)
        end = 0
        for piece in weights:
            begin, end = end, end + len(piece)
            quotients = in_blocks(piece, self.block).div_(scale)
            records = torch.empty(len(quotients), self.record_bytes, dtype=torch.uint8, device="cpu")
            records[:, : self.block].view(torch.float8_e4m3fn).copy_(quotients)
            records[:, self.block :] = scale.view(1).view(torch.uint8)
            yield begin, end, records.view(-1)

    def workspace_bytes(self, numel: int) -> int:
        return copy_bytes(self, numel)

    def decode(self, records: Tensor, out: Tensor, workspace: Tensor) -> None:
        if device_kernels.decode(self, records, out, workspace):
            return
        for copies, weights in copied_pieces(self, records, out, workspace):
            numbers = weights.view(-1, self.block)
            numbers.copy_(copies[:, : self.block].view(torch.float8_e4m3fn))  # exact in 16 bits, too
            numbers.mul_(copies[:, self.block :].view(torch.float32))  # in fp32, then rounded


FP8 = Fp8Codec()


def _as_used(piece: Tensor) -> Tensor:
    """Return weights as exact ones are copied to the device: in bf16, the high half of a split master."""
    piece = piece.cpu()
    if piece.dtype == torch.bfloat16:
        return piece
    return split(piece.float().contiguous())[0]
