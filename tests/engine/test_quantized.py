"""Bases whose files are in few bits: training an adapter over one is PEFT's over what they are dequantised to, to the
bit, and what rests and moves are the bytes of the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offload import Placement
from offload.config.sections import LoraSection, ModelSection
from offload.hf.adapters import Adaptation
from offload.hf.models import BuiltModel, build_model, fill_all
from tests.engine import families
from tests.engine.compare import train_both
from tests.hf.quantized import FORMATS, quantized
from tests.integrations.plain import needs
from tests.matrix import matrix

needs("peft")

PLACES: dict[str, dict[str, Any]] = {
    "device": {"parameters": "device", "optimizer": "device"},
    "cpu": {"parameters": "cpu", "optimizer": "cpu"},
    "nvme": {"parameters": "nvme", "optimizer": "nvme"},
    "files": {"parameters": "files"},
}


def adapted(folder: Path) -> BuiltModel:
    """The model of a folder beneath a LoRA."""
    section = LoraSection(
        rank=4, target_modules=["q_proj", "o_proj", "down_proj", "kv_b_proj"][: 2 if "oss" in folder.name else 3]
    )
    base = build_model(ModelSection(path=str(folder)), seed=0)
    return Adaptation.of(section, "causal").over(base, seed=7)


def resident(folder: Path) -> Any:
    return fill_all(adapted(folder.with_name(f"{folder.name}-plain")))


@matrix(strength=1, kind=FORMATS, place=PLACES, precision=["fp32"])
def test_it_trains_as_over_what_it_is_dequantised_to(
    kind: tuple[Any, Any], place: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    name = next(name for name, each in FORMATS.items() if each is kind)
    folder = quantized(tmp_path / ("oss" if name == "mxfp4" else "base"), name)
    built = adapted(folder)
    placement = Placement(**place, nvme_dir=str(tmp_path) if "nvme" in place.values() else None)
    engine, _ = train_both(
        built.model,
        families.batches(3),
        plain=resident(folder),
        fill=built.fill,
        quantized=built.quantized,
        placement=placement,
        precision=precision,
    )
    print(engine.told_frozen_weights)
    engine.close()
    built.close()
