"""Errors name the wrong argument, and no array is modified."""

from __future__ import annotations

import numpy
import pytest
import torch

from offload.errors import ConfigError
from offload.native import kernels

RULES = {  # arrays, settings
    "adamw": (
        ["master", "exp_avg", "exp_avg_sq", "grad"],
        {"step": 1, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    ),
    "correct_adamw": (
        ["master", "exp_avg", "exp_avg_sq", "grad"],
        {"step": 1, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "applied_scale": 0.9, "grad_scale": 0.13},
    ),
    "lion": (["master", "exp_avg", "grad"], {"lr": 3e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    "sgd": (["master", "momentum_buffer", "grad"], {"lr": 3e-2, "momentum": 0.9, "weight_decay": 0.1}),
}
NAN, INF = float("nan"), float("inf")


def refuse(rule, name, value, message):
    """Check the error for one wrong argument. No array is modified."""
    names, settings = RULES[rule]
    arrays = {key: torch.ones(8) for key in names}
    with pytest.raises(ConfigError, match=rf"^{message}"):
        getattr(kernels, rule)(**(arrays | settings | {name: value}))
    assert all(torch.equal(array, torch.ones(8)) for array in arrays.values())


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", RULES["adamw"][0])
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
    is_first = name == "master" and "9 elements" in message
    refuse("adamw", name, wrong, r"exp_avg\b.*8 elements" if is_first else rf"{name}\b.*{message}")


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("rule", "name", "value", "message"),
    [
        ("adamw", "step", 0, "step is 0; it must be at least 1"),
        ("adamw", "lr", -1e-3, "lr is -0.001; it must be finite and at least 0"),
        ("adamw", "lr", NAN, "lr is nan; it must be"),
        ("adamw", "eps", INF, "eps is inf; it must be"),
        ("adamw", "weight_decay", -0.1, "weight_decay is -0.1; it must be"),
        ("adamw", "grad_scale", NAN, "grad_scale is nan; it must be"),
        ("adamw", "betas", (1.0, 0.9), r"betas\[0\] is"),
        ("adamw", "betas", (0.9, -0.1), r"betas\[1\] is"),
        ("correct_adamw", "applied_scale", NAN, "applied_scale is nan; it must be finite"),
        ("correct_adamw", "grad_scale", INF, "grad_scale is inf; it must be finite"),
        ("correct_adamw", "grad_scale", 1e39, "grad_scale is inf; it must be finite"),
        ("correct_adamw", "master", (torch.ones(8).bfloat16(), torch.ones(8)), "lo has dtype float32"),
        ("correct_adamw", "grad", torch.ones(8, dtype=torch.float64), "grad has dtype float64"),
        ("lion", "exp_avg", torch.ones(9), r"exp_avg\b.*9 elements"),
        ("lion", "grad", torch.ones(8, dtype=torch.float64), r"grad\b.*float64"),
        ("lion", "betas", (0.9, 1.0), r"betas\[1\] is 1\.0"),
        ("sgd", "momentum_buffer", torch.ones(9), r"momentum_buffer\b.*9 elements"),
        ("sgd", "momentum_buffer", torch.ones(8).bfloat16(), r"momentum_buffer\b.*must be float32"),
        ("sgd", "momentum", 1.0, r".*is 1\.0"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_modified(rule, name, value, message):
    refuse(rule, name, value, message)


@pytest.mark.skipif(not kernels.is_native(), reason="the C++ kernels were not built")
@pytest.mark.parametrize("isa", ["sse9", "AVX2", ""])
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
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("join", (torch.ones(2).bfloat16(), torch.ones(3, dtype=torch.int16)), "lo has 3 elements"),
        ("join", (torch.ones(2).bfloat16(), torch.ones(2)), "lo has dtype float32"),
        ("join", (torch.ones(2).bfloat16(), torch.ones(2).short(), torch.ones(2).bfloat16()), "out has dtype bfloat16"),
        ("sum_squares", (torch.ones(2, dtype=torch.int64),), "x has dtype int64"),
        ("sum_squares_segments", (torch.ones(5), [0, 3], [5, 3]), "segment 1 has offset 3 and size 3"),
        ("sum_squares_segments", (torch.ones(5), [-1], [2]), "segment 0 has offset -1"),
        ("sum_squares_segments", (torch.ones(5), [0, 1], [2]), "offsets has shape"),
    ],
)
def test_other_functions(name, arguments, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        getattr(kernels, name)(*arguments)


def test_it_is_described(monkeypatch):
    monkeypatch.setattr(kernels, "_core", None)
    monkeypatch.setattr(kernels, "_isas", ())
    assert not kernels.is_native()
    assert kernels.default_isa() == "torch"
    assert kernels.describe()["threads"] == torch.get_num_threads()
