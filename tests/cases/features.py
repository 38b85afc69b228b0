"""Table of features. A `Case` tells how a feature is built, what it promises, and which runs are hashed.

`tests/contracts` holds each case to every contract; `tests/bits` hashes each `Cell` in `Case.bits`.
The table also loads with an older `offload`, for comparisons of bits: it imports public names alone, names limits by
path, and imports references where they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from offload import LOMO, SGD, Adafactor, AdaLomo, AdamW, Lion, MeZO, Muon
from offload.optim.rule import UpdateRule
from tests.cases.models import (
    EAGER,
    TABLE_BYTES,
    VOCABULARY,
    CentredModel,
    adapted,
    bert,
    build,
    embedder,
    first_row,
    freeze,
    gemma2,
    gpt2,
    granite_swa,
    llama,
    lora,
    mamba,
    mixtral,
    qwen3,
    qwen3_moe,
    t5,
    table,
    table_tokens,
    tied_table,
    tokens,
    wide_llama,
    with_sinks,
)
from tests.engine.handmade import CalledTwoWays, Stack, cross_entropy, words

Batch = Mapping[str, Tensor]
PLACES: dict[str, dict[str, str]] = {
    "device": {"parameters": "device", "optimizer": "device"},
    "cpu": {"parameters": "cpu", "optimizer": "cpu"},
    "moments on nvme": {"parameters": "cpu", "optimizer": "nvme"},
    "nvme": {"parameters": "nvme", "optimizer": "nvme", "gradients": "nvme", "activations": "nvme"},
}
DEVICE = PLACES["device"]
CPU = PLACES["cpu"]
NVME = PLACES["nvme"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAMW = AdamW(lr=1e-2, weight_decay=0.1)
"""The update rule of a case without one."""


@dataclass(frozen=True)
class Cell:
    """Where and how a case runs. Values here override those of the case.

    place: keywords for `Placement`, without `nvme_dir`.
    settings: keywords for `Engine`.
    make, batch: another model, other batches.
    ranks: number of processes: 1, 2 or 4.
    rows: rows of a batch in all ranks together, in equal shares, or the rows of each rank.
    length: tokens per row. None: the default of the batch.
    resumes: a new engine continues from a checkpoint.
    own_loop: a caller's loop with `engine.backward`, the norm, and an update.
    """

    place: Mapping[str, Any] = field(default_factory=lambda: CPU)
    settings: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[], nn.Module] | None = None
    batch: Callable[..., Batch] | None = None
    ranks: int = 1
    rows: int | Sequence[int] = 4
    length: int | None = None
    resumes: bool = False
    own_loop: bool = False


def at(place: Mapping[str, Any], *parts: Mapping[str, Any], **more: Any) -> Cell:
    """Return a cell. Keywords outside the fields of `Cell` are settings."""
    known = {key: value for part in (*parts, more) for key, value in part.items()}
    own = {each.name: known.pop(each.name) for each in fields(Cell) if each.name in known}
    return Cell(place, known, **own)


@dataclass(frozen=True)
class Case:
    """An engine feature.

    make: returns the model.
    settings: keywords for `Engine`.
    placement: keywords for `Placement`.
    batch: returns a batch for (seed, rows), or (seed, rows, tokens per row).
    ranks_batch: the same, for ranks against one process. None: `batch`.
    loss_fn: for `Engine.step`. None: the model's own loss.
    loss_of: returns the loss function for a model, in place of `loss_fn`.
    shifts: the first label in a row is no target.
    group: rows that the loss needs together.
    reference: keywords for `train_both`, for plain PyTorch with the same approximation. None: a feature test has a
        separate reference.
    within: distance from plain PyTorch in fp32, as a share of the layer's scale. None: equal bits.
    ranks_within: distance of two ranks from one process, likewise. Losses and norms: five times as much.
    saves: keywords for `save_checkpoint`.
    without: contracts that do not apply, each with the reason.
    stage: returns a stage of one's own, which engines of the case run (see tests/cases/run.py).
    is_fuzzed: the fuzzer draws the update rule or the stage, under the case's name.
    limits: values small enough for a small model (see `limits_of`).
    bits: hashed runs, by name.
    on_devices: an accelerator's feature; on the CPU it changes nothing, and has no contracts.
    """

    make: Callable[[], nn.Module] = llama
    settings: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)
    batch: Callable[..., Batch] = tokens
    ranks_batch: Callable[..., Batch] | None = None
    loss_fn: Callable[[Any, Batch], Tensor] | None = None
    loss_of: Callable[[nn.Module], Callable[[Any, Batch], Tensor]] | None = None
    shifts: bool = True
    group: int = 1
    reference: Callable[[str], Mapping[str, Any]] | None = lambda precision: {}
    within: float | None = None
    ranks_within: float = 2e-5
    saves: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    stage: Callable[[], type[Any]] | None = None
    is_fuzzed: bool = False
    limits: Mapping[str, Any] = field(default_factory=dict)
    bits: Mapping[str, Cell] = field(default_factory=dict)
    on_devices: bool = False

    @property
    def precision(self) -> str:
        return self.settings.get("precision", "fp32")

    def loss(self, model: nn.Module) -> Callable[[Any, Batch], Tensor] | None:
        """Return the loss function for a model. None: the model's own."""
        if self.loss_of is None:
            return self.loss_fn
        return self.loss_of(model)

    @property
    def count(self) -> Callable[[Batch], int]:
        """Return the function that counts targets in a batch."""
        from tests.engine.reference import count_labels, count_shifted

        return count_shifted if self.shifts else count_labels


