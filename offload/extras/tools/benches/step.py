"""Compare training steps of the engine with plain PyTorch on the same model, in one process, taking turns.

All contenders run blocks of steps without pending work at either end (`blocks.py`), on the device the
engine selects by default. Plain PyTorch clips like the engine and uses fused AdamW; with bf16 weights it keeps fp32
masters. `recompute always` is compared with per-layer activation checkpointing, `never` with none. If DeepSpeed is
installed, ZeRO-3 participates too, with optimizer and parameters on the CPU and, given disk folders, on disk.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from offload.errors import ConfigError
from offload.extras.tools.benches.blocks import Contender, do_nothing, measure, summarise
from offload.extras.tools.benches.report import Result

SUMMARY = "a training step against plain PyTorch and DeepSpeed"
SIZES = {"hidden": 512, "layers": 8, "vocabulary": 8192, "sequence": 256, "batch": 4}
LEARNING_RATE = 1e-3
MOVED = ("h2d_bytes", "d2h_bytes", "nvme_read_bytes", "nvme_write_bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="of the Llama (default %(default)s)")
    for name, choices in (("--precision", ("fp32", "bf16")), ("--recompute", ("always", "never"))):
        about = f"of {', '.join(choices)} (default: both)"
        parser.add_argument(name, nargs="+", choices=choices, default=choices, metavar="NAME", help=about)
    parser.add_argument("--threads", type=int, help="threads of torch and of the kernels (default: physical cores)")
    parser.add_argument("--steps", type=int, default=8, help="in a block (default %(default)s)")
    about = "rounds of one block each, after one to warm up (default %(default)s)"
    parser.add_argument("--pairs", type=int, default=7, help=about)
    parser.add_argument("--nvme-dir", nargs="+", help="folders: let the engine also train with its states there")
    parser.add_argument("--no-deepspeed", action="store_true", help="leave DeepSpeed out even where it is installed")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Run the benchmark and return one result per precision, recompute mode and contender."""
    threads, batches = begin(arguments)
    num_parameters = sum(parameter.numel() for parameter in llama(arguments).parameters())
    results: list[Result] = []
    for precision in arguments.precision:
        for recompute in arguments.recompute:
            with ExitStack() as resources:
                contenders = list(_contenders(arguments, precision, recompute, resources))
                measure(contenders, batches, arguments.steps, arguments.pairs)
                more = {"group": f"{precision}, recompute {recompute}", "threads": threads}
                more |= {"precision": precision, "parameters": num_parameters}
                results += summarise(contenders, arguments.steps, arguments.batch * arguments.sequence, more)
    return results


def begin(arguments: argparse.Namespace) -> tuple[int, list[Any]]:
    """Set the torch and kernel thread counts. Returns the count and batches of token ids. Raises ConfigError."""
    if arguments.steps < 1 or arguments.pairs < 1:
        raise ConfigError(f"--steps is {arguments.steps} and --pairs {arguments.pairs}; each must be at least one.")
    import torch

    from offload.native import kernels

    # torch and the kernels share the cores.
    threads = arguments.threads or kernels.num_threads()
    torch.set_num_threads(threads)
    kernels.set_threads(threads)
    generator = torch.Generator().manual_seed(1)
    shape = (arguments.batch, arguments.sequence)
    return threads, [torch.randint(0, arguments.vocabulary, shape, generator=generator) for _ in range(4)]


def _contenders(
    arguments: argparse.Namespace, precision: str, recompute: str, resources: ExitStack
) -> Iterator[Contender]:
    """Yield the contenders. Resources to close are registered in `resources`."""
    checkpoints = recompute == "always"
    name = "plain PyTorch"
    if checkpoints:
        name += " with checkpointing"
    plain = plain_pytorch(name, llama(arguments, checkpoints), precision)
    yield plain

    def ours(name: str, **placement: Any) -> Contender:
        return engine(name, arguments, precision, recompute, plain.name, resources, **placement)

    yield ours("engine")
    yield ours("engine, all units stay", device_memory="1TiB")
    if arguments.nvme_dir:
        yield ours("engine, states on nvme", parameters="nvme", optimizer="nvme", nvme_dir=arguments.nvme_dir)
    if not arguments.no_deepspeed and importlib.util.find_spec("deepspeed") is not None:
        folders: dict[str, str | None] = {"CPU": None}
        if arguments.nvme_dir:
            folders["NVMe"] = resources.enter_context(tempfile.TemporaryDirectory(dir=arguments.nvme_dir[0]))
        for tier, folder in folders.items():
            name = f"DeepSpeed ZeRO-3, {tier} offload"
            yield deepspeed_zero3(name, arguments, precision, checkpoints, plain.name, resources, folder)


