"""A short excerpt from a row, a prompt with the reference answer, for comparison with generated text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from offload.extras.data.packing import IGNORE

if TYPE_CHECKING:
    from offload.extras.data.mixture import RowSet

MOST_PROMPT_TOKENS = 256
_TEXT_TOKENS = 16


class Excerpt(NamedTuple):
    """Prompt and answer tokens, int64 [n]. `answer` is None for a text without a separate prompt."""

    prompt: np.ndarray
    answer: np.ndarray | None


def excerpt_of(rows: RowSet, index: int) -> Excerpt | None:
    """Return an excerpt of row `index`. None: all prompts are too long."""
    indices = np.array([index])
    ids, labels = rows.read(indices)
    length = int(rows.lengths(indices)[0])
    return cut_excerpt(ids[0, :length], labels[0, :length], rows.document_starts(indices)[0].tolist())


def cut_excerpt(ids: np.ndarray, labels: np.ndarray, starts: Sequence[int]) -> Excerpt | None:
    """Cut an excerpt from the ids and labels (int64 [n]) of a row with documents at `starts`.

    A conversation gives everything up to the first answer, a plain text the first tokens. The first document in a row
    may have begun in an earlier row, so this document is tried last.
    """
    ends = [*starts[1:], len(ids)]
    documents = list(zip(starts, ends, strict=True))
    documents = [span for span in [*documents[1:], *documents[:1]] if span[1] - span[0] > 1]
    with_prompt = [span for span in documents if (labels[span[0] + 1 : span[1]] == IGNORE).any()]
    for begin, end in with_prompt:
        is_answer = labels[begin:end] != IGNORE
        is_answer[0] = False  # the first token has no context
        first = int(is_answer.argmax())
        behind = ~is_answer[first:]
        num_tokens = int(behind.argmax()) if behind.any() else len(behind)
        if is_answer.any() and first <= MOST_PROMPT_TOKENS:
            return Excerpt(ids[begin : begin + first], ids[begin + first : begin + first + num_tokens])
    for begin, end in documents:
        if (begin, end) not in with_prompt:
            return Excerpt(ids[begin : begin + min(_TEXT_TOKENS, (end - begin) // 2)], None)
    return None
