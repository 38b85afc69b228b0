"""Texts from unset variables of a shell, and lists in one quoted word, for every setting of these types."""

from __future__ import annotations

import pytest

from offload.app.config.config import Config
from offload.app.config.sections import nested_types
from offload.errors import ConfigError

TEXTS = [
    f"{name}.{key}"
    for name, section in Config.SECTIONS.items()
    for key, field in section.model_fields.items()
    if str in nested_types(field.annotation)
]


@pytest.mark.parametrize("key", TEXTS)
def test_an_empty_text_is_refused(key: str) -> None:
    """Break: take the text as a path, which is then the working folder."""
    for value in ("", " ", [""]):
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            Config.load(None, {key: value})


@pytest.mark.parametrize("key", ["target_modules", "target_parameters", "modules_to_save"])
def test_one_quoted_word_is_a_list(key: str) -> None:
    lists = [
        Config.load(None, {"lora.rank": 2, f"lora.{key}": value}).lora
        for value in ("q_proj  k_proj", ["q_proj", "k_proj"])
    ]
    assert [getattr(each, key) for each in lists] == [("q_proj", "k_proj")] * 2
