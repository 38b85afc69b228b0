"""AdamW on the CPU: our kernels against the memory roofline, torch's fused AdamW and DeepSpeed's.

All contenders run in one process, one after the other, round after round: a ratio is the median over the rounds of the
quotient of two times that were measured a moment apart, so that a busy machine disturbs both sides alike.
"""

from __future__ import annotations

import argparse
import importlib.util
import operator
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from offload.benches.report import Result
from offload.config.sections import parse_size
from offload.errors import ConfigError
from offload.native import kernels

STEP = 100
HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

# Bytes per parameter that must move: fp32 reads p, m, v, g and writes p, m, v; split reads hi, lo, m, v and a bfloat16
# g and writes hi, lo, m, v; the norm reads that g once more.
FP32_BYTES, SPLIT_BYTES, NORM_BYTES = 28, 26, 2


@dataclass
class Contender:
    """Something that takes a step: `run(threads)`. Several of one name are variants, of which the fastest counts.

    reference: the name of what it is compared with. bytes_per_parameter: None where passes repeat what others moved.
    """

    name: str
    run: Callable[[int], object]
    bytes_per_parameter: int | None = None
    reference: str | None = None
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def measure(self, threads: int) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        self.run(threads)
        self.seconds.append(time.perf_counter() - wall)
        self.cpu_seconds.append(time.process_time() - cpu)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    parser.add_argument("--n", default="64Mi", help="number of parameters, for example 64Mi (default %(default)s)")
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        metavar="T",
        help="numbers of threads (default: 1 and the number of physical cores)",
    )
    parser.add_argument("--reps", type=int, default=11, help="rounds, after one to warm up (default %(default)s)")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measure, and return one result per contender and number of threads."""
    n = parse_count(arguments.n)
    threads = arguments.threads or sorted({1, kernels.num_threads()})
    if arguments.reps < 1 or min(threads) < 1:
        raise ConfigError(f"--reps is {arguments.reps} and --threads {threads}; each must be at least 1.")
    if not kernels.is_native():
        raise ConfigError("the C++ kernels are missing: there is nothing to measure; build them with `make build`.")
    import torch

    others = [*with_torch(n), *with_deepspeed(n)]
    contenders = [*rooflines(n), *ours(n, chain=others[-1].name), *others]
    results = []
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        for round_number in range(arguments.reps + 1):
            for contender in contenders:
                if round_number == 0:
                    contender.run(num_threads)  # page faults, just-in-time builds, threads that start
                    contender.seconds, contender.cpu_seconds = [], []
                else:
                    contender.measure(num_threads)
        results += summarise(contenders, n, num_threads)
    return results


def parse_count(text: str) -> int:
    """Return the number that "64Mi" or "1000000" stands for."""
    try:
        count = parse_size(f"{text}B") or 0
    except ConfigError:
        count = 0
    if count < 64:
        raise ConfigError(
            f"--n is {text!r}; it must be a number of parameters of at least 64, such as 1000000, 512Ki or 64Mi."
        )
    return count


def rooflines(n: int) -> list[Contender]:
    """Make what memory alone allows: the reads and writes of our kernels with one addition for arithmetic."""
    import torch

    p, m, v, g = (torch.ones(n).zero_() for _ in range(4))  # ones first: fresh zeros are pages that do not exist yet
    halves = p.view(torch.int16)
    planes, bf16_grad = (halves[:n], halves[n:]), g.view(torch.bfloat16)[:n]

    def variants(name: str, num_bytes: int, *arrays: Any) -> list[Contender]:
        def run(variant: int, threads: int) -> None:
            kernels.roofline(*arrays, variant=variant, threads=threads)

        return [Contender(name, partial(run, each), num_bytes) for each in range(kernels.NUM_ROOFLINE_VARIANTS)]

    return [
        *variants("roofline fp32", FP32_BYTES, p, m, v, g),
        *variants("roofline split", SPLIT_BYTES, planes, m, v, bf16_grad),
    ]


def ours(n: int, chain: str) -> list[Contender]:
    """Make our kernels, and the split one after the pass over the gradients that clipping needs.

    chain: the name of the contender that does the work of the latter in separate passes.
    """
    import torch

    p, g = torch.randn(n).mul_(0.02), torch.randn(n).mul_(1e-2)
    m, v = torch.ones(n).zero_(), torch.ones(n).zero_()
    planes, split_m, split_v, bf16_grad = kernels.split(p), m.clone(), v.clone(), g.bfloat16()

    def fp32(threads: int) -> None:
        kernels.adamw(p, m, v, g, step=STEP, threads=threads, **HYPERPARAMETERS)

    def split(threads: int, grad_scale: float = 1.0) -> None:
        kernels.adamw(
            planes, split_m, split_v, bf16_grad, step=STEP, grad_scale=grad_scale, threads=threads, **HYPERPARAMETERS
        )

    def clipped(threads: int) -> None:
        norm = kernels.sum_squares(bf16_grad, threads=threads) ** 0.5
        split(threads, grad_scale=min(1.0, 1.0 / (norm + 1e-6)))

    return [
        Contender("offload fp32", fp32, FP32_BYTES, "roofline fp32"),
        Contender("offload split", split, SPLIT_BYTES, "roofline split"),
        Contender("offload split, norm, clip", clipped, SPLIT_BYTES + NORM_BYTES, chain),
    ]


def with_torch(n: int) -> list[Contender]:
    """Make torch's fused AdamW, alone and inside the passes that a ZeRO-Offload step makes: an emulation of it."""
    import torch

    make = partial(torch.optim.AdamW, fused=True)
    return _around("torch fused AdamW", "emulated bf16 chain (torch fused)", n, make)


