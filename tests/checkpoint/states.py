"""Small model states as a function of the step, with functions to save and check them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch

from offload.app.checkpoint_folder import Checkpoints
from offload.checkpoint.manifest import Contents, Entry
from offload.checkpoint.reader import Reader
from offload.checkpoint.writer import Save, Writer
from tests.engine.compare import same_bits

CHUNK_BYTES = 4096
SPLIT = {"weights": torch.bfloat16, "low": torch.int16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
PLAIN = {"weights": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
CONTENTS: Contents = {
    "model.embed.weight": Entry((100, 64), SPLIT),  # each rank's part contains whole chunks
    "model.layers.0.mlp.weight": Entry((33, 31), SPLIT),
    "model.norm.weight": Entry((7,), PLAIN),
    "scale": Entry((), PLAIN),
    "nothing": Entry((0, 4), PLAIN),
    "frozen": Entry((129,), {"weights": torch.bfloat16}),
}


def planes(contents: Contents, step: int) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (parameter name, plane, flat values) for all states. Every bit pattern can occur, including NaN."""
    for name, entry in contents.items():
        for plane, dtype in entry.planes.items():
            seed = int.from_bytes(hashlib.blake2b(f"{step} {name} {plane}".encode(), digest_size=7).digest(), "big")
            bits = torch.randint(
                0,
                256,
                (entry.count(plane) * dtype.itemsize,),
                dtype=torch.uint8,
                generator=torch.Generator().manual_seed(seed),
            )
            yield name, plane, bits.view(dtype)


def save(
    checkpoints: Checkpoints, step: int, *, contents: Contents = CONTENTS, world_size: int = 2, keep: int | None = None
) -> Path:
    """Save one step with a part of every parameter from each rank."""
    with Save(checkpoints.target(step)) as made:
        made.attach("config.json", attached(step))
        parts = []
        for rank in range(world_size):
            with Writer(made.path, rank, contents, chunk_bytes=CHUNK_BYTES) as writer:
                for name, plane, values in planes(contents, step):
                    begin, end = (len(values) * each // world_size for each in (rank, rank + 1))
                    writer.write(name, plane, begin, values[begin:end])
                parts.append(writer.finish())
        folder = made.commit(contents, parts, {"step": step})
    checkpoints.register(folder, keep)
    return folder


def attached(step: int) -> bytes:
    """Return the attached file."""
    return f'{{"step": {step}}}\n'.encode() * 300


def check(folder: Path, step: int, contents: Contents = CONTENTS) -> None:
    """Check that a checkpoint holds the step, bit for bit. Raises CheckpointError."""
    with Reader(folder) as reader:
        assert reader.meta == {"step": step}
        assert reader.contents == contents
        assert {name: path.read_bytes() for name, path in reader.attached.items()} == {"config.json": attached(step)}
        for name, plane, values in planes(contents, step):
            out = torch.zeros_like(values)
            reader.read(name, plane, 0, out)
            assert same_bits(out, values), f"{plane} of {name} differs"


def latest(checkpoints: Checkpoints) -> Path | None:
    """Return the folder named in the file `latest`. None: no such file."""
    named = checkpoints.path / "latest"
    return checkpoints.path / named.read_text(encoding="utf-8").strip() if named.exists() else None
