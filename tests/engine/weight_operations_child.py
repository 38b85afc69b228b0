"""Runs torch's operations over offloaded weights under the watch of a recording, as a process with guarded memory.

Each tensor argument of an operation in turn is a placeholder, and beside it a plain tensor of the same values. Writes a
JSON line before and after each operation. Arguments: the file, and the number of operations to skip.
"""

from __future__ import annotations

import itertools
import json
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from offload import Engine
from offload.engine.recording.recording import FirstPass, UseDetector
from offload.engine.units.offloaded_tensor import make_placeholder
from tests.engine.handmade import Stack
from tests.engine.inside import parts_of

NUM_SAMPLES, NUM_ARGUMENTS = 3, 4
"""Samples of an operation, and tensor arguments of a sample, that are asked."""


class Call(NamedTuple):
    """One call of an operation."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]


class Operation(NamedTuple):
    """An operation with the calls to ask. `calls` may raise: no samples can be made here."""

    name: str
    calls: Callable[[], Iterator[Call]]
    has_gradient: bool


def _weight_norm(dim: int) -> Operation:
    def calls() -> Iterator[Call]:
        for shape in ((16, 16), (5, 4, 3)):
            v = torch.randn(shape)
            g = torch.norm_except_dim(v, 2, dim)
            yield Call(torch._weight_norm, (v, g, dim), {})

    return Operation(f"_weight_norm, dim {dim}", calls, has_gradient=True)


def _recurrent(name: str, num_gates: int) -> Operation:
    def calls() -> Iterator[Call]:
        x, h = torch.randn(5, 2, 4), torch.zeros(1, 2, 6)
        weights = [torch.randn(num_gates * 6, 4), torch.randn(num_gates * 6, 6), *torch.randn(2, num_gates * 6)]
        state = (h, h) if name == "lstm" else h
        yield Call(getattr(torch, name), (x, state, weights, True, 1, 0.0, True, False, False), {})

    return Operation(name, calls, has_gradient=True)


def _cell(name: str, num_gates: int) -> Operation:
    def calls() -> Iterator[Call]:
        x, h = torch.randn(2, 4), torch.zeros(2, 6)
        weights = [torch.randn(num_gates * 6, 4), torch.randn(num_gates * 6, 6), *torch.randn(2, num_gates * 6)]
        yield Call(getattr(torch, name), (x, (h, h) if name == "lstm_cell" else h, *weights), {})

    return Operation(name, calls, has_gradient=True)


def _own(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Operation:
    return Operation(name, lambda: iter([Call(function, args, kwargs)]), has_gradient=True)


def _whole_attention() -> Operation:
    x, square = torch.randn(5, 2, 8), torch.randn(8, 8)
    weights = (torch.randn(24, 8), torch.randn(24), None, None, False, 0.0, square, torch.randn(8))
    return _own("multi_head_attention_forward", functional.multi_head_attention_forward, x, x, x, 8, 2, *weights)


BESIDE_THE_DATABASE = [
    *map(_weight_norm, (-1, 0, 1)),
    *itertools.starmap(_recurrent, (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))),
    *itertools.starmap(_cell, (("lstm_cell", 4), ("gru_cell", 3), ("rnn_tanh_cell", 1), ("rnn_relu_cell", 1))),
    _whole_attention(),
    _own("conv_tbc", torch.conv_tbc, torch.randn(5, 2, 3), torch.randn(3, 3, 4), torch.randn(4)),
    _own("norm_except_dim", torch.norm_except_dim, torch.randn(4, 3), 2, 0),
    _own("instance_norm", functional.instance_norm, torch.randn(2, 3, 4), None, None, torch.randn(3), torch.randn(3)),
]
"""Operations over weights that torch's database leaves out."""


LEFT_OUT = {"sparse.mm reduce": "torch ends the process in its backward over any tensor class of Python"}


def _of_database(info: Any) -> Operation:
    def calls() -> Iterator[Call]:
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=False), NUM_SAMPLES):
            yield Call(info.op, (sample.input, *sample.args), sample.kwargs)

    name = f"{info.name} {info.variant_test_name}".strip()
    return Operation(name, calls, info.supports_autograd and torch.float32 in info.supported_backward_dtypes("cpu"))


def operations() -> Iterator[tuple[Operation, str]]:
    """Yield (operation, reason for leaving it out, or an empty text)."""
    # The database needs this package for a base class of tests alone.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        operation, has_dtype = _of_database(info), torch.float32 in info.supported_dtypes("cpu")
        yield operation, LEFT_OUT.get(operation.name, "" if has_dtype else "no float32 on the CPU")
    for operation in BESIDE_THE_DATABASE:
        yield operation, ""


