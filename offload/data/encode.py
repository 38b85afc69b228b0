"""Records to token ids, in batches, with the mask of what is trained."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from offload.data.chat import ChatRenderer, Segments
from offload.data.formats import Chat, Ids, Pair, Preference, Record, Text, picture_bytes, pieces_of, texts_of
from offload.data.pictures import Pictured
from offload.data.rows import BadRow, BadRows
from offload.data.workers import Maker, made_ahead
from offload.errors import ConfigError, shorten

_BATCH_CHARS = 2 << 20  # of which three are in memory, one of them with some hundred bytes a token
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
    `Tokenized`. `closes`: the document ends here. `pictured`: what a document with pictures was made of."""

    where: str
    in_eval: bool
    ids: np.ndarray
    trained: np.ndarray | None
    closes: bool
    num_bytes: np.ndarray | None = None
    pictured: Pictured | None = None


class Asked(NamedTuple):
    """What is to become of a record."""

    record: Record
    in_eval: bool
    measured: bool  # the bytes of its tokens are counted


@dataclass
class _Draft:
    where: str
    in_eval: bool
    measured: bool
    segments: Segments
    framed: bool  # the tokenizer's own first and last tokens are added; a chat template writes its own
    opens: bool = True
    closes: bool = True
    may_be_empty: bool = False  # as one of two documents, which stay side by side

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.segments)

    @property
    def masked(self) -> bool:
        """Whether some of it is not trained."""
        return any(not trained for _, trained in self.segments)

    @property
    def needs_offsets(self) -> bool:
        return self.masked or self.measured


@dataclass
class Made:
    """What a batch of records has become."""

    parts: list[Encoded | BadRow]
    """Documents in order, and in its place what the chat template refuses."""
    num_empty: int = 0
    """Documents without a token, which are left out."""
    num_split: int = 0
    """Conversations that became several documents."""


class Encoder:
    """Encodes records with one tokenizer.

    Plain text gets what the tokenizer itself puts around a sequence (such as a BOS) and then ends in EOS. A
    conversation gets its chat template, and an EOS unless the template has just written one. Pieces of one long
    document are framed only at its two ends.
    """

    def __init__(
        self,
        tokenizer: Any,
        train_on_prompt: bool,
        bad: BadRows | None = None,
        measured: Measured = "none",
        num_workers: int = 0,
        maker: Maker[list[Asked], Made] | None = None,
    ) -> None:
        """`bad` takes conversations that the chat template refuses; without it the first one is an error. `measured`:
        whose bytes are counted; until there is a document that is held out, those of the others are, from whose rows
        some are taken where there is none. `num_workers`: processes that encode, 0 for this one with the threads of
        `tokenizers`. `maker`: what encodes in place of the tokenizer alone.
        """
        self._maker = maker or _Maker(tokenizer, train_on_prompt)
        self._measured, self._holds_out = measured, False
        self._bad = bad or BadRows("error")
        self._num_workers = num_workers
        self.num_empty = 0
        """Documents that held no token."""
        self.num_split = 0
        """Conversations that became several documents."""

    def encode(self, records: Iterable[tuple[bool, Record]]) -> Iterator[Encoded]:
        """Yield the encoding of each (in_eval, record), in order. One without any token is counted and left out.

        Batches are tokenized while those before them are taken on from here.
        """
        with closing(made_ahead(self._maker, self._batches(records), self._num_workers)) as batches:
            for made in batches:
                self.num_empty += made.num_empty
                self.num_split += made.num_split
                for part in made.parts:
                    if isinstance(part, BadRow):
                        self._bad.met(part)
                    else:
                        yield part

    def _batches(self, records: Iterable[tuple[bool, Record]]) -> Iterator[list[Asked]]:
        """Cut records into batches of about one size."""
        batch: list[Asked] = []
        num_chars = 0
        for in_eval, record in records:
            self._holds_out |= in_eval
            open_yet = self._measured == "held out" and (in_eval or not self._holds_out)
            batch.append(Asked(record, in_eval, open_yet or self._measured == "all"))
            num_chars += len(record.ids) if isinstance(record, Ids) else sum(map(len, texts_of(record)))
            num_chars += picture_bytes(record)
            if num_chars >= _BATCH_CHARS or len(batch) >= _BATCH_RECORDS:
                yield batch
                batch, num_chars = [], 0
        if batch:
            yield batch


