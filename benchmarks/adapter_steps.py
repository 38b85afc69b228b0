"""Adapter steps over a streamed base on the CPU device, against PEFT with everything resident.

python -m benchmarks.adapter_steps     # ten minutes

The model is the 33 M Llama from `offload.bench step` with LoRA of rank 16 on all linear layers. Both contenders start
from the same PEFT model, clip, and use AdamW (torch's fused AdamW in plain PyTorch). The engine has weights and states
on the host, and device memory for two units. Blocks of steps alternate.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import nn

from offload import AdamW, Engine, Placement
from offload.extras.tools.benches import step
from offload.extras.tools.benches.blocks import Contender, do_nothing, measure, summarise
from offload.extras.tools.benches.report import BenchmarkOutput, Result
from offload.layout.codecs import CODECS

RECOMPUTE, LR = "never", 1e-4


def adapted(arguments: argparse.Namespace, precision: str) -> nn.Module:
    """Return the model with adapters. By PEFT's default the adapters are in fp32 over a base in either precision."""
    from peft import LoraConfig, get_peft_model

    base = step.llama(arguments)
    if precision == "bf16":
        base.to(torch.bfloat16)
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"))


def resident(model: nn.Module) -> Contender:
    """Return plain PyTorch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, fused=True)

    def train(rows: torch.Tensor) -> None:
        model(input_ids=rows, labels=rows).loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Contender("PEFT, resident", train, do_nothing)


def streamed(model: nn.Module, precision: str, codec: str, opened: ExitStack) -> Contender:
    """Return an engine."""
    placement = Placement(parameters="cpu", optimizer="cpu")
    settings: dict[str, Any] = {"precision": precision, "frozen_weights": codec, "recompute": RECOMPUTE, "prefetch": 1}
    engine = Engine(model, AdamW(lr=LR), placement, **settings)
    opened.callback(engine.close)
    train = lambda rows: engine.step({"input_ids": rows, "labels": rows})  # noqa: E731
    moved = lambda: {"h2d_bytes": engine.counters.h2d_bytes}  # noqa: E731
    return Contender(f"engine, base in {codec}", train, engine.finish, "PEFT, resident", details=moved)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapter_steps", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name, default in {"hidden": 512, "layers": 8, "vocabulary": 8192, "sequence": 256, "batch": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=4, help="of a block (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=7, help="blocks of each (default %(default)s)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true", help="time of this process: for busy machines, one thread")
    arguments = parser.parse_args()
    threads, batches = step.begin(arguments)
    results: list[Result] = []
    for precision in ("fp32", "bf16"):
        with ExitStack() as opened:
            contenders = [resident(adapted(arguments, precision))]
            contenders += [streamed(adapted(arguments, precision), precision, codec, opened) for codec in CODECS]
            clock = time.process_time if arguments.cpu_time else time.perf_counter
            measure(contenders, batches, arguments.steps, arguments.pairs, clock=clock)
            more = {"group": precision, "threads": threads, "batch": arguments.batch, "sequence": arguments.sequence}
            results += summarise(contenders, arguments.steps, arguments.batch * arguments.sequence, more)
        for result in results[-1 - len(CODECS) :]:
            print(result, file=sys.stderr, flush=True)
    print(BenchmarkOutput(results).document())


if __name__ == "__main__":
    main()
