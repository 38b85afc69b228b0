"""Table of features: a model, batches, and engine settings. A new feature gets a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import LOMO, SGD, Adafactor, AdamW, Lion, MeZO, Muon
from offload.extras.large import cut_experts
from offload.extras.quant import products
from offload.layout import codecs
from offload.optim import rule as optimizer_rule
from offload.planning import device_updates
from tests.engine import fp8
from tests.engine.documents import by_document, packed
from tests.engine.families import bert, build, gemma2, gpt2, llama, mamba, mixtral, qwen3_moe, t5, tokens
from tests.engine.fp8 import multiply_in_fp8
from tests.engine.handmade import Stack, cross_entropy, words
from tests.engine.ranks_child import first_row
from tests.engine.reference import Batch, LossFunction, count_labels, count_shifted, fake_quantised, sum_by_layer
from tests.engine.test_frozen_weights import adapted, dequantised
from tests.engine.test_parameters import freeze
from tests.engine.test_row_blocks import CHUNK_BYTES, LAYER_BYTES, tied
from tests.engine.test_streamed_experts import mixture


@dataclass(frozen=True)
class Case:
    """An engine feature.

    make: returns the model.
    settings: keywords for `Engine`. They override the cell's precision and clipping.
    placement: keywords for `Placement`. They override the cell's placement.
    batch: returns a batch for (seed, rows).
    loss_fn: for `Engine.step`. None: the model's own loss.
    count: targets in a batch, for the mean of the loss.
    reference: keywords for `train_both`, for plain PyTorch with the same approximation. None: a feature test has a
        separate reference.
    within: distance from plain PyTorch, as a share of the layer's scale. None: equal bits.
    ranks_within: distance of two ranks from one process, likewise. Losses and norms: five times as much.
    saves: keywords for `save_checkpoint`.
    without: contracts that do not apply, each with the reason.
    patches: (object, attribute, value) for the test: limits small enough for a small model.
    """

    make: Callable[[], nn.Module] = llama
    settings: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)
    batch: Callable[[int, int], Mapping[str, Tensor]] = tokens
    loss_fn: LossFunction | None = None
    count: Callable[[Batch], int] = count_shifted
    reference: Callable[[str], Mapping[str, Any]] | None = lambda precision: {}
    within: float | None = None
    ranks_within: float = 2e-5
    saves: Mapping[str, Any] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)
    patches: tuple[tuple[Any, str, Any], ...] = ()

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make limits small enough for a small model."""
        for change in self.patches:
            monkeypatch.setattr(*change)


def _t5_groups(precision: str) -> Mapping[str, Any]:
    """Each layer sums gradients of the encoder output. T5 keeps one projection in fp32."""
    return {"group": sum_by_layer, "kept": lambda name: name.endswith("DenseReluDense.wo.weight")}


def _partly_frozen() -> nn.Module:
    """Return a model with frozen first units and a partly frozen unit."""
    return freeze(llama(), "embed_tokens", "layers.0.", "q_proj")


def _quantised(precision: str) -> Mapping[str, Any]:
    return {"shown": partial(fake_quantised, precision=precision)}


def _decoded(precision: str) -> Mapping[str, Any]:
    return {"plain": dequantised(build(adapted), "nf4", torch.bfloat16 if precision == "bf16" else torch.float32)}


_ORDER = "a sign, a code or a whole matrix makes another step of the last bits of a sum, which ranks add otherwise"
_OWN = "tests/engine/{}: the reference of the feature"
_COARSE = {"ranks_are_one": _ORDER}
_MASKS = "parts of a batch draw dropout masks of their own"
_DROPOUT = {"ranks_are_one": _MASKS, "micro_batches_add_up": _MASKS}
_MEZO = MeZO(lr=1e-3, eps=1e-2, num_perturbations=2, layer_fraction=0.5, magnitude_quantile=0.5, weight_decay=0.1)
_FORWARDS: dict[str, Any] = {
    "reference": None,
    "ranks_within": 1e-2,
    "without": {"equals_reference": _OWN.format("test_zeroth_order.py")},
}
_LINKS = {"hidden_size": 64, "intermediate_size": 90, "num_key_value_heads": 4}

