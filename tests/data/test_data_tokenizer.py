"""The tokenizer: loaded from a folder, or trained on the data, deterministic and cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.errors import ConfigError
from offload.extras.data.tokenizer import (
    check_vocabulary,
    grown_vocabulary,
    hash_tokenizer,
    load_or_train_tokenizer,
    load_tokenizer,
    preload_tokenizer,
    tokenizer_folder,
    train_bpe,
)


def silent(stage: str, fraction: float) -> None:
    pass


def test_training_is_deterministic_and_exact(bpe: Any, prose: str) -> None:
    again = train_bpe([prose] * 4, 400)
    assert again.backend_tokenizer.to_str() == bpe.backend_tokenizer.to_str()
    assert hash_tokenizer(again) == hash_tokenizer(bpe)
    for text in (prose, "  blanks \t\n\n", "never seen: ξ 🦊 \x00"):
        assert bpe.decode(bpe(text)["input_ids"]) == text


def test_too_little_text_and_a_tiny_vocabulary() -> None:
    small = train_bpe(["a"], 5000)
    assert 256 < len(small) < 300
    assert small.decode(small("any text ü")["input_ids"]) == "any text ü"
    tiny = train_bpe(["hello world " * 20 + "ξ"], 40)
    assert len(tiny) <= 40
    assert tiny.decode(tiny("hello")["input_ids"]) == "hello", "the frequent bytes are kept"
    assert tiny("Z")["input_ids"] == [tiny.unk_token_id]
    with pytest.raises(ConfigError, match="vocabulary has 6 tokens"):
        train_bpe(["hello"], 6)


def test_a_saved_tokenizer_is_loaded_as_it_was(bpe: Any, bpe_folder: Callable[..., str], prose: str) -> None:
    loaded = load_tokenizer(bpe_folder())
    assert hash_tokenizer(loaded) == hash_tokenizer(bpe)
    assert (loaded.eos_token, loaded.pad_token, loaded.bos_token) == ("<|endoftext|>",) * 3
    assert loaded(prose)["input_ids"] == bpe(prose)["input_ids"]
    assert hash_tokenizer(loaded) != hash_tokenizer(load_tokenizer(bpe_folder("{{ messages }}", "other")))


def test_training_is_cached(tmp_path: Path, prose: str) -> None:
    calls = []

    def texts() -> list[str]:
        calls.append(1)
        return [prose]

    first = load_or_train_tokenizer(texts, 400, "key", tmp_path, silent)
    second = load_or_train_tokenizer(texts, 400, "key", tmp_path, silent)
    assert len(calls) == 1
    assert hash_tokenizer(first) == hash_tokenizer(second)
    load_or_train_tokenizer(texts, 300, "key", tmp_path, silent)
    load_or_train_tokenizer(texts, 400, "other", tmp_path, silent)
    assert len(calls) == 3
    for path in (tmp_path / "tokenizers").glob("*/tokenizer.json"):
        path.write_text(path.read_text()[:100])
    assert hash_tokenizer(load_or_train_tokenizer(texts, 400, "key", tmp_path, silent)) == hash_tokenizer(first)
    assert len(calls) == 4, "a damaged one is trained again"


def test_where_a_models_tokenizer_is(bpe_folder: Callable[..., str], tmp_path: Path) -> None:
    folder = bpe_folder()
    assert tokenizer_folder(None) is None
    assert tokenizer_folder(folder) == folder
    (Path(folder) / "config.json").write_text("{}")
    assert tokenizer_folder(f"{folder}/config.json") == folder
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    assert tokenizer_folder(str(tmp_path / "bare")) is None
    assert tokenizer_folder(str(tmp_path / "bare" / "config.json")) is None
    assert tokenizer_folder("some/hub-name") == "some/hub-name"


def test_a_tokenizer_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (str(tmp_path), "no-such-owner/no-such-model"):
        with pytest.raises(ConfigError, match=r"data\.tokenizer: no tokenizer can be loaded"):
            load_tokenizer(path)


def test_embeddings_grow_for_added_tokens_alone(bpe_folder: Callable[..., str]) -> None:
    """Break: count the vocabulary without added tokens."""
    tokenizer = load_tokenizer(bpe_folder())
    size = len(tokenizer)
    assert grown_vocabulary(tokenizer, size, True) == size
    assert grown_vocabulary(tokenizer, size - 1, True) == size - 1, "another model's tokenizer is refused instead"
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    assert grown_vocabulary(tokenizer, size, False) == size
    assert grown_vocabulary(tokenizer, size, True) == size + 1
    tokenizer.chat_template = "{{ '<|image|>' }}"
    assert grown_vocabulary(tokenizer, size, False) == size + 1
    tokenizer.chat_template = None
    tokenizer.add_tokens(["offload"])
    assert grown_vocabulary(tokenizer, size, False) == size + 2
    assert grown_vocabulary(tokenizer, size + 100, True) == size + 100


def test_a_special_token_beyond_the_vocabulary_is_tolerated_until_used(bpe_folder: Callable[..., str]) -> None:
    tokenizer = load_tokenizer(bpe_folder())
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    assert len(tokenizer) == size + 1
    check_vocabulary(tokenizer, size, "x")
    tokenizer.pad_token = "<|image|>"
    with pytest.raises(ConfigError, match=f"has {size + 1} tokens, the model's vocabulary has {size}"):
        check_vocabulary(tokenizer, size, "x")
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.add_tokens(["plainword"])
    with pytest.raises(ConfigError, match=f"has {size + 2} tokens"):
        check_vocabulary(tokenizer, size, "x")


def test_a_tokenizer_that_was_looked_at_is_not_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: object())
    seen = preload_tokenizer(str(tmp_path))
    assert load_tokenizer(str(tmp_path)) is seen
    assert load_tokenizer(str(tmp_path)) is not seen, "the first one may have changed it"
    seen = preload_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{ }")
    assert load_tokenizer(str(tmp_path)) is not seen
