"""Install wheels into environments outside the tree, run the commands there, and print a table.

python tests/wheel.py dist/*.whl                           # called by `make wheel`
python tests/wheel.py dist/*.whl --debian build/debian     # and by Debian unstable for the wheel's processor

Each Python on this machine has a row with the first wheel that serves it. torch is pinned by constraints.txt; where the
pip index has only builds for CUDA (gigabytes), the kernels run alone, over numpy. `--cuda` takes these builds too.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run by a Python without this project

from tests import debian  # noqa: E402

CONSTRAINTS = ROOT / "constraints.txt"
KERNELS = """
import hashlib
import platform
import numpy
from offload.native import kernels
assert kernels.is_native(), kernels.describe()["missing_because"]
if platform.machine() == "x86_64":  # what the system says
    flags = open("/proc/cpuinfo").read().split()
    assert ("avx2" in flags) == ("avx2" in kernels.available_isas()), kernels.available_isas()
seen = hashlib.sha256()
for isa in kernels.available_isas():
    numbers = numpy.random.Generator(numpy.random.PCG64(0))
    master, grad = (numbers.integers(-2**20, 2**20, 10_007).astype("f4") / 2**20 for _ in range(2))
    how = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, threads=2, isa=isa)
    halves = numpy.empty(len(master), "u2"), numpy.empty(len(master), "i2")
    kernels.split(master, halves)
    whole = [numpy.zeros_like(master) for _ in range(2)]
    small = [(numpy.zeros(len(master), "u1"), numpy.zeros(79, "f4")) for _ in range(2)]
    for step in 1, 2, 3:
        kernels.adamw(master, *whole, grad, step=step, **how)
        kernels.adamw(halves, *small, grad, step=step, **how)
    norm = numpy.float64(kernels.sum_squares(master, isa=isa))
    found = hashlib.sha256()
    for each in (master, *halves, *whole, *sum(small, ()), norm):
        found.update(each.tobytes())
    seen.update(found.digest())
    print(isa, found.hexdigest()[:12])
"""
"""Prints each instruction set with a hash over its results."""
BITS = "18e186c3728c"
"""This hash, for every instruction set and processor."""
TEXT = ROOT / "CONTRIBUTING.md"
SHORT = f"--data.source {TEXT} --data.sequence_length 32 --train.batch_size 2".split()
COMMANDS = {
    "doctor": ["doctor"],
    "plan": ["plan", "--model.preset", "8b", "--hardware", "h100"],
    "training": ["train", "--train.steps", "3", "--run.dir", "run", *SHORT],
    "parity": ["parity", "--steps", "2", *SHORT],
}
COLUMNS = ["Python", "wheel", "torch", "kernels", *COMMANDS]
UNTRIED = "-"


def run(*words: str | Path, **options: Any) -> str:
    """Return the standard output. Raises RuntimeError on failure, with the last output."""
    done = subprocess.run(words, capture_output=True, text=True, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))[-300:]}: {done.stdout[-1500:]}{done.stderr[-3000:]}")
    return done.stdout


def interpreters() -> Iterator[tuple[str, Path]]:
    """Yield (version, path) for Pythons on the path and in pyenv, each minor version once."""
    found = {}
    candidates = [
        Path(sys.executable).resolve(),
        *(Path(path) for minor in range(11, 20) if (path := shutil.which(f"python3.{minor}"))),
        *Path.home().glob(".pyenv/versions/3.1[1-9].*/bin/python"),
    ]
    for path in candidates:
        done = subprocess.run([path, "--version"], capture_output=True, text=True)  # a pyenv shim may have none
        if done.returncode == 0:
            found.setdefault(tuple(map(int, re.findall(r"\d+", done.stdout)[:2])), (done.stdout.split()[1], path))
    return (found[version] for version in sorted(found))


def serves(wheel: Path, version: str) -> bool:
    """Return True if pip installs this wheel for this version: its own, or later ones with the stable ABI."""
    _, _, tag, abi, _ = wheel.stem.split("-")
    made_by, given = (tuple(map(int, found)) for found in ((tag[2], tag[3:]), version.split(".")[:2]))
    return given >= made_by if abi == "abi3" else given == made_by


def processor(wheel: Path) -> str:
    """Return the wheel's processor: "x86_64" or "aarch64"."""
    return re.findall("x86_64|aarch64", wheel.name)[0]


def requirements(wheel: Path) -> list[str]:
    """Return the wheel's dependencies without extras."""
    with ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    return [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]


def torch_without_cuda(pip: Sequence[str | Path], version: str) -> bool:
    """Return True if the index has this torch for this interpreter without CUDA. Downloads metadata alone."""
    with tempfile.NamedTemporaryFile() as report:
        words = ["--dry-run", "--no-deps", "--only-binary=:all:", "--ignore-installed", "--report", report.name]
        if subprocess.run([*pip, *words, f"torch=={version}"], capture_output=True).returncode:
            return False
        (found,) = json.loads(Path(report.name).read_text())["install"]
    return not any(re.match("nvidia-|cuda-", each) for each in found["metadata"].get("requires_dist", []))


