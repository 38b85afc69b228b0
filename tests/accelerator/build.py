"""`python -m tests.accelerator.build`: compile the simulated accelerator against the installed torch if outdated."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
BUILD = Path(__file__).parents[2] / "build" / "accelerator"
LIBRARY = BUILD / "libaccelerator.so"
# -O1 suffices: tests spend nearly all time in torch kernels. The last flag is for GCC 12 on torch headers.
FLAGS = "-std=c++17 -O1 -fPIC -DAT_PER_OPERATOR_HEADERS -Wall -Wextra -Wno-unused-parameter -Wno-stringop-overflow"


class CannotBuildError(Exception):
    """No compiler, or a missing requirement. Tests skip with this message."""


def build(jobs: int | None = None) -> Path:
    """Compile after changes in sources, headers or torch, and return the library path. A lock serializes processes.

    Raises CannotBuildError without a compiler, and subprocess.CalledProcessError on a compile error.
    """
    torch = _torch_folder()
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CannotBuildError("the simulated accelerator needs g++ (or CXX=...), and there is none")
    if not sys.platform.startswith("linux"):
        raise CannotBuildError("the simulated accelerator needs Linux: it maps memory twice by memfd_create")
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        include = [f"-isystem{torch / 'include'}", f"-isystem{torch / 'include/torch/csrc/api/include'}"]
        common = [compiler, (torch / "version.py").read_text(), *FLAGS.split(), *include]
        common += [header.read_text() for header in sorted(SOURCES.glob("*.h"))]
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [_object(source, common) for source in sources]
        missing = [pair for pair in zip(sources, objects, strict=True) if not pair[1].exists()]
        link = BUILD / "linked"
        linked = "\n".join(made.name for made in objects)
        if not missing and LIBRARY.exists() and link.exists() and link.read_text() == linked:
            return LIBRARY

        def compile_one(pair: tuple[Path, Path]) -> None:
            source, target = pair
            made = target.with_suffix(".new")
            subprocess.run([compiler, *FLAGS.split(), *include, "-c", str(source), "-o", str(made)], check=True)
            made.rename(target)

        with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
            list(pool.map(compile_one, missing))
        made = LIBRARY.with_suffix(".new")
        libraries = [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
        subprocess.run(
            [compiler, "-shared", "-pthread", "-Wl,--no-undefined", *map(str, objects), *libraries, "-o", str(made)],
            check=True,
        )
        made.rename(LIBRARY)
        link.write_text(linked)
        for old in {*BUILD.glob("*.o")} - set(objects):
            old.unlink()
    return LIBRARY


def _torch_folder() -> Path:
    """Return the torch folder without importing torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise CannotBuildError("the simulated accelerator is compiled against torch, which is not installed")
    return Path(found.origin).parent


def _object(source: Path, common: list[str]) -> Path:
    """Return a source's object path. The name includes a digest over every dependency."""
    digest = hashlib.sha256("\0".join((*common, source.read_text())).encode()).hexdigest()[:16]
    return BUILD / f"{source.stem}-{digest}.o"


if __name__ == "__main__":
    try:
        print(build())
    except CannotBuildError as error:
        sys.exit(str(error))
