"""Habits in user code beyond tensors in and tensors out.

A case stores each habit under a separate key, and `make fuzz ARGS="--without keeps,probe"` leaves habits out. The
engine must give the plain PyTorch result or refuse the habit by name.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

HABITS = {
    "keeps": r"tiles",
    "writes": r"tiles",
    "hollow": r"(?!)",
    "odd": r"(?!)",
    "skip": r"skip|tiles",
    "outside": r"delta|loss_fn",
    "probe": r"delta|inputs|autograd",
    "freeze": r"requires_grad|frozen|froze|thawed",
    "midway": r"requires_grad|frozen|froze|thawed",
    "parks": r"(?!)",
    "scheduler": r"betas|momentum",
    "change": r"betas|eps|momentum|weight_decay",
}
"""Habit names, each with a pattern for the refusal text."""

_UNKNOWN = ("precision", "micro_batch_size", "passes")
"""Settings without a plain PyTorch comparison for models with state changes in forward passes."""
_PATTERNS = ["", "norm", "0", "up|fc", "head", "linear"]


def give(case: Any, dice: random.Random) -> None:
    """Add some habits to a one-rank case."""
    chosen = dice.sample(["keeps", "writes", "hollow", "odd", "skip", "outside", "probe", "freeze", "midway"], 2)
    kinds, is_mosaic = {op["do"] for op in case.ops}, case.model["make"] == "mosaic"
    if is_mosaic:
        chances = {
            "keeps": lambda: dice.choice(["int", "list", "dict", "object", "tensor", "cache", "above"]),
            "writes": lambda: dice.choice(["append", "element", "dict", "pop"]),
            "hollow": lambda: True,
            "odd": lambda: dice.choice([7, 13, 100]),
        }
        ops = [op for op in case.ops if op["do"] in ("step", "own", "evaluate", "read", "lr")]
        # a new model lacks the kept state, and a failed pass has already kept some
        if kinds & {"reopen", "fail"} or not ops:
            del chances["keeps"]
        case.model |= {habit: make() for habit, make in chances.items() if habit in chosen}
        if "keeps" in case.model:  # for equal kept state, drop operations without a plain PyTorch equivalent
            case.ops = [{key: value for key, value in op.items() if key != "lost_forward"} for op in ops]
            case.settings = {key: value for key, value in case.settings.items() if key not in _UNKNOWN}
            case.model.pop("half", None)
    for op in case.ops:
        # The skipped unit can be the only trainable one, and torch refuses a loss without gradient.
        if is_mosaic and "skip" in chosen and "batch" in op and "frozen" not in case.model:
            op["batch"]["skip"] = dice.choice([-1, 0, 1])
        if op["do"] not in ("step", "own"):
            continue
        if "freeze" in chosen and dice.random() < 0.5:
            op["freeze"] = dice.choice(_PATTERNS)
        if "outside" in chosen and case.forwards is None:
            trained = ["scale"] * ("loss_fn" in op or op["do"] == "own") + ["delta"] * is_mosaic
            op |= {"outside": dice.choice(trained)} if trained else {}
        # torch checkpointing refuses a midway change too.
        if "midway" in chosen and op["do"] == "own" and "heck" not in str(case.model):
            op["midway"] = dice.choice(_PATTERNS)
        if "probe" in chosen and op["do"] == "own" and is_mosaic and op.get("outside") != "delta":
            op["probe"] = dice.choice(["grad", "inputs"])


def is_named(refusal: str, habits: Sequence[str]) -> bool:
    """Return whether a refusal names one of the habits, or reports another pass than in the model."""
    return "give different results" in refusal or any(re.search(HABITS[habit], refusal) for habit in habits)


# -- units -----------------------------------------------------------------------------------------------------------


class Keeping(nn.Module):
    """The output depends on state kept by earlier training calls outside buffers. `cache` is read by the model."""

    def __init__(self, width: int, where: str) -> None:
        super().__init__()
        self.linear, self.where, mean = nn.Linear(width, width), where, torch.zeros(width)
        kinds = {"int": 0, "list": [], "dict": {"n": 0}, "object": SimpleNamespace(n=0, mean=mean), "tensor": mean}
        self.kept: Any = kinds.get(where)

    def _keep(self, mean: Tensor) -> None:
        if self.where == "int":
            self.kept += 1
        elif self.where == "list":
            self.kept.append(1)
        elif self.where == "dict":
            self.kept["n"] += 1
        elif self.where == "object":
            self.kept.n += 1
            self.kept.mean.mul_(0.9).add_(mean, alpha=0.1)
        elif self.where == "tensor":
            self.kept.mul_(0.9).add_(mean, alpha=0.1)
        else:
            self.kept = mean

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self._keep(h.detach().float().mean((0, 1)))
        shares: dict[str, Callable[[], Any]] = {
            "int": lambda: 0.004 * self.kept,
            "list": lambda: 0.004 * len(self.kept),
            "dict": lambda: 0.004 * self.kept["n"],
            "object": lambda: 0.004 * self.kept.n + self.kept.mean,
            "tensor": lambda: self.kept,
            "cache": lambda: 0.0,
        }
        return h + torch.tanh(self.linear(h)) * (1.0 + shares[self.where]())


class Writing(nn.Module):
    """Returns a term per row to the caller in a container argument."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(width, width), how

    def forward(self, h: Tensor, notes: dict[str, Any]) -> Tensor:
        term = self.linear(h).square().mean((1, 2), keepdim=True)
        if self.how == "append":
            notes["terms"].append(term)
        elif self.how == "element":
            notes["terms"][0] = term
        elif self.how == "dict":
            notes["term"] = term
        else:
            notes.pop("term")
        return h + torch.tanh(self.linear(h))


