"""The objective of contrastive learning, and the files by which sentence-transformers loads an export."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.app.config.config import Config
from offload.app.hf.models import BuiltModel, embedding_width, locate, without_weights
from offload.app.training.objectives import Batch, Objective, Say
from offload.distributed.comm import Comm
from offload.engine.engine import Engine
from offload.engine.loss.batch import IGNORED
from offload.engine.loss.group_loss import has_target
from offload.errors import ConfigError
from offload.extras.contrastive.losses import InfoNCE
from offload.extras.data.tokenizer import SENTENCE_OPTIONS

_MODULES, _POOLING = "modules.json", "1_Pooling/config.json"
_OPTIONS, _PROMPTS = SENTENCE_OPTIONS[0], "config_sentence_transformers.json"
_TYPE = "SentenceTransformer"
_KINDS = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
"""Modules of an export, with their folders."""
_NAMES = {
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "last": ("lasttoken", "pooling_mode_lasttoken"),
    "cls": ("cls", "pooling_mode_cls_token"),
}
"""Names and flags of sentence-transformers for the poolings. All its versions read the flags."""

_AS_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}
_IS_KEPT: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("max_seq_length", "do_lower_case", "unpad_inputs"), lambda _: True),
    "transformer_task": lambda value: value == "feature-extraction",
    "module_output_name": lambda value: value == "token_embeddings",
    "modality_config": lambda value: "message" not in value and value.get("text") == _AS_TEXT,
    "processing_kwargs": lambda value: not (value.get("text") or value.get("common")),
    **dict.fromkeys(
        [f"{part}_{end}" for part in ("model", "tokenizer", "processor", "config") for end in ("args", "kwargs")],
        lambda value: value.keys() <= {"attn_implementation", "trust_remote_code"},
    ),
}
"""By option in `_OPTIONS`: whether a value leaves the vectors of a text. Of other options, only those without value."""
_FIXES = {
    "modality_config": "to train bare texts, leave its 'message' out, and chat_template.jinja,",
    "include_prompt": "set it to true",
    "default_prompt_name": "write the prompts into the rows, and set it to null",
}
"""By option: the remedy. Of others: to leave them out."""


class Contrastive(Objective):
    """Objective over queries with answers: embeddings whose nearest text is the answer."""

    name = "the answer to each query, among all of the batch"
    count_unit = "queries"
    loss: InfoNCE

    @classmethod
    def decide(cls, config: Config, is_decoder: bool) -> Mapping[str, Any]:
        """Decide the pooling: that in the folder of the model, by sentence-transformers, or by the model."""
        if config.contrastive.pooling != "auto":
            return {}
        pooling = "mean"
        if is_decoder:  # only its last token has seen all others
            pooling = "last"
        return {"contrastive__pooling": _stored_pooling(locate(without_weights(config.model))) or pooling}

    @classmethod
    def of(cls, config: Config, model_kind: str, tokenizer: Any, vocab_size: int) -> Contrastive:  # noqa: ARG003
        return cls()

    @classmethod
    def loss_over(
        cls, config: Config, _model: nn.Module, _companions: Mapping[str, BuiltModel], _vocab_size: int, /
    ) -> InfoNCE:
        return InfoNCE(**dict(config.contrastive))

    def prepare(
        self,
        config: Config,
        engine: Engine,
        data: Any,
        comm: Comm,  # noqa: ARG002
        folders: Sequence[Path],  # noqa: ARG002
        say: Say,  # noqa: ARG002
    ) -> tuple[Any, Mapping[str, bytes]]:
        """Check the sizes of embeddings. Raises ConfigError."""
        width, largest = embedding_width(engine.model.config), max(config.contrastive.sizes, default=0)
        if largest > width:
            raise ConfigError(
                f"contrastive.sizes has {largest}, but the embeddings of the model have {width} numbers: leave out "
                "larger sizes."
            )
        return data, {}

    def count(self, batch: Batch) -> int:
        """Return the queries in a batch."""
        return int(has_target(batch["labels"], shifts=self.loss.shifts).sum()) // self.loss.group

    def tokens_and_targets(self, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002
        """An embedding is of all tokens of a text."""
        return batch["input_ids"], batch["labels"] != IGNORED

    def export_files(self, config: Config, built: BuiltModel) -> Mapping[str, bytes]:
        stored, num_tokens = _stored_files(built.folder), int(config.data.sequence_length or 0)
        return sentence_files(config.contrastive.pooling, embedding_width(built.model.config), num_tokens, stored)


def _stored_files(folder: Path | None) -> dict[str, Any]:
    """Return, by name, the files of sentence-transformers in the folder of a model. Raises ConfigError for modules and
    options under which the export would give other vectors than the trained ones.
    """
    if folder is None:
        return {}
    found: dict[str, Any] = {}
    for names in ((_MODULES,), SENTENCE_OPTIONS, (_PROMPTS,)):
        if path := next((folder / name for name in names if (folder / name).is_file()), None):
            found[names[0]] = json.loads(path.read_text(encoding="utf-8"))
    pooling = folder / _check_modules(folder, found.get(_MODULES)) / "config.json"
    if pooling.is_file():
        found[_POOLING] = json.loads(pooling.read_text(encoding="utf-8"))
    for name, option, value in _unfit_options(found):
        raise ConfigError(
            f"{folder / name} has {option} {value!r:.60}, by which sentence-transformers gives a text other tokens or "
            f"vectors than a run trains: {_FIXES.get(option, 'leave it out')} in a copy of the folder."
        )
    return found


def _check_modules(folder: Path, modules: Sequence[Mapping[str, str]] | None) -> str:
    """Return the folder of the pooling in the folder of a model. Raises ConfigError for modules that no run trains."""
    if modules is None:
        return _KINDS["Pooling"]
    given = [(*module["type"].rpartition("."), module["path"]) for module in modules]
    # A class of another package may have the same name.
    kinds = [kind for package, _, kind, _ in given if package.startswith("sentence_transformers.")]
    if len(kinds) < 2 or kinds != [*_KINDS][: len(given)] or given[0][-1]:
        raise ConfigError(
            f"{folder / _MODULES} has {', '.join(f'{kind} in {path!r}' for *_, kind, path in given)}, and a run trains "
            f"{', '.join(_KINDS)} in this order, the first in '', so the export would give other vectors: set "
            f"--model.path to a folder with these alone, or to a copy without {_MODULES}."
        )
    return given[1][-1]


def _unfit_options(stored: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (file, option, value) of each option that changes the vectors of a text."""
    for option, value in stored.get(_OPTIONS, {}).items():
        if value is not None and not _IS_KEPT.get(option, operator.not_)(value):
            yield _OPTIONS, option, value
    if stored.get(_POOLING, {}).get("include_prompt") is False:
        yield _POOLING, "include_prompt", False
    prompts = stored.get(_PROMPTS, {})
    if prompts.get("prompts", {}).get(name := prompts.get("default_prompt_name")):
        yield _PROMPTS, "default_prompt_name", name
    if (kind := prompts.get("model_type", _TYPE)) != _TYPE:
        yield _PROMPTS, "model_type", kind


