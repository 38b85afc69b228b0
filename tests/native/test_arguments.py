"""Errors name the wrong argument, and no array is modified."""

from __future__ import annotations

import subprocess
import sys

import numpy
import pytest
import torch

from offload.errors import ConfigError
from offload.native import kernels

SETTINGS = {"step": 1, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


ARRAYS = {"master": torch.ones(8), "exp_avg": torch.ones(8), "exp_avg_sq": torch.ones(8), "grad": torch.ones(8)}


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", list(ARRAYS))
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.ones(8, dtype=torch.float64), "dtype float64"),
        (torch.ones(9), "9 elements"),
        (torch.ones(16)[::2], "not contiguous"),
        (numpy.ones(16, dtype="f4")[::2], "not contiguous"),
        ([1.0] * 8, "is a list"),
        (numpy.ones(8), "dtype float64"),
    ],
)
def test_arrays(name, wrong, message):
    arrays = {key: value.clone() for key, value in ARRAYS.items()}
    expected = "exp_avg" if name == "master" and "9 elements" in message else name
    message = "8 elements" if expected != name else message
    with pytest.raises(ConfigError, match=rf"^{expected}\b.*{message}"):
        kernels.adamw(**(arrays | {name: wrong}), **SETTINGS)
    assert all(torch.equal(array, torch.ones(8)) for array in arrays.values())


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", 0),
        ("lr", -1e-3),
        ("lr", float("nan")),
        ("eps", float("inf")),
        ("weight_decay", -0.1),
        ("grad_scale", float("nan")),
    ],
)
def test_settings(name, value):
    arrays = {key: torch.ones(8) for key in ARRAYS}
    with pytest.raises(ConfigError, match=rf"^{name} is {value}; it must be"):
        kernels.adamw(**arrays, **(SETTINGS | {name: value}))
    assert all(torch.equal(array, torch.ones(8)) for array in arrays.values())


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1)])
def test_betas(betas):
    with pytest.raises(ConfigError, match=r"betas\[[01]\] is"):
        kernels.adamw(*(torch.ones(8) for _ in ARRAYS), **(SETTINGS | {"betas": betas}))


@pytest.mark.skipif(not kernels.is_native(), reason="the C++ kernels were not built")
@pytest.mark.parametrize("isa", ["neon", "AVX2", ""])
def test_unknown_isa(isa):
    with pytest.raises(ConfigError, match="isa is .*must be one of"):
        kernels.sum_squares(torch.ones(3), isa=isa)


@pytest.mark.skipif(not kernels.is_native(), reason="the C++ kernels were not built")
def test_an_isa_that_the_processor_lacks(monkeypatch):
    monkeypatch.setattr(kernels, "_isas", ("scalar",))
    with pytest.raises(ConfigError, match="this processor or build does not have it"):
        kernels.sum_squares(torch.ones(3), isa="avx512")


@pytest.mark.skipif(not kernels.is_native(), reason="the C++ kernels were not built")
@pytest.mark.parametrize("threads", [0, -1, 1.5])
def test_threads(threads):
    with pytest.raises(ConfigError, match="threads is"):
        kernels.sum_squares(torch.ones(3), threads=threads)
    with pytest.raises(ConfigError, match="threads is"):
        kernels.set_threads(threads)


@pytest.mark.usefixtures("either")
def test_other_functions():
    with pytest.raises(ConfigError, match="^lo has 3 elements"):
        kernels.join(torch.ones(2, dtype=torch.bfloat16), torch.ones(3, dtype=torch.int16))
    with pytest.raises(ConfigError, match="^lo has dtype float32"):
        kernels.join(torch.ones(2, dtype=torch.bfloat16), torch.ones(2))
    with pytest.raises(ConfigError, match="^out has dtype bfloat16"):
        kernels.join(torch.ones(2).bfloat16(), torch.ones(2).short(), torch.ones(2).bfloat16())
    with pytest.raises(ConfigError, match="^x has dtype int64"):
        kernels.sum_squares(torch.ones(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match="segment 1 has offset 3 and size 3"):
        kernels.sum_squares_segments(torch.ones(5), [0, 3], [5, 3])
    with pytest.raises(ConfigError, match="segment 0 has offset -1"):
        kernels.sum_squares_segments(torch.ones(5), [-1], [2])
    with pytest.raises(ConfigError, match="offsets has shape"):
        kernels.sum_squares_segments(torch.ones(5), [0, 1], [2])


def test_importing_it_does_not_import_torch():
    code = "import sys, offload.native.kernels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
