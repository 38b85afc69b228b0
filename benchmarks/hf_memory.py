"""Peak memory to import and export a Hugging Face folder of two GiB.

python benchmarks/hf_memory.py --dir FOLDER > benchmarks/results/hf_memory.json     # a minute; 21 GiB of the disk
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from offload.extras.tools.benches.report import BenchmarkOutput, Result

MIB = 1 << 20
SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
NVME = dict.fromkeys(("parameters", "optimizer", "gradients", "activations"), "nvme") | {"host_memory": "48MiB"}
PLACEMENTS: dict[str, dict[str, Any]] = {"cpu": {}, "nvme": NVME}


def main() -> None:
    """Make the folder, and measure each placement in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, help="on a disk with room for the model twice, and for its states")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, Path(arguments.dir))))
        return
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        model_bytes = make_source(Path(folder) / "source")
        results = [_result("weights in the files", model_bytes)]
        for placement in PLACEMENTS:
            command = [sys.executable, __file__, "--dir", folder, "--measure", placement]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            results += [_result(f"{placement}: {name}", value) for name, value in found.items()]
    print(BenchmarkOutput(results).document())


def _result(name: str, value: float) -> Result:
    unit = "s" if "seconds" in name else "tensors" if "tensors" in name else "MiB"
    return Result(name, value / MIB if unit == "MiB" else value, unit)


def make_source(folder: Path) -> int:
    """Write a Llama with random bf16 weights in pieces; return the byte count."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from offload.app.hf.write import write_model

    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16()
    model.generation_config.pad_token_id = None

    def get(_name: str, begin: int, end: int) -> torch.Tensor:
        return torch.randn(end - begin, generator=generator) * 0.02

    return write_model(model, get, folder).num_bytes


def measure(placement: str, folder: Path) -> dict[str, float]:
    """Import and export in this process; return the peak of each."""
    from transformers import LlamaForCausalLM  # noqa: F401 - with torch, and what both of them import

    from offload import Engine, Placement
    from offload.app.config.sections import ModelSection
    from offload.app.hf.models import build_model

    found = {"peak after the imports of Python": _peak()}
    begin = time.perf_counter()
    built = build_model(ModelSection(path=str(folder / "source")), seed=0)
    where = PLACEMENTS[placement]
    engine = Engine(
        built.model,
        precision="bf16",
        fill=built.fill,
        placement=Placement(**where, nvme_dir=str(folder) if where else None),
    )
    built.close()
    engine.finish()
    seconds = time.perf_counter() - begin
    written = sum(size for tier, name, size in engine.allocations if tier == "cpu" and name in ("weights", "low"))
    found |= {"states that the import writes": written, "peak of the import": _peak(), "import seconds": seconds}
    begin = time.perf_counter()
    engine.export(folder / placement)
    found |= {"peak of the export": _peak(), "export seconds": time.perf_counter() - begin}
    engine.close()
    found["tensors that differ"] = _num_different(folder / "source", folder / placement)
    return found


def _peak() -> int:
    """Return the peak resident memory of this process since the last call."""
    lines = Path("/proc/self/status").read_text().splitlines()
    Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _num_different(one: Path, other: Path) -> int:
    from offload.files.safetensors_file import TensorFile

    def hashes(folder: Path) -> dict[str, str]:
        found = {}
        for path in folder.glob("*.safetensors"):
            with TensorFile(path) as file:
                found |= {name: file.hash(name) for name in file.entries}
        return found

    mine, its = hashes(one), hashes(other)
    return sum(mine.get(name) != its.get(name) for name in mine.keys() | its.keys())


if __name__ == "__main__":
    main()
