"""Rows from files as the task of a run. Slow imports are in functions: names are checked before them.

Rows passed from Python are stored as a JSON lines file. The reader then treats them like any other file: in pieces,
repeatedly, with line numbers in errors, and a resumed run recognizes the content by hash.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from offload.app.config.config import Config
from offload.app.config.sections import ROW_FORMATS, DataSection
from offload.errors import ConfigError
from offload.extras.data.cache import unusable
from offload.extras.data.sources import Source, check_exists
from offload.user_cache import default_cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from offload.app.hf.models import ModelKind
    from offload.extras.data.dataset import Dataset

_NO_ANSWERS = (
    "an encoder-decoder reads the first half of a row in its encoder and writes the second half in its decoder, and "
    "this cut ignores the border between prompt and answer. Train on your own batches, with the prompt as input_ids "
    "and the answer as labels, by offload.Engine or OffloadTrainer, or set --data.train_on_prompt true to train on "
    "rows as plain text."
)
_STORED = "the log-probabilities of the reference are measured here, not read from rows: leave this column out."
# By method: columns that TRL's losses read beside the answers.
_UNHEARD = {
    "reward": {"margin": "no margin is subtracted by train.method reward, as it is by TRL: leave this column out."},
    "dpo": dict.fromkeys(("ref_chosen_logps", "ref_rejected_logps"), _STORED),
}


def write_rows(rows: Any, name: str) -> str:
    """Write rows as JSON lines into the cache, in a folder named by their hash.

    Return the path. A path is returned unchanged. A row is a text, or a mapping as in `formats`; values may be arrays
    and tensors. `rows`: an iterable, or a data set with length and index access; read once. `name`: argument name, for
    errors. Raises ConfigError.
    """
    if isinstance(rows, str | Path):
        return str(rows)
    folder = default_cache_dir() / "given"
    temporary = folder / f".{secrets.token_hex(8)}"  # the final name, the hash, is known at the end
    digest = xxhash.xxh3_128()
    number = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as stream:
            for number, row in enumerate(_rows(rows, name), start=1):
                line = _line(row, f"row {number - 1} of {name}")
                digest.update(line)
                stream.write(line)
        if not number:
            raise ConfigError(f"{name} has no rows; give at least one.")
        path = folder / digest.hexdigest() / f"{name}.jsonl"  # evaluations show this file name
        path.parent.mkdir(exist_ok=True)
        temporary.replace(path)
    except OSError as error:
        raise unusable(folder, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return str(path)


def _rows(rows: Any, name: str) -> Iterable[Any]:
    if isinstance(rows, Mapping):
        raise ConfigError(f"{name} is a mapping of {', '.join(map(str, rows))}: give the rows of one of them.")
    if type(rows).__module__.partition(".")[0] == "datasets":
        return _rows_of_data_set(rows)
    if isinstance(rows, Iterable):
        return rows
    if hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):
        return (rows[index] for index in range(len(rows)))
    raise ConfigError(f"{name} is a {type(rows).__name__}; it should be a path, a list of rows, or a data set.")


def _rows_of_data_set(rows: Any) -> Iterator[Any]:
    """Yield the rows as the same data set in a file has them: a null counts as an absent key."""
    from offload.extras.data.rows import json_columns, without_nulls

    schema = getattr(getattr(rows, "features", None), "arrow_schema", None)  # none for one column, and for some streams
    in_json = None
    if schema is not None:
        in_json = json_columns(schema)
    return (without_nulls(row, in_json) for row in rows)


def _line(row: Any, where: str) -> bytes:
    if isinstance(row, str):
        row = {"text": row}
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} is a {type(row).__name__}; it should be a text, or a mapping with a format's keys.")
    try:
        # NaN is no JSON: other readers of the file would refuse it.
        return json.dumps(dict(row), default=_as_list, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} cannot be written as JSON: {error}.") from None


def _as_list(value: Any) -> Any:
    """Convert arrays and tensors to lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}")


