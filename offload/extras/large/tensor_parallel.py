"""Tensor-parallel models: layers cut over ranks by torch's `parallelize_module`, or by any DTensor parameters.

Each rank stores, streams and updates the local tensors of its DTensor parameters. In the forward a layer reads a
parameter as a DTensor over the weights in the slot, so torch's own exchanges run inside of the units (column and row
cuts: Megatron-LM, arXiv:1909.08053; two dimensions: arXiv:2104.05343). The autograd node between both leaves gradients
with the layout of the parameter. ZeRO shards states over data-parallel ranks only, not over the parts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any
from weakref import ref

import torch
import xxhash
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten

from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_failure
from offload.engine.units.find import find_blocks
from offload.engine.units.offloaded_tensor import OffloadedTensor
from offload.errors import ConfigError
from offload.extras.large.tensor_borders import Arrived, Crossing, Layout, is_in_progress, local_of, saved_in_parts
from offload.planning.settings import Settings


class PartsComm(Comm):
    """Communicator of the ranks with the same parts of all layers, for an engine. Other ranks make the same calls.

    Tensors, batches, losses and checkpoints are exchanged with data-parallel ranks only. All ranks make decisions, and
    `world` is their communicator.
    """

    def __init__(self, world: Comm, replicas: Comm, part: int, num_parts: int, counted: Sequence[bool]) -> None:
        """`part`: index of this rank's parts, of `num_parts`. `counted`: by parameter, True if this rank's gradient
        enters the norm.
        """
        self._world = world
        self._replicas = replicas
        self._part = part
        self._num_parts = num_parts
        self._counted = counted
        # Of the replicas: data-parallel ranks with the same parts, which share out the states.
        for name in (
            "rank", "size", "machines", "device", "all_gather", "reduce_scatter", "all_to_all", "sum_in_order",
            "broadcast", "gather_objects", "split", "neighbours",
        ):  # fmt: skip
            setattr(self, name, getattr(replicas, name))
        # Of the world: every decision, because ranks with other parts of a layer wait in its exchanges, and the
        # resources of a machine.
        for name in (
            "local_rank", "local_size", "local_gpus", "agree", "any", "barrier", "claim", "release", "close", "on_lost",
        ):  # fmt: skip
            setattr(self, name, getattr(world, name))

    @property
    def world(self) -> Comm:
        return self._world

    @property
    def is_alive(self) -> bool:
        return self._world.is_alive

    def squares_of_model(self, squares: Mapping[Any, float]) -> list[float]:
        own = 0.0
        if self.rank == 0:  # replicas have the same squares
            for piece, square in squares.items():  # `sum` rounds in another way from Python 3.12 on
                if self._counted[piece.parameter]:
                    own += square
        return [float(each) for each in self._world.sum_in_order([own], "norm of the gradients of all parts")]

    def folder_of(self, path: str | Path, *, of_model: bool = False) -> Path:
        if of_model:
            raise ConfigError(
                f"engine.export of a tensor-parallel model: this rank has one of {self._num_parts} parts "
                "of each layer: call engine.close(restore=True), gather a state dict of the model with "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict and full_state_dict=True, and save that. "
                "engine.save_checkpoint writes a folder for each part."
            )
        return Path(f"{path}.part-{self._part}-of-{self._num_parts}")


@contextmanager
def open_parts(
    model: nn.Module, settings: Settings, comm: Comm, fill: object = None, quantized: object = None
) -> Iterator[tuple[Settings, Comm]]:
    """Give the engine the local tensors of DTensor parameters, in the context; see `engine.assemble.MODEL_FORMS`.

    Afterwards the model has DTensor parameters again, over the parameters then in the modules. Raises ConfigError.
    """
    layouts = {id(p): Layout.of(p) for p in model.parameters() if isinstance(p, DTensor)}
    if not layouts:  # another tensor class
        yield settings, comm
        return
    with share_failure(comm, "check of the tensor-parallel model"):
        if fill is not None or quantized:
            raise ConfigError(
                "the model has DTensor parameters, and fill= and quantized= read whole parameters from files: load the "
                "weights into the model before Engine(), and leave both out."
            )
        _check_model(model)
        settings = _fitting(settings)
        ranks = _ranks_of(layouts.values(), comm.size)
    parts_comm = _open_comm(model, comm, layouts, ranks)
    with ExitStack() as stack:
        _take(model, stack)
        yield settings, parts_comm


def _take(model: nn.Module, stack: ExitStack) -> None:
    """Replace DTensor parameters by local ones, and the classes of modules with DTensors inside. `stack` undoes both.

    No original parameter stays in memory, unless somebody else holds it (an optimizer): a failure gives those back.
    """
    local: dict[int, nn.Parameter] = {}
    restored: dict[int, nn.Parameter] = {}
    for module in _bordered(model):
        given = _cut_parameters(module)
        taken: dict[str, tuple[Any, Any]] = {}
        stack.callback(_give_back, module, type(module), taken, restored)
        module.__class__ = _class_for(type(module), {key: Layout.of(p) for key, p in given.items()})
        for key, parameter in given.items():
            if id(parameter) not in local:
                value = local_of(parameter.detach())
                local[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[key] = local[id(parameter)]
            taken[key] = ref(local[id(parameter)]), ref(parameter)
        handles = (
            module.register_forward_pre_hook(_enter, with_kwargs=True),
            module.register_forward_hook(_leave, prepend=True, with_kwargs=True),
            module.register_forward_hook(_deliver),
        )
        for handle in handles:
            stack.callback(handle.remove)
        if given:
            after = module.register_state_dict_post_hook(_show_layouts)
            before = module.register_state_dict_pre_hook(partial(_move_last, after.id))
            stack.callback(before.remove)
            stack.callback(after.remove)


def _give_back(
    module: nn.Module, kind: type, taken: Mapping[str, tuple[Any, Any]], restored: dict[int, nn.Parameter]
) -> None:
    """Give a module the class `kind`, and DTensor parameters over its present plain ones."""
    layouts: Any = module.layouts
    module.__class__ = kind
    for key, (local, original) in taken.items():
        current: Any = module._parameters.get(key)
        if type(current) is not nn.Parameter:  # the engine was closed without the weights
            continue
        if id(current) not in restored:
            given = original() if current is local() else None  # the same object for an optimizer that holds it
            if given is None:
                tensor: Any = layouts[key].over(current.detach())
                given = nn.Parameter(tensor, requires_grad=current.requires_grad)
            restored[id(current)] = given
        module._parameters[key] = restored[id(current)]


def _class_for(kind: type, layouts: Mapping[str, Layout]) -> type:
    """Return a subclass of a module class that reads parameters as DTensors, and takes and returns local tensors."""

    def forward(self: Any, *args: Any, offload_crossing: Crossing | None = None, **kwargs: Any) -> Any:
        with saved_in_parts():
            if offload_crossing is None:
                return kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
            args, kwargs = offload_crossing.to_given((args, kwargs), is_output=False)
            result = kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
            return offload_crossing.to_local(result, is_output=True)

    wrapped = wraps(kind.forward)(forward)  # type: ignore[attr-defined]
    members = {"forward": wrapped, "layouts": layouts, "__module__": kind.__module__, "__doc__": kind.__doc__}
    properties = {key: property(partial(_read, key=key)) for key in layouts}
    return type(kind.__name__, (kind,), members | properties)


def _read(module: Any, key: str) -> Any:
    parameter = module._parameters[key]
    if parameter is None or isinstance(parameter, DTensor):
        return parameter
    if getattr(parameter, "functions", None):
        raise ConfigError(
            f"the weight {list(parameter.shape)} of a {type(module).__name__} is a part of a tensor-parallel layer "
            "and larger than the device memory for one unit, but only whole layers are cut into row blocks: raise "
            "--offload.device_memory, or cut the model over more ranks."
        )
    with torch.enable_grad():  # the node between both receives the gradient in this layout
        tensor = module.layouts[key].over(parameter)
    tensor._is_param = True  # torch's mark of a parameter of another tensor class, for `get_parameter`
    return tensor


def _enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
    """Last hook before a forward: local tensors in, and their layouts."""
    crossing = Crossing()
    args, kwargs = crossing.to_local((args, kwargs), is_output=False)
    return args, {**kwargs, "offload_crossing": crossing}


def _leave(_: nn.Module, _args: Any, kwargs: Any, result: Any) -> Any:
    """First hook after a forward: the DTensors again, for torch's own hooks."""
    return kwargs["offload_crossing"].to_given(result, is_output=True)


