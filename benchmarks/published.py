"""Tokens a second published by other projects, and the `offload.plan` forecast for the same model, GPU and batch.

python -m benchmarks.published > benchmarks/results/published.md     # minutes

Our values are forecasts from the machine specifications in `offload/extras/plan/described/`, with their sources. The
other projects measured theirs. The forecast is the fastest fitting one with a micro-batch of 8, 4, 2 or 1 rows in
one pass, or 8 rows in 4 or 16 passes: eager, with compiled blocks, and compiled with products in FP8.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.app.config.config import Config
from offload.app.config.presets import PRESETS
from offload.app.hf.models import quiet_transformers
from offload.extras.plan.alternatives import apply_change, place
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.machine_files import read_machine

SEQUENCE, MICRO_ROWS = 4096, (8, 4, 2, 1)
PASSES = 4, 16
"""Pass counts for the largest micro-batch."""
_QWEN = PRESETS["qwen3-14b"] | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064}


def _qwen(hidden: int, inner: int, layers: int, heads: int, shared: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return _QWEN | sizes | {"num_attention_heads": heads, "num_key_value_heads": shared}


SHAPES = {
    "Llama 3.1 8B": PRESETS["llama-3.1-8b"],
    "Qwen2.5 7B": _qwen(3584, 18944, 28, 28, 4),
    "Qwen2.5 14B": _qwen(5120, 13824, 48, 40, 8),
}


@dataclass(frozen=True)
class Row:
    """A published figure."""

    who: str
    """The project, and the source of the figure."""
    model: str
    """The model, a key of SHAPES."""
    gpu: str
    """The GPU, as described."""
    host_gib: int
    """Host memory in GiB for the plan."""
    tokens: int
    """Tokens of a step."""
    tokens_per_second: int | None
    """The published value; None where it is for other token counts."""


ROWS = (
    Row("DeepSpeed ZeRO-Offload [a]", "Llama 3.1 8B", "rtx-4090", 256, 8192, 914),
    Row("DeepSpeed ZeRO-Offload [a]", "Llama 3.1 8B", "rtx-4090", 256, 16384, 1373),
    Row("DeepSpeed ZeRO-Offload [a]", "Llama 3.1 8B", "rtx-4090", 256, 32768, 1791),
    Row("–", "Llama 3.1 8B", "rtx-4090", 256, 65536, None),
    Row("–", "Llama 3.1 8B", "rtx-4090", 256, 131072, None),
    Row("llmq [b]", "Qwen2.5 7B", "rtx-4090", 256, 524288, 2777),
    Row("–", "Llama 3.1 8B", "h100", 512, 16384, None),
    Row("MegaTrain [c]", "Qwen2.5 7B", "h100", 512, 32768, 5950),
    Row("–", "Llama 3.1 8B", "h100", 512, 32768, None),
    Row("–", "Llama 3.1 8B", "h100", 512, 131072, None),
    Row("–", "Qwen2.5 14B", "h100", 512, 131072, None),
    Row("llmq [b]", "Qwen2.5 14B", "h100", 512, 524288, 6320),
)
COLUMNS: tuple[Mapping[str, str], ...] = (
    {"train.compile": "never"},
    {"train.compile": "auto"},
    {"train.compile": "auto", "train.matmul": "fp8_rowwise"},
)
"""Settings of a plan in each column."""
_HEAD = """# Published rows beside our plans

Made by `python -m benchmarks.published > benchmarks/results/published.md`. Ours are forecasts, not measurements: AdamW
with fp32 states and split fp32 masters, bf16, clipping, rows of 4096 tokens, everything else `auto`, by the described
machines (`offload/extras/plan/described/`), with as much host memory as said. The share is of the products that the GPU
could make in bf16. In brackets: passes (`train.passes`), if several, and micro-batch. An eager plan keeps the
outputs of products (`train.recompute products`) where this is faster. FP8 is `train.matmul fp8_rowwise`.

| published by | model | GPU, host | tokens a step | theirs, tokens/s | ours, eager | ours, compiled | compiled, FP8 |
|---|---|---|---|---|---|---|---|"""
_NOTES = """
What they do that we do not:

- [a] DeepSpeed, full training on one GPU, as others printed it; its rows lie on a line of 5.85 s and 0.38 ms a token.
  Nothing that we do not do: its update comes after the backward, and each micro-batch fetches the weights again.
- [b] [LLMQ](https://arxiv.org/abs/2512.15306): own kernels for everything beside products, each with the cast to FP8;
  weight gradients in FP8; moments and masters in bf16 with stochastic rounding; a choice of what is recomputed; a few
  families.
- [c] [MegaTrain](https://arxiv.org/abs/2604.05091): nothing that we do not do. The tokens of its step are not printed
  beside its figure; ours are for 32,768.

Full recomputation leaves three quarters of the products, so a plan in bf16 without kept graphs ends at 75 %. Kept
graphs may wait on the host, and several passes divide their memory.
"""


def cell(found: Forecast | None) -> str:
    """Return the table cell of a plan."""
    if found is None or found.timing is None:
        return "does not fit"
    train, timing = found.config.train, found.timing
    rows = f"{train.passes} × {train.micro_batch_size}" if train.passes > 1 else train.micro_batch_size
    return f"{timing.tokens_per_second:,.0f} ({100 * timing.mfu:.0f} %) [{rows}]"


def best(forecaster: Forecaster, row: Row, settings: Mapping[str, str]) -> Forecast | None:
    """Return the fastest fitting plan; None without one."""
    hardware, found = read_machine(row.gpu).with_(host_bytes=row.host_gib << 30), []
    rows, most = row.tokens // SEQUENCE, MICRO_ROWS[0]
    choices = [(size, 1) for size in MICRO_ROWS if size <= rows]
    choices += [(most, passes) for passes in PASSES if passes * most <= rows]
    for micro_rows, passes in choices:
        sizes = {"train.batch_size": rows, "train.micro_batch_size": micro_rows, "train.passes": passes}
        change = {**sizes, **settings}
        found.append(place(forecaster, forecaster.predict(apply_change(forecaster.config, change), hardware)))
    fitting = [each for each in found if each.fits and each.timing is not None]
    return max(fitting, key=lambda each: each.timing.tokens_per_second if each.timing else 0.0, default=None)


def main() -> None:
    quiet_transformers()
    print(_HEAD)
    with tempfile.TemporaryDirectory() as folder:
        forecasters = {}
        for name, shape in SHAPES.items():
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(shape), encoding="utf-8")
            config = Config.load(None, {"model.path": str(path), "data.sequence_length": SEQUENCE})
            forecasters[name] = Forecaster(config, 1)
        for row in ROWS:
            cells = [cell(best(forecasters[row.model], row, settings)) for settings in COLUMNS]
            theirs = "–" if row.tokens_per_second is None else f"{row.tokens_per_second:,}"
            where = f"{read_machine(row.gpu).name}, {row.host_gib} GiB"
            found = (row.who, row.model, where, f"{row.tokens:,}", theirs, *cells)
            print(f"| {' | '.join(found)} |", flush=True)
    print(_NOTES)


if __name__ == "__main__":
    main()
