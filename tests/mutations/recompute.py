"""Mutations in activation recomputation, saved autograd graphs, and unit behaviour."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch

from offload.engine.gradients.flow import GradientFlow
from offload.engine.recording.equivalence import PassComparator
from offload.engine.units import call, fitted_attention, keep, recompute_policy, snapshots
from offload.engine.units.activation_offload import HostActivationOffload
from offload.engine.units.saved_inputs import KeptOutputs, SavedInputs
from offload.extras.adapters import merge
from offload.extras.large import kept_products, tiles
from offload.extras.large.expert_rows import RecordRows
from offload.extras.large.streamed_experts import StreamedExperts
from offload.extras.quant import fp8_codec
from offload.extras.quant.casts import scale_of
from offload.extras.quant.codecs import IntegerCodec
from offload.extras.quant.weight_codes import WeightCodes
from offload.tiers.slots import Slots
from tests.mutations import as_it_is, enter_as, mutation, replaced


@contextmanager
def generators_alone(snapshot: snapshots.Snapshot) -> Iterator[None]:
    snapshot.put_back_generators()
    yield


# A recomputation starts from the attributes as left by the forward.
enter_as(
    "kept-numbers-counted-twice",
    replaced(snapshots.Snapshot, "repeated", generators_alone),
    "tests/engine/test_condition.py",
    fuzzed=True,
)
# Entries added by a unit to a caller's mapping stay in a copy.
enter_as(
    "results-written-into-arguments-lost",
    replaced(call, "deliver_result", lambda result, tensors, its: result.fill(tensors, containers=its)[0]),
    "tests/engine/test_handmade.py",
    fuzzed=True,
)

# Attention with a mask keeps cuDNN.
enter_as(
    "masks-computed-by-cudnn",
    replaced(fitted_attention, "_left_out", lambda *_: nullcontext()),
    "tests/engine/test_fitted_attention.py",
)

# Grouped heads go to a kernel that does not take them.
enter_as(
    "grouped-heads-as-they-are",
    replaced(fitted_attention, "fitted", lambda _, call: call),
    "tests/engine/test_fitted_attention.py",
)


@mutation("tests/engine/test_generators_and_buffers.py", fuzzed=True)
def moving_buffers_not_put_back(patch: pytest.MonkeyPatch) -> None:
    """The equivalence check is disabled too, since the check would detect the fault and save graphs."""
    patch.setattr(PassComparator, "_first_difference", lambda *_, **__: "")
    patch.setattr(snapshots.Snapshot, "values_restored", as_it_is)


@mutation("tests/engine/test_generators_and_buffers.py", fuzzed=True)
def generator_not_put_back_in_recompute(patch: pytest.MonkeyPatch) -> None:
    recompute = keep.Inputs._recompute

    def without(self: keep.Inputs, number: int) -> Any:
        self._micro_batches[number].snapshot.random = self._runner.device.random_state()
        return recompute(self, number)

    patch.setattr(keep.Inputs, "_recompute", without)


@mutation("tests/engine/test_kept.py", fuzzed=True)
def kept_graph_over_a_stale_offset(patch: pytest.MonkeyPatch) -> None:
    """Weights in a saved graph are read at the unit's first slot address."""
    view = Slots.view

    def stale(self: Slots, cargo: int, dtype: torch.dtype, distance: int, shape: Any, stride: Any) -> torch.Tensor:
        places = self.__dict__.setdefault("_mutated", {})
        slot = self._valid_slots.get(cargo)
        assert slot is not None
        begin = min(places.setdefault(cargo, slot.begin), self._memory.nbytes - (slot.end - slot.begin))
        own, slot.begin, slot.end = (slot.begin, slot.end), begin, begin + slot.end - slot.begin
        try:
            return view(self, cargo, dtype, distance, shape, stride)
        finally:
            slot.begin, slot.end = own

    patch.setattr(Slots, "view", stale)


@mutation("tests/engine/test_kept_products.py", "tests/contracts/test_contracts.py")
def kept_products_in_another_order(patch: pytest.MonkeyPatch) -> None:
    """Two neighbouring outputs of products with equal shapes change places."""
    replayed = KeptOutputs.replayed

    def swapped(self: KeptOutputs, outputs: list[torch.Tensor]) -> Any:
        outputs = list(outputs)
        for place, (one, other) in enumerate(pairwise(outputs)):
            if one.shape == other.shape:
                outputs[place : place + 2] = other, one
                break
        return replayed(self, outputs)

    patch.setattr(KeptOutputs, "replayed", swapped)


