"""A plan too large for the host is refused before any allocation, for every host limit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offload import AdamW, Engine, MeZO, Placement, system
from offload.errors import DoesNotFitError
from offload.planning.memory import Allocation, check_host
from tests import forks
from tests.engine.device import cpu_only
from tests.machine.groups import second_version

MIB = 1 << 20
PLAN = [Allocation("cpu", "high", 60), Allocation("cpu", "moments", 40), Allocation("device", "unit slot", 30)]


@pytest.mark.parametrize(
    ("free", "given", "is_device", "missing"),
    [(100, 0, False, 0), (99, 0, False, 1), (90, 10, False, 0), (100, 0, True, 30)],
)
def test_the_least_that_a_plan_takes_is_what_there_must_be(
    free: int, given: int, is_device: bool, missing: int
) -> None:
    if not missing:
        check_host(PLAN, free, "x", model_bytes=given, is_device=is_device)
        return
    with pytest.raises(DoesNotFitError) as refusal:
        check_host(PLAN, free, "the limit of a group (/a: 7)", model_bytes=given, is_device=is_device, num_sharing=2)
    said = str(refusal.value)
    for words in (f"({free} bytes)", f"({missing} bytes)", "moments 40 B (40)", "(/a: 7)", f"{2 * missing} bytes more"):
        assert words in said
    assert ("unit slot" in said) is is_device
    assert "--offload.nvme_dir" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "tiers", "rule", "settings", "said", "unsaid"),
    [
        ("device", ("cpu", "cpu"), AdamW(), {}, [], ["--offload.parameters", "--offload.optimizer"]),
        ("device", ("device", "cpu"), AdamW(), {}, ["with --offload.parameters cpu."], ["--offload.optimizer"]),
        ("device", ("device", "device"), MeZO(), {}, ["--offload.parameters cpu --offload.optimizer cpu."], []),
        ("host", ("cpu", "cpu"), AdamW(), {}, ["--train.precision bf16, or train without clipping"], []),
        ("host", ("cpu", "cpu"), AdamW(), {"precision": "bf16"}, ["without clipping"], ["--train.precision"]),
        ("host", ("cpu", "cpu"), AdamW(), {"max_grad_norm": None}, ["--train.precision bf16."], ["clipping"]),
        ("host", ("cpu", "cpu"), MeZO(), {}, ["--offload.nvme_dir FOLDER."], ["--train.precision", "clipping"]),
        ("host", ("cpu", "nvme", "cpu"), AdamW(), {}, ["parameters nvme --offload.gradients nvme."], []),
        ("host", ("nvme", "nvme", "cpu"), AdamW(), {}, ["with --offload.gradients nvme."], ["--offload.parameters"]),
        ("host", ("nvme", "nvme"), MeZO(), {}, ["minimum for the buffers"], ["--offload"]),
    ],
)
def test_a_budget_is_refused_with_the_advice_that_applies(
    tmp_path: Path, budget: str, tiers: Any, rule: Any, settings: Any, said: list[str], unsaid: list[str]
) -> None:
    where: dict[str, Any] = dict(zip(("parameters", "optimizer", "gradients"), tiers, strict=False))
    where |= {f"{budget}_memory": 4096, "nvme_dir": str(tmp_path) if "nvme" in tiers else None}
    with pytest.raises(DoesNotFitError) as refusal:
        Engine(llama(), rule, Placement(**where), **settings)
    advice = str(refusal.value).partition("Raise --")[2].split(maxsplit=1)[1]
    assert advice.endswith(".")
    assert all(words in advice for words in said), advice
    assert not any(words in advice for words in unsaid), advice


def llama() -> LlamaForCausalLM:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, **shape))


@cpu_only("the figures are those of a host that is the device as well")
@pytest.mark.parametrize("tier", ["cpu", "auto"])
def test_an_engine_is_refused_by_a_group_and_to_the_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    def left(num_bytes: int) -> None:
        monkeypatch.setattr(system, "ROOT", second_version(tmp_path, {"/": (num_bytes, 0, 0)}))

    def open_engine() -> Engine:
        return Engine(llama(), AdamW(lr=1e-3), Placement(tier, tier))

    with open_engine() as engine:
        needed = sum(num_bytes for at, _, num_bytes in engine.allocations if at != "nvme")
    weights = sum(p.nbytes for p in llama().parameters())
    left(needed - weights - 1)
    with pytest.raises(
        DoesNotFitError, match=rf"{needed} bytes.* 1 B \(1 bytes\) less than needed.*/sys/fs/cgroup/memory\.max"
    ):
        open_engine()
    left(needed - weights)  # the engine frees the model weights
    with open_engine() as engine:
        tokens = torch.randint(128, (1, 8))
        engine.step({"input_ids": tokens, "labels": tokens})


@cpu_only("an accelerator has memory of its own")
def test_a_folder_takes_what_memory_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "ROOT", second_version(tmp_path / "tree", {"/": (MIB, 0, 0)}))
    with Engine(llama(), AdamW(lr=1e-3), Placement("auto", "auto", nvme_dir=str(tmp_path))) as engine:
        assert any(tier == "nvme" for tier, _, _ in engine.allocations)


BIG = {
    "model_type": "llama", "vocab_size": 384, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 64,
}  # fmt: skip
TRAIN = """
import os, resource, sys
from pathlib import Path
from offload.app.config.command_line import run_command
from offload import system
from offload.train import main
sys.argv.pop(0)
{enter}
try:
    run_command(main)
finally:
    print("peak", 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
Enter = Callable[[str], str]


@pytest.fixture
def train(tmp_path: Path) -> Enter:
    """Return a function: run some code, train a model with 8.6 GB states, return the refusal.

    The refusal must come before the state allocation.
    """
    (tmp_path / "big.json").write_text(json.dumps(BIG))
    (tmp_path / "text.txt").write_text("one and one is two\n" * 300)

    def run(enter: str) -> str:
        words = ["", "--model.path", tmp_path / "big.json", "--data.source", tmp_path / "text.txt"]
        words += ["--data.sequence_length", 32, "--run.dir", tmp_path / "run", "--offload.device_memory", "none"]
        said = forks.run(["-c", TRAIN.format(enter=enter), *words], cwd=tmp_path)
        assert said.returncode == 3, (said.returncode, said.stderr)
        assert int(said.stdout.split()[-1]) < 1 << 30
        assert said.stderr.count("\n") == 1
        assert "Nothing was allocated" in said.stderr
        return said.stderr

    return run


@pytest.mark.slow
@cpu_only("the plan is for the host")
def test_a_run_beyond_a_group_s_limit_leaves_with_3(train: Enter, tmp_path: Path) -> None:
    tree = second_version(tmp_path / "tree", {"/": ("max", 9 << 30, 0), "/job": (6 << 30, 3 << 30, 1 << 30)})
    said = train(f"system.ROOT = Path({str(tree)!r})")
    assert "/sys/fs/cgroup/job/memory.max: 6 GiB, of which 4 GiB is left" in said
    assert re.search(r"\(4294967296 bytes\) are available, .* less than needed: ", said)