LIMITS: dict[str, Any] = {"offload.planning.disk._LARGEST_TILE": 2048}
"""Limits for all cases (see `limits_of`)."""


def limits_of(limits: Mapping[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield (module or class, name, value) for limits by path.

    A key has one path, or two: the second is that of an older commit, for a comparison of bits with it. Raises
    RuntimeError for a name without a place.
    """
    for paths, value in limits.items():
        for path in paths.split():
            owners, _, name = path.rpartition(".")
            try:
                owner = resolve_name(owners)
            except (ImportError, AttributeError):
                continue
            if hasattr(owner, name):
                yield owner, name, value
                break
        else:
            raise RuntimeError(f"{paths} is not there any more: name the new path in {__file__}, before the old one.")


# -- references, for a precision ---------------------------------------------------------------------------------------


def sums_by_layer(precision: str) -> Mapping[str, Any]:
    """Each layer sums gradients of the encoder output. T5 keeps one projection in fp32."""
    from tests.engine.reference import sum_by_layer

    return {"group": sum_by_layer, "kept": lambda name: name.endswith("DenseReluDense.wo.weight")}


def _quantised(precision: str) -> Mapping[str, Any]:
    from tests.engine.reference import fake_quantised

    return {"shown": partial(fake_quantised, precision=precision)}


def _decoded(precision: str, codec: str = "nf4") -> Mapping[str, Any]:
    from tests.engine.test_frozen_weights import dequantised

    return {"plain": dequantised(build(adapted), codec, DTYPES[precision])}


def _in_fp16(_precision: str) -> Mapping[str, Any]:
    """Frozen weights have no masters: each is rounded to fp16 once."""
    model = _decoded("fp16")["plain"]
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.half().float()
    return {"plain": model}


def _decoded_experts(precision: str) -> Mapping[str, Any]:
    from tests.engine.test_adapted_experts import beside, dequantised

    return beside(dequantised(build(_ADAPTED_EXPERTS), "nf4", DTYPES[precision]))


def _in_fp8(precision: str) -> Mapping[str, Any]:
    from tests.engine.fp8 import multiply_in_fp8

    return {"group": partial(multiply_in_fp8, "fp8_rowwise")}


def _blocks_twice(precision: str) -> Mapping[str, Any]:
    from tests.cases.stages import run_twice

    return {"group": run_twice}


# -- models, batches and stages ----------------------------------------------------------------------------------------


def _by_document() -> nn.Module:
    from tests.engine.documents import by_document

    return by_document(llama())


def _packed(seed: int, rows: int) -> Batch:
    from tests.engine.documents import packed

    return packed(seed, rows)


def _partly_frozen() -> nn.Module:
    """Return a model with frozen first units and a partly frozen unit."""
    return freeze(llama(), "embed_tokens", "layers.0.", "q_proj")


def _taught() -> nn.Module:
    """Return a model with a teacher beside it: of another family, deeper, and with dropout."""
    from offload.engine.companions import add_companion

    model = llama()
    teacher = qwen3(hidden_size=64, intermediate_size=80, num_hidden_layers=3, attention_dropout=0.5)
    add_companion(model, "teacher", teacher)
    return model


def _from_teacher(model: nn.Module) -> Callable[[Any, Batch], Tensor]:
    from offload.extras.distill.losses import Distillation

    return Distillation(model.get_submodule("companions.teacher"), beta=0.3, labels=0.2)


def _with_classes(seed: int = 0, rows: int = 4, length: int = 10) -> Batch:
    """Return tokens, with stored probabilities of a teacher that has random logits."""
    from offload.extras.distill.classes import VALUES, top_classes

    batch = tokens(seed, rows, length)
    logits = torch.randn(rows * length, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    values = zip(VALUES.items(), top_classes(2 * logits, 1.0, _TOP_K), strict=True)
    return batch | {key: each.view(rows, length, -1).to(batch["labels"].device, dtype) for (key, dtype), each in values}


def _from_stored(_model: nn.Module) -> Any:
    from offload.extras.distill.classes import record_type
    from offload.extras.distill.losses import StoredDistillation

    return StoredDistillation(record_type(_TOP_K, VOCABULARY), beta=0.3, labels=0.2)


def _taught_experts() -> nn.Module:
    """Return a mixture of experts with another family's mixture as a teacher beside it."""
    from offload.engine.companions import add_companion

    model = EAGER["mixtral"]()
    add_companion(model, "teacher", EAGER["qwen3_moe"]())
    return model


def _info_nce(_model: nn.Module) -> Any:
    from offload.extras.contrastive.losses import InfoNCE

    return InfoNCE(sizes=(32, 16), margin=0.1)


def _expert_embedder() -> nn.Module:
    """Return a decoder of experts without a head."""
    return EAGER["qwen3_moe"]().get_submodule("model")


def _last_with_negatives(_model: nn.Module) -> Any:
    from offload.extras.contrastive.losses import InfoNCE

    return InfoNCE(negatives=1, pooling="last")


def _odd_experts() -> nn.Module:
    """Quantization blocks lie over the borders of experts."""
    from tests.engine.test_streamed_experts import mixture

    return mixture("gpt_oss", **dict.fromkeys(("hidden_size", "moe_intermediate_size", "intermediate_size"), 136))()


_ADAPTED_EXPERTS = lora(
    _odd_experts, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
)


def _twice() -> type[Any]:
    from tests.cases.stages import Twice

    return Twice


# -- the table ---------------------------------------------------------------------------------------------------------

_TOP_K = 5
HANDMADE: dict[str, Any] = {"batch": words, "loss_fn": cross_entropy, "shifts": False}
"""Batches and the loss of models in tests/engine/handmade.py."""
BF16 = {"precision": "bf16"}

_OWN = "tests/engine/{}: the reference of the feature"
_MASKS = "parts of a batch draw dropout masks of their own"
_DROPOUT = {"ranks_are_one": _MASKS, "micro_batches_add_up": _MASKS}
# A sign, a code or a whole matrix makes another step of the last bits of a sum. Ranks add nothing to one row's targets.
_COARSE: dict[str, Any] = {"ranks_batch": first_row}

_CUT_EXPERTS = {"offload.extras.large.cut_experts.RECORD_BYTES offload.engine.units.cut_experts.RECORD_BYTES": 1}
_GROUPED_EXPERTS = {
    "offload.extras.large.cut_experts._LEAST_RECORDS offload.engine.units.cut_experts._LEAST_RECORDS": 2
}
"""Two records a layer: the experts of each run together."""
_NARROW_FP8 = {"offload.extras.quant.products.LEAST_SIZE": 32}
_CONTRASTIVE = {"equals_reference": "tests/training/test_contrastive.py: the reference of the feature"}
_UNCLIPPED = {"max_grad_norm": None}
_SPECULATIVE = {"clip": "speculative", "max_grad_norm": 0.1}
_TWO = {"ranks": 2}
_ROWS = {"micro_batch_size": 1}
_STAYS = {"parameters": "device", "optimizer": "cpu"}

_ALL_FORWARDS = MeZO(lr=1e-3, eps=1e-2, weight_decay=0.1)
_SOME_FORWARDS = replace(_ALL_FORWARDS, num_perturbations=2, layer_fraction=0.5, magnitude_quantile=0.5)
_FORWARDS: dict[str, Any] = {
    "reference": None,
    "ranks_within": 1e-2,
    "without": {"equals_reference": _OWN.format("test_zeroth_order.py")},
}


def _updated(rule: UpdateRule, cells: Mapping[str, Cell], **more: Any) -> dict[str, Cell]:
    """Return cells with another update rule, and more settings."""
    return {name: replace(cell, settings={**cell.settings, "optimizer": rule, **more}) for name, cell in cells.items()}


_WAYS = {
    "replicas-shared": at(CPU, ranks=4, replicas=2, replica_states="shared"),
    "replicas-shared-bf16": at(CPU, BF16, _ROWS, ranks=4, rows=8, replicas=2, replica_states="shared"),
    "replicas-whole": at(CPU, _TWO, replicas=2),
    "replicas-whole-nvme-bf16": at(NVME, _TWO, BF16, replicas=2, zero_stage=1),
    "replicas-link-int8": at(CPU, _TWO, replicas=2, link_gradients="int8"),
    "replicas-link-int4": at(CPU, _TWO, BF16, _ROWS, replicas=2, link_gradients="int4"),
    "ranks-four": at(CPU, _ROWS, ranks=4, rows=8),
    **{f"ranks-zero{stage}": at(CPU, _TWO, zero_stage=stage) for stage in range(4)},
    "ranks-nvme-bf16": at(NVME, _TWO, BF16, _ROWS),
    "ranks-speculative": at(CPU, _TWO, BF16, _SPECULATIVE, _ROWS),
    "ranks-resume": at(CPU, _TWO, resumes=True),
    "sequences-shared": at(CPU, _TWO, length=12, sequence_parallel=2),
    "sequences-shared-bf16": at(
        CPU, _TWO, BF16, make=EAGER["mixtral"], length=12, sequence_parallel=2, micro_batch_size=2
    ),
    **{f"llama-{tier}-fp32": at(PLACES[tier]) for tier in ("device", "cpu", "nvme")},
    **{f"llama-{tier}-bf16": at(PLACES[tier], BF16) for tier in ("device", "cpu", "nvme")},
    "no-clip-cpu": at(CPU, _UNCLIPPED),
    "no-clip-nvme-bf16": at(NVME, BF16, _UNCLIPPED),
    "speculative-cpu": at(CPU, _SPECULATIVE),
    "speculative-nvme-bf16": at(NVME, BF16, _SPECULATIVE),
    "recompute-never": at(CPU, recompute="never"),
    "recompute-auto-bf16": at({**CPU, "device_memory": "192KiB"}, BF16, recompute="auto"),
    "compiled": at(CPU, compile="always"),
    "stays": at(_STAYS),
    "stays-bf16": at({**_STAYS, "device_memory": "192KiB"}, BF16, micro_batch_size=2, debug=4),
    "prefetch-0": at({**CPU, "device_memory": "128KiB"}, BF16, prefetch=0),
    "poisoned": at(CPU, debug=3, micro_batch_size=2),
    "micro-batches-1": at(CPU, _ROWS),
    "micro-batches-3-bf16": at(NVME, BF16, micro_batch_size=3),
    "rows-mixed": at(CPU, _ROWS, make=CentredModel),
    "own-loop": at(CPU, BF16, own_loop=True),
    "resume": at(CPU, resumes=True),
}
"""Ways to train without a feature in the model: ranks, tiers, clipping, recomputation, parts of batches, a resume."""

CASES: dict[str, Case] = {
    "llama": Case(bits=_WAYS),
    "tied and dropout": Case(
        gpt2,
        without=_DROPOUT,
        bits={
            "ranks-gpt2-device": at(DEVICE, _TWO),
            "gpt2-cpu": at(CPU),
            "activations-cpu": at({**CPU, "activations": "cpu"}, prefetch=2),
            "resume-nvme-bf16": at(NVME, BF16, resumes=True),
        },
    ),
    "gemma2, kept graphs": Case(
        gemma2,
        {"recompute": "never"},
        bits={
            "ranks-tied": at(CPU, _TWO, _UNCLIPPED, BF16, recompute="always"),
            "gemma2-bf16": at(CPU, BF16, recompute="always"),
        },
    ),
    "mixtral": Case(mixtral, bits={"mixtral-nvme": at(NVME, make=EAGER["mixtral"])}),
    "mamba": Case(mamba, bits={"mamba-cpu": at(CPU)}),
    "bert": Case(
        partial(bert, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        shifts=False,
        bits={"bert-bf16": at(CPU, BF16, make=bert)},
    ),
    "t5": Case(
        partial(t5, dropout_rate=0.0), shifts=False, reference=sums_by_layer, bits={"t5-nvme": at(NVME, make=t5)}
    ),
    "kept products": Case(qwen3_moe, {"recompute": "products"}),
    "some kept products": Case(
        settings={"recompute": "products"},
        placement={"device_memory": "760KiB", "graphs": "cpu", "graphs_memory": "256KiB"},
        batch=partial(tokens, length=160),
    ),
    "own blocks and loss": Case(Stack, **HANDMADE),
    "streamed experts": Case(
        EAGER["qwen3_moe"],
        placement={"experts": "streamed"},
        limits=_GROUPED_EXPERTS,
        reference=lambda precision: {"norm_within": 1e-12},  # squares of gradients are summed record by record
        bits={
            "ranks-experts-streamed": at(CPU, _TWO, make=EAGER["mixtral"]),
            "experts-streamed": at(CPU, make=EAGER["mixtral"]),
            "experts-streamed-bf16": at(NVME, BF16, _ROWS),
        },
    ),
    "stacked experts": Case(qwen3_moe),
    "documents": Case(_by_document, batch=_packed),
    "attention with sinks": Case(lambda: with_sinks(granite_swa())),
    "passes": Case(settings={"passes": 3}, without={"equals_reference": _OWN.format("test_passes.py")}),
    "tiles": Case(
        settings={"sequence_tile": 5},
        within=2e-6,
        bits={
            "tiles": at(CPU, length=24, rows=2, sequence_tile=8),
            "tiles-bf16": at(CPU, BF16, _ROWS, make=gemma2, length=24, rows=2, sequence_tile=8),
        },
    ),
    "row blocks": Case(
        tied_table,
        {"head_chunk_bytes": TABLE_BYTES // 16, "clip": "deferred", "max_grad_norm": 0.1},
        {**CPU, "gradients": "cpu", "device_memory": TABLE_BYTES * 9 // 32},
        batch=table_tokens,
        within=1e-5,
        bits={
            "ranks-row-blocks": at({**CPU, "device_memory": TABLE_BYTES // 4}, _TWO, max_grad_norm=1.0),
            "row-blocks": at(CPU, max_grad_norm=1.0),
            "row-blocks-bf16": at(CPU, BF16, _SPECULATIVE, make=table),
            "head-chunks": at({**CPU, "device_memory": None}, make=table, max_grad_norm=1.0),
        },
    ),
    "graphs on the host": Case(
        settings={"recompute": "never"},
        placement={"graphs": "cpu"},
        limits={"offload.engine.units.offloaded_graph.SMALLEST_BYTES": 1},
        bits={
            "graphs-cpu": at(CPU),
            "graphs-nvme-bf16": at({**CPU, "graphs": "nvme"}, BF16, make=gpt2, recompute="always", micro_batch_size=2),
        },
    ),
    "int8 links": Case(
        wide_llama,
        {"link_weights": "int8"},
        batch=first_row,
        reference=_quantised,
        bits={
            "ranks-link-weights": at(CPU, _TWO, batch=tokens),
            "link-weights": at(CPU, batch=tokens),
            "link-weights-nvme-bf16": at(NVME, BF16, batch=tokens, micro_batch_size=2),
        },
    ),
    "fp8 products": Case(
        settings={"matmul": "fp8_rowwise", "precision": "bf16"},
        reference=_in_fp8,
        ranks_within=1e-3,  # weights in bf16 and products in FP8 are rounded after sums in another order
        limits=_NARROW_FP8,
    ),
    "fp16": Case(
        settings={"precision": "fp16"},
        bits={
            "fp16": at(CPU, _ROWS),
            "ranks-fp16": at(NVME, _TWO),
            "resume-fp16": at(CPU, resumes=True),
        },
    ),
    "sgd": Case(
        settings={"optimizer": SGD(lr=0.1, momentum=0.9, weight_decay=0.1)},
        is_fuzzed=True,
        bits=_updated(SGD(lr=0.1, momentum=0.9), {"sgd": at(CPU)}),
    ),
    "lion": Case(
        settings={"optimizer": Lion(lr=1e-3, weight_decay=0.1, states="bf16")},
        **_COARSE,
        is_fuzzed=True,
        bits=_updated(Lion(lr=1e-3), {"lion-bf16": at(NVME, BF16)}),
    ),
    "8-bit moments": Case(
        wide_llama,
        {"optimizer": replace(ADAMW, states="int8")},
        **_COARSE,
        is_fuzzed=True,
        bits={
            "adamw-int8-states": at(CPU),
            "adamw-bf16-states": at(CPU, BF16, make=llama, optimizer=replace(ADAMW, states="bf16")),
        },
    ),
    "adafactor": Case(
        settings={"optimizer": Adafactor(lr=0.02, weight_decay=0.1)},
        **_COARSE,
        is_fuzzed=True,
        bits=_updated(Adafactor(lr=0.01), {"ranks-adafactor": at(CPU, _TWO), "adafactor-bf16": at(CPU, BF16)}),
    ),
    "muon": Case(
        settings={"optimizer": Muon(lr=0.02, rest=LOMO(lr=0.05), groups=(("up", {"rule": AdamW(lr=0.05, eps=1.0)}),))},
        **_COARSE,
        is_fuzzed=True,
        bits=_updated(
            Muon(lr=0.01), {"ranks-muon": at(CPU, _TWO), "muon": at(CPU), "resume-muon": at(CPU, resumes=True)}
        ),
    ),
    "lomo": Case(
        settings={"optimizer": LOMO(lr=0.1, clip_norm=0.2), "max_grad_norm": None},
        bits={
            **_updated(LOMO(lr=0.1), {"ranks-lomo": at(CPU, _TWO), "lomo": at(CPU)}),
        },
    ),
    "adalomo": Case(
        settings={"optimizer": AdaLomo(lr=0.03), "max_grad_norm": None},
        **_COARSE,
        bits=_updated(AdaLomo(lr=0.01), {"adalomo-bf16": at(CPU, BF16)}),
    ),
    "late updates": Case(
        settings={"delay": 1},
        placement=CPU,
        reference=None,
        without={"equals_reference": _OWN.format("test_delay.py")},
        bits={
            "delay": at(CPU),
            "delay-nvme-bf16": at({**NVME, "parameters": "cpu", "gradients": "cpu"}, BF16, delay_after=2),
            "resume-delay": at(CPU, resumes=True),
        },
    ),
    "mezo": Case(
        settings={"optimizer": _SOME_FORWARDS, "max_grad_norm": None},
        **_FORWARDS,
        bits=_updated(
            _ALL_FORWARDS,
            {
                "ranks-mezo": at(CPU, _TWO),
                "mezo": at(CPU),
                "mezo-nvme-bf16": at(NVME, BF16, make=gpt2),
                "resume-mezo": at(CPU, BF16, resumes=True),
            },
            max_grad_norm=1.0,
        ),
    ),
    "mezo, masters in bf16": Case(
        settings={"optimizer": replace(_SOME_FORWARDS, master="bf16"), "precision": "bf16", "max_grad_norm": None},
        **_FORWARDS,
        bits=_updated(
            replace(_ALL_FORWARDS, master="bf16"), {"mezo-bf16-alone": at(CPU, micro_batch_size=2)}, max_grad_norm=1.0
        ),
    ),
    "frozen parts": Case(_partly_frozen, {"recompute": "never"}),
    "nf4 below what trains": Case(
        adapted,
        {"frozen_weights": "nf4"},
        reference=_decoded,
        saves={"trained_only": True},
        limits={"offload.layout.codecs.PIECE_NUMEL": 16384},
        bits={
            "ranks-lora-nf4": at(CPU, _TWO, make=lora(wide_llama)),
            "lora-base-int8": at(CPU, make=lora(wide_llama), frozen_weights="int8"),
            "lora-base-nf4-nvme-bf16": at(NVME, BF16, make=lora(wide_llama)),
        },
    ),
    "fp8 below what trains": Case(
        adapted,
        {"frozen_weights": "fp8"},
        reference=partial(_decoded, codec="fp8"),
        saves={"trained_only": True},
        limits=_NARROW_FP8,
        bits={
            "lora-base-fp8-nvme": at(NVME, BF16, make=lora(wide_llama), matmul="fp8_tensorwise"),
            "ranks-lora-fp8": at(CPU, _TWO, BF16, make=lora(wide_llama), matmul="fp8_rowwise"),
        },
    ),
    "fp16 over nf4": Case(
        adapted,
        {"frozen_weights": "nf4", "precision": "fp16"},
        reference=_in_fp16,
        saves={"trained_only": True},
        limits={"offload.layout.codecs.PIECE_NUMEL": 16384},
        bits={"lora-base-nf4-fp16": at(NVME, make=lora(wide_llama))},
    ),
    "updates on the device": Case(
        settings={"update": "device"},
        limits={"offload.planning.device_updates._LARGEST_TILE": 2048},
        bits={
            "update-on-device": at(CPU),
            "update-on-both": at({"optimizer": "auto", "optimizer_memory": "64KiB"}, BF16, update="both"),
        },
    ),
    "two forms of arguments": Case(CalledTwoWays, **HANDMADE),
    "lora": Case(
        lora(llama),
        bits={
            "lora": at(CPU),
            "dora-dropout-bf16": at(CPU, BF16, make=lora(llama, use_dora=True, lora_dropout=0.1)),
        },
    ),
    "embeddings": Case(
        embedder,
        loss_of=_info_nce,
        group=2,
        reference=None,
        without=_CONTRASTIVE | _DROPOUT,
        bits={
            "embeddings": at(CPU),
            "ranks-embeddings-bf16": at(NVME, _TWO, BF16, rows=8, micro_batch_size=2),
        },
    ),
    "embeddings of experts": Case(
        _expert_embedder,
        placement={"experts": "streamed"},
        loss_of=_last_with_negatives,
        group=3,
        reference=None,
        without=_CONTRASTIVE,
        limits=_CUT_EXPERTS,
        bits={"resume-embeddings-experts": at(NVME, BF16, rows=6, micro_batch_size=3, resumes=True)},
    ),
    "each block twice": Case(Stack, **HANDMADE, stage=_twice, reference=_blocks_twice, is_fuzzed=True),
    "distillation": Case(
        _taught,
        {"frozen_weights": "nf4", "head_chunk_bytes": 8 * 64 * 4},
        loss_of=_from_teacher,
        reference=None,
        without={"equals_reference": "tests/training/test_distill.py: TRL's loss"},
        limits={"offload.layout.codecs.PIECE_NUMEL": 16384},
        bits={
            "ranks-distill": at(CPU, _TWO),
            "distill-nvme-bf16": at(NVME, BF16, _ROWS),
            "resume-distill-whole": at(CPU, resumes=True, head_chunk_bytes=None),
        },
    ),
    "head in chunks": Case(settings={"head_chunk_bytes": 12 * VOCABULARY * 4}, within=2e-6),
    "stored distillation": Case(
        llama,
        {"head_chunk_bytes": 8 * 64 * 4},
        batch=_with_classes,
        loss_of=_from_stored,
        reference=None,
        without={"equals_reference": "tests/training/test_distill.py: TRL's loss"},
    ),
    "distillation of experts": Case(
        _taught_experts,
        {"head_chunk_bytes": 8 * 64 * 4},
        {"experts": "streamed"},
        loss_of=_from_teacher,
        reference=None,
        without={"equals_reference": "tests/training/test_distill.py: TRL's loss"},
        limits=_CUT_EXPERTS,
        bits={"distill-experts-nvme-bf16": at(NVME, BF16, _ROWS)},
    ),
    "adapters of streamed experts": Case(
        _ADAPTED_EXPERTS,
        {"frozen_weights": "nf4"},
        {"experts": "streamed"},
        limits=_GROUPED_EXPERTS,
        reference=_decoded_experts,
        saves={"trained_only": True},
    ),
    "weights in host pages": Case(
        partial(llama, num_hidden_layers=3),
        limits={"offload.accelerators.Accelerator.is_integrated": True},
        on_devices=True,
    ),
}
FUZZED: dict[str, Case] = {name: case for name, case in CASES.items() if case.is_fuzzed}
"""Cases whose update rule or stage the fuzzer draws."""
HASHED: dict[str, tuple[str, Cell]] = dict(
    sorted(
        ((run, (name, cell)) for name, case in CASES.items() for run, cell in case.bits.items()),
        key=lambda item: -item[1][1].ranks,
    )
)
"""Hashed runs: (name in `CASES`, cell). Runs over four ranks come first, as they fork; then two, while both processes
are free.
"""

_RESTARTS = {"lora.restart_every": 2, "lora.restart_prune": 0.9, "lora.restart_warmup_steps": 1}
TRAINER_RUNS: dict[str, dict[str, Any]] = {
    "lora-run": {"lora.rank": 4, "lora.dropout": 0.1},
    "relora-run": {"lora.rank": 4, **_RESTARTS},
    "lora-run-files": {"lora.rank": 4, "offload.parameters": "files"},
    "dpo-run": {"train.method": "dpo", "train.micro_batch_size": 2},
    "orpo-run": {"train.method": "orpo"},
}
"""Hashed runs of `Trainer` on a few kilobytes of text: command-line settings."""
