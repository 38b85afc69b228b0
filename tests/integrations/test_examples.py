"""Every example runs without a network, with the command in the first lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import forks
from tests.integrations.plain import needs

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


def code_of(name: str, output: Path, *flags: str) -> str:
    """Return the code of a process with an example."""
    words = [name, "--output", str(output), *flags]
    return (
        f"import runpy, sys; sys.path.insert(0, {str(FOLDER)!r}); sys.argv = {words!r}; "
        f"runpy.run_path({str(FOLDER / name)!r} + '.py', run_name='__main__')"
    )


def test_there_is_a_test_of_each() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == {
        *NEEDED,
        "toy",
        "real_model",
        "real_trainer",
        "real_embeddings",
        "real_distill",
        "noise_stage",
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDED)
def test_an_example_runs(tmp_path: Path, name: str) -> None:
    needs(*NEEDED[name])
    code = code_of(name, tmp_path / "made", *(() if name in AS_WRITTEN else SHORT))
    done = forks.run(["-c", code], env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"saved to {tmp_path / 'made'}" in done.stdout
    (weights,) = (tmp_path / "made").glob("*.safetensors")
    assert all(value.isfinite().all() for value in load_file(weights).values())
    if name == "diffusers_full":
        from diffusers import FluxTransformer2DModel

        loaded = FluxTransformer2DModel.from_pretrained(tmp_path / "made")
        assert set(loaded.state_dict()) == set(load_file(weights))


@pytest.mark.slow
def test_the_trainer_runs_over_two_ranks(tmp_path: Path) -> None:
    needs("accelerate")
    done = forks.run_ranks(["-c", code_of("trainer", tmp_path / "made", *SHORT)], HF_HUB_OFFLINE="1")
    assert [each.returncode for each in done] == [0, 0], done
    losses = [each.stdout.split("eval loss ")[1].split()[0] for each in done]
    assert losses[0] == losses[1]
    assert "rank 1 of 2" in done[1].stdout
