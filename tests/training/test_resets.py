"""Momentum reset: runs with `optimizer.reset_every` against twenty lines of plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from offload.errors import ConfigError
from offload.parity import main as parity_command
from tests.integrations.plain import LR, SameBits
from tests.run_folder import cut
from tests.training.test_adapters import base  # noqa: F401
from tests.training.test_restarts import PLACES, assert_ranks_as_one, seen, stored  # noqa: F401

STEPS, EVERY, CLIP = 7, 3, 0.5
SETTINGS: dict[str, Any] = {
    "train__steps": STEPS,
    "train__max_grad_norm": CLIP,
    "optimizer__reset_every": EVERY,
    "optimizer__lr": LR,
    "optimizer__weight_decay": 0.1,
    "optimizer__betas": (0.9, 0.999),
    "optimizer__schedule": "constant",
    "optimizer__warmup_steps": 0,
    "checkpoint__every": 2,
}


class Torch(torch.optim.AdamW):
    """AdamW of torch, clipped. Independent of the engine's kernels, and so not bit-equal."""

    def __init__(self, model: Any, **_: Any) -> None:
        decay = [[p for p in model.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False)]
        groups = [{"params": parameters, "weight_decay": w} for parameters, w in zip(decay, (0.1, 0.0), strict=True)]
        super().__init__(groups, LR, (0.9, 0.999))

    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], CLIP)
        super().step()


def train(
    model: Any, batches: Sequence[Any], make_optimizer: Any = SameBits, every: int = EVERY
) -> Iterator[tuple[float, Any, Any]]:
    """Yield (loss, model, optimizer) after each step."""
    model.train()
    optimizer = make_optimizer(model, clip=CLIP, decayed=lambda name: "norm" not in name)
    for step, batch in enumerate(batches):
        if every and step and step % every == 0:
            optimizer.state.clear()  # zero moments, and a new count of updates
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), model, optimizer


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_run_is_twenty_lines_of_pytorch(
    run: Any,
    base: Path,  # noqa: F811
    tmp_path: Path,
    seen: list[dict[str, torch.Tensor]],  # noqa: F811
    place: str,
) -> None:
    """Equal bits: losses, weights and moments at each checkpoint, and after a resume at a reset and between two."""
    (tmp_path / "disk").mkdir()
    more = {"model__path": str(base), "offload__nvme_dir": str(tmp_path / "disk"), **SETTINGS}
    whole, lines, said = run("whole", **more, **PLACES[place])
    assert [f"step {step}  the optimizer states are reset" in said for step in (0, 3, 6)] == [False, True, True]
    batches = list(seen)
    for line, (loss, model, optimizer) in zip(
        lines, train(AutoModelForCausalLM.from_pretrained(base), batches), strict=True
    ):
        assert line["loss"] == loss
        if line["step"] in (2, 4, 6):
            found, named = stored(whole.dir / "checkpoints" / f"step-{line['step']}"), dict(model.named_parameters())
            assert found.keys() == named.keys()
            for name, planes in found.items():
                assert torch.equal(planes["weights"], named[name].detach().view(-1)), name
                for moment in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(planes[moment], optimizer.state[named[name]][moment].view(-1)), (name, moment)
    independent = train(AutoModelForCausalLM.from_pretrained(base), batches, Torch)
    assert [loss for loss, _, _ in independent] == pytest.approx([line["loss"] for line in lines], rel=1e-4)
    never = [loss for loss, _, _ in train(AutoModelForCausalLM.from_pretrained(base), batches, every=0)]
    assert [abs(loss - line["loss"]) > 1e-4 for loss, line in zip(never, lines, strict=True)][EVERY + 1 :] == [True] * 3
    for step in (2, 6):
        cut(whole.dir, f"from-{step}", *{*range(step + 2, STEPS + 1, 2), STEPS})
        again, its, _ = run(f"from-{step}", **more, **PLACES["device" if place == "cpu" else "cpu"])
        assert [line["loss"] for line in its] == [line["loss"] for line in lines]
        assert (again.export / "model.safetensors").read_bytes() == (whole.export / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_two_ranks_reset_as_one_process_does(run: Any, base: Path, tmp_path: Path) -> None:  # noqa: F811
    more = {"model__path": str(base), **SETTINGS, **PLACES["cpu"], "offload__zero_stage": 3}
    assert_ranks_as_one(run, tmp_path, STEPS, 6, STEPS, **more)


def test_parity_is_asked_of_steps_before_a_reset() -> None:
    with pytest.raises(ConfigError, match=r"\(optimizer.reset_every is 4\): set --steps to at most 4"):
        parity_command(["--steps", "5", "--optimizer.reset_every", "4"])
