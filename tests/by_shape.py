"""Matrix products with shape-dependent last bits on a CPU, like GPU kernel selection: a pytest plugin.

    pytest -p tests.by_shape tests/engine/test_micro_batches.py

A test that fails only with this plugin compares results of different shapes bit for bit (whole batches, micro-batches,
chunks, ranks). Such a test would fail on a GPU and needs a tolerance (`within=` in tests/engine/compare.py).
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")  # keeps the overrides alive


def _ordered(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors in one of two summation orders, by shape."""
    sizes = (*a.shape, b.shape[-1])
    number = prod(size * 2 + 7 * axis + 1 for axis, size in enumerate(sizes)) * 0x9E3779B1
    return (a.flip(-1), b.flip(-2)) if number >> 16 & 1 else (a, b)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(*_ordered(a, b), out=a.new_empty(a.shape[0], b.shape[1]))


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(*_ordered(a, b), out=a.new_empty(*a.shape[:2], b.shape[2]))


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    return torch.addmm(bias, *_ordered(a, b), beta=beta, alpha=alpha, out=out)


for _name, _product in {"mm": _mm, "bmm": _bmm, "addmm": _addmm}.items():
    _library.impl(_name, _product, "CPU")
