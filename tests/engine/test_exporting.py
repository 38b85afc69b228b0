"""An export equals the Hugging Face folder it came from: on any tier, over ranks, in shards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from offload import Engine, Placement
from offload.app.config.sections import ModelSection
from offload.app.hf import tensor_writer
from offload.app.hf.models import BuiltModel, build_model
from offload.app.hf.names import CannotStream
from offload.app.hf.tensor_writer import TensorFileWriter
from offload.distributed.joining import open_comm
from offload.errors import ConfigError, DiskError
from offload.files import safetensors_file
from offload.tiers import values
from offload.tiers.values import Values
from tests.engine.compare import same_bits
from tests.engine.families import build, llama, mixtral, tokens
from tests.engine.inside import parts_of
from tests.engine.ranks import run
from tests.engine.ranks_child import CASES, numbers, opened, share, small_tiles

ON_DISK: dict[str, Any] = dict.fromkeys(("parameters", "optimizer", "gradients"), "nvme")


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Read and write even small parameters in many pieces, over many tiles."""
    for module in (safetensors_file, tensor_writer):
        monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(values, "_PART", 700)
    with small_tiles():
        yield


def source(folder: Path, make: Any, dtype: torch.dtype = torch.bfloat16) -> Path:
    build(make).to(dtype).save_pretrained(folder / "given")
    return folder / "given"


def taken(folder: Path) -> BuiltModel:
    return build_model(ModelSection(path=str(folder)), seed=0)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def differing(one: Path, other: Path) -> list[str]:
    wanted, found = tensors(one), tensors(other)
    return [n for n in wanted.keys() | found.keys() if n not in wanted or not same_bits(found[n], wanted[n])]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_states_on_disk_are_exported_in_shards(dtype: torch.dtype, tmp_path: Path, small_pieces: None) -> None:
    """Break: count elements from the start of the parameter, not of the piece."""
    given = source(tmp_path, mixtral, dtype)
    placement = Placement(**ON_DISK, nvme_dir=str(tmp_path))
    built = taken(given)
    engine = Engine(built.model, precision="bf16", placement=placement, fill=built.fill)
    before = numbers(engine.counters)
    engine.export(tmp_path / "out", dtype=dtype, shard_bytes=30_000)
    assert numbers(engine.counters) == before
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert differing(given, tmp_path / "out") == []
    engine.close()


def test_the_masters_are_exported_with_what_was_trained(tmp_path: Path) -> None:
    engine = Engine(build(llama), precision="bf16")
    engine.step(tokens())
    engine.export(tmp_path / "fp32", dtype=torch.float32)
    engine.export(tmp_path / "bf16", dtype=torch.bfloat16)
    engine.export(tmp_path / "own")
    engine.export(tmp_path / "fp16", dtype=torch.float16)
    masters, half = tensors(tmp_path / "fp32"), tensors(tmp_path / "fp16")
    for name, value in engine.named_parameters():
        assert same_bits(masters[name], value), name
        assert same_bits(half[name], value.half()), name
    assert differing(tmp_path / "bf16", tmp_path / "own") == []
    with pytest.raises(ConfigError, match="int8"):
        engine.export(tmp_path / "int8", dtype=torch.int8)


def test_files_come_along_and_only_an_earlier_export_gives_way(tmp_path: Path) -> None:
    engine, out = Engine(build(llama)), tmp_path / "out"
    engine.export(out, files={"tokenizer.json": b"{}"})
    assert (out / "tokenizer.json").read_text() == "{}"
    with pytest.raises(ConfigError, match="exists"):
        engine.export(out)
    engine.export(out, replace=True)
    assert not (out / "tokenizer.json").exists()
    engine.step(tokens())


def test_a_model_that_cannot_be_written_by_parts_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CannotStream("other rules")

    engine = Engine(build(llama))
    monkeypatch.setattr("offload.app.hf.write.write_model", refuse)
    with pytest.raises(CannotStream, match="other rules"):
        engine.export(tmp_path / "out")
    engine.step(tokens())


