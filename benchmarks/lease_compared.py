"""Parts of `make lease-compared`: equal steps by the engine, DeepSpeed ZeRO-3 and FSDP2, with states in host memory.

All train a Llama of the same shape on the same batches, in micro-batches of MICRO_ROWS rows, with recomputation, AdamW
over fp32 masters and clipping. A contender that is not installed, or whose states do not fit the host, is reported by
name, and the others run.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks import harness
from benchmarks.gpu_parts import MICRO_ROWS, MODELS, MOST_REASON, Check, opened, slope, steps_seconds
from offload import AdamW, Placement
from offload.errors import describe
from offload.extras.tools.benches.blocks import do_nothing
from offload.extras.tools.benches.report import Result
from offload.machine.limits import memory
from tests.ports import rank_variables

LEAST_LEFT_S = 20
LEARNING_RATE, MAX_NORM = 1e-5, 1.0
NUM_STEPS = 5
TOKENS = {"3b": 16384, "8b": 32768}
HOST_BYTES = {"offload": 14, "DeepSpeed ZeRO-3": 18, "FSDP2": 16}
"""Host bytes per parameter: weights in bf16 (FSDP2: none), masters, two moments, gradients (engine: in bf16)."""

Step = Callable[[list[torch.Tensor]], object]
"""A step over the token ids of each micro-batch, int64 [rows, length]."""
Settle = Callable[[], object]
"""Waits until all work of earlier steps is done, except on the device."""


def compared(name: str, check: Check) -> str:
    """Time steps of every contender, one after the other."""
    notes, tokens = [], TOKENS[name]
    for contender, (package, open_contender) in CONTENDERS.items():
        label = f"{name}, {tokens} tokens a step, {contender}"
        reason = refusal(check, name, contender, package)
        if not reason:
            try:
                with open_contender(check, MODELS[name]) as (step, settle):
                    notes.append(f"{contender} {rate(check, step, settle, label, tokens):.0f} tokens/s")
            except (RuntimeError, OSError, ValueError, ImportError, AssertionError) as error:
                reason = describe(error)[:MOST_REASON]
        if reason:
            check.add(Result(label, 0.0, "not run", details={"reason": reason}))
            notes.append(f"{contender} not run: {reason}")
        check.free()
    return "; ".join(notes)


def refusal(check: Check, name: str, contender: str, package: str) -> str:
    """Return the reason against a run; empty for none."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if check.left_s < LEAST_LEFT_S:
        return f"only {check.left_s:.0f} s are left"
    numel = harness.num_parameters({"model_type": "llama"} | MODELS[name])
    needed, free = HOST_BYTES[contender] * numel, memory()["available_bytes"]
    if needed > free and not check.is_dry:
        return f"its states take {needed / 2**30:.0f} GiB of host memory, and {free / 2**30:.0f} are free"
    return ""


def rate(check: Check, step: Step, settle: Settle, label: str, tokens: int) -> float:
    """Report the first step, one step from rest to rest, and the slope to NUM_STEPS steps; return tokens per second."""
    ids = next(check.batches(tokens, 64))["input_ids"]
    parts = list(ids.split(MICRO_ROWS))
    run = partial(steps_seconds, check, lambda: step(parts), settle)
    check.add(Result(f"{label}, first step", run(1), "s"))
    num_warm = 3 if check.left_s > LEAST_LEFT_S else 1  # the engine shares out leftover memory after the third step
    for _ in range(num_warm):
        run(1)
    step_s, alone_s = slope(run, NUM_STEPS)
    peak_bytes = check.accelerator.module.max_memory_allocated()
    details = {"step_s": step_s, "alone_s": alone_s, "peak_device_bytes": peak_bytes}
    check.add(Result(label, ids.numel() / step_s, "tokens/s", details=details))
    return ids.numel() / step_s


