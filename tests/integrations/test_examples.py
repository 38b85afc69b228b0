"""Every example runs without a network, with the command in the first lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import forks
from tests.integrations.plain import needs
from tests.ports import free_port

FOLDER = forks.ROOT / "examples"
NEEDED = {
    "own_loop": (),
    "trainer": ("accelerate",),
    "peft_lora": ("accelerate", "peft"),
    "trl_sft": ("accelerate", "datasets", "trl"),
    "trl_dpo": ("accelerate", "datasets", "trl"),
    "trl_grpo": ("accelerate", "datasets", "trl"),
    "diffusers_full": ("accelerate", "diffusers"),
}
QUICK = ("own_loop",)
AS_WRITTEN = ("trainer", "peft_lora", "trl_sft")
"""Examples with default steps and lengths, as in docs/how-to/trainer.md. The others run two short steps."""
SHORT = ("--steps", "2", "--length", "64")


def start(name: str, output: Path, *flags: str, rank: int = 0, **variables: str) -> forks.Forked:
    words = [name, "--output", str(output), *flags]
    code = (
        f"import runpy, sys; sys.path.insert(0, {str(FOLDER)!r}); sys.argv = {words!r}; "
        f"runpy.run_path({str(FOLDER / name)!r} + '.py', run_name='__main__')"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    return forks.start(["-c", code], env=env, rank=rank)


def test_there_is_a_test_of_each() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == {*NEEDED, "toy", "real_model", "real_trainer", "noise_stage"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDED)
def test_an_example_runs(tmp_path: Path, name: str) -> None:
    needs(*NEEDED[name])
    process = start(name, tmp_path / "made", *(() if name in AS_WRITTEN else SHORT))
    said, complained = process.communicate()
    assert process.wait() == 0, complained[-4000:]
    assert f"saved to {tmp_path / 'made'}" in said
    (weights,) = (tmp_path / "made").glob("*.safetensors")
    assert all(value.isfinite().all() for value in load_file(weights).values())
    if name == "diffusers_full":
        from diffusers import FluxTransformer2DModel

        loaded = FluxTransformer2DModel.from_pretrained(tmp_path / "made")
        assert set(loaded.state_dict()) == set(load_file(weights))


@pytest.mark.slow
def test_the_trainer_runs_over_two_ranks(tmp_path: Path) -> None:
    needs("accelerate")
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        start("trainer", tmp_path / "made", *SHORT, rank=rank, RANK=str(rank), LOCAL_RANK=str(rank), **common)
        for rank in range(2)
    ]
    told = [process.communicate() for process in started]
    assert [process.wait() for process in started] == [0, 0], told
    losses = [said.split("eval loss ")[1].split()[0] for said, _ in told]
    assert losses[0] == losses[1]
    assert "rank 1 of 2" in told[1][0]
