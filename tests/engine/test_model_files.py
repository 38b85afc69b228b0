"""Frozen weights read from the model's own files: the same bits as in memory, no copy, and unchanged files."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import Engine, Placement
from offload.app.config.sections import ModelSection
from offload.app.hf.models import BuiltModel, build_model
from offload.errors import ConfigError, DiskError
from offload.extras.plan.simulated_step import SimulatedCall, SimulatedPlan, simulate
from offload.layout.build_regions import build_regions
from offload.layout.regions import ParameterInfo
from offload.layout.residence import Residence
from offload.planning import disk
from offload.planning.disk import in_files
from offload.planning.settings import Settings
from tests.cases.models import build, llama, mixtral, tokens
from tests.engine.compare import assert_same, weights
from tests.engine.inside import parts_of
from tests.engine.sizes import Elements, tier_bytes
from tests.matrix import quick

pytestmark = pytest.mark.usefixtures("small_tiles")
TILE = 2048
FILES = Placement(parameters="files")


def saved(folder: Path, make: Callable[[], nn.Module] = llama, dtype: torch.dtype = torch.float32) -> Path:
    model: Any = build(make).to(dtype)
    model.save_pretrained(folder)
    return folder


def built(folder: Path) -> BuiltModel:
    """Load the model of a folder; only query projections and the first norm are trainable."""
    found = build_model(ModelSection(path=str(folder), init="pretrained"), seed=0)
    for name, parameter in found.model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "0.input_layernorm" in name)
    found.model.train()
    return found


def engine_of(folder: Path, **settings: Any) -> Engine:
    found = built(folder)
    engine = Engine(found.model, fill=found.fill, **settings)
    found.close()
    return engine


def past_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a host without page cache for the files."""
    monkeypatch.setattr(disk, "_CACHED_SHARE", math.inf)


def opened(folder: Path) -> list[str]:
    """Return the paths in `folder` opened by this process."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing is gone
            found.append(str(link.readlink()))
    return [path for path in found if path.startswith(f"{folder.resolve()}/")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "dtype", "way", "by"),
    [
        (llama, torch.float32, {"precision": "bf16"}, "disk"),
        (mixtral, torch.bfloat16, {"micro_batch_size": 1}, "cache"),
        (llama, torch.bfloat16, {"recompute": "never"}, "disk"),
        (llama, torch.float32, {"prefetch": 1, "throttle": {"nvme_read": "20MiB"}, "debug": 2}, "disk"),
    ],
)
def test_steps_are_those_over_weights_in_memory(
    make: Any, dtype: torch.dtype, way: dict[str, Any], by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An fp32 model computing in bf16 has both weight halves in the files, and returns fp32 weights."""
    folder = saved(tmp_path / "model", make, dtype)
    if by == "disk":
        past_the_cache(monkeypatch)
    memory, files = engine_of(folder, **way), engine_of(folder, placement=FILES, **way)
    assert ("read staging" in tier_bytes(files, "cpu")) == (by == "disk")
    for seed in range(3):
        wanted, found = (each.step(tokens(seed)) for each in (memory, files))
        assert (found.loss.item(), found.grad_norm) == (wanted.loss.item(), wanted.grad_norm)
    assert files.evaluate(tokens(9)).item() == memory.evaluate(tokens(9)).item()
    assert_same(weights(files), weights(memory))


