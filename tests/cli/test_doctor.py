"""`python -m offload.doctor`: reports about NVMe directories, and exit codes."""

from __future__ import annotations

import errno
import json
import os
import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload import doctor, system
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.probe import Sizes, probe
from offload.extras.tools import diagnosis
from offload.files import directories
from offload.native import io as native_io
from offload.native import kernels
from tests import forks
from tests.disks import nameless
from tests.forks import ROOT
from tests.machine.groups import second_version, write

Call = Callable[..., "tuple[int, dict[str, Any]]"]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function: run the command and return (exit code, JSON)."""

    def run(*words: object) -> tuple[int, dict[str, Any]]:
        code = doctor.main(["--json", *map(str, words)])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_the_machine(call):
    code, found = call()
    assert code == 0
    assert found["environment"]["versions"]["torch"]
    assert found["kernels"] == kernels.describe()
    with native_io.IoEngine() as engine:
        assert (found["io"]["engine"], found["io"]["why_not_better"]) == (engine.name, engine.why or None)
    assert found["nvme"] == []


def test_a_line_for_a_report(tmp_path, capsys, monkeypatch):
    """One line, whatever the width of the terminal, and no name of a folder."""
    monkeypatch.setenv("COLUMNS", "40")
    doctor.main(["--nvme-dir", str(tmp_path)])
    *_, before, line = capsys.readouterr().out.splitlines()
    assert before == ""
    assert line.startswith("for a report: offload ")
    for words in (f"; torch {torch.__version__}; transformers ", " cores; ", f" {kernels.describe()['isa']}, "):
        assert words in line
    assert not {str(tmp_path), platform.node()} & set(line.replace(";", " ").split())
    environment = {**diagnosis.describe_environment(), "memory": {}}
    environment["gpus"] = [{"name": "NVIDIA T4", "capability": "7.5", "runtime": "CUDA 12.6"}]
    found = {"environment": environment, "kernels": kernels.describe(), "io": {"engine": "threads"}}
    assert "; NVIDIA T4 7.5 CUDA 12.6; " in doctor.report_line(found)


@pytest.mark.slow
def test_this_machine_s_rates(call, tmp_path, monkeypatch, capsys):
    asked = []

    def small(device, dirs, **how):
        asked.append((dirs, how))
        sizes = Sizes(link_bytes=1 << 20, core_bytes=1 << 20, disk_bytes=1 << 20, disk_s=0.01)
        return probe(device, dirs, sizes=sizes, cache_dir=tmp_path / "cache", **how)

    monkeypatch.setattr(diagnosis, "probe", small)
    tree = second_version(tmp_path / "tree", {"/": (900 << 20, 100 << 20, 0)})
    monkeypatch.setattr(system, "ROOT", tree)
    assert "probe" not in call("--nvme-dir", tmp_path)[1]
    code, found = call("--probe", "--nvme-dir", tmp_path, tmp_path / "missing")
    assert code == 1, "of the directory that is missing"
    assert set(found["probe"]["bounds"]["seconds"]) == {"update", "h2d", "d2h", "nvme_read", "nvme_write"}
    assert found["probe"]["hardware"]["host_bytes"] == 800 << 20
    assert [limit["most_bytes"] for limit in found["probe"]["limits"]][1] == 900 << 20
    assert call("--refresh")[1]["probe"]["hardware"]["disk_bytes"] is None
    assert asked == [([str(tmp_path)], {"refresh": False}), ([], {"refresh": True})]
    doctor.main(["--probe"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("GB/s", "memory.max: 900 MiB, of which 800 MiB is left", "AdamW on the host", "the same cores"):
        assert words in text


def test_a_quota_of_cpu_time_and_visible_cores_are_told(call, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(48)))
    tree = second_version(tmp_path, {"/": ("max", 0, 0)})
    monkeypatch.setattr(system, "ROOT", write(tree, {"sys/fs/cgroup/cpu.max": "765000 100000"}))
    quota = {"cores": 7.65, "where": "/sys/fs/cgroup/cpu.max"}
    assert call()[1]["environment"]["cpu"]["quota"] == quota
    doctor.main([])
    text = " ".join(capsys.readouterr().out.split())
    assert ", 96 cores, 48 of them visible, a quota of 7.65 (/sys/fs/cgroup/cpu.max) at most 7 threads in the" in text


def test_a_gpu_s_rates_for_people(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(diagnosis, "probe", lambda *_, **__: read_machine("gb10"))
    monkeypatch.setattr(diagnosis, "lockable_bytes", lambda: 8 << 20)
    monkeypatch.setattr(diagnosis, "node_bytes", lambda: {0: 1, 1: 1})
    slow = {"name": "slow", "pcie_lanes": 8, "pcie_most_lanes": 16}
    monkeypatch.setattr(diagnosis, "nvml_gpus", lambda: [slow, {"name": "fast"}])
    doctor.main(["--probe"])
    *lines, _report = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for words in (
        "112 GiB free, 232 GB/s",
        "is left",
        "8 MiB of memory",
        "2 NUMA nodes",
        "slow has 8 of 16 PCIe lanes",
    ):
        assert words in text
    assert "uses the host's memory" in text
    assert "writing to disk; compute takes as long with 100,000 tokens a step, and hides it" in text


def test_directories(call, tmp_path):
    (tmp_path / "file").touch()
    code, found = call("--nvme-dir", tmp_path, tmp_path / "missing", "--nvme-dir", tmp_path / "file")
    good, missing, file = found["nvme"]
    assert code == 1
    assert good["usable"]
    assert good["refusal"] is None
    assert good["file_system"] == directories.file_system(tmp_path)
    assert good["free_bytes"] > 0
    assert good["direct"] or good["why_buffered"]
    assert not missing["usable"]
    assert "does not exist" in missing["refusal"]
    assert not file["usable"]
    assert "is a file" in file["refusal"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert not nameless(tmp_path)
    assert call("--nvme-dir", tmp_path)[0] == 0


def failing(monkeypatch, is_direct, message, number):
    """Make writes to files with or without O_DIRECT fail."""
    write = native_io.IoEngine.write

    def fail(engine, file, *rest):
        if file.is_direct or not is_direct:
            raise native_io.DiskError(message, number, file.path)
        return write(engine, file, *rest)

    monkeypatch.setattr(native_io.IoEngine, "write", fail)


@pytest.mark.parametrize("refused", ["opening", "transfer"])
def test_a_file_system_without_direct(call, tmp_path, monkeypatch, refused):
    open_file = os.open

    def fail_to_open(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return open_file(path, flags, *rest, **more)

    if refused == "opening":
        monkeypatch.setattr(native_io.os, "open", fail_to_open)
    else:
        failing(monkeypatch, True, "the write failed: EINVAL", errno.EINVAL)
    code, found = call("--nvme-dir", tmp_path)
    assert code == 0
    assert found["nvme"][0]["usable"]
    assert found["nvme"][0]["direct"] is False
    assert ("O_DIRECT" if refused == "opening" else "EINVAL") in found["nvme"][0]["why_buffered"]
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails(call, tmp_path, monkeypatch):
    failing(monkeypatch, False, "the write failed: EIO", errno.EIO)
    code, found = call("--nvme-dir", tmp_path)
    assert code == 1
    assert found["nvme"][0]["refusal"] == "the write failed: EIO"
    assert not found["nvme"][0]["usable"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--nvme-dir"], ["--clean"], ["more"]])
def test_words_that_it_does_not_know(words):
    with pytest.raises(SystemExit) as leaving:
        doctor.main(words)
    assert leaving.value.code == 2


def test_for_people(tmp_path):
    """As a user command: compact, within 80 columns, and with an exit code."""
    command = ["-m", "offload.doctor", "--nvme-dir", tmp_path, tmp_path / "missing"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "TERM": "dumb"}
    child = forks.run(command, cwd=tmp_path, env=environment)
    assert child.returncode == 1, child.stderr
    assert child.stderr == ""
    *lines, _report = child.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 40
    text = "".join("".join(lines).split())
    for words in ("offload0.1", "kernels", "I/Oengine", "usable,", "doesnotexist", str(tmp_path)):
        assert words in text
