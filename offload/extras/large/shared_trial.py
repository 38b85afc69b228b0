"""Trial run for sequence parallelism: compares shared sequences with whole ones."""

from __future__ import annotations

from typing import Any

import torch

from offload.engine.comparison import OTHER_ORDER, tolerance
from offload.engine.loss.batch import Batch, map_tensors
from offload.engine.loss.batch_agreement import PassInputs
from offload.engine.loss.loss import select_inputs
from offload.engine.recording.equivalence import isolated
from offload.engine.state import EngineState
from offload.errors import ConfigError, OffloadError
from offload.extras.large.shared_rows import SharedRows, share_rows
from offload.modules import in_eval_mode

_ROUNDING_OF_ONE = 4
"""Allowed ratio between the error at one token position and the mean error. A router may send a token elsewhere."""


def check_sharing(state: EngineState, inputs: PassInputs, shared: SharedRows) -> None:
    """Run the model on the first tokens of a few rows, whole and shared, and compare the base model outputs.

    Collective. Raises ConfigError on all ranks if a module mixes tokens outside attention, if attention bypasses the
    transformers interface, or if the loss is not a mean over tokens.
    """
    head, comm = inputs.head, state.attention.comm
    name = type(state.model).__name__
    if head is None:
        raise ConfigError(
            f"train.sequence_parallel is {comm.size}, but the loss of {name} is not a mean over tokens with shifted "
            "labels: it has a term over all tokens (such as a router's auxiliary loss, output_router_logits), uses "
            "other targets, or takes no shift_labels. Leave that out, or set --train.sequence_parallel 1."
        )

    def hidden_states(batch: Batch) -> torch.Tensor:
        output: Any = head.base_output(lambda: state.model(**select_inputs(state.model, batch, None)))
        return output["last_hidden_state"].float()

    difference, distance = "", 0.0
    most = tolerance(OTHER_ORDER, [next(state.model.parameters())]).token
    with isolated(state, {"": state.model}), in_eval_mode(state.model), torch.no_grad():
        copy_to_device = state.device.copy_to_device
        own_sample, shared_sample = share_rows(shared.sample, None, comm)
        state.attention.begin_pass(shared_sample.needs_mask)
        try:
            whole_sample, own_sample = (map_tensors(copy_to_device, each) for each in (shared.sample, own_sample))
            expected = hidden_states(whole_sample)
            with state.attention.over(shared_sample, own_sample, copy_to_device) as (model_batch, _):
                actual = hidden_states(model_batch)
            expected = expected[:, comm.rank * actual.shape[1] :][:, : actual.shape[1]]  # without filler tokens
            actual = actual[:, : expected.shape[1]]
            if expected.numel():
                token_errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
                # A lost neighbour token affects only the first tokens on a rank; rounding affects any token.
                distance = float(max(token_errors.mean(), token_errors.mean(0).max() / _ROUNDING_OF_ONE))
            if distance > most:
                difference = f"tokens differ by {distance:.1g} of their norm on rank {state.comm.rank}"
        except (OffloadError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # same error on all ranks in the group, after equal exchanges
            state.runner.has_failed = False
            difference = f"{type(error).__name__}: {error}".splitlines()[0]
    difference = next(filter(None, state.comm.gather_objects(difference, "trial run with shared sequences")), "")
    if difference:
        raise ConfigError(
            f"train.sequence_parallel is {comm.size}, but {name} gives other results on shared sequences than on whole "
            f"ones ({difference}): a module other than attention mixes tokens (such as a convolution or linear "
            "attention), or attention is not called through transformers' interface. Set --train.sequence_parallel 1."
        )
