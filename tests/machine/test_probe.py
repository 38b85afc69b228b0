"""Hardware measurements and their cache. Figures are not compared, because the machine can be busy."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from offload import system
from offload.accelerators import Accelerator
from offload.app.environment import describe_environment
from offload.errors import ConfigError
from offload.extras.plan import probe as probing
from offload.extras.plan.probe import Sizes, probe
from offload.machine.hardware import Hardware
from offload.machine.limits import Limit
from offload.native import io as native_io
from offload.native import kernels
from tests.disks import nameless
from tests.engine.device import cpu_only
from tests.machine.test_quota import second_version
from tests.matrix import quick
from tests.threads import torch_threads

SMALL = Sizes(link_bytes=1 << 20, core_bytes=1 << 20, device_bytes=1 << 20, disk_bytes=1 << 20, disk_s=0.01)
RATES = {
    "h2d_bytes_per_s": 1.0,
    "d2h_bytes_per_s": 2.0,
    "both_ways_bytes_per_s": 3.0,
    "flops_per_s": {"fp32": 4.0, "bf16": 5.0},
    "device_bytes_per_s": 6.0,
    "host_bytes_per_s": 7.0,
    "launch_s": 8.0,
    "attention_flops_per_s": {"fp32": 11.0, "bf16": 12.0},
    "moved_bytes_per_s": 13.0,
    "fresh_bytes_per_s": 14.0,
}
DISKS = {"nvme_read_bytes_per_s": 9.0, "nvme_write_bytes_per_s": 10.0, "nvme_both_ways_bytes_per_s": 11.0}
pytestmark = cpu_only("without an accelerator; tests/accelerator has the one with")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Simulate the measurements, and record each call."""
    seen: list[str] = []

    def machine(*_: Any) -> dict[str, Any]:
        seen.append("machine")
        return {**RATES, "launch_s": float(len(seen))}

    def disks(places: Any, *_: Any) -> dict[str, Any]:
        seen.append("disks")
        return DISKS

    monkeypatch.setattr(probing, "_machine_rates", machine)
    monkeypatch.setattr(probing, "_disk_rates", disks)
    return seen


@pytest.mark.parametrize("native", quick([True, False], [True]))
def test_a_machine_without_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    if native and not kernels.is_native():
        pytest.skip("the kernels were not built")
    monkeypatch.setattr(kernels, "is_native", lambda: native)
    drawn = torch.get_rng_state()
    found = probe("cpu", [tmp_path], sizes=SMALL, cache_dir=tmp_path / "cache")
    assert torch.equal(torch.get_rng_state(), drawn), "training that is measured first would draw other numbers"
    assert (found.device, found.num_devices, found.device_bytes, found.shares_memory) == ("cpu", 1, None, False)
    rates = {name: value for name, value in vars(found.rates).items() if value}
    assert set(rates) == {*RATES, *DISKS} == set(found.sources)
    flat = [*rates.pop("flops_per_s").values(), *rates.pop("attention_flops_per_s").values(), *rates.values()]
    assert all(type(rate) is float and math.isfinite(rate) and rate > 0 for rate in flat)
    assert found.host_bytes > 0
    assert found.disk_bytes
    assert not nameless(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_the_disk_of_a_models_own_files_is_only_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(4 << 20))
    file.chmod(0o444)
    before = file.stat()
    found = probe("cpu", reads=file, sizes=SMALL, cache_dir=tmp_path / "cache")
    assert found.rates.nvme_read_bytes_per_s is not None
    assert 0 < found.rates.nvme_read_bytes_per_s < math.inf
    assert (found.rates.nvme_write_bytes_per_s, found.rates.has_disk, found.disk_bytes) == (None, False, None)
    again = probe("cpu", reads=file, sizes=SMALL, measures=False, cache_dir=tmp_path / "cache")
    assert again.rates == found.rates
    assert (file.stat().st_mtime_ns, file.read_bytes()) == (before.st_mtime_ns, bytes(4 << 20))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", file.name]


