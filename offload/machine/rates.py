"""Measure the rates used in planning. Each measurement takes milliseconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from offload.accelerators import Accelerator, open_accelerator
from offload.native import kernels
from offload.tiers.host import Arena

_SIZES = (512, 4096)
"""Matrix sizes. A GPU needs a large one for full speed; on a CPU a large one takes seconds."""
_LINK_BYTES = 1 << 25
_MOST_RANDOM = 1 << 20
"""Random numbers to draw. Longer tensors repeat them."""
_LONG_S = 0.05
"""Time limit in seconds: larger products predicted to exceed the limit are skipped, and slow measurements run twice."""
_ATTENTION_TOKENS, _ATTENTION_HEADS, _ATTENTION_WIDTH = (256, 4096), 16, 128
"""Sequence lengths, heads and head size for attention. The long sequence is for a GPU."""
_NUM_LAUNCHES = 256
"""Small enough for the launch queue of a device."""
_ROOFLINE_PLANES = 3
"""Planes written in place (weights, two moments), beside one plane only read (gradients), as in AdamW."""


def link_bytes_per_second(accelerator: Accelerator, *directions: str) -> float:
    """Return the copy rate between pinned memory and accelerator in bytes per second.

    directions: "h2d", "d2h" or both. With both, the copies run concurrently and the rates are summed.
    """
    sides = []
    for direction in directions:
        on_host = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        on_device = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=accelerator.device)
        ends = (on_device, on_host) if direction == "h2d" else (on_host, on_device)
        sides.append((accelerator.module.Stream(accelerator.device), *ends))

    def run() -> None:
        for stream, target, source in sides:
            with accelerator.module.stream(stream):
                target.copy_(source, non_blocking=True)
        accelerator.wait()

    return len(directions) * _LINK_BYTES / _best_seconds(run)


def copy_bytes_per_second(num_copies: int, num_bytes: int) -> float:
    """Return the total rate of `num_copies` concurrent host memory copies of `num_bytes` each, in bytes per second."""
    pairs = [[torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2)] for _ in range(num_copies)]
    with ThreadPoolExecutor(num_copies) as pool:
        seconds = _best_seconds(lambda: list(pool.map(lambda pair: pair[0].copy_(pair[1]), pairs)))
    return num_copies * num_bytes / seconds


def device_bytes_per_second(device: torch.device, num_bytes: int) -> float:
    """Return the device memory rate in bytes read and written per second, for an in-place operation."""
    flat = _random(num_bytes // 4, device=device)

    def run() -> None:
        flat.add_(1)
        _wait(device)

    return 2 * flat.nbytes / _best_seconds(run)


def moved_bytes_per_second(device: torch.device, num_bytes: int) -> float:
    """Return the rate of elementwise kernels in bytes read and written per second.

    The kernels are those of a block: a product, a cast to another width and back, and a product of transposed heads
    with a broadcast, as in rotary embeddings. `num_bytes`: memory to use.
    """
    dtype, other = (torch.float32, torch.bfloat16) if device.type == "cpu" else (torch.bfloat16, torch.float32)
    tokens = max(1, num_bytes // ((3 * dtype.itemsize + other.itemsize) * _ATTENTION_HEADS * _ATTENTION_WIDTH))
    shape = tokens, _ATTENTION_HEADS, _ATTENTION_WIDTH
    first, second = (_random(*shape, device=device, dtype=dtype) for _ in range(2))
    result, cast = torch.empty_like(first), torch.empty_like(first, dtype=other)
    angles = _random(tokens, _ATTENTION_WIDTH, device=device, dtype=dtype)

    def run() -> None:
        torch.mul(first, second, out=result)
        cast.copy_(first)
        result.copy_(cast)
        torch.mul(first.transpose(0, 1), angles, out=result.transpose(0, 1))
        _wait(device)

    moved = 7 * first.nbytes + 2 * cast.nbytes + angles.nbytes
    return moved / _best_seconds(run)


def host_bytes_per_second(num_bytes: int) -> float:
    """Return the host memory rate in bytes read and written per second, in place with all cores, as in an update.

    num_bytes: memory size, larger than the caches.
    """
    if not kernels.is_native():
        return device_bytes_per_second(torch.device("cpu"), num_bytes)
    numel = num_bytes // (4 * (_ROOFLINE_PLANES + 1))
    arena = Arena((_ROOFLINE_PLANES + 1) * 4 * numel)
    *written, read = [arena.take(numel, torch.float32).fill_(1) for _ in range(_ROOFLINE_PLANES + 1)]
    moved = sum(2 * plane.nbytes for plane in written) + read.nbytes
    variants = [partial(kernels.roofline, written, read, variant=v) for v in range(kernels.NUM_ROOFLINE_VARIANTS)]
    return moved / min(map(_best_seconds, variants))


def launch_seconds(device: torch.device) -> float:
    """Return the seconds Python takes to launch a small torch operation."""
    small = torch.zeros(8, device=device)

    def run() -> None:
        for _ in range(_NUM_LAUNCHES):
            torch.add(small, 1)

    try:
        return _best_seconds(run) / _NUM_LAUNCHES
    finally:
        _wait(device)


def flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Return the matrix product rate in FLOP/s, from the largest size fast enough to measure."""
    rate = 0.0
    for size in _SIZES:
        num_operations = 2 * size**3
        if rate and num_operations / rate > _LONG_S:
            break
        matrix = _random(size, size, device=device, dtype=dtype)
        rate = num_operations / _best_seconds(partial(_multiply, matrix))
    return rate


def attention_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """Return the rate of causal attention, forward and backward, in FLOP/s. Masked scores count as none."""
    rate = 0.0
    for tokens in _ATTENTION_TOKENS:
        shape = 1, _ATTENTION_HEADS, tokens, _ATTENTION_WIDTH
        num_operations = 7 * _ATTENTION_HEADS * _ATTENTION_WIDTH * tokens**2  # two products forward, five backward
        if rate and num_operations / rate > _LONG_S:
            break
        inputs = [_random(*shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
        rate = num_operations / _best_seconds(partial(_attend, *inputs))
    return rate


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    result = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.autograd.grad(result, (query, key, value), torch.ones_like(result))
    _wait(query.device)


def _random(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random numbers, the same on each call. Constants would draw less power, so that a GPU runs faster."""
    generator = torch.Generator(device="cpu").manual_seed(0)  # not the generator of the run
    few = torch.randn(min(_MOST_RANDOM, math.prod(shape)), generator=generator, device="cpu").to(device, dtype)
    return few.repeat(-(-math.prod(shape) // len(few)))[: math.prod(shape)].view(shape)


def _multiply(matrix: torch.Tensor) -> None:
    torch.mm(matrix, matrix)
    _wait(matrix.device)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        open_accelerator(device).wait()


def _best_seconds(run: Callable[[], object]) -> float:
    """Return the best of four runs, or of two if they are slow."""
    best, start = float("inf"), time.perf_counter()
    for number in range(4):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
        if number and time.perf_counter() - start > _LONG_S:
            break
    return best