def _stored_pooling(folder: Path | None) -> str:
    """Return the pooling in the folder of a model; empty: none. Raises ConfigError for one that no run computes."""
    stored = _stored_files(folder).get(_POOLING)
    if folder is None or stored is None:
        return ""
    flags = [key for key, value in stored.items() if key.startswith("pooling_mode_") and value is True]
    mode = stored.get("pooling_mode")  # in place of the flags, since version 5.5
    if mode is None and not flags:
        mode = "mean"
    found = [name for name, (own, flag) in _NAMES.items() if mode in (own, [own]) or (mode is None and flags == [flag])]
    if not found:
        raise ConfigError(
            f"{folder / _POOLING} has the pooling {mode or flags}, and a run computes mean, last or cls: set "
            "--contrastive.pooling to one of them."
        )
    return found[0]


def sentence_files(pooling: str, width: int, num_tokens: int, stored: Mapping[str, Any]) -> dict[str, bytes]:
    """Return, by name, the files beside a model by which sentence-transformers makes unit vectors of texts.

    width: numbers of an embedding. num_tokens: longest text. stored: the files of the base, whose prompts and options
    stay.
    """
    contents: dict[str, Any] = {
        _MODULES: [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (kind, path) in enumerate(_KINDS.items())
        ],
        _OPTIONS: {"do_lower_case": False, **stored.get(_OPTIONS, {}), "max_seq_length": num_tokens},
        _PROMPTS: {
            "prompts": {},
            "default_prompt_name": None,
            **stored.get(_PROMPTS, {}),
            "similarity_fn_name": "cosine",
        },
        _POOLING: {
            "word_embedding_dimension": width,
            **{flag: name == pooling for name, (_, flag) in _NAMES.items()},
        },
    }
    return {name: f"{json.dumps(content, indent=2)}\n".encode() for name, content in contents.items()}
