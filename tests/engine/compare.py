"""Train a model with the engine and with the reference, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import AdamW, Engine, Placement
from tests.engine.device import set_seed
from tests.engine.inside import State, updating_device
from tests.engine.reference import Batch, LossFunction, Reference

PROPORTIONAL = AdamW(lr=0.05, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0)
"""Update by nearly lr * gradient, for comparison within a tolerance. AdamW turns a gradient of 1e-9 into a full step,
so a different summation order would change weights by a full step.
"""
PLACES: dict[str, dict[str, Any]] = {
    "device": {"parameters": "device", "optimizer": "device"},
    "cpu": {"parameters": "cpu", "optimizer": "cpu"},
    "nvme": {"parameters": "nvme", "optimizer": "nvme", "gradients": "nvme"},
}
"""Placements of all states on one tier."""


def placed(place: str, folder: Path, **more: Any) -> Placement:
    """Return the placement with a name in `PLACES`, on disk in `folder`."""
    return Placement(**PLACES[place], **more, nvme_dir=str(folder) if place == "nvme" else None)


def train_both(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    loss_fn: LossFunction | None = None,
    count: Callable[[Batch], int] | None = None,
    kept: Callable[[str], bool] = lambda name: False,
    group: Callable[[nn.Module], None] = lambda model: None,
    shown: Callable[[torch.Tensor], torch.Tensor] = lambda master: master,
    plain: nn.Module | None = None,
    within: float | None = None,
    norm_within: float = 0.0,
    whole: bool = False,
    **settings: Any,
) -> tuple[Engine, Reference]:
    """Train both and compare after every step: bit for bit, or `within` a share of the layer's scale. `norm_within`:
    distance of norms, of which the squares are summed in another order.

    `plain`: the model to train by the reference, instead of a `model` copy. `whole`: the reference trains on whole
    batches and ignores micro_batch_size. `kept`, `group`, `shown`: see `Reference`.
    """
    known = {
        key: settings[key] for key in ("optimizer", "precision", "max_grad_norm", "micro_batch_size") if key in settings
    }
    if whole:
        del known["micro_batch_size"]
    if within is not None:
        known["optimizer"] = settings["optimizer"] = PROPORTIONAL
    reference = Reference(plain or model, kept=kept, group=group, shown=shown, **known)
    engine = Engine(model, **settings)
    reference.update_on(updating_device(engine))
    for number, batch in enumerate(batches):
        wanted = step_of(reference, batch, loss_fn, count, seed=100 + number)
        assert math.isfinite(wanted[0]), "the reference itself is not finite"
        found = step_of(engine, batch, loss_fn, seed=100 + number)
        near = (wanted[0], pytest.approx(wanted[1], rel=norm_within, abs=0))
        assert found == (near if within is None else pytest.approx(wanted, rel=within, abs=0)), f"step {number}"
        assert_weights(engine, reference, within, f"after step {number}")
    return engine, reference


def step_of(
    trainer: Engine | Reference,
    batch: Batch,
    loss_fn: LossFunction | None = None,
    count: Callable[[Batch], int] | None = None,
    seed: int | None = None,
) -> tuple[float, float]:
    """Take a step. Return (loss, gradient norm). `seed` gives two trainers the same dropout masks."""
    if seed is not None:
        set_seed(seed)
    if isinstance(trainer, Engine):
        result = trainer.step(batch, loss_fn=loss_fn)
        return result.loss.item(), result.grad_norm
    loss, norm = trainer.step(batch, loss_fn, count)
    return loss.item(), norm


def backward_of(
    trainer: Engine | Reference, loss_of: Callable[..., torch.Tensor], *args: Any, **more: Any
) -> torch.Tensor:
    """Run a backward of `loss_of(model, ...)`. Return the loss."""
    loss = loss_of(trainer.model, *args, **more)
    if isinstance(trainer, Engine):
        trainer.backward(loss)
    else:
        loss.backward()
        trainer.collect()
    return loss.detach()


def own_step_of(trainer: Engine | Reference, *losses: Callable[[nn.Module], torch.Tensor]) -> tuple[float, float]:
    """Take a step of an own loop, with one backward for each of `losses(model)`. Return (last loss, gradient norm)."""
    for loss_of in losses:
        loss = backward_of(trainer, loss_of)
    result = trainer.update()
    return loss.item(), result if isinstance(result, float) else result.grad_norm


def backward_both(
    engine: Engine, reference: Reference, loss_of: Callable[..., torch.Tensor], *args: Any, **more: Any
) -> torch.Tensor:
    """Run a backward of `loss_of(model, ...)` for both models. Return the engine's loss."""
    loss = backward_of(engine, loss_of, *args, **more)
    backward_of(reference, loss_of, *args, **more)
    return loss


def update_both(engine: Engine, reference: Reference, when: str = "", within: float | None = None) -> Any:
    """Update both, and compare norms and weights. Return the engine's result."""
    result, norm = engine.update(), reference.update()
    assert result.grad_norm == (norm if within is None else pytest.approx(norm, rel=within)), when
    assert_weights(engine, reference, within, when)
    return result


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return dict(engine.named_parameters())


def assert_weights(engine: Engine, reference: Reference, within: float | None = None, when: str = "") -> None:
    """Compare all master weights with the reference."""
    assert_same(weights(engine), reference.masters, within, when)


def assert_same(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], within: float | None = None, when: str = ""
) -> None:
    """Compare named weights: bit for bit, or `within` a share of the layer's largest weight."""
    assert list(found) == list(wanted)
    if within is None:
        different = [name for name in wanted if not same_bits(found[name], wanted[name])]
        assert not different, f"{when}: {len(different)} of {len(wanted)} differ, first {different[:3]}"
        return
    scales: dict[str, float] = {}
    for name, value in wanted.items():
        layer = name.rpartition(".")[0]
        scales[layer] = max(scales.get(layer, 0.0), value.abs().max().item())
    far = {
        name: apart / scales[name.rpartition(".")[0]]
        for name, value in wanted.items()
        if (apart := (found[name].cpu() - value.cpu()).abs().max().item()) > within * scales[name.rpartition(".")[0]]
    }
    assert not far, f"{when}: too far apart, as a share of the layer's scale: {far}"


def assert_same_states(found: Mapping[str, State], wanted: Mapping[str, State]) -> None:
    """Compare optimizer states and update counts bit for bit, by parameter name."""
    assert {name: state.num_steps for name, state in found.items()} == {
        name: state.num_steps for name, state in wanted.items()
    }
    for name, state in wanted.items():
        other = found[name]
        for mine, theirs in zip(
            (state.exp_avg, state.exp_avg_sq, *state.others.values()),
            (other.exp_avg, other.exp_avg_sq, *other.others.values()),
            strict=True,
        ):
            assert (mine is None) == (theirs is None), name
            assert mine is None or same_bits(mine, theirs), name


def rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return fp32 master weights as an engine computes with them: halves go away from zero in bf16."""
    if dtype != torch.bfloat16:
        return master.to(dtype)
    high = (master.view(torch.int32).long() + 0x8000) >> 16
    return high.to(torch.int16).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors have equal bits, on any device. NaN equals NaN, and 0 differs from -0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
