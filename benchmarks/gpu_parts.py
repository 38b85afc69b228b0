"""The parts of `make gpu-check`. benchmarks/gpu_check.py runs each part in a separate process."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks import harness, lanes
from offload import AdamW, Engine, Lion, Placement
from offload.accelerators import Accelerator, own_accelerator
from offload.app.config.presets import PRESETS
from offload.engine.units.runner import RunAhead
from offload.errors import DoesNotFitError, describe
from offload.extras.large import compiled_forwards as forwards
from offload.extras.tools.benches import step as step_bench
from offload.extras.tools.benches.report import Result
from offload.machine.limits import memory

SEQUENCE, SHORT = 4096, 64
"""Tokens in a row; the second value is for parts that do not measure speed."""
DRY_SCALE = 64
"""Divisor of widths, tokens and lengths in a dry run."""
DRY_WIDTH = 64
"""Minimum width in a dry run."""
DRY_HOST_BYTES = 6 << 20
"""Too small for the states of the largest model."""
DRY_TESTS = ("tests/engine/test_against_torch.py",)
GPU_TESTS = tuple(f"tests/native/test_{name}.py" for name in ("copy", "correct", "fallback"))
"""Additional to the engine tests in ON_DEVICE."""

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
MODELS: dict[str, dict[str, Any]] = {name: {key: PRESETS[name][key] for key in SIZES} for name in ("1b", "3b", "8b")}
MODELS["14b"] = dict(zip(SIZES, (5120, 13824, 48, 40, 8, 152064, False), strict=True))
"""Shapes of Llama 3.2, Llama 3.1 and Qwen2.5, as a Llama."""
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""Settings of the kernel."""
TOKENS = (4096, 16384, 131072)
MICRO_ROWS = 4
LEAST_LEFT_S = 30
"""Minimum time to start plain PyTorch."""
FEW_BLOCKS: dict[str, Any] = MODELS["8b"] | {"num_hidden_layers": 6, "vocab_size": 32768}
AHEAD_BUDGET, DRY_AHEAD_BUDGET = 10 << 30, 8 << 20
"""Device budget; launches that run ahead may keep a share of it in use."""
KERNELS = {
    "copies": "memcpy|memset",
    "attention": "flash|fmha|attention|sdpa",
    "products": "gemm|cutlass|nvjet|xmma|::(add|b)?mm$",
    "updates": "offload|multi_tensor",
    "others": "",
}
"""Purpose of a kernel by parts of its name; the first match counts."""
MOST_KERNELS = 24
"""Number of kernels listed by name."""
WARM_STEPS = 4
"""After the third batch of a size, the engine knows and distributes the leftover device memory."""
MOST_REASON = 300
"""Characters of an error in a result."""
DENSE_FLOPS_PER_S = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}
"""In bf16 with fp32 sums, from data sheets."""
RESIDENT_BYTES = 20
"""Per parameter of plain PyTorch in bf16: weights, two gradients, masters, two moments."""


class SkippedPart(Exception):
    """A part has nothing to do on this machine; the message has the reason."""


