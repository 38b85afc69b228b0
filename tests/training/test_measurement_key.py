"""The cache key for stored reference log-probabilities changes with every input."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload import Placement
from offload.app.config.config import Config
from offload.engine.engine import Engine
from offload.extras.frozen.measurement_key import (
    LEFT_OUT,
    LEFT_OUT_NAMES,
    describe_model,
    describe_settings,
    measurement_key,
)
from tests import forks
from tests.integrations.plain import llama, needs

needs("peft")

from peft import LoraConfig, get_peft_model  # noqa: E402


@pytest.fixture
def config() -> Config:
    return Config(train={"method": "dpo"}, data={"source": ["pairs.jsonl"]})


@pytest.fixture
def adapted() -> Any:
    model = llama()
    model.register_buffer("shift", torch.zeros(3))
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


def rows(*identities: str) -> Any:
    sets = {str(number): SimpleNamespace(identity=each, sequence_length=16) for number, each in enumerate(identities)}
    return SimpleNamespace(pad_id=0, batch_size=2, batching=None, row_sets=sets)


KEY_OF_A_MODEL = """
from transformers import GenerationConfig
from offload.app.config.config import Config
from offload.engine.engine import Engine
from offload.extras.frozen.measurement_key import measurement_key
from tests.integrations.plain import llama
from tests.training.test_measurement_key import rows

model = llama()
model.generation_config = GenerationConfig.from_model_config(model.config)
config = Config(train={"method": "dpo"}, data={"source": ["pairs.jsonl"]})
with Engine(model) as engine:
    print(measurement_key(config, engine, rows("a")))
"""


def unchanged(values: Any, describe: Callable[[], str]) -> set[str]:
    """Return the items or attributes without influence on the description."""
    values, before, found = values if isinstance(values, dict) else vars(values), describe(), set()
    for name, was in list(values.items()):
        values[name] = "another"
        found |= {name} if describe() == before else set()
        values[name] = was
    return found


def test_every_setting_is_in_the_key_or_left_out_for_a_reason(config: Config) -> None:
    """Break: add a setting to LEFT_OUT, or remove one."""
    sections = {key.partition(".")[0] for key, _ in config.items()}
    found = {
        f"{section}.{name}"
        for section in sections
        for name in unchanged(getattr(config, section), lambda: describe_settings(config))
    }
    assert found == set(LEFT_OUT)
    assert all([*LEFT_OUT.values(), *LEFT_OUT_NAMES.values()])


def test_every_field_of_an_adapter_and_of_an_architecture_is_in_the_key(adapted: Any) -> None:
    """Break: describe only the base architecture.

    Adapters with equal matrices and different `lora_alpha` then share a reference.
    """
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    for values in (adapted.peft_config["default"], adapted.config, layer.scaling, layer.r):
        assert unchanged(values, lambda: describe_model(adapted)) <= set(LEFT_OUT_NAMES)


def test_weights_buffers_hooks_rows_and_passes_are_in_the_key(config: Config, adapted: Any) -> None:
    data, base = rows("a", "b"), adapted.base_model.model
    with Engine(adapted) as engine:

        def key() -> str:
            return measurement_key(config, engine, data)

        keys = [key(), key()]
        with torch.no_grad():
            base.shift += 1
        keys.append(key())
        base.lm_head.register_forward_hook(lambda *_: None)
        keys.append(key())
        for values, name in ((config.model, "attention"), (data, "pad_id"), (data, "batch_size")):
            vars(values)[name] = "another"
            keys.append(key())
        data.row_sets |= rows("a", "c").row_sets
        keys.append(key())
        for _, value in engine.edit(["base_model.model.lm_head.weight"]):
            value.view(-1)[-1] += 1
        keys.append(key())
    assert len(set(keys)) == len(keys) - 1, "the first two are of the same run"
    assert keys[0] == keys[1]


@pytest.mark.slow
def test_the_key_is_the_same_in_another_process() -> None:
    """Python salts the hashes of each process. Break: leave `_original_object_hash` in."""
    done = [forks.run(["-c", KEY_OF_A_MODEL], rank=rank) for rank in range(2)]
    assert done[0].stdout == done[1].stdout != "", done


def test_the_key_is_the_same_for_other_objects_and_placements(config: Config) -> None:
    """Break: include an object address, a set order, or the weight placement in the key."""
    found = []
    here, below = Placement("device", "device"), Placement()
    for values, placement in (({0, 8}, here), ({8, 0}, below), ({8}, below)):
        model = llama()
        model.named, model.made = values, lambda model=model: model
        with Engine(model, placement=placement) as engine:
            found.append(measurement_key(config, engine, rows("a")))
    with Engine(llama(), head_chunk_bytes="1MiB") as engine:
        found.append(measurement_key(config, engine, rows("a")))
    assert found[0] == found[1]
    assert len(set(found)) == 3
