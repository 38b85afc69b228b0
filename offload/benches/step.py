"""A training step of the engine against plain PyTorch on the same model, in one process, step by step in turn.

Plain PyTorch clips as the engine does and uses the fused AdamW; in bf16 it keeps fp32 master weights beside bf16 ones.
`recompute always` is compared with per-layer activation checkpointing, `never` with none. Where DeepSpeed can be
imported, its ZeRO-3 with optimizer and parameters on the CPU takes part as well. `--overlap` compares throttled lanes
with an ideal schedule instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from offload.benches import overlap
from offload.benches.report import Result

SIZES = {"hidden": 512, "layers": 8, "vocabulary": 8192, "sequence": 256, "batch": 4}
LEARNING_RATE = 1e-3
_WARM_ROUNDS = 4  # an engine gives away the device memory that is left after the third step
Step = Callable[[Any], object]


@dataclass
class Contender:
    """Something that trains on a batch of token ids; `reference` is the contender that it is compared with."""

    name: str
    step: Step
    reference: str | None = None
    details: Callable[[], dict[str, Any]] = dict
    seconds: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    for name, default in SIZES.items():
        defaults = f"default {default}, with --overlap {overlap.SIZES[name]}"
        parser.add_argument(f"--{name}", type=int, help=f"of the Llama ({defaults})")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=("fp32", "bf16"))
    parser.add_argument("--recompute", nargs="+", choices=("always", "never"), default=("always", "never"))
    parser.add_argument("--threads", type=int, help="threads of torch and of the kernels (default: physical cores)")
    parser.add_argument("--steps", type=int, default=15, help="rounds, after four to warm up (default %(default)s)")
    parser.add_argument("--nvme-dir", nargs="+", help="folders: let the engine also train with its states there")
    parser.add_argument("--no-deepspeed", action="store_true", help="leave DeepSpeed out even where it is installed")
    overlap.add_arguments(parser)


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measure, and return one result per precision, recompute mode and contender; or what `overlap` returns."""
    for name, default in (overlap.SIZES if arguments.overlap else SIZES).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    if arguments.overlap:
        return overlap.run(arguments, _model)
    import torch

    from offload import native

    threads = arguments.threads or native.num_threads()
    torch.set_num_threads(threads)
    native.set_threads(threads)
    results: list[Result] = []
    for precision in arguments.precision:
        for recompute in arguments.recompute:
            for contenders in _contenders(arguments, precision, recompute):
                _measure(contenders, arguments)
                results += _summarise(contenders, arguments, f"{precision}, recompute {recompute}", threads)
    return results


def _contenders(arguments: argparse.Namespace, precision: str, recompute: str) -> Iterator[list[Contender]]:
    plain = plain_pytorch(arguments, precision, checkpointing=recompute == "always")
    contenders = [plain, engine("engine", arguments, precision, recompute, plain.name)]
    contenders.append(
        engine("engine, all units stay", arguments, precision, recompute, plain.name, device_memory="1TiB")
    )
    if arguments.nvme_dir:
        tiers = {"parameters": "nvme", "optimizer": "nvme", "nvme_dir": arguments.nvme_dir}
        contenders.append(engine("engine, states on nvme", arguments, precision, recompute, plain.name, **tiers))
    if not arguments.no_deepspeed and importlib.util.find_spec("deepspeed") is not None:
        contenders.append(deepspeed_zero3(arguments, precision, plain.name))
    yield contenders


def _measure(contenders: list[Contender], arguments: argparse.Namespace) -> None:
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = (arguments.batch, arguments.sequence)
    batches = [torch.randint(0, arguments.vocabulary, shape, generator=generator) for _ in range(4)]
    for round_number in range(-_WARM_ROUNDS, arguments.steps):
        for contender in contenders:
            start = time.perf_counter()
            contender.step(batches[round_number % 4])
            if round_number >= 0:
                contender.seconds.append(time.perf_counter() - start)


