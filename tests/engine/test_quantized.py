"""Quantized base models: an adapter trains bit for bit like PEFT's over the dequantized weights.

The engine stores and moves only the quantized bytes of the files.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import Engine, Placement
from offload.app.config.sections import LoraSection, ModelSection
from offload.app.hf.models import BuiltModel, build_model, fill_all
from offload.app.hf.sources import MemorySource
from offload.distributed.joining import open_comm
from offload.errors import ConfigError
from offload.extras.adapters.adapters import Adaptation
from offload.extras.quant.file_codecs import FileCodec
from tests.cases import models
from tests.cases.models import share
from tests.engine import compare
from tests.engine.compare import assert_same, train_both, weights
from tests.engine.inside import parts_of, planned_bytes
from tests.engine.ranks import run
from tests.engine.ranks_child import JOB, SMOOTH
from tests.engine.sizes import tier_bytes
from tests.hf.quantized import FORMATS, deepseek, quantized
from tests.integrations.plain import needs

needs("peft")

PLACES: dict[str, dict[str, Any]] = {**compare.PLACES, "files": {"parameters": "files"}}


def adapted(folder: Path, *names: str) -> BuiltModel:
    """Return the model from a folder with a LoRA adapter on the modules with these names."""
    section = LoraSection(rank=4, target_modules=list(names or ("q_proj", "o_proj")))
    base = build_model(ModelSection(path=str(folder)), seed=0)
    return Adaptation.of(section, "causal").apply_to(base, seed=7)


def plain_of(folder: Path, *names: str) -> BuiltModel:
    """Return the same model over dequantized weights."""
    return adapted(folder.with_name(f"{folder.name}-plain"), *names)


def engine_of(built: BuiltModel, **settings: Any) -> Engine:
    return Engine(built.model, fill=built.fill, quantized=built.quantized, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "place"), list(zip(FORMATS, cycle(PLACES.values()), strict=False)))
def test_it_trains_as_peft_over_what_it_is_dequantised_to(kind: str, place: dict[str, Any], tmp_path: Path) -> None:
    folder = quantized(tmp_path / "base", kind)
    built = adapted(folder)
    engine, _ = train_both(
        built.model,
        models.batches(3),
        plain=fill_all(plain_of(folder)),
        fill=built.fill,
        quantized=built.quantized,
        placement=Placement(**place, nvme_dir=tmp_path),
    )
    engine.close()
    built.close()


@pytest.mark.slow
def test_stacked_experts_stream_in_codes(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "base", "fp8", deepseek)
    for place in PLACES["cpu"], PLACES["files"]:
        built = adapted(folder, "kv_b_proj")
        train_both(
            built.model,
            models.batches(2),
            plain=fill_all(plain_of(folder, "kv_b_proj")),
            fill=built.fill,
            quantized=built.quantized,
            placement=Placement(**place),
        )


@pytest.mark.slow
def test_what_rests_and_moves_has_the_bytes_of_the_files(tmp_path: Path) -> None:
    folder, held = quantized(tmp_path / "base", "fp8"), []
    for built in adapted(folder), plain_of(folder):
        engine = engine_of(built, placement=Placement(**PLACES["cpu"]), micro_batch_size=1, prefetch=0)
        engine.step(models.tokens())
        parts = parts_of(engine)
        planned = planned_bytes(engine)
        assert all(planned["cpu", name] == size for name, size in tier_bytes(engine, "cpu").items())
        held.append((tier_bytes(engine, "cpu")["weights"], engine.counters.h2d_bytes))
        coded = [region for region in parts.regions if isinstance(region.codec, FileCodec)]
        if coded:
            saved = sum(region.weight_bytes - region.travelling_bytes for region in coded)
            told = engine.told_frozen_weights
            its_codec, numel = coded[0].codec, sum(sum(region.sizes) for region in coded)
            assert saved > 0.7 * 4 * numel * (1 - its_codec.record_bytes / its_codec.block / 4)
            assert f"frozen parameters are stored in {coded[0].codec.name}, " in told
            assert "; others unquantized: base_model.model.model.embed_tokens.weight, " in told
        engine.close()
    (few, few_up), (all_, all_up) = held
    assert few < all_
    assert few_up < all_up


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "base", "fp8")
    built = build_model(ModelSection(path=str(folder)), seed=0)
    with pytest.raises(ConfigError, match=r"q_proj.weight is quantized in .*block fp8.*not frozen.*lora.rank"):
        engine_of(built)
    with pytest.raises(ConfigError, match=r"frozen_weights is nf4, but .* is already quantized .*frozen_weights exact"):
        engine_of(adapted(folder), frozen_weights="nf4")
    built = adapted(folder)
    fill_all(built)
    with pytest.raises(ConfigError, match=r"its values were changed after loading.*leave out quantized="):
        Engine(built.model, quantized=built.quantized)
    for parameters in ("device", "files"):
        built = adapted(folder)
        filled = {parameter: MemorySource(torch.zeros(parameter.shape)) for parameter in built.model.parameters()}
        place = Placement(parameters=parameters)
        with pytest.raises(ConfigError, match=r"its values were changed after loading.*leave out quantized="):
            Engine(built.model, fill=lambda *_, of=filled: of, quantized=built.quantized, placement=place)
    engine = engine_of(adapted(folder))
    with pytest.raises(ConfigError, match="files store frozen weights as .*trained_only=True"):
        engine.save_checkpoint(tmp_path / "whole")
    name = next(name for name, p in engine.model.named_parameters() if "up_proj" in name)
    with pytest.raises(ConfigError, match=f"cannot change {name}: it is stored quantized"):
        engine.edit([name])


def on_ranks(folder: Path, stage: int, place: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Return the weights after two steps over the quantized base, and over the dequantized base."""
    found = []
    with open_comm(times=JOB) as comm:
        for built in adapted(folder), plain_of(folder):
            engine = engine_of(built, optimizer=SMOOTH, comm=comm, placement=Placement(**place), zero_stage=stage)
            for seed in range(2):
                engine.step(share(models.tokens(seed), (2, 2), comm.rank))
            found.append(weights(engine))
            engine.close()
    return found


@pytest.mark.slow  # two processes each
@pytest.mark.parametrize(("kind", "stage", "place"), [("fp8", 0, PLACES["cpu"]), ("mxfp4", 3, PLACES["files"])])
def test_ranks_decode_what_they_hold(kind: str, stage: int, place: dict[str, Any], tmp_path: Path) -> None:
    folder = quantized(tmp_path / "base", kind)
    for found, wanted in run(2, on_ranks, folder=folder, stage=stage, place=place):
        assert_same(found, wanted)
