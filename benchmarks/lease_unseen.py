"""The first part of `make lease`: what no card has shown, in a minute and a half, each check with its own seconds.

A check that a device refuses, or that raises, leaves the reason, and the others run. In a dry run, operations of torch
stand in for kernels that the simulated device lacks: FP8 products, attention of documents and of cuDNN.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import lease
from benchmarks.gpu_parts import MOST_REASON, Check, device_seconds, updates
from offload.errors import describe
from offload.extras.large import document_operation
from offload.extras.plan.probe import device_bytes_per_second, flops_per_second, link_bytes_per_second, wake
from offload.extras.tools.benches.report import Result
from offload.native import kernels

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
LONGEST = 704, 768
"""Tokens of a row under a mask: 64 above a multiple of 128, where cuDNN was wrong, and a multiple."""
LOW_SCORE = -120.0
FP8_ROWS = 100, 256, 4096
FP8_WIDTH = 1024
MOST_E4M3 = 448
DOCUMENTS = 8


def unseen(check: Check) -> str:
    """Run every check; return what each said."""
    notes = []
    with simulated_kernels(check):
        for name, (limit_s, run) in CHECKS.items():
            begin = time.monotonic()
            try:
                note = run(check)
            except Exception as error:  # a card may fail in any way, and the next check must run
                note = describe(error)[:MOST_REASON]
                check.add(Result(name, 0.0, "refused", details={"reason": note}))
            spent_s = time.monotonic() - begin
            check.add(Result(f"{name}, whole check", spent_s, "s", details={"limit_s": limit_s}))
            notes.append(f"{name}: {note}")
    return "; ".join(notes)


def cores(check: Check) -> str:
    """Report the cores that the machine, the affinity mask and the quota allow, and the threads of an update."""
    quota = CPU_MAX.read_text().strip() if CPU_MAX.exists() else "no cpu.max"
    details = {"cores": os.cpu_count(), "affinity": len(os.sched_getaffinity(0)), "quota": quota}
    check.add(Result("threads of an update", kernels.num_threads(), "threads", details=details))
    return f"{details}"


def masked_attention(check: Check) -> str:
    """Report the share of gradients that are finite in attention with a mask and a row of low scores."""
    found = {}
    for tokens in LONGEST:
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            name = f"{backend.name.lower()}, mask, {tokens} tokens"
            found[name] = add_share(check, name, partial(finite_share, check, tokens, backend))
    return ", ".join(f"{name}: {share}" for name, share in found.items())


def add_share(check: Check, name: str, run: Callable[[], float]) -> float | str:
    """Report a share of finite values, or the reason for none."""
    try:
        share = run()
    except (RuntimeError, NotImplementedError) as error:
        check.add(Result(name, 0.0, "refused", details={"reason": describe(error)[:MOST_REASON]}))
        return "refused"
    check.add(Result(name, share, "finite"))
    return share


def finite_share(check: Check, tokens: int, backend: SDPBackend) -> float:
    """Return the share of finite gradients of query, key and value."""
    device, dtype = check.accelerator.device, torch.bfloat16
    query, key, value = (torch.randn(1, 4, tokens, 64, device=device, dtype=dtype) for _ in range(3))
    key[..., 0] = 1.0
    query[:, :, -1, 0] = LOW_SCORE * 8  # all scores of one row are far below 0, as by massive activations
    leaves = query.requires_grad_(), key.requires_grad_(), value.requires_grad_()
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device).tril()
    with nullcontext() if check.is_dry else sdpa_kernel(backend):
        result = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
        gradients = torch.autograd.grad(result, leaves, torch.ones_like(result))
    return float(torch.stack([each.isfinite().float().mean() for each in gradients]).mean())


def fp8_products(check: Check) -> str:
    """Compare products in FP8, by tensor and by row, in the default and in another stream, with fp32."""
    notes = []
    width, device = check.scaled(FP8_WIDTH), check.accelerator.device
    for rows in FP8_ROWS:
        left, right = (torch.randn(size, width, device=device) for size in (rows, width))
        for scaling in ("tensorwise", "rowwise"):
            for place in ("the default stream", "another stream"):
                name = f"FP8 product of {rows} rows, {scaling}, in {place}"
                stream = check.accelerator.module.Stream(device)
                try:
                    context = nullcontext() if place.startswith("the") else check.accelerator.module.stream(stream)
                    check.accelerator.wait()
                    with context:
                        error = fp8_error(left, right, by_row=scaling == "rowwise")
                    check.accelerator.wait()
                except (RuntimeError, NotImplementedError, ValueError) as refused:
                    check.add(Result(name, 0.0, "refused", details={"reason": describe(refused)[:MOST_REASON]}))
                    notes.append(f"{name}: refused")
                    continue
                check.add(Result(name, error, "relative error"))
    return ", ".join(notes) or "each recipe ran"


def fp8_error(left: torch.Tensor, right: torch.Tensor, *, by_row: bool) -> float:
    """Return the error of left times right', relative to the norm."""
    scales = [each.abs().amax(1, keepdim=True) / MOST_E4M3 for each in (left, right)]
    if not by_row:
        scales = [each.amax() for each in scales]
    a, b = ((each / scale).to(torch.float8_e4m3fn) for each, scale in zip((left, right), scales, strict=True))
    two = scales[1].t() if by_row else scales[1]
    product = torch._scaled_mm(a, b.t(), scale_a=scales[0], scale_b=two, out_dtype=torch.bfloat16)
    exact = left @ right.t()
    return float((product.float() - exact).norm() / exact.norm())