def _deliver(_: nn.Module, _args: Any, result: Any) -> Any:
    """Last hook after a forward: no exchange in progress leaves the module."""
    leaves, spec = tree_flatten(result)
    if not any(map(is_in_progress, leaves)):
        return None
    return tree_unflatten([Arrived.apply(leaf) if is_in_progress(leaf) else leaf for leaf in leaves], spec)


def _move_last(number: int, module: Any, *_: Any) -> None:
    """Let `_show_layouts` run after the hook with which an engine fills a state dict."""
    module._state_dict_hooks.move_to_end(number)


def _show_layouts(module: Any, saved: dict[str, Any], prefix: str, _: Any) -> None:
    """Put DTensors over the local tensors of a state dict."""
    for key, layout in module.layouts.items():
        value = saved.get(f"{prefix}{key}")
        if value is not None and not isinstance(value, DTensor) and not isinstance(value, OffloadedTensor):
            saved[f"{prefix}{key}"] = layout.over(value.detach())


def _cut_parameters(module: nn.Module) -> dict[str, Any]:
    return {key: p for key, p in module._parameters.items() if isinstance(p, DTensor)}


def _bordered(model: nn.Module) -> list[nn.Module]:
    """Return the modules with a border: blocks, and those with DTensor parameters or hooks (PrepareModuleInput)."""
    blocks = set(find_blocks(model))
    return [
        module
        for module in model.modules()
        if module in blocks or _cut_parameters(module) or module._forward_pre_hooks or module._forward_hooks
    ]


