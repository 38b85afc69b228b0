"""A plain PyTorch training loop over an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.engine.compile_wrappers import remove_compile_wrappers
from offload.engine.engine import Engine
from offload.engine.units.residency import engine_of
from offload.errors import ConfigError, DoesNotFitError, format_bytes, nearest, shorten, warn
from offload.integrations.optimizer import OffloadOptimizer, keep_generators, refuse_replaced
from offload.integrations.rules import followed_keys, rate_of, rule_of_optimizer
from offload.layout.planes import DTYPES
from offload.machine.limits import memory
from offload.optim.rule import UpdateRule
from offload.planning.settings import Settings
from offload.retired import without_retired
from offload.tiers.placement import Placement

_MASTER = "master"
"""Name of the fp32 weights in `state_dict`, for parameters that the model has in bf16."""


def wrap(
    model: nn.Module, optimizer: torch.optim.Optimizer | UpdateRule, /, **settings: Any
) -> tuple[nn.Module, OffloadOptimizer]:
    """Move a model and its optimizer into an engine, and return both for a plain PyTorch training loop:

        model, optimizer = offload.wrap(model, torch.optim.AdamW(model.parameters()), device_memory="20GiB")

    The loop stays as it was: forward, `loss.backward()`, `torch.nn.utils.clip_grad_norm_`, `optimizer.step()`,
    `optimizer.zero_grad()`, gradient accumulation, parameter groups, frozen parameters, schedulers of torch, and
    `state_dict()` of both. The returned model is the same object; its parameters read as before, and cannot be written.
    Under precision bf16 a model given in fp32 reads and saves in fp32 (parameters of units that stay on the device read
    in bf16; `state_dict()` and `save_pretrained` have them in fp32).

    `optimizer`: a torch AdamW, Adam (with decoupled weight decay or none), SGD or Adafactor over parameters of `model`,
    with or without steps, or an update rule, such as offload.LOMO(lr=1e-3). Use the returned optimizer in its place.
    Its `engine` has all further calls: `optimizer.engine.export(folder)`, `optimizer.engine.close(restore=True)`.

    `settings`: fields of `Placement`, such as device_memory="20GiB" (text or bytes), parameters="cpu",
    optimizer="nvme", nvme_dir="/disk"; and fields of `Settings`. Defaults: precision bf16 if a parameter is bf16, else
    fp32; max_grad_norm None, so only the loop clips.

    Gradients of such a loop wait in fp32, 4 bytes a trainable weight, beside the optimizer states (in host memory where
    these are on disk), also for rules that drop them in `Engine.step`. Between the last backward and `step`,
    `parameter.grad` is that memory; where it cannot be lent (several ranks, parameters cut for a small device)
    ConfigError says so, and `optimizer.clip_grad_norm_` clips. Clear gradients after each step, by `zero_grad` or as
    torch allows: plain PyTorch would add the next ones, and the engine refuses. A step without gradients does nothing.
    Over several ranks gradients are sums: divide the loss by `optimizer.engine.world_size`.

    `optimizer.state_dict()` has torch's format, with fp32 masters of bf16 parameters; torch's own loads too. Load
    weights into the model before this call; optimizer states before or after. `optimizer.save(folder)` and
    `optimizer.load(folder)` write and read all states with weights and group settings, without a copy in memory.

    Raises ConfigError for an optimizer without an equal update rule, parameters of another model, an unknown keyword,
    or a wrong value; DoesNotFitError if a budget is too small; and like `Engine`.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"offload.wrap was given {shorten(repr(model))}; it must be wrap(model, optimizer, ...).")
    if isinstance(optimizer, list | tuple):
        raise ConfigError(
            f"offload.wrap was given {len(optimizer)} optimizers, and an engine has one: give torch.optim.AdamW one "
            "group for each, or an update rule with others in groups, as offload.Muon(lr=..., rest=offload.AdamW(lr="
            "...)) or offload.AdamW(lr=..., groups=((pattern, {'rule': offload.SGD(lr=...)}),))."
        )
    if isinstance(optimizer, OffloadOptimizer) or not isinstance(optimizer, torch.optim.Optimizer | UpdateRule):
        raise ConfigError(
            f"offload.wrap was given the optimizer {shorten(repr(optimizer))}; it must be one of torch.optim over the "
            "model's parameters, or an update rule: offload.wrap(model, torch.optim.AdamW(model.parameters()))."
        )
    options = without_retired(settings)
    # Both sets of names are one set of keywords here: nobody has to know the object with a field.
    places = {field.name for field in fields(Placement)}
    field_names = {field.name for field in fields(Settings)} - {"optimizer"} | places
    for key in options:
        if key not in field_names:
            raise ConfigError(
                f"offload.wrap was given {key!r}{nearest(key, field_names)}, which is neither a field of "
                "offload.Placement nor of offload.Settings: see help(offload.wrap)."
            )
    placement = {key: options.pop(key) for key in list(options) if key in places}
    if placement:
        if "placement" in options:
            raise ConfigError(f"offload.wrap was given {min(placement)} and a placement: give one of them.")
        options["placement"] = placement
    own = engage(model, optimizer, options, WrappedOptimizer)
    return own.engine.model, own


