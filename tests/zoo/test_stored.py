"""Causal language models in transformers resume and export from a checkpoint alone.

Covers one family out of six and all unusual families.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from offload import Engine
from offload.app.config.sections import ModelSection
from offload.app.hf.models import build_model
from offload.app.stored_model import export_stored, rebuild_model
from tests.engine.compare import same_bits
from tests.hf.test_write import tensors
from tests.zoo.families import OVERRIDES, buildable, families

pytestmark = pytest.mark.slow


def is_known(family: Any) -> bool:
    found = AutoModelForCausalLM._model_mapping.get(family.model_class.config_class, None)
    return found is family.model_class


# test_folders.py covers every family with folders. Some families here cover checkpoints.
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(*case.values, "a folder in bf16" if number % 4 == 0 else "random in fp32", marks=case.marks)
        for number, case in enumerate(buildable())
        if number % 12 == 0 or case.values[0] in OVERRIDES
    ],
)
def test_a_checkpoint_needs_nothing_else(name: str, way: str, tmp_path: Path) -> None:
    """The model built from the checkpoint continues with the same bits, including buffers.

    Break: build the model in another dtype; leave out persistent buffers.
    """
    family, batch = families()[name], families()[name].batch()
    if not is_known(family):
        pytest.skip("no Auto class makes it of its configuration alone")
    given, is_random = tmp_path / "given", way == "random in fp32"
    family.build(dtype=torch.bfloat16).save_pretrained(given)
    section = ModelSection(path=str(given), init="random" if is_random else "pretrained")
    built = build_model(section, seed=0, dtype=torch.bfloat16)
    engine = Engine(built.model.train(), precision="bf16", fill=built.fill)
    engine.step(batch)
    engine.save_checkpoint(tmp_path / "saved")
    engine.export(tmp_path / "theirs")
    again = Engine(rebuild_model(tmp_path / "saved", ModelSection()).train(), precision="bf16", fill=nothing)
    again.load_checkpoint(tmp_path / "saved")
    if not family.is_random:
        torch.manual_seed(1)
        wanted = engine.step(batch)
        torch.manual_seed(1)
        found = again.step(batch)
        assert (found.loss.item(), found.grad_norm) == (wanted.loss.item(), wanted.grad_norm)
    buffers, found_buffers = (dict(each.model.named_buffers()) for each in (engine, again))
    assert found_buffers.keys() == buffers.keys()
    assert [key for key, value in buffers.items() if not same_bits(value, found_buffers[key])] == []
    engine.close()
    again.close()
    export_stored(tmp_path / "saved", tmp_path / "ours")
    ours, theirs = tensors(tmp_path / "ours"), tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert [key for key, value in theirs.items() if not same_bits(value, ours[key])] == []
    for path in (tmp_path / "theirs").glob("*.json"):
        assert path.read_bytes() == (tmp_path / "ours" / path.name).read_bytes(), path.name


def nothing(_name: str, _module: nn.Module) -> None:
    """The checkpoint has the weights."""
