"""Adapters over a streamed base: `offload.plan` forecasts against everything resident and the ideal schedule.

python -m benchmarks.adapters > benchmarks/results/adapters.md     # a few minutes

Qwen3-8B with LoRA of rank 16 on all linear layers, in bf16, rows of 4096 tokens, on the machine specifications in
`offload/extras/plan/described/`. Values are forecasts. "Everything resident" has equal settings and micro-batches on a
sufficiently large device. The ideal schedule (`benchmarks/ideal.py`) uses the forecast times of units and copies, with
free decoding.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.ideal import Unit, Use, Work, ideal
from offload.app.config.config import Config
from offload.app.config.presets import PRESETS
from offload.app.hf.models import quiet_transformers
from offload.extras.plan.alternatives import apply_change
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.timing import PlannedStep
from offload.layout.regions import Region
from offload.layout.sharding import Sharding
from offload.planning.device_updates import update_bytes

MODEL = PRESETS["qwen3-8b"] | {"dtype": "bfloat16"}
SEQUENCE, TOKENS, MICRO_ROWS = 4096, 16384, (1, 2, 4)
GPUS, CODECS = ("rtx-4090", "rtx-5090", "h100"), ("exact", "int8", "nf4")
BUDGET = "10GiB"
STREAMED = {"offload.parameters": "cpu", "offload.optimizer": "cpu", "offload.device_memory": BUDGET}
RESIDENT = {"offload.parameters": "device", "offload.optimizer": "device"}
SUROGATE = {"rtx-5090": 3800, "h100": 10200}
"""Tokens a second with everything resident, bf16, rank 16, 16,384 tokens a step: docs/reference/benchmarks.md of
github.com/invergent-ai/surogate, read in September 2026.
"""
_HEAD = f"""# Adapters over a streamed base

Made by `python -m benchmarks.adapters > benchmarks/results/adapters.md`. Forecasts, not measurements: Qwen3-8B, LoRA of
rank 16 on all linear layers, bf16, AdamW, clipping, rows of {SEQUENCE} tokens, one GPU as described in
`offload/extras/plan/described/`. Streamed: base, adapters and their states rest on the host, the device has {BUDGET}.
Everything resident: the same settings on a device that has room for it. Both are given the best of micro-batches of
{", ".join(map(str, MICRO_ROWS))} rows, eager or compiled; blocks are recomputed. Over resident, over ideal: the seconds
of a streamed step over those of a resident one, and of the ideal schedule. Hides from: the tokens of a step from which
compute takes longer than the link. Surogate: its tokens a second with the base resident.

## A step of {TOKENS:,} tokens

| GPU | base | resident, tokens/s | streamed | over resident | over ideal | h2d, s of s | hides from | Surogate |
|---|---|---|---|---|---|---|---|---|"""
_LESS = f"""
## Fewer tokens a step

One micro-batch, the base in bf16 (exact) or nf4, eager, {BUDGET} on the device. Where the link has more to do than
compute, a step is longer than a resident one; how well the engine fills what there is, the ideal schedule tells.

