"""Install a wheel into a separate environment outside the tree, and run the commands and an engine there.

python tests/wheel.py dist/offload-*.whl     # called by `make wheel`; torch comes from the pip index
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGINE = """
import torch
from offload import Engine, Placement
from offload.native import kernels

assert kernels.describe()["native"], "the kernels are not in the wheel"
model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(6)))
engine = Engine(model, placement=Placement(device_memory="64KiB"))
batch = {"input": torch.randn(8, 32)}
losses = [float(engine.step(batch, lambda out, _: out.square().mean()).loss) for _ in range(3)]
assert losses[2] < losses[0], losses
engine.close()
print("engine:", *(f"{loss:.4f}" for loss in losses))
"""


def main(wheel: Path) -> None:
    """Install and run. Raises CalledProcessError or AssertionError on failure."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        print(f"installing {wheel.name} ({wheel.stat().st_size / 2**20:.2f} MiB) into {folder} ...", flush=True)
        venv.create(folder / "env", with_pip=True)
        bin_folder = folder / "env" / "bin"
        pip = [bin_folder / "python", "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        subprocess.run([*pip, "-c", ROOT / "constraints.txt", wheel.resolve()], cwd=folder, check=True)
        (library,) = (folder / "env").rglob("offload/_core*.so")
        needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
        print(needed, end="")
        assert not any(name in needed for name in ("libtorch", "libcuda", "libc10", "not found")), needed
        for words in (
            ["offload", "doctor"],
            ["offload", "plan", "--model.preset", "8b", "--hardware", "h100"],
            ["offload", "train", "--train.steps", "5", "--run.dir", "run"],
            ["python", "-c", ENGINE],
        ):
            shown = " ".join(words[:3])
            found = subprocess.run([bin_folder / words[0], *words[1:]], cwd=folder, capture_output=True, text=True)
            assert found.returncode == 0, f"{shown}: {found.stdout[-1500:]}{found.stderr[-1500:]}"
            print(f"{shown}: {found.stdout.strip().splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
