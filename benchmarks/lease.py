"""Parts of `make lease`: figures of a quarter of an hour with a GPU that parts of `make gpu-check` do not give.

Time of host memory (first touch, page lock, AdamW by threads), rates of kernels, decoding of quantized weights, and
steady steps of models. benchmarks/gpu_check.py runs each part in a separate process.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_parts import (
    ADAMW,
    MICRO_ROWS,
    MODELS,
    MOST_REASON,
    SEQUENCE,
    Check,
    device_seconds,
    moved_bytes,
    opened,
    profiled_step,
    seconds_by_purpose,
    slope,
    steps_seconds,
)
from offload import AdamW, Engine, Placement
from offload.errors import describe
from offload.extras.quant.codecs import INT4
from offload.extras.tools.benches.report import Result
from offload.layout.codecs import CODECS
from offload.native import kernels

GIB = 1 << 30
MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_POPULATE_WRITE = 14, 15, 23
MAP_NORESERVE = 0x4000
LEAST_LEFT_S = 15
LONG_TOKENS = 65536
"""Longer steps have fewer warm and timed steps."""
PRODUCTS = ((16384, 4096, 14336), (16384, 14336, 4096), (16384, 4096, 6144), (4096, 16384, 14336))
"""Rows, inner width and columns: MLP and attention in an 8B, and a weight gradient."""
ATTENTION = ((4, 4096, False), (4, 4096, True), (1, 32768, False))
"""Rows, length and with a mask."""
HEADS, KEY_HEADS, HEAD_WIDTH = 32, 8, 128


# -- the host ------------------------------------------------------------------------------------------------


def host(check: Check) -> str:
    """Time first touch and page lock of host memory, and AdamW by number of threads, alone and beside copies."""
    num_bytes = 2 * GIB if not check.is_dry else 8 << 20
    blocks: list[tuple[mmap.mmap, int]] = []  # kept: a new block would get pages that the hypervisor backs already
    for pages, num_threads in itertools.product(("4k", "huge"), (1, os.cpu_count() or 1)):
        blocks.append(mapped(num_bytes, pages))
        spent = populate(blocks[-1][1], num_bytes, num_threads)
        check.add(Result(f"first touch, {pages} pages, {num_threads} threads", spent / num_bytes * GIB, "s/GiB"))
    if not check.is_dry:
        runtime = torch.cuda.cudart()
        torch.ones(1, device="cuda")
        blocks.append(mapped(num_bytes, "huge"))
        for label, (_, address) in (("touched pages", blocks[-2]), ("untouched pages", blocks[-1])):
            begin = time.perf_counter()
            error = int(runtime.cudaHostRegister(address, num_bytes, 0))
            spent = time.perf_counter() - begin
            details = {"error": error}
            check.add(Result(f"page lock, {label}", spent / num_bytes * GIB, "s/GiB", details=details))
    cores = [n for n in (1, 4, 8, 12, 14, 16) if n <= (os.cpu_count() or 1)]
    numel = 1 << (28 if not check.is_dry else 14)
    arrays = split_states(numel)
    alone = {n: update_rate(check, arrays, n, has_copies=False) for n in cores}
    for n in (n for n in cores if n >= 8):
        update_rate(check, arrays, n, has_copies=True)
    best = max(alone, key=lambda n: alone[n])
    return f"AdamW alone is fastest with {best} threads: {alone[best]:.0f} GB/s"


def mapped(num_bytes: int, pages: str) -> tuple[mmap.mmap, int]:
    """Map anonymous memory; return the map and the address."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    memory.madvise(MADV_HUGEPAGE if pages == "huge" else MADV_NOHUGEPAGE)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def populate(address: int, num_bytes: int, num_threads: int) -> float:
    """Touch memory by threads, a span each; return seconds."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    span = -(-num_bytes // num_threads // (2 << 20)) * (2 << 20)
    starts = range(0, num_bytes, span)
    sizes = [min(span, num_bytes - start) for start in starts]
    threads = [
        threading.Thread(target=madvise, args=(address + start, size, MADV_POPULATE_WRITE))
        for start, size in zip(starts, sizes, strict=True)
    ]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def split_states(numel: int) -> tuple[Any, ...]:
    """Return arrays for `kernels.adamw`: halves, moments, gradient."""
    halves = torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.int16)
    return halves, torch.zeros(numel), torch.zeros(numel), torch.zeros(numel, dtype=torch.bfloat16)


def update_rate(check: Check, arrays: tuple[Any, ...], num_threads: int, *, has_copies: bool) -> float:
    """Report AdamW's bytes per second in GB/s, with or without copies to the device beside the update."""
    times, details = [], {}
    with copies(check) if has_copies else nullcontext(lambda: 0) as count_bytes:
        first = time.perf_counter()
        for step in range(1, 5):
            begin = time.perf_counter()
            kernels.adamw(*arrays, step=step, threads=num_threads, **ADAMW)
            times.append(time.perf_counter() - begin)
        if has_copies:
            details["h2d_gb_per_s"] = count_bytes() / (time.perf_counter() - first) / 1e9
    rate = moved_bytes(arrays) / min(times) / 1e9
    name = f"AdamW, {num_threads} threads{', beside copies' if has_copies else ''}"
    check.add(Result(name, rate, "GB/s", details=details))
    return rate


