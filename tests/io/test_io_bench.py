"""`offload.bench nvme`: result format and errors."""

from __future__ import annotations

import argparse
import json
import shutil

import pytest

from offload.errors import ConfigError
from offload.extras.tools.benches import nvme


def parsed(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    nvme.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


@pytest.mark.parametrize("with_fio", [False, True])
def test_results(kind, tmp_path, with_fio):
    if with_fio and shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    sizes = ("--size", "1100KiB", "--block", "16KiB", "--depth", 4, "--pairs", 1)
    words = (*sizes, "--dir", tmp_path, "--engine", kind, *(() if with_fio else ("--no-fio",)))
    results = [result.fields() for result in nvme.run(parsed(*words))]
    json.dumps(results)
    names = {result["name"] for result in results}
    assert {f"{kind}: {pattern}{what}" for pattern in nvme.PATTERNS for what in ("", ", CPU")} <= names
    for result in results:
        assert result["value"] > 0 or result["unit"] == "s/GiB"
        assert result["unit"] == ("s/GiB" if result["name"].endswith("CPU") else "GB/s")
        assert (result["reference"] is None) == (not with_fio or result["name"].startswith("fio"))
        assert result["reference"] is None or result["reference"] in names
    assert not list(tmp_path.iterdir())


def test_every_byte_is_read_and_written(kind, tmp_path):
    """Covers a file end inside a tile too."""
    size = 100 * 4096
    with nvme._two_files(tmp_path, size) as paths, nvme._engines(kind, 2, 8192) as engines:
        bench = nvme.Bench(engines, paths, size, 1 << 16)
        bench.open()
        bench.fill()
        before = [path.read_bytes() for path in paths]
        assert before[0] == before[1]
        assert before[0].count(bytes(4096)) == 0
        bench.update()
        changed = nvme._noise(size)
        changed.copy_(_words(before[0]))
        assert paths[0].read_bytes() == (changed + 1).numpy().tobytes()
        bench.both()
        assert paths[1].read_bytes() == before[1]


def _words(data: bytes):
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.int64)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--size", "5000"), "--size is 5000"),
        (("--size", "1MiB", "--block", "2MiB"), "at least one block"),
        (("--size", "1MiB", "--pairs", "0"), "--pairs is 0"),
        (("--size", "1MiB", "--dir", "/missing"), "--dir is /missing"),
        (("--size", "1000TiB"), "GiB free"),
    ],
)
def test_wrong_options(words, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        nvme.run(parsed("--dir", tmp_path, "--no-fio", *words))
