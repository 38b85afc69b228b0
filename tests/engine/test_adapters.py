"""PEFT adapters over a base read parameter by parameter, compared with PEFT over a base in memory."""

from __future__ import annotations

import copy
import gc
import importlib.util
import itertools
import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from offload import Engine
from offload.app.config.sections import LoraSection, ModelSection
from offload.app.hf.models import BuiltModel, build_model, fill_all
from offload.app.hf.sources import TensorSource
from offload.errors import ConfigError, MissingLibraryError
from offload.extras.adapters.adapters import Adaptation, describe_adapter
from offload.extras.quant import products
from tests.cases import models
from tests.engine.compare import PLACES, own_step_of, placed, same_bits, train_both
from tests.engine.fp8 import LEAST_SIZE, multiply_in_fp8
from tests.engine.inside import leave_spare_memory, parts_of, resident_names
from tests.integrations.plain import needs
from tests.matrix import quick

needs("peft")

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402

CASES: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4, "target_modules": "all-linear"},
    "rslora": {"rank": 4, "alpha": 16, "use_rslora": True, "init": "gaussian"},
    "dora": {"rank": 2, "use_dora": True, "dropout": 0.1, "target_modules": ["q_proj", "down_proj"]},
    "vera": {"config": {"peft_type": "VERA", "r": 4, "target_modules": ["q_proj", "o_proj"]}},
    "tokens": {"rank": 4, "trainable_tokens": [3, 5, 7]},
    "head": {"rank": 4, "modules_to_save": ["lm_head"]},
    "pissa": {"rank": 4, "init": "pissa_niter_4", "target_modules": ["q_proj", "down_proj"]},
    "olora": {"rank": 4, "init": "olora", "use_dora": True, "target_modules": "all-linear"},
    "parameters": {"rank": 4, "target_parameters": ["v_proj.weight", "down_proj.weight"]},
    "repeated": {
        "config": {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 2]]}
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    models.build(models.llama).save_pretrained(folder)  # type: ignore[operator]
    return folder


def adaptation(tmp_path: Path, case: dict[str, Any]) -> Adaptation:
    if isinstance(case.get("config"), dict):
        (tmp_path / "adapter.json").write_text(json.dumps(case["config"]))
        case = {"config": str(tmp_path / "adapter.json")}
    return Adaptation.of(LoraSection(**case), "causal")


def load(base: Path) -> BuiltModel:
    return build_model(ModelSection(path=str(base)), seed=0)


def resident(base: Path, adapter: Adaptation) -> nn.Module:
    """Return PEFT's own adapted model over a base in memory."""
    model = fill_all(load(base))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return get_peft_model(model, copy.deepcopy(adapter.config))


FP8: dict[str, Any] = {"matmul": "fp8_rowwise", "precision": "bf16", "group": partial(multiply_in_fp8, "fp8_rowwise")}
CHUNKS: dict[str, Any] = {"head_chunk_bytes": 12 * models.VOCABULARY * 4, "within": 2e-6}