class WrappedOptimizer(OffloadOptimizer):
    """An OffloadOptimizer with the optimizer states in `state_dict`, in the format of torch's optimizers."""

    def _state_dict(self) -> dict[str, Any]:
        """Return group settings and states: by parameter number `step`, and fp32 CPU copies of the moments.

        Parameters in bf16 have their fp32 weights as `master`. Raises DoesNotFitError if host memory is too small, and
        ConfigError over several ranks or for moments that are not fp32; `save` writes those.
        """
        engine, numbers = self.engine, self._numbers()
        num_bytes, free = engine.moments_bytes, memory().get("available_bytes")
        if free is not None and num_bytes > free:
            raise DoesNotFitError(
                f"optimizer.state_dict() holds {format_bytes(num_bytes)} of optimizer states, and {format_bytes(free)} "
                "of the host's memory are free: optimizer.save(folder) writes them, a piece at a time."
            )
        state: dict[int, dict[str, Any]] = {}
        for name, moments in engine.named_moments(numbers):
            if moments:
                # A bf16 parameter has only half of the master, and torch's own format no place for the rest.
                if engine.model.get_parameter(name).dtype != torch.float32:
                    ((_, moments[_MASTER]),) = engine.named_parameters(names=[name])
                state[numbers[name]] = {key: _as_given(value, engine.model, name) for key, value in moments.items()}
        torch_state, start = super()._state_dict(), 0
        if scale := engine.loss_scale.state_dict():
            torch_state["loss_scale"] = scale
        for group, names in zip(torch_state["param_groups"], self._names, strict=True):
            group["params"] = list(range(start, start := start + len(names)))
        return torch_state | {"state": state}

    def _load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load group settings and states from `state_dict`, or from the torch optimizer with the same groups.

        Raises ConfigError for other groups, and for states of another update rule.
        """
        groups = state_dict["param_groups"]
        sizes, saved_sizes = [len(names) for names in self._names], [len(group.get("params", ())) for group in groups]
        if sizes != saved_sizes:
            raise ConfigError(
                f"the optimizer state has groups of {saved_sizes} parameters, and this optimizer groups of {sizes} "
                "(without frozen ones): load it into the optimizer before offload.wrap, which takes the states over."
            )
        # torch numbers parameters over all groups, in their order.
        names = dict(zip((n for group in groups for n in group["params"]), self._numbers(), strict=True))
        given = {names[number]: state for number, state in state_dict["state"].items()}
        states = {name: _local_states(state, self.engine.model.get_parameter(name)) for name, state in given.items()}
        masters = {name: state.pop(_MASTER) for name, state in states.items() if _MASTER in state}
        # A parameter without states begins as in a first step.
        self.engine.load_moments({name: states.get(name, {}) for name in names.values()})
        for name, value in self.engine.edit(masters):
            value.copy_(masters[name])
        for group, saved_group in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})
        self.engine.loss_scale.load_state_dict(state_dict.get("loss_scale", {}))
        self._resume(int(state_dict.get("updates", max((int(s.get("step", 1)) for s in states.values()), default=0))))

    def load(self, folder: Path) -> None:
        """Load engine states and group settings written by `save`. Random generators are unchanged. Collective.

        Raises like `Engine.load_checkpoint`.
        """
        for group, saved_group in zip(self.param_groups, self._load(folder).get("groups", ()), strict=False):
            group.update({key: tuple(v) if isinstance(v, list) else v for key, v in saved_group.items()})

    def _numbers(self) -> dict[str, int]:
        """Return the number of each parameter in a state dict, by name."""
        return {name: number for number, name in enumerate(name for names in self._names for name in names)}


def engage(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | UpdateRule,
    settings: Mapping[str, Any],
    optimizer_class: type[OffloadOptimizer] = OffloadOptimizer,
) -> OffloadOptimizer:
    """Move a model into an engine. Return the engine's optimizer, with the parameter groups and states of `optimizer`.

    `settings`: engine settings; an `optimizer` among them is the rule in place of the equal one. Raises ConfigError.
    """
    settings = dict(settings)
    rule: Any = settings.pop("optimizer", None)
    old = None
    if isinstance(optimizer, torch.optim.Optimizer):
        old = optimizer
        refuse_replaced(old)
    elif rule is None:
        rule = optimizer
    model = remove_compile_wrappers(model)
    give_back(model, old)
    is_taken_over = rule is None  # an own rule has neither the states nor the groups of the optimizer
    if old is not None and is_taken_over:
        rule = rule_of_optimizer(old, model)
    elif old is not None and len({rate_of(group) for group in old.param_groups}) > 1:
        raise ConfigError(
            f"offload has the rule {rule.title}, but the groups of the optimizer have different learning rates, "
            "which would be ignored: give them as groups of the rule, groups=((pattern, {'lr_scale': ...}), ...)."
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = {}
    if old is not None and is_taken_over:
        states = {names[id(p)]: _local_states(state, p) for p, state in old.state.items() if id(p) in names}
    defaults = {"max_grad_norm": None, "precision": own_precision(model)}  # the loop clips
    # The engine puts other parameter objects into the model.
    with _regroup_parameters(model, old):
        engine = open_engine(model, rule, defaults | settings)
    own = optimizer_class(engine)
    if old is not None:
        follows = []
        if is_taken_over:
            follows = followed_keys(old)
        own.take_over(old, follows)
    if states:
        try:
            engine.load_moments(states)
        except ConfigError:  # the caller gets the model back as it was
            engine.close(restore=True)
            raise
        assert old is not None
        # The engine has the states: a second copy would take as much memory again.
        old.state.clear()
    return own


def own_precision(model: nn.Module) -> str:
    """Return the precision for the weights of a model, of which some may be kept in fp32: norms, for example."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return next((name for name in ("bf16", "fp16") if DTYPES[name] in dtypes), "fp32")


