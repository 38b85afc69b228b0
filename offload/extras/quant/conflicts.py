"""Refused settings beside quantized weights."""

from offload.conflicts import Conflict, other_than

CONFLICTS = (
    Conflict("train.matmul", other_than("precision"), "train.precision", ("fp32", "fp16"),
        "FP8 products return bf16", "set --train.precision bf16, or --train.matmul precision"),
    Conflict("offload.parameters", "files", "offload.frozen_weights", other_than("exact"),
        "offload.frozen_weights {offload.frozen_weights} would change the weights, and the model's files are read "
        "unchanged", "set --offload.parameters cpu (or nvme), or --offload.frozen_weights exact"),
    Conflict("offload.link_weights", other_than("exact"), "train.delay", 1,
        "train.delay 1 keeps exact weights from before an update",
        "set --train.delay 0, or --offload.link_weights exact"),
    Conflict("offload.link_weights", other_than("exact"), "optimizer.has_gradients", False,
        "{optimizer.name} updates the copied weights on the device, and needs them exact",
        "set --offload.link_weights exact"),
)  # fmt: skip
