"""Command output before the slow torch import, and commands without torch.

In these tests torch and other large packages are stub modules: an import ends the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload import __version__
from tests import forks

ENDED = 77  # no exit code in the package


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A process environment with stub packages: an import of torch or another slow package ends the process."""
    folder = tmp_path_factory.mktemp("stubs")
    for name in ("torch", "transformers", "tokenizers", "safetensors", "numpy", "cpuinfo", "rich", "jinja2"):
        (folder / f"{name}.py").write_text(f"raise SystemExit({ENDED})\n")
    return {"PYTHONPATH": f"{folder}:{forks.ROOT}", "PATH": "/usr/bin:/bin"}


def start(environment: dict[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "offload", *words],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=forks.PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "what"), [([], "loading torch and transformers"), (["--gpus", "2"], "starting 2 ranks")]
)
def test_training_says_something_before_it_imports_torch(
    words: list[str], what: str, without_torch: dict[str, str], tmp_path: Path
) -> None:
    done = start(without_torch, tmp_path, "train", *words)
    assert done.stdout == f"offload {__version__}: {what} ...\n", done.stderr  # pipes and terminals get the line
    assert done.returncode == ENDED


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "launcher"), [("1", {}), ("0", {"OFFLOAD_LAUNCHER": str(os.getpid())})])
def test_of_several_ranks_the_first_says_it_or_who_started_them(
    rank: str, launcher: dict[str, str], without_torch: dict[str, str], tmp_path: Path
) -> None:
    done = start({**without_torch, "RANK": rank, "WORLD_SIZE": "2", **launcher}, tmp_path, "train")
    assert (done.stdout, done.returncode) == ("", ENDED), done.stderr


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["train", "--help"], 0, "--train.steps"),
        (["train", "--help-extra"], 0, "--optimizer.decay_1d"),
        (["train", "--train.stpes", "5"], 2, "did you mean train.steps?"),
        pytest.param(["train", "--train.steps", "many"], 2, "train.steps is 'many'", marks=pytest.mark.slow),
        (["train", "--config", "broken.yaml"], 2, "broken.yaml"),
        (["trian"], 2, "did you mean train?"),
        (["--version"], 0, __version__),
        (["bench", "--help"], 0, "plain PyTorch"),
        *(
            pytest.param([name, "--help"], 0, "Exit codes: 0", marks=pytest.mark.slow)
            for name in ("export", "verify", "generate")
        ),
    ],
)
def test_what_needs_no_torch_is_answered_without(
    words: list[str], code: int, what: str, without_torch: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "broken.yaml").write_text("train: {steps: [")
    done = start(without_torch, tmp_path, *words)
    assert done.returncode == code, done.stderr
    assert what in (done.stderr if code else done.stdout)
    assert code == 0 or not done.stdout


def test_modules_that_commands_load_early_import_no_torch() -> None:
    slow = "{'torch', 'transformers', 'tokenizers'}"
    early = ", ".join(f"offload.{module}" for module in ("extras.data.dataset", "native.kernels", "app.training.task"))
    code = f"import sys, {early}; sys.exit(str({slow} & set(sys.modules)) if {slow} & set(sys.modules) else 0)"
    assert subprocess.run([sys.executable, "-c", code], cwd=forks.ROOT, check=False).returncode == 0


@pytest.mark.parametrize("module", ["offload.train", "offload.plan", "offload.parity"])
def test_an_interrupt_while_the_command_line_is_loaded_shows_no_traceback(module: str, tmp_path: Path) -> None:
    for name in ("tyro", "pydantic", "yaml"):
        (tmp_path / f"{name}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, "-m", module],
        env={"PYTHONPATH": f"{tmp_path}:{forks.ROOT}", "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=forks.PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "offload: interrupted; nothing was saved.\n")


def test_torch_is_imported_without_the_collector_which_works_again_afterwards() -> None:
    """The collector is off during the import. A process with torch already imported is unchanged."""
    program = (
        "import gc, sys\n"
        "from offload.app.config.command_line import importing\n"
        "with importing():\n"
        "    assert not gc.isenabled()\n"
        "    sys.modules['torch'] = kept = []\n"
        "assert gc.isenabled() and gc.get_freeze_count()\n"
        "assert not any(each is kept for each in gc.get_objects())\n"
        "gc.unfreeze()\n"
        "with importing():\n"
        "    assert gc.isenabled()\n"
        "assert not gc.get_freeze_count()\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=forks.ROOT, timeout=forks.PATIENCE_S, check=True)
