"""The C++ kernels for aarch64, from Debian's cross compiler, under emulation: `make aarch64`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = "aarch64-linux-gnu-"
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
SOURCES = [path for path in ROOT.glob("csrc/*.cpp") if not path.name.startswith("bind")]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which(f"{TOOLS}g++") and EMULATOR), reason="needs g++-aarch64-linux-gnu and qemu-user-static"
    ),
]


def run(*words: str | Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{words[0]}: {done.stdout[-1500:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile kernels and tests with the flags of CMakeLists.txt, where a warning is an error."""
    flags = re.search(r"offload_kernels PRIVATE (-O3 .*)\)", (ROOT / "CMakeLists.txt").read_text())
    assert flags
    folder = tmp_path_factory.mktemp("aarch64")
    for source in [*SOURCES, *ROOT.glob("tests/native/*.cpp")]:
        words = [f"{TOOLS}g++", "-std=c++17", *flags[1].split(), "-Werror", "-I", ROOT / "csrc"]
        run(*words, "-c", source, "-o", folder / f"{source.stem}.o")
    return folder


def test_results_are_those_of_the_scalar_kernels_and_of_other_processors(objects):
    program = objects / "all"
    run(f"{TOOLS}g++", "-static", "-pthread", *objects.glob("*.o"), "-o", program)
    assert EMULATOR
    seen = run(EMULATOR, program)
    assert "all kernels agree" in seen
    assert "the I/O engines agree" in seen


def loops(function: str) -> list[set[str]]:
    """Return the operations of each loop in a disassembled function, those on four floats or integers with `.4s`."""
    line = re.compile(r"^ *([0-9a-f]+):\t(\S+)(?:\t(.*))?$", re.MULTILINE)
    instructions = [(int(place, 16), name, words) for place, name, words in line.findall(function)]
    found = []
    for place, name, words in instructions:
        target = re.search(r"\b([0-9a-f]+) <", words)
        if name == "bl" or not target or int(target[1], 16) > place:
            continue
        body = [step for step in instructions if int(target[1], 16) <= step[0] <= place]
        found.append({f"{name}.4s" if ".4s" in words else name for _, name, words in body})
    return found


@pytest.mark.parametrize(
    ("source", "function", "operations"),
    [
        ("adamw", "AdamwStep", {"fmul.4s", "fmla.4s", "fsqrt.4s", "fdiv.4s"}),
        ("adamw", "AdamwShortStep, offload::neon::.*Bf16Moments", {"fmla.4s", "fsqrt.4s", "fdiv.4s", "shll.4s"}),
        ("adamw", "AdamwShortStep, offload::neon::.*Int8Moments", {"fmla.4s", "fsqrt.4s", "fdiv.4s", "tbl"}),
        ("codes", "decode_whole_range<8", {"scvtf.4s", "fmul.4s"}),
        ("codes", "decode_whole_range<4", {"scvtf.4s", "fmul.4s"}),
        ("codes", "decode_nf4_range", {"tbl", "fmul.4s"}),
        ("codes", "decode_mxfp4_columns<.*Wide", {"tbl", "fmul.4s"}),
    ],
)
def test_loops_are_over_vectors(objects, source, function, operations):
    code = run(f"{TOOLS}objdump", "-dC", "--no-show-raw-insn", objects / f"{source}.o")
    named = [part for part in code.split("\n\n") if re.search(f"^[0-9a-f]+ <.*offload::neon::.*{function}", part)]
    assert named, f"no function of this name: {function}"
    for part in named:
        assert any(operations <= each for each in loops(part)), part.partition("\n")[0]
