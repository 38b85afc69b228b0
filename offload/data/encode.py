"""Records to token ids, in batches, with the mask of what is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.data.chat import ChatRenderer, Segments
from offload.data.formats import Chat, Ids, Pair, Record, Text
from offload.data.rows import BadRow, BadRows

_BATCH_CHARS = 4 << 20
_BATCH_RECORDS = 4096


@dataclass(frozen=True)
class Encoded:
    """Token ids [n] of a document or a piece of one; `trained` bool [n], None where all are. `closes`: the document
    ends here."""

    where: str
    in_eval: bool
    ids: np.ndarray
    trained: np.ndarray | None
    closes: bool


@dataclass
class _Draft:
    where: str
    in_eval: bool
    segments: Segments
    framed: bool  # the tokenizer's own first and last tokens are added; a chat template writes its own
    opens: bool = True
    closes: bool = True


class Encoder:
    """Encodes records with one tokenizer.

    Plain text gets what the tokenizer itself puts around a sequence (such as a BOS) and then ends in EOS. A
    conversation gets its chat template, and an EOS unless the template has just written one. Pieces of one long
    document are framed only at its two ends.
    """

    def __init__(self, tokenizer: Any, train_on_prompt: bool, bad: BadRows | None = None) -> None:
        """`bad` takes conversations that the chat template refuses; without it the first one is an error."""
        self._tokenizer = tokenizer
        self._bad = bad or BadRows("error")
        self._train_on_prompt = train_on_prompt
        self.renderer = ChatRenderer(tokenizer, train_on_prompt)
        self._prefix, self._suffix = _frame(tokenizer)
        self._eos: int | None = tokenizer.eos_token_id
        self.num_empty = 0  # documents that held no token

    def encode(self, records: Iterable[tuple[bool, Record]]) -> Iterator[Encoded]:
        """Yield the encoding of each (in_eval, record), in order. One without any token is counted and left out."""
        drafts: list[_Draft] = []
        num_chars = 0
        for in_eval, record in records:
            if isinstance(record, Ids):
                yield from self._flush(drafts)
                trained = None if self._train_on_prompt else record.trained
                yield Encoded(record.where, in_eval, record.ids, trained, record.closes)
                continue
            try:
                marked = self.renderer.token_mask(record) if isinstance(record, Chat) else None
                new = self._drafts(in_eval, record) if marked is None else []
            except BadRow as bad:
                self._bad.met(bad)
                continue
            if marked is not None:
                yield from self._flush(drafts)
                ids, trained = self._close(marked[0], marked[1], framed=False)
                yield Encoded(record.where, in_eval, ids, trained, True)
                continue
            for draft in new:
                drafts.append(draft)
                num_chars += sum(len(text) for text, _ in draft.segments)
            if num_chars >= _BATCH_CHARS or len(drafts) >= _BATCH_RECORDS:
                yield from self._flush(drafts)
                num_chars = 0
        yield from self._flush(drafts)

    def _drafts(self, in_eval: bool, record: Text | Chat | Pair) -> list[_Draft]:
        if isinstance(record, Text):
            return [_Draft(record.where, in_eval, [(record.text, True)], True, record.opens, record.closes)]
        if isinstance(record, Pair):
            segments = [(record.prompt, self._train_on_prompt), (record.completion, True)]
            return [_Draft(record.where, in_eval, segments, framed=True)]
        return [_Draft(record.where, in_eval, segments, framed=False) for segments in self.renderer.documents(record)]

    def _flush(self, drafts: list[_Draft]) -> Iterator[Encoded]:
        for draft, (ids, trained) in zip(drafts, self._tokenize([draft.segments for draft in drafts]), strict=True):
            if not len(ids) and draft.opens and draft.closes:
                self.num_empty += 1
                continue
            if draft.framed and draft.opens:
                ids = [*self._prefix, *ids]
                if trained is not None:
                    trained = np.concatenate([np.full(len(self._prefix), trained.all()), trained])
            array = np.asarray(ids, np.int64)
            if draft.closes:
                array, trained = self._close(ids, trained, draft.framed)
            yield Encoded(draft.where, draft.in_eval, array, trained, draft.closes)
        drafts.clear()

    def _close(self, ids: list[int], trained: np.ndarray | None, framed: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Append what ends a document. It is trained when the token before it is."""
        closing = list(self._suffix) if framed else []
        # A template may write a line end after its EOS.
        if self._eos is not None and self._eos not in [*ids, *closing][-2:]:
            closing.append(self._eos)
        if trained is not None:
            trained = np.concatenate([trained, np.full(len(closing), trained[-1] if len(trained) else False)])
        return np.asarray([*ids, *closing], np.int64), trained

    def _tokenize(self, documents: list[Segments]) -> Iterator[tuple[list[int], np.ndarray | None]]:
        """Yield (ids, trained or None) for each document."""
        if not self._tokenizer.is_fast:
            yield from map(self._tokenize_by_segment, documents)
            return
        masked = [any(not trained for _, trained in segments) for segments in documents]
        texts = ["".join(text for text, _ in segments) for segments in documents]
        if not texts:
            return
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=any(masked),
            verbose=False,
        )
        for index, ids in enumerate(encoded["input_ids"]):
            trained = _trained_tokens(encoded["offset_mapping"][index], documents[index]) if masked[index] else None
            yield ids, trained

    def _tokenize_by_segment(self, segments: Segments) -> tuple[list[int], np.ndarray | None]:
        """Without offsets, a token's place is known only if prompt and answer are encoded one after the other."""
        ids: list[int] = []
        mask: list[bool] = []
        for text, trained in segments:
            part = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            ids += part
            mask += [trained] * len(part)
        return ids, None if all(mask) else np.asarray(mask, bool)


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids a tokenizer puts before and after every sequence, found by encoding a letter with and without
    them."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a")["input_ids"]
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return special[:start], special[start + len(plain) :]
    return [], []


def _trained_tokens(offsets: list[tuple[int, int]], segments: Segments) -> np.ndarray:
    """Return bool [tokens]: whether a token covers a character of a trained segment.

    `offsets` are character ranges in the joined text. A token on the border of prompt and answer is trained, so that no
    character of an answer is lost. Two shapes of range are empty: blanks that the tokenizer trims from its ranges (they
    fill the gap to the range before) and the later bytes of a character that takes several tokens (they share its
    range).
    """
    trained = np.concatenate([np.full(len(text), mark) for text, mark in segments])
    before = np.concatenate([[0], np.cumsum(trained)])
    start, end = np.asarray(offsets, np.int64).reshape(-1, 2).T
    previous = np.concatenate([[0], end[:-1]])
    start = np.where(end > start, start, np.minimum(previous, start))
    end = np.minimum(np.maximum(end, start + 1), len(trained))
    start = np.minimum(start, end)
    return np.asarray(before[end] - before[start] > 0)
