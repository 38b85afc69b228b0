"""Updates on the CPU: kernels of all update rules and moment formats against the memory roofline, and AdamW against
torch's fused AdamW, DeepSpeed, and the 8-bit AdamW in bitsandbytes and torchao.

All contenders run in one process, in rounds. A ratio is the median over rounds of two times measured right after each
other, so a busy machine disturbs both sides alike.
"""

from __future__ import annotations

import argparse
import importlib
import operator
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks import harness
from offload.errors import ConfigError
from offload.extras.tools.benches.report import Result, spread
from offload.native import kernels
from offload.sizes import parse_size

SUMMARY = "updates on the CPU against the memory roofline, torch, DeepSpeed and 8-bit AdamW"
QUICK = {"n": "64Ki", "reps": 1, "threads": [1]}
STEP = 100
HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}

MOMENT_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}  # the int8 scales, one for 128, are counted below
RULES = {"adamw": 2, "lion": 1, "sgd": 1, "sgd without momentum": 0}  # number of moments
NORM_BYTES = 2  # a parameter, to read a bfloat16 gradient again for the norm


@dataclass
class Contender:
    """A contender that takes a step: `run(threads)`. Contenders with one name are variants; the fastest counts.

    reference: name of the contender to compare with. bytes_per_parameter: None where passes move bytes repeatedly.
    """

    name: str
    run: Callable[[int], object]
    bytes_per_parameter: float | None = None
    reference: str | None = None
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def measure(self, threads: int) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        self.run(threads)
        self.seconds.append(time.perf_counter() - wall)
        self.cpu_seconds.append(time.process_time() - cpu)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
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
    """Measure, and return one result for each contender and thread count."""
    n = parse_count(arguments.n)
    threads = arguments.threads or sorted({1, kernels.num_threads()})
    if arguments.reps < 1 or min(threads) < 1:
        raise ConfigError(f"--reps is {arguments.reps} and --threads {threads}; each must be at least 1.")
    if not kernels.is_native():
        raise ConfigError("the C++ kernels are missing: there is nothing to measure; build them with `make build`.")
    groups = [[*rooflines(n, is_split), *ours(n, is_split)] for is_split in (False, True)]
    rivals = others(n)
    chain = next(one.name for one in reversed(rivals) if "chain" in one.name)
    results = []
    for num_threads in threads:
        contenders = [contender for group in groups for contender in group] + [clipped(n, chain), *rivals]
        torch.set_num_threads(num_threads)
        for contender in contenders:
            contender.run(num_threads)  # page faults, just-in-time builds, thread starts
            contender.seconds.clear()
            contender.cpu_seconds.clear()
        for _, contender in harness.turns(contenders, arguments.reps):
            contender.measure(num_threads)
        results += summarise(contenders, n, num_threads)
    return results


def parse_count(text: str) -> int:
    """Return the number in a text such as "64Mi" or "1000000"."""
    try:
        count = parse_size(f"{text}B") or 0
    except ConfigError:
        count = 0
    if count < 64:
        raise ConfigError(
            f"--n is {text!r}; it must be a number of parameters of at least 64, such as 1000000, 512Ki or 64Mi."
        )
    return count


