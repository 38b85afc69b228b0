"""An export equals the Hugging Face folder it came from: on any tier, over ranks, in shards. Close restores a model."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from offload import Engine, Placement
from offload.app.config.sections import ModelSection
from offload.app.hf import tensor_writer
from offload.app.hf.models import build_model
from offload.app.hf.tensor_writer import TensorFileWriter
from offload.app.stored_model import export_stored
from offload.distributed.joining import open_comm
from offload.errors import ConfigError, DiskError, OffloadError
from offload.files import safetensors_file
from offload.tiers import values
from offload.tiers.values import Values
from tests.cases.models import build, gemma2, llama, mixtral, share, tokens
from tests.cases.run import small
from tests.engine.compare import assert_same, rounded, same_bits, step_of, weights
from tests.engine.device import NO_LSTM
from tests.engine.handmade import MODELS, Recurrent, Stack, cross_entropy, words
from tests.engine.inside import parts_of
from tests.engine.ranks import run
from tests.engine.ranks_child import CASES, numbers, opened

ON_DISK: dict[str, Any] = dict.fromkeys(("parameters", "optimizer", "gradients"), "nvme")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def differing(one: Path, other: Path) -> list[str]:
    wanted, found = tensors(one), tensors(other)
    return [n for n in wanted.keys() | found.keys() if n not in wanted or not same_bits(found[n], wanted[n])]


FILES: list[tuple[Any, str]] = [
    ({"../outside.txt": b""}, "no name of a file in the {} folder"),
    ({"part/of/inside.txt": b""}, "no name of a file in the {} folder"),
    ({"/outside.txt": b""}, "no name of a file in the {} folder"),
    ({"part/../../outside.txt": b""}, "no name of a file in the {} folder"),
    ({1: b""}, "files has 1, which is no name"),
    ({"long" * 64: b""}, "a name of 256 bytes, and a file system takes at most 255"),
    ({"notes.txt": "text"}, "files has str under 'notes.txt'; give bytes, such as text.encode"),
    ("notes.txt", "files is str; it must be a mapping of file names to bytes"),
    ({"config.json": b"{{}}"}, "files has 'config.json', which the {} folder gets from the model"),
]


def test_wrong_files_and_sizes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Break: check names of files only."""
    with Engine(build(llama)) as engine:
        for files, said in FILES:
            with pytest.raises(ConfigError, match=said.format("export")):
                engine.export(tmp_path / "export", files=files)
            with pytest.raises(ConfigError, match=said.format("checkpoint")):
                engine.save_checkpoint(tmp_path / "checkpoint", files=files)
        with pytest.raises(ConfigError, match="no name of a file in the checkpoint folder"):
            engine.save_checkpoint(tmp_path / "checkpoint", files={"part/inside.txt": b""})
        for size in (0, -1, 1.5, True, "5GB"):
            with pytest.raises(ConfigError, match=r"shard_bytes is .*; it must be a whole number of bytes"):
                engine.export(tmp_path / "export", shard_bytes=size)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"'model.safetensors.index.json', which the export folder gets"):
            engine.export(tmp_path / "export", files={"model.safetensors.index.json": b""})
        for name in ("rank-0.bin", "manifest.json"):
            with pytest.raises(ConfigError, match="which the checkpoint folder gets"):
                engine.save_checkpoint(tmp_path / "checkpoint", files={name: b""})
    assert not list(tmp_path.iterdir())


