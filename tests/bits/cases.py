"""Configuration table for `make bits`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from offload import LOMO, SGD, Adafactor, AdaLomo, AdamW, Lion, MeZO, Muon
from offload.optim.rule import UpdateRule

ADAMW = AdamW(lr=1e-2, weight_decay=0.1)
MEZO = MeZO(lr=1e-3, eps=1e-2, weight_decay=0.1)
DISK = "disk"
"""In a placement: the case's temporary folder."""

DEVICE = {"parameters": "device", "optimizer": "device"}
CPU = {"parameters": "cpu", "optimizer": "cpu"}
NVME = {"parameters": "nvme", "optimizer": "nvme", "gradients": "nvme", "activations": "nvme", "nvme_dir": DISK}
STAYS = {"parameters": "device", "optimizer": "cpu"}
TIERS = {"device": DEVICE, "cpu": CPU, "nvme": NVME}
NONE, SPECULATIVE = {"max_grad_norm": None}, {"clip": "speculative", "max_grad_norm": 0.1}
TABLE_BYTES = 4 * 4096 * 32
"""Embedding size in bytes for models with the large vocabulary, fp32."""
FEW = {**CPU, "device_memory": TABLE_BYTES // 4}
"""Device memory for a quarter of the large embedding."""


@dataclass(frozen=True)
class Case:
    """Five steps with one configuration."""

    name: str
    model: str = "llama"
    """Function name in tests/bits/models.py."""
    rule: UpdateRule = ADAMW
    """Update rule."""
    place: Mapping[str, Any] = field(default_factory=dict)
    """Keywords for Placement."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keywords for Engine; with `trains` command-line settings."""
    rows: int = 4
    """Rows per batch, over all ranks."""
    length: int = 10
    """Tokens per row."""
    ranks: int = 1
    """Process count: 1, 2 or 4."""
    adapter: Mapping[str, Any] | None = None
    """Keywords for PEFT's LoraConfig. None: no adapter."""
    resumes: bool = False
    """A new engine resumes from a checkpoint after the third step."""
    own_loop: bool = False
    """Use `engine.backward`, norm and update in a caller's loop."""
    trains: bool = False
    """Run `Trainer` on a few kilobytes of text."""
    precision: str = "fp32"
    """fp32 or bf16."""


def _cases() -> list[Case]:
    bf16: dict[str, Any] = {"precision": "bf16"}
    host: dict[str, Any] = {"place": CPU}
    rows = {"micro_batch_size": 1}
    below = {"graphs": "nvme", "nvme_dir": DISK}
    disk: dict[str, Any] = {"place": NVME}
    two: dict[str, Any] = {"ranks": 2, "place": CPU}
    wide: dict[str, Any] = {"model": "wide_llama", "place": CPU}
    shared = {"replica_states": "shared"}
    restarts = {"lora.restart_every": 2, "lora.restart_prune": 0.9, "lora.restart_warmup_steps": 1}
    lora = {"r": 4, "target_modules": ["q_proj", "down_proj"]}

    def case(name: str, *parts: Mapping[str, Any], **more: Any) -> Case:
        """Return a case from shared parts. Keywords outside the fields of `Case` become settings."""
        known = {key: value for part in (*parts, more) for key, value in part.items()}
        own = {key: known.pop(key) for key in list(known) if key in Case.__dataclass_fields__}
        return Case(name, **{"settings": known, **own})

    return [
        # four-rank cases first, as they fork; then two-rank cases, as both processes must be free
        case("replicas-shared", two, shared, ranks=4, replicas=2),
        case("replicas-shared-bf16", two, bf16, shared, ranks=4, replicas=2, micro_batch_size=1, rows=8),
        case("ranks-four", two, ranks=4, micro_batch_size=1, rows=8),
        *(case(f"ranks-zero{stage}", two, zero_stage=stage) for stage in (0, 1, 2, 3)),
        case("ranks-nvme-bf16", two, bf16, disk, micro_batch_size=1),
        case("ranks-speculative", two, bf16, SPECULATIVE, micro_batch_size=1),
        case("ranks-gpt2-device", two, model="gpt2", place=DEVICE),
        case("ranks-tied", two, NONE, bf16, model="gemma2"),
        case("ranks-experts-streamed", two, model="mixtral", place={**CPU, "experts": "streamed"}),
        case("ranks-row-blocks", two, model="tied_table", place=FEW, head_chunk_bytes=TABLE_BYTES // 16),
        case("ranks-muon", two, rule=Muon(lr=0.01)),
        case("ranks-adafactor", two, rule=Adafactor(lr=0.01)),
        case("ranks-lomo", two, NONE, rule=LOMO(lr=0.1)),
        case("ranks-mezo", two, rule=MEZO),
        case("ranks-link-weights", two, wide, link_weights="int8"),
        case("ranks-lora-nf4", two, wide, adapter=lora, frozen_weights="nf4"),
        case("ranks-resume", two, resumes=True),
        case("replicas-whole", two, replicas=2),
        case("replicas-whole-nvme-bf16", two, disk, bf16, replicas=2, zero_stage=1),
        case("replicas-link-int8", two, replicas=2, link_gradients="int8"),
        case("replicas-link-int4", two, bf16, replicas=2, link_gradients="int4", micro_batch_size=1),
        case("sequences-shared", two, length=12, sequence_parallel=2),
        case("sequences-shared-bf16", two, bf16, model="mixtral", length=12, sequence_parallel=2, micro_batch_size=2),
        # tiers, precision, clipping, activation recomputation
        case("compiled", host, compile="always"),
        case("lora-run", trains=True, settings={"lora.rank": 4, "lora.dropout": 0.1}),
        case("relora-run", trains=True, settings={"lora.rank": 4, **restarts}),
        case("lora-run-files", trains=True, settings={"lora.rank": 4, "offload.parameters": "files"}),
        case("dpo-run", trains=True, settings={"train.method": "dpo", "train.micro_batch_size": 2}),
        case("orpo-run", trains=True, settings={"train.method": "orpo"}),
        *(case(f"llama-{tier}-fp32", place=place) for tier, place in TIERS.items()),
        *(case(f"llama-{tier}-bf16", bf16, place=place) for tier, place in TIERS.items()),
        case("no-clip-cpu", host, NONE),
        case("no-clip-nvme-bf16", disk, bf16, NONE),
        case("speculative-cpu", host, SPECULATIVE),
        case("speculative-nvme-bf16", disk, bf16, SPECULATIVE),
        case("recompute-never", host, recompute="never"),
        case("recompute-auto-bf16", bf16, place={**CPU, "device_memory": "192KiB"}, recompute="auto"),
        case("stays", place=STAYS),
        case("stays-bf16", bf16, place={**STAYS, "device_memory": "192KiB"}, micro_batch_size=2, debug=4),
        case("activations-cpu", place={**CPU, "activations": "cpu"}, prefetch=2, model="gpt2"),
        case("prefetch-0", bf16, place={**CPU, "device_memory": "128KiB"}, prefetch=0),
        case("poisoned", host, debug=3, micro_batch_size=2),
        case("micro-batches-1", host, micro_batch_size=1),
        case("micro-batches-3-bf16", disk, bf16, micro_batch_size=3),
        case("update-on-device", host, update="device"),
        case("update-on-both", bf16, place={"optimizer": "auto", "optimizer_memory": "64KiB"}, update="both"),
        case("rows-mixed", host, model="centred", micro_batch_size=1),
        case("own-loop", host, bf16, own_loop=True),
        # families
        case("gpt2-cpu", host, model="gpt2"),
        case("gemma2-bf16", host, bf16, model="gemma2"),
        case("mixtral-nvme", disk, model="mixtral"),
        case("mamba-cpu", host, model="mamba"),
        case("bert-bf16", host, bf16, model="bert"),
        case("t5-nvme", disk, model="t5"),
        # features
        case("experts-streamed", model="mixtral", place={**CPU, "experts": "streamed"}),
        case("experts-streamed-bf16", bf16, rows, model="qwen3_moe", place={**NVME, "experts": "streamed"}),
        case("tiles", host, length=24, rows=2, sequence_tile=8),
        case("tiles-bf16", host, bf16, model="gemma2", length=24, rows=2, sequence_tile=8, micro_batch_size=1),
        case("row-blocks", model="tied_table", place=FEW, head_chunk_bytes=TABLE_BYTES // 16),
        case("row-blocks-bf16", bf16, SPECULATIVE, model="table", place=FEW, head_chunk_bytes=TABLE_BYTES // 16),
        case("head-chunks", host, model="table", head_chunk_bytes=TABLE_BYTES // 16),
        case("graphs-cpu", place={**CPU, "graphs": "cpu"}, recompute="never"),
        case("graphs-nvme-bf16", bf16, model="gpt2", place={**CPU, **below}, micro_batch_size=2),
        case("link-weights", wide, link_weights="int8"),
        case("link-weights-nvme-bf16", wide, disk, bf16, link_weights="int8", micro_batch_size=2),
        case("lora", host, adapter=lora),
        case("dora-dropout-bf16", host, bf16, adapter={**lora, "use_dora": True, "lora_dropout": 0.1}),
        case("lora-base-int8", wide, adapter=lora, frozen_weights="int8"),
        case("lora-base-nf4-nvme-bf16", wide, disk, bf16, adapter=lora, frozen_weights="nf4"),
        case("delay", host, delay=1),
        case("delay-nvme-bf16", bf16, place={**NVME, "parameters": "cpu", "gradients": "cpu"}, delay=1, delay_after=2),
        # update rules
        case("sgd", host, rule=SGD(lr=0.1, momentum=0.9)),
        case("lion-bf16", disk, bf16, rule=Lion(lr=1e-3)),
        case("muon", host, rule=Muon(lr=0.01)),
        case("adafactor-bf16", host, bf16, rule=Adafactor(lr=0.01)),
        case("lomo", host, NONE, rule=LOMO(lr=0.1)),
        case("adalomo-bf16", host, bf16, NONE, rule=AdaLomo(lr=0.01)),
        case("adamw-int8-states", wide, rule=replace(ADAMW, states="int8")),
        case("adamw-bf16-states", host, bf16, rule=replace(ADAMW, states="bf16")),
        case("mezo", host, rule=MEZO),
        case("mezo-nvme-bf16", disk, bf16, rule=MEZO, model="gpt2"),
        case("mezo-bf16-alone", host, bf16, rule=replace(MEZO, master="bf16"), micro_batch_size=2),
        # resume from a checkpoint
        case("resume", host, resumes=True),
        case("resume-nvme-bf16", disk, bf16, model="gpt2", resumes=True),
        case("resume-delay", host, resumes=True, delay=1),
        case("resume-muon", host, resumes=True, rule=Muon(lr=0.01)),
        case("resume-mezo", host, bf16, resumes=True, rule=MEZO),
    ]


CASES = {case.name: case for case in _cases()}
