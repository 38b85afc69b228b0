"""Parameters edited between steps: training continues as plain PyTorch does after the same edit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offload import Engine, Placement
from offload.errors import ConfigError
from tests.cases.models import batches, build, gpt2, llama, share, tokens
from tests.engine import ranks
from tests.engine.compare import assert_same, assert_weights, placed, step_of, weights
from tests.engine.device import twin
from tests.engine.inside import updating_device
from tests.engine.reference import Reference

AUTO = Placement(parameters="auto", optimizer="auto", device_memory="256KiB")
UNCLIPPED = {"clip": "speculative", "max_grad_norm": 100.0}
"""Updates run during the backward; a correction would cost a few ulps."""


def change(name: str, value: torch.Tensor) -> None:
    """Scale or shift `value` depending on the name, like a merge or a reset."""
    value.mul_(0.5) if "mlp" in name else value.add_(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "precision", "settings"),
    [("cpu", "bf16", UNCLIPPED), ("device", "fp32", {}), ("nvme", "bf16", {}), ("auto", "fp32", {"prefetch": 3})],
)
def test_training_goes_on_from_what_was_written(
    place: str, precision: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = build(gpt2)
    reference = Reference(model, precision=precision, max_grad_norm=settings.get("max_grad_norm", 1.0))
    where = AUTO if place == "auto" else placed(place, tmp_path)
    engine = Engine(model, placement=where, precision=precision, **settings)
    reference.update_on(updating_device(engine))
    for number, batch in enumerate(batches(3)):
        step_of(reference, batch, seed=number)
        step_of(engine, batch, seed=number)
        names = [name for name in reference.masters if "ln" not in name]
        for name in names:
            change(name, reference.masters[name])
            reference._show(name)
        for name, value in engine.edit(names):
            assert (value.dtype, value.device.type, value.shape) == (
                torch.float32,
                "cpu",
                reference.masters[name].shape,
            )
            change(name, value)
            if "wte" in name:
                engine.evaluate(batch)  # copies weights to the device that are edited later
        assert_weights(engine, reference, None, f"after edit {number}")
    engine.close()


def test_an_edit_of_all_reaches_late_updates_and_what_is_read() -> None:
    engine = Engine(build(llama), delay=1)
    for batch in batches(2):
        engine.step(batch)
    wanted = {name: value * 2 for name, value in engine.named_parameters()}
    for _, value in engine.edit():
        value.mul_(2)
    assert_same(weights(engine), wanted)
    plain = build(llama)
    plain.load_state_dict(wanted, strict=False)
    assert engine.evaluate(tokens(5)).item() == twin(plain).eval()(**tokens(5)).loss.item()
    engine.close()


def write(engine: Engine, names: list[str] | None, first: Any) -> None:
    for _, value in engine.edit(names):
        value.view(-1)[0] = first


def test_what_cannot_be_written_leaves_all_as_it_was() -> None:
    engine = Engine(build(llama))
    before = weights(engine)
    with pytest.raises(ConfigError, match=r"'model.norm.weigth' \(did you mean model.norm.weight\?\)"):
        engine.edit(["model.norm.weigth"])
    with pytest.raises(ConfigError, match="1 of 32 values of model.norm.weight that are not finite"):
        write(engine, ["model.norm.weight"], float("nan"))
    with pytest.raises(TypeError):
        write(engine, None, "no number")
    assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())
    engine.backward(engine.model(**tokens(0)).loss)
    with pytest.raises(ConfigError, match="during a step of your training loop"):
        engine.edit()
    engine.update()
    engine.close()


def edited(zero_stage: int) -> list[torch.Tensor]:
    """Train, write different values on each rank, and train again."""
    engine = Engine(build(llama), zero_stage=zero_stage)
    for step in range(2):
        engine.step(share(tokens(step), (2, 2), engine.rank))
        for name, value in engine.edit():
            change(name, value)
            value.add_(engine.rank)
    found = [value for _, value in engine.named_parameters()]
    engine.close()
    return found


@pytest.mark.slow
def test_ranks_have_what_rank_0_writes() -> None:
    reference = Reference(build(llama), micro_batch_size=2)
    for step in range(2):
        reference.step(tokens(step))
        for name in reference.masters:
            change(name, reference.masters[name])
            reference._show(name)
    for told in ranks.run(2, edited, zero_stage=3):
        for found, wanted in zip(told, reference.masters.values(), strict=True):
            assert torch.allclose(found, wanted, atol=1e-6)
