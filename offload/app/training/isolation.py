"""Isolation between documents in a packed row: a test on the model itself before the first step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from offload.app.config.config import Config
from offload.app.config.sections import DOCUMENTS
from offload.app.training.task import Task
from offload.distributed.comm import Comm
from offload.engine.companions import companions_of
from offload.engine.engine import Engine

_LENGTHS = 23, 9, 16
"""Tokens in the test documents of a row. The last one is longer than the reach of short convolutions."""
_ROUNDING = 2e-6
"""fp32 rounding, relative to the largest logit."""


def why_not_isolated(model: nn.Module, device: torch.device, vocab_size: int, spared: Collection[int] = ()) -> str:
    """Return the reason why a document in a packed row is computed differently than alone. Empty: no difference.

    Positions restart in each document. The logits of the last document in a row must not change when the two earlier
    documents swap places, and must equal the logits for the document alone. Changes also caused by other rows in the
    batch (experts group tokens differently) are tolerated.

    `spared`: token ids to leave out, for example padding, because a model may treat them specially. Collective for a
    model in an engine.
    """
    generator = torch.Generator().manual_seed(0)
    usable = torch.tensor([token for token in range(min(vocab_size, 4096)) if token not in spared])
    sizes = 2 * _LENGTHS
    a, b, c, d, e, f = usable[torch.randint(len(usable), (sum(sizes),), generator=generator)].split(sizes)
    was_training = model.training

    def last(*rows: torch.Tensor, **positions: torch.Tensor) -> torch.Tensor:
        """Return the logits for the last document in the first row."""
        # With a cache, transformers makes no mask from restarted positions.
        outputs = model(input_ids=torch.stack(rows).to(device), use_cache=False, **positions)
        return outputs.logits[0, -len(c) :].float()

    def in_row(*documents: torch.Tensor) -> torch.Tensor:
        positions = torch.cat([torch.arange(len(each)) for each in documents]).view(2, -1)
        return last(torch.cat(documents[:3]), torch.cat(documents[3:]), position_ids=positions.to(device))

    # Dropout would differ from row to row.
    model.eval()
    try:
        with torch.no_grad():
            one = in_row(a, b, c, d, e, f)
            swapped = in_row(b, a, c, d, e, f)
            alone = last(c)
            # Experts group the tokens of all rows: another row changes their rounding, and this is no fault.
            noise = max(float((one - in_row(a, b, c, *rest)).abs().max()) for rest in ((f, d, e), (e, f, d)))
    except (TypeError, ValueError, RuntimeError, IndexError) as error:  # no position argument, no restarted positions
        return f"the model does not accept positions that restart within a row ({' '.join(str(error).split())[:120]})"
    finally:
        model.train(was_training)
    # Relative to the largest logit: families scale their logits differently.
    scale = float(one.abs().max())
    if (changes := float((one - swapped).abs().max())) > max(8 * noise, _ROUNDING * scale):
        return f"a document's logits depend on the documents before it (by {changes / scale:.1g} of the largest logit)"
    dtype = next(model.parameters()).dtype
    if (differs := float((one - alone).abs().max()) / scale) > min(256 * torch.finfo(dtype).eps, 0.1):
        return f"a document's logits in a row differ from its logits alone (by {differs:.1g} of the largest logit)"
    return ""


def isolate(
    engine: Engine, data: Task, config: Config, comm: Comm, vocab_size: int, rope_limit: int | None
) -> tuple[str, str]:
    """Choose the attention for packed documents: one by one if the model allows this, else through a mask.

    Return why a mask is needed, and why the documents of a row are mixed even so. Empty: no reason. `rope_limit`: see
    `TaskKind.build`. Collective.
    """
    if not data.is_isolated:
        return "", ""
    if rope_limit is not None and data.longest > rope_limit:
        return "", (
            f"beyond {rope_limit:,} tokens a model has other rotary frequencies for all documents in a batch, and "
            f"the longest document has {data.longest:,}"
        )
    why_mask = ""
    if config.attends_documents and config.model.attention == DOCUMENTS:
        engine.set_attention(DOCUMENTS)
        why_mask = check_isolation(engine, data.tokenizer, vocab_size, comm)
        if not why_mask:
            return "", ""
        engine.set_attention("whole")
    return why_mask, check_isolation(engine, data.tokenizer, vocab_size, comm)


def check_isolation(engine: Engine, tokenizer: Any, vocab_size: int, comm: Comm) -> str:
    """Like `why_not_isolated`, with the same result on all ranks. Collective."""
    spared = set(getattr(tokenizer, "all_special_ids", ()))
    models = (engine.model, *companions_of(engine.model).values())
    reasons = [why_not_isolated(model, engine.device, vocab_size, spared) for model in models]
    return comm.from_rank(0, next(filter(None, reasons), ""), "documents apart")
