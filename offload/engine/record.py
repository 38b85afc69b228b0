"""The recording pass: run the model once on a few rows, and learn, or refuse, what would be wrong later.

Every unit runs with a graph of its own here, cut off at its border. What the pass finds:
- a unit's parameters read from outside the unit: that unit stays on the device;
- a unit called from inside another: likewise;
- inputs changed in place, by the unit or after it: they are cloned, and come back as outputs;
- outputs that never require a gradient;
- tensors that leave a unit other than by return and reach the loss or another unit: refused, since their gradient would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from offload.engine.unit import Arguments, Unit
from offload.errors import ConfigError

if TYPE_CHECKING:
    from offload.engine.stream import Stream


class RestartRecording(Exception):
    """The pass cannot go on with these resident units; `Recording.outside_readers` says which one to add."""


class Recording:
    """What one run of the model shows about its units.

    A leaf of a unit's own graph (its weights, its inputs) is `interior`; what a unit hands out is a `border`. A unit's result may hang on
    its own interior only, the loss on borders only.
    """

    def __init__(self, units: Sequence[Unit], stream: Stream) -> None:
        self.outside_readers: set[str] = set()
        self._stream = stream
        self._inside: Unit | None = None
        self._interior: dict[int, tuple[torch.Tensor, str]] = {}
        self._borders: dict[int, tuple[torch.Tensor, str]] = {}
        self._watched: list[tuple[Unit, list[torch.Tensor], list[int]]] = []
        self._called: set[str] = set()
        self._storages = {
            parameter.untyped_storage().data_ptr(): unit.name
            for unit in units
            if not unit.resident
            for parameter in unit.resting.values()
        }

    def reads(self) -> TorchDispatchMode:
        """Return a mode under which reads of resting parameters are noticed."""
        return _Reads(self._storages, self.outside_readers)

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one use of a unit with a graph of its own; return its result cut off from that graph."""
        if self._inside is not None:
            self.outside_readers.add(unit.name)
            raise RestartRecording
        arguments = Arguments((args, kwargs))
        leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in arguments.tensors]
        inputs = [leaf.clone() for leaf in leaves]
        versions = [t._version for t in inputs]
        self._inside = unit
        self._stream.enter(unit)
        try:
            live = unit.live()
            with torch.enable_grad():
                new_args, new_kwargs = arguments.fill(inputs)
                result = Arguments(unit.run(new_args, new_kwargs, live))
                outputs = self._cut(unit, arguments, inputs, result)
        finally:
            self._stream.leave(unit)
            self._inside = None
        own = [*leaves, *live.values()]
        mutated = {i for i, (t, version) in enumerate(zip(inputs, versions, strict=True)) if t._version != version}
        self._refuse_side_doors(unit, [*result.tensors, *(inputs[i] for i in mutated)], {id(leaf) for leaf in own})
        self._interior.update((id(leaf), (leaf, unit.name)) for leaf in own)
        self._learn(unit, mutated, {i for i, t in enumerate(result.tensors) if not t.requires_grad})
        with torch.no_grad():
            for i in mutated:
                arguments.tensors[i].copy_(inputs[i])
        self._watched.append((unit, arguments.tensors, [t._version for t in arguments.tensors]))
        return result.fill(outputs)

    def finish(self, results: Any) -> None:
        """After the forward: which inputs changed later, and whether `results` (the loss) hang on something inside a unit."""
        for unit, tensors, versions in self._watched:
            unit.stale |= {i for i, (t, version) in enumerate(zip(tensors, versions, strict=True)) if t._version != version}
        self._refuse_side_doors(None, [t for t in tree_iter(results) if isinstance(t, torch.Tensor)], set())

    def _cut(self, unit: Unit, arguments: Arguments, inputs: Sequence[torch.Tensor], result: Arguments) -> list[torch.Tensor]:
        """Return the result's tensors without the unit's graph; an input that came back unchanged stays the caller's own."""
        own = {id(t): original for t, original in zip(inputs, arguments.tensors, strict=True)}
        outputs = []
        for tensor in result.tensors:
            if id(tensor) in own:
                outputs.append(own[id(tensor)])
                continue
            border = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            self._borders[id(border)] = (border, unit.name)
            outputs.append(border.clone())  # no leaf: the caller may change it in place
        return outputs

    def _learn(self, unit: Unit, mutated: set[int], detached: set[int]) -> None:
        unit.mutated |= mutated
        unit.detached = unit.detached & detached if unit.name in self._called else detached
        self._called.add(unit.name)

    def _refuse_side_doors(self, unit: Unit | None, tensors: Sequence[torch.Tensor], own: set[int]) -> None:
        """Refuse what hangs on another unit's interior, or for a unit on another's border by another way than its arguments."""
        for leaf in _graph_leaves(tensors):
            found = self._interior.get(id(leaf)) or (self._borders.get(id(leaf)) if unit else None)
            if found is not None and id(leaf) not in own:
                raise ConfigError(
                    f"a tensor computed inside unit {found[1]} reaches {f'unit {unit.name}' if unit else 'the loss'} by another way than "
                    f"arguments and results (a hook, a cache or a shared container), and its gradient would be lost when the unit "
                    f"streams. Flags that collect such tensors cannot be honoured, as output_router_logits=True for a router loss: set "
                    f"them to False in the model's config."
                )


class _Reads(TorchDispatchMode):
    """Notices operations on the NaN that stands for a parameter at rest."""

    def __init__(self, storages: dict[int, str], found: set[str]) -> None:
        super().__init__()
        self._storages, self._found = storages, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                name = self._storages.get(leaf.untyped_storage().data_ptr())
                if name is not None:
                    self._found.add(name)
        return func(*args, **(kwargs or {}))


def _graph_leaves(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the leaves that require a gradient under `tensors`."""
    seen: set[Any] = set()
    nodes = []
    for tensor in tensors:
        if tensor.grad_fn is not None:
            nodes.append(tensor.grad_fn)
        elif tensor.requires_grad:
            yield tensor
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        nodes.extend(following for following, _ in node.next_functions if following is not None)
