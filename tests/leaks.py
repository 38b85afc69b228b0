"""What a step leaves alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def no_graph_is_left() -> Iterator[None]:
    """What runs within leaves no tensor with a graph. (Python's collector sees no cycle that goes through a graph.)"""
    before = {id(each) for each in _tensors()}
    yield
    left = [each for each in _tensors() if each.grad_fn is not None and id(each) not in before]
    assert not left, [(tuple(each.shape), each.grad_fn) for each in left]


def _tensors() -> list[Tensor]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Tensor)]
