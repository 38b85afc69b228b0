"""The benchmark of real sizes, with small models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import real_size
from benchmarks.real_size_folders import write_mxfp4, write_nf4

SHAPE = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
OSS = SHAPE | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
QWEN, MOE = SHAPE | {"model_type": "qwen3"}, SHAPE | EXPERTS | {"model_type": "qwen3_moe", "num_experts": 4}


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_export(tmp_path: Path) -> None:
    real_size.write_text(tmp_path / "text.txt")
    runs = dict(real_size.whole_life("tiny", tmp_path))
    assert len(runs) == 4
    killed = runs["tiny, killed after a checkpoint and resumed"]
    assert killed["equal to the run that was never killed"]
    assert "logits bit-equal" in killed["reload"]
    for run in runs.values():
        assert run["disk bytes"] == run["plan"]["disk bytes"] > 0
        assert max(run["private bytes"].values()) > run["host bytes"] + run["device bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "shape", "words"),
    [(write_mxfp4, OSS, real_size.EXPERTS), (write_nf4, QWEN, real_size.LAYERS), (write_nf4, MOE, real_size.EXPERTS)],
    ids=["mxfp4", "nf4", "nf4 experts"],
)
def test_adapters_train_over_made_folders(
    write: Callable[[Path, Mapping[str, Any]], None],
    shape: Mapping[str, Any],
    words: Mapping[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real_size.write_text(tmp_path / "text.txt")
    monkeypatch.setitem(real_size.PRESETS, "made", dict(shape))
    ((_, run),) = partial(real_size.adapter_over, write, "made", words)(tmp_path)
    assert run["steps"] == 2
    assert run["lane bytes"]["nvme_read"] > 0


@pytest.mark.slow
def test_the_bytes_of_shared_row_blocks_are_planned(tmp_path: Path) -> None:
    """Gradients of a tied embedding in row blocks leave the device twice, and wait on the host."""
    real_size.write_text(tmp_path / "text.txt")
    shape = SHAPE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(shape | {"vocab_size": 32064, "hidden_size": 256, "num_hidden_layers": 4}))
    words = {**real_size.ON_DISK, "model.path": config, "model.init": "random", "train.steps": 5}
    words |= {"data.sequence_length": 128, "offload.device_memory": "10MiB", "offload.host_memory": "1GiB"}
    run = real_size.train(tmp_path, "rows", words)
    measured, planned = dict(run["lane bytes"]), dict(run["plan"]["lane bytes"])
    # A fetch that comes before the ring of updates is used again finds a tile there, and reads nothing.
    assert measured.pop("nvme_read") == pytest.approx(planned.pop("nvme_read"), rel=2e-3)
    assert measured == planned