class Tied(nn.Module):
    """One table, resident for one unit and streamed for another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.blocks[0].table = self.embed.weight


def test_a_tied_weight_with_two_homes_is_written_once(tmp_path: Path) -> None:
    engine = Engine(build(Tied))
    assert {unit.resident for unit in parts_of(engine).units} == {True, False}
    engine.export(tmp_path / "out")
    assert sorted(tensors(tmp_path / "out")) == sorted(name for name, _ in engine.named_parameters())
    engine.close(restore=True)


def exported(given: str, folder: str, zero_stage: int, on_disk: bool) -> int:
    """Load a folder and export twice, as fp32 masters and in the device dtype, in small pieces. Return the number of
    pieces read by this rank.
    """
    num_read = 0
    real = Values.read_range

    def read_range(self: Values, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal num_read
        num_read += 1
        return real(self, *args, **options)

    placement = Placement(**ON_DISK, nvme_dir=folder) if on_disk else None
    with open_comm() as comm, small_tiles(), pytest.MonkeyPatch.context() as patch:
        for module in (safetensors_file, tensor_writer):
            patch.setattr(module, "PIECE_BYTES", 4096)
        patch.setattr(Values, "read_range", read_range)
        built = build_model(ModelSection(path=given), seed=0)
        engine = Engine(
            built.model, precision="bf16", zero_stage=zero_stage, placement=placement, fill=built.fill, comm=comm
        )
        built.close()
        engine.export(Path(folder) / "fp32", dtype=torch.float32, shard_bytes=60_000)
        engine.export(Path(folder) / "own")
        engine.step(tokens())
        engine.close()
    return num_read


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "on_disk"), [(0, False), (2, False), (3, True)])
def test_ranks_write_what_they_read(stage: int, on_disk: bool, tmp_path: Path) -> None:
    """Break: on other ranks, read the device copy while rank 0 reads masters."""
    given = source(tmp_path, mixtral, torch.float32)
    counts = run(2, exported, given=str(given), folder=str(tmp_path), zero_stage=stage, on_disk=on_disk)
    assert differing(given, tmp_path / "fp32") == []
    rounded = {name: value.bfloat16() for name, value in tensors(given).items()}
    assert all(
        (value - rounded[name]).abs().max() <= 2**-7 * rounded[name].abs().max()
        for name, value in tensors(tmp_path / "own").items()
    )
    assert counts[0] == counts[1], "both read the same pieces"
    assert counts[0] > 0


def refused(way: str, path: str) -> tuple[str, str]:
    """Export while rank 0 cannot write. Return (error class, message) after one more step."""

    def full(self: TensorFileWriter, *_: Any) -> None:
        raise DiskError(f"{self.path} cannot be written: No space left on device.", 28, self.path)

    def broken(self: TensorFileWriter, *_: Any) -> None:
        raise RuntimeError("a bug")

    told = "", ""
    with open_comm() as comm, pytest.MonkeyPatch.context() as patch:
        engine = opened(comm, CASES["plain"])
        if comm.rank == 0 and way == "exists":
            Path(path).mkdir()
            (Path(path) / "notes").touch()
        elif comm.rank == 0:
            patch.setattr(TensorFileWriter, "_write", full if way == "full disk" else broken)
        try:
            engine.export(path)
        except Exception as error:
            told = type(error).__name__, str(error)
        patch.undo()
        engine.step(share(CASES["plain"].batch(0, 4), (2, 2), comm.rank))
        engine.close()
    return told


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exists", "full disk", "bug"])
def test_where_rank_0_cannot_write_all_ranks_fail_and_train_on(way: str, tmp_path: Path) -> None:
    """Break: leave the export without a report to the other ranks."""
    errors = run(2, refused, way=way, path=str(tmp_path / "out"))
    kind, words = {
        "exists": ("ConfigError", "exists"),
        "full disk": ("DiskError", "No space left"),
        "bug": ("OffloadError", "failed: RuntimeError: a bug"),
    }[way]
    assert errors[0][0] == kind
    assert words in errors[0][1]
    assert errors[1] == errors[0]
    assert way == "exists" or not list(tmp_path.iterdir())
