"""Runs without gradients (MeZO): the log, resume after a kill, and replayed weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from offload import replay
from offload.app.config.config import Config
from offload.app.training.trainer import Trainer
from offload.errors import ConfigError
from tests.run_folder import write_rows
from tests.training.conftest import HOST, lines_of

RULE = {
    "optimizer__name": "mezo",
    "optimizer__lr": 1e-3,
    "optimizer__layer_fraction": 0.7,
    "optimizer__magnitude_quantile": 0.9,
    "checkpoint__every": 2,
    **HOST,
}


def values(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "master"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_the_log_makes_the_weights_again(run: Any, tmp_path: Path, precision: str, master: str, capsys: Any) -> None:
    base, _, _ = run("base", train__steps=2)
    begins_at = {"model__path": str(base.export), "model__init": "pretrained", "train__precision": precision}
    rule = {**RULE, "optimizer__master": master}
    whole, lines, _ = run("whole", **rule, **begins_at, train__steps=6)
    assert {"seed", "projected_grad", "loss_plus", "loss_minus"} <= lines[-1].keys()
    run("part", **rule, **begins_at, train__steps=3)
    given = {"run.dir": str(tmp_path / "part"), "optimizer.num_perturbations": 1, "train.steps": 6}
    with pytest.raises(ConfigError, match="adamw has no such setting"):
        Config.load(None, {**given, "checkpoint.resume": "never"}, may_go_on=True)
    # the other settings and the update rule come from the run
    part = Trainer(Config.load(None, given, may_go_on=True)).run()
    again = lines_of(part.dir)
    measured = [(line["step"], line["projected_grad"], line["lr"]) for line in again]
    assert [each[:1] for each in measured] == [(step,) for step in range(1, 7)]
    assert part.loss == pytest.approx(whole.loss, rel=0.1)  # the learning-rate schedule differs
    for begin in (base.export, part.dir / "checkpoints" / "step-2"):
        out = tmp_path / f"again-{begin.name}"
        assert replay.main([str(begin), str(part.dir), "--out", str(out)]) == 0
        found, wanted = values(out), values(part.dir / "hf")
        assert all((found[name] == wanted[name]).all() for name in wanted)
        assert found.keys() == wanted.keys()
    assert "after 6 steps" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="the weights before step 1 differ from those"):
        replay.main([str(part.export), str(part.dir), "--out", str(tmp_path / "other")])
    changed = lines_of(part.dir)
    changed[3]["rule"] = changed[0]["rule"][::-1]
    write_rows(part.dir / "metrics.jsonl", changed)
    with pytest.raises(ConfigError, match="step 4 was recorded with other MeZO settings"):
        replay.main([str(base.export), str(part.dir), "--out", str(tmp_path / "changed")])
    with pytest.raises(ConfigError, match="is there already"):
        replay.main([str(base.export), str(part.dir), "--out", str(out)])
    with pytest.raises(ConfigError, match="only runs with mezo"):
        replay.main([str(base.export), str(base.dir)])


@pytest.mark.slow
def test_a_log_with_holes_is_refused(run: Any, tmp_path: Path, capsys: Any) -> None:
    """Skipped steps leave no hole. Lost lines, truncated lines in the middle and lines of another rule are refused."""
    base, _, _ = run("base", train__steps=1)
    whole, lines, _ = run("whole", **RULE, model__path=str(base.export), model__init="pretrained", train__steps=4)
    assert ["weights" in line for line in lines] == [True, False, False, False]
    log, numbers = whole.dir / "metrics.jsonl", iter(range(100))

    def replayed(*texts: str) -> None:
        log.write_text("".join(f"{text}\n" for text in texts))
        replay.main([str(base.export), str(whole.dir), "--out", str(tmp_path / f"out-{next(numbers)}")])

    texts = [json.dumps(line) for line in lines]
    skipped = {key: value for key, value in lines[1].items() if key not in ("seed", "projected_grad")}
    replayed(texts[0], json.dumps({**skipped, "loss": None}), *texts[2:])
    assert "replaying 3 steps, 1 more were skipped" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="the record is of step 3, but 1 steps are done"):
        replayed(texts[0], *texts[2:])
    with pytest.raises(ConfigError, match="the record is of step 2, but 0 steps are done"):
        replayed(*texts[1:])
    with pytest.raises(ConfigError, match="line 2 of .* is not a step"):
        replayed(texts[0], texts[1][:50], *texts[2:])
    with pytest.raises(ConfigError, match=r"it must be \(step, seed, slopes\)"):
        replayed(texts[0], json.dumps(skipped), *texts[2:])
    replayed(*texts[:3], texts[3][:50])
    assert "after 3 steps" in capsys.readouterr().out
    for line in lines:
        line.pop("weights", None)  # older runs do not record the weights
    replayed(*map(json.dumps, lines))
