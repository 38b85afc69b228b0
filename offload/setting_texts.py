"""Help texts of engine settings, for the docstring of `Settings` and for the sections of a configuration."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

ENGINE_TEXTS = {
    "train.matmul": (
        "Products of linear layers in blocks, with 1,024 or more inputs and outputs. precision: in train.precision. "
        "FP8, with train.precision bf16, on GPUs from compute capability 8.9 on, emulated on a CPU: fp8_rowwise, one "
        "scale per token and output, weight gradients in bf16; fp8_tensorwise, one scale per matrix, faster and less "
        "exact, and not in micro-batches or over ranks."
    ),
    "train.passes": (
        "Forward and backward passes in engine.step, each over a part of the rows (gradient accumulation). Saved "
        "inputs and graphs take a part of the memory; weights travel once per pass, and gradients add up in host "
        "memory, in fp32. A loss function for tokens must be a mean over targets, positions or rows. 1: "
        "one pass, with all micro-batches in each unit before the next."
    ),
    "train.max_grad_norm": (
        "Clip gradients to this global norm. A rule with a norm of its own uses that instead. none: no clipping, like "
        "0."
    ),
    "train.clip": (
        "Time of clipped updates: deferred (after the norm is known) or speculative (as gradients arrive, corrected "
        "when the norm is known). auto: deferred; if updates take longer than a forward pass, speculative from step "
        "9 on, provided no earlier step was clipped."
    ),
    "train.on_nonfinite": (
        "Reaction to an infinite or NaN gradient: stop with an error, or skip the step and leave all states unchanged."
    ),
    "train.recompute": (
        "Activation recomputation in backward. always: units save only their inputs. never: units save their whole "
        "graphs, except units with changed inputs or buffers, or with weight copies in the graph. products: blocks "
        "also keep outputs of matrix products and attention, as far as the device budget and offload.graphs allow, "
        "first those with most arithmetic for a byte, and recompute all else. auto: whole graphs as far as the device "
        "budget allows."
    ),
    "train.compile": (
        "Use of torch.compile for blocks: one compilation for all equal blocks. A block unsuited to compilation, or "
        "with different results, runs uncompiled, and a message says so. Compiled blocks differ from others in the "
        "last bits. auto: on a CUDA or ROCm GPU, unless rows of many lengths, sequence_parallel or streamed experts "
        "prevent it; never on a CPU."
    ),
    "train.sequence_tile": (
        "Tokens per sequence tile. Modules acting on single tokens, like MLPs and norms, compute one tile at a time "
        "and recompute each tile in backward; a trial run finds these modules (arXiv:2506.13996). auto: whole "
        "sequences, or tiles if a block would not fit the device. none: whole sequences."
    ),
    "train.sequence_parallel": (
        "Neighbouring ranks on one machine sharing the same sequences (DeepSpeed-Ulysses, arXiv:2309.14509). Each "
        "rank holds part of the tokens in every row, and in attention all tokens for part of the heads, so sequence "
        "memory is divided too. The rows of a step are divided among these rank groups. Above 1, train.recompute "
        "auto means always."
    ),
    "train.head_chunk_bytes": (
        "Largest logits tensor in bytes, counted as fp32. Above, the head runs in chunks over the tokens with a "
        "target. auto: 1/30 of the device budget, at least 256 MiB. With the gradient, a chunk needs as much again in "
        "fp32, and this much in all in bf16. none: all logits at once."
    ),
    "train.delay": (
        "1: apply each update one step late, in parallel with the whole next step, so a step computes with the "
        "previous weights (ZeRO-Offload, arXiv:2101.06840, section 5.2). Training differs from delay 0, and the "
        "host holds one more copy of the weights."
    ),
    "train.delay_after": ("With train.delay: number of steps before the delay begins."),
    "offload.prefetch": (
        "Units prefetched ahead of the computing unit; their memory is guaranteed. 0: no prefetch; auto: as many as "
        "memory allows."
    ),
    "offload.replicas": (
        "Model copies over all ranks. The ranks of each copy partition the model equally, on one machine if "
        "possible; copies all-reduce gradients. auto: one copy per machine, or one over all machines if faster or "
        "if only this fits, by search; one on a single machine."
    ),
    "offload.replica_states": (
        "Optimizer states with offload.replicas. whole: each copy holds all states. shared: states are partitioned "
        "over all copies; the owning rank updates the weights and sends them to the other copies (hpZ in ZeRO++, "
        "arXiv:2306.10209, section 3.2). Weights stay whole in each copy. Requires zero_stage 3."
    ),
    "offload.dispatch": (
        "Which rank computes a block, for cards without a fast link between them. never: each rank, for its own rows, "
        "with all weights. always: block number n on rank n modulo the number of ranks, for the rows of all ranks: "
        "weights are copied to one card, and activations are exchanged through host memory. One machine; requires "
        "zero_stage 1 or 2. auto: always if faster by the plan."
    ),
    "offload.throttle": (
        "Slow lanes down on purpose to simulate a slower link: {LANE: bytes per second} or {LANE: {bandwidth, "
        "latency_seconds}} as YAML. Lanes: h2d, d2h, collective, network, nvme_read, nvme_write, update. none: full "
        "speed."
    ),
    "offload.frozen_weights": (
        "Storage and transfer format for matrices in frozen blocks. exact: unquantized; int8: one byte per weight, "
        "one scale per 128; fp8: one byte per weight, one scale per matrix, only for layers that train.matmul can "
        "multiply in FP8: with fp8_tensorwise the results of exact; nf4: half a byte per weight, as in QLoRA "
        "(arXiv:2305.14314). The device dequantizes. Embeddings, weights outside blocks, vectors (also one per expert) "
        "and parameters below 4096 elements stay exact."
    ),
    "offload.link_weights": (
        "Transfer format for trainable weights, to the device and between ranks. exact: unquantized. int8 "
        "(approximate): one byte per weight, one scale per 128, quantized from the exact master weights after each "
        "update (ZeRO++, arXiv:2306.10209, section 3.2); compute uses the dequantized weights. Checkpoints and "
        "exports hold the master weights. Vectors (also one per expert) and parameters below 4096 elements are sent "
        "exact."
    ),
    "offload.link_gradients": (
        "Transfer format for gradients between replicas (offload.replicas). exact: unquantized. int8 or int4 "
        "(approximate): one or half a byte per gradient, one scale per 128. Quantization errors carry over to the "
        "next step (ZeRO++, section 3.4; error feedback, arXiv:1901.09847), for 2 bytes per weight of the local "
        "partition. All replicas make the same update."
    ),
    "offload.device": (
        "Compute device in torch notation: cpu, cuda, cuda:1. none: the accelerator of this rank, or the CPU "
        "without one."
    ),
    "offload.update": (
        "Place where host-resident states are updated. cpu: on the host. device: states stream to the device in "
        "parallel with compute, and back. both: the device keeps optimizer states for as many regions as fit "
        "(offload.optimizer_memory) and updates them, the host updates the rest. auto: the fastest, by measurement. "
        "Device-resident states always update on the device."
    ),
}
"""Texts of other engine settings by full key."""
PLACEMENT_TEXTS = {
    "offload.parameters": (
        "Tier for offloaded parameters. files: frozen parameters stay in the original model files and are read "
        "again for each use, without a copy elsewhere; trainable parameters are on the cpu."
    ),
    "offload.optimizer": ("Tier for optimizer states."),
    "offload.gradients": (
        "Tier for gradients until the update. auto: the tier of the optimizer states; on disk only without room in "
        "memory."
    ),
    "offload.activations": ("Tier for unit inputs saved for backward."),
    "offload.graphs": (
        "Tier for saved autograd graphs (outputs of products, with recompute products) beyond the device memory, as an "
        "alternative to recomputation: on the device as "
        "many units as train.recompute allows, on the cpu or nvme as many as fit there. auto: cpu if "
        "the forecast for a GPU step is faster with saved graphs, else the device only."
    ),
    "offload.experts": (
        "Transfer of mixture experts to the device. whole: all experts of a layer at once, with the rest of the "
        "layer. streamed: only experts with routed tokens, a few at a time, so the device need not hold a whole "
        "layer. auto: whole, or streamed if the device cannot hold a layer."
    ),
    "offload.optimizer_memory": (
        "Device memory limit for optimizer states, per rank, same forms as device_memory; used when "
        "offload.optimizer is auto and not all states fit. none: the device budget minus all weights."
    ),
    "offload.graphs_memory": (
        "Memory limit for what waits in the offload.graphs tier, per machine, same forms as host_memory; the rest is "
        "recomputed. none: as much as fits."
    ),
    "offload.device_memory": (
        'Device memory budget per rank: "6GiB" or "6G", "512MiB", a number of bytes. It also limits the torch '
        "allocator in this process, to the budget plus 256 MiB plus memory held by others before. none: no limit "
        "(9MiB for the built-in run on a CPU)."
    ),
    "offload.host_memory": ("CPU memory budget per machine, same forms. none: no limit."),
    "offload.nvme_dir": ("Folder for the nvme tier, or several on different disks (separated by spaces)."),
    "offload.nvme_memory": ("Disk budget for the nvme tier, same forms. none: no limit."),
}
"""Texts of tiers and budgets by full key."""
TEXTS = {**ENGINE_TEXTS, **PLACEMENT_TEXTS}
"""All texts by full key."""
_KEYS_WITHOUT_TEXT = "train.precision", "train.micro_batch_size", "offload.zero_stage", "run.seed", "run.debug"
_RULE_FIELDS = (
    *("lr", "weight_decay", "decay_1d", "groups", "states", "betas", "eps", "beta2_decay", "d", "clip_value"),
    *("momentum", "nesterov", "ns_steps", "adjust_lr_fn"),
    *("num_perturbations", "layer_fraction", "magnitude_quantile", "master"),
)
_RULE_KEYS = [f"optimizer.{name}" for name in _RULE_FIELDS]
KEYS = {key.partition(".")[2]: key for key in (*TEXTS, *_KEYS_WITHOUT_TEXT, *_RULE_KEYS)}
"""Full keys by field name of `Settings`, `Placement` and the update rules. Fields without a key are absent."""


def with_texts(docstring: str | None, texts: Mapping[str, str]) -> str:
    """Return a docstring with a line for each text (name, colon, text) in the place of "{texts}"."""
    lines = (
        textwrap.fill(f"{key.partition('.')[2]}: {text}", 112, break_on_hyphens=False) for key, text in texts.items()
    )
    return (docstring or "").replace(
        "{texts}", "\n".join(textwrap.indent(line, " " * 8)[4:] for line in lines).lstrip()
    )