def test_no_copy_is_made_and_the_files_stay(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    before = {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    engine = engine_of(folder, placement=FILES, prefetch=0, micro_batch_size=1)
    trained = {name: p.numel() for name, p in engine.model.named_parameters() if p.requires_grad}
    for seed in range(2):
        engine.step(tokens(seed))
    held = tier_bytes(engine, "cpu")
    assert held == {each.name: each.num_bytes for each in parts_of(engine).plan.allocations if each.tier == "cpu"}
    assert held["weights"] == 4 * TILE * 2, f"of {sum(trained.values())} weights, in two regions"
    assert held["read ring"] <= disk.RING_TILES * 4 * TILE
    assert 0 < engine.counters.nvme_read_bytes <= 2 * 4 * sum(Elements(build(llama)).trained)
    assert engine.counters.nvme_write_bytes == 0
    assert not tier_bytes(engine, "nvme")
    assert "are read from the model's own files, at most" in engine.told_frozen_weights
    engine.close()
    assert {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()} == before


@pytest.mark.slow
def test_a_run_goes_on_from_what_is_trained_alone(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    engine = engine_of(folder, placement=FILES)
    engine.step(tokens(0))
    with pytest.raises(ConfigError, match="offload.parameters is files.*trained_only=True"):
        engine.save_checkpoint(tmp_path / "whole")
    engine.save_checkpoint(tmp_path / "trained", trained_only=True)
    engine.step(tokens(1))
    for placement in (FILES, Placement()):
        other = engine_of(folder, placement=placement)
        other.load_checkpoint(tmp_path / "trained")
        other.step(tokens(1))
        assert_same(weights(other), weights(engine))
    other.save_checkpoint(tmp_path / "whole")
    with pytest.raises(ConfigError, match="trained_only=True, or set --offload.parameters cpu"):
        engine.load_checkpoint(tmp_path / "whole")
    with pytest.raises(ConfigError, match="cannot change lm_head.weight: .*--offload.parameters cpu"):
        engine.edit(["lm_head.weight"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")
def test_an_engine_closes_the_files_that_it_has_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model")
    past_the_cache(monkeypatch)
    engine = engine_of(folder, placement=FILES)
    assert set(opened(folder)) == {str(folder / "model.safetensors")}
    engine.step(tokens(0))
    engine.close()
    assert opened(folder) == []
    found = built(folder)
    found.model.lm_head.weight.requires_grad_(True)
    found.model.requires_grad_(True)
    with pytest.raises(ConfigError, match="no parameter is frozen"):
        Engine(found.model, fill=found.fill, placement=FILES)
    found.close()
    assert opened(folder) == [], "of an engine that was refused"


def change(how: str, file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # change a weight in the last tensor
    if how == "written":
        with file.open("r+b") as stream:
            stream.seek(len(data) - 1)
            stream.write(data[-1:])
    elif how == "replaced":
        other = file.with_suffix(".new")
        other.write_bytes(data)
        other.replace(file)
    elif how == "removed":
        file.unlink()
    else:
        os.truncate(file, len(data) // 2)


SAID = {
    "written": "was written to",
    "replaced": "was replaced by another file",
    "removed": "cannot be accessed any more .*ENOENT",
    "cut": r"had \d+ bytes and now has \d+",
}


@pytest.mark.parametrize(("how", "by"), quick(zip(SAID, ["cache", "disk"] * 2, strict=True), [("cut", "disk")]))
def test_no_step_is_made_with_files_that_change(
    how: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file changes during a forward: earlier reads are good, and later reads are not used."""
    folder = saved(tmp_path / "model")
    if by == "disk":
        past_the_cache(monkeypatch)
    engine = engine_of(folder, placement=FILES, prefetch=0)
    engine.step(tokens(0))
    names = [name for name, parameter in engine.model.named_parameters() if parameter.requires_grad]
    before = {name: value.clone() for name, value in engine.edit(names)}
    layer: Any = engine.model.get_submodule("model.layers.1")
    handle = layer.register_forward_pre_hook(lambda *_: change(how, folder / "model.safetensors") and None)
    with pytest.raises(DiskError, match=f"{folder}/model.safetensors {SAID[how]}.*--offload.parameters cpu"):
        engine.step(tokens(1))
    handle.remove()
    with pytest.raises(DiskError, match=SAID[how]):
        engine.step(tokens(1))
    assert_same({name: value.clone() for name, value in engine.edit(names)}, before)
    engine.close()


def test_what_cannot_be_is_refused() -> None:
    model = build(llama)
    with pytest.raises(ConfigError, match="no parameter is frozen.*--offload.parameters cpu"):
        Engine(model, placement=FILES)
    model.lm_head.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="from no model files.*--offload.parameters cpu"):
        Engine(model, placement=FILES)
    with pytest.raises(ConfigError, match="frozen parameter lm_head.weight cannot be read directly"):
        Engine(model, placement=FILES, fill=lambda _name, _module: None)
    with pytest.raises(ConfigError, match="offload.optimizer is 'files'"):
        Placement(optimizer="files")
    with pytest.raises(ConfigError, match="offload.optimizer is device, but offload.parameters is files"):
        Placement(parameters="files", optimizer="device")


def test_a_step_is_foretold_by_what_it_reads() -> None:
    """Units take 1 s to read, before the forward and again before the backward, and less to compute."""
    numel, depth = 4096, 6
    infos = [ParameterInfo(n, f"w{n}", (numel,), False, "fp32", False) for n in range(depth)]
    regions = build_regions(infos, {f"unit {n}": [n] for n in range(depth)}, [()])
    residence = Residence({region.index: in_files(region, numel // 2) for region in regions})
    plan = SimulatedPlan(regions, Settings(), residence, 0, 2 * 4 * numel, 1, 2)
    seconds = {"nvme_read": lambda num_bytes: num_bytes / (4 * numel)}
    found = simulate([SimulatedCall((region,), 0.1, 0.1) for region in regions], plan, seconds, num_steps=8)
    assert found.busy_s["nvme_read"] == pytest.approx(2 * depth - 4), "two are there still where the order turns"
    assert found.seconds == pytest.approx(found.busy_s["nvme_read"], abs=0.5)
