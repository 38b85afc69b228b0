"""Saving and loading a checkpoint with about 2 GiB of states, against fio with one file of equal size.

python benchmarks/checkpoint_bandwidth.py --dir FOLDER > benchmarks/results/checkpoint.json     # minutes; needs fio

A save ends after fsync, like fio's pass. A load starts with an empty page cache and ends with all states in place, also
on the nvme tier. No work is pending at the start or end. Checkpoints bypass the page cache, like fio with O_DIRECT; fio
is also measured through the cache.

With states on nvme, a save also reads from the target disk, and a load also writes to the source disk. There fio reads
one file and writes another at once: twice the bytes, with the rate of one file until both are done. All contenders
alternate on one disk; a ratio is the median over rounds of two rates measured right after each other. A save during
training copies into memory first; its rate counts only the pause in training.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offload import Engine, Placement
from offload.checkpoint.manifest import CHUNK_BYTES
from offload.extras.tools.benches.blocks import rotate
from offload.extras.tools.benches.nvme import run_fio
from offload.extras.tools.benches.report import BenchmarkOutput, Result

SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 13, "vocab_size": 8192}
DIRECT = ["--ioengine=io_uring", "--iodepth=4", "--direct=1"]
FIO = {"fio, buffered": ["--ioengine=psync"], "fio, O_DIRECT": DIRECT}
BOTH = "fio, O_DIRECT, one file read and one written"
COPY = "save while training goes on"


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="folder on the disk to measure")
    parser.add_argument("--pairs", type=int, default=9, help="rounds, after one to warm up (default %(default)s)")
    arguments = parser.parse_args()
    fio = shutil.which("fio")
    if fio is None:
        sys.exit("fio is not installed (on Debian and Ubuntu: apt-get install fio)")
    results: list[Result] = []
    for tier in ("cpu", "nvme"):
        with tempfile.TemporaryDirectory(dir=arguments.dir) as inside:
            results += measure(tier, Path(inside), fio, arguments.pairs)
    print(BenchmarkOutput(results).document())


def measure(tier: str, folder: Path, fio: str, num_pairs: int) -> list[Result]:
    """Return save and load rates of an engine with states on this tier, and fio's rates."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    placement = Placement(parameters=tier, optimizer=tier, gradients=tier, nvme_dir=str(folder))
    with closing(Engine(model, placement=placement, precision="bf16")) as engine:
        ids = torch.randint(0, SHAPE["vocab_size"], (1, 32))
        engine.step({"input_ids": ids, "labels": ids})  # for moments other than zero
        path, other, source = folder / "checkpoint", folder / "file", folder / "source"
        engine.save_checkpoint(path)
        engine.finish()
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
        shutil.rmtree(path)
        size = num_bytes // CHUNK_BYTES * CHUNK_BYTES

        def of_fio(options: list[str], **files: Path) -> float:
            """Return the rate of one file, by direction, with all files moved at once."""
            command = [fio, "--output-format=json", f"--bs={CHUNK_BYTES}", f"--size={size}", "--fallocate=none"]
            command += ["--end_fsync=1", *options]
            for direction, file in files.items():
                command += [f"--name={direction}", f"--filename={file}", f"--rw={direction}"]
            done = run_fio(command)
            return done.num_bytes / len(files) / done.seconds / 1e9

        def pass_of(work: Callable[[Path], object]) -> float:
            engine.finish()
            begin = time.perf_counter()
            work(path)
            engine.finish()
            return num_bytes / (time.perf_counter() - begin) / 1e9

        def stall() -> float:
            """Save during training; return the rate from the training pause."""
            engine.finish()
            begin = time.perf_counter()
            with engine.begin_checkpoint(path) as saving:
                seconds = time.perf_counter() - begin
                saving.finish()
            return num_bytes / seconds / 1e9

        if tier == "nvme":
            of_fio(DIRECT, write=source)
        rounds: list[dict[str, float]] = []
        for number in range(num_pairs + 1):
            rates = {}
            passes: list[tuple[str, Callable[[], float]]] = [("save", lambda: pass_of(engine.save_checkpoint))]
            passes.append((COPY, stall))
            passes += [(f"{name}: write", lambda more=more: of_fio(more, write=other)) for name, more in FIO.items()]
            if tier == "nvme":
                passes.append((f"{BOTH}: write", lambda: of_fio(DIRECT, read=source, write=other)))
            for name, work in rotate(passes, number):
                forget([*path.parent.glob("checkpoint/*"), other])
                if name.endswith("write"):
                    other.unlink(missing_ok=True)  # ours is a new file too
                rates[name] = work()
            passes = [("load", lambda: pass_of(engine.load_checkpoint))]
            passes += [(f"{name}: read", lambda more=more: of_fio(more, read=other)) for name, more in FIO.items()]
            if tier == "nvme":  # the target exists before, like our records
                passes.append((f"{BOTH}: read", lambda: of_fio(DIRECT, read=other, write=source)))
            for name, work in rotate(passes, number):
                forget([*path.iterdir(), other])
                rates[name] = work()
            shutil.rmtree(path)
            other.unlink()
            print(f"{tier}, {number} of {num_pairs}:", json.dumps(rates), file=sys.stderr, flush=True)
            rounds.append(rates)
    return summarise(tier, num_bytes, rounds[1:])


def forget(paths: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        if path.exists():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def summarise(tier: str, num_bytes: int, rounds: list[dict[str, float]]) -> list[Result]:
    """Return medians, and for compared results also the ratio quartiles."""
    results = []
    for name in rounds[0]:
        rates = [each[name] for each in rounds]
        value = round(statistics.median(rates), 3)
        details = {"bytes": num_bytes, "pairs": len(rates), "all": [round(rate, 3) for rate in rates]}
        if name not in ("save", COPY, "load"):
            results.append(Result(f"{tier}, {name}", value, "GB/s", details=details))
            continue
        for reference in rounds[0]:
            if not reference.endswith("read" if name == "load" else "write"):
                continue
            ratios = [each[name] / each[reference] for each in rounds]
            low, middle, high = (round(each, 3) for each in statistics.quantiles(ratios, n=4, method="inclusive"))
            more = {"lower_quartile": low, "upper_quartile": high, **details}
            results.append(Result(f"{tier}, {name}", value, "GB/s", f"{tier}, {reference}", middle, more))
        seconds = statistics.median(num_bytes / rate / 1e9 for rate in rates)
        what = "training stands still for it" if name == COPY else "takes"
        results.append(Result(f"{tier}, {name}: {what}", round(seconds, 2), "s"))
    return results


if __name__ == "__main__":
    main()
