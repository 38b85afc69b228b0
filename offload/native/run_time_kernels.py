"""GPU kernels compiled at run time from `csrc/`. Before first use each must reproduce known results on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.accelerators import open_accelerator
from offload.errors import warn
from offload.native.core import core

ELEMENTS = {torch.float32: "float", torch.bfloat16: "uint16_t", torch.float16: "offload::Half"}
"""C++ types by dtype."""
THREADS = 256
"""Threads per block."""
Launch = Callable[[int, Sequence[Any]], None]
"""Runs a kernel on the current stream: number of threads, arguments."""


class Program(NamedTuple):
    """The program of one kernel."""

    source: str
    """C++ source."""
    name: str
    """C++ name of the kernel, with template arguments."""
    options: tuple[str, ...]
    """Compiler options."""

    @classmethod
    def of(cls, source: str, name: str) -> Program:
        """Return the program of a kernel in the namespace `offload`, with the files in `csrc/` to include."""
        return cls(source, f"offload::{name}", _options())


@cache
def _options() -> tuple[str, ...]:
    assert core is not None
    assert core.__file__ is not None
    folder = Path(core.__file__).with_name("csrc")
    return "-std=c++17", f"-I{folder}"


class RunTimeKernels:
    """Kernels for one task, by device and program. After a failure a device has none of them, with one warning.

    text: the warning, with places for {device} and {reason}.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._found: dict[tuple[torch.device, Program], Launch | None] = {}
        """Kernels by device and program, compiled once: a compilation takes a tenth of a second and more."""
        self.refused: dict[torch.device, str] = {}
        """Devices without kernels, with the reason."""

    def can_run(self, device: torch.device) -> bool:
        """False if no kernel exists. Sources are installed only together with the C++ kernels."""
        return core is not None and device not in self.refused

    def find(self, device: torch.device, program: Program, find_difference: Callable[[Launch], str]) -> Launch | None:
        """Return a kernel, compiled and verified at the first call with this program, or None.

        find_difference: runs the kernel on test data and returns a text about wrong results, empty without any.
        """
        if (device, program) not in self._found:
            self._found[device, program] = self._open(device, program, find_difference)
        if device in self.refused:  # by any program: one kernel with wrong bits makes the others doubtful
            return None
        return self._found[device, program]

    def _open(self, device: torch.device, program: Program, find_difference: Callable[[Launch], str]) -> Launch | None:
        try:
            kernel = open_accelerator(device).compile_kernel(*program)
            if kernel is None:  # no failure, and no warning: this kind of device never has them
                return None
            launch = partial(_launch, device, kernel)
            if difference := find_difference(launch):
                raise RuntimeError(difference)
        except Exception as error:  # from a compiler, a driver, or an old torch
            self.refused[device] = f"{type(error).__name__}: {error}"
            warn(self._text.format(device=device, reason=self.refused[device][:300]))
            return None
        return launch

    def forget(self) -> None:
        """Compile and verify again at the next use."""
        self._found.clear()
        self.refused.clear()


def _launch(device: torch.device, kernel: Callable[..., None], num_threads: int, arguments: Sequence[Any]) -> None:
    accelerator = open_accelerator(device)
    # A launch goes to the current device of the thread.
    with accelerator.module.device(device):
        grid = -(-num_threads // THREADS)
        kernel((grid, 1, 1), (THREADS, 1, 1), arguments, stream=accelerator.current_stream())