@dataclass
class Check:
    """Device and result file of a part. `ends`: deadline by time.monotonic."""

    is_dry: bool
    ends: float
    add: Callable[[Result], None]

    def __post_init__(self) -> None:
        self.control: Any = None
        if self.is_dry:
            from tests import accelerator

            self.control = accelerator.load(num_devices=1)
            self.control.enter(0)

    @property
    def accelerator(self) -> Accelerator:
        found = own_accelerator()
        assert found is not None
        return found

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()

    def free(self) -> None:
        """Give the memory of deleted models back to the device."""
        gc.collect()
        self.accelerator.module.empty_cache()

    def compiler(self) -> AbstractContextManager[Any]:
        """Context in which blocks are compiled for the device of the check."""
        backend = "aot_eager" if self.is_dry else forwards.BACKEND  # inductor does not know the simulated device
        return mock.patch.object(forwards, "BACKEND", backend)

    def scaled(self, number: int) -> int:
        """Return a width or token count, scaled down in a dry run."""
        return max(1, number // DRY_SCALE) if self.is_dry else number

    def model(self, **shape: Any) -> tuple[Any, Callable[[str, Any], None]]:
        """Return a Llama without weights, and a function that fills a unit with random weights, by fast copies."""
        from transformers import LlamaConfig, LlamaForCausalLM

        from offload.app.hf.deferred_init import DeferredInit

        for name in ("hidden_size", "intermediate_size", "vocab_size"):
            shape[name] = max(DRY_WIDTH, shape[name] // DRY_SCALE) if self.is_dry else shape[name]
        if self.is_dry:
            shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
        settings = {"tie_word_embeddings": False, "use_cache": False, "max_position_embeddings": SEQUENCE}
        with DeferredInit(0):
            model = LlamaForCausalLM(LlamaConfig(**settings | shape)).train()
        pattern = torch.randn((1 << 24) if not self.is_dry else 1 << 12) * 0.02

        def fill(_name: str, module: Any) -> None:
            for p in module.parameters():
                with torch.no_grad():
                    if p.dim() == 1:
                        p.fill_(1)
                    for piece in p.view(-1).split(len(pattern)) if p.dim() > 1 else ():
                        piece.copy_(pattern[: len(piece)])

        return model, fill

    def model_in_bf16(self, **shape: Any) -> tuple[Any, Callable[[str, Any], None]]:
        """Return `model` with fresh weights in bf16: half the bytes."""
        torch.set_default_dtype(torch.bfloat16)
        try:
            return self.model(**shape)
        finally:
            torch.set_default_dtype(torch.float32)

    def batches(self, tokens: int, vocabulary: int) -> Iterator[dict[str, Any]]:
        """Yield endless batches of `tokens` tokens, in rows of SEQUENCE."""
        length, generator = self.scaled(SEQUENCE), torch.Generator().manual_seed(1)
        ids = [torch.randint(0, vocabulary, (tokens // SEQUENCE, length), generator=generator) for _ in range(2)]
        return itertools.cycle({"input_ids": each, "labels": each} for each in ids)


# -- the parts -----------------------------------------------------------------------------------------------


def build(check: Check) -> str:
    """Report the active kernels."""
    from offload.native import kernels

    found = kernels.describe()
    runs = f"C++ kernels ({found['isa']}, {found['threads']} threads)"
    if not found["native"]:
        runs = f"torch kernels, since there are no C++ ones ({found['missing_because']})"
    missing = [tool for tool in ("compute-sanitizer", "nvcc") if shutil.which(tool) is None]
    missing += [name for name in ("deepspeed", "pytest") if importlib.util.find_spec(name) is None]
    check.add(Result("the device's memory", check.accelerator.describe()["memory_bytes"] / 2**30, "GiB"))
    check.add(Result("the host's available memory", memory()["available_bytes"] / 2**30, "GiB"))
    return f"{runs}; torch {torch.__version__}; not here: {', '.join(missing) or 'nothing'}"


def tests(check: Check) -> str:
    """Run the engine tests on this device."""
    if importlib.util.find_spec("pytest") is None:
        raise SkippedPart("pytest cannot be imported")
    files = DRY_TESTS if check.is_dry else (*os.environ.get("ON_DEVICE", "tests/engine").split(), *GPU_TESTS)
    words = ["--device", "sim" if check.is_dry else "cuda", "-p", "no:cacheprovider", "-rf", *files]
    if importlib.util.find_spec("xdist") is not None and not check.is_dry:
        words += ["-n", str(min(8, max(2, (os.cpu_count() or 2) // 2))), "--dist", "loadfile"]
    begin = time.monotonic()
    lines = []
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *words], cwd=harness.ROOT, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    check.add(Result("the engine's tests", time.monotonic() - begin, "s"))
    if run.returncode:
        raise RuntimeError(lines[-1] if lines else f"pytest ended with {run.returncode}")
    return lines[-1]


def sanitizer(check: Check) -> str:
    """Run a few steps of a tiny model under compute-sanitizer."""
    tool = shutil.which("compute-sanitizer")
    if check.is_dry:
        return f"a dry run of what it would watch: {watched(check)}"
    if tool is None:
        raise SkippedPart("compute-sanitizer is not installed")
    alone = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else a stray access hits memory cached by torch
    if why := refusal([tool, "--tool", "memcheck", "--error-exitcode", "9"], alone, check.left_s):
        raise SkippedPart(f"compute-sanitizer may not be used here: {why}")
    code = "from benchmarks.gpu_parts import *; print(watched(Check(False, 1e9, print)))"
    words = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", code]
    limit_s = max(1.0, check.left_s)
    done = subprocess.run(
        words, cwd=harness.ROOT, env=alone, capture_output=True, text=True, timeout=limit_s, check=False
    )
    print(done.stdout[-4000:], done.stderr[-4000:])
    if done.returncode:
        raise RuntimeError(f"compute-sanitizer ended with {done.returncode}: {done.stdout.strip()[-300:]}")
    return done.stdout.strip().splitlines()[-1].strip("= ")


def refusal(tool: Sequence[str], environ: Mapping[str, str], limit_s: float) -> str | None:
    """Return a tool's error where it cannot watch one addition, as in some containers; None where it can."""
    code = "import torch; (torch.ones(1, device='cuda') + 1).item()"
    words = [*tool, sys.executable, "-c", code]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=max(1.0, limit_s), check=False)
    told = [line.strip("= ") for line in (done.stdout + done.stderr).splitlines() if line.strip("= ")]
    return (told[-1] if told else f"exit code {done.returncode}") if done.returncode else None


def watched(check: Check) -> str:
    """Train a tiny model for a few steps with copies, activations and updates in flight; return a summary."""
    model, fill = check.model(hidden_size=64, intermediate_size=128, num_hidden_layers=3, vocab_size=256)
    batches = check.batches(SEQUENCE, 64)
    with closing(opened(model, fill, placement=Placement(activations="cpu"), prefetch=1)) as engine:
        losses = [engine.step(short(next(batches))).loss.item() for _ in range(3)]
    if not all(math.isfinite(loss) for loss in losses):
        raise RuntimeError(f"losses are {losses}")
    return f"losses {', '.join(f'{loss:.3f}' for loss in losses)}"


def sync(check: Check) -> str:
    """Make torch refuse every operation that waits for the device in a step; the norm waits by an event."""
    model, fill = check.model(hidden_size=256, intermediate_size=512, num_hidden_layers=4, vocab_size=1024)
    # Without a mask, transformers waits to check whether rows are packed.
    mask = {"attention_mask": torch.ones(1, 1, SHORT, SHORT, dtype=torch.bool).tril()}
    batches = check.batches(SEQUENCE, 64)
    with closing(opened(model, fill, prefetch=1)) as engine:
        for _ in range(WARM_STEPS):
            engine.step(short(next(batches)) | mask)
        engine.finish()
        module = check.accelerator.module
        module.set_sync_debug_mode("error")
        try:
            engine.step(short(next(batches)) | mask)
        except RuntimeError as error:
            module.set_sync_debug_mode("default")
            raise error.__context__ or error from None  # the first failure, not a later one from the cleanup
        finally:
            module.set_sync_debug_mode("default")
    return "no operation of a step waited for the device"


def attention_bits(check: Check) -> str:
    """Compare bits of cuDNN attention without a mask: a forward with and without a graph, and two backwards."""
    found = equal_bits(check)
    for name, is_equal in found.items():
        check.add(Result(f"cuDNN attention, {name}", float(is_equal), "equal"))
    return f"{found}"


def equal_bits(check: Check) -> dict[str, bool]:
    """Return which results of causal attention have the same bits."""
    with sdpa_kernel(SDPBackend.MATH if check.is_dry else SDPBackend.CUDNN_ATTENTION):
        shape = 2, 8, check.scaled(SEQUENCE), 64
        qkv = [torch.randn(shape, device=check.accelerator.device, dtype=torch.bfloat16) for _ in range(3)]
        attend = partial(F.scaled_dot_product_attention, *(t.requires_grad_() for t in qkv), is_causal=True)
        with torch.no_grad():
            without_graph = attend()
        results = [attend() for _ in range(2)]
        gradients = [torch.autograd.grad(result, qkv, result.detach()) for result in results]
        return {
            "forward without a graph": torch.equal(without_graph, results[0]),
            "second forward": torch.equal(*results),
            "second backward": all(map(torch.equal, *gradients)),
        }


def cudnn(check: Check) -> str:
    """Compare cuDNN attention, which torch chooses on Hopper GPUs and parity leaves out: `equal_bits`, and the loss of
    an engine's step with plain PyTorch's.
    """
    found = equal_bits(check)
    with sdpa_kernel(SDPBackend.MATH if check.is_dry else SDPBackend.CUDNN_ATTENTION):
        losses, batch = [], next(check.batches(2 * SEQUENCE, 64))
        for is_plain in (True, False):
            torch.manual_seed(0)
            model, fill = check.model(hidden_size=2048, intermediate_size=4096, num_hidden_layers=2, vocab_size=8192)
            if is_plain:
                fill("", model)
                for parameter in model.parameters():  # rotary tables stay in fp32
                    parameter.data = parameter.data.to(torch.bfloat16)
                model.to(check.accelerator.device)
                losses.append(model(**{name: t.to(check.accelerator.device) for name, t in batch.items()}).loss.item())
            else:
                with closing(opened(model, fill, head_chunk_bytes=None)) as engine:
                    losses.append(engine.step(batch).loss.item())
        found["an engine's loss"] = losses[0] == losses[1]
    for name, is_equal in found.items():
        check.add(Result(f"cuDNN attention, {name}", float(is_equal), "equal", details={"losses": losses}))
    if not math.isclose(*losses, rel_tol=1e-3):
        raise RuntimeError(f"the loss is {losses[1]} in an engine and {losses[0]} in plain PyTorch")
    return ", ".join(f"{name}: {'the same bits' if is_equal else 'other bits'}" for name, is_equal in found.items())


def copies(check: Check) -> str:
    """Compare the h2d and d2h lane rates with plain copies of pinned memory."""
    shape = MODELS["8b"] | {"num_hidden_layers": 4, "vocab_size": 1024}
    model, fill = check.model(**shape)
    batches = check.batches(TOKENS[0], 64)
    with closing(opened(model, fill, prefetch=1, max_grad_norm=None)) as engine:
        block = lanes.run_block(engine, (short(b) for b in batches), 3)
        name, num_bytes = max(lanes.streamed_sizes(engine).items(), key=lambda item: item[1])
        seen = {(span.lane, span.name): span.end - span.begin for spans in block.spans for span in spans}
    plain = plain_copies(check.accelerator, num_bytes)
    notes = []
    for lane, both in (("h2d", "h2d beside d2h"), ("d2h", "d2h beside h2d")):
        check.add(Result(f"{lane}, plain", plain[lane] / 1e9, "GB/s"))
        check.add(Result(both + ", plain", plain[both] / 1e9, "GB/s", f"{lane}, plain", plain[both] / plain[lane]))
        rate = num_bytes / seen[lane, name]
        check.add(Result(f"{lane}, engine", rate / 1e9, "GB/s", f"{lane}, plain", rate / plain[lane]))
        notes.append(f"{lane} {rate / 1e9:.1f} of {plain[lane] / 1e9:.1f} GB/s")
    return ", ".join(notes)


def plain_copies(accelerator: Accelerator, num_bytes: int) -> dict[str, float]:
    """Return bytes per second of a copy loop of this size, for each direction alone and for both together."""
    host = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(num_bytes, dtype=torch.uint8, device=accelerator.device) for _ in range(2)]
    streams = [accelerator.module.Stream(accelerator.device) for _ in range(2)]
    ways = {"h2d": (there[0], host[0]), "d2h": (host[1], there[1])}

    def seconds(*names: str) -> list[float]:
        events = []
        for stream, name in zip(streams, names, strict=False):
            begin, end = (accelerator.event(is_timed=True) for _ in range(2))
            target, source = ways[name]
            with accelerator.module.stream(stream):
                begin.record(stream)
                for _ in range(8):
                    target.copy_(source, non_blocking=True)
                end.record(stream)
            events.append((begin, end))
        accelerator.wait()
        return [begin.elapsed_time(end) / 8e3 for begin, end in events]

    found: dict[str, list[float]] = {}
    for _ in range(4):  # the first to warm up
        for name, other in (("h2d", "d2h"), ("d2h", "h2d")):
            found.setdefault(name, []).append(seconds(name)[0])
            found.setdefault(f"{name} beside {other}", []).append(seconds(name, other)[0])
    return {name: num_bytes / statistics.median(times[1:]) for name, times in found.items()}


def updates(check: Check) -> str:
    """Compare AdamW in one launch with the host kernel, bit for bit, for each moment format. Time both that launch and
    torch's operations. Some of torch's operations round differently on a GPU, so the part reports the share of elements
    with equal bits.
    """
    from offload.native import device_update, kernels, torch_fallback

    n, device, notes = check.scaled(1 << 26), check.accelerator.device, []
    weights, moment, grad = (torch.randn(n, device=device) for _ in range(3))
    steps = range(3, 9)

    def planes(states: str) -> tuple[Any, ...]:
        master = torch.empty(n, dtype=torch.bfloat16, device=device), torch.empty(n, dtype=torch.int16, device=device)
        torch_fallback.split(weights, *master)
        if states == "int8":
            moments: Any = [
                (torch.zeros(n, dtype=torch.uint8, device=device), weights.new_zeros(-(-n // 128))) for _ in "mv"
            ]
        else:
            dtype = torch.float32 if states == "fp32" else torch.bfloat16
            moments = [moment.to(dtype, copy=True), moment.square().to(dtype)]
        return master, *moments, grad.bfloat16()

    def in_operations(*arrays: Any, **settings: Any) -> None:
        with mock.patch.object(device_update, "update", return_value=None):
            kernels.adamw(*arrays, **settings)

    def milliseconds(run: Callable[..., Any], arrays: tuple[Any, ...]) -> float:
        number = iter(steps)
        return 1e3 * device_seconds(check, lambda: run(*arrays, step=next(number), **ADAMW), len(steps))

    for states in ("fp32", "bf16", "int8"):
        apart, fused = planes(states), planes(states)
        before, after = milliseconds(in_operations, apart), milliseconds(kernels.adamw, fused)
        if device_update.KERNELS.refused:
            raise RuntimeError(f"updates have no kernels of their own: {device_update.KERNELS.refused}")
        host = tree_map(Tensor.cpu, planes(states))
        for step in steps:
            kernels.adamw(*host, step=step, **ADAMW)
        flats = [tree_leaves(arrays) for arrays in (apart, fused, host)]
        if not all(torch.equal(a.cpu(), b) for a, b in zip(*flats[1:], strict=True)):
            raise RuntimeError(f"AdamW over {states} moments: other bits in one launch than on the host")
        same = [(a == b).float().mean().item() for a, b in zip(*flats[:2], strict=True)]
        notes.append(f"{states} {before:.2f} to {after:.2f} ms, {min(same):.4f} of the elements in the same bits")
        name = f"AdamW, {states} moments"
        check.add(Result(f"{name}, torch's operations", before, "ms"))
        details = {"elements": n, "bytes_per_s": moved_bytes(apart) / max(after, 1e-6) * 1e3}
        check.add(Result(name, after, "ms", f"{name}, torch's operations", before / max(after, 1e-6), details))
    return ", ".join(notes)


def ahead(check: Check) -> str:
    """Compare the memory of a step where launches run ahead of the device and where the host waits at each unit use.
    Freed memory still in use by streams is bounded.
    """
    model, fill = check.model(**FEW_BLOCKS)
    batches, device, found = check.batches(TOKENS[1], 64), check.accelerator, {}
    budget = DRY_AHEAD_BUDGET if check.is_dry else AHEAD_BUDGET
    input_bytes = 2 * next(batches)["input_ids"].numel() * model.config.hidden_size
    placement = Placement(activations="cpu", device_memory=budget)
    with closing(opened(model, fill, placement=placement, recompute="always", micro_batch_size=MICRO_ROWS)) as engine:
        for _ in range(WARM_STEPS):
            engine.step(next(batches))
        for name, enter in (("ahead", RunAhead.enter), ("in step", lambda _: device.wait())):
            engine.finish()
            device.wait()
            device.take_peak()
            with mock.patch.object(RunAhead, "enter", enter):
                block = lanes.run_block(engine, batches, 1)
            device.wait()
            stats = device.module.memory_stats(device.device)
            held, in_use = (stats[f"{which}_bytes.all.peak"] for which in ("allocated", "active"))
            found[name] = in_use
            details = {"held_bytes": held, "step_s": block.seconds, "launching_s": block.host_seconds}
            check.add(Result(f"the most memory in use, launches {name}", in_use / 2**20, "MiB", details=details))
    more, most = found["ahead"] - found["in step"], budget / 32 + 3 * input_bytes
    if more > most:
        raise RuntimeError(f"launches that run ahead hold {more / 2**20:.1f} MiB more, and {most / 2**20:.1f} may be")
    return f"{max(0, more) / 2**20:.1f} MiB more than where the host waits at each use, of {most / 2**20:.1f} at most"


def profiled(check: Check) -> str:
    """Profile a 3b step with torch's profiler: device time by purpose, and the time with copies alone. On the simulated
    device: host time of operations.
    """
    model, fill = check.model(**MODELS["3b"])
    batches = check.batches(TOKENS[1], 64)
    with closing(opened(model, fill, recompute="auto", micro_batch_size=MICRO_ROWS)) as engine:
        for _ in range(WARM_STEPS):
            engine.step(next(batches))
        step_s, events = profiled_step(check, engine, next(batches))
    by_kind, details = seconds_by_purpose(events)
    for kind, seconds in by_kind.items():
        check.add(Result(f"3b, a step's {kind}", seconds * 1e3, "ms", details={"share_of_step": seconds / step_s}))
    check.add(Result("3b, a profiled step", step_s * 1e3, "ms", details=details))
    shares = ", ".join(f"{kind} {seconds * 1e3:.0f}" for kind, seconds in by_kind.items())
    computing_s = details["computing_s"]
    return f"{step_s * 1e3:.0f} ms, of which something computes for {computing_s * 1e3:.0f}; kernels in ms: {shares}"


Events = Sequence[tuple[str, float, float]]
"""Name, begin and end in microseconds of each kernel."""


def profiled_step(check: Check, engine: Engine, batch: Any) -> tuple[float, Events]:
    """Run a step under torch's profiler; return seconds and kernels, in a dry run the host's operations."""
    activities = torch.profiler.ProfilerActivity
    engine.finish()
    check.accelerator.wait()
    with torch.profiler.profile(activities=[activities.CPU if check.is_dry else activities.CUDA]) as seen:
        begin = time.perf_counter()
        engine.step(batch)
        engine.finish()
        check.accelerator.wait()
        step_s = time.perf_counter() - begin
    events = [e for e in seen.events() if check.is_dry or e.device_type != torch.autograd.DeviceType.CPU]
    return step_s, [(e.name, e.time_range.start, e.time_range.end) for e in events]


def seconds_by_purpose(events: Events) -> tuple[dict[str, float], dict[str, Any]]:
    """Return seconds by purpose, and details: seconds with a kernel other than copies, the longest kernels by name."""
    by_kind, by_name, spans = kernel_seconds(events)
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:MOST_KERNELS]
    return by_kind, {"computing_s": covered(spans) / 1e6, "num_kernels": len(events), "kernels": dict(longest)}


def kernel_seconds(
    events: Events,
) -> tuple[dict[str, float], dict[str, float], list[tuple[float, float]]]:
    """Return kernel seconds by purpose and by name, and the times of all kernels other than copies."""
    by_kind, by_name, spans = dict.fromkeys(KERNELS, 0.0), dict[str, float](), []
    for name, begin, end in events:
        kind = next(kind for kind, pattern in KERNELS.items() if re.search(pattern, name, re.IGNORECASE))
        by_kind[kind] += (end - begin) / 1e6
        by_name[name] = by_name.get(name, 0.0) + (end - begin) / 1e6
        if kind != "copies":
            spans.append((begin, end))
    return by_kind, by_name, spans


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the total time covered by at least one span."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def compiled(check: Check) -> str:
    """Time steps of a few 8b blocks, compiled and eager."""
    batches, seconds, losses = check.batches(TOKENS[1], 64), {}, {}
    for mode in ("never", "always"):
        model, fill = check.model(**FEW_BLOCKS)
        settings = {"compile": mode, "micro_batch_size": MICRO_ROWS, "recompute": "always"}
        with check.compiler(), closing(opened(model, fill, **settings)) as engine:
            begin = time.perf_counter()
            losses[mode] = engine.step(next(batches)).loss.item()
            engine.finish()
            first_s = time.perf_counter() - begin
            for _ in range(WARM_STEPS - 1):
                engine.step(next(batches))
            num_graphs = engine.compiled_graphs
            block = lanes.run_block(engine, batches, 2)
            if mode == "always" and not engine.compiled_classes:
                raise RuntimeError("no block was compiled: the warnings above say why")
            if engine.compiled_graphs > num_graphs:
                raise RuntimeError(f"{engine.compiled_graphs - num_graphs} graphs were compiled in a warm step")
            seconds[mode] = block.seconds
            details = {"graphs": num_graphs, "first_step_s": first_s, "loss": losses[mode]}
            details["peak_device_bytes"] = engine.counters.peak_device_bytes
        ratio = None if mode == "never" else seconds["never"] / seconds["always"]
        name = f"blocks of the 8b, compile {mode}"
        versus = "blocks of the 8b, compile never" if ratio else None
        check.add(Result(name, seconds[mode] * 1e3, "ms", versus, ratio, details))
    if not math.isclose(losses["never"], losses["always"], rel_tol=1e-2):
        raise RuntimeError(f"the first loss is {losses['always']} with compiled blocks, and {losses['never']} without")
    return f"a step takes {seconds['always'] / seconds['never']:.3f} of an eager one; {num_graphs} graphs"


def small(check: Check) -> str:
    """Compare steps of a model that fits the device with plain PyTorch and DeepSpeed: `offload.bench step`."""
    sizes = {"hidden": 2048, "layers": 16, "vocabulary": 32768, "sequence": 2048, "batch": 8}
    if check.is_dry:
        sizes = {"hidden": 64, "layers": 3, "vocabulary": 256, "sequence": 32, "batch": 2}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    words += ["--precision", "bf16", "--recompute", "always", "--steps", "4", "--pairs", "2" if check.is_dry else "5"]
    parser = argparse.ArgumentParser()
    step_bench.add_arguments(parser)
    notes = []
    for result in step_bench.run(parser.parse_args(words)):
        check.add(result)
        notes.append(f"{result.name.split(' (')[0]} {result.value:.0f} ms")
    return ", ".join(notes)


def size(name: str, check: Check) -> str:
    """Train a model size on batches of 4k, 16k and 131k tokens, placed by available memory."""
    shape, refused = MODELS[name], []
    host_bytes = DRY_HOST_BYTES if check.is_dry else int(memory()["available_bytes"] * 0.95)
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPU_CHECK_DISK")) as folder:
        for how, settings in placements(folder, host_bytes):
            model, fill = check.model(**shape)
            try:
                engine = opened(model, fill, micro_batch_size=MICRO_ROWS, recompute="auto", **settings)
                break
            except DoesNotFitError as error:
                refused.append(f"{how}: {describe(error)[:MOST_REASON]}")
                print(refused[-1], flush=True)
        else:
            return "does not fit: " + "; ".join(refused)
        numel = lanes.num_parameters(engine)
        found = {"placement": how, "parameters": numel, "refused": refused}
        print(f"{name}: {numel / 1e9:.2f} G parameters, {how}; {check.left_s:.0f} s left", flush=True)
        done: dict[int, float | None] = {}
        with closing(engine):
            for tokens in TOKENS:
                try:
                    done[tokens] = measured(check, engine, name, tokens, found)
                except (DoesNotFitError, torch.OutOfMemoryError) as error:
                    refused.append(f"{tokens} tokens a step: {describe(error)[:MOST_REASON]}")
                    break
    del model, engine
    check.free()
    fits = RESIDENT_BYTES * numel < 0.8 * check.accelerator.free_bytes
    for tokens in TOKENS if fits else ():
        if check.left_s > LEAST_LEFT_S:
            resident(check, name, tokens, shape, done.get(tokens))
    rates = [f"{tokens}: {rate:.0f} tokens/s" for tokens, rate in done.items() if rate]
    return "; ".join([f"{how}: {', '.join(rates)}", *refused])


def placements(folder: str, host_bytes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield placements to try, from most to least memory."""
    host = {"host_memory": host_bytes}
    disk = host | {"nvme_dir": folder, "nvme_memory": int(shutil.disk_usage(folder).free * 0.9)}
    yield "AdamW, states in host memory", {"placement": Placement(**host)}
    yield "AdamW, what host memory does not hold on disk", {"placement": Placement(optimizer="auto", **disk)}
    yield "Lion without clipping", {"optimizer": Lion(lr=1e-4), "placement": Placement(**host), "max_grad_norm": None}


def measured(check: Check, engine: Engine, name: str, tokens: int, found: Mapping[str, Any]) -> float | None:
    """Time steps of this many tokens while time remains; return tokens per second."""
    batches = check.batches(tokens, engine.model.config.vocab_size)
    for _ in range(2):  # the first step records
        step_s = steps_seconds(check, lambda: engine.step(next(batches)), engine.finish)
    affordable = int(check.left_s / max(step_s, 1e-3) / 2)
    if affordable < 2:
        print(f"{name}, {tokens} tokens a step: skipped, {check.left_s:.0f} s left and a step took {step_s:.0f} s")
        return None
    warm = min(WARM_STEPS - 2, affordable - 1)
    for _ in range(warm):
        engine.step(next(batches))
    block = lanes.run_block(engine, batches, min(3, affordable - warm))
    best = lanes.best_schedule(engine, [block])
    actual = tokens if not check.is_dry else tokens // SEQUENCE * check.scaled(SEQUENCE)
    details = lanes.described(block, best) | found
    details |= {"tokens": actual, "rows": tokens // SEQUENCE, "warm_steps": warm + 2}
    details |= utilisation(check, engine, actual / block.seconds)
    details |= {name: getattr(engine.counters, name) for name in ("peak_device_bytes", "peak_host_bytes")}  # so far
    rate = actual / block.seconds
    check.add(
        Result(
            f"{name}, {tokens} tokens a step", rate, "tokens/s", "ideal schedule", best.seconds / block.seconds, details
        )
    )
    return rate


def utilisation(check: Check, engine: Engine, tokens_per_s: float) -> dict[str, float]:
    """Return the model operations as a share of the device peak, without recomputation: six for each multiplying
    parameter, plus causal attention.
    """
    config = engine.model.config
    multiplying = lanes.num_parameters(engine)
    if not config.tie_word_embeddings:
        multiplying -= config.vocab_size * config.hidden_size
    attention = 6 * config.num_hidden_layers * config.hidden_size * check.scaled(SEQUENCE)
    flops_per_s = tokens_per_s * (6 * multiplying + attention)
    found = {"model_flops_per_s": flops_per_s, "product_flops_per_s": product_flops_per_s(check)}
    found["mfu_of_products"] = flops_per_s / found["product_flops_per_s"]
    peak = next((p for key, p in DENSE_FLOPS_PER_S.items() if key in check.accelerator.describe()["name"]), None)
    return found if peak is None else found | {"peak_flops_per_s": peak, "mfu": flops_per_s / peak}


def product_flops_per_s(check: Check) -> float:
    """Return the operations per second of a large random matrix product in bf16."""
    width = 8192 if not check.is_dry else 64
    left, right = (torch.randn(width, width, device=check.accelerator.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * width**3 / max(device_seconds(check, lambda: torch.mm(left, right), 8, num_warm=3), 1e-9)


def resident(check: Check, name: str, tokens: int, shape: Mapping[str, Any], rate: float | None) -> None:
    """Time plain PyTorch with everything on the device, with equal micro-batches and checkpointing."""
    model, fill = check.model(**shape)
    fill("", model)
    model.gradient_checkpointing_enable()
    batches = check.batches(tokens, model.config.vocab_size)
    try:
        plain = step_bench.plain_pytorch("plain PyTorch", model, "bf16", MICRO_ROWS)
        times = [steps_seconds(check, lambda: plain.step(next(batches)["input_ids"]), plain.settle) for _ in range(3)]
    except torch.OutOfMemoryError as error:
        print(f"plain PyTorch, {name}, {tokens} tokens: {str(error)[:200]}", flush=True)
        return
    finally:
        del model
        check.free()
    actual = tokens // SEQUENCE * check.scaled(SEQUENCE)
    ratio = None if rate is None else actual / min(times) / rate
    label = f"{name}, {tokens} tokens a step, plain PyTorch"
    check.add(Result(label, actual / min(times), "tokens/s", f"{name}, {tokens} tokens a step", ratio))


# -- what they share -----------------------------------------------------------------------------------------


def device_seconds(check: Check, run: Callable[[], Any], num_runs: int = 6, num_warm: int = 2) -> float:
    """Return the median time of a call by events, without the first `num_warm` calls."""
    times = []
    for _ in range(num_runs):
        begin, end = (check.accelerator.event(is_timed=True) for _ in range(2))
        begin.record(check.accelerator.current_stream())
        run()
        end.record(check.accelerator.current_stream())
        check.accelerator.wait()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[num_warm:])


def steps_seconds(check: Check, step: Callable[[], Any], settle: Callable[[], Any], num_steps: int = 1) -> float:
    """Return the seconds of a number of steps, from rest to rest."""
    settle()
    check.accelerator.wait()
    begin = time.perf_counter()
    for _ in range(num_steps):
        step()
    settle()
    check.accelerator.wait()
    return time.perf_counter() - begin


def slope(run: Callable[[int], float], num_steps: int) -> tuple[float, float]:
    """Return the seconds of a step in a row, and those of one from rest to rest. `run` takes a number of steps."""
    alone_s, total_s = run(1), run(num_steps)
    return max((total_s - alone_s) / (num_steps - 1), 1e-9), alone_s


def moved_bytes(arrays: tuple[Any, ...]) -> int:
    """Return the bytes of an update: states are read and written, the gradient is read. `arrays`: as of a kernel."""
    *states, gradient = tree_leaves(arrays)
    return 2 * sum(part.nbytes for part in states) + gradient.nbytes


def opened(model: Any, fill: Any, **settings: Any) -> Engine:
    """Return an engine in bf16, by default with uncompiled blocks."""
    settings = {"optimizer": AdamW(lr=1e-4), "precision": "bf16", "compile": "never"} | settings
    return Engine(model, fill=fill, **settings)


def short(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with rows as short as in tests."""
    return {name: value[:, :SHORT] for name, value in batch.items()}


RUN: Mapping[str, Callable[[Check], str]] = {
    "build": build,
    "tests": tests,
    "sanitizer": sanitizer,
    "sync": sync,
    "cudnn-attention": cudnn,
    "copies": copies,
    "updates": updates,
    "run-ahead": ahead,
    "profiled-3b": profiled,
    "compiled-block": compiled,
    "small": small,
    **{name: partial(size, name) for name in MODELS},
}