def test_folders_of_one_disk_share_what_is_free(tmp_path: Path, measured: list[str]) -> None:
    places = [tmp_path / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
    one, both = (probe("cpu", dirs, cache_dir=tmp_path).disk_bytes for dirs in (places[:1], places))
    assert one is not None
    assert both is not None
    assert both < 1.5 * one


def test_both_ways_are_no_less_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement buffers fit into an eighth of the free memory."""
    taken: list[int] = []

    def copies(num_copies: int, num_bytes: int) -> float:
        taken.append(2 * num_copies * num_bytes)
        return 5.0 / num_copies

    monkeypatch.setattr(probing, "copy_bytes_per_second", copies)
    monkeypatch.setattr(probing, "host_bytes_per_second", lambda num_bytes: float(taken.append(num_bytes) or 1))
    monkeypatch.setattr(probing, "moved_bytes_per_second", lambda _, num_bytes: float(taken.append(num_bytes) or 1))
    monkeypatch.setattr(probing, "_FLOPS", {})
    monkeypatch.setattr(probing, "memory_limits", lambda: [Limit("x", "y", 9 << 20, 8 << 20)])
    assert probing._machine_rates(None, Sizes())["both_ways_bytes_per_s"] == 5.0
    assert len(taken) == 4
    assert max(taken) <= 1 << 20


class PlayedCard(Accelerator):
    """Ordinary memory as an accelerator under a played clock, which asking and waiting move on.

    The link takes 11 ms a copy until the card has worked for `asleep_s`, and 1.4 ms from then on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, asleep_s: float) -> None:
        super().__init__(torch.device("cpu"), SimpleNamespace(Stream=lambda _: None, stream=nullcontext))
        self.now_s = 1000.0
        self._began_s: float | None = None
        self._asleep_s = asleep_s
        monkeypatch.setattr(probing, "time", SimpleNamespace(perf_counter=self._tell))
        monkeypatch.setattr(probing, "_LINK_BYTES", 33_600)
        monkeypatch.setattr(probing, "_SIZES", (64,))
        monkeypatch.setattr(probing, "_FLOPS", {})

    def _tell(self) -> float:
        self.now_s += 1e-4
        return self.now_s

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    @property
    def free_bytes(self) -> int:
        return 8 << 20

    def wait(self) -> None:
        if self._began_s is None:
            self._began_s = self.now_s
        is_asleep = self.now_s < self._began_s + self._asleep_s
        self.now_s += 0.011 if is_asleep else 0.0014


@pytest.mark.parametrize("asleep_s", [0.0, 0.1, 0.25])
def test_a_sleeping_card_is_measured_awake(monkeypatch: pytest.MonkeyPatch, asleep_s: float) -> None:
    """Break: measure at once, or stop waking after two equal figures."""
    card = PlayedCard(monkeypatch, asleep_s)
    rates = probing._machine_rates(card, SMALL)
    assert rates["h2d_bytes_per_s"] == pytest.approx(33_600 / 0.0015)
    assert rates["d2h_bytes_per_s"] == pytest.approx(33_600 / 0.0015)


def test_waking_ends_for_a_card_without_a_steady_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = iter(range(1, 10_000))
    monkeypatch.setattr(probing, "flops_per_second", lambda *_: float(2 ** (next(figures) % 7)))
    card = PlayedCard(monkeypatch, 0.0)
    begin_s = card.now_s
    probing.wake(card)
    assert probing._MOST_WAKING_S <= card.now_s - begin_s < 1.1 * probing._MOST_WAKING_S


