"""Refused settings beside streamed experts, compiled blocks and kept products."""

from offload.conflicts import Conflict, is_parallel, other_than

CONFLICTS = (
    Conflict("offload.experts", "streamed", "train.sequence_tile", other_than("none", "auto"),
        "with train.sequence_tile {train.sequence_tile} the experts would be copied to the device for each tile of a "
        "sequence", "set --train.sequence_tile none, or --offload.experts whole"),
    Conflict("train.sequence_parallel", is_parallel, "train.compile", "always",
        "train.compile is {train.compile}, and communication between ranks in attention cannot be compiled",
        "set --train.compile never (or auto), or --train.sequence_parallel 1",
        {"offload.experts": other_than("streamed")}),
    *(
        Conflict("train.recompute", "products", key, value,
            f"{key} is {{{key}}}, {reason}", f"set --train.recompute auto, or --{key} {fix}")
        for key, value, reason, fix in (
            ("train.compile", "always", "and products inside compiled blocks cannot be kept", "never (or auto)"),
            ("train.sequence_tile", other_than("none", "auto"), "and tiles recompute their products", "none"),
            ("offload.experts", "streamed", "and streamed experts keep their own outputs", "whole"),
            ("offload.graphs", ("cpu", "nvme"), "where whole graphs wait", "device"),
        )
    ),
)  # fmt: skip