@contextmanager
def copies(check: Check) -> Iterator[Callable[[], int]]:
    """Copy pinned memory to the device again and again in a thread; yield a function that returns the bytes so far."""
    num_bytes = check.scaled(1 << 28)
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=check.accelerator.device)
    stop, copied = threading.Event(), [0]

    def copy() -> None:
        stream = check.accelerator.module.Stream(check.accelerator.device)
        with check.accelerator.module.stream(stream):
            while not stop.is_set():
                target.copy_(source, non_blocking=True)
                stream.synchronize()
                copied[0] += num_bytes

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield lambda: copied[0]
    finally:
        stop.set()
        thread.join()


# -- kernels -------------------------------------------------------------------------------------------------


def kernel_rates(check: Check) -> str:
    """Measure products in bf16 and float8, attention kernels with and without a mask, and elementwise kernels."""
    device = check.accelerator.device
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    for m, k, n in (tuple(map(check.scaled, shape)) for shape in PRODUCTS):
        left, right = random(m, k), random(n, k)
        add_rate(check, f"bf16 product {m} {k} {n}", 2 * m * k * n, lambda a=left, b=right: a @ b.t())
        for scaling, scales in (("tensorwise", ((), ())), ("rowwise", ((m, 1), (1, n)))):
            label = f"fp8 product {m} {k} {n}, {scaling}"
            add_rate(check, label, 2 * m * k * n, partial(float8_product, left, right, *scales))
    for rows, length, has_mask in ATTENTION:
        attention(check, random, rows, check.scaled(length), has_mask=has_mask)
    tokens, wide, width = check.scaled(16384), check.scaled(14336), check.scaled(4096)
    x, w, y = random(tokens, wide), random(tokens, wide), random(tokens, width)
    add_rate(check, "silu times up", 5 * x.nbytes, lambda: F.silu(x) * w, "GB/s")
    add_rate(check, "bf16 to fp32 and back", 12 * y.numel(), lambda: y.float().to(torch.bfloat16), "GB/s")
    q = random(4, check.scaled(4096), HEADS, HEAD_WIDTH).transpose(1, 2)
    angles = random(1, 1, check.scaled(4096), HEAD_WIDTH)
    add_rate(check, "strided times broadcast, as in RoPE", 2 * q.nbytes, lambda: q * angles, "GB/s")
    numel = check.scaled(1 << 28)
    total, gradient = torch.zeros(numel, device=device), random(numel)
    add_rate(check, "fp32 += bf16", 10 * numel, lambda: total.add_(gradient), "GB/s")
    flat = random(numel)
    add_rate(check, "copy on the device", 2 * flat.nbytes, flat.clone, "GB/s")
    return "rates of kernels by CUDA events" if not check.is_dry else "a dry run"