CASES: dict[str, Case] = {
    "llama": Case(),
    "tied and dropout": Case(gpt2, without=_DROPOUT),
    "gemma2, kept graphs": Case(gemma2, {"recompute": "never"}),
    "mixtral": Case(mixtral),
    "mamba": Case(mamba),
    "bert": Case(partial(bert, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), count=count_labels),
    "t5": Case(partial(t5, dropout_rate=0.0), count=count_labels, reference=_t5_groups),
    "kept products": Case(qwen3_moe, {"recompute": "products"}),
    "own blocks and loss": Case(Stack, batch=words, loss_fn=cross_entropy, count=count_labels),
    "streamed experts": Case(
        mixture("qwen3_moe"),
        placement={"experts": "streamed"},
        patches=((cut_experts, "RECORD_BYTES", 1),),
        reference=None,
        without={"equals_reference": _OWN.format("test_streamed_experts.py")},
    ),
    "stacked experts": Case(qwen3_moe),
    "documents": Case(lambda: by_document(llama()), batch=packed),
    "passes": Case(settings={"passes": 3}, without={"equals_reference": _OWN.format("test_passes.py")}),
    "tiles": Case(llama, {"sequence_tile": 5}, within=1e-6, without={"equals_reference": _OWN.format("test_tiles.py")}),
    "row blocks": Case(
        tied,
        {"head_chunk_bytes": CHUNK_BYTES, "clip": "deferred", "max_grad_norm": 0.1},
        {"device_memory": LAYER_BYTES // 4, "parameters": "cpu", "optimizer": "cpu", "gradients": "cpu"},
        within=1e-5,
        without={
            "equals_reference": _OWN.format("test_row_blocks.py"),
            "ranks_are_one": _OWN.format("test_row_blocks.py"),
        },
    ),
    "graphs on the host": Case(llama, {"recompute": "never"}, {"graphs": "cpu"}),
    "int8 links": Case(
        partial(llama, **_LINKS),
        {"link_weights": "int8"},
        batch=first_row,
        reference=_quantised,
        without={"ranks_are_one": "one row has all targets"},
    ),
    "fp8 products": Case(
        settings={"matmul": "fp8_rowwise", "precision": "bf16"},
        reference=lambda precision: {"group": partial(multiply_in_fp8, "fp8_rowwise")},
        ranks_within=1e-3,  # weights in bf16 and products in FP8 are rounded after sums in another order
        patches=((products, "LEAST_SIZE", fp8.LEAST_SIZE),),
    ),
    "sgd": Case(settings={"optimizer": SGD(lr=0.1, momentum=0.9, weight_decay=0.1)}),
    "lion": Case(settings={"optimizer": Lion(lr=3e-3)}, without=_COARSE),
    "8-bit moments": Case(
        settings={"optimizer": AdamW(lr=3e-3, states="int8")},
        patches=((optimizer_rule, "LEAST_NUMEL", 1000),),
        without=_COARSE,
    ),
    "adafactor": Case(settings={"optimizer": Adafactor(lr=0.03)}, without=_COARSE),
    "muon": Case(settings={"optimizer": Muon(lr=0.02, rest=AdamW(lr=1e-3))}, without=_COARSE),
    "lomo": Case(settings={"optimizer": LOMO(lr=0.3, clip_norm=0.2), "max_grad_norm": None}),
    "late updates": Case(
        settings={"delay": 1},
        placement={"parameters": "cpu", "optimizer": "cpu"},
        reference=None,
        without={"equals_reference": _OWN.format("test_delay.py")},
    ),
    "mezo": Case(settings={"optimizer": _MEZO, "max_grad_norm": None}, **_FORWARDS),
    "mezo, masters in bf16": Case(
        settings={"optimizer": replace(_MEZO, master="bf16"), "precision": "bf16", "max_grad_norm": None}, **_FORWARDS
    ),
    "frozen parts": Case(_partly_frozen),
    "nf4 below what trains": Case(
        adapted,
        {"frozen_weights": "nf4"},
        reference=_decoded,
        saves={"trained_only": True},
        patches=((codecs, "PIECE_NUMEL", 16384),),
    ),
    "updates on the device": Case(settings={"update": "device"}, patches=((device_updates, "_LARGEST_TILE", 2048),)),
}