| GPU | base | tokens a step | over resident | over ideal | bound by |
|---|---|---|---|---|---|"""
_NOTES = """
Surogate's figures are measured, with the base resident, in kernels of its own (fused LoRA and norms, FlashAttention);
ours are forecasts of transformers' and PEFT's operations, which add casts and small products for each adapter. `plan`
prices these as it does all others, and decoding by the device's memory that a kernel moves: 3 bytes a weight of int8,
and 2.5 of nf4. Resident codes are decoded for every use too. The ideal schedule is
the best of some greedy ones, which may be beaten. It knows what uses of units and copies take here, and decodes in no
time; adapters and their gradients travel in it as units do.
"""


def told(forecaster: Forecaster, gpu: str, change: dict[str, Any], is_resident: bool) -> Forecast:
    """Return the forecast for a change, with everything resident or a streamed base."""
    hardware = read_machine(gpu)
    if is_resident:
        hardware = hardware.with_(device_bytes=1 << 40)
    where = RESIDENT if is_resident else STREAMED
    return forecaster.predict(
        apply_change(forecaster.config, {"train.recompute": "always", **change, **where}), hardware
    )


def seconds_of(found: Forecast) -> float:
    """Return the seconds of a step; infinity where the plan does not fit."""
    return found.timing.step_seconds if found.fits and found.timing is not None else float("inf")


def best(forecaster: Forecaster, gpu: str, change: dict[str, Any], is_resident: bool) -> Forecast:
    """Return the fastest forecast over micro-batch sizes, eager and compiled."""
    ways = [
        {"train.micro_batch_size": rows, "train.compile": compiled}
        for rows in MICRO_ROWS
        for compiled in ("never", "auto")
    ]
    return min((told(forecaster, gpu, change | way, is_resident) for way in ways), key=seconds_of)


def ideal_seconds(forecaster: Forecaster, found: Forecast) -> float:
    """Return the step time in the ideal schedule for the forecast compute and copy times."""
    work = forecaster._workload(found.config, found.prepared, 1)
    assert not isinstance(work, str)
    step = PlannedStep(found.prepared, work, found.hardware)
    plan, seconds, units = step.simulated_plan(), step.seconds(), {}
    moving = [tuple(r for r in call.regions if r.index not in plan.resident) for call in step.calls]

    def name(regions: Iterable[Region]) -> str | None:
        return " ".join(str(region.index) for region in regions) or None

    both = list(zip(step.calls, moving, strict=True))
    used = [(max(call.forward_s, call.forward_host_s), name(regions)) for call, regions in both]
    for call, regions in reversed(both):
        used.append((max(call.backward_s, call.backward_host_s), name(regions) if call.reads_weights else None))
    last = {unit: place for place, (_, unit) in enumerate(used)}
    uses = [Use(taken, unit, unit is not None and last[unit] == place) for place, (taken, unit) in enumerate(used)]
    for regions in filter(None, moving):
        trained = [region for region in regions if region.trainable]
        units[str(name(regions))] = Unit(
            sum(region.weight_bytes for region in regions),
            sum(seconds["h2d"](region.travelling_bytes) for region in regions),
            sum(seconds["d2h"](region.plane("gradients").num_bytes(region.numel)) for region in trained),
            seconds["update"](update_bytes(trained, Sharding())),
        )
    return ideal(Work(uses, units, plan.capacity_bytes, plan.settings.clip or "deferred")).seconds


def main() -> None:
    quiet_transformers()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(MODEL), encoding="utf-8")
        adapter = {"lora.rank": 16, "lora.target_modules": "all-linear", "data.sequence_length": SEQUENCE}
        config = Config.load(None, {"model.path": str(path), "train.batch_size": TOKENS // SEQUENCE, **adapter})
        forecaster = Forecaster(config, 1)
        print(_HEAD)
        for gpu in GPUS:
            for codec in CODECS:
                change = {"offload.frozen_weights": codec}
                resident, streamed = (best(forecaster, gpu, change, is_resident) for is_resident in (True, False))
                assert resident.timing is not None
                assert streamed.timing is not None
                timing, its = streamed.timing, (resident.timing.tokens_per_second, streamed.timing.tokens_per_second)
                row = [
                    streamed.hardware.name,
                    codec,
                    *(f"{rate:,.0f}" for rate in its),
                    f"{seconds_of(streamed) / seconds_of(resident):.3f}",
                    f"{seconds_of(streamed) / ideal_seconds(forecaster, streamed):.3f}",
                    f"{timing.lane_seconds['h2d']:.2f} of {timing.step_seconds:.2f}",
                    f"{timing.hides_from_tokens:,}",
                    f"{SUROGATE[gpu]:,}" if gpu in SUROGATE and codec == "exact" else "–",
                ]
                print(f"| {' | '.join(row)} |", flush=True)
        print(_LESS)
        for gpu in GPUS[:2]:
            for codec in ("exact", "nf4"):
                for tokens in (512, 1024, 2048, 4096):
                    change = {"data.sequence_length": tokens, "train.batch_size": 1, "offload.frozen_weights": codec}
                    resident, streamed = (told(forecaster, gpu, change, is_resident) for is_resident in (True, False))
                    assert streamed.timing is not None
                    row = [
                        streamed.hardware.name,
                        codec,
                        f"{tokens:,}",
                        f"{seconds_of(streamed) / seconds_of(resident):.3f}",
                        f"{seconds_of(streamed) / ideal_seconds(forecaster, streamed):.3f}",
                        streamed.timing.bound_by,
                    ]
                    print(f"| {' | '.join(row)} |", flush=True)
    print(_NOTES)


if __name__ == "__main__":
    main()
