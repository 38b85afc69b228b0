"""GPU machine code for decoding, checked with the compiler and without a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from offload.accelerators import compiled_image
from offload.extras.quant import device_kernels
from offload.native import kernels
from tests.native.test_device_update import ARCHITECTURES, nvrtc


@pytest.mark.skipif(not kernels.is_native(), reason="the C++ kernels were not built, nor is their source there")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("codec", ["int8", "int4", "nf4"])
def test_a_thread_stores_whole_lines_and_rounds_each_product(codec: str, architecture: str) -> None:
    library = nvrtc()
    for dtype, num_lines in ((torch.bfloat16, 1), (torch.float32, 2)):
        source, name, options = device_kernels.program(codec, dtype)
        options = [f"--gpu-architecture={architecture}", "-default-device", *options]
        assert len(compiled_image(library, source, name, options)[0]) > 1000
        ptx = compiled_image(library, source, name, options, "PTX")[0].decode()
        assert "__local_depot" not in ptx, "all of it stays in registers"
        assert not re.search(r"\.ftz|\.approx|\bfma\.", ptx)
        assert len(re.findall(r"\bmul\.rn\.f32", ptx)) == 8 + (codec == "nf4")
        assert len(re.findall(r"\bst\.global\.v4\.[fub]32", ptx)) == num_lines
        assert len(re.findall(r"\bst\.global\.", ptx)) == num_lines
