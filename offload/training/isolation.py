"""Whether documents of a row are apart: as the run was told, and as the model itself is asked before the first step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from offload.distributed.comm import Comm
from offload.engine.engine import Engine

_LENGTH = 16
"""Tokens of a document that is tried: above the reach of short convolutions."""
_ROUNDING = 2e-6
"""What is rounding in fp32, as a share of the largest logit."""


def why_not_apart(model: nn.Module, device: torch.device, vocab_size: int, spared: Collection[int] = ()) -> str:
    """Say how a document in a row is not as it would be alone, where positions begin anew in each; nothing where it is.
    Its logits must not change once the two documents before it change places, but for what they change with other rows
    of the batch too, by which experts group their tokens otherwise; and they are those of the document alone.

    The rows are made of tokens that are not `spared`, such as those for padding, which a model may treat in its own
    way. Collective, where the model is an engine's.
    """
    generator = torch.Generator().manual_seed(0)
    usable = torch.tensor([token for token in range(min(vocab_size, 4096)) if token not in spared])
    a, b, c, d, e, f = usable[torch.randint(len(usable), (6, _LENGTH), generator=generator)]
    anew, was_training = torch.arange(_LENGTH).repeat(3).expand(2, -1), model.training

    def last(*rows: torch.Tensor, **positions: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last document of the first row."""
        found = model(input_ids=torch.stack(rows).to(device), use_cache=False, **positions)
        return found.logits[0, -_LENGTH:].float()

    def in_row(*documents: torch.Tensor) -> torch.Tensor:
        return last(torch.cat(documents[:3]), torch.cat(documents[3:]), position_ids=anew.to(device))

    model.eval()
    try:
        with torch.no_grad():
            one, swapped, alone = in_row(a, b, c, d, e, f), in_row(b, a, c, d, e, f), last(c)
            noise = max(float((one - in_row(a, b, c, *rest)).abs().max()) for rest in ((f, d, e), (e, f, d)))
    except (TypeError, ValueError, RuntimeError) as error:  # the model takes no positions, or none that begin anew
        return f"the model does not take positions that begin anew ({' '.join(str(error).split())[:120]})"
    finally:
        model.train(was_training)
    scale = float(one.abs().max())
    if (changes := float((one - swapped).abs().max())) > max(8 * noise, _ROUNDING * scale):
        return f"a document's logits change by {changes / scale:.1g} of the largest with the documents before it"
    dtype = next(model.parameters()).dtype
    if (differs := float((one - alone).abs().max()) / scale) > min(256 * torch.finfo(dtype).eps, 0.1):
        return f"a document's logits differ by {differs:.1g} of the largest from those of the document alone"
    return ""


def ask_whether_apart(engine: Engine, tokenizer: Any, vocab_size: int, comm: Comm) -> str:
    """As `why_not_apart`, on all ranks alike. Collective."""
    spared = set(getattr(tokenizer, "all_special_ids", ()))
    return comm.gather_objects(why_not_apart(engine.model, engine.device, vocab_size, spared), "documents apart")[0]


def not_apart(why: str) -> str:
    """Return the error of a run whose documents were to be apart."""
    return (
        f"data.packing_isolated is true, and {why}: documents of a row would see each other. Set --data.packing false "
        "for a document a row, or --data.packing_isolated false."
    )
