"""DTensors at the border of a module: the module gets and returns local tensors, and computes with DTensors inside.

An engine runs a module more than once for one call (recomputation, micro-batches), over tensors with memory of their
own. So the layouts of DTensor arguments, results and their gradients travel beside the local tensors, in a `Crossing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten

from offload.errors import ConfigError


class Layout(NamedTuple):
    """The layout of a DTensor: mesh, placements (one a mesh dimension), global shape and strides."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> Layout:
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    def over(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor over a local tensor."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    @property
    def is_first_copy(self) -> bool:
        """True on one rank for each part: the norm counts a part once."""
        coordinate = self.mesh.get_coordinate() or ()
        return not any(index for index, each in zip(coordinate, self.placements, strict=True) if each.is_replicate())


class _Border(NamedTuple):
    """Layout of a DTensor at a border, and the shape of the local tensor."""

    layout: Layout
    local_shape: torch.Size

    def over(self, local: torch.Tensor, placements: Sequence[Any]) -> DTensor:
        """Return the DTensor over `local`, which may have other rows (a micro-batch)."""
        shape, stride = self.layout.shape, self.layout.stride
        if local.shape != self.local_shape:
            cut = {each.dim % local.dim() for each in self.layout.placements if each.is_shard()}
            changed = [dim for dim, size in enumerate(local.shape) if size != self.local_shape[dim]]
            if cut.intersection(changed):
                raise ConfigError(
                    f"a DTensor {list(shape)} between two units is cut over ranks in dimension {changed[0]}, which "
                    "train.micro_batch_size cuts too: set --train.micro_batch_size none, or cut another dimension."
                )
            shape = torch.Size(local.shape[dim] if dim in changed else size for dim, size in enumerate(shape))
            stride = torch.empty(shape, device="meta").stride()
        return Layout(self.layout.mesh, tuple(placements), shape, stride).over(local)


class Crossing:
    """Layouts of the DTensors in one call of a module, by position among the leaves of arguments and of results."""

    def __init__(self) -> None:
        self.inputs: dict[int, _Border] = {}
        self.outputs: dict[int, _Border] = {}
        self.gradients: dict[tuple[bool, int], tuple[Any, ...]] = {}
        """Placements of the gradients: (is an output, position)."""

    # A crossing is among a unit's arguments, and calls with equal layouts share the traits of a unit.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Crossing) and self.inputs == other.inputs

    def __hash__(self) -> int:
        return len(self.inputs)

    def borders(self, is_output: bool) -> dict[int, _Border]:
        """Return the layouts of the results or of the arguments, by position."""
        if is_output:
            return self.outputs
        return self.inputs

    def to_local(self, tree: Any, is_output: bool) -> Any:
        """Return `tree` with local tensors in place of DTensors. The layouts are kept here."""
        self.borders(is_output).clear()  # of the last run: a unit runs once more for a recomputation
        leaves, spec = tree_flatten(tree)
        if not any(isinstance(leaf, DTensor) or is_in_progress(leaf) for leaf in leaves):
            return tree  # the caller's own containers
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, DTensor):
                leaves[position] = _ToLocal.apply(leaf, self, is_output, position)
            elif is_in_progress(leaf):
                leaves[position] = Arrived.apply(leaf)
        return tree_unflatten(leaves, spec)

    def to_given(self, tree: Any, is_output: bool) -> Any:
        """Return `tree` with the DTensors again."""
        borders = self.borders(is_output)
        if not borders:
            return tree
        leaves, spec = tree_flatten(tree)
        for position in borders:
            leaves[position] = _ToGiven.apply(leaves[position], self, is_output, position)
        return tree_unflatten(leaves, spec)


class _ToLocal(torch.autograd.Function):
    """The local tensor of a DTensor. The gradient gets the layout it had on the other side."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, crossing: Crossing, is_output: bool, position: int) -> torch.Tensor:
        placements: list[Any] = list(tensor.placements)
        local = local_of(tensor)
        for dim, each in enumerate(placements):
            mask = getattr(each, "mask_buffer", None)
            if mask is not None:  # of an embedding over parts of the vocabulary: zero the tokens of other ranks now,
                mask.apply_mask(local)  # because torch keeps only one mask until the sum over ranks
                mask.release_mask()
                placements[dim] = Partial(each.reduce_op)
        border = _Border(Layout.of(tensor)._replace(placements=tuple(placements)), local.shape)
        crossing.borders(is_output)[position] = border
        ctx.border = border
        ctx.crossing = crossing
        ctx.key = is_output, position
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        placements = ctx.crossing.gradients.get(ctx.key, ctx.border.layout.placements)
        return ctx.border.over(gradient, placements), None, None, None


class _ToGiven(torch.autograd.Function):
    """The DTensor over a local tensor; the reverse of `_ToLocal`."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, crossing: Crossing, is_output: bool, position: int) -> DTensor:
        border = crossing.borders(is_output)[position]
        ctx.crossing = crossing
        ctx.key = is_output, position
        ctx.placements = border.layout.placements
        return border.over(local, border.layout.placements)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> Any:
        wanted = list(map(_placement_of_gradient, gradient.placements, ctx.placements))
        gradient = gradient.redistribute(placements=wanted)
        ctx.crossing.gradients[ctx.key] = tuple(wanted)
        return local_of(gradient), None, None, None


def _placement_of_gradient(present: Any, given: Any) -> Any:
    """Return the placement for the local gradient of a tensor with the placement `given`."""
    if present.is_partial():  # a sum over ranks stays for the other side
        return present
    if given.is_partial():  # the shape of the local tensor, which is whole in a sum too
        return Replicate()
    return given


class Arrived(torch.autograd.Function):
    """The result of an exchange, after the exchange."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        local = local_of(tensor)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradient


def is_in_progress(value: Any) -> bool:
    """True for the result of an exchange in progress (torch's AsyncCollectiveTensor, a private name)."""
    return isinstance(value, torch.Tensor) and hasattr(value, "wait")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain local tensor of a DTensor or of an exchange, after a wait; a plain tensor as it is."""
    with torch.no_grad():
        local: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.wait() if is_in_progress(local) else local


class _Parts(NamedTuple):
    """A saved DTensor: class, parts as packed, other arguments to make it again."""

    kind: Any
    parts: dict[str, Any]
    others: tuple[Any, ...]


class _Pack:
    """Packs the local tensors of saved DTensors by the engine's own function, which knows the weights in a slot."""

    def __init__(self, pack: Any) -> None:
        self._pack = pack

    def __call__(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):  # the mesh
            return tensor
        whole: Any = tensor
        if not is_traceable_wrapper_subclass(whole):
            return self._pack(tensor)
        names, context = whole.__tensor_flatten__()
        parts = {name: self(getattr(whole, name)) for name in names}
        return _Parts(type(whole), parts, (context, whole.shape, whole.stride()))


@contextmanager
def saved_in_parts() -> Iterator[None]:
    """Within the context, the hooks for tensors saved by autograd get local tensors, never a DTensor."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or isinstance(hooks[0], _Pack):
        yield
        return

    def unpack(saved: Any) -> Any:
        if not isinstance(saved, _Parts):
            return hooks[1](saved)
        parts = {n: part if n == "device_mesh" else unpack(part) for n, part in saved.parts.items()}
        return saved.kind.__tensor_unflatten__(parts, *saved.others)

    with torch.autograd.graph.saved_tensors_hooks(_Pack(hooks[0]), unpack):
        yield
