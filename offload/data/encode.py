"""Records to token ids, in batches, with the mask of what is trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from offload.data.chat import ChatRenderer, Segments
from offload.data.formats import Chat, Ids, Pair, Preference, Record, Text
from offload.data.rows import BadRow, BadRows

_BATCH_CHARS = 2 << 20  # of which two are in memory, with some hundred bytes a token
_BATCH_RECORDS = 4096


Measured = Literal["none", "held out", "all"]
"""Of which documents the bytes of each token are counted. Of all takes twice as long, since it needs offsets."""


class Tokenized(NamedTuple):
    """The tokens of a document, or a piece of one."""

    ids: np.ndarray
    """int64 [n]."""
    trained: np.ndarray | None
    """Which of them are trained, bool [n]; None where all are."""
    num_bytes: np.ndarray | None = None
    """Of how many bytes of the text each is, in UTF-8, int64 [n]; None where that is not counted."""

    def framed(self, before: Sequence[int], after: Sequence[int]) -> Tokenized:
        """Return it between tokens that stand for no text: those before it are trained where all of it is, those after
        it where its last token is.
        """
        ids, trained, num_bytes = self
        if trained is not None:
            first, last = trained.all(), trained[-1] if len(trained) else False
            trained = np.concatenate([np.full(len(before), first), trained, np.full(len(after), last)])
        if num_bytes is not None:
            num_bytes = np.pad(num_bytes, (len(before), len(after)))
        return Tokenized(
            np.concatenate([np.asarray(before, np.int64), ids, np.asarray(after, np.int64)]), trained, num_bytes
        )


@dataclass(frozen=True)
class Encoded:
    """Token ids [n] of a document or a piece of one; `trained` bool [n], None where all are; `num_bytes`: as
    `Tokenized`. `closes`: the document ends here."""

    where: str
    in_eval: bool
    ids: np.ndarray
    trained: np.ndarray | None
    closes: bool
    num_bytes: np.ndarray | None = None


@dataclass
class _Draft:
    where: str
    in_eval: bool
    segments: Segments
    framed: bool  # the tokenizer's own first and last tokens are added; a chat template writes its own
    opens: bool = True
    closes: bool = True
    may_be_empty: bool = False  # as one of two documents, which stay side by side
    measured: bool = False


class Encoder:
    """Encodes records with one tokenizer.

    Plain text gets what the tokenizer itself puts around a sequence (such as a BOS) and then ends in EOS. A
    conversation gets its chat template, and an EOS unless the template has just written one. Pieces of one long
    document are framed only at its two ends.
    """

    def __init__(
        self, tokenizer: Any, train_on_prompt: bool, bad: BadRows | None = None, measured: Measured = "none"
    ) -> None:
        """`bad` takes conversations that the chat template refuses; without it the first one is an error. `measured`:
        whose bytes are counted; until there is a document that is held out, those of the others are, from whose rows
        some are taken where there is none.
        """
        self._tokenizer = tokenizer
        self._measured, self._holds_out = measured, False
        self._bad = bad or BadRows("error")
        self._train_on_prompt = train_on_prompt
        self.renderer = ChatRenderer(tokenizer, train_on_prompt)
        self._prefix, self._suffix = _frame(tokenizer)  # after which nothing is cut off or padded
        self._rules: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        """The tokenizer of `tokenizers` itself, which has a call for ids without offsets."""
        self._eos: int | None = tokenizer.eos_token_id
        self.num_empty = 0  # documents that held no token
        self.num_split = 0  # conversations that became several documents

    def encode(self, records: Iterable[tuple[bool, Record]]) -> Iterator[Encoded]:
        """Yield the encoding of each (in_eval, record), in order. One without any token is counted and left out.

        A batch is tokenized by the threads of `tokenizers` while the one before it is taken on from here.
        """
        with ThreadPoolExecutor(1, "tokenizing") as worker:
            before: Iterable[Encoded] = ()
            for batch in self._batches(records):
                if isinstance(batch, Encoded):
                    yield from before
                    before = (batch,)
                    continue
                made = worker.submit(self._tokenize, batch)
                yield from before
                before = self._made(batch, made)
            yield from before

    def _batches(self, records: Iterable[tuple[bool, Record]]) -> Iterator[Encoded | list[_Draft]]:
        """Yield what is encoded already, and batches of what is to be."""
        drafts: list[_Draft] = []
        num_chars = 0
        for in_eval, record in records:
            done, new = None, []
            if isinstance(record, Ids):
                trained = None if self._train_on_prompt else record.trained
                done = Encoded(record.where, in_eval, record.ids, trained, record.closes)
            else:
                self._holds_out |= in_eval
                try:
                    marked = self.renderer.token_mask(record) if isinstance(record, Chat) else None
                    new = self._drafts(in_eval, record) if marked is None else []
                except BadRow as bad:
                    self._bad.met(bad)
                    continue
                if marked is not None:
                    made = self._close(Tokenized(np.asarray(marked[0], np.int64), marked[1]), framed=False)
                    done = Encoded(record.where, in_eval, made.ids, made.trained, True)
            for draft in new:
                open_yet = self._measured == "held out" and (in_eval or not self._holds_out)
                draft.measured = self._tokenizer.is_fast and (open_yet or self._measured == "all")
            drafts += new
            num_chars += sum(len(text) for draft in new for text, _ in draft.segments)
            if drafts and (done is not None or num_chars >= _BATCH_CHARS or len(drafts) >= _BATCH_RECORDS):
                yield drafts
                drafts, num_chars = [], 0
            if done is not None:
                yield done
        if drafts:
            yield drafts

    def _drafts(self, in_eval: bool, record: Text | Chat | Pair | Preference) -> list[_Draft]:
        if isinstance(record, Preference):
            return [self._answer(in_eval, record.chosen), self._answer(in_eval, record.rejected)]
        if isinstance(record, Text):
            return [_Draft(record.where, in_eval, [(record.text, True)], True, record.opens, record.closes)]
        if isinstance(record, Pair):
            segments = [(record.prompt, self._train_on_prompt), (record.completion, True)]
            return [_Draft(record.where, in_eval, segments, framed=True)]
        documents = self.renderer.documents(record)
        self.num_split += len(documents) > 1
        return [_Draft(record.where, in_eval, segments, framed=False) for segments in documents]

    def _answer(self, in_eval: bool, record: Chat | Pair) -> _Draft:
        """Return one of the two documents of a preference. Raises BadRow."""
        if isinstance(record, Pair):
            segments, framed = [(record.prompt, False), (record.completion, True)], True
        else:
            (segments, *more), framed = self.renderer.documents(record), False
            if more:
                raise BadRow(
                    f"{record.where}: the chat template writes an answer differently once another one follows, so a "
                    "preference over several answers is no single text: give all but the last as the prompt."
                )
        return _Draft(record.where, in_eval, segments, framed, may_be_empty=True)

    def _made(self, drafts: list[_Draft], tokenized: Future[list[Tokenized]]) -> Iterator[Encoded]:
        for draft, made in zip(drafts, tokenized.result(), strict=True):
            if not len(made.ids) and draft.opens and draft.closes and not draft.may_be_empty:
                self.num_empty += 1
                continue
            if draft.framed and draft.opens and self._prefix:
                made = made.framed(self._prefix, ())
            if draft.closes:
                made = self._close(made, draft.framed)
            yield Encoded(draft.where, draft.in_eval, made.ids, made.trained, draft.closes, made.num_bytes)

    def _close(self, made: Tokenized, framed: bool) -> Tokenized:
        """Append what ends a document. It is trained when the token before it is."""
        closing = list(self._suffix) if framed else []
        # A template may write a line end after its EOS.
        if self._eos is not None and self._eos not in [*made.ids[-2:].tolist(), *closing][-2:]:
            closing.append(self._eos)
        return made.framed((), closing)

    def _tokenize(self, drafts: list[_Draft]) -> list[Tokenized]:
        """Return the tokens of each document, or piece of one."""
        if not self._tokenizer.is_fast:
            return [self._tokenize_by_segment(draft.segments) for draft in drafts]
        masked = [any(not trained for _, trained in draft.segments) for draft in drafts]
        texts = ["".join(text for text, _ in draft.segments) for draft in drafts]
        has_offsets = any(masked) or any(draft.measured for draft in drafts)
        encode = self._rules.encode_batch if has_offsets else self._rules.encode_batch_fast
        return [
            Tokenized(
                np.asarray(encoding.ids, np.int64),
                _trained_tokens(encoding.offsets, draft.segments) if has_mask else None,
                _byte_counts(encoding.offsets, text) if draft.measured else None,
            )
            for encoding, draft, text, has_mask in zip(
                encode(texts, add_special_tokens=False), drafts, texts, masked, strict=True
            )
        ]

    def _tokenize_by_segment(self, segments: Segments) -> Tokenized:
        """Without offsets, a token's place is known only if prompt and answer are encoded one after the other."""
        ids: list[int] = []
        mask: list[bool] = []
        for text, trained in segments:
            part = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            ids += part
            mask += [trained] * len(part)
        return Tokenized(np.asarray(ids, np.int64), None if all(mask) else np.asarray(mask, bool))


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


def _byte_counts(offsets: list[tuple[int, int]], text: str) -> np.ndarray:
    """Return of how many bytes of a text each token is, in UTF-8, int64 [tokens]: of all since the token before, so
    that the bytes of a text are those of its tokens. A character of several tokens counts with the first of them.

    `offsets` are ranges in characters.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    before = np.concatenate([[0], np.cumsum(1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000))])
    ends = np.maximum.accumulate(np.asarray(offsets, np.int64).reshape(-1, 2)[:, 1])
    ends[-1:] = len(text)
    return np.diff(before[ends], prepend=0)
