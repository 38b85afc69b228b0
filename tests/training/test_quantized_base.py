"""Runs that train an adapter over a base whose files are in few bits, and the commands that are given such a base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from offload.data.tokenizer import train_bpe
from offload.export import main as export_command
from tests.hf.quantized import quantized
from tests.integrations.plain import needs
from tests.matrix import quick

needs("peft")


ADAPTER = {"lora__rank": 4, "lora__target_modules": ["q_proj", "o_proj"]}


def base_of(folder: Path, kind: str) -> Path:
    """A folder in few bits, and the same dequantised beside it, with a tokenizer."""
    quantized(folder, kind)
    for each in (folder, folder.with_name(f"{folder.name}-plain")):
        train_bpe(["a number, the next one, 1 2 3 4 5 6 7 8 9 0 is"] * 20, vocab_size=300).save_pretrained(each)
    return folder


@pytest.mark.parametrize("kind", quick(["fp8", "mxfp4", "nf4", "int4"], ["fp8", "mxfp4"]))
def test_a_run_is_that_over_the_dequantised_base(run: Any, tmp_path: Path, kind: str) -> None:
    base = base_of(tmp_path / "base", kind)
    plain = base.with_name("base-plain")
    settings = {"train__steps": 4, "checkpoint__every": 2, **ADAPTER}
    result, lines, said = run("run", model__path=str(base), **settings)
    print(said)
    wanted, others, _ = run("plain", model__path=str(plain), **settings)
    assert [line["loss"] for line in lines] == [line["loss"] for line in others]
    found, its = (load_file(each.export / "adapter_model.safetensors") for each in (result, wanted))
    assert all(torch.equal(found[name], its[name]) for name in its)
    assert f"reloaded: by peft, from {result.export}: logits bit-equal" in said
    assert export_command([str(result.dir), str(tmp_path / "merged"), "--merge"]) == 0
    assert export_command([str(wanted.dir), str(tmp_path / "wanted"), "--merge"]) == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes(), name