def documents(check: Check) -> str:
    """Time attention of packed documents in one launch, forward and backward, and compare it with a loop over them."""
    tokens = check.scaled(8192)
    shape = 1, 8, tokens, 64
    query, key, value = (
        torch.randn(shape, device=check.accelerator.device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    starts = torch.zeros(1, tokens, dtype=torch.int32)
    starts[:, :: tokens // DOCUMENTS] = tokens
    has_kernel = document_operation.has_kernel(query, value)

    def both() -> Any:
        result, _ = document_operation.OPERATION(query, key, value, starts, None)
        return result, *torch.autograd.grad(result, (query, key, value), torch.ones_like(result))

    seconds = device_seconds(check, both)
    by_loop = document_operation.by_loop(query, key, value, document_operation.Documents.of(starts), scaling=None)
    exact = by_loop.detach().float()
    distance = float((both()[0].detach().float() - exact).norm() / exact.norm())
    details = {"has_kernel": has_kernel, "distance": distance}
    check.add(Result(f"attention of {DOCUMENTS} documents", seconds * 1e3, "ms", details=details))
    return f"{seconds * 1e3:.3g} ms, kernel {has_kernel}, {distance:.1e} from a loop"


class Probe:
    """Rates at the first call, and at a later one after work: a sleeping card is slower at first."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}

    def __call__(self, check: Check) -> str:
        """Measure, and compare with the first measurement."""
        if self._first:
            wake(check.accelerator)
        device = check.accelerator.device
        rates = {
            "h2d": link_bytes_per_second(check.accelerator, "h2d"),
            "device memory": device_bytes_per_second(device, check.scaled(1 << 28)),
            "products": flops_per_second(device, torch.bfloat16),
        }
        when = "again" if self._first else "first"
        for name, rate in rates.items():
            details = {"to_first": rate / self._first.get(name, rate)}
            check.add(Result(f"probe, {when}, {name}", rate / 1e9, "G/s", details=details))
        self._first = self._first or rates
        return ", ".join(f"{name} {rate / self._first[name]:.2f}" for name, rate in rates.items())


_PROBE = Probe()
CHECKS: Mapping[str, tuple[float, Callable[[Check], str]]] = {
    "probe": (8, _PROBE),
    "cores": (1, cores),
    "masked attention": (10, masked_attention),
    "FP8 recipes": (8, fp8_products),
    "decoding": (10, lease.decode),
    "documents": (8, documents),
    "updates": (15, updates),
    "probe again": (10, _PROBE),
}
"""Seconds and function of each check, in order. The probe comes first, on a card that has slept."""


@contextmanager
def simulated_kernels(check: Check) -> Iterator[None]:
    """In a dry run, put operations of torch in the place of kernels that the simulated device lacks."""
    if not check.is_dry:
        yield
        return

    def product(a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, out_dtype: torch.dtype, **_: Any) -> Any:
        return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)

    def forward(query: Any, key: Any, value: Any, found: document_operation.Documents, scaling: Any) -> Any:
        result = document_operation.by_loop(query, key, value, found, scaling=scaling)
        return result.contiguous(), query.new_zeros(query.shape[1], len(result) * result.shape[1], dtype=torch.float32)

    def backward(gradient: Any, query: Any, key: Any, value: Any, *rest: Any) -> Any:
        *_, found, scaling = rest
        leaves = [each.detach().requires_grad_() for each in (query, key, value)]
        one, two, three = leaves
        with torch.enable_grad():
            again = document_operation.by_loop(one, two, three, found, scaling=scaling)
        return torch.autograd.grad(again, leaves, gradient)

    with (
        mock.patch.object(torch, "_scaled_mm", product),
        mock.patch.object(document_operation, "has_kernel", return_value=True),
        mock.patch.object(document_operation, "by_kernel", forward),
        mock.patch.object(document_operation, "backward_by_kernel", backward),
    ):
        yield


RUN: Mapping[str, Callable[[Check], str]] = {"unseen": unseen}