@dataclass(frozen=True)
class Kind:
    """The shape of an update: rule, moment format, fp32 or split master, and bf16 gradients."""

    rule: str
    states: str
    is_split: bool

    @property
    def name(self) -> str:
        width = f" {self.states}" if self.states != "fp32" else ""
        return f"{self.rule}{width}, {'split' if self.is_split else 'fp32'}"

    @property
    def bytes_per_parameter(self) -> float:
        """Count master and moments as read and written, the gradient as read."""
        scales = 4 / kernels.BLOCK if self.states == "int8" else 0
        return 2 * (4 + RULES[self.rule] * (MOMENT_BYTES[self.states] + scales)) + (2 if self.is_split else 4)

    def moments(self, n: int) -> list[Any]:
        """Make moments of resident zeros."""
        import torch

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}[self.states]
        # Ones first: fresh zeros have no memory pages yet.
        made = [torch.ones(n, dtype=dtype).zero_() for _ in range(RULES[self.rule])]
        return [(each, torch.zeros(-(-n // kernels.BLOCK))) for each in made] if self.states == "int8" else made


FP32, SPLIT = (Kind("adamw", "fp32", is_split) for is_split in (False, True))


def kinds(is_split: bool) -> list[Kind]:
    """Return all shapes."""
    widths = [("adamw", states) for states in MOMENT_BYTES] + [("lion", states) for states in MOMENT_BYTES]
    return [Kind(*each, is_split) for each in (*widths, ("sgd", "fp32"), ("sgd without momentum", "fp32"))]


def rooflines(n: int, is_split: bool) -> list[Contender]:
    """Make the memory bound: the reads and writes of our kernels with one addition as arithmetic."""
    master, gradient = torch.ones(n), torch.ones(n, dtype=torch.bfloat16 if is_split else torch.float32)
    halves = master.view(torch.int16)
    planes = [halves[:n], halves[n:]] if is_split else [master]
    lent = [torch.ones(n) for _ in range(2)]
    contenders = []
    for kind in {kind.bytes_per_parameter: kind for kind in kinds(is_split)}.values():
        written = planes + [
            each.view(torch.uint8)[: n * MOMENT_BYTES[kind.states]] for each in lent[: RULES[kind.rule]]
        ]

        def run(variant: int, threads: int, written: list[Any]) -> None:
            kernels.roofline(written, gradient, variant=variant, threads=threads)

        for variant in range(kernels.NUM_ROOFLINE_VARIANTS):
            move = partial(run, variant, written=written)
            contenders.append(Contender(_roofline(kind), move, kind.bytes_per_parameter))
    return contenders


def _roofline(kind: Kind) -> str:
    return f"roofline {kind.bytes_per_parameter:g} B"


def ours(n: int, is_split: bool) -> list[Contender]:
    """Make our kernels."""
    weights, gradient = torch.randn(n).mul_(0.02), torch.randn(n).mul_(1e-2)
    master, gradient = (kernels.split(weights), gradient.bfloat16()) if is_split else (weights, gradient)
    contenders = []
    for kind in kinds(is_split):
        moments = kind.moments(n)
        how: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.01}
        if not kind.rule.startswith("sgd"):
            how = {"step": STEP} | {
                key: x for key, x in HYPERPARAMETERS.items() if kind.rule == "adamw" or key != "eps"
            }
        kernel: Callable[..., object] = getattr(kernels, kind.rule.partition(" ")[0])

        def run(threads: int, kernel: Any = kernel, moments: Any = moments or [None], how: Any = how) -> None:
            kernel(master, *moments, gradient, threads=threads, **how)

        contenders.append(Contender(f"offload {kind.name}", run, kind.bytes_per_parameter, _roofline(kind)))
    return contenders


def clipped(n: int, chain: str) -> Contender:
    """Make split AdamW behind the gradient pass for clipping.

    chain: name of the contender with separate passes for the same work.
    """
    master, gradient = kernels.split(torch.randn(n).mul_(0.02)), torch.randn(n).mul_(1e-2).bfloat16()
    moments = torch.ones(n).zero_(), torch.ones(n).zero_()

    def run(threads: int) -> None:
        norm = kernels.sum_squares(gradient, threads=threads) ** 0.5
        scale = min(1.0, 1.0 / (norm + 1e-6))
        kernels.adamw(master, *moments, gradient, step=STEP, grad_scale=scale, threads=threads, **HYPERPARAMETERS)

    bytes_per_parameter = Kind("adamw", "fp32", True).bytes_per_parameter + NORM_BYTES
    return Contender("offload adamw, split, norm, clip", run, bytes_per_parameter, chain)


def others(n: int) -> list[Contender]:
    """Make torch's fused AdamW, DeepSpeed's, and the 8-bit AdamW of bitsandbytes and torchao, as far as installed."""
    fused = partial(torch.optim.AdamW, fused=True)
    contenders = around("torch fused AdamW", "emulated bf16 chain (torch fused)", n, fused)
    if find_spec("deepspeed") is not None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        adam = partial(DeepSpeedCPUAdam, adamw_mode=True)
        contenders += around("DeepSpeedCPUAdam", "DeepSpeed bf16 chain", n, adam)
    for package in ("bitsandbytes", "torchao"):
        if find_spec(package) is not None:
            make = importlib.import_module(f"{package}.optim").AdamW8bit
            _, step = trained(n, make)
            contenders.append(Contender(f"{package} AdamW8bit", step, None, "offload adamw int8, fp32"))
    return contenders


def trained(n: int, make: Callable[..., Any]) -> tuple[torch.nn.Parameter, Callable[[int], object]]:
    """Return a parameter with a gradient, and its step by the optimizer that `make` returns."""
    parameter = torch.nn.Parameter(torch.randn(n).mul_(0.02))
    parameter.grad = torch.randn(n).mul_(1e-2)
    optimizer = make([parameter], **HYPERPARAMETERS)
    return parameter, lambda _threads: optimizer.step()


def around(alone: str, chain: str, n: int, make: Callable[..., Any]) -> list[Contender]:
    """Return a bare fp32 optimizer step, and the bfloat16 steps around it without and with clipping.

    The passes are DeepSpeed's host passes for a bfloat16 model: cast gradients to fp32, take the norm, scale, step,
    cast the weights back.
    """
    parameter, step = trained(n, make)
    grad = parameter.grad
    assert grad is not None
    bf16_grad, bf16_weights = grad.bfloat16(), parameter.detach().bfloat16()

    def cast(threads: int, clips: bool = False) -> None:
        grad.copy_(bf16_grad)
        if clips:
            grad.mul_(min(1.0, 1.0 / (float(grad.norm()) + 1e-6)))
        step(threads)
        bf16_weights.copy_(parameter.detach())

    return [
        Contender(alone, step, FP32.bytes_per_parameter, _roofline(FP32)),
        Contender(f"{chain}: casts", cast, None, _roofline(SPLIT)),
        Contender(f"{chain}: casts, norm, clip", partial(cast, clips=True), None, _roofline(SPLIT)),
    ]


def summarise(contenders: list[Contender], n: int, threads: int) -> list[Result]:
    """Return medians, best times and median ratios; for variants only the fastest.

    A round counts for a contender only if its threads ran for at least 0.85 of the time, as long as three such rounds
    remain.
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
            "spread": round(spread(contender.seconds), 4),
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
    """Return the median seconds of a contender, or its median speed ratio to the other one in equal rounds."""
    rounds = _undisturbed(one, other, threads)
    if len(rounds) < 3:
        rounds = list(range(len(one.seconds)))
    return statistics.median(other.seconds[i] / one.seconds[i] if ratio else one.seconds[i] for i in rounds)


if __name__ == "__main__":
    harness.begin(sys.modules[__name__])