def with_deepspeed(n: int) -> list[Contender]:
    """Make DeepSpeedCPUAdam, alone and inside the same passes; nothing where DeepSpeed is not installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return []
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return _around("DeepSpeedCPUAdam", "DeepSpeed bf16 chain", n, partial(DeepSpeedCPUAdam, adamw_mode=True))


def _around(alone: str, chain: str, n: int, make: Callable[..., Any]) -> list[Contender]:
    """Return an optimizer's bare fp32 step, and the bfloat16 steps around it without and with clipping.

    The passes are those that DeepSpeed makes on the host for a bfloat16 model: gradients are cast to fp32, their norm
    is taken, they are scaled, the optimizer steps, the new weights are cast back.
    """
    import torch

    parameter = torch.nn.Parameter(torch.randn(n).mul_(0.02))
    parameter.grad = grad = torch.randn(n).mul_(1e-2)
    step = make([parameter], **HYPERPARAMETERS).step
    bf16_grad, bf16_weights = grad.bfloat16(), parameter.detach().bfloat16()

    def bare(_threads: int) -> None:
        step()

    def cast(_threads: int, clips: bool = False) -> None:
        grad.copy_(bf16_grad)
        if clips:
            grad.mul_(min(1.0, 1.0 / (float(grad.norm()) + 1e-6)))
        step()
        bf16_weights.copy_(parameter.detach())

    return [
        Contender(alone, bare, FP32_BYTES, "roofline fp32"),
        Contender(f"{chain}: casts", cast, None, "roofline split"),
        Contender(f"{chain}: casts, norm, clip", partial(cast, clips=True), None, "roofline split"),
    ]


def summarise(contenders: list[Contender], n: int, threads: int) -> list[Result]:
    """Return medians, bests and the medians of the ratios of each round; of variants only the fastest.

    Rounds in which a contender got less than 0.85 of its threads' time, because others used the machine, are left out
    of its numbers where at least three remain.
    """
    fastest: dict[str, Contender] = {}
    for contender in contenders:
        other = fastest.get(contender.name)
        if other is None or _median(contender, contender, threads) < _median(other, other, threads):
            fastest[contender.name] = contender
    results = []
    for name, contender in fastest.items():
        median, ratio = _median(contender, contender, threads), None
        if contender.reference is not None:
            ratio = round(_median(contender, fastest[contender.reference], threads, ratio=True), 4)
        details = {
            "threads": threads,
            "parameters": n,
            "best": round(min(contender.seconds) * 1e3, 3),
            "cpus_busy": round(statistics.median(map(operator.truediv, contender.cpu_seconds, contender.seconds)), 2),
            "rounds": len(contender.seconds),
            "undisturbed_rounds": len(_undisturbed(contender, contender, threads)),
        }
        if contender.bytes_per_parameter is not None:
            details["bytes_per_parameter"] = contender.bytes_per_parameter
            details["gigabytes_per_second"] = round(n * contender.bytes_per_parameter / median / 1e9, 2)
        results.append(Result(name, round(median * 1e3, 3), "ms", contender.reference, ratio, details))
    return results


def _undisturbed(one: Contender, other: Contender, threads: int) -> list[int]:
    needed = 0.85 * threads
    return [i for i in range(len(one.seconds)) if all(c.cpu_seconds[i] >= needed * c.seconds[i] for c in (one, other))]


def _median(one: Contender, other: Contender, threads: int, ratio: bool = False) -> float:
    """Return the median of one's seconds, or of how many times faster than the other it was in the same round."""
    rounds = _undisturbed(one, other, threads)
    if len(rounds) < 3:
        rounds = list(range(len(one.seconds)))
    return statistics.median(other.seconds[i] / one.seconds[i] if ratio else one.seconds[i] for i in rounds)
