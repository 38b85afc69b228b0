"""Refused settings beside streamed experts and compiled blocks."""

from offload.conflicts import Conflict, is_parallel, other_than

CONFLICTS = (
    Conflict("offload.experts", "streamed", "train.sequence_tile", other_than("none", "auto"),
        "with train.sequence_tile {train.sequence_tile} the experts would be copied to the device for each tile of a "
        "sequence", "set --train.sequence_tile none, or --offload.experts whole"),
    Conflict("train.sequence_parallel", is_parallel, "train.compile", "always",
        "train.compile is {train.compile}, and communication between ranks in attention cannot be compiled",
        "set --train.compile never (or auto), or --train.sequence_parallel 1",
        {"offload.experts": other_than("streamed")}),
)  # fmt: skip
