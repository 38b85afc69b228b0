"""Build data and engine from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

from offload.accelerators import own_accelerator
from offload.config.config import Config
from offload.config.sections import DataSection
from offload.data.dataset import Dataset, build_dataset
from offload.data.sources import Source
from offload.data.tokenizer import grown_vocabulary, preload_tokenizer, tokenizer_folder
from offload.distributed.comm import Comm
from offload.engine.engine import Engine
from offload.errors import ConfigError, counted, ratio
from offload.hf.models import ModelKind, locate, vocab_size
from offload.optim.lr import learning_rate, restart_factor
from offload.planning.from_config import make_settings
from offload.training.objectives import Objective


def build_engine(config: Config, built: Any, comm: Comm) -> Engine:
    """Return an engine over a built model. Collective. Raises ConfigError and DoesNotFitError."""
    return Engine(built.model, settings=make_settings(config), fill=built.fill, quantized=built.quantized, comm=comm)


def with_decisions(config: Config, engine: Engine) -> Config:
    """Return the configuration with the engine's decisions from the first step, so the run can be repeated."""
    chunks, update = engine.head_chunk_bytes, engine.updates_on
    resolved = config.with_resolved(train__clip=engine.clip, train__head_chunk_bytes=chunks, offload__update=update)
    if config.offload.prefetch != "auto":
        return resolved
    has_budget = config.offload.device_memory is not None or own_accelerator(config.offload.device) is not None
    if engine.overlaps and has_budget:  # a fixed number would be the maximum
        return resolved.with_note("offload.prefetch", f"at least {engine.prefetch} ahead, more where there is room")
    return resolved.with_resolved(offload__prefetch=engine.prefetch)


def build_data(
    config: Config, model_kind: ModelKind, vocabulary: int, progress: Callable[[str, float], None]
) -> Dataset:
    """Return the dataset for a resolved configuration, model kind and vocabulary. Raises ConfigError."""
    data, has_pairs = config.data, config.train.group > 1
    if has_pairs:
        data = data.model_copy(update={"format": "preference"})
    folder = locate(config.model)
    # A tokenizer trained for a masked model leaves the last embedding row for the mask token.
    spare = 1 if model_kind.name == "masked" and trains_tokenizer(config) else 0
    dataset = build_dataset(
        sources=_sources(data, data.sources, "data.sources")
        or [Source(data.source, data.format, columns=data.columns, setting="data.source")],
        eval_sources=_sources(data, data.eval_source, "data.eval_source"),
        tokenizer=data.tokenizer,
        model_path=None if folder is None else str(folder),
        is_pretrained=config.model.init == "pretrained",
        vocab_size=vocabulary - spare,
        sequence_length=int(data.sequence_length or 0),
        packing=data.packing,
        isolated=_isolated(data, model_kind),
        group_by_length=_grouped(config),
        pairs=has_pairs,
        train_on_prompt=data.train_on_prompt and not has_pairs,
        eval_share=float(data.eval_share or 0),
        on_bad_row=data.on_bad_row,
        stopping_strategy=data.stopping_strategy,
        batch_size=config.train.batch_size,
        seed=config.run.seed,
        num_workers=data.num_workers,
        no_pictures=_no_pictures(config, model_kind),
        no_answers=_NO_ANSWERS if model_kind.name == "seq2seq" else "",
        progress=progress,
    )
    if (
        dataset.pictures is not None
        and config.train.micro_batch_size is not None
        and not dataset.has_one_picture_per_row
    ):
        raise ConfigError(
            f"train.micro_batch_size is {config.train.micro_batch_size}, but some rows have no picture or several, and "
            "a batch with pictures can only be cut if each row has one: leave train.micro_batch_size out; if memory is "
            "short, lower --train.batch_size."
        )
    return dataset


_LEAST_EPOCHS, _MOST_EPOCHS = 0.5, 20.0
"""Passes over the data outside these limits get a note."""
_NO_ANSWERS = (
    "an encoder-decoder reads the first half of a row in its encoder and writes the second half in its decoder, and "
    "this cut ignores the border between prompt and answer. Train on your own batches, with the prompt as input_ids "
    "and the answer as labels, by offload.Engine or OffloadTrainer, or set --data.train_on_prompt true to train on "
    "rows as plain text."
)


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
        return None if data.packing_isolated == "auto" else data.packing_isolated
    if data.packing_isolated is True:
        raise ConfigError(
            f"data.packing_isolated is true, but the model is a {model_kind.name} one, and only causal language models "
            "can keep the documents of a row apart. Set --data.packing false for one document in each row."
        )
    return False


