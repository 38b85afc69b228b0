"""Parameters edited and moments pruned between steps: training continues as plain PyTorch does after the same edit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import AdamW, Engine, Placement
from offload.checkpoint.reader import Reader
from offload.errors import ConfigError
from offload.extras.rules.factored import Adafactor
from tests.cases.models import batches, build, gpt2, llama, lora, share, tokens
from tests.engine import ranks
from tests.engine.compare import PLACES, assert_same, assert_weights, placed, same_bits, step_of, weights
from tests.engine.device import twin
from tests.engine.inside import State, states, updating_device
from tests.engine.reference import Reference

AUTO = Placement(parameters="auto", optimizer="auto", device_memory="288KiB")
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


# -- an edited base below an adapter, and pruned moments ---------------------------------------------------------------

SHARE = 0.9


def adapted(dtype: torch.dtype = torch.float32, rank: int = 4) -> nn.Module:
    return build(lora(lambda: llama().to(dtype), r=rank))


def names_of(engine: Engine) -> tuple[list[str], list[str]]:
    """Return (names of weights beneath the adapter, names of adapter matrices)."""
    own = dict(engine.model.named_parameters())
    return [name for name in own if "base_layer" in name], [name for name in own if "lora_" in name]


def change_and_prune(engine: Engine) -> tuple[dict[str, State], dict[str, torch.Tensor]]:
    """Edit the weights beneath the adapter and prune the adapter moments. Return (states before, all weights after).

    Each rank writes other values: those of rank 0 count.
    """
    beneath, matrices = names_of(engine)
    before, wanted = states(engine), weights(engine)
    for name, value in engine.edit(beneath):
        value.add_(0.25 + engine.rank)
        wanted[name] = wanted[name] + 0.25
    engine.prune_moments(matrices, SHARE)
    return before, wanted


def pruned(values: torch.Tensor, share: float) -> torch.Tensor:
    """Keep only magnitudes above `torch.quantile`, as the paper's code does."""
    kept = values.float().abs() > torch.quantile(values.float().abs().view(-1), share)
    return torch.where(kept, values, 0)


def moments(state: State) -> dict[str, torch.Tensor]:
    every = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq, **state.others}
    return {name: value for name, value in every.items() if value is not None and value.numel()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "precision", "files", "rule"),
    [
        ("cpu", "fp32", torch.float32, AdamW(lr=1e-2)),
        ("device", "bf16", torch.bfloat16, AdamW(lr=1e-2, states="bf16")),
        ("nvme", "bf16", torch.float32, Adafactor(lr=1e-2)),
    ],
)
def test_a_checkpoint_of_what_trains_has_the_base_where_it_was_changed(
    place: str, precision: str, files: torch.dtype, rule: Any, tmp_path: Path
) -> None:
    """The checkpoint has base weights only where edited. Another engine over the original base resumes from there,
    bit-equal.
    """
    how: dict[str, Any] = {"optimizer": rule, "precision": precision}
    engine = Engine(adapted(files), placement=placed(place, tmp_path), **how)
    for batch in batches(2):
        engine.step(batch)
    before, wanted = change_and_prune(engine)
    beneath, matrices = names_of(engine)
    after = states(engine)
    for name in matrices:
        found, its = moments(after[name]), moments(before[name])
        assert found.keys() == its.keys()
        assert found
        for key, value in its.items():
            assert same_bits(found[key], pruned(value, SHARE)), (name, key)
            assert 0 < int(found[key].count_nonzero()) < 0.2 * value.numel() + 1
        assert after[name].num_steps == before[name].num_steps == 2
    if precision == "bf16" and files == torch.bfloat16:  # the base is stored in bf16 too
        wanted |= {name: wanted[name].bfloat16().float() for name in beneath}
    assert_same(weights(engine), wanted)
    engine.save_checkpoint(tmp_path / "saved", trained_only=True)
    with Reader(tmp_path / "saved") as reader:
        assert set(reader.contents) == {*beneath, *matrices}
        assert reader.meta["engine"]["changed"] == sorted(beneath)
    again = Engine(adapted(files), placement=placed("cpu" if place != "cpu" else "nvme", tmp_path), **how)
    again.step(tokens(9))
    again.load_checkpoint(tmp_path / "saved")
    for batch in batches(2):
        assert engine.step(batch).loss == again.step(batch).loss
    assert_same(weights(again), weights(engine))
    again.save_checkpoint(tmp_path / "saved", trained_only=True)
    with Reader(tmp_path / "saved") as reader:
        assert reader.meta["engine"]["changed"] == sorted(beneath)
    engine.close()
    again.close()


def test_a_base_that_was_changed_takes_no_checkpoint_from_before(tmp_path: Path) -> None:
    engine = Engine(adapted())
    engine.step(tokens(0))
    engine.save_checkpoint(tmp_path / "saved", trained_only=True)
    change_and_prune(engine)
    with pytest.raises(ConfigError, match=r"engine.edit has changed .*down_proj.* since"):
        engine.load_checkpoint(tmp_path / "saved")
    engine.close()


def test_moments_in_codes_are_all_pruned_or_none() -> None:
    model = build(lora(lambda: llama(hidden_size=64), r=64, target_modules=["q_proj"]))
    engine = Engine(model, AdamW(states="int8"))
    engine.step(tokens(0))
    _, matrices = names_of(engine)
    with pytest.raises(ConfigError, match="are stored in int8, where a part cannot be set to zero"):
        engine.prune_moments(matrices, SHARE)
    with pytest.raises(ConfigError, match="the model has no parameter 'lora_Z'"):
        engine.prune_moments(["lora_Z"], 1)
    for part in (0, 1):
        engine.prune_moments(matrices, part)
        kept = [value.count_nonzero() for name in matrices for value in moments(states(engine)[name]).values()]
        assert any(kept) == (part == 0)
    engine.step(tokens(1))
    engine.close()


def ranked(zero_stage: int, folder: str, *, goes_on: bool) -> list[torch.Tensor]:
    """Train, edit the base and save; or resume from the saved state. Ranks shard the matrices."""
    engine = Engine(adapted(rank=32), placement=Placement(**PLACES["cpu"]), zero_stage=zero_stage)
    if goes_on:
        engine.load_checkpoint(Path(folder) / "saved")
    else:
        engine.step(share(tokens(0), (2, 2), engine.rank))
        change_and_prune(engine)
        engine.save_checkpoint(Path(folder) / "saved", trained_only=True)
    engine.step(share(tokens(1), (2, 2), engine.rank))
    found = [value for _, value in engine.named_parameters()]
    engine.close()
    return found


@pytest.mark.slow
def test_ranks_change_and_prune_what_one_process_does(tmp_path: Path) -> None:
    alone = Engine(adapted(rank=32), micro_batch_size=2)
    alone.step(tokens(0))
    change_and_prune(alone)
    alone.step(tokens(1))
    first = ranks.run(2, ranked, zero_stage=1, folder=str(tmp_path), goes_on=False)
    again = ranks.run(2, ranked, zero_stage=3, folder=str(tmp_path), goes_on=True)
    for told in zip(*first, *again, weights(alone).values(), strict=True):
        assert all(torch.equal(value, told[0]) for value in told[:-1])
        assert torch.allclose(told[0], told[-1], atol=1e-5)
    alone.close()
    with Reader(tmp_path / "saved") as reader:
        for name in (name for name in reader.contents if "lora_" in name):
            found = torch.empty(math.prod(reader.contents[name].shape))
            reader.read(name, "exp_avg", 0, found)
            assert int(found.count_nonzero()) == found.numel() - 1 - int(SHARE * (found.numel() - 1)), name