def _summarise(contenders: list[Contender], arguments: argparse.Namespace, group: str, threads: int) -> list[Result]:
    times = {contender.name: contender.seconds for contender in contenders}
    tokens = arguments.batch * arguments.sequence
    results = []
    for contender in contenders:
        median = statistics.median(contender.seconds)
        details = {
            "group": group,
            "threads": threads,
            "best": min(contender.seconds) * 1e3,
            "tokens_per_second": tokens / median,
            **contender.details(),
        }
        ratio = None
        if contender.reference:
            pairs = zip(times[contender.reference], contender.seconds, strict=True)
            quotients = [reference / own for reference, own in pairs]
            ratio = statistics.median(quotients)
            details["slowdown"] = statistics.median(1 / quotient for quotient in quotients)
            details["slowdown_of_best"] = min(contender.seconds) / min(times[contender.reference])
        name = f"{contender.name} ({group})"
        results.append(Result(name, median * 1e3, "ms", contender.reference, ratio, details))
    return results


def _model(arguments: argparse.Namespace) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = max(1, arguments.hidden // 64)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=arguments.hidden,
            intermediate_size=arguments.hidden * 8 // 3 // 64 * 64,
            num_hidden_layers=arguments.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=arguments.vocabulary,
            max_position_embeddings=arguments.sequence,
            use_cache=False,
            attn_implementation="sdpa",
        )
    ).train()


def plain_pytorch(arguments: argparse.Namespace, precision: str, checkpointing: bool) -> Contender:
    """Make plain PyTorch: all states resident, clipping, fused AdamW."""
    import torch

    model = _model(arguments)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    masters = list(model.parameters())
    if precision == "bf16":
        masters = [torch.nn.Parameter(p.detach().clone()) for p in masters]
        model.to(torch.bfloat16)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=0.01, fused=True)

    def step(ids: Any) -> object:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if precision == "bf16":
            for master, weight in zip(masters, weights, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if precision == "bf16":
            with torch.no_grad():
                for master, weight in zip(masters, weights, strict=True):
                    weight.copy_(master)
        return loss

    return Contender("plain PyTorch" + (" with checkpointing" if checkpointing else ""), step)


def engine(
    name: str, arguments: argparse.Namespace, precision: str, recompute: str, reference: str, **placement: Any
) -> Contender:
    """Make the engine: parameters and optimizer states on the cpu tier, units streamed through one slot, unless
    `placement` says something else.
    """
    from offload import AdamW, Engine, Placement

    made = Engine(
        _model(arguments),
        optimizer=AdamW(lr=LEARNING_RATE, decay_1d=True),
        placement=Placement(**placement),
        precision=precision,
        recompute=recompute,
        head_chunk_bytes=None,
    )

    def details() -> dict[str, Any]:
        counters = made.counters
        return {
            "peak_device_bytes": counters.peak_device_bytes,
            "peak_host_bytes": counters.peak_host_bytes,
            "h2d_bytes": counters.h2d_bytes,
            "d2h_bytes": counters.d2h_bytes,
            "nvme_read_bytes": counters.nvme_read_bytes,
            "nvme_write_bytes": counters.nvme_write_bytes,
        }

    return Contender(name, lambda ids: made.step({"input_ids": ids, "labels": ids}), reference, details)


def deepspeed_zero3(arguments: argparse.Namespace, precision: str, reference: str) -> Contender:
    """Make DeepSpeed's ZeRO-3 with optimizer states and parameters on the CPU."""
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 2000)}
    for key, value in {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **alone}.items():
        os.environ.setdefault(key, value)
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "offload_param": {"device": "cpu", "pin_memory": False},
        },
        "steps_per_print": 10**9,
    }
    model = _model(arguments)
    made, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())

    def step(ids: Any) -> object:
        loss = made(input_ids=ids, labels=ids).loss
        made.backward(loss)
        made.step()
        return loss

    return Contender("DeepSpeed ZeRO-3, CPU offload", step, reference)
