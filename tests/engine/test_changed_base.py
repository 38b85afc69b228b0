"""Checkpoints with trainable parameters only, after edits to a frozen base and after moment pruning, on every tier."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import AdamW, Engine, Placement
from offload.checkpoint.reader import Reader
from offload.errors import ConfigError
from offload.extras.rules.factored import Adafactor
from tests.cases.models import batches, build, llama, share, tokens
from tests.engine import ranks
from tests.engine.compare import PLACES, assert_same, placed, same_bits, weights
from tests.engine.inside import State, states
from tests.integrations.plain import needs

needs("peft")

from peft import LoraConfig, get_peft_model  # noqa: E402

SHARE = 0.9


def adapted(dtype: torch.dtype = torch.float32, rank: int = 4) -> Any:
    model = build(llama).to(dtype)
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj", "down_proj"], init_lora_weights=False))


def names_of(engine: Engine) -> tuple[list[str], list[str]]:
    """Return (names of weights beneath the adapter, names of adapter matrices)."""
    own = dict(engine.model.named_parameters())
    return [name for name in own if "base_layer" in name], [name for name in own if "lora_" in name]


def change(engine: Engine) -> tuple[dict[str, State], dict[str, torch.Tensor]]:
    """Edit the weights beneath the adapter and prune the adapter moments. Return (states before, all weights after)."""
    beneath, matrices = names_of(engine)
    before, wanted = states(engine), weights(engine)
    for name, value in engine.edit(beneath):
        value.add_(0.25)
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
    before, wanted = change(engine)
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
    change(engine)
    with pytest.raises(ConfigError, match=r"engine.edit has changed .*down_proj.* since"):
        engine.load_checkpoint(tmp_path / "saved")
    engine.close()


def test_moments_in_codes_are_all_pruned_or_none() -> None:
    model = get_peft_model(build(lambda: llama(hidden_size=64)), LoraConfig(r=64, target_modules=["q_proj"]))
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
        change(engine)
        engine.save_checkpoint(Path(folder) / "saved", trained_only=True)
    engine.step(share(tokens(1), (2, 2), engine.rank))
    found = [value for _, value in engine.named_parameters()]
    engine.close()
    return found


@pytest.mark.slow
def test_ranks_change_and_prune_what_one_process_does(tmp_path: Path) -> None:
    alone = Engine(adapted(rank=32), micro_batch_size=2)
    alone.step(tokens(0))
    change(alone)
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
