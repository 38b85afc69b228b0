"""Trainers over two ranks with separate rows: engine ranks against DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine import ranks
from tests.engine.device import cpu_only
from tests.integrations.plain import assert_same_weights, needs

needs("accelerate")
pytestmark = cpu_only("accelerate does not know the simulated accelerator, and ranks share the CPU")

from tests.integrations import jobs  # noqa: E402


def assert_same(offloaded: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(offloaded, plain, strict=True):
        assert mine["loss"] == theirs["loss"]
        assert mine["eval_loss"] == theirs["eval_loss"]
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-7)
        assert_same_weights(mine["weights"], theirs["weights"])


@pytest.mark.slow
@pytest.mark.parametrize("average", [True, False], ids=["", "own counts"])
def test_a_run_is_that_of_ddp(tmp_path: Path, average: bool) -> None:
    """Losses, evaluations and weights are equal in every bit, also after a resume in new trainers."""
    assert_same(*both(tmp_path, average_tokens_across_devices=average))


@pytest.mark.slow
def test_accumulation_over_ranks(tmp_path: Path) -> None:
    """The summation order differs, so the comparison has a tolerance.

    DDP accumulates gradients per rank and reduces once. The engine reduces after each backward pass. With a large
    epsilon the update is proportional to the gradient and does not amplify the difference.
    """
    for mine, theirs in zip(*both(tmp_path, gradient_accumulation_steps=4, adam_epsilon=1.0), strict=True):
        for key in ("loss", "eval_loss", "norms"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6)
        for name, value in theirs["weights"].items():
            assert (mine["weights"][name] - value).abs().max() < 1e-6, name


def both(folder: Path, **how: Any) -> list[list[dict[str, Any]]]:
    """Return the rank results with an engine and with DDP."""
    return [
        ranks.run(2, jobs.trained, folder=str(folder / str(offloads)), offloads=offloads, **how)
        for offloads in (True, False)
    ]


OVER_RANKS = ("sft nll", "sft packing", "dpo", "kto", "reward", "grpo", "lora")


@pytest.mark.slow
@pytest.mark.parametrize("name", OVER_RANKS)
def test_trl_over_ranks(tmp_path: Path, name: str) -> None:
    """GRPO ranks generate texts with different lengths."""
    needs("trl")
    plain, offloaded = (
        ranks.run(2, jobs.trl_trained, name=name, folder=str(tmp_path), offloads=offloads) for offloads in (False, True)
    )
    assert_same(offloaded, plain)


@pytest.mark.slow
def test_a_script_over_accelerate(tmp_path: Path) -> None:
    offloaded, plain = (ranks.run(2, jobs.script, folder=str(tmp_path), offloads=each) for each in (True, False))
    for mine, theirs in zip(offloaded, plain, strict=True):
        assert mine["loss"] == theirs["loss"]
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-6)
        names = [name.removeprefix("module.") for name in theirs["weights"]]
        assert_same_weights(mine["weights"], dict(zip(names, theirs["weights"].values(), strict=True)))


@pytest.mark.slow
def test_a_plain_trainer_over_ranks_is_refused(tmp_path: Path) -> None:
    for said in ranks.run(2, jobs.factory_refused, folder=str(tmp_path)):
        assert "does not work over 2 ranks" in said
        assert "OffloadTrainer" in said


@pytest.mark.slow
def test_what_rank_0_cannot_write_all_ranks_raise(tmp_path: Path) -> None:
    """Otherwise the other ranks would continue, or wait for rank 0."""
    one, other = ranks.run(2, jobs.saved_where_it_cannot, folder=str(tmp_path))
    assert one == other
    assert all(one), one
    named = ("config.json", *["s a directory"] * 3, "Bad file descriptor", "/file")
    for said, name in zip(one, named, strict=True):
        assert str(tmp_path) in said
        assert name in said
