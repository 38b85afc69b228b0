"""Mutations in gradients, from autograd to the update: sums, norm, clipping."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from offload.engine.gradients import loss_scale, norms, policies, updates
from offload.engine.gradients.flow import GradientFlow
from offload.engine.gradients.loss_scale import DynamicScale, LossScale
from offload.engine.gradients.tile_updates import Correction, RegionUpdate
from offload.engine.gradients.transfer import GradientTransfer
from offload.engine.gradients.updates import Updates
from offload.engine.loss import loss
from offload.engine.loss import parts as losses
from offload.engine.units import keep
from offload.engine.units.traits import Rows
from offload.extras.large.compiled_loss import CompiledLoss
from offload.extras.quant.codecs import IntegerCodec
from offload.integrations.accelerate import OffloadAccelerator
from offload.integrations.optimizer import OffloadOptimizer
from offload.lanes.ticket import Fence
from offload.layout.regions import Piece
from tests.mutations import enter_as, mutation, replaced

# Micro-batches and ranks count the same, regardless of their targets.
enter_as(
    "micro-batches-weighted-alike",
    replaced(losses, "_scale", lambda loss, share, _: loss * (0.5 if share != 1.0 else 1.0)),
    "tests/contracts/test_contracts.py",
    fuzzed=True,
)


@mutation("tests/engine/test_against_torch.py", fuzzed=True)
def norm_without_the_last_parameter(patch: pytest.MonkeyPatch) -> None:
    total = updates.total_norm
    for module in (policies, updates):
        patch.setattr(module, "total_norm", lambda squares: total(list(squares)[:-1] if len(squares) > 1 else squares))


@mutation("tests/contracts/test_contracts.py", fuzzed=True)
def norm_in_single_precision(patch: pytest.MonkeyPatch) -> None:
    def total(squares: Sequence[float]) -> float:
        found = 0.0
        for value in squares:
            found = struct.unpack("f", struct.pack("f", found + value))[0]
        return float(found**0.5)

    for module in (policies, updates):
        patch.setattr(module, "total_norm", total)


@mutation("tests/engine/test_against_torch.py", fuzzed=True)
def clip_coefficient_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    coefficient, last = policies.clip_coefficient, [1.0]

    def stale(norm: float, limit: float | None) -> float:
        last.append(coefficient(norm, limit))
        return last.pop(0)

    patch.setattr(policies, "clip_coefficient", stale)


@mutation("tests/engine/test_clipping.py", fuzzed=True)
def correction_skipped_for_one_region(patch: pytest.MonkeyPatch) -> None:
    """The speculative update in region 1 is not corrected."""
    submit = RegionUpdate.submit

    def corrected(self: Correction) -> None:
        if self.region.index != 1:
            submit(self)

    patch.setattr(Correction, "submit", corrected)


@mutation("tests/engine/test_against_torch.py", fuzzed=True)
def second_contribution_added_twice(patch: pytest.MonkeyPatch) -> None:
    take = GradientFlow.take

    def taken(self: GradientFlow, piece: Piece, parameter: Any) -> None:
        region, position, _ = self._places[piece]
        if parameter.grad is not None and self.measures.touched[region.index][position]:
            parameter.grad = parameter.grad * 2
        take(self, piece, parameter)

    patch.setattr(GradientFlow, "take", taken)


@mutation("tests/engine/test_against_torch.py", fuzzed=True)
def tied_gradient_landed_early(patch: pytest.MonkeyPatch) -> None:
    """Gradients with several contributions arrive in host memory after the first one. The later ones are lost."""
    close, rest = GradientFlow.close, GradientFlow.send_rest

    def closed(self: GradientFlow, regions: Any) -> None:
        close(self, regions)
        for region in regions:
            early = region in self._lasting and region.index not in self.transfer._sent and not self.accumulates(region)
            if early and any(self.measures.touched[region.index]):
                lasting = self._lasting[region].clone()
                self.transfer.send(region, lasting, Fence("accumulated gradients"), is_final=True)

    def landed_rest(self: GradientFlow) -> None:
        kept = dict(self._lasting)
        for region in kept:
            if region.index in self.transfer._sent and not self.accumulates(region):
                self._lasting.pop(region)
        rest(self)
        self._lasting = kept

    patch.setattr(GradientFlow, "close", closed)
    patch.setattr(GradientFlow, "send_rest", landed_rest)


@mutation("tests/contracts/test_contracts.py", fuzzed=True)
def padding_not_zeroed(patch: pytest.MonkeyPatch) -> None:
    begin = GradientFlow.begin_step

    def begun(self: GradientFlow) -> None:
        begin(self)
        self._ragged = {index: [] for index in self._ragged}

    patch.setattr(GradientFlow, "begin_step", begun)


@mutation("tests/engine/test_micro_batches.py")
def rows_of_micro_batches_one_too_early(patch: pytest.MonkeyPatch) -> None:
    of = Rows.of

    def early(self: Rows, traits: Any) -> list[Any]:
        return [span and (span[0] - (span[0] > 0), span[1] - (span[0] > 0), span[2]) for span in of(self, traits)]

    patch.setattr(Rows, "of", early)


@mutation("tests/engine/test_micro_batches.py")
def micro_batches_added_up_in_the_other_order(patch: pytest.MonkeyPatch) -> None:
    backward = keep.Inputs.backward

    def reversed_(self: keep.Inputs, gradients: Any, trains: bool) -> Any:
        self._micro_batches.reverse()
        return backward(self, gradients, trains)

    patch.setattr(keep.Inputs, "backward", reversed_)


@mutation("tests/contracts/test_contracts.py")
def norm_summed_from_the_last_parameter(patch: pytest.MonkeyPatch) -> None:
    total = updates.total_norm
    for module in (policies, updates):
        patch.setattr(module, "total_norm", lambda squares: total(list(squares)[::-1]))


@mutation("tests/engine/test_against_torch.py")
def gradient_of_a_unit_lost(patch: pytest.MonkeyPatch) -> None:
    sends = GradientTransfer.sends
    patch.setattr(GradientTransfer, "sends", lambda self, region: region.index != 1 and sends(self, region))


@mutation("tests/engine/test_own_loops.py")
def gradient_of_an_own_loop_landed_twice(patch: pytest.MonkeyPatch) -> None:
    add = GradientTransfer._add

    def added(self: GradientTransfer, *how: Any) -> None:
        add(self, *how)
        add(self, *how)

    patch.setattr(GradientTransfer, "_add", added)


@mutation("tests/engine/test_clipping.py")
def clipping_forgotten_where_an_update_is_speculative(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Correction, "submit", lambda self: None)


@mutation("tests/engine/test_link_gradients.py")
def errors_of_coded_gradients_not_kept(patch: pytest.MonkeyPatch) -> None:
    encode_rest = IntegerCodec.encode_rest

    def forgotten(self: IntegerCodec, values: Any, error: Any, out: Any) -> None:
        encode_rest(self, values, error, out)
        error.zero_()

    patch.setattr(IntegerCodec, "encode_rest", forgotten)


@mutation("tests/engine/test_head.py")
def last_chunk_of_a_head_lost(patch: pytest.MonkeyPatch) -> None:
    build_chunks = losses.build_chunks

    def lossy(*how: Any) -> Any:
        chunks = build_chunks(*how)
        return chunks[:-1] if len(chunks) > 1 else chunks

    patch.setattr(losses, "build_chunks", lossy)


@mutation("tests/engine/test_head.py", "tests/engine/test_head_gradients.py")
def gradient_of_a_chunk_without_its_labels(patch: pytest.MonkeyPatch) -> None:
    compute = loss.log_probs_with_gradient

    def unlabelled(logits: Any, labels: Any, slopes: Any = None) -> Any:
        return compute(logits, labels)[0], slopes if slopes is None else compute(logits, labels * 0, slopes)[1]

    patch.setattr(loss, "log_probs_with_gradient", unlabelled)


@mutation("tests/engine/test_fp16.py")
def gradients_updated_with_the_loss_scale(patch: pytest.MonkeyPatch) -> None:
    begin = Updates.begin_step

    def begun(self: Updates, *how: Any, **more: Any) -> None:
        begin(self, *how, **more)
        self.tiles.settings = self.tiles.settings._replace(unscale=1.0)

    patch.setattr(Updates, "begin_step", begun)


@mutation("tests/engine/test_fp16.py")
def norm_with_the_loss_scale(patch: pytest.MonkeyPatch) -> None:
    total = Updates._total_norm
    patch.setattr(Updates, "_total_norm", lambda self: total(self) * self.loss_scale.value)


@mutation("tests/engine/test_fp16.py")
def sums_of_gradients_not_rounded_to_fp16(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(norms, "_round_fp16", lambda region, flat: None)


# A script divides its learning rate, or clips, by gradients that are 65536 times as large.
enter_as(
    "gradients-read-with-the-loss-scale",
    replaced(Updates, "take_scale", lambda self: 1.0),
    "tests/engine/test_fp16.py",
)
# The script's gradients enter the model as they are, or leave it with the scale.
enter_as(
    "loss-scale-not-at-the-border",
    replaced(DynamicScale, "leave", LossScale.leave),
    "tests/engine/test_fp16.py",
)
enter_as(
    "loss-scale-in-gradients-of-the-script",
    replaced(DynamicScale, "enter", lambda self, tensor: tensor.to(torch.float16)),
    "tests/engine/test_fp16.py::test_gradients_outside_of_the_model_are_without_the_scale",
)
enter_as(
    "no-loss-scale-beside-results-of-the-model",
    replaced(loss_scale, "_times", lambda gradients, factors: gradients),
    "tests/engine/test_fp16.py::test_a_tensor_from_inside_a_block_has_its_gradient_in_engine_backward",
)
enter_as(
    "grad-scaler-left-to-accelerate",
    replaced(OffloadAccelerator, "drop_scaler", lambda self: None),
    "tests/integrations/test_fp16.py::test_accelerate_steps_without_its_grad_scaler",
)
enter_as(
    "schedule-moves-in-a-skipped-step",
    replaced(OffloadOptimizer, "step_was_skipped", False),
    "tests/integrations/test_fp16.py",
)


# A resumed run begins with the scale of a first step.
enter_as(
    "loss-scale-not-resumed",
    replaced(DynamicScale, "load_state_dict", lambda self, state: None),
    "tests/engine/test_fp16.py",
)


@mutation("tests/engine/test_fp16.py")
def updates_without_clipping_do_not_wait_for_the_norm(patch: pytest.MonkeyPatch) -> None:
    needs_norm = Updates.needs_norm.fget
    assert needs_norm is not None
    patch.setattr(Updates, "needs_norm", property(lambda self: self.max_norm is not None and needs_norm(self)))


enter_as(
    "compiled-losses-not-compared",
    replaced(CompiledLoss, "_try", lambda self, *_: ""),
    "tests/engine/test_compiled.py::test_a_compiled_loss_that_is_something_else_runs_as_it_is",
)
