"""GPU machine code for casts to FP8, checked with the compiler and without a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from offload.accelerators import compiled_image
from offload.extras.quant import casts
from offload.native import kernels
from tests.native.test_device_update import ARCHITECTURES, nvrtc


@pytest.mark.skipif(not kernels.is_native(), reason="the C++ kernels were not built, nor is their source there")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("format_", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_thread_moves_whole_lines_and_rounds_each_quotient(
    format_: torch.dtype, by_row: bool, architecture: str
) -> None:
    library = nvrtc()
    for dtype, num_lines in ((torch.bfloat16, 1), (torch.float32, 2)):
        for kernel in ("cast_rows", "find_amax_of_rows"):
            source, name, options = casts.program(kernel, dtype, format_, by_row)
            options = [f"--gpu-architecture={architecture}", "-default-device", *options]
            assert len(compiled_image(library, source, name, options)[0]) > 1000
            ptx = compiled_image(library, source, name, options, "PTX")[0].decode()
            casts_rows, finds_amax = kernel == "cast_rows", kernel != "cast_rows" or by_row
            assert "__local_depot" not in ptx, "all of it stays in registers"
            assert not re.search(r"\.ftz|\.approx|\bfma\.|\bdiv\.full", ptx)
            assert len(re.findall(r"\bdiv\.rn\.f32", ptx)) == 9 * casts_rows
            assert len(re.findall(r"\bld\.global\.v4\.[fub]32", ptx)) == num_lines * (casts_rows + finds_amax)
            assert len(re.findall(r"\bst\.global\.v2\.[fub]32", ptx)) == casts_rows
            assert len(re.findall(r"\bbar\.sync|\bbarrier\.sync", ptx)) == finds_amax
