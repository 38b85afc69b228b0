"""Runtime compiler for the simulated accelerator: g++ under NVRTC names, loaded as torch.cuda loads an image."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.accelerator.build import BUILD
from tests.accelerator.driver import Driver

_HEADER = Path(__file__).with_name("rtc.h")
_OPTIONS = ["-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w", "-include", str(_HEADER)]

_VERSION = hashlib.sha256((_HEADER.read_text() + Path(__file__).read_text()).encode()).hexdigest()[:16]
CACHE = BUILD / "cache" / _VERSION
"""Folder for kernels kept by the engine: not the user's, and another one for another version of this compiler."""


def compiled(source: str, name: str, options: Sequence[str]) -> Path:
    """Compile a kernel. Return a library with `offload_launch`, a launch over a grid. Raises RuntimeError."""
    text = f'{source}\nextern "C" void offload_launch(const uint64_t* slots, int64_t grid, int64_t block) {{\n'
    text += f"  played::launch(&{name}, slots, grid, block);\n}}\n"
    known = [option for option in options if option.startswith(("-I", "-std", "-D"))]
    read = [path.read_text() for o in known if o.startswith("-I") for path in sorted(Path(o[2:]).iterdir())]
    digest = hashlib.sha256("\0".join([text, *known, _HEADER.read_text(), *read]).encode()).hexdigest()[:16]
    made = BUILD / "kernels" / f"{digest}.so"
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    new = made.with_suffix(f".{os.getpid()}")
    words = [shutil.which(os.environ.get("CXX", "g++")) or "g++", *known, *_OPTIONS, "-x", "c++", "-", "-o", str(new)]
    found = subprocess.run(words, input=text, text=True, capture_output=True, check=False)
    if found.returncode:
        raise RuntimeError(found.stderr)
    new.rename(made)
    return made


def slots(args: Sequence[Any]) -> tuple[Any, int]:
    """Return (arguments as 8 bytes each, bit mask for the addresses among them)."""
    words, pointers = [], 0
    for place, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            pointers |= 1 << place
            words.append(arg.data_ptr())
        else:
            words.append(
                struct.unpack("Q", struct.pack("d", arg) if isinstance(arg, float) else struct.pack("Q", arg))[0]
            )
    return (ctypes.c_uint64 * len(words))(*words), pointers


class Compiler:
    """NVRTC subset. Each function returns an error code (0: none)."""

    def __init__(self) -> None:
        self._programs: list[dict[str, Any]] = []

    def nvrtcCreateProgram(self, program: Any, source: bytes, *_: Any) -> int:
        self._programs.append({"source": source.decode()})
        program._obj.value = len(self._programs)
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:
        return 0

    def nvrtcAddNameExpression(self, program: Any, name: bytes) -> int:
        self._programs[program.value - 1]["name"] = name.decode()
        return 0

    def nvrtcCompileProgram(self, program: Any, number: int, options: Any) -> int:
        mine = self._programs[program.value - 1]
        try:
            library = compiled(mine["source"], mine["name"], [options[k].decode() for k in range(number)])
        except RuntimeError as error:
            mine["ProgramLog"] = str(error).encode()
            return 6
        mine["CUBIN"] = library.read_bytes()
        return 0

    def __getattr__(self, name: str) -> Any:
        what = name.removeprefix("nvrtcGet")
        if what == "LoweredName":
            return lambda program, name, lowered: setattr(lowered._obj, "value", name) or 0
        if what.endswith("Size"):
            size = lambda program, size: setattr(size._obj, "value", len(self._text(program, what[:-4])))  # noqa: E731
            return lambda program, out: size(program, out) or 0
        return lambda program, buffer: setattr(buffer, "raw", self._text(program, what)) or 0

    def _text(self, program: Any, what: str) -> bytes:
        return self._programs[program.value - 1][what]


def utilities(driver: Driver) -> types.SimpleNamespace:
    """Return the counterpart of `torch.cuda._utils`."""
    compiler, loaded = Compiler(), []

    def load(image: bytes, names: list[str]) -> dict[str, Any]:
        with tempfile.NamedTemporaryFile(suffix=".so") as file:  # a new name: the loader knows libraries by theirs
            file.write(image)
            file.flush()
            library = ctypes.CDLL(file.name)
        loaded.append(library)
        function = ctypes.cast(library.offload_launch, ctypes.c_void_p)

        def kernel(grid: Any, block: Any, args: Sequence[Any], shared_mem: int = 0, stream: Any = None) -> None:
            given, pointers = slots(args)
            places = {arg.data_ptr(): arg.nbytes for arg in args if isinstance(arg, torch.Tensor)}
            driver.launch(function, given, len(given), pointers, grid[0], block[0], 2.0 * sum(places.values()))

        return dict.fromkeys(names, kernel)

    return types.SimpleNamespace(_get_gpu_rtc_library=lambda: compiler, _cuda_load_module=load)
