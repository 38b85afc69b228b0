"""Train tiny models in many configurations and compare hashes with those in tests/bits/bits.txt.

    python -m tests.bits [PATTERN ...] [--write]

PATTERN: shell patterns for names (default: all configurations). --write: write the hashes of this machine to the file.

A hash has three parts: losses and norms of all steps, final weights with the low halves, and checkpoint contents such
as moments. Hashes depend on the versions of torch and transformers and on the processor. Each file section is named by
a hash of plain PyTorch results, so a section is valid on every machine with equal plain results.
Configurations without a line for this machine are compared with the commit that wrote the file.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).parent / "bits.txt"
PATIENCE_S = 300
"""Seconds to wait for one reply."""
COMMON = {
    "OMP_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Variables that make torch compute the same bits on all processors with AVX2."""
_HEAD = """\
# Hashes of the runs in tests/cases/features.py, written by `python -m tests.bits --write`: losses and norms of five
# steps, final weights, and the contents of a checkpoint. A section is for machines with these versions, on which
# plain PyTorch computes the same bits ("plain").
"""
Sections = dict[str, dict[str, str]]
"""Hashes by name, per machine section."""


def read(text: str) -> Sections:
    """Parse the sections of a file."""
    found: Sections = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"\[(.*)\]", line):
            lines = found.setdefault(match[1], {})
        elif line and not line.startswith("#"):
            name, value = line.split()
            lines[name] = value
    return found