def _grouped(config: Config) -> bool:
    """Return whether unpacked rows are batched by length. Raises ConfigError."""
    data = config.data
    if data.group_by_length is True and data.packing:
        raise ConfigError(
            "data.group_by_length is true, but packed rows all have the same length: set --data.packing false for one "
            "document in each row, or leave data.group_by_length out."
        )
    return config.train.compile == "never" if data.group_by_length == "auto" else data.group_by_length


def _sources(data: DataSection, sources: Iterable[Mapping[str, Any]], setting: str) -> list[Source]:
    """Return sources for the data package, with defaults from `data`."""
    defaults = {"type": data.format, "columns": data.columns}
    filled = [{**defaults, **source} for source in sources]
    return [Source((source.pop("path"),), source.pop("type"), **source, setting=setting) for source in filled]


def grow_vocabulary(config: Config, architecture: PreTrainedConfig) -> bool:
    """Grow the vocabulary for tokens added to the tokenizer. Return whether any embedding row was missing.

    Applies to pretrained models only. Raises ConfigError.
    """
    if config.model.init != "pretrained" or trains_tokenizer(config):
        return False
    folder, num_rows = locate(config.model), vocab_size(architecture)
    path = config.data.tokenizer or tokenizer_folder(None if folder is None else str(folder))
    is_given = config.data.tokenizer is not None
    needed = num_rows if path is None else grown_vocabulary(preload_tokenizer(path), num_rows, is_given)
    architecture.get_text_config().vocab_size = needed
    return needed > num_rows


def trains_tokenizer(config: Config) -> bool:
    """Return whether the tokenizer is trained from the data, because neither configuration nor model has one."""
    folder = locate(config.model)
    return config.data.tokenizer is None and tokenizer_folder(None if folder is None else str(folder)) is None


def stages(say: Callable[[str], None], alive: Callable[[], object]) -> Callable[[str, float], None]:
    """Return a progress callback: prints each stage once, and calls `alive` on every update."""
    seen: set[str] = set()

    def progress(stage: str, _fraction: float) -> None:
        alive()
        if stage not in seen:
            seen.add(stage)
            say(f"data: {stage} ...")

    return progress


def describe_data(data: Dataset, objective: Objective) -> Iterator[str]:
    """Yield the data description of a run: notes, sources, rows."""
    yield from (f"note: {text}" for text in data.notes)
    for word, each in [*(("data", one) for one in data.sources), *(("eval", one) for one in data.eval_sources)]:
        done = "trained on" if word == "data" else "evaluated on"
        share = f"{100 * objective.share(each.target_share):.3g}% of them {done}"
        yield f"{word}: {', '.join([each.contents, share, *each.more])}"
    yield f"{data.rows_description}; objective: {objective.name}"


def describe_length(config: Config, data: Dataset) -> Iterator[str]:
    """Yield the steps of a run and the passes over the data, with a note if these are unusually many or few."""
    steps = config.train.steps
    if steps is None:
        return
    epochs = steps * data.batch_size / data.num_train_rows
    rows = counted(data.batch_size // data.train.group, "row" if data.train.group == 1 else "pair")
    passes = counted(1, "epoch") if epochs == 1 else f"{ratio(epochs)} epochs"
    yield f"steps: {steps:,} of {rows}: {passes}"
    if config.has_own_data and not _LEAST_EPOCHS <= epochs <= _MOST_EPOCHS:
        reason = "most rows are left out" if epochs < 1 else "each row comes as many times"
        yield f"note: the run makes {passes}: {reason}. --train.epochs sets the number of passes."


def rate_at(step: int, config: Config) -> float:
    """Return the learning rate for a step, counted from 0."""
    optimizer, lora = config.optimizer, config.lora
    factor = restart_factor(step, every=lora.restart_every, warmup_steps=lora.restart_warmup_steps)
    return factor * learning_rate(
        step,
        base=float(optimizer.lr or 0.0),
        schedule=optimizer.schedule,
        warmup_steps=optimizer.warmup_steps or 0,
        num_steps=config.train.steps,
    )
