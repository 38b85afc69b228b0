"""Map optimizers from other libraries to update rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError
from offload.extras.rules.factored import Adafactor
from offload.extras.rules.lion import Lion
from offload.optim.adamw import AdamW
from offload.optim.rule import UpdateRule
from offload.optim.sgd import SGD

_OTHERS = (
    "Or give one of offload's update rules, such as offload.AdamW(lr=..., states='int8'), Adafactor, Muon or LOMO: "
    "offload.wrap(model, rule), or offload=dict(optimizer=rule) of a Trainer or an accelerator."
)


def _adam(kind: Any, states: str, args: Any, _options: Mapping[str, str]) -> UpdateRule:
    own = {"betas": (args.adam_beta1, args.adam_beta2), "states": states}
    if kind is AdamW:  # Lion has no eps
        own["eps"] = args.adam_epsilon
    return kind(lr=args.learning_rate, weight_decay=args.weight_decay, **own)


def _sgd(args: Any, options: Mapping[str, str]) -> UpdateRule:
    if float(options.get("dampening", 0)) or options.get("nesterov", "false").lower() in ("true", "1", "yes"):
        raise ConfigError(
            f"optim_args is {args.optim_args!r}: offload's SGD has neither dampening nor Nesterov momentum."
        )
    return SGD(lr=args.learning_rate, momentum=float(options.get("momentum", 0)), weight_decay=args.weight_decay)


_NAMED: Mapping[str, Callable[[Any, Mapping[str, str]], UpdateRule]] = {
    **{
        name: partial(_adam, kind, states)
        for kind, states, names in (
            (AdamW, "fp32", ("adamw_torch", "adamw_torch_fused", "adamw_torch_npu_fused", "paged_adamw_32bit")),
            (AdamW, "int8", ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")),
            (Lion, "fp32", ("lion_32bit", "paged_lion_32bit")),
            (Lion, "int8", ("lion_8bit", "paged_lion_8bit")),
        )
        for name in names
    },
    "sgd": _sgd,
}
"""transformers optimizer names with a rule of equal arithmetic. 8-bit variants use other quantization blocks."""
_NOT_THE_SAME = {
    "adafactor": "transformers' Adafactor uses the learning rate unchanged; offload's, like torch's, multiplies it by "
    "the RMS of the weights. ",
}


def rule_of_arguments(args: Any, names: Iterable[str], decayed: Collection[str]) -> UpdateRule:
    """Return the update rule for `optim`, learning rate and other settings in TrainingArguments.

    Weight decay applies to parameters in both `names` and `decayed`. Raises ConfigError for an optimizer without a
    matching rule.
    """
    name = getattr(args.optim, "value", args.optim)
    if name not in _NAMED:
        raise ConfigError(
            f"optim is {name!r}, and offload has no equivalent update rule. {_NOT_THE_SAME.get(name, '')}Set optim to "
            f"one of {', '.join(_NAMED)}. {_OTHERS}"
        )
    items = [item.partition("=") for item in (args.optim_args or "").replace(" ", "").split(",") if item]
    if not all(value for _, _, value in items):
        raise ConfigError(f"optim_args is {args.optim_args!r}; it must be key=value, key=value, ...")
    options = {key: value for key, _, value in items}
    return without_decay(_NAMED[name](args, options), [name for name in names if name not in decayed])


def without_decay(rule: UpdateRule, names: Collection[str]) -> UpdateRule:
    """Return the rule with decay on all parameters of any shape, except `names`."""
    whole: Any = rule  # a dataclass
    if not rule.weight_decay or not names:
        return replace(whole, decay_1d=True)
    return replace(whole, decay_1d=True, groups=((_one_of(names), {"weight_decay": 0.0}), *rule.groups))


def _one_of(names: Iterable[str]) -> str:
    return rf"^({'|'.join(map(re.escape, names))})$"


def rule_of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> UpdateRule:
    """Return the update rule equivalent to a torch optimizer over a model.

    Raises ConfigError if there is none, or if the optimizer's parameters are not the trainable ones of the model.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rule_class: Any = _TORCH.get(type(optimizer))
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        rate, decay = (optimizer.param_groups[0][key] for key in ("lr", "weight_decay"))
        raise ConfigError(
            "the optimizer is torch.optim.Muon, which trains matrices alone, and an engine has one rule for all "
            f"parameters: give offload.Muon(lr={rate:g}, weight_decay={decay:g}, rest=offload.AdamW(lr=...)), whose "
            "rest trains embeddings, the head and vectors."
        )
    if rule_class is None:
        supported = ", ".join(f"torch.optim.{optimizer_class.__name__}" for optimizer_class in _TORCH)
        raise ConfigError(
            f"the optimizer is {type(optimizer).__module__}.{type(optimizer).__name__}, and offload has no equivalent "
            f"update rule. Give one of {supported}. {_OTHERS}"
        )
    # Compared as objects: a copy of the model has parameters of the same names.
    foreign = sum(id(p) not in names for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ConfigError(
            f"{foreign} parameters of the optimizer are not the model's, which has {len(names)}: make the optimizer "
            "over the parameters of this model, torch.optim.AdamW(model.parameters()), after the last change of them."
        )
    first = optimizer.param_groups[0]  # the engine's rate: rates of other groups are multiples
    # An engine has one rule: only rates and decay may differ between groups.
    for group in optimizer.param_groups:
        for key in optimizer.defaults.keys() - {"lr", "weight_decay"}:
            if group[key] != first[key]:
                raise ConfigError(
                    f"groups of the optimizer have {key} {first[key]!r} and {group[key]!r}: groups can differ only in "
                    "lr and weight_decay."
                )
        if group["weight_decay"] and "weight_decay" not in followed_keys(optimizer):
            raise ConfigError(
                "the optimizer is Adam with weight_decay, which is not decoupled: give AdamW, or set it to 0."
            )
    for key, allowed in PLAIN.items():
        if first.get(key, allowed) != allowed:
            raise ConfigError(f"the optimizer has {key}={first[key]!r}, which no update rule supports. {_OTHERS}")
    full = [group for group in optimizer.param_groups if group["params"]]
    base = rate_of(first)
    if not base and any(map(rate_of, full)):
        raise ConfigError(
            "the learning rate of the optimizer's first group is 0, so the other groups' rates are no multiples of it: "
            "put a group with a positive rate first."
        )
    groups = [
        (
            _one_of(names[id(p)] for p in group["params"]),
            {"lr_scale": rate_of(group) / base if base else 1.0, "weight_decay": group["weight_decay"]},
        )
        for group in full
    ]
    # torch would leave these as they are, and an engine would update them.
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in own]
    if left:
        raise ConfigError(
            f"{len(left)} parameters with requires_grad are not in the optimizer, first {left[0]}: freeze them "
            "(requires_grad_(False)) before making the optimizer, or add them to it."
        )
    settings = {key: first[key] for key in rule_class.steered}
    return rule_class(lr=float(first["lr"]), **settings, weight_decay=0.0, decay_1d=True, groups=tuple(groups))


def followed_keys(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the group keys that may change during training, besides the learning rate."""
    keys = [*_TORCH[type(optimizer)].steered]
    if type(optimizer) is not torch.optim.Adam or optimizer.param_groups[0].get("decoupled_weight_decay"):
        keys.append("weight_decay")
    return keys


_TORCH: Mapping[type[torch.optim.Optimizer], type[UpdateRule]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: AdamW,
    torch.optim.SGD: SGD,
    torch.optim.Adafactor: Adafactor,
}
"""Update rules for torch optimizers."""
PLAIN = {"amsgrad": False, "maximize": False, "differentiable": False, "dampening": 0, "nesterov": False}
"""torch optimizer settings without a counterpart in update rules, with the inactive values."""


def rate_of(group: Mapping[str, Any]) -> float:
    """Return the group's learning rate before scheduling. A scheduled rate may begin at 0."""
    return float(group.get("initial_lr", group["lr"]))
