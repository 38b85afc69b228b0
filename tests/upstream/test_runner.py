"""The runner for other projects' suites, on an invented suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forks
from tests.integrations.plain import needs

needs("accelerate", "datasets")

pytestmark = pytest.mark.slow

SUITE = """
import torch, transformers
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

NAME = "somebody/tiny-LlamaForCausalLM"

def train(folder, kind=Trainer, **more):
    words = AutoTokenizer.from_pretrained(NAME)
    rows = load_dataset("somebody/text", split="train")["text"]
    rows = torch.tensor([words(text * 3)["input_ids"][:6] for text in rows])
    rows = [{"input_ids": row, "labels": row} for row in rows]
    args = TrainingArguments(str(folder), max_steps=2, logging_steps=1, report_to=[], learning_rate=0.1, **more)
    trainer = kind(model=AutoModelForCausalLM.from_pretrained(NAME), args=args, train_dataset=rows)
    trainer.train()
    return trainer

def test_equal(tmp_path):
    assert train(tmp_path).state.global_step == 2

def test_refused(tmp_path):
    train(tmp_path, optim="adafactor")

def test_different(tmp_path):
    class Other(Trainer):
        def compute_loss(self, *args, **kwargs):
            factor = 2 if getattr(self, "engine", None) else 1
            return super().compute_loss(*args, **kwargs) * factor
    train(tmp_path, Other)

def test_fails_over_the_engine(tmp_path):
    assert not hasattr(train(tmp_path), "engine")

def test_fails_plain():
    AutoModelForCausalLM.from_pretrained("somebody/unknown")

def test_trains_nothing():
    pass
"""


def test_each_class(tmp_path: Path) -> None:
    """The runner assigns each test to the class in the test name, in a separate process."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "test_made_up.py").write_text(SUITE)
    out = tmp_path / "out.json"
    ran = forks.run(["-m", "tests.upstream", tmp_path / "tests", "--json", out], timeout=forks.MINUTES)
    assert ran.returncode == 1, ran.stderr
    verdicts = json.loads(out.read_text())
    assert {v["test"].split("::test_")[1]: v["kind"] for v in verdicts} == {
        "equal": "equal",
        "refused": "refused",
        "different": "different",
        "fails_over_the_engine": "fails over the engine",
        "fails_plain": "fails plain too",
        "trains_nothing": "trains nothing",
    }
    assert "1 x hub access: " in ran.stdout
    assert "ConfigError: optim is 'adafactor'" in ran.stdout
