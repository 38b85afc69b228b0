"""Forecast savings from sequence tiles, and plans with automatic tiles."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from benchmarks.plan_memory import HERE
from offload.app.config.config import Config
from offload.engine.prepare import prepare
from offload.extras.large.row_trials import RowTrials
from offload.extras.large.tiles import Tiles
from offload.extras.plan.alternatives import forecast
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.measure import BatchSpec, CannotMeasureError, measure
from offload.extras.plan.simulated_ranks import SimulatedRanks
from offload.extras.plan.workload import UnitWork
from offload.planning.machines import SpecifiedMachine
from offload.planning.settings import Settings

TOKENS = 1 << 16


def block(
    tile: int | str, num_tokens: int = TOKENS, num_ranks: int = 1, found: dict[Hashable, Tiles] | None = None
) -> UnitWork:
    """Return the work in a block with Llama 3 8B proportions, on one of `num_ranks` ranks with parts of a row."""
    sizes = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64, max_position_embeddings=num_tokens)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    settings = Settings(sequence_tile=tile, sequence_parallel=num_ranks, precision="bf16", device="cpu")
    prepared = prepare(model, settings, SimulatedRanks(num_ranks), SpecifiedMachine(HERE, num_ranks))
    work = measure(model, BatchSpec("causal", 1, num_tokens // num_ranks, shared_by=num_ranks), prepared, found)
    assert model.config._attn_implementation == "sdpa", "the model is as it was"
    return next(call for call in work.calls if call.is_block)


@pytest.mark.slow
def test_a_block_of_64k_tokens_takes_a_third_of_the_memory() -> None:
    whole, tiled = block("none"), block(2048)
    assert tiled.saved_bytes <= 0.25 * whole.saved_bytes
    assert tiled.backward_temporary_bytes <= 0.35 * whole.backward_temporary_bytes
    assert tiled.forward_temporary_bytes <= 0.5 * whole.forward_temporary_bytes
    assert tiled.backward.flops == pytest.approx(whole.backward.flops, rel=0.01), "no product is made once more"


@pytest.mark.slow
def test_blocks_are_searched_for_tiles_once_in_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    searches, find, tiles = [], RowTrials.find, {}
    monkeypatch.setattr(RowTrials, "find", lambda self, *rest: searches.append(self) or find(self, *rest))
    first = block(512, 4096, found=tiles)
    assert len(searches) == 1
    again, smaller = block(512, 4096, found=tiles), block(256, 4096, found=tiles)
    assert len(searches) == 1
    assert (again.saved_bytes, again.backward) == (first.saved_bytes, first.backward)
    assert smaller.backward_temporary_bytes < first.backward_temporary_bytes


class Results(TorchDispatchMode):
    """Notes the shapes that have memory for each element."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= tensor.nbytes:
                self.shapes.add(tuple(tensor.shape))
        return result


def test_trials_for_tiles_copy_no_weight_and_make_no_gradient_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a 14B block these were 64 GB in new pages, each plan."""
    results, find = Results(), RowTrials.find

    def watched(*arguments: Any) -> Tiles:
        with results:
            return find(*arguments)

    monkeypatch.setattr(RowTrials, "find", watched)
    tiles: dict[Hashable, Tiles] = {}
    block(512, 4096, found=tiles)
    assert next(rows.name for each in tiles.values() for rows in each.modules) == "mlp"
    assert (2, 8, 224) in results.shapes
    assert results.shapes.isdisjoint({(64, 224), (224, 64)})


def test_ranks_that_share_sequences_have_their_part_of_a_block() -> None:
    """Attention over whole rows is divided too, by heads."""
    whole, part = block("none", 4096), block("none", 4096, num_ranks=2)
    assert part.forward.flops == pytest.approx(whole.forward.flops / 2)
    assert part.backward.flops == pytest.approx(whole.backward.flops / 2)
    assert part.input_bytes == pytest.approx(whole.input_bytes / 2, rel=0.01)
    assert part.backward_temporary_bytes <= 0.6 * whole.backward_temporary_bytes
    sent = 2 * 2048 * (64 + 2 * 16 + 64) // 2  # bf16 queries, keys, values and results for local tokens; half stay
    assert (whole.forward.exchanged_bytes, part.forward.exchanged_bytes) == (0, sent)
    assert part.backward.exchanged_bytes == sent


@pytest.mark.slow
def test_a_block_unable_to_run_on_a_few_rows_is_measured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tiled, own = block(16, 256), LlamaMLP.forward

    def forward(self: LlamaMLP, rows: torch.Tensor) -> torch.Tensor:
        if not rows.is_meta:
            raise ValueError("too few rows")
        return own(self, rows)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    assert tiled.saved_bytes < block(16, 256).saved_bytes


def test_a_broken_tile_search_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise AttributeError("a misspelt name")

    monkeypatch.setattr(RowTrials, "_outermost", breaks)
    with pytest.raises(CannotMeasureError, match="AttributeError: a misspelt name"):
        block(16, 256)


def config(**values: object) -> Config:
    known = {"model__preset": "tiny", "train__batch_size": 1, "data__sequence_length": 1 << 15}
    known |= {"train__head_chunk_bytes": 8 << 20} | values
    return Config().with_resolved(**known)


@pytest.mark.slow
@pytest.mark.parametrize(("device_bytes", "tile"), [(1 << 30, "auto"), (200 << 20, 1024)])
def test_a_plan_tiles_where_a_block_does_not_fit_otherwise(device_bytes: int, tile: int | str) -> None:
    found = forecast(config(), read_machine("h100").with_(device_bytes=device_bytes))
    assert found.fits
    assert found.to_dict()["sequence_tile"] == tile
    assert ("train.sequence_tile" in found.placement_flags) == (tile != "auto")


@pytest.mark.slow
def test_a_plan_that_is_told_none_names_tiles_as_the_fix() -> None:
    hardware = read_machine("h100").with_(device_bytes=200 << 20)
    found = forecast(config(train__sequence_tile="none"), hardware)
    assert (found.fits, found.fix) == (False, "--train.sequence_tile 1024")


@pytest.mark.slow
def test_a_plan_cuts_layers_that_the_device_does_not_hold() -> None:
    small = {"data__sequence_length": 32, "train__head_chunk_bytes": 1 << 18, "offload__device_memory": 16 << 20}
    found = forecast(config(model__preset="small", **small), read_machine("h100"))
    cutting = found.prepared.structure.splitting
    assert found.fits
    assert found.memory.total("device") <= 16 << 20
    assert max(each.weight_bytes for each in found.prepared.structure.regions) <= cutting.share_bytes
    assert "into row blocks" in cutting.description
