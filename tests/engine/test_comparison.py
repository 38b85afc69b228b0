"""The comparison of results and gradients of two runs."""

from __future__ import annotations

import math

import torch

from offload.engine.comparison import (
    OTHER_ORDER,
    Sketch,
    are_near,
    gradient_deviations,
    relative_distance,
    same_bits,
    tolerance,
)


def test_same_bits_and_sketches_tell_nan_from_zero() -> None:
    zeros, nan = torch.zeros(3), torch.full((3,), math.nan)
    for tensors in ((zeros, nan), (nan, zeros)):
        assert not same_bits(*tensors)
        assert not Sketch.of(tensors[0]).equals(Sketch.of(tensors[1]))
    assert same_bits(nan, nan.clone())
    assert Sketch.of(nan).equals(Sketch.of(nan))
    assert same_bits(nan * 1j, nan * 1j)
    assert not same_bits(zeros, zeros.double())
    assert same_bits(None, None)
    assert not same_bits(None, zeros)


def test_distances_are_relative() -> None:
    one = torch.ones(1000)
    other = one.clone()
    other[0] += 1e-3
    assert not are_near(one, other)
    assert are_near(one.bfloat16(), other.bfloat16())
    assert are_near(one, one + 1e-6)
    found = relative_distance([Sketch.of(one)], [Sketch.of(other)])
    assert 0.5 < found / (1e-3 / math.sqrt(1000)) < 2
    assert relative_distance([Sketch.of(one)], [Sketch.of(other[:3])]) == math.inf


def test_a_gradient_may_be_the_rounding_error_of_the_others() -> None:
    allowed = tolerance(OTHER_ORDER)
    large, small = Sketch.of(torch.full((100,), 1e3)), Sketch.of(torch.full((1,), 1e-3))
    assert all(deviation <= 1 for deviation in gradient_deviations([large, small], [large, None], allowed))
    assert gradient_deviations([small], [None], allowed)[0] > 1
    assert gradient_deviations([None], [None], allowed) == [0]
    assert tolerance(OTHER_ORDER, [torch.ones(1).half()]) == tolerance(OTHER_ORDER, is_half=True) != allowed