class Watched:
    """Runs calls with one argument replaced, over placeholders of an engine under the watch of a recording."""

    def __init__(self) -> None:
        self._engine = Engine(Stack())
        self._state = parts_of(self._engine)
        unit = next(unit for unit in self._state.units if not unit.resident)
        self._info = self._state.infos[min(unit.placeholders)]

    def plain(self, shape: torch.Size) -> Tensor:
        """Return the values of a weight under watch, as a plain tensor."""
        with self._state.ownership.watched(lambda _: None):
            return self._state.ownership.values_of(replace(self._info, shape=tuple(shape)), torch.float32)

    def weight_of(self, tensor: Tensor, trains: bool) -> Tensor:
        info = replace(self._info, shape=tuple(tensor.shape), trainable=trains)
        return make_placeholder(info, tensor.dtype, torch.device("cpu"), self._state.ownership)

    def run(self, call: Call, spec: Any, leaves: list[Any], place: int, trains: bool) -> tuple[Any, bool]:
        """Return the description of the results, and whether the recording has seen a read."""
        recording = FirstPass(self._state.units, self._state.runner)
        weight = self.weight_of(leaves[place], trains)
        with self._state.ownership.watched(recording.note_read), UseDetector(recording):
            described = describe(call, spec, [*leaves[:place], weight, *leaves[place + 1 :]], weight, trains)
        return described, bool(recording.outside_readers)


def describe(call: Call, spec: Any, leaves: list[Any], weight: Tensor, trains: bool) -> Any:
    """Return shape, strides, dtype and device of results, and of gradients if `trains`; or the kind of exception."""
    torch.manual_seed(0)
    try:
        args, kwargs = tree_unflatten(leaves, spec)
        with torch.set_grad_enabled(trains):
            results = [t for t in tree_leaves(call.function(*args, **kwargs)) if isinstance(t, Tensor)]
            described = [(tuple(t.shape), _strides(t), str(t.dtype), str(t.device)) for t in results]
            roots = [t for t in results if t.requires_grad and (t.is_floating_point() or t.is_complex())]
            if trains and roots:
                ones = [torch.ones_like(t, memory_format=torch.contiguous_format) for t in roots]
                (gradient,) = torch.autograd.grad(roots, [weight], ones, allow_unused=True)
                described.append(None if gradient is None else (tuple(gradient.shape), str(gradient.dtype)))
    except Exception as error:  # such values are wrong for some operations: both have to say so
        return type(error).__name__
    return described


def _strides(tensor: Tensor) -> tuple[int, ...] | str:
    return tensor.stride() if tensor.layout is torch.strided else str(tensor.layout)


def ask(operation: Operation, watched: Watched) -> dict[str, Any]:
    """Ask an operation with each argument in turn. Return the outcome."""
    num_asked, num_seen, differences = 0, 0, []
    for call in operation.calls():
        leaves, spec = tree_flatten((tuple(call.args), dict(call.kwargs)))
        places = [n for n, t in enumerate(leaves) if type(t) is Tensor and t.dtype is torch.float32 and _is_plain(t)]
        for place in places[:NUM_ARGUMENTS]:
            for trains in (False, True) if operation.has_gradient else (False,):
                plain = watched.plain(leaves[place].shape).requires_grad_(trains)
                wanted = describe(call, spec, [*leaves[:place], plain, *leaves[place + 1 :]], plain, trains)
                found, is_seen = watched.run(call, spec, leaves, place, trains)
                num_asked, num_seen = num_asked + 1, num_seen + is_seen
                if found != wanted:
                    differences.append(f"argument {place}, shape {list(plain.shape)}, {wanted} became {found}"[:400])
    return {"asked": num_asked, "seen": num_seen, "differences": differences}


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.requires_grad


def main() -> None:
    """Ask all operations, or with an argument the later ones."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    watched = Watched()
    out = Path(sys.argv[1]).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 (until the process ends)
    for operation, reason in itertools.islice(operations(), int(sys.argv[2]), None):
        print(json.dumps({"name": operation.name}), file=out)
        outcome: dict[str, Any] = {"left_out": reason}
        if not reason:
            try:
                outcome = ask(operation, watched)
                if not outcome["asked"]:
                    outcome = {"left_out": "no argument is a dense float32 tensor"}
            except Exception as error:
                outcome = {"left_out": f"no samples here: {type(error).__name__}: {error}"[:200]}
        print(json.dumps(outcome), file=out)


if __name__ == "__main__":
    main()
