"""Peak memory of programs over large models."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import MixtralForCausalLM

from offload.app.hf.deferred_init import DeferredInit
from tests.checkpoint.folders import Auto

_BEGIN = """
import sys, torch
from pathlib import Path
def status(key):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))
def begin():
    torch.ones(8, 8) @ torch.ones(8, 8)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")
"""


def peak_of(program: str, *arguments: object) -> list[int]:
    """Run a program and return the numbers that it prints, in bytes: first the growth of memory at its peak.

    `begin()` in the program returns the memory before, and `status("VmHWM")` the peak since.
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux's account of peak memory")
    command = [sys.executable, "-c", _BEGIN + program, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    numbers = [int(word) for word in done.stdout.splitlines()[-1].split()]
    print(", ".join(f"{number / 2**20:.0f} MiB" for number in numbers))
    return numbers


def make_large(folder: Path) -> None:
    """Write a model with 600 MiB in bf16."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000}
    more = {"intermediate_size": 1536, "num_hidden_layers": 6, "num_local_experts": 8}
    config = MixtralForCausalLM.config_class(**sizes, **more)
    with DeferredInit(0) as deferred:
        model = Auto(MixtralForCausalLM).from_config(config, dtype=torch.bfloat16)
    deferred.bind(model)("", model)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size="200MB")
