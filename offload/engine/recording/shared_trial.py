"""Trial run for sequence parallelism: compares shared sequences with whole ones."""

from __future__ import annotations

from typing import Any

import torch

from offload.engine.loss.batch import Batch, map_tensors
from offload.engine.loss.batch_agreement import BatchFacts
from offload.engine.loss.loss import select_inputs
from offload.engine.loss.shared_rows import SharedRows, over_whole_rows, share_rows
from offload.engine.recording.start import Start
from offload.engine.state import EngineState
from offload.errors import ConfigError, OffloadError
from offload.hf.models import in_eval_mode

_ROUNDING_OF_ONE = 4
"""Allowed ratio between the error at one token position and the mean error. A router may send a token elsewhere."""


def check_sharing(state: EngineState, facts: BatchFacts, shared: SharedRows) -> None:
    """Run the model on the first tokens of a few rows, whole and shared, and compare the base model outputs.

    Collective. Raises ConfigError on all ranks if a module mixes tokens outside attention, if attention bypasses the
    transformers interface, or if the loss is not a mean over tokens.
    """
    head, comm = facts.head, state.attention.comm
    name = type(state.model).__name__
    if head is None:
        raise ConfigError(
            f"train.sequence_parallel is {comm.size}, but the loss of {name} is not a mean over tokens with shifted "
            "labels: it has a term over all tokens (such as a router's auxiliary loss, output_router_logits), uses "
            "other targets, or takes no shift_labels. Leave that out, or set --train.sequence_parallel 1."
        )

    def hidden(batch: Batch) -> torch.Tensor:
        found: Any = head.base_output(lambda: state.model(**select_inputs(state.model, batch, None)))
        return found["last_hidden_state"].float()

    told, apart = "", 0.0
    bound = torch.finfo(next(state.model.parameters()).dtype).eps ** 0.5
    with Start(state, {"": state.model}).unseen(), in_eval_mode(state.model), torch.no_grad():
        bring_up = state.device.bring_up
        own, few = share_rows(shared.sample, None, comm)
        assert few is not None
        state.attention.begin_pass(few.whole.needs_mask)
        try:
            with state.runner.as_ours():
                whole, own = (map_tensors(bring_up, each) for each in (shared.sample, own))
                wanted = hidden(whole)
                with over_whole_rows(state.attention, few, own, bring_up) as (given, _):
                    found = hidden(given)
            wanted = wanted[:, comm.rank * found.shape[1] :][:, : found.shape[1]]  # without filler tokens
            found = found[:, : wanted.shape[1]]
            if wanted.numel():
                of_tokens = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
                # A lost neighbour token affects only the first tokens on a rank; rounding affects any token.
                apart = float(max(of_tokens.mean(), of_tokens.mean(0).max() / _ROUNDING_OF_ONE))
            told = "" if apart <= bound else f"tokens differ by {apart:.1g} of their norm on rank {state.comm.rank}"
        except (OffloadError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # same error on all ranks in the group, after equal exchanges
            state.runner.fail(False)
            told = f"{type(error).__name__}: {error}".splitlines()[0]
    told = next(filter(None, state.comm.gather_objects(told, "trial run with shared sequences")), "")
    if told:
        raise ConfigError(
            f"train.sequence_parallel is {comm.size}, but {name} gives other results on shared sequences than on whole "
            f"ones ({told}): a module other than attention mixes tokens (such as a convolution or linear attention), "
            "or attention is not called through transformers' interface. Set --train.sequence_parallel 1."
        )
