"""Batches by step number: what a step trains on is a pure function of the data, the settings and the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.data.groups import Batching, ByLength, Mixed
from offload.data.mixture import Mixture, RowSet, StoppingStrategy, quotas
from offload.data.packing import IGNORE, Layout
from offload.data.pictured import PictureInputs
from offload.data.prepare import Found, Preparation
from offload.data.source_rows import SourceFacts, SourceRows, names_of
from offload.data.sources import Source, SourceFile, both_names, hash_text
from offload.data.storage import Mark
from offload.data.tokenizer import UNKNOWN
from offload.errors import ConfigError, counted, too_few_rows
from offload.files.user_cache import default_cache_dir

if TYPE_CHECKING:
    import torch

    Batch = dict[str, torch.Tensor]

LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(
        ("sources", "eval_sources", "eval_share", "on_bad_row"),
        "Tokens are made of one source at a time: `Found` has it, and the key a hash of the files.",
    ),
    **dict.fromkeys(
        ("tokenizer", "model_path", "is_pretrained"),
        "It says where the tokenizer is from: the key has a hash of the tokenizer.",
    ),
    **dict.fromkeys(
        ("sequence_length", "packing", "isolated", "group_by_length", "stopping_strategy", "batch_size", "seed"),
        "It decides how rows and batches are made of the tokens, in each run anew.",
    ),
    **dict.fromkeys(
        ("cache_dir", "num_workers", "progress", "no_pictures", "no_answers"),
        "It says where and by whom tokens are made, or refuses them.",
    ),
}
"""Arguments of `build_dataset` that are not in the key of kept tokens, each with the reason."""
_EVAL_SEED = 0
"""Eval rows stand in one fixed mixed order, so that the first few batches are a fair sample, equal for all runs."""


@dataclass(frozen=True)
class Dataset:
    """Rows for training and evaluation, and the order they come in.

    Epoch after epoch is shuffled anew, and batches run on across the borders of epochs: batch `step` holds positions
    [step * batch_size, (step + 1) * batch_size) of the endless sequence, so the last batch of an epoch is completed by
    the first rows of the next, and data of fewer rows than a batch repeats within it.
    """

    train: RowSet
    """Of one source, or the mixture of several."""
    eval: RowSet
    """Held out of the training data."""
    tokenizer: Any
    """None of data that is token ids."""
    batch_size: int
    """Rows a step, those of pairs counted one by one."""
    seed: int
    """Of the order."""
    notes: tuple[str, ...] = ()
    """What the user should know: text left out, tokens cut off."""
    sources: tuple[SourceFacts, ...] = ()
    """What is trained on."""
    eval_sources: tuple[SourceFacts, ...] = ()
    """What is evaluated on beside what is held out."""
    named_evals: Mapping[str, RowSet] = field(default_factory=dict)
    """Rows of the eval sources, by their names."""
    source_rows: tuple[SourceRows, ...] = ()
    """The rows of each source that is trained on."""
    pad_id: int = 0
    """The token of padding."""
    batching: Batching = field(default_factory=Mixed)
    """Which rows are a batch."""
    pictures: PictureInputs | None = None
    """What makes tensors of pictures; None of text alone."""
    values: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    """Of each of `row_sets`, what batches have beside tokens, by name: a number for each row, fp32 [rows], which stands
    in the first column of a tensor [rows, sequence_length] of zeros.
    """

    @property
    def sequence_length(self) -> int:
        return self.train.sequence_length

    @property
    def num_train_rows(self) -> int:
        return self.train.num_rows

    @property
    def group(self) -> int:
        """Neighbouring rows that belong together: 2 of a preference."""
        return self.train.group

    @property
    def evals(self) -> dict[str, RowSet]:
        """All that is evaluated on, by name: what is held out has none."""
        held_out: dict[str, RowSet] = {"": self.eval} if self.eval.num_rows else {}
        return {**held_out, **self.named_evals}

    @property
    def num_eval_rows(self) -> int:
        return sum(rows.num_rows for rows in self.evals.values())

    @property
    def one_picture_a_row(self) -> bool:
        """Whether each row to train on or to evaluate has one picture."""
        stores = [each for rows in self.source_rows for each in (rows.tokens.train, rows.tokens.eval)]
        return all(store.pictured is not None and store.pictured.one_each for store in stores)

    @property
    def rows(self) -> str:
        """How many rows there are, and how they are cut, in words."""
        group, rows = self.group, "pairs of rows" if self.group > 1 else "rows"
        return (
            f"{rows}: {self.num_train_rows // group:,} of {counted(self.sequence_length, 'token')} to train on, "
            f"{self.num_eval_rows // group:,} to evaluate; {self.layout}"
        )

    @property
    def layout(self) -> str:
        """How rows are cut, in words."""
        if self.train.packing == "isolated":
            return "packed, each document apart, with positions of its own"
        if self.train.packing:
            return "packed, so that a row may begin and end within a document and its documents see each other"
        if self.group > 1:
            return "a row for the chosen answer, and one for the rejected one"
        return f"a document a row{', those of a batch of about one length' if self.batching.by_length else ''}"

    def num_steps(self, epochs: float) -> int:
        """Return how many batches cover `epochs` passes over the training rows; the last one may run into the next
        pass."""
        return -int(-epochs * self.num_train_rows // self.batch_size)

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Return rank's contiguous share of the batch of `step` (from 0), see `share`.

        `input_ids` and `labels` are int64 [rows, sequence_length], or as wide as the longest row of the whole batch
        needs where batches are made by length; labels are unshifted, with -100 where nothing is trained.
        `attention_mask`, alike, is there only when a row of the whole batch is padded, so that all ranks get the same
        keys; in its place `position_ids` where documents of a row are apart. Rows of documents with pictures have all
        that the processor makes of them beside. Raises ConfigError where there are more ranks than rows, and where a
        picture is not what it was.
        """
        if self.batch_size // self.group < world_size:
            raise ConfigError(too_few_rows(self.batch_size // self.group, world_size))
        return self._read("train", self.rows_of(step), rank, world_size)

    def rows_of(self, step: int) -> np.ndarray:
        """Return which rows to train on are the batch of `step` (from 0), int64 [batch_size]."""
        return self.batching.at(self.train, step, self.batch_size, self.seed)

    def owners(self, rows: np.ndarray) -> np.ndarray:
        """Return of which of `sources` each of these rows to train on is, int64 [n]."""
        return self.train.owners(rows) if isinstance(self.train, Mixture) else np.zeros(len(rows), np.int64)

    def num_tokens(self, step: int) -> int:
        """Return how many tokens the batch of `step` (from 0) has, over all ranks, without padding."""
        return int(self.train.lengths(self.rows_of(step)).sum())

    def eval_batches(
        self,
        batch_size: int,
        max_batches: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        name: str | None = None,
    ) -> Iterator[Batch]:
        """Yield rank's shares of the eval rows of one of `evals` (None: the first), each row once, in an order that no
        seed changes.

        The last batch may be smaller. A rank whose share of it is empty gets a row without targets (labels -100), so
        that all ranks have the same number of batches.
        """
        if batch_size < 1:
            raise ConfigError(f"An eval batch of {batch_size} rows is none; it must have at least 1.")
        name = next(iter(self.evals), "") if name is None else name
        found = self.evals.get(name, self.eval)
        num_batches = -(-found.num_rows // batch_size)
        for index in range(num_batches if max_batches is None else min(num_batches, max_batches)):
            begin = index * batch_size
            rows = found.at(begin, min(batch_size, found.num_rows - begin), _EVAL_SEED)
            yield self._read(f"eval {name}", rows, rank, world_size)

    @property
    def row_sets(self) -> dict[str, RowSet]:
        """All rows, by what `values` calls them: those to train on, and those of `evals`."""
        return {"train": self.train, **{f"eval {name}": rows for name, rows in self.evals.items()}}

    def batch_of(self, name: str, begin: int, end: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Return rank's share of the rows [begin, end) of one of `row_sets`, as they are numbered there."""
        return self._read(name, np.arange(begin, end), rank, world_size)

    def _read(self, name: str, indices: np.ndarray, rank: int, world_size: int) -> Batch:
        """Read rank's share of `indices`, and behind it rows without targets where ranks would have other keys."""
        import torch

        rows = self.row_sets[name]
        part = share(len(indices), rank, world_size, rows.group)
        fillers = _fillers(rows, indices, part)
        own = np.concatenate([indices[part], fillers])
        lengths = rows.lengths(indices)
        width = self.batching.width(lengths, rows.sequence_length)
        ids, labels = (np.ascontiguousarray(each[:, :width]) for each in rows.read(own))
        labels[len(own) - len(fillers) :] = IGNORE
        batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if (positions := rows.positions(own)) is not None:
            batch["position_ids"] = torch.from_numpy(positions)
        elif (lengths < width).any():
            mask = np.arange(width) < rows.lengths(own)[:, None]
            batch["attention_mask"] = torch.from_numpy(mask.astype(np.int64))
        if self.pictures is not None and (documents := rows.pictured(own)) is not None:
            batch |= self.pictures.of(documents, ids)
        for key, values in self.values.get(name, {}).items():
            batch[key] = torch.zeros(ids.shape, dtype=torch.float32)
            batch[key][:, 0] = torch.from_numpy(values[own])
        return batch

    def eval_bytes(self, num_rows: int, name: str) -> int | None:
        """Return how many bytes of text the targets are of in the first rows of one of `evals`, in the order of
        `eval_batches`; None where that is not known: of token ids, and without a fast tokenizer.
        """
        found = self.evals[name]
        return found.num_bytes(found.at(0, num_rows, _EVAL_SEED))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps to recognize this data; plain numbers and strings. The position is the step
        number."""
        settings: dict[str, Any] = {
            "tokens": self.train.identity,
            "sequence_length": self.sequence_length,
            "packing": self.train.packing,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }
        if self.batching.by_length:  # of runs of earlier versions there is nothing to be told
            settings["group_by_length"] = True
        return {**settings, "fingerprint": hash_text(repr(settings))}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigError when `state`, of a `state_dict`, belongs to other batches than these."""
        keys = {"sequence_length": "data", "packing": "data", "group_by_length": "data"}
        keys |= {"batch_size": "train", "seed": "run"}
        own, state = ({"group_by_length": False, **each} for each in (self.state_dict(), state))
        for key, section in keys.items():
            if state.get(key) != own[key]:
                hint = " (isolated: --data.packing_isolated true)" if "isolated" in (own[key], state.get(key)) else ""
                raise ConfigError(
                    f"{section}.{key} is {own[key]} and was {state.get(key)} when the run began{hint}: the batches "
                    "would be others. Set it back, or begin another run.dir."
                )
        if state.get("fingerprint") != own["fingerprint"]:
            raise ConfigError(
                "The training data is not what the run began with: the tokens differ, by the files, their format, the "
                "tokenizer, data.eval_share, data.train_on_prompt or the weights of sources. Restore them, or begin "
                "another run.dir."
            )


def build_dataset(
    *,
    sources: Sequence[Source],
    eval_sources: Sequence[Source] = (),
    tokenizer: str | None = None,
    model_path: str | None = None,
    is_pretrained: bool = False,
    vocab_size: int,
    sequence_length: int,
    packing: bool = True,
    isolated: bool | None = False,
    pairs: bool = False,
    group_by_length: bool = False,
    train_on_prompt: bool = False,
    eval_share: float = 0.0,
    on_bad_row: str = "error",
    stopping_strategy: StoppingStrategy = "all_exhausted",
    batch_size: int,
    seed: int = 0,
    cache_dir: Path | None = None,
    num_workers: int | None = None,
    no_pictures: str = "",
    no_answers: str = "",
    progress: Callable[[str, float], None] | None = None,
) -> Dataset:
    """Prepare the data (once; later calls find it in the cache) and return its batches.

    `tokenizer` is a folder or the name of a model in the local hub cache; None takes the one in `model_path`, and where
    there is none trains one on the data of at most `vocab_size`, the model's, tokens; unless the model `is_pretrained`,
    whose embeddings mean other tokens. `isolated`: whether packed documents are apart; None for those of data with
    conversations. `pairs`: the data are preferences, and a batch has `batch_size` pairs of rows. `group_by_length`:
    whether batches are made of rows of about one length, where a row is a document and has no other beside it.
    `eval_share` of each source is held out; `eval_sources` are evaluated each by its name. `on_bad_row` is error or
    skip, `stopping_strategy` as in `mixture.quotas`. `num_workers`: processes that tokenize, None for as many as pay, 0
    for none but this. `no_pictures`: why rows with pictures cannot be trained on, and what to change; empty where they
    can: each is a row then, whatever `packing` says. `no_answers`: the same of rows that tell a prompt from an answer.
    `progress` is called with (stage, fraction done) while there is
    something to prepare. Raises ConfigError for every setting or file that cannot be used, and for a source of which
    nothing would be trained on.
    """
    asked = {name: value for name, value in locals().items() if name not in LEFT_OUT}
    if sequence_length < 2:
        raise ConfigError(f"data.sequence_length={sequence_length} leaves no token to predict; it must be at least 2.")
    if batch_size < 1:
        raise ConfigError(f"train.batch_size={batch_size} must be at least 1.")
    if not 0 <= eval_share < 1:
        raise ConfigError(
            f"data.eval_share={eval_share} must lie in [0, 1): the share of the data kept for evaluation."
        )
    found = [Found(source, vocab_size, eval_share, on_bad_row) for source in sources]
    held = [Found(source, vocab_size, 0.0, on_bad_row, is_evaluated=True) for source in eval_sources]
    _check_apart(found, held)
    _check_pairs([*found, *held], pairs=pairs)
    pictured = next((each for each in (*found, *held) if each.holds_pictures), None)
    if pictured is not None and no_pictures:
        raise ConfigError(f"{pictured.source.setting} {pictured.source} has pictures, and {no_pictures}")
    answered = next((each for each in (*found, *held) if each.may_mask), None)
    if answered is not None and no_answers and not train_on_prompt:
        formats = ", ".join(sorted(answered.formats))
        raise ConfigError(f"{answered.source.setting} {answered.source} has the format {formats}, and {no_answers}")
    where = cache_dir if cache_dir is not None else default_cache_dir()
    preparation = Preparation([*found, *held], vocab_size, where, progress or (lambda *_: None), num_workers, asked)
    loaded = preparation.tokenizer(tokenizer, model_path, is_pretrained)
    pad_id = next(
        (i for i in (getattr(loaded, "pad_token_id", None), getattr(loaded, "eos_token_id", None)) if i is not None), 0
    )
    names = names_of([each.source for each in (*found, *held)])
    if isolated is None:
        isolated = any(each.holds_chats for each in found)
    layout: Layout = False if pictured else "isolated" if packing and isolated else packing
    told = {}
    for name, each in zip(names, [*found, *held], strict=True):
        tokens = preparation.tokens(each, loaded, train_on_prompt)
        told[name] = SourceRows.of(name, each, tokens, sequence_length, layout, pad_id)
    training, evaluated = list(told.values())[: len(found)], list(told.values())[len(found) :]
    notes = [*preparation.notes, *(note for each in told.values() for note in each.notes(of=len(told) > 1))]
    if getattr(loaded, "unk_token", None) == UNKNOWN:
        notes.append(f"A vocabulary of {vocab_size} has no room for every byte: rare characters are read as {UNKNOWN}.")
    parts = [each.train for each in training]
    group = parts[0].group
    numbers = [part.num_rows // group for part in parts]
    shares = [group * each for each in quotas(numbers, [each.weight for each in sources], stopping_strategy)]
    held_out = [each.eval for each in training]
    return Dataset(
        Mixture.of(parts, shares),
        Mixture.of([rows for rows in held_out if rows.num_rows] or held_out[:1]),
        loaded,
        batch_size * group,
        seed,
        tuple(notes),
        tuple(each.facts(quota, sum(shares)) for each, quota in zip(training, shares, strict=True)),
        tuple(each.facts(None, 0) for each in evaluated),
        {each.name: each.train for each in evaluated},
        tuple(training),
        pad_id,
        ByLength() if group_by_length and layout is False and not pairs else Mixed(),
        None if preparation.processor is None else PictureInputs(preparation.processor),
    )


def _fillers(rows: RowSet, indices: np.ndarray, own: slice) -> np.ndarray:
    """Return which rows of a batch a rank gets beside its `own`, int64 [n]: some where it has none, and one with a
    picture where others have pictures and its own rows have none.
    """
    shows = np.asarray([bool(each.pictures) for each in rows.pictured(indices) or ()], bool)
    if shows.any() and not shows[own].any():
        return indices[shows][:1]
    return indices[:0] if own.stop > own.start else indices[: rows.group]


def _check_apart(found: Sequence[Found], held: Sequence[Found]) -> None:
    """Raise ConfigError where a file is trained on and evaluated on, by any of its names."""
    trained: dict[Mark, tuple[Found, SourceFile]] = {}
    for each in found:
        for file in each.files:
            for mark in file.place.marks:
                other, same = trained.setdefault(mark, (each, file))
                if other.holds_out(same) != each.holds_out(file):
                    raise ConfigError(
                        f"data.sources has {both_names(file, same)} in {other.source} and in {each.source}: of what "
                        f"data.eval_share={each.eval_share} holds out in one, the other would train on a part. Name "
                        "the file in one source (weight says how often), or set --data.eval_share 0."
                    )
    for each in held:
        for file in each.files:
            for other, same in (trained[mark] for mark in file.place.marks if mark in trained):
                raise ConfigError(
                    f"data.eval_source {each.source} has {both_names(file, same)}, which is trained on too "
                    f"(data.source {other.source}): its loss would say nothing. Name other files, or hold out a part "
                    "of the training data by --data.eval_share."
                )


def _check_pairs(found: Sequence[Found], *, pairs: bool) -> None:
    """Raise ConfigError where a source is not of preferences, or is, as it should not be."""
    other = next((each for each in found if (each.formats == {"preference"}) != pairs), None)
    if other is not None:
        formats, asked = ", ".join(sorted(other.formats)), "is not sft" if pairs else "is sft"
        fix = "name rows of prompt, chosen, rejected" if pairs else "set --train.method dpo, orpo or reward"
        raise ConfigError(
            f"{other.source.setting} {other.source} has the format {formats}, and train.method {asked}: {fix}."
        )


def share(num_rows: int, rank: int, world_size: int, group: int = 1) -> slice:
    """Return which of `num_rows` rows are rank's: shares are contiguous and differ by one group of rows at most."""
    number = num_rows // group
    return slice(number * rank // world_size * group, number * (rank + 1) // world_size * group)
