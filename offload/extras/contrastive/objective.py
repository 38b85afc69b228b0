"""The objective of contrastive learning, and the files by which sentence-transformers loads an export."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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

_MODULES, _POOLING = "modules.json", "1_Pooling/config.json"
_OPTIONS, _PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"
_KINDS = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
"""Modules of an export, with their folders."""
_NAMES = {
    "mean": ("mean", "pooling_mode_mean_tokens"),
    "last": ("lasttoken", "pooling_mode_lasttoken"),
    "cls": ("cls", "pooling_mode_cls_token"),
}
"""Names and flags of sentence-transformers for the poolings. All its versions read the flags."""

_REFUSED: Mapping[tuple[str, str], tuple[Callable[[Any], bool], str]] = {
    (_OPTIONS, "do_lower_case"): (bool, "write the rows in small letters, and set it to false"),
    (_OPTIONS, "modality_config"): (
        lambda value: "message" in (value or {}),
        "to train bare texts, leave its 'message' out, and chat_template.jinja,",
    ),
    (_POOLING, "include_prompt"): (
        lambda value: value is False,
        "set it to true, or leave the prompts out of the rows",
    ),
}
"""By file and option: whether a value changes the vectors of a text, and the remedy. Other options are kept."""


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
    """Return, by name, the files of sentence-transformers in the folder of a model. Raises ConfigError for a module
    that no run trains.
    """
    if folder is None:
        return {}
    names = (name for name in (_MODULES, _OPTIONS, _PROMPTS, _POOLING) if (folder / name).is_file())
    found = {name: json.loads((folder / name).read_text(encoding="utf-8")) for name in names}
    for module in found.get(_MODULES, ()):
        kind = module["type"].rpartition(".")[2]
        if kind not in _KINDS:
            raise ConfigError(
                f"{folder / _MODULES} has the module {kind}, and a run trains {', '.join(_KINDS)} alone, so the export "
                f"would give other vectors: set --model.path to a folder without {kind}, or to a copy without "
                f"{_MODULES}."
            )
    for (name, option), (changes, fix) in _REFUSED.items():
        if changes(found.get(name, {}).get(option)):
            raise ConfigError(
                f"{folder / name} has {option}, by which sentence-transformers gives the model other tokens or vectors "
                f"than a run trains: {fix} in a copy of the folder."
            )
    return found


def _stored_pooling(folder: Path | None) -> str:
    """Return the pooling in the folder of a model; empty: none. Raises ConfigError for one that no run computes."""
    stored = _stored_files(folder).get(_POOLING)
    if folder is None or stored is None:
        return ""
    flags = [key for key, value in stored.items() if key.startswith("pooling_mode_") and value is True]
    mode = stored.get("pooling_mode")  # in place of the flags, since version 5.5
    found = [name for name, (own, flag) in _NAMES.items() if mode == own or (mode is None and flags == [flag])]
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