@mutation("tests/engine/test_kept_products.py::test_no_other_choice_spares_more_by_a_whole_item")
def products_with_least_work_kept_first(patch: pytest.MonkeyPatch) -> None:
    by_worth = recompute_policy._by_worth
    patch.setattr(recompute_policy, "_by_worth", lambda *parts: by_worth(*parts)[::-1])


@mutation("tests/engine/test_kept_products.py::test_blocks_with_habits_are_bit_equal")
def output_that_a_gradient_reads_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kept_products.Recorder, "other", lambda *_: None)


@mutation("tests/engine/test_kept_products.py::test_as_many_outputs_are_kept_as_fit")
def rows_of_outputs_below_turned_round(patch: pytest.MonkeyPatch) -> None:
    put_below = SavedInputs.put_below

    def turned(self: SavedInputs, tensors: list[torch.Tensor], claim: Any) -> list[torch.Tensor]:
        return put_below(self, [tensor.flip(0) for tensor in tensors], claim)

    patch.setattr(SavedInputs, "put_below", turned)


@mutation("tests/engine/test_tiles.py::test_steps_are_those_of_plain_torch")
def last_tile_of_a_sequence_lost(patch: pytest.MonkeyPatch) -> None:
    """The last tile gets the first tile's results."""
    part = tiles._TiledCall._part

    def lost(self: Any, tensor: torch.Tensor, span: Any) -> torch.Tensor:
        is_last = span[1] == tensor.shape[self._rows.axis] and span[0] >= self._size
        return part(self, tensor, (0, span[1] - span[0]) if is_last else span)

    patch.setattr(tiles._TiledCall, "_part", lost)


@mutation("tests/engine/test_streamed_experts.py")
def tokens_of_another_expert(patch: pytest.MonkeyPatch) -> None:
    """Each expert gets the neighbour's tokens."""
    checked = StreamedExperts._check_arguments

    def swapped(self: StreamedExperts, given: Any) -> Any:
        hidden, index, weights = checked(self, given)
        return hidden, index ^ 1, weights

    patch.setattr(StreamedExperts, "_check_arguments", swapped)


@mutation("tests/engine/test_grouped_experts.py")
def results_of_a_record_added_from_the_last_expert_on(patch: pytest.MonkeyPatch) -> None:
    add = RecordRows.add_to
    patch.setattr(RecordRows, "add_to", lambda self, *given, descending=False: add(self, *given, descending=True))


@mutation("tests/engine/test_streamed_experts.py")
def experts_without_tokens_not_updated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientFlow, "send_zeros", lambda self, regions, frozen: None)


@mutation("tests/hf/test_merge.py")
def scale_of_an_adapter_dropped_where_it_is_merged(patch: pytest.MonkeyPatch) -> None:
    merged = merge._merge_module

    def unscaled(target: Any) -> Any:
        if hasattr(target, "scaling"):
            target.scaling.update(dict.fromkeys(target.scaling, 1.0))
        return merged(target)

    patch.setattr(merge, "_merge_module", unscaled)


@mutation("tests/layout/test_codecs.py")
def codes_decoded_with_the_scale_before(patch: pytest.MonkeyPatch) -> None:
    """Each block in a frozen base uses the previous block's scale."""
    decode = IntegerCodec.decode

    def shifted(self: IntegerCodec, records: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor) -> None:
        own = records.clone().view(-1, self.record_bytes)
        own[:, -4:] = own[:, -4:].roll(1, 0)
        decode(self, own.view(-1), out, workspace)

    patch.setattr(IntegerCodec, "decode", shifted)


@mutation("tests/contracts/test_contracts.py")
def inputs_of_units_lost_on_their_way_to_the_host(patch: pytest.MonkeyPatch) -> None:
    down = HostActivationOffload._copy_out
    patch.setattr(
        HostActivationOffload, "_copy_out", lambda self, tensor, *where: down(self, torch.zeros_like(tensor), *where)
    )


@mutation("tests/engine/test_fp8_products.py::test_steps_are_those_of_plain_pytorch_with_one_scale_for_a_matrix")
def fp8_codes_of_earlier_weights(patch: pytest.MonkeyPatch) -> None:
    """Codes outlive the use of a unit, and the next weights at their addresses get them."""

    def close(codes: WeightCodes) -> None:
        codes._memory = codes._memory.clone()
        codes._end = 0

    patch.setattr(WeightCodes, "close", close)


@mutation("tests/engine/test_fp8_products.py::test_steps_over_fp8_codes_are_those_over_exact_weights")
def fp8_codes_of_other_scales_than_products(patch: pytest.MonkeyPatch) -> None:
    """Frozen weights are encoded with a scale half as large again as that of their products."""

    patch.setattr(fp8_codec, "scale_of", lambda amax: 1.5 * scale_of(amax))
