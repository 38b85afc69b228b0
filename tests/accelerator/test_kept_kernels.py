"""Kernels compiled at run time are kept for later processes, by everything that decides their code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import accelerators
from offload.native import device_update, kernels
from tests.native.states import ordinary, same_bits

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not kernels.is_native(), reason="there is no source"),
    pytest.mark.usefixtures("sim", "forgetful"),
]


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of compiled kernels, with an empty cache."""
    names: list[str] = []

    def compile_(library: Any, source: str, name: str, options: Any, own: Any = accelerators.compiled_image) -> Any:
        names.append(name)
        return own(library, source, name, options)

    monkeypatch.setattr(accelerators, "compiled_image", compile_)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return names


def update() -> torch.Tensor:
    """Update with a kernel found for the first time, as in a new process. Return the weights."""
    device_update.KERNELS.forget()
    states = ordinary(1000)
    planes = [each.to("sim", copy=True) for each in (states.p, states.m, states.v, states.g)]
    kernels.adamw(*planes, step=1, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    return planes[0].cpu()


def test_the_next_process_compiles_nothing(compilations: list[str], tmp_path: Path) -> None:
    first = update()
    assert len(compilations) == 1
    assert same_bits(update(), first)
    assert len(compilations) == 1
    (path,) = (tmp_path / "offload" / "kernels").iterdir()
    kept = path.read_bytes()
    path.write_bytes(kept[: len(kept) // 2])
    assert same_bits(update(), first)
    assert len(compilations) == 2, "a damaged file is no kernel"
    assert path.read_bytes() == kept


def change_card(patch: pytest.MonkeyPatch, _: Path) -> None:
    properties = torch.sim.get_device_properties("sim")
    properties.major = 8
    patch.setattr(torch.sim, "get_device_properties", lambda _: properties)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Path], object]] = {
    "torch": lambda patch, _: patch.setattr(torch, "__version__", "9.0"),
    "its compiler": lambda patch, _: patch.setattr(torch.version, "cuda", "99.0"),
    "the card": change_card,
    "an included file": lambda _, folder: (folder / "codes.inl").write_text("// other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_program_is_compiled(
    compilations: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "codes.inl").write_text("// one")
    program = device_update.KernelVariant("sgd", "fp32", 0, torch.float32, torch.float32).program
    options = (*program.options, f"-I{folder}")

    def compile_() -> None:
        accelerators.open_accelerator(torch.device("sim:0")).compile_kernel(program.source, program.name, options)

    compile_()
    compile_()
    assert len(compilations) == 1
    CHANGES[change](monkeypatch, folder)
    compile_()
    assert len(compilations) == 2