class _Maker:
    """Encodes a batch, by whichever process."""

    def __init__(self, tokenizer: Any, train_on_prompt: bool) -> None:
        self._tokenizer = tokenizer
        self._train_on_prompt = train_on_prompt
        self._renderer = ChatRenderer(tokenizer, train_on_prompt)
        self._prefix, self._suffix = frame_of(tokenizer)  # after which nothing is cut off or padded
        self._eos: int | None = tokenizer.eos_token_id

    def make(self, batch: list[Asked]) -> Made:
        """Encode the records of a batch."""
        made, found = Made([]), list[tuple[Asked, list[Encoded | _Draft] | BadRow]]()
        for asked in batch:
            try:
                found.append((asked, self._begun(asked)))
            except BadRow as bad:
                found.append((asked, bad))
        drafts = (part for _, begun in found if isinstance(begun, list) for part in begun if isinstance(part, _Draft))
        tokenized = self._tokenized(drafts)
        for asked, begun in found:
            done = begun if isinstance(begun, BadRow) else self._documents(asked.record, begun, tokenized)
            if isinstance(done, BadRow):
                made.parts.append(done)
                continue
            made.num_split += isinstance(asked.record, Chat) and len(done) > 1
            made.num_empty += done.count(None)
            made.parts += [each for each in done if each is not None]
        return made

    def _begun(self, asked: Asked) -> list[Encoded | _Draft]:
        """Return what is encoded already, or what is to be. Raises BadRow."""
        record = asked.record
        if isinstance(record, Ids):
            trained = None if self._train_on_prompt else record.trained
            return [Encoded(record.where, asked.in_eval, record.ids, trained, record.closes)]
        if isinstance(record, Chat) and record.pictures:
            raise ConfigError(
                f"{record.where} has a picture, and none of the first rows of its source has one, so that it was taken "
                "for one of text alone: put a row with a picture first."
            )
        if isinstance(record, Preference):
            return [self._answer(asked, record.chosen), self._answer(asked, record.rejected)]
        draft = partial(_Draft, record.where, asked.in_eval, asked.measured)
        if isinstance(record, Text):
            pieces = list(pieces_of(record.text))
            last = len(pieces) - 1
            return [
                draft([(piece, True)], True, record.opens and not i, record.closes and i == last)
                for i, piece in enumerate(pieces)
            ]
        if isinstance(record, Pair):
            return [draft([(record.prompt, self._train_on_prompt), (record.completion, True)], framed=True)]
        return [draft(segments, framed=False) for segments in self._renderer.documents(record)]

    def _answer(self, asked: Asked, record: Chat | Pair) -> _Draft:
        """Return one of the two documents of a preference. Raises BadRow."""
        if isinstance(record, Pair):
            segments, framed = [(record.prompt, False), (record.completion, True)], True
        else:
            (segments, *more), framed = self._renderer.documents(record), False
            if more:
                raise BadRow(
                    f"{record.where}: the chat template writes an answer differently once another one follows, so a "
                    "preference over several answers is no single text: give all but the last as the prompt."
                )
        return _Draft(record.where, asked.in_eval, asked.measured, segments, framed, may_be_empty=True)

    def _finished(self, draft: _Draft, made: Tokenized) -> Encoded | None:
        """Return a document, None for one without a token."""
        if not len(made.ids) and draft.opens and draft.closes and not draft.may_be_empty:
            return None
        if draft.framed and draft.opens and self._prefix:
            made = made.framed(self._prefix, ())
        if draft.closes:
            made = self._close(made, draft.framed)
        return Encoded(draft.where, draft.in_eval, made.ids, made.trained, draft.closes, made.num_bytes)

    def _close(self, made: Tokenized, framed: bool) -> Tokenized:
        """Append what ends a document. It is trained when the token before it is."""
        closing = list(self._suffix) if framed else []
        # A template may write a line end after its EOS.
        if self._eos is not None and self._eos not in [*made.ids[-2:].tolist(), *closing][-2:]:
            closing.append(self._eos)
        return made.framed((), closing)

    def _documents(
        self, record: Record, begun: list[Encoded | _Draft], tokenized: Iterator[Tokenized | BadRow]
    ) -> list[Encoded | None] | BadRow:
        """Return the documents of a record, None for one without a token. Where the tokenizer refuses one of them, the
        record goes as a whole, since a preference is two documents. Raises ConfigError for a piece of a text file,
        which is no row.
        """
        made = [part if isinstance(part, Encoded) else (part, next(tokenized)) for part in begun]
        done: list[Encoded | None] = []
        for each in made:
            if isinstance(each, Encoded):
                done.append(each)
                continue
            draft, tokens = each
            if not isinstance(tokens, BadRow):
                done.append(self._finished(draft, tokens))
            elif isinstance(record, Text) and not (record.opens and record.closes):
                raise ConfigError(str(tokens)) from tokens
            else:
                return tokens
        return done

    def _tokenized(self, drafts: Iterable[_Draft]) -> Iterator[Tokenized | BadRow]:
        """Yield the tokens of each, made of so many at a time as the memory is meant for, or what the tokenizer says of
        a text that it refuses.
        """
        some: list[_Draft] = []
        num_chars = 0
        for draft in drafts:
            some.append(draft)
            num_chars += len(draft.text)
            if num_chars >= _BATCH_CHARS:
                yield from self._tokenize_each(some)
                some, num_chars = [], 0
        yield from self._tokenize_each(some)

    def _tokenize_each(self, drafts: list[_Draft]) -> list[Tokenized | BadRow]:
        """Return the tokens of each, or what the tokenizer says of it."""
        try:
            return [*self._tokenize(drafts)]
        except Exception as error:  # whatever a tokenizer raises, such as of half a surrogate pair
            if len(drafts) != 1:
                return [made for draft in drafts for made in self._tokenize_each([draft])]
            said = f"{type(error).__name__}: {shorten(' '.join(str(error).split()))}"
            return [BadRow(f"{drafts[0].where}: the tokenizer refuses {_shown(drafts[0].text)}: {said}.")]

    def _tokenize(self, drafts: list[_Draft]) -> list[Tokenized]:
        """Return the tokens of each document, or piece of one."""
        if not self._tokenizer.is_fast:
            return [self._tokenize_by_segment(draft.segments) for draft in drafts]
        texts: dict[bool, list[str]] = {False: [], True: []}  # by whether offsets are needed, which take time
        for draft in drafts:
            texts[draft.needs_offsets].append(draft.text)
        rules = self._tokenizer.backend_tokenizer
        found = {
            False: iter(rules.encode_batch_fast(texts[False], add_special_tokens=False)),
            True: iter(rules.encode_batch(texts[True], add_special_tokens=False)),
        }
        return [_tokens(next(found[draft.needs_offsets]), draft) for draft in drafts]

    def _tokenize_by_segment(self, segments: Segments) -> Tokenized:
        """Without offsets, a token's place is known only if prompt and answer are encoded one after the other."""
        ids: list[int] = []
        mask: list[bool] = []
        for text, trained in segments:
            part = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            ids += part
            mask += [trained] * len(part)
        return Tokenized(np.asarray(ids, np.int64), None if all(mask) else np.asarray(mask, bool))


def _shown(text: str) -> str:
    """Return the name of a text in an error: where it holds half a surrogate pair, that."""
    lone = re.search("[\ud800-\udfff]", text)
    return "the text" if lone is None else f"half a surrogate pair ({lone[0]!a} at character {lone.start():,})"


def frame_of(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids a tokenizer puts before and after every sequence, found by encoding a letter with and without
    them."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a")["input_ids"]
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return special[:start], special[start + len(plain) :]
    return [], []


def _tokens(encoding: Any, draft: _Draft) -> Tokenized:
    return Tokenized(
        np.asarray(encoding.ids, np.int64),
        trained_tokens(encoding.offsets, draft.segments) if draft.masked else None,
        _byte_counts(encoding.offsets, draft.text) if draft.measured else None,
    )


def trained_tokens(offsets: list[tuple[int, int]], segments: Segments) -> np.ndarray:
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
