"""Refused settings beside streamed experts, compiled blocks, kept products and dispatched blocks."""

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
        )
    ),
    *(
        Conflict("offload.dispatch", "always", key, value, f"{key} is {{{key}}}, {reason}",
            f"set --offload.dispatch never, or --{key} {fix}")
        for key, value, reason, fix in (
            ("offload.zero_stage", (0, 3), "and each rank needs all weights and a share of the states", "2"),
            ("offload.replicas", other_than("auto", 1), "and blocks are shared out over the ranks of one replica", "1"),
            ("offload.parameters", "device", "and weights on the device are copied nowhere", "cpu"),
            ("offload.experts", "streamed", "and routed experts are fetched by every rank for its own rows", "whole"),
            ("train.sequence_parallel", is_parallel, "and ranks that share a row compute the same block at one time",
                "1"),
        )
    ),
    Conflict("offload.dispatch", "always", "optimizer.has_gradients", False,
        "{optimizer.name} runs forwards only, unit by unit on every rank",
        "set --offload.dispatch never, or another --optimizer.name"),
)  # fmt: skip
