"""Objects left alive after a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


@contextmanager
def no_graph_is_left() -> Iterator[None]:
    """Check the block for leaked tensors with an autograd graph. (Python's collector cannot see graph cycles.)"""
    held = _tensors()  # so that no later tensor gets the same id
    before = {id(each) for each in held if each.grad_fn is not None}
    yield
    gc.collect()
    left = [each for each in _tensors() if each.grad_fn is not None and id(each) not in before]
    assert not left, [(tuple(each.shape), each.grad_fn) for each in left]


@contextmanager
def no_tensor_waits_for_collection() -> Iterator[None]:
    """Check the block for tensors in reference cycles: their memory is free only after a run of Python's collector.

    Tensors from before the block do not count: an object of another test can become garbage at any time.
    """
    left: list[Tensor] = []
    gc.disable()
    gc.collect()  # no garbage of before; `gc.unfreeze` would thaw the objects of the whole test session too
    before = _tensors()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        left += [each for each in gc.garbage if isinstance(each, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        before.clear()
    assert not left, [(tuple(each.shape), each.grad_fn) for each in left]


def _tensors() -> list[Tensor]:
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
