"""`benchmarks.adam`: result format and errors."""

from __future__ import annotations

import json
import subprocess

import pytest

from benchmarks.adam import parse_count
from offload.errors import ConfigError
from offload.native import kernels
from tests import forks


@pytest.mark.parametrize(("text", "count"), [("64", 64), ("1.5Ki", 1536), ("64Mi", 1 << 26), ("1e3", 1000)])
def test_counts(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "Mi", "0", "-5", "64MB", "nan", "1e400"])
def test_wrong_counts(text):
    with pytest.raises(ConfigError, match="--n is"):
        parse_count(text)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return forks.run(["-m", "benchmarks.adam", *words])


@pytest.mark.skipif(not kernels.is_native(), reason="the C++ kernels were not built: there is nothing to measure")
def test_json():
    done = run("--json", "--n", "64Ki", "--reps", "1", "--threads", "1")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {"command", "commit", "date", "machine", "versions", "results"}
    names = {result["name"] for result in document["results"]}
    assert {
        "roofline 28 B",
        "roofline 26 B",
        "offload adamw, fp32",
        "offload adamw, split",
        "torch fused AdamW",
    } <= names
    widths = {f"offload {rule}{width}, split" for rule in ("adamw", "lion") for width in ("", " bf16", " int8")}
    assert widths | {"offload sgd, split", "offload sgd without momentum, fp32"} <= names
    for result in document["results"]:
        assert result["value"] > 0
        assert result["unit"] == "ms"
        assert (result["ratio"] is None) == (result["reference"] is None)
        assert result["reference"] is None or result["reference"] in names


def test_a_wrong_option_leaves_with_2():
    done = run("--n", "many")
    assert done.returncode == 2
    assert done.stderr.startswith("offload: --n is 'many'")
    assert forks.run(["-m", "offload.bench", "nothing"]).returncode == 2