def assert_needs_nothing(library: Path) -> None:
    """Assert that the module needs neither torch nor CUDA."""
    needed = run("ldd", library)
    assert not re.search("libtorch|libcuda|libc10|not found", needed), needed


def attempt(*words: str | Path, **options: Any) -> tuple[str, str]:
    """Return the standard output and "", or "" and an error."""
    try:
        return run(*words, **options), ""
    except RuntimeError as error:
        return "", str(error)


def tried(python: Sequence[str | Path], folder: Path, has_torch: bool) -> tuple[dict[str, str], list[str]]:
    """Run kernels and commands. Return a word for each column, and the errors."""
    text, error = attempt(*python, "-c", KERNELS, cwd=folder)
    hashes = dict(line.split() for line in text.splitlines())
    row = {"kernels": " ".join(hashes) or "fail"}
    errors = [error] if error else []
    if error == "" and {*hashes.values()} != {BITS}:
        row["kernels"] = "other bits"
        errors.append(f"result hashes: {hashes}, wanted {BITS}")
    for column, words in COMMANDS.items() if has_torch else ():
        text, error = attempt(*python, "-m", "offload", *words, cwd=folder)
        row[column] = "fail" if error else "equal" if "are equal bit for bit" in text else "done"
        errors += [error] if error else []
    return row, errors


def in_environment(wheel: Path, python: Path, folder: Path, takes_cuda: bool) -> tuple[dict[str, str], list[str]]:
    """Try a wheel in a virtual environment for this Python. Return a row, and the errors."""
    (version,) = re.findall(r"^torch==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
    run(python, "-m", "venv", folder / "env")
    own = folder / "env/bin/python"
    pip = [own, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    has_torch = takes_cuda or torch_without_cuda(pip, version)
    run(*pip, "-c", CONSTRAINTS, *(requirements(wheel) if has_torch else ["numpy"]))
    run(*pip, "--no-deps", wheel.resolve())
    (library,) = (folder / "env").rglob("offload/_core*.so")
    assert_needs_nothing(library)
    found, errors = tried([own], folder, has_torch)
    return found | {"torch": version if has_torch else "for CUDA alone"}, errors


def in_debian(wheel: Path, root: Path, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Try a wheel with Debian's Python and torch. Return a row, and the errors."""
    machine = processor(wheel)
    debian.unpack(root, machine)
    python = debian.python(root, machine, folder / "site")
    about = "import platform, importlib.metadata as m; print(platform.python_version(), m.version('torch'))"
    version, torch = run(*python, "-c", about).split()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--target", folder / "site"]
    platforms = (word for libc in ("2_28", "2_17") for word in ("--platform", f"manylinux_{libc}_{machine}"))
    pip += ["--only-binary=:all:", "--python-version", version, *platforms]
    run(*pip, "-c", CONSTRAINTS, *(each for each in requirements(wheel) if not each.startswith("torch")))
    run(*pip, "--no-deps", wheel.resolve())
    found, errors = tried(python, folder, True)
    return found | {"Python": f"{version}, {machine}", "torch": torch}, errors


def main(wheels: Sequence[Path], takes_cuda: bool, root: Path | None) -> int:
    rows, errors = [], []
    here = [wheel for wheel in wheels if processor(wheel) == platform.machine()]
    ways = [
        (
            f"{version}, {platform.machine()}",
            next((each for each in here if serves(each, version)), None),
            partial(in_environment, python=python, takes_cuda=takes_cuda),
        )
        for version, python in (interpreters() if here else ())
    ]
    if root:
        ways.append(("Debian", wheels[-1], partial(in_debian, root=root)))
    for name, wheel, way in ways:
        row = dict.fromkeys(COLUMNS, UNTRIED) | {"Python": name}
        rows.append(row)
        if wheel is None:
            continue
        row["wheel"] = "-".join(wheel.stem.split("-")[2:4])
        with tempfile.TemporaryDirectory() as made:
            print(f"{name}: {wheel.name} ({wheel.stat().st_size / 2**20:.2f} MiB) into {made} ...", flush=True)
            found, failed = way(wheel, folder=Path(made))
            row |= found
            errors += failed
    print_table(rows)
    print(*errors, sep="\n\n")
    return bool(errors)


def print_table(rows: Sequence[dict[str, str]]) -> None:
    for row in ({name: name for name in COLUMNS}, dict.fromkeys(COLUMNS, "---"), *rows):
        print("|", " | ".join(row[name] for name in COLUMNS), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--cuda", action="store_true", help="take a torch for CUDA where the index has no other")
    parser.add_argument("--debian", type=Path, help="a folder with Debian unstable, made there by 250 MB downloads")
    given = parser.parse_args()
    sys.exit(main(given.wheels, given.cuda, given.debian))
