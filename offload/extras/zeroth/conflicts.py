"""Refused settings beside update rules without gradients."""

from offload.conflicts import Conflict, is_parallel, is_set, other_than

CONFLICTS = (
    Conflict("train.max_grad_norm", is_set, "optimizer.has_gradients", False,
        "{optimizer.name} has no gradients to clip", "set --train.max_grad_norm none",
        {"origin.train.max_grad_norm": other_than("default")}),
)  # fmt: skip
ENGINE_CONFLICTS = (
    Conflict("train.sequence_parallel", is_parallel, "optimizer.has_gradients", False,
        "optimizer.name is {optimizer.name}, with interleaved passes in a different order on each rank",
        "set another --optimizer.name, or --train.sequence_parallel 1"),
    Conflict("offload.replica_states", "shared", "optimizer.has_gradients", False,
        "{optimizer.name} has no gradients and no states", "set another rule, or --offload.replica_states whole"),
    Conflict("offload.link_gradients", other_than("exact"), "optimizer.has_gradients", False,
        "{optimizer.name} has no gradients to send", "set --offload.link_gradients exact"),
    Conflict("train.delay", 1, "optimizer.has_gradients", False,
        "{optimizer.name} has no backward pass to overlap with a delayed update", "set --train.delay 0"),
)  # fmt: skip