def _check_model(model: nn.Module) -> None:
    """Raise ConfigError for a model whose parts cannot be stored one by one, exactly."""
    bordered = set(_bordered(model))
    for name, module in model.named_modules():
        if "forward" in vars(module) and module in bordered:
            raise ConfigError(
                f"{name or 'the model'} has a forward of its own beside the one of {type(module).__name__}, as "
                "transformers' tp_plan makes them, and only the class's forward can be run with parts: cut the model "
                "by torch's parallelize_module."
            )
        if isinstance(module, FSDPModule):
            raise ConfigError(
                f"{name or 'the model'} is sharded by torch's fully_shard, which gathers and frees weights itself: "
                "leave fully_shard out, and start data-parallel ranks beside the tensor-parallel mesh. The engine "
                "shards their states."
            )
        for key, buffer in module._buffers.items():
            if isinstance(buffer, DTensor):
                raise ConfigError(
                    f"buffer {key} of {name or 'the model'} is a DTensor, and only parameters are taken apart: assign "
                    "the local tensor (buffer.to_local()) before Engine()."
                )
    parameters: Any = model.named_parameters()
    for name, parameter in parameters:
        if not isinstance(parameter, DTensor):
            if is_traceable_wrapper_subclass(parameter):
                raise ConfigError(f"{name} is a {type(parameter).__name__} beside DTensor parameters: convert it.")
            continue
        for placement in parameter.placements:
            if type(placement) not in (Shard, Replicate):
                raise ConfigError(
                    f"{name} is a DTensor with the placement {placement}; only Shard and Replicate have a local part "
                    "to store and update by itself. Use parameter.redistribute(...) before Engine()."
                )
        expected = list(parameter.shape)
        for dim, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                size, num = expected[placement.dim], parameter.device_mesh.size(dim)
                if size % num:
                    raise ConfigError(
                        f"dimension {placement.dim} of {name} {list(parameter.shape)} is cut over {num} ranks, into "
                        "parts of different sizes, and ranks with different parts would need different plans. Pad the "
                        f"dimension to a multiple of {num}, or leave this layer out of parallelize_module."
                    )
                expected[placement.dim] //= num


