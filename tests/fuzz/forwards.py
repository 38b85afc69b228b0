"""Training with forward passes alone, against the same steps in plain PyTorch (tests/engine/zeroth_order.py)."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from offload import MeZO
from offload.extras.zeroth.record import ZerothOrderRecord
from tests.engine.zeroth_order import PlainMeZO
from tests.fuzz import habits, models
from tests.fuzz.cases import Case, Op
from tests.fuzz.oracles import same

_NEAR = 2e-5
"""Allowed relative loss difference after a change of summation order."""


def rule_of(case: Case) -> MeZO:
    return MeZO(**{"lr": 1e-3, "eps": 1e-2, **(case.forwards or {})})


def compare(case: Case, ops: Sequence[Op], seen: Sequence[Any], blocks: Sequence[str], notes: Counter[str]) -> str:
    """Return the first difference between the steps and plain PyTorch, or an empty text.

    Plain PyTorch measures the losses for comparison, exactly or up to the summation order. Updates use the recorded
    slopes, so weights must be bit-equal for every batch split. `seen`: result and weights per operation. `blocks`:
    module names.
    """
    spec, precision = case.model, case.settings.get("precision", "fp32")
    if spec.get("half"):  # weights in two precisions
        return ""
    own = models.build(spec)
    plain = PlainMeZO(models.build(spec), rule_of(case), precision, seed=case.settings.get("seed", 0))
    trained = {name: [p] for name, p in own.named_parameters() if p.requires_grad}
    modules = [own.get_submodule(name) for name in blocks]
    measures, is_exact = _measures(case)
    saved = None
    for number, (op, its) in enumerate(zip(ops, seen, strict=False)):
        do, where = op["do"], f"op {number}, plain PyTorch: "
        habits.freeze(trained, op.get("freeze"))
        if do == "save":
            saved = copy.deepcopy(plain.masters), plain.num_steps
        elif do == "load" and saved is not None:
            plain.masters, plain.num_steps = copy.deepcopy(saved)
            measures = measures and not models.moves(spec)
        elif do == "lr":
            plain.rule = replace(plain.rule, lr=rule_of(case).lr * op["factor"])
        elif do in ("forward", "ungraded", "empty"):
            measures = measures and not models.moves(spec)
        elif do == "step" and isinstance(its.result, tuple):
            taking = plain.chosen(modules, own).__contains__
            losses = None
            if measures:
                torch.manual_seed(op["seed"])
                losses = plain.measure(lambda op=op: _loss(plain, case, op), taking)
            else:
                plain.num_steps += 1
            if isinstance(its.result[-1], ZerothOrderRecord):
                measured = its.result[-1]
                problem = _judge(plain, measured, losses, is_exact)
                if problem:
                    return where + problem
                plain.move(measured.slopes, taking)
                notes["by forwards, to the bit" if is_exact and measures else "by forwards"] += 1
        if its.weights is not None:
            problem = same(its.weights, plain.masters)
            if problem:
                return where + problem
    return ""


def _measures(case: Case) -> tuple[bool, bool]:
    """Return (plain PyTorch can measure the losses, the losses are bit-equal)."""
    spec, settings = case.model, case.settings
    is_cut = "micro_batch_size" in settings or case.world > 1
    is_exact = not is_cut and "head_chunk_bytes" not in settings
    is_wide = settings.get("precision") != "bf16"
    if not is_wide and (not is_exact or models.moves(spec)):
        return False, False
    if is_cut and (models.is_random(spec) or models.mixes_rows(spec)):
        return False, False
    # A shared unit moves the buffers for both passes before the next use.
    again = any(isinstance(tile, int) for tile in spec.get("tiles", ()))
    return not (again and models.moves(spec)), is_exact


def _loss(plain: PlainMeZO, case: Case, op: Op) -> float:
    """Return the loss over the rows on all ranks."""
    is_own = not op.get("loss_fn")
    shares = [models.batch(case.model, op["batch"], rank) for rank in range(case.world)]
    counts = [models.targets(case.model, share, is_own) for share in shares]
    losses = [
        float(models.loss_of(plain.model, share, is_own)) if count else 0.0
        for share, count in zip(shares, counts, strict=True)
    ]
    return sum(loss * (count / sum(counts)) for loss, count in zip(losses, counts, strict=True))


def _judge(
    plain: PlainMeZO, measured: ZerothOrderRecord, losses: list[tuple[float, float]] | None, is_exact: bool
) -> str:
    """Return the first error in a measured step, or an empty text."""
    if measured.step != plain.num_steps or measured.seed != plain.seed or measured.lr != plain.rule.lr:
        return f"it is told as step {measured.step} of seed {measured.seed} at {measured.lr}"
    slopes = tuple((plus - minus) / (2 * plain.rule.eps) for plus, minus in measured.losses)
    if slopes != measured.slopes:
        return f"the slopes {measured.slopes} are not those of the losses, {slopes}"
    for pair, wanted in zip(measured.losses, losses or (), strict=losses is not None):
        for one, other in zip(pair, wanted, strict=True):
            if one != other and (is_exact or abs(one - other) > _NEAR * max(1e-2, abs(other))):
                return f"the losses are {measured.losses}, and plain PyTorch gives {losses}"
    return ""