@contextmanager
def engine(check: Check, shape: Mapping[str, Any]) -> Iterator[tuple[Step, Settle]]:
    """Yield steps of the engine with its defaults, states on the host."""
    model, fill = check.model_in_bf16(**shape)
    settings: dict[str, Any] = {"placement": Placement(parameters="cpu", optimizer="cpu"), "recompute": "auto"}
    compiles = "always" if check.is_dry else "auto"  # the simulated device compiles only if told
    settings |= {"micro_batch_size": MICRO_ROWS, "max_grad_norm": MAX_NORM, "compile": compiles}
    with check.compiler(), opened(model, fill, optimizer=AdamW(lr=LEARNING_RATE), **settings) as own:

        def step(parts: list[torch.Tensor]) -> object:
            ids = torch.cat(parts)
            return own.step({"input_ids": ids, "labels": ids})

        yield step, own.finish


@contextmanager
def deepspeed(check: Check, shape: Mapping[str, Any]) -> Iterator[tuple[Step, Settle]]:
    """Yield steps of DeepSpeed ZeRO-3 with parameters and optimizer states on the host."""
    device = rival_device(check)
    os.environ |= rank_variables() | {"DS_ACCELERATOR": device.type}
    import deepspeed as library

    model, fill = check.model_in_bf16(**shape)
    fill("", model)
    model.gradient_checkpointing_enable()
    offload = {"device": "cpu", "pin_memory": not check.is_dry}
    adam = {"lr": LEARNING_RATE, "weight_decay": 0.01, "torch_adam": check.is_dry}  # else minutes of compilation
    config = {
        "train_micro_batch_size_per_gpu": MICRO_ROWS,
        "gradient_accumulation_steps": 1,  # the loop below says where a step ends
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_force_ds_cpu_optimizer": not check.is_dry,
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_optimizer": offload, "offload_param": offload},
        "steps_per_print": 10**9,
    }
    own, *_ = library.initialize(model=model, config=config, model_parameters=model.parameters())

    def step(parts: list[torch.Tensor]) -> object:
        for number, part in enumerate(parts):
            ids = part.to(device)
            own.set_gradient_accumulation_boundary(number + 1 == len(parts))
            own.backward(own(input_ids=ids, labels=ids).loss / len(parts))
        return own.step()

    try:
        yield step, do_nothing
    finally:
        own.destroy()


@contextmanager
def fsdp2(check: Check, shape: Mapping[str, Any]) -> Iterator[tuple[Step, Settle]]:
    """Yield steps of torch's fully_shard with CPU offload: fp32 weights on the host, compute in bf16."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    device = rival_device(check)
    os.environ |= rank_variables()
    with ExitStack() as stack:
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo" if check.is_dry else "cpu:gloo,cuda:nccl")
            stack.callback(dist.destroy_process_group)
        model, fill = check.model(**shape)
        fill("", model)
        model.gradient_checkpointing_enable()
        how: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=not check.is_dry),
        }
        for layer in model.model.layers:
            fully_shard(layer, **how)
        fully_shard(model, **how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)

        def step(parts: list[torch.Tensor]) -> object:
            for number, part in enumerate(parts):
                ids = part.to(device)
                model.set_requires_gradient_sync(number + 1 == len(parts))
                (model(input_ids=ids, labels=ids).loss / len(parts)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            return optimizer.zero_grad(set_to_none=True)

        yield step, do_nothing


def rival_device(check: Check) -> torch.device:
    """Return the device of other libraries, which do not know the simulated one."""
    return torch.device("cpu") if check.is_dry else check.accelerator.device


CONTENDERS: Mapping[str, tuple[str, Callable[[Check, Mapping[str, Any]], Any]]] = {
    "offload": ("offload", engine),
    "DeepSpeed ZeRO-3": ("deepspeed", deepspeed),
    "FSDP2": ("torch.distributed.fsdp", fsdp2),
}
"""Package and function of each contender, by name."""
RUN: Mapping[str, Callable[[Check], str]] = {f"compared-{name}": partial(compared, name) for name in TOKENS}