@pytest.mark.parametrize(
    ("name", "place", "settings"),
    quick(
        [
            *zip(CASES, list(PLACES) * 4, itertools.repeat({}), strict=False),
            ("lora", "cpu", FP8),
            ("lora", "device", CHUNKS),
        ],
        [("repeated", "device", {}), ("lora", "cpu", FP8)],
    ),
)
def test_it_trains_as_over_a_base_in_memory(
    base: Path, name: str, place: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In FP8 only the frozen layers multiply. A head in chunks: an adapter does not make the logits smaller."""
    monkeypatch.setattr(products, "LEAST_SIZE", LEAST_SIZE)
    adapter = adaptation(tmp_path, CASES[name])
    built, plain = adapter.apply_to(load(base), seed=7), resident(base, adapter)
    where = placed(place, tmp_path)
    engine, _ = train_both(built.model, models.batches(3), plain=plain, fill=built.fill, placement=where, **settings)
    built.close()
    assert (engine.head_chunks == 3) == (settings is CHUNKS)
    assert ("10 linear layers of blocks multiply in FP8" in engine.told_tiles) == (settings is FP8)
    found = dict(engine.named_parameters(trained_only=True))
    assert found.keys() == {name for name, value in plain.named_parameters() if value.requires_grad}
    assert name != "repeated" or sum(key.endswith("q_proj.lora_A.default.weight") for key in found) == 3
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"use_dora": True}, {"init": "pissa"}, {"init": "olora"}], ids=str)
def test_first_values_are_read_a_parameter_at_a_time(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """Earlier base parameters are freed before the next read. `alive` has a weak reference to each storage read."""
    read, alive, most = TensorSource.read, [], 0

    def counting(self: TensorSource, begin: int, end: int) -> torch.Tensor:
        nonlocal most
        found = read(self, begin, end)
        alive.append(weakref.ref(found.untyped_storage()))
        gc.collect()
        most = max(most, sum(each() is not None for each in alive))
        return found

    monkeypatch.setattr(TensorSource, "read", counting)
    adaptation(tmp_path, {"rank": 2, "target_modules": "all-linear", **how}).apply_to(load(base), seed=7)
    assert len(alive) >= 14
    assert most <= 2, "what is read, and what it takes the place of"


@pytest.mark.parametrize("name", quick(CASES, ["dora", "tokens", "head", "pissa", "olora"]))
def test_first_values_are_those_over_a_model_in_memory(base: Path, tmp_path: Path, name: str) -> None:
    adapter = adaptation(tmp_path, CASES[name])
    built, plain = adapter.apply_to(load(base), seed=7), resident(base, adapter)
    assert describe_adapter(built.model) == describe_adapter(plain)
    found, wanted = fill_all(built).state_dict(), plain.state_dict()
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("how", [{"target_modules": ["q_proj"], "bias": "all"}, {"target_modules": ["embed_tokens"]}])
@pytest.mark.parametrize("trains", [True, False])
def test_what_an_adapters_folder_has_of_the_base_is_taken(tmp_path: Path, how: dict[str, Any], trains: bool) -> None:
    """Trained biases, and base rows saved unchanged by PEFT, come from the adapter folder."""
    folder, plain = tmp_path / "base", models.build(models.opt)
    plain.save_pretrained(folder)  # type: ignore[operator]
    made = get_peft_model(plain, LoraConfig(r=2, **how))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    made.save_pretrained(tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(fill_all(load(folder)), tmp_path / "adapter", is_trainable=trains)
    built = Adaptation.from_folder(tmp_path / "adapter", "it").apply_to(load(folder), seed=0, trains=trains)
    wanted, found = dict(theirs.named_parameters()), dict(fill_all(built).named_parameters())
    assert {name for name, p in found.items() if p.requires_grad == trains} >= {
        name for name in found if "lora" in name
    }
    assert all(same_bits(found[name], wanted[name]) for name in wanted)
    if trains and "bias" not in how:
        weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        weights["base_model.model.model.decoder.embed_tokens.base_layer.weight"][3] += 1
        save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match="changes the base weight .*embed_tokens.weight"):
            Adaptation.from_folder(tmp_path / "adapter", "it").apply_to(load(folder), seed=0)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"rank": 4, "target_modules": ["q_proj", "v_prj"]}, "'v_prj'.*did you mean v_proj.*q_proj .2., k_proj .2."),
        ({"rank": 4, "modules_to_save": ["haed"]}, "no module 'haed' to adapt"),
        (
            {"config": {"peft_type": "LORA", "init_lora_weights": "eva", "target_modules": ["q_proj"]}},
            "eva, which PEFT computes from rows",
        ),
        (
            {"config": {"peft_type": "LORA", "init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}},
            "loftq, which is no longer computed: set --lora.init default",
        ),
        ({"config": {"r": 4}}, "has no peft_type"),
        ({"config": {"peft_type": "LORA", "rank": 4}}, "with rank .*, but LoraConfig of peft .* has no such field"),
        ({"config": "nowhere.json"}, "lora.config is nowhere.json, which cannot be read as JSON"),
        ({"adapter": "nowhere"}, "lora.adapter is nowhere, which is no folder"),
    ],
)
def test_what_cannot_be_adapted_is_refused(base: Path, tmp_path: Path, case: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        adaptation(tmp_path, case).apply_to(load(base), seed=7)


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingLibraryError, match=r"pip install .offload\[peft\]"):
        Adaptation.of(LoraSection(rank=4), "causal")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "call", "checkpoints"),
    [("always", "step", True), ("never", "own", False), ("auto", "micro", True)],
)
def test_the_first_trained_unit_bounds_the_backward(recompute: str, call: str, checkpoints: bool) -> None:
    """Below the first adapted layer, weights are copied to the device once per step, for the forward alone. From this
    layer on, the copy happens twice, except for the last unit, still in a slot when the backward begins.

    With gradient checkpointing, transformers makes the embedding output require a gradient. The engine does not compute
    this gradient.
    """
    depth, first = 6, 3
    model = models.build(lambda: models.llama(num_hidden_layers=depth))
    adapter = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], layers_to_transform=list(range(first, depth)))
    model = get_peft_model(model, adapter)
    if checkpoints:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    engine = Engine(model, prefetch=1, recompute=recompute, micro_batch_size=1 if call == "micro" else None)
    parts = parts_of(engine)
    leave_spare_memory(engine)
    for seed in range(3):
        batch = models.tokens(seed)
        if call == "own":
            own_step_of(engine, lambda _model, batch=batch: model(**batch).loss)
        else:
            engine.step(batch)
    expected = 0
    for region in parts.regions:
        layer = next((int(part) for part in region.units[0].split(".") if part.isdigit()), -1)
        if not any(name in resident_names(engine) for name in region.units):
            expected += region.travelling_bytes * (2 if first <= layer < depth - 1 else 1)
    assert engine.counters.h2d_bytes == expected
