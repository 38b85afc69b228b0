"""The row excerpt for a sample comparison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from offload.extras.data.dataset import MOST_PROMPT_TOKENS, cut_excerpt

ASKED = "aaaaBBBa"
"""A conversation with eight tokens: small letters are context, capitals are trained."""


@pytest.mark.parametrize(
    ("row", "starts", "prompt", "answer"),
    [
        (ASKED, [0], "aaaa", "BBB"),
        ("aaBBaaCC", [0], "aa", "BB"),  # the first of two answers
        ("Aaaaaaab", [0], None, None),  # no context before the trained token
        ("BBB" + ASKED, [0, 3], "aaaa", "BBB"),  # the first answer began in another row
        (ASKED + "aaB", [0, 8], "aa", "B"),
        ("a" * (MOST_PROMPT_TOKENS + 1) + "B", [0], None, None),
        ("a" * (MOST_PROMPT_TOKENS + 1) + "B" + ASKED, [0, MOST_PROMPT_TOKENS + 2], "aaaa", "BBB"),
        ("A" * 40, [0], "A" * 16, None),
        ("AAA", [0], "A", None),
        ("A", [0], None, None),
        ("AAAAAABBBB", [0, 6], "BB", None),
    ],
)
def test_the_prompt_ends_where_the_answer_begins(
    row: str, starts: Sequence[int], prompt: str | None, answer: str | None
) -> None:
    ids = np.array([ord(letter) for letter in row])
    found = cut_excerpt(ids, np.where(ids < ord("a"), ids, -100), starts)
    assert (None if found is None else "".join(map(chr, found.prompt))) == prompt
    assert (None if found is None or found.answer is None else "".join(map(chr, found.answer))) == answer