def _fitting(settings: Settings) -> Settings:
    """Return the settings with auto decided for a tensor-parallel model. Raises ConfigError."""
    order = "and ranks that compute a layer in different ways or orders would wait for each other in its exchanges"
    whole = "and needs whole rows or tensors, but each rank has a part of a layer"
    refused: tuple[tuple[str, Any, Any, str], ...] = (
        ("train.recompute", settings.recompute, "always", f"depends on the free memory of a rank, {order}"),
        ("train.compile", settings.compile, ("never", "auto"), f"compiles a layer on each rank alone, {order}"),
        ("train.clip", settings.clip, ("deferred", "auto"),
            "corrects updates by a norm that differs between ranks: copies of a parameter would drift apart"),
        ("train.sequence_tile", settings.sequence_tile, ("none", "auto"), f"cuts the calls of a layer, {order}"),
        ("train.sequence_parallel", settings.sequence_parallel, 1, f"shares rows over the same ranks, {whole}"),
        ("train.matmul", settings.matmul, "precision", f"replaces products, {whole}"),
        ("train.head_chunk_bytes", settings.head_chunk_bytes, (None, "auto"), f"computes parts of logits, {whole}"),
        ("offload.dispatch", settings.dispatch, "never", f"computes blocks for the rows of other ranks, {whole}"),
        ("offload.experts", settings.placement.experts, ("whole", "auto"), f"fetches experts one by one, {order}"),
        ("offload.frozen_weights", settings.frozen_weights, "exact", f"quantizes weights in blocks, {whole}"),
        ("offload.link_weights", settings.link_weights, "exact", f"quantizes weights in blocks, {whole}"),
        ("offload.link_gradients", settings.link_gradients, "exact", f"quantizes gradients in blocks, {whole}"),
    )  # fmt: skip
    for key, value, allowed, why in refused:
        if not isinstance(allowed, tuple):
            allowed = (allowed,)
        if value not in allowed:
            raise ConfigError(
                f"{key} is {value}, but the model is tensor-parallel (DTensor parameters), and this setting {why}: "
                f"set --{key} {'none' if allowed[0] is None else allowed[0]}."
            )
    for rule in settings.optimizer.parts:
        if rule.by_matrix or not rule.has_gradients or rule.drops_gradients or rule.factors:
            raise ConfigError(
                f"the optimizer is {type(rule).__name__}, but the model is tensor-parallel (DTensor parameters), and "
                f"this rule computes with whole parameters, or without stored gradients: use an elementwise rule, such "
                "as AdamW, SGD or Lion."
            )
    placement = replace(settings.placement, experts="whole")
    return replace(
        settings, compile="never", clip="deferred", sequence_tile="none", head_chunk_bytes=None, placement=placement
    )


def _ranks_of(layouts: Iterable[Layout], num_ranks: int) -> tuple[int, ...]:
    """Return the ranks of the meshes, of `num_ranks` in all. Raises ConfigError."""
    groups = {tuple(sorted(layout.mesh.mesh.flatten().tolist())) for layout in layouts}
    if len(groups) > 1:
        raise ConfigError(
            f"the DTensor parameters are on meshes over different ranks, {' and '.join(map(str, sorted(groups)))}: use "
            "one mesh for all layers of the model."
        )
    (ranks,) = groups
    if num_ranks % len(ranks):
        raise ConfigError(
            f"the model is cut over {len(ranks)} ranks, and {num_ranks} ranks run, no multiple of that: start a "
            f"multiple of {len(ranks)} ranks (the others are data-parallel)."
        )
    return ranks


def _open_comm(model: nn.Module, world: Comm, layouts: Mapping[int, Layout], ranks: tuple[int, ...]) -> PartsComm:
    """Find this rank's place among parts and replicas, and check for equal copies. Collective. Raises ConfigError."""
    parts, replicas = world.split(world.size // len(ranks))
    neighbours = tuple(sorted(parts.gather_objects(world.rank, "ranks of a tensor-parallel model")))
    with share_failure(world, "check of the mesh"):
        if neighbours != ranks:
            raise ConfigError(
                f"the model is cut over ranks {list(ranks)}, which are not neighbours on one machine, as the "
                "data-parallel replicas beside them need: put the tensor-parallel dimension last, as in "
                f"init_device_mesh(device, ({world.size // len(ranks)}, {len(ranks)}), mesh_dim_names=('dp', 'tp'))."
            )
    counted, copies = [], {}
    for name, parameter in model.named_parameters():
        layout = layouts.get(id(parameter))
        counted.append(parts.rank == 0 if layout is None else layout.is_first_copy)
        # Whole on each rank: training keeps the copies equal only if they begin equal.
        if layout is None or all(each.is_replicate() for each in layout.placements):
            value = local_of(parameter.detach())
            data = value.cpu().contiguous().view(-1).view(torch.uint8) if value.numel() else torch.empty(0)
            copies[name] = xxhash.xxh64_hexdigest(data.numpy().data)
    parts.agree("the parameters that each rank of a tensor-parallel model has whole", copies)
    return PartsComm(world, replicas, parts.rank, parts.size, counted)
