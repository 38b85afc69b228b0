"""Each option in a sentence-transformers folder: honoured, kept, or refused, beside the library itself.

A run's vectors are those of its own tokens, pooling and unit length. What a run takes must give the same vectors in
sentence-transformers, from the export. What a run refuses must give others there, or an error.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, BertConfig, BertModel

from offload.errors import ConfigError
from offload.extras.contrastive.losses import POOLINGS
from offload.extras.contrastive.objective import _stored_files, _stored_pooling, sentence_files
from offload.extras.data.dataset import build_dataset
from offload.extras.data.settings import DataSettings
from offload.extras.data.sources import Source
from offload.extras.data.tokenizer import as_files
from tests.integrations.plain import letters, needs
from tests.matrix import quick
from tests.run_folder import write_rows

MODULES, OPTIONS = "modules.json", "sentence_bert_config.json"
POOLING, PROMPTS = "1_Pooling/config.json", "config_sentence_transformers.json"
TEXTS = ["the Sea, and Snow", " a Long text with more than thirty tokens in it "]
LENGTH, WIDTH = 32, 16
TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
SIZES: dict[str, tuple[Any, ...]] = {"Dense": (WIDTH, WIDTH), "LayerNorm": (WIDTH,), "Dropout": (0.5,)}
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that sentence-transformers wrote."""
    needs("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    folder = tmp_path_factory.mktemp("sentences")
    tokenizer = letters()
    ends = [("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A <eos>", special_tokens=ends)
    tokenizer.save_pretrained(folder / "plain")
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=128, initializer_range=0.5, **sizes)
    BertModel(config).save_pretrained(folder / "plain")
    transformer = Transformer(str(folder / "plain"))
    transformer.max_seq_length = LENGTH
    modules = [transformer, Pooling(WIDTH, "mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(folder / "base"))
    return folder / "base"


def own_vectors(folder: Path, texts: list[str]) -> tuple[torch.Tensor, dict[str, bytes]]:
    """Return the vectors that a run trains, and its exported files beside the weights."""
    pooling = _stored_pooling(folder)
    path = write_rows(folder.parent / "rows.jsonl", [{"query": texts[0], "positive": texts[1]}])
    data = build_dataset(
        DataSettings(
            sources=[Source((str(path),), "contrastive")],
            model_path=str(folder),
            vocab_size=64,
            cache_dir=folder.parent,
            sequence_length=LENGTH,
            packing=False,
            grouped="contrastive",
            group=2,
            batch_size=1,
        )
    )
    batch = data.batch(0)
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder)(batch["input_ids"], batch["attention_mask"])["last_hidden_state"]
    vectors = torch.nn.functional.normalize(POOLINGS[pooling](states, batch["attention_mask"]), dim=1)
    return vectors, as_files(data.tokenizer) | sentence_files(pooling, WIDTH, LENGTH, _stored_files(folder))


def made_by(folder: Path, texts: list[str] = TEXTS) -> list[torch.Tensor]:
    """Return the library vectors, as texts, as queries and as documents."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    ways = model.encode, model.encode_query, model.encode_document
    # Padding on the left moves BERT token positions.
    return [each(texts, batch_size=1, convert_to_tensor=True).float() for each in ways]


def put(name: str, **options: Any) -> Change:
    """Return a function that sets options in a folder file. None removes one."""

    def change(folder: Path) -> None:
        path = folder / name
        given = json.loads(path.read_text()) if path.is_file() else {}
        kept = {key: value for key, value in (given | options).items() if value is not None}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(kept))

    return change


def modules(*given: str) -> Change:
    """Return a function that writes modules, each as `path kind`."""
    parts = [each.split(" ") for each in given]
    own = "sentence_transformers.models."
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": kind if "." in kind else own + kind}
        for number, (path, kind) in enumerate(parts)
    ]

    def change(folder: Path) -> None:
        (folder / MODULES).write_text(json.dumps(entries))
        for path, kind in parts:
            (folder / path).mkdir(exist_ok=True)
            if kind in SIZES:
                from sentence_transformers.sentence_transformer import modules as kinds

                getattr(kinds, kind)(*SIZES[kind]).save(str(folder / path))

    return change


def renamed(old: str, new: str) -> Change:
    return lambda folder: (folder / old).rename(folder / new) and None


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def with_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}on {{ m.content }}{% endfor %}")


def flags(*names: str) -> Change:
    given = {f"pooling_mode_{name}": True for name in names} or {"pooling_mode_mean_tokens": False}
    return put(POOLING, pooling_mode=None, **given)


TAKEN: dict[str, Change] = {
    "nothing": lambda _: None,
    "max_seq_length": put(OPTIONS, max_seq_length=8),
    "do_lower_case": put(OPTIONS, do_lower_case=True),
    "do_lower_case by an older name": both(
        put(OPTIONS, do_lower_case=True), renamed(OPTIONS, "sentence_xlm-roberta_config.json")
    ),
    "modality_config of texts": both(put(OPTIONS, modality_config=TEXT), with_template),
    "no modality_config": both(put(OPTIONS, modality_config=None, module_output_name=None), with_template),
    "processing_kwargs of chats": put(OPTIONS, processing_kwargs={"chat_template": {"add_generation_prompt": True}}),
    "unpad_inputs": put(OPTIONS, unpad_inputs=False),
    "attn_implementation": put(OPTIONS, model_kwargs={"attn_implementation": "eager"}),
    "cls": put(POOLING, pooling_mode="cls"),
    "lasttoken": put(POOLING, pooling_mode="lasttoken"),
    "one mode in a list": put(POOLING, pooling_mode=["cls"]),
    "flag of cls": flags("cls_token"),
    "flag of lasttoken": flags("lasttoken"),
    "flag of mean": flags("mean_tokens"),
    "no flag": flags(),
    "include_prompt": put(POOLING, include_prompt=True),
    "prompts": put(PROMPTS, prompts={"query": "find ", "document": ""}),
    "an empty default prompt": put(PROMPTS, prompts={"query": ""}, default_prompt_name="query"),
    "similarity_fn_name": put(PROMPTS, similarity_fn_name="dot"),
    "of another folder": both(
        modules(" Transformer", "of_vectors Pooling", "2_Normalize Normalize"),
        put("of_vectors/config.json", embedding_dimension=WIDTH, pooling_mode="cls"),
    ),
    "no Normalize": modules(" Transformer", "1_Pooling Pooling"),
    "padding_side": put("tokenizer_config.json", padding_side="left"),
    "model_max_length": put("tokenizer_config.json", model_max_length=8),
    "split_special_tokens": put("tokenizer_config.json", split_special_tokens=True),
}
"""By option: a folder change."""
REFUSED: dict[str, tuple[Change, str]] = {
    "transformer_task": (put(OPTIONS, transformer_task="fill-mask"), "transformer_task 'fill-mask'"),
    "message": (
        both(put(OPTIONS, modality_config=TEXT | {"message": TEXT["text"] | {"format": "flat"}}), with_template),
        "modality_config .* leave its 'message' out",
    ),
    "output of a modality": (
        put(OPTIONS, modality_config={"text": {"method": "forward", "method_output_name": "pooler_output"}}),
        "modality_config",
    ),
    "module_output_name": (put(OPTIONS, module_output_name="sentence_embedding"), "module_output_name"),
    "processing_kwargs": (put(OPTIONS, processing_kwargs={"text": {"max_length": 8}}), "processing_kwargs"),
    "query_length": (put(OPTIONS, query_length=8), "query_length 8"),
    "document_length": (put(OPTIONS, document_length=8), "document_length 8"),
    "query_expansion": (
        put(OPTIONS, query_expansion={"strategy": "fixed", "attend": True, "length": 40}),
        "query_expansion",
    ),
    "tokenizer_args": (put(OPTIONS, tokenizer_args={"truncation_side": "left"}), "tokenizer_args"),
    "config_kwargs": (put(OPTIONS, config_kwargs={"hidden_act": "relu"}), "config_kwargs"),
    "model_kwargs": (put(OPTIONS, model_kwargs={"dtype": "bfloat16"}), "model_kwargs"),
    "an unknown option": (put(OPTIONS, new_option=3), "new_option 3"),
    "truncation_side": (put("tokenizer_config.json", truncation_side="left"), "truncation_side 'left'"),
    "max": (put(POOLING, pooling_mode="max"), "has the pooling max, and a run computes"),
    "mean_sqrt_len_tokens": (put(POOLING, pooling_mode="mean_sqrt_len_tokens"), "the pooling mean_sqrt"),
    "weightedmean": (put(POOLING, pooling_mode="weightedmean"), "the pooling weightedmean"),
    "two modes": (put(POOLING, pooling_mode=["mean", "cls"]), "the pooling .*'mean', 'cls'"),
    "two flags": (flags("mean_tokens", "cls_token"), "the pooling .*cls_token"),
    "flag of max": (flags("max_tokens"), "the pooling .*max_tokens"),
    "include_prompt": (
        both(put(POOLING, include_prompt=False), put(PROMPTS, prompts={"query": "find "})),
        "include_prompt False",
    ),
    "default_prompt_name": (
        put(PROMPTS, prompts={"query": "find "}, default_prompt_name="query"),
        "default_prompt_name 'query'.* write the prompts into the rows, and set it to null",
    ),
    "model_type": (put(PROMPTS, model_type="SparseEncoder"), "model_type 'SparseEncoder'"),
    "Dense": (modules(" Transformer", "1_Pooling Pooling", "2_Dense Dense"), "Dense in '2_Dense'"),
    "LayerNorm": (modules(" Transformer", "1_Pooling Pooling", "2_Norm LayerNorm"), "LayerNorm in '2_Norm'"),
    "Dropout": (
        modules(" Transformer", "1_Pooling Pooling", "2_Drop Dropout", "3_Normalize Normalize"),
        "Dropout in '2_Drop'",
    ),
    "Normalize before Pooling": (
        modules(" Transformer", "2_Normalize Normalize", "1_Pooling Pooling"),
        "Normalize in '2_Normalize', Pooling in '1_Pooling', and a run trains Transformer",
    ),
    "no Pooling": (modules(" Transformer"), "has Transformer in '', and a run"),
    "a class of another package": (modules(" custom_st.Transformer", "1_Pooling Pooling"), "Transformer in ''"),
    "a Transformer in a folder": (modules("0_BERT Transformer", "1_Pooling Pooling"), "Transformer in '0_BERT'"),
}
"""By option: a folder change, and the refusal."""
SAME = ("Dropout", "mean_sqrt_len_tokens")
"""Refused options with the same vectors: in evaluation alone, or at unit length alone."""


def changed(base: Path, tmp_path: Path, change: Change) -> Path:
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    change(folder)
    return folder


@pytest.mark.parametrize("option", quick(TAKEN, ["do_lower_case by an older name", "no flag", "of another folder"]))
def test_the_export_has_the_vectors_of_the_run(option: str, base: Path, tmp_path: Path) -> None:
    """Break: keep do_lower_case alone; read `1_Pooling`; cut on the right always."""
    folder = changed(base, tmp_path, TAKEN[option])
    vectors, files = own_vectors(folder, TEXTS)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert torch.allclose(made_by(folder)[0], vectors, atol=1e-5)


@pytest.mark.parametrize("option", quick(REFUSED, ["query_length", "default_prompt_name", "model_type"]))
def test_what_changes_the_vectors_is_refused(option: str, base: Path, tmp_path: Path) -> None:
    """Break: keep the option; refuse one that leaves the vectors."""
    change, reason = REFUSED[option]
    folder = changed(base, tmp_path, change)
    with pytest.raises(ConfigError, match=reason):
        own_vectors(folder, TEXTS)
    try:
        found = made_by(folder)
    except Exception:  # as sentence-transformers refuses it
        return
    wanted = made_by(base)
    is_same = all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))
    assert is_same == (option in SAME)


def test_prompts_and_sizes_stay(base: Path, tmp_path: Path) -> None:
    """A prompt in the rows is that of `encode_query`; `truncate_dim` cuts the trained vectors. Break: drop them."""
    folder = changed(base, tmp_path, put(PROMPTS, prompts={"query": "find ", "document": "of "}, truncate_dim=4))
    vectors, files = own_vectors(folder, [f"find {TEXTS[0]}", f"of {TEXTS[0]}"])
    for name, content in files.items():
        (folder / name).write_bytes(content)
    _, queries, documents = made_by(folder)
    assert torch.allclose(queries[0], vectors[0, :4], atol=1e-5)
    assert torch.allclose(documents[0], vectors[1, :4], atol=1e-5)
