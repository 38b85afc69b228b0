"""GPU machine code for updates, decoding and casts to FP8, checked with the compiler and without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.accelerators import compiled_image
from offload.extras.quant import casts, device_kernels
from offload.native import kernels
from offload.native.device_update import KernelVariant
from offload.native.run_time_kernels import Program

pytestmark = pytest.mark.skipif(
    not kernels.is_native(), reason="the C++ kernels were not built, nor is their source there"
)
ARCHITECTURES = ("sm_80", "sm_89", "sm_90")
PER_ELEMENT = {  # operations per element in csrc/*_kernel.inl, including conversions for byte states
    ("adamw", "fp32", 2): {"mul": 5, "fma": 2, "div": 2, "add": 2, "sub": 1, "sqrt": 1},
    ("adamw", "bf16", 2): {"mul": 4, "fma": 3, "div": 1, "add": 1, "sub": 1, "sqrt": 1},
    ("adamw", "int8", 2): {"mul": 4, "fma": 3 + 3 + 4, "div": 1, "add": 1 + 1, "sub": 1, "sqrt": 1},
    ("correct_adamw", "fp32", 2): {"mul": 10, "fma": 4, "div": 4, "add": 3, "sub": 1, "sqrt": 2},
    ("lion", "fp32", 1): {"mul": 4, "fma": 2, "add": 1, "sub": 2},
    ("lion", "bf16", 1): {"mul": 4, "fma": 2, "add": 1, "sub": 2},
    ("sgd", "fp32", 0): {"mul": 1, "fma": 2},
    ("sgd", "fp32", 1): {"mul": 2, "fma": 2, "add": 1},
}
UNROLLED = 8


def nvrtc() -> Any:
    """Return NVRTC from the package nvidia-cuda-nvrtc, or from the library in the variable NVRTC."""
    found = os.environ.get("NVRTC")
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    libraries = [Path(found)] if found else [so for p in places for so in sorted(p.glob("**/libnvrtc.so.*"))]
    if not libraries:
        pytest.skip("there is no NVRTC: pip install nvidia-cuda-nvrtc, or NVRTC=FILE")
    for builtins in libraries[0].parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(libraries[0]))


def assembled(program: Program, architecture: str) -> tuple[str, str]:
    """Compile a kernel, and check for spilled registers and approximations. Return (PTX, lowered name)."""
    library = nvrtc()
    program = program._replace(options=(f"--gpu-architecture={architecture}", "-default-device", *program.options))
    assert len(compiled_image(library, *program)[0]) > 1000
    text, lowered = compiled_image(library, *program, "PTX")
    ptx = text.decode()
    assert "__local_depot" not in ptx, "all of it stays in registers"
    assert not re.search(r"\.ftz|\.approx|\bdiv\.full|\bfma\.(?!rn)|\bfma\.\w+\.f64", ptx)
    return ptx, lowered


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("function", "states", "num_moments"), PER_ELEMENT)
def test_every_operation_is_rounded_by_itself(function: str, states: str, num_moments: int, architecture: str) -> None:
    for master in (torch.float32, torch.bfloat16, torch.float16):
        for gradients in {torch.float32, master if master != torch.float32 else torch.bfloat16}:
            variant = KernelVariant(function, states, num_moments, master, gradients)
            ptx, lowered = assembled(variant.program, architecture)
            assert f".entry {lowered}(" in ptx
            found = Counter(re.findall(r"\b(mul|fma|div|add|sub|sqrt)\.rn\.f32", ptx))
            wanted = {name: UNROLLED * number for name, number in PER_ELEMENT[function, states, num_moments].items()}
            if states == "int8":
                assert {key: found[key] for key in ("mul", "div", "sub", "sqrt", "fma")} == {
                    key: wanted[key] for key in ("mul", "div", "sub", "sqrt", "fma")
                }
            else:
                assert found == wanted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("codec", ["int8", "int4", "fp8", "nf4"])
def test_decoding_stores_whole_lines_and_rounds_each_product(codec: str, architecture: str) -> None:
    for dtype, num_lines in ((torch.bfloat16, 1), (torch.float32, 2)):
        ptx, _ = assembled(device_kernels.program(codec, dtype), architecture)
        assert "fma." not in ptx
        assert len(re.findall(r"\bmul\.rn\.f32", ptx)) == 8 + (codec == "nf4")
        assert len(re.findall(r"\bst\.global\.v4\.[fub]32", ptx)) == num_lines
        assert len(re.findall(r"\bst\.global\.", ptx)) == num_lines


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mxfp4_decoding_reads_words_and_rounds_each_product(architecture: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        ptx, _ = assembled(device_kernels.program("mxfp4", dtype), architecture)
        found = {name: len(re.findall(pattern, ptx)) for name, pattern in _IN_PTX.items()}
        assert found == {"fused": 0, "products": 32, "words read": 4, "stores": 32}


_IN_PTX = {
    "fused": r"\bfma\.",
    "products": r"\bmul\.rn\.f32",
    "words read": r"\bld\.global\.(?:nc\.)?[bu]32",
    "stores": r"\bst\.global\.",
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("format_", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_move_whole_lines_and_round_each_quotient(format_: torch.dtype, by_row: bool, architecture: str) -> None:
    for dtype, num_lines in ((torch.bfloat16, 1), (torch.float32, 2)):
        for kernel in ("cast_rows", "find_amax_of_rows"):
            ptx, _ = assembled(casts.program(kernel, dtype, format_, by_row), architecture)
            casts_rows, finds_amax = kernel == "cast_rows", kernel != "cast_rows" or by_row
            assert "fma." not in ptx
            assert len(re.findall(r"\bdiv\.rn\.f32", ptx)) == 9 * casts_rows
            assert len(re.findall(r"\bld\.global\.v4\.[fub]32", ptx)) == num_lines * (casts_rows + finds_amax)
            assert len(re.findall(r"\bst\.global\.v2\.[fub]32", ptx)) == casts_rows
            assert len(re.findall(r"\bbar\.sync|\bbarrier\.sync", ptx)) == finds_amax