def _local_states(state: Mapping[str, Any], parameter: Any) -> dict[str, Any]:
    """Return optimizer states with this rank's part of each DTensor, as the DTensor `parameter` is cut."""
    return {
        key: value.redistribute(placements=parameter.placements).to_local() if hasattr(value, "placements") else value
        for key, value in state.items()
    }


def _as_given(value: torch.Tensor, model: nn.Module, name: str) -> torch.Tensor:
    """Return a state of a parameter, as a DTensor for a DTensor parameter."""
    given: Any = model.get_parameter(name)
    if not value.dim() or not hasattr(given, "placements"):
        return value
    mesh, layout = given.device_mesh, given.placements
    tensor: torch.Tensor = type(given).from_local(
        value, mesh, layout, run_check=False, shape=given.shape, stride=given.stride()
    )
    return tensor


def give_back(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Close an earlier engine over a model and restore the weights, with a warning for an engine over another part.

    Parameter groups in `optimizer` point to the restored parameters. Collective.
    """
    engine = engine_of(model)
    if engine is not None:
        if engine.model is not model:
            warn(
                f"the weights of {type(model).__name__} are partly in an engine over {type(engine.model).__name__}, "
                "which is closed here: its optimizer ends, with its moments. Wrap the whole model once, with one "
                "group of parameters for each rate."
            )
        with _regroup_parameters(model, optimizer):
            engine.close(restore=True)


@contextmanager
def _regroup_parameters(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Keep optimizer groups on the trainable parameters while parameters in the model are replaced, matched by name."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    groups = [] if optimizer is None else optimizer.param_groups
    group_names = [[names[id(p)] for p in group["params"] if id(p) in names] for group in groups]
    yield
    parameters = dict(model.named_parameters())
    for group, own in zip(groups, group_names, strict=True):
        group["params"] = [parameters[name] for name in own]


def open_engine(model: nn.Module, rule: Any, settings: Mapping[str, Any]) -> Engine:
    """Return an engine that lives as long as the model. The model must not belong to another engine.

    `placement` may be a mapping. Random generators are unchanged. Raises like `Engine`.
    """
    spread = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    # One device for all modules needs no hooks.
    if len(spread) > 1 or "disk" in spread:
        raise ConfigError(
            f"the model was loaded with a device_map over {', '.join(sorted(spread))}, so accelerate's hooks move its "
            "weights: load it without (device_map=None; in TRL's trainers model_init_kwargs={'device_map': None}), or "
            "give the Trainer the model instead of its name."
        )
    options = without_retired(settings)
    unknown = set(options) - {field.name for field in fields(Settings)} - {"fill", "comm"}
    if unknown:
        raise ConfigError(
            f"offload has {min(unknown)!r}, which is not a setting of an engine: see help(offload.Engine)."
        )
    placement = Placement.of(options.pop("placement", None) or Placement())
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    # Trials of the engine draw numbers, and the loop must see the same batches as without an engine.
    with keep_generators(torch.device(options.get("device") or device)):
        engine = Engine(model, rule, placement, **options)
    engine.stay()
    return engine