def test_rates_are_kept_and_memory_is_looked_at_anew(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(**more: Any) -> Hardware:
        return probe("cpu", [tmp_path], cache_dir=tmp_path / "cache", **more)

    first = ask()
    monkeypatch.setattr(probing, "memory_limits", lambda: [Limit("x", "y", 100, 77)])
    again = ask()
    assert (again.rates, again.host_bytes) == (first.rates, 77)
    assert measured == ["machine", "disks"]
    assert ask(refresh=True).rates.launch_s == 3.0
    assert ask().rates.launch_s == 3.0
    assert probe("cpu", cache_dir=tmp_path / "cache").rates.launch_s == 3.0, "the disk is apart"
    assert measured == ["machine", "disks"] * 2


def test_what_depends_on_something_else_is_measured_again(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break: add an environment item to LEFT_OUT, or identify a disk only by the device number."""

    def is_measured(**changes: Any) -> bool:
        measured.clear()
        with monkeypatch.context() as patch:
            for name in changes.keys() - {"sizes"}:
                patch.setattr(probing, name, lambda *_, name=name: changes[name])
            probe("cpu", cache_dir=tmp_path, sizes=changes.get("sizes", Sizes()))
        return bool(measured)

    environment = describe_environment()
    assert is_measured()
    others = {key: environment | {key: {"name": "other"} if key == "cpu" else "other"} for key in environment}
    found = {key for key, other in others.items() if not is_measured(describe_environment=other)}
    assert found == set(probing.LEFT_OUT)
    assert is_measured(hash_paths="edited")
    assert is_measured(sizes=SMALL)
    assert not is_measured()
    status, before = os.statvfs(tmp_path), probing._disk_key([tmp_path])
    other = SimpleNamespace(f_blocks=status.f_blocks + 1, f_frsize=status.f_frsize, f_fsid=status.f_fsid)
    monkeypatch.setattr(os, "statvfs", lambda _: other)
    assert probing._disk_key([tmp_path]) != before


def test_a_quota_of_cpu_time_is_noted(tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe("cpu", cache_dir=tmp_path).notes == ()
    monkeypatch.setattr(system, "ROOT", second_version(tmp_path / "tree", box="150000 100000"))
    with torch_threads(3):
        (note,) = probe("cpu", cache_dir=tmp_path).notes
        is_bounded = torch.get_num_threads() == 1
    assert ", a quota of 1.5 (/sys/fs/cgroup/pod/box/cpu.max): torch, its compiler and the kernels use no more" in note
    assert is_bounded, "measured as in a run"
    assert measured == ["machine"] * 2, "other rates"


DAMAGES: dict[str, Any] = {
    "half": lambda text: text[: len(text) // 2],
    "nothing": lambda _: "",
    "a list": lambda _: "[]",
    "another machine's": lambda text: text.replace('"num_cores"', '"num_course"'),
    "another number": lambda text: text.replace("7.0", "7.5"),
    "words": lambda text: text.replace("7.0", '"fast"'),
    "nan": lambda text: text.replace("7.0", "NaN"),
    "zero": lambda text: text.replace("7.0", "0"),
    "a rate less": lambda text: text.replace("host_bytes_per_s", "host_byte_per_s"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_as_none_and_is_replaced(tmp_path: Path, measured: list[str], damage: str) -> None:
    first = probe("cpu", cache_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(DAMAGES[damage](path.read_text()))
    again = probe("cpu", cache_dir=tmp_path)
    assert again.rates.host_bytes_per_s == first.rates.host_bytes_per_s
    assert measured == ["machine"] * 2
    assert list(tmp_path.iterdir()) == [path]
    assert probe("cpu", cache_dir=tmp_path).rates == again.rates


def test_a_cache_that_cannot_be_written_and_none_are_no_error(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        assert probe("cpu", cache_dir=tmp_path / "file").rates.host_bytes_per_s == 7.0
    monkeypatch.setattr(probing, "default_cache_dir", Mock(side_effect=ConfigError("no home folder")))
    assert probe("cpu").rates.host_bytes_per_s == 7.0
    assert measured == ["machine"] * 3


def test_a_folder_that_is_no_use_is_refused_before_anything_is_measured(tmp_path: Path, measured: list[str]) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        probe("cpu", [tmp_path / "missing"], cache_dir=tmp_path)
    assert not measured


def test_a_disk_without_direct_is_not_measured_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = native_io.IoEngine.open
    dropped: list[int] = []
    monkeypatch.setattr(native_io.IoEngine, "open", lambda *a, **how: opened(*a, **how | {"direct": False}))
    monkeypatch.setattr(probing.os, "posix_fadvise", lambda fd, *_: dropped.append(fd))
    (tmp_path / "other").mkdir()
    rates = probing._disk_rates([tmp_path, tmp_path / "other"], SMALL)
    assert len(set(dropped)) == 2
    assert min(rates.values()) > 0
