"""The first parts of `make lease`: what no card has shown, each check in a process of its own, for some seconds.

A check that a device refuses, or that raises, leaves the reason. In a dry run, operations of torch
stand in for kernels that the simulated device lacks: FP8 products, attention of documents and of cuDNN.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import lease
from benchmarks.gpu_parts import (
    MOST_REASON,
    SEQUENCE,
    Check,
    attention_bits,
    device_seconds,
    opened,
    steps_seconds,
)
from offload import Engine, Placement
from offload.engine.loss.cross_entropy import log_probs_with_gradient
from offload.errors import describe
from offload.extras.large import compiled_forwards as forwards
from offload.extras.large import document_operation
from offload.extras.large.compiled_loss import ROWS, CompiledLoss
from offload.extras.large.sink_operation import SINK_ATTENTION
from offload.extras.plan.probe import device_bytes_per_second, flops_per_second, link_bytes_per_second, wake
from offload.extras.quant import casts, device_kernels
from offload.extras.quant import kernels as quant_kernels
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


def unseen(run: Callable[[Check], str], check: Check) -> str:
    """Run one check; return what it said, or why it was refused."""
    with simulated_kernels(check):
        try:
            return run(check)
        except Exception as error:  # a card may fail in any way, and the reason is the result
            note = describe(error)[:MOST_REASON]
            check.add(Result(f"{run.__name__}, whole check", 0.0, "refused", details={"reason": note}))
            return note


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


def probe(check: Check) -> str:
    """Report rates of a card that has slept, and of the card after work."""
    first: dict[str, float] = {}
    device, notes = check.accelerator.device, []
    for when in ("first", "again"):
        if first:
            wake(check.accelerator)
        rates = {
            "h2d": link_bytes_per_second(check.accelerator, "h2d"),
            "device memory": device_bytes_per_second(device, check.scaled(1 << 28)),
            "products": flops_per_second(device, torch.bfloat16),
        }
        first = first or rates
        for name, rate in rates.items():
            details = {"to_first": rate / first[name]}
            check.add(Result(f"probe, {when}, {name}", rate / 1e9, "G/s", details=details))
            notes.append(f"{name} {rate / first[name]:.2f}")
    return ", ".join(notes)


# -- kernels against references ------------------------------------------------------------------------------


def add_equal(check: Check, found: Mapping[str, bool]) -> str:
    """Report which results have the bits of their references."""
    for name, is_equal in found.items():
        check.add(Result(name, float(is_equal), "equal"))
    return ", ".join(f"{name}: {'the same bits' if is_equal else 'other bits'}" for name, is_equal in found.items())


def sinks(check: Check) -> str:
    """Compare attention with sinks by the kernel, over all tokens and in a window, with a plain softmax in fp32: the
    result and four gradients.
    """
    device, tokens, heads, width = check.accelerator.device, check.scaled(2048), 8, 64
    shapes = (1, heads, tokens, width), (1, 2, tokens, width), (1, 2, tokens, width)
    operands = [torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    operands.append(torch.randn(heads, device=device, dtype=torch.bfloat16).requires_grad_())
    notes = []
    for label, window in (("all tokens", tokens), ("a window", tokens // 4)):
        starts = torch.zeros(1, tokens, dtype=torch.int32)
        starts[0, 0] = window
        result = SINK_ATTENTION(*operands, starts, None)[0]
        slopes = torch.randn_like(result)
        found = result.detach(), *torch.autograd.grad(result, operands, slopes)
        exact = [each.detach().float().requires_grad_() for each in operands]
        wanted = softmax_with_sinks(*exact, window)
        references = wanted.detach(), *torch.autograd.grad(wanted, exact, slopes.float())
        for name, one, other in zip(("result", "query", "key", "value", "sinks"), found, references, strict=True):
            distance = float((one.float() - other).norm() / other.norm())
            check.add(Result(f"sinks, {label}, {name}", distance, "relative error"))
            notes.append(f"{label}, {name}: {distance:.1e}")
    return ", ".join(notes)


def softmax_with_sinks(query: Any, key: Any, value: Any, logits: Any, window: int) -> torch.Tensor:
    """Return causal attention [rows, queries, heads, width] beside a sink of each head, from scores of all pairs."""
    heads, tokens = query.shape[1:3]
    key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    back = torch.arange(tokens, device=query.device)[:, None] - torch.arange(tokens, device=query.device)
    scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill((back < 0) | (back >= window), -torch.inf)
    beside = logits[None, :, None, None].expand(len(query), -1, tokens, 1)
    return (torch.cat([scores, beside], -1).softmax(-1)[..., :-1] @ value).transpose(1, 2)


def decoding(check: Check) -> str:
    """Time the decoders, and compare mxfp4 with the host's."""
    rows, columns = 64, 96
    exponents = torch.randint(118, 132, (columns, rows // 32), dtype=torch.uint8)
    codes = torch.randint(0, 256, (columns, rows // 2), dtype=torch.uint8)
    wanted = torch.empty(rows, columns, dtype=torch.bfloat16)
    quant_kernels.decode_mxfp4(exponents, codes, wanted)
    device = check.accelerator.device
    out = torch.empty_like(wanted, device=device)
    has_kernel = device_kernels.decode_mxfp4(exponents.to(device), codes.to(device), out)
    note = add_equal(check, {"mxfp4, a kernel runs": has_kernel, "mxfp4": torch.equal(out.cpu(), wanted)})
    return f"{note}, {lease.decode(check)}"


def cast_kernels(check: Check) -> str:
    """Compare casts to FP8 on the device with torch's operations on the host."""
    found, matrix = {}, torch.randn(257, check.scaled(65536)) * torch.logspace(-20, 3, 257)[:, None]
    for by_row in (True, False):
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            pair = [
                casts.to_fp8(each, by_row=by_row, dtype=dtype) for each in (matrix, matrix.to(check.accelerator.device))
            ]
            wanted, cast = pair
            is_equal = torch.equal(cast.values.cpu().view(torch.uint8), wanted.values.view(torch.uint8))
            name = f"cast to {dtype}, {'by row' if by_row else 'by matrix'}".replace("torch.", "")
            found[name] = is_equal and torch.equal(cast.scale.cpu(), wanted.scale)
    return add_equal(check, found)


def grouped_products(check: Check) -> str:
    """Count the host's waits in a grouped product, forward and backward, and compare it with a loop."""
    device, width, groups, rows = check.accelerator.device, check.scaled(4096), 8, 128
    left = torch.randn(groups * rows, width, device=device, dtype=torch.bfloat16).requires_grad_()
    right = torch.randn(groups, width, width, device=device, dtype=torch.bfloat16).requires_grad_()
    ends = torch.arange(rows, groups * rows + 1, rows, dtype=torch.int32, device=device)
    check.accelerator.wait()
    module = check.accelerator.module
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        module.set_sync_debug_mode("warn")
        try:
            product = torch._grouped_mm(left, right, offs=ends)
            torch.autograd.grad(product, (left, right), product.detach())
        finally:
            module.set_sync_debug_mode("default")
    exact = torch.bmm(left.detach().view(groups, rows, width).float(), right.detach().float()).view_as(product)
    distance = float((product.detach().float() - exact).norm() / exact.norm())
    number = sum("synchroniz" in str(each.message) for each in waits)
    details = {"waits": number}
    check.add(Result("grouped product", distance, "relative error", details=details))
    return f"{number} waits, {distance:.1e} from a batched product"


def compiled_loss(check: Check) -> str:
    """Compare the compiled loss at two numbers of rows with the uncompiled one."""
    notes, vocabulary = [], check.scaled(131072)
    with check.compiler():
        term = CompiledLoss(forwards._compile)
        for rows in (ROWS, 1024):
            logits = torch.randn(rows, vocabulary, device=check.accelerator.device, dtype=torch.bfloat16)
            labels = torch.randint(0, vocabulary, (rows,), device=logits.device)
            slopes = torch.full((rows,), 1 / rows, device=logits.device)
            found, wanted = (run(logits, labels, slopes) for run in (term, log_probs_with_gradient))
            for name, one, other in zip(("value", "gradient"), found, wanted, strict=True):
                assert one is not None
                assert other is not None
                distance = float((one.float() - other.float()).norm() / other.float().norm())
                details = {"refusals": [each for each in term._refusals.values() if each]}
                check.add(Result(f"compiled loss, {rows} rows, {name}", distance, "relative error", details=details))
                notes.append(f"{rows} rows, {name}: {distance:.1e}")
    return ", ".join(notes)


# -- the driver and an engine --------------------------------------------------------------------------------


def addresses(check: Check) -> str:
    """Report whether kernels find registered memory at the host's address."""
    host = torch.ones(1 << 20, dtype=torch.uint8, pin_memory=True)
    is_same = check.accelerator.device_address(host.data_ptr()) == host.data_ptr()
    total = int(check.accelerator.over(host).sum(dtype=torch.int64))
    return add_equal(check, {"host address and device address": is_same, "a sum over host memory": total == len(host)})


def small_engine(check: Check) -> Engine:
    """Return an engine over a Llama with its states on the device."""
    model, fill = check.model(hidden_size=2048, intermediate_size=4096, num_hidden_layers=4, vocab_size=8192)
    return opened(model, fill, placement=Placement(parameters="device", optimizer="device"))


def parking(check: Check) -> str:
    """Report the driver's free memory around park and resume, and a step after both."""
    with closing(small_engine(check)) as engine:
        batches = check.batches(2 * SEQUENCE, 64)
        free = {}
        for when, act in (
            ("in use", lambda: engine.step(next(batches))),
            ("parked", engine.park),
            ("resumed", engine.resume),
        ):
            act()
            check.accelerator.wait()
            free[when] = int(check.accelerator.module.mem_get_info()[0])
            check.add(Result(f"free memory, {when}", free[when] / 1e9, "GB"))
        loss = float(engine.step(next(batches)).loss)
    check.add(Result("loss after resume", loss, "nats"))
    return ", ".join(f"{when}: {free_bytes / 1e9:.2f} GB free" for when, free_bytes in free.items())


def padded_batch(check: Check) -> str:
    """Time steps with rows padded on the right, with their mask, and with full rows."""
    notes = []
    with closing(small_engine(check)) as engine:
        full = next(check.batches(4 * SEQUENCE, 64))
        mask = torch.ones_like(full["input_ids"])
        mask[1:, -mask.shape[1] // 4 :] = 0
        padded = full | {"attention_mask": mask, "labels": full["labels"].masked_fill(mask == 0, -100)}
        for label, batch in (("full rows", full), ("padded rows", padded)):
            engine.step(batch)
            seconds = steps_seconds(check, partial(engine.step, batch), engine.finish, 2)
            loss = float(engine.step(batch).loss)
            check.add(Result(f"two steps of {label}", seconds, "s", details={"loss": loss}))
            notes.append(f"{label}: {seconds:.3g} s, loss {loss:.4f}")
    return ", ".join(notes)


CHECKS: Mapping[str, Callable[[Check], str]] = {
    "probe": probe,
    "cores": cores,
    "addresses": addresses,
    "masked-attention": masked_attention,
    "attention-bits": attention_bits,
    "decoding": decoding,
    "casts": cast_kernels,
    "grouped-products": grouped_products,
    "sinks": sinks,
    "compiled-loss": compiled_loss,
    "padded-batch": padded_batch,
    "park": parking,
    "documents": documents,
    "fp8-recipes": fp8_products,
}
"""The function of each check. `updates` is a part of its own."""


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


RUN: Mapping[str, Callable[[Check], str]] = {name: partial(unseen, run) for name, run in CHECKS.items()}