def float8_product(left: torch.Tensor, right: torch.Tensor, *scale_shapes: tuple[int, ...]) -> Callable[[], Any]:
    """Return a product of float8 operands, already converted, with scales of the given shapes."""
    a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    one, two = (torch.ones(shape, device=left.device) for shape in scale_shapes)
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=two, out_dtype=torch.bfloat16)


def attention(check: Check, random: Callable[..., Any], rows: int, length: int, *, has_mask: bool) -> None:
    """Measure forward and backward of each attention kernel in torch: causal, 32 heads over 8 key heads."""
    q = random(rows, HEADS, length, HEAD_WIDTH).requires_grad_()
    grouped = [random(rows, KEY_HEADS, length, HEAD_WIDTH).requires_grad_() for _ in range(2)]
    repeated = [kv.detach().repeat_interleave(HEADS // KEY_HEADS, 1).requires_grad_() for kv in grouped]
    settings: dict[str, Any] = {"is_causal": True}
    if has_mask:
        settings = {"attn_mask": torch.ones(1, 1, length, length, device=q.device, dtype=torch.bool).tril()}
    num_flops = 2 * rows * HEADS * length * length * HEAD_WIDTH
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        is_grouped = backend is not SDPBackend.EFFICIENT_ATTENTION and not has_mask
        key_values = grouped if is_grouped else repeated
        label = f"{backend.name.lower()} {rows}x{length}{', with a mask' if has_mask else ''}"

        def forward(kv: Any = key_values, more: Mapping[str, Any] = {"enable_gqa": is_grouped}) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, *kv, **settings, **more)

        def both(forward: Any = forward, kv: Any = key_values) -> Any:
            out = forward()
            return torch.autograd.grad(out, (q, *kv), out)

        with sdpa_kernel(backend):
            forward_s = add_rate(check, f"{label}, forward", num_flops, forward)
            if forward_s:
                add_rate(check, f"{label}, backward", 2.5 * num_flops, both, less_s=forward_s)


def add_rate(
    check: Check, name: str, amount: float, run: Callable[..., Any], unit: str = "TFLOP/s", less_s: float = 0.0
) -> float | None:
    """Report operations or bytes per second of `run`, less the seconds of another part; return seconds, or None where
    the device refuses.
    """
    try:
        if isinstance(run, partial):
            run = run()
        seconds = max(device_seconds(check, run) - less_s, 1e-9)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        check.add(Result(name, 0.0, "refused", details={"reason": describe(error)[:MOST_REASON]}))
        return None
    check.add(Result(name, amount / seconds / (1e12 if unit == "TFLOP/s" else 1e9), unit))
    return seconds


def decode(check: Check) -> str:
    """Time decoding of quantized weights on the device, and the host's part of the launches."""
    numel, notes = check.scaled(1 << 26), []
    weights = torch.randn(numel) * 0.02
    device = check.accelerator.device
    for codec in (*map(CODECS.__getitem__, ("int8", "nf4", "fp8")), INT4):
        name = codec.name
        records = torch.cat([data for *_, data in codec.encoded(weights.split(1 << 20))]).to(device)
        out, workspace = torch.empty(numel, dtype=torch.bfloat16, device=device), codec.workspace(numel).to(device)
        run = partial(codec.decode, records, out, workspace)
        spent = device_seconds(check, run)
        begin = time.perf_counter()
        run()
        launching_s = time.perf_counter() - begin
        details = {"launching_ms": launching_s * 1e3, "weights": numel}
        check.add(Result(f"decoding {name}", spent * 1e3, "ms", details=details))
        notes.append(f"{name} {numel / spent / 1e9:.1f} G weights/s")
    return ", ".join(notes)


# -- steps ---------------------------------------------------------------------------------------------------


def steady(
    check: Check,
    *,
    name: str,
    tokens: Sequence[int],
    compiles: Sequence[str],
    placement: Mapping[str, Any],
    spare_cores: Sequence[int] = (),
) -> str:
    """Time steps in a long run: the slope between one step from rest to rest and several in a row. `spare_cores`: cores
    that updates leave to the launching threads, for each entry of `tokens`.
    """
    notes, shape = [], MODELS[name]
    for mode in compiles:
        label, begin = f"{name}, compile {mode}", time.perf_counter()
        model, fill = check.model_in_bf16(**shape)
        check.add(Result(f"{label}, model built", time.perf_counter() - begin, "s"))
        compiles = mode.replace("auto", "always")  # stored results have this name; the simulated device needs always
        settings = {"micro_batch_size": MICRO_ROWS, "recompute": "auto", "compile": compiles}
        begin = time.perf_counter()
        with check.compiler():
            engine = opened(model, fill, optimizer=AdamW(lr=1e-5), placement=Placement(**placement), **settings)
            details = {"updates_on": engine.updates_on}
            check.add(Result(f"{label}, engine opened", time.perf_counter() - begin, "s", details=details))
            with closing(engine):
                for number, spare in itertools.zip_longest(tokens, spare_cores, fillvalue=0):
                    with spared(spare):
                        spares = f", {spare} cores spared" if spare else ""
                        rate = steady_rate(check, engine, f"{label}, {number} tokens a step{spares}", number)
                    notes.append(f"{label}, {number}{spares}: {rate:.0f} tokens/s")
                if check.left_s > LEAST_LEFT_S:
                    profile(check, engine, f"{label}, {tokens[0]} tokens a step", tokens[0])
        del model, fill, engine
        check.free()
    return "; ".join(notes)


@contextmanager
def spared(num_cores: int) -> Iterator[None]:
    """Leave this many cores out of updates within the context."""
    before = kernels.num_threads()
    kernels.set_threads(max(1, before - num_cores))
    try:
        yield
    finally:
        kernels.set_threads(before)


def steady_rate(check: Check, engine: Engine, label: str, tokens: int) -> float:
    """Report the first steps, one step from rest to rest, and the steady rate; return tokens per second."""
    batches = check.batches(tokens, engine.model.config.vocab_size)
    actual = tokens // SEQUENCE * check.scaled(SEQUENCE)
    results = deque[Any](maxlen=1)
    run = partial(steps_seconds, check, lambda: results.append(engine.step(next(batches))), engine.finish)
    num_warm, num_steps = (2, 3) if tokens > LONG_TOKENS else (4, 5)
    for number in range(num_warm):  # the first step records, the third shares out memory left over
        check.add(Result(f"{label}, step {number}", run(1), "s"))
    step_s, alone_s = slope(run, num_steps)
    (last,) = results
    exposed = {lane: times.exposed_seconds for lane, times in last.lanes.items() if lane != "compute"}
    details = {"step_s": step_s, "alone_s": alone_s, "exposed_s": exposed, "clip": engine.clip}
    details |= {"head_chunks": engine.head_chunks, "updates_on": engine.updates_on}
    details |= {name: getattr(engine.counters, name) for name in ("peak_device_bytes", "peak_host_bytes")}
    details |= {"compiled_graphs": engine.compiled_graphs, "loss": float(last.loss)}
    check.add(Result(label, actual / step_s, "tokens/s", details=details))
    return actual / step_s


def profile(check: Check, engine: Engine, label: str, tokens: int) -> None:
    """Report device time of a step by purpose."""
    batch = next(check.batches(tokens, engine.model.config.vocab_size))
    step_s, events = profiled_step(check, engine, batch)
    by_kind, details = seconds_by_purpose(events)
    check.add(Result(f"{label}, a profiled step", step_s * 1e3, "ms", details=details | {"by_purpose_s": by_kind}))


ON_THE_HOST = {"parameters": "cpu", "optimizer": "cpu"}
EIGHT = partial(steady, name="8b", placement=ON_THE_HOST)
AUTO = {"parameters": "auto", "optimizer": "auto"}
RUN: Mapping[str, Callable[[Check], str]] = {
    "host": host,
    "kernels": kernel_rates,
    "steady-8b": partial(EIGHT, tokens=(32768, 32768, 131072), compiles=("never",), spare_cores=(0, 2)),
    "steady-8b-compiled": partial(EIGHT, tokens=(32768,), compiles=("auto",)),
    "steady-3b": partial(steady, name="3b", tokens=(16384,), compiles=("never", "auto"), placement=AUTO),
}