def written(sections: Sections, machine: str, hashes: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the file text with new hashes for one machine. names: all configurations, in file order.

    A configuration with a changed hash loses its lines in the other sections, because they are not measured again.
    """
    before = sections.get(machine, {})
    changed = {name for name, value in hashes.items() if before.get(name, value) != value}
    merged = {**before, **hashes}
    kept = {m: {n: v for n, v in lines.items() if n not in changed} for m, lines in sections.items() if m != machine}
    text = _HEAD
    for title, lines in {**kept, machine: merged}.items():
        text += f"\n[{title}]\n" + "".join(f"{name} {lines[name]}\n" for name in names if name in lines)
    return text


class Worker:
    """A process of tests/bits/worker.py over the `offload` package in a folder."""

    def __init__(self, tree: Path, log: Path) -> None:
        self._tree, self._log = tree, log
        self._begin()

    def _begin(self) -> None:
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.bits.worker", str(self._tree)],
                cwd=ROOT,
                env={**os.environ, **COMMON},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def ask(self, **job: Any) -> dict[str, Any]:
        """Send a job and return the reply. After the end of a process, a new one takes the next job."""
        if self._process.poll() is not None:
            self.close()
            self._begin()
            if "error" in (hello := self.reply()):
                return hello
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        return self.reply()

    def reply(self) -> dict[str, Any]:
        """Return the next reply. A dead or late process gives a reply with an `error`."""
        assert self._process.stdout is not None
        timer = threading.Timer(PATIENCE_S, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        is_late = timer.finished.is_set()
        timer.cancel()
        if line:
            return json.loads(line)
        self._process.wait()
        how = f"was killed: no reply in {PATIENCE_S} s" if is_late else "ended"
        return {"error": f"the process {how}:\n{self._log.read_text()[-3000:]}"}

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.terminate()
        self._process.wait()


class Bits:
    """Two processes that train configurations: single-rank ones in parallel, two-rank ones together."""

    def __init__(self, tree: Path, folder: Path) -> None:
        """tree: folder of `offload`. folder: for logs and rank checkpoints."""
        self._folder = folder
        self._workers = [Worker(tree, folder / f"worker-{number}") for number in range(2)]
        hello, _ = [worker.reply() for worker in self._workers]
        if "error" in hello:
            raise SystemExit(hello["error"])
        self.cases: dict[str, int] = hello["cases"]
        self.machine, self.core = hello["machine"], hello["core"]

    def run(self, names: Iterable[str], tell: Callable[[str, str], None]) -> dict[str, str]:
        """Train configurations. Return hashes or errors by name. tell: called with each result."""
        found: dict[str, str] = {}
        names = list(names)
        for name in (name for name in names if self.cases[name] > 1):
            found[name] = self._on_ranks(name)
            tell(name, found[name])
        single: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in (name for name in names if self.cases[name] == 1):
            single.put(name)

        def serve(worker: Worker) -> None:
            while True:
                try:
                    name = single.get_nowait()
                except queue.Empty:
                    return
                found[name] = _told(worker.ask(name=name))
                tell(name, found[name])

        _side_by_side(serve, self._workers)
        return found

    def _on_ranks(self, name: str) -> str:
        port, replies = free_port(), ["", ""]
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:

            def serve(rank: int) -> None:
                replies[rank] = _told(self._workers[rank].ask(name=name, rank=rank, port=port, folder=folder))

            _side_by_side(serve, range(2))
        errors = [reply for reply in replies if " " in reply]
        return errors[0] if errors else replies[0]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def _told(reply: Mapping[str, Any]) -> str:
    return reply["hash"] if "hash" in reply else f"failed: {reply['error']}"


def _side_by_side(function: Callable[[Any], None], arguments: Iterable[Any]) -> None:
    threads = [threading.Thread(target=function, args=[argument]) for argument in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- the parent --------------------------------------------------------------------------------------------------------


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout


def _shown(commit: str, path: str) -> str:
    """Return a file from a commit, or an empty string."""
    return _git("show", f"{commit}:{path}").decode() if _git("ls-tree", commit, path) else ""


def base() -> tuple[str, set[str]]:
    """Return the commit to compare with, and the configurations with permitted differences.

    The commit of the last file change has the bits in the file, on any machine. It is the result, without permitted
    differences. If the current code equals this commit, the parent is the result, and changed lines may differ.
    """
    path = str(FILE.relative_to(ROOT))
    commit = _git("log", "-1", "--format=%H", "--", path).decode().strip() or "HEAD"
    is_here = not _git("diff", "--stat", commit, "--", "offload", "csrc")
    if not is_here:
        return commit, set()
    now, before = (read(_shown(each, path)) for each in (commit, f"{commit}~1"))
    lines = {(m, n): v for m, section in before.items() for n, v in section.items()}
    changed = {n for m, section in now.items() for n, v in section.items() if lines.get((m, n), v) != v}
    return f"{commit}~1", changed


def tree_of(commit: str, folder: Path, core: str | None) -> Path:
    """Extract `offload` from a commit to a folder. Return the folder.

    The compiled kernels of this tree are copied if the sources are equal. Without them torch's kernels have the same
    bits.
    """
    archive = folder / "archive.tar"
    archive.write_bytes(_git("archive", commit, "offload"))
    tree = folder / "tree"
    shutil.unpack_archive(archive, tree, filter="data")
    same = not _git("diff", "--stat", commit, "--", "csrc", "CMakeLists.txt")
    if core is not None and same:
        shutil.copy(core, tree / "offload")
    return tree


# -- the command -------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument("--write", action="store_true", help="write the hashes of this machine to the file")
    asked = parser.parse_args(arguments)
    sections = read(FILE.read_text()) if FILE.exists() else {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bits-")))
        here = Bits(ROOT, folder)
        stack.callback(here.close)
        names = [n for n in here.cases if not asked.patterns or any(fnmatchcase(n, p) for p in asked.patterns)]
        if not names:
            parser.error(f"no configuration is called {' or '.join(asked.patterns)}")
        wanted = sections.get(here.machine, {})

        def tell(name: str, value: str) -> None:
            is_other = not asked.write and " " not in value and wanted.get(name, value) != value
            word = "  DIFFERS" if is_other else ""
            print(f"{name} {value}{word}", flush=True)

        found = here.run(names, tell)
        failed = {name: value for name, value in found.items() if " " in value}
        unknown: list[str] = []
        if asked.write:
            good = {name: value for name, value in found.items() if name not in failed}
            FILE.write_text(written(sections, here.machine, good, here.cases))
            print(f"{FILE}: {len(good)} configurations of [{here.machine}]")
        else:
            different = [n for n in names if n in wanted and n not in failed and found[n] != wanted[n]]
            lacking = [n for n in names if n not in wanted and n not in failed]
            if lacking:
                print(f"{FILE.name} has no line for {len(lacking)} of {len(names)} configurations on [{here.machine}]")
                try:
                    wanted |= _parents(here, lacking, folder)
                    different += [name for name in lacking if name in wanted and found[name] != wanted[name]]
                except subprocess.CalledProcessError as error:
                    print(f"and there is no commit to compare with: {error.stderr.decode().strip()}")
                    unknown = lacking
            for name in different:
                print(f"DIFFERS: {name}: {_which(found[name], wanted[name])}")
            if not different and not failed and not unknown:
                print(f"{len(names)} configurations: all bits are equal")
            unknown += different
        for name, value in failed.items():
            print(f"FAILED: {name}: {value}")
    return 1 if failed or unknown else 0


def _which(found: str, wanted: str) -> str:
    parts = zip(("losses", "weights", "states"), found.split("-"), wanted.split("-"), strict=True)
    return ", ".join(name for name, one, other in parts if one != other)


def _parents(here: Bits, names: list[str], folder: Path) -> dict[str, str]:
    """Run the commit of the last file change on this machine, and return the hashes.

    Only configurations known to the commit are included.
    """
    commit, allowed = base()
    tree = tree_of(commit, folder, here.core)
    print(f"comparing with commit {_git('log', '-1', '--format=%h %s', commit).decode().strip()}", flush=True)
    parent = folder / "parent"
    parent.mkdir()
    there = Bits(tree, parent)
    try:
        assert there.machine == here.machine, "plain PyTorch computes other bits in a second process"
        found = there.run([name for name in names if name not in allowed], lambda name, value: None)
    finally:
        there.close()
    for name, value in found.items():
        if " " in value:
            print(f"{name}: not compared, since in that commit it {value}")
    return {name: value for name, value in found.items() if " " not in value}


if __name__ == "__main__":
    sys.exit(main())