def llama(arguments: argparse.Namespace, checkpointing: bool = False) -> Any:
    """Return the model to train."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)  # equal weights for all contenders
    heads = max(1, arguments.hidden // 64)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=arguments.hidden,
            intermediate_size=arguments.hidden * 8 // 3 // 64 * 64,  # Llama's ratio
            num_hidden_layers=arguments.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=arguments.vocabulary,
            max_position_embeddings=arguments.sequence,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    return model.train()


def plain_pytorch(name: str, model: Any, precision: str, rows: int | None = None) -> Contender:
    """Return the plain PyTorch contender: resident states, clipping, fused AdamW.

    `rows`: micro-batch size; None: whole batch.
    """
    import torch

    from offload.accelerators import device_of, own_accelerator

    accelerator = own_accelerator()
    device = device_of(accelerator)
    model.to(device)
    masters = list(model.parameters())
    if precision == "bf16":
        # fp32 masters beside bf16 weights, as in the engine.
        masters = [torch.nn.Parameter(p.detach().clone()) for p in masters]
        model.to(torch.bfloat16)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=0.01, fused=True)

    def step(ids: Any) -> None:
        ids = ids.to(device)
        for part in ids.split(rows or len(ids)):
            # The gradient of the mean over the whole batch.
            (model(input_ids=part, labels=part).loss * (len(part) / len(ids))).backward()
        if precision == "bf16":
            for master, weight in zip(masters, weights, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float()
                weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if precision == "bf16":
            with torch.no_grad():
                for master, weight in zip(masters, weights, strict=True):
                    weight.copy_(master)

    settle = do_nothing
    if accelerator is not None:
        settle = accelerator.wait
    return Contender(name, step, settle)


def engine(
    name: str,
    arguments: argparse.Namespace,
    precision: str,
    recompute: str,
    reference: str,
    resources: ExitStack,
    **placement: Any,
) -> Contender:
    """Return the engine contender. Default: parameters and optimizer states in host memory, one slot on the device."""
    from offload.engine.engine import Engine
    from offload.optim.adamw import AdamW
    from offload.tiers.placement import Placement

    trained_engine = Engine(
        llama(arguments),
        optimizer=AdamW(lr=LEARNING_RATE, decay_1d=True),  # torch's AdamW decays all parameters
        placement=Placement(**placement),
        precision=precision,
        recompute=recompute,
        compile="never",  # as the others
        head_chunk_bytes=None,  # full logits, as the others
    )
    resources.callback(trained_engine.close)
    moved_bytes = dict.fromkeys(MOVED, 0)

    def step(ids: Any) -> None:
        trained_engine.step({"input_ids": ids, "labels": ids})
        for name in MOVED:  # complete once a step returns, including transfers still in progress
            moved_bytes[name] += getattr(trained_engine.counters, name)

    def details() -> dict[str, Any]:
        counters = trained_engine.counters
        return {"peak_device_bytes": counters.peak_device_bytes, "peak_host_bytes": counters.peak_host_bytes}

    # A copy: the next steps add to the same dictionary.
    return Contender(name, step, trained_engine.finish, reference, moved_bytes.copy, details)


def deepspeed_zero3(
    name: str,
    arguments: argparse.Namespace,
    precision: str,
    checkpointing: bool,
    reference: str,
    resources: ExitStack,
    folder: str | None,
) -> Contender:
    """Return the DeepSpeed ZeRO-3 contender with optimizer states and parameters on the CPU or on disk in `folder`."""
    from offload.accelerators import device_of, own_accelerator

    accelerator = own_accelerator()
    device = device_of(accelerator)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    # A port of its own: another process may measure at the same time.
    more = {"DS_ACCELERATOR": device.type, "MASTER_PORT": str(29500 + os.getpid() % 2000)}
    for key, value in (alone | more).items():
        # DeepSpeed opens a process group also for a single rank.
        os.environ.setdefault(key, value)
    import deepspeed

    place = {"device": "cpu"}
    if folder is not None:
        place = {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**place, "pin_memory": accelerator is not None},
            "offload_param": {**place, "pin_memory": accelerator is not None},
        },
        "steps_per_print": 10**9,  # never within a measurement
    }
    model = llama(arguments, checkpointing)
    ds_engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    resources.callback(ds_engine.destroy)

    def step(ids: Any) -> object:
        ids = ids.to(device)
        loss = ds_engine(input_ids=ids, labels=ids).loss
        ds_engine.backward(loss)
        ds_engine.step()
        return loss

    # Writes to disk go on after a step, and belong to the block, as ours do. Parameters share a swapper.
    parameter_swappers = [getattr(parameter, "nvme_swapper", None) for parameter in model.parameters()]
    swappers = {id(swapper): swapper for swapper in parameter_swappers if swapper is not None}

    def settle() -> None:
        for swapper in swappers.values():
            swapper.synchronize_reads()
            swapper.synchronize_writes()
        if accelerator is not None:
            accelerator.wait()

    return Contender(name, step, settle, reference)