def test_a_folder_is_a_path_and_a_link_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break: replace a link by the checkpoint."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "circle").symlink_to("circle")
    for name in ("link", "other"):
        (tmp_path / name).symlink_to("link" if name == "other" else "disk")
    with Engine(build(llama)) as engine:
        wrong = [None, 5, b"folder", "zero\0", tmp_path / "circle"]
        for folder in wrong:
            for call in (engine.export, engine.save_checkpoint, engine.load_checkpoint):
                with pytest.raises(ConfigError, match=r"the folder (is|.* is a link)|no path has a zero"):
                    call(folder)
        for name in ("link", "other"):
            engine.save_checkpoint(tmp_path / name)
            engine.load_checkpoint(tmp_path / name)
            assert (tmp_path / name).is_symlink()
        assert (tmp_path / "disk" / "manifest.json").is_file()
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        with pytest.raises(ConfigError, match="the folder export is relative, and the working directory is gone"):
            engine.export("export")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["circle", "disk", "link", "other"]


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
    """Load a folder and export twice, as fp32 masters and in the device dtype, in small pieces over many tiles. Return
    the number of pieces read by this rank.
    """
    num_read = 0
    real = Values.read_range

    def read_range(self: Values, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal num_read
        num_read += 1
        return real(self, *args, **options)

    placement = Placement(**ON_DISK, nvme_dir=folder) if on_disk else None
    with open_comm() as comm, small(), pytest.MonkeyPatch.context() as patch:
        for module in (safetensors_file, tensor_writer):
            patch.setattr(module, "PIECE_BYTES", 1000)
        patch.setattr(values, "_PART", 700)
        patch.setattr(Values, "read_range", read_range)
        built = build_model(ModelSection(path=given), seed=0)
        engine = Engine(
            built.model, precision="bf16", zero_stage=zero_stage, placement=placement, fill=built.fill, comm=comm
        )
        built.close()
        before = numbers(engine.counters)
        engine.export(Path(folder) / "fp32", dtype=torch.float32, shard_bytes=60_000)
        engine.export(Path(folder) / "own", shard_bytes=30_000)
        assert comm.size > 1 or numbers(engine.counters) == before
        engine.step(tokens())
        engine.close()
    return num_read


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "stage", "on_disk", "dtype"),
    [
        (1, 0, True, torch.float32),
        (1, 0, True, torch.bfloat16),
        (2, 0, False, torch.float32),
        (2, 2, False, torch.float32),
        (2, 3, True, torch.float32),
    ],
)
def test_what_was_read_is_written_in_shards(
    size: int, stage: int, on_disk: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Break: count elements from the start of the parameter, not of the piece; on other ranks, read the device copy
    while rank 0 reads masters.
    """
    given = tmp_path / "given"
    build(mixtral).to(dtype).save_pretrained(given)
    counts = run(size, exported, given=str(given), folder=str(tmp_path), zero_stage=stage, on_disk=on_disk)
    assert differing(given, tmp_path / ("own" if dtype == torch.bfloat16 else "fp32")) == []
    assert len(list((tmp_path / "own").glob("*.safetensors"))) > 2
    rounded = {name: value.bfloat16() for name, value in tensors(given).items()}
    assert all(
        (value - rounded[name]).abs().max() <= 2**-7 * rounded[name].abs().max()
        for name, value in tensors(tmp_path / "own").items()
    )
    assert counts == [counts[0]] * size, "both read the same pieces"
    assert counts[0] > 0


def refused(way: str, path: str) -> tuple[str, str]:
    """Export while rank 0 cannot write. Return (error class, message) after one more step."""

    def fail(self: TensorFileWriter, *_: Any) -> None:
        if way == "bug":
            raise RuntimeError("a bug")
        raise DiskError(f"{self.path} cannot be written: No space left on device.", 28, self.path)

    told = "", ""
    with open_comm() as comm, pytest.MonkeyPatch.context() as patch:
        engine = opened(comm, CASES["plain"])
        if comm.rank == 0 and way == "exists":
            Path(path).mkdir()
            (Path(path) / "notes").touch()
        elif comm.rank == 0:
            patch.setattr(TensorFileWriter, "_write", fail)
        try:
            engine.export(path)
        except Exception as error:
            told = type(error).__name__, str(error)
        patch.undo()
        engine.step(share(CASES["plain"].batch(0, 4), (2, 2), comm.rank))
        engine.close()
    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "kind", "words"),
    [
        ("exists", "ConfigError", "exists"),
        ("full disk", "DiskError", "No space left"),
        ("bug", "OffloadError", "failed: RuntimeError: a bug"),
    ],
)
def test_where_rank_0_cannot_write_all_ranks_fail_and_train_on(way: str, kind: str, words: str, tmp_path: Path) -> None:
    """Break: leave the export without a report to the other ranks."""
    errors = run(2, refused, way=way, path=str(tmp_path / "out"))
    assert errors[0][0] == kind
    assert words in errors[0][1]
    assert errors[1] == errors[0]
    assert way == "exists" or not list(tmp_path.iterdir())


# -- one rounding ------------------------------------------------------------------------------------------------


def halves(value: torch.Tensor) -> torch.Tensor:
    """Return fp32 numbers half way between two neighbours in bf16, with even and odd ones below."""
    return (value.contiguous().view(torch.int32) | 0x8000).view(torch.float32)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_all_ways_to_16_bits_round_masters_alike(precision: str, tmp_path: Path) -> None:
    """As the forward computes with them: what a script reads, what is written, and what it gets back."""
    engine = Engine(build(llama).to(torch.bfloat16), precision=precision)
    for _, value in engine.edit():
        value.copy_(halves(value))
    given = {name: value.bfloat16() for name, value in weights(engine).items()}
    if precision == "bf16":
        shown = {name: p.detach().cpu() for name, p in engine.model.named_parameters()}
        assert not any(same_bits(shown[name], value) for name, value in given.items()), "both roundings are alike here"
        given = {name: rounded(value, torch.bfloat16) for name, value in weights(engine).items()}
        assert_same(shown, given)
    ways: dict[str, dict[str, torch.Tensor]] = {"as given": dict(engine.named_parameters(as_given=True)), "buckets": {}}
    for bucket in engine.weight_buckets(5000, torch.bfloat16):
        ways["buckets"] |= bucket
    engine.export(tmp_path / "export", dtype=torch.bfloat16)
    ways["export"] = load_file(tmp_path / "export/model.safetensors")
    engine.save_checkpoint(tmp_path / "saved")
    export_stored(tmp_path / "saved", tmp_path / "stored", torch.bfloat16)
    ways["export of a checkpoint"] = load_file(tmp_path / "stored/model.safetensors")
    engine.close(restore=True)
    ways["close"] = {name: p.detach().cpu() for name, p in engine.model.named_parameters()}
    for way, found in ways.items():
        assert not [name for name in found if not same_bits(found[name], given[name])], way


# -- a closed engine -----------------------------------------------------------------------------------------

Maker = Callable[[], nn.Module]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "dtype", "precision"),
    [(llama, torch.float16, "fp32"), (gemma2, torch.bfloat16, "bf16"), (gemma2, torch.float32, "fp32")],
)
def test_close_gives_the_model_back(make: Maker, dtype: torch.dtype, precision: str) -> None:
    model = build(make).to(dtype)
    shapes = {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    signature = inspect.signature(model.model.layers[0].forward)
    engine = Engine(model, precision=precision)
    assert inspect.signature(model.model.layers[0].forward) == signature, "the signature stays readable"
    engine.step(tokens())
    masters = weights(engine)
    engine.close(restore=True)
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()} == shapes
    for name, parameter in model.named_parameters():
        assert same_bits(parameter.detach().cpu(), rounded(masters[name], dtype)), name
    assert model.config.use_cache is True
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    if make is gemma2:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    model(**tokens()).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("model", [*MODELS[::3], pytest.param(Recurrent, marks=NO_LSTM)])
def test_a_restored_model_trains_on_like_one_that_never_streamed(model: type[nn.Module]) -> None:
    """Without a step, the restored weights are equal bit for bit, and a second engine takes them over."""
    plain, given = build(model), build(model)
    engine = Engine(given)
    engine.evaluate(words(), loss_fn=cross_entropy)
    engine.close(restore=True)
    engine.close()
    engine.close(restore=True)  # a second close is harmless
    assert_same(dict(given.named_parameters()), dict(plain.named_parameters()))
    again, fresh = Engine(given), Engine(plain)
    assert step_of(again, words(), cross_entropy, seed=0) == step_of(fresh, words(), cross_entropy, seed=0)


USES: dict[str, Callable[[Engine, Path], Any]] = {
    "step": lambda engine, path: engine.step(tokens()),
    "evaluate": lambda engine, path: engine.evaluate(tokens()),
    "named_parameters": lambda engine, path: list(engine.named_parameters()),
    "backward": lambda engine, path: engine.backward(torch.zeros((), requires_grad=True)),
    "update": lambda engine, path: engine.update(),
    "export": lambda engine, path: engine.export(path / "hf"),
    "save_checkpoint": lambda engine, path: engine.save_checkpoint(path / "hf"),
    "load_checkpoint": lambda engine, path: engine.load_checkpoint(path / "hf"),
    "resolve_clip": lambda engine, path: engine.resolve_clip(1),
    "with": lambda engine, path: engine.__enter__(),
}


@pytest.mark.parametrize("restore", [True, False])
def test_a_closed_engine_says_so(restore: bool, tmp_path: Path) -> None:
    engine = Engine(build(llama))
    engine.close(restore)
    for use in USES.values():
        with pytest.raises(OffloadError, match="closed"):
            use(engine, tmp_path)
    assert not (tmp_path / "hf").exists()


@contextmanager
def without_finalizers() -> Iterator[None]:
    """Assert the absence of `weakref.finalize` callbacks of the package in the block."""
    for _ in range(5):  # what earlier tests left; a finalizer may leave more
        if not gc.collect():
            break
    ran = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is weakref.finalize.__call__.__code__:
            info = weakref.finalize._registry.get(frame.f_locals["self"])
            if info is not None and info.func.__module__.startswith("offload"):
                ran.append(info.func)

    sys.setprofile(note)
    try:
        yield
        gc.collect()
    finally:
        sys.setprofile(None)
    assert not ran


def test_no_finalizer_is_left_to_run_once_an_engine_is_closed(tmp_path: Path) -> None:
    """A finalizer swallows exceptions: a Ctrl-C while the garbage collector frees the engine would be lost."""
    nvme = Placement(parameters="nvme", optimizer="nvme", nvme_dir=tmp_path)
    engine = Engine(build(Stack), placement=nvme)
    engine.step(words(), loss_fn=cross_entropy)
    with without_finalizers():
        engine.save_checkpoint(tmp_path / "saved")
    engine.close()
    with without_finalizers():
        del engine
