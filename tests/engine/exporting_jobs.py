"""What a rank does in the tests of exports over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offload import Engine, Placement
from offload.config.sections import ModelSection
from offload.distributed.joining import open_comm
from offload.errors import DiskError
from offload.hf import safetensors_file as tensor_file
from offload.hf.models import build_model
from offload.tiers.values import Values
from tests.engine.families import tokens
from tests.engine.ranks_child import CASES, opened, share, small_tiles

ON_DISK: dict[str, Any] = dict.fromkeys(("parameters", "optimizer", "gradients"), "nvme")


def exported(given: str, folder: str, zero_stage: int, on_disk: bool) -> int:
    """Take a folder over and write it twice, from the masters and as the device uses it, in small pieces; return how
    many pieces this rank has read.
    """
    num_read = 0
    real = Values.read_range

    def read_range(self: Values, *args: Any, **options: Any) -> torch.Tensor:
        nonlocal num_read
        num_read += 1
        return real(self, *args, **options)

    placement = Placement(**ON_DISK, nvme_dir=folder) if on_disk else None
    with open_comm() as comm, small_tiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "_PIECE_BYTES", 4096)
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


def refused(way: str, path: str) -> tuple[str, str]:
    """Export where rank 0 cannot write; return the error, after which training goes on."""

    def full(self: tensor_file.TensorFileWriter, *_: Any) -> None:
        raise DiskError(f"{self.path} cannot be written: No space left on device.", 28, self.path)

    def broken(self: tensor_file.TensorFileWriter, *_: Any) -> None:
        raise RuntimeError("a bug")

    told = "", ""
    with open_comm() as comm, pytest.MonkeyPatch.context() as patch:
        engine = opened(comm, CASES["plain"])
        if comm.rank == 0 and way == "exists":
            Path(path).mkdir()
            (Path(path) / "notes").touch()
        elif comm.rank == 0:
            patch.setattr(tensor_file.TensorFileWriter, "_write", full if way == "full disk" else broken)
        try:
            engine.export(path)
        except Exception as error:
            told = type(error).__name__, str(error)
        patch.undo()
        engine.step(share(CASES["plain"].batch(0, 4), (2, 2), comm.rank))
        engine.close()
    return told