class Hollow(nn.Module):
    """Has an empty parameter after all others."""

    def __init__(self, width: int, _: bool) -> None:
        super().__init__()
        self.linear, self.hollow = nn.Linear(width, width), nn.Parameter(torch.empty(0, width))

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.linear(h)) + self.hollow.sum()


UNITS: dict[str, type[nn.Module]] = {"keeps": Keeping, "writes": Writing, "hollow": Hollow}


# -- loops -----------------------------------------------------------------------------------------------------------


class Outside:
    """Parameters trained outside the model: an addend to the embeddings, and a loss factor."""

    def __init__(self, width: int) -> None:
        self.delta, self.scale = nn.Parameter(torch.full((1, 1, width), 0.1)), nn.Parameter(torch.tensor(0.9))

    def given(self, op: Mapping[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "delta": self.delta} if op.get("outside") == "delta" else batch

    def scaled(self, op: Mapping[str, Any], loss: Tensor) -> Tensor:
        return loss * self.scale if op.get("outside") == "scale" else loss

    @torch.no_grad()
    def learn(self, op: Mapping[str, Any]) -> tuple[float, ...]:
        """Take a gradient step. Return (gradient sum,), or an empty tuple without a trained parameter."""
        if "outside" not in op:
            return ()
        trained = self.delta if op["outside"] == "delta" else self.scale
        gradient = torch.zeros_like(trained) if trained.grad is None else trained.grad
        trained.sub_(gradient, alpha=0.1)
        trained.grad = None
        return (float(gradient.double().sum()),)


def probed(how: str, given: dict[str, Any], width: int, loss: Callable[[dict[str, Any]], Tensor]) -> dict[str, Any]:
    """Return a batch moved against the loss. The backward pass for this must not reach the weights."""
    delta = torch.zeros(*given["labels"].shape, width, requires_grad=True)
    found = loss({**given, "delta": delta})
    if how == "inputs":
        found.backward(inputs=[delta])
    gradient = delta.grad if how == "inputs" else torch.autograd.grad(found, delta)[0]
    assert gradient is not None
    return {**given, "delta": 0.1 * gradient.sign()}


def freeze(named: Mapping[str, Sequence[nn.Parameter]], pattern: str | None) -> None:
    """Freeze parameters with matching names and unfreeze the others.

    `pattern` None: no change. `named`: initially trainable parameters.
    """
    for name, uses in named.items() if pattern is not None else ():
        for parameter in uses:
            parameter.requires_grad_(not (pattern and re.search(pattern, name)))