class FileRows:
    """Kind of tasks: rows from files, see `TaskKind`."""

    store = staticmethod(write_rows)

    @staticmethod
    def check_names(config: Config) -> None:
        """Raise ConfigError if a source does not exist."""
        for setting in ("source", "sources", "eval_source"):
            for each in getattr(config.data, setting):
                path = each
                if not isinstance(each, str):
                    path = each["path"]
                check_exists(path, f"data.{setting}")

    @staticmethod
    def trains_tokenizer(config: Config) -> bool:
        """Return whether the tokenizer is trained from the data, because neither configuration nor model has one."""
        return config.data.tokenizer is None and _model_tokenizer(config) is None

    @staticmethod
    def grow_vocabulary(config: Config, architecture: PreTrainedConfig) -> bool:
        """Grow the vocabulary for tokens added to the tokenizer. Return whether any embedding row was missing.

        Applies to pretrained models only. Raises ConfigError.
        """
        if config.model.init != "pretrained" or FileRows.trains_tokenizer(config):
            return False
        from offload.app.hf.models import vocab_size
        from offload.extras.data.tokenizer import grown_vocabulary, preload_tokenizer

        num_rows = vocab_size(architecture)
        path = config.data.tokenizer or _model_tokenizer(config)
        is_given = config.data.tokenizer is not None
        # The tokenizer loaded here is kept for the data: a large one takes seconds.
        needed = num_rows
        if path is not None:
            needed = grown_vocabulary(preload_tokenizer(path), num_rows, is_given)
        architecture.get_text_config().vocab_size = needed
        return needed > num_rows

    @staticmethod
    def build(
        config: Config,
        model_kind: ModelKind,
        vocabulary: int,
        progress: Callable[[str, float], None],
        rope_limit: int | None = None,
    ) -> Dataset:
        """Return the dataset for a resolved configuration, model kind and vocabulary. Raises ConfigError."""
        from offload.extras.data.dataset import build_dataset
        from offload.extras.data.settings import DataSettings

        data, grouped = config.data, ROW_FORMATS.get(config.train.method, "")
        if grouped:
            data = data.model_copy(update={"format": grouped})
        # A tokenizer trained for a masked model leaves the last embedding row for the mask token.
        if model_kind.name == "masked" and FileRows.trains_tokenizer(config):
            vocabulary -= 1
        no_answers = ""
        if model_kind.name == "seq2seq":
            no_answers = _NO_ANSWERS
        settings = DataSettings(
            sources=_sources(data, data.sources, "data.sources")
            or [Source(data.source, data.format, columns=data.columns, setting="data.source")],
            eval_sources=_sources(data, data.eval_source, "data.eval_source"),
            tokenizer=data.tokenizer,
            model_path=_model_folder(config),
            is_pretrained=config.model.init == "pretrained",
            vocab_size=vocabulary,
            sequence_length=int(data.sequence_length or 0),
            packing=data.packing,
            isolated=_isolated(data, model_kind),
            group_by_length=_grouped(config),
            grouped=grouped,
            group=config.group,
            train_on_prompt=data.train_on_prompt and not grouped,
            eval_share=float(data.eval_share or 0),
            on_bad_row=data.on_bad_row,
            stopping_strategy=data.stopping_strategy,
            rope_limit=rope_limit,
            batch_size=config.train.batch_size,
            seed=config.run.seed,
            num_workers=data.num_workers,
            no_pictures=_no_pictures(config, model_kind),
            no_answers=no_answers,
            unheard=_UNHEARD.get(config.train.method, {}),
        )
        dataset = build_dataset(settings, progress)
        if dataset.has_pictures and not dataset.has_one_picture_per_row:
            _check_uncut(config)
        return dataset


def _check_uncut(config: Config) -> None:
    """Raise ConfigError if batches are cut: the pictures of a part could not be told from the others."""
    train = config.train
    cut_by, number = "train.micro_batch_size", train.micro_batch_size
    if number is None:
        cut_by, number = "train.passes", train.passes
    # One pass over a batch is no cut. A micro-batch may be one.
    if cut_by == "train.passes" and number == 1:
        return
    raise ConfigError(
        f"{cut_by} is {number}, but some rows have no picture or several, and a batch with pictures can only be cut if "
        "each row has one: set --train.micro_batch_size none and --train.passes 1; if memory is short, lower "
        "--train.batch_size."
    )


def _model_folder(config: Config) -> str | None:
    """Return the folder or file of the model. None: no folder."""
    from offload.app.hf.models import locate, without_weights

    folder = locate(without_weights(config.model))
    if folder is None:
        return None
    return str(folder)


def _model_tokenizer(config: Config) -> str | None:
    """Return the folder or hub name of the model's tokenizer. None: the model has none."""
    from offload.extras.data.tokenizer import tokenizer_folder

    return tokenizer_folder(_model_folder(config))


def _no_pictures(config: Config, model_kind: ModelKind) -> str:
    """Return the reason against training on rows with pictures, with a fix. Empty: allowed."""
    if model_kind.name != "causal":
        return f"the model is a {model_kind.name} one, but only causal language models are trained on pictures."
    for key in ("packing", "packing_isolated"):
        if getattr(config.data, key) is True and config.origin(f"data.{key}") not in ("default", "resolved"):
            return f"data.{key} is true, but rows with pictures are not packed. Leave data.{key} out."
    return ""


def _isolated(data: DataSection, model_kind: ModelKind) -> bool | None:
    """Return whether packed documents are isolated. None: only conversations. Raises ConfigError."""
    if model_kind.name == "causal" and (model_kind.auto is not None or data.packing_isolated is True):
        # The data decide: a model of texts alone sees all of a row.
        if data.packing_isolated == "auto":
            return None
        return data.packing_isolated
    if data.packing_isolated is True:
        raise ConfigError(
            f"data.packing_isolated is true, but the model is a {model_kind.name} one, and only causal language models "
            "can keep the documents of a row apart. Set --data.packing false for one document in each row."
        )
    return False


def _grouped(config: Config) -> bool:
    """Return whether unpacked rows are batched by length."""
    by_length = config.data.group_by_length
    if by_length != "auto":
        return by_length
    # Compiled blocks make a graph for each width of a batch.
    return config.train.compile != "always"


def _sources(data: DataSection, sources: Iterable[Mapping[str, Any]], setting: str) -> list[Source]:
    """Return sources for the data package, with defaults from `data`."""
    defaults = {"type": data.format, "columns": data.columns}
    filled = [{**defaults, **source} for source in sources]
    return [Source((source.pop("path"),), source.pop("type"), **source, setting=setting) for source in filled]
