"""ReLoRA: runs with adapter restarts against twenty lines of plain PyTorch with PEFT."""

from __future__ import annotations

import copy
import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from offload.checkpoint.reader import Reader
from offload.engine.engine import Engine
from offload.errors import ConfigError
from offload.export import main as export_command
from offload.extras.adapters.restarts import LoraLayers, seed_of
from offload.generate import main as generate_command
from offload.parity import main as parity_command
from offload.verify import main as verify_command
from tests import forks
from tests.integrations.plain import SameBits, llama, needs
from tests.run_folder import cut
from tests.training.conftest import HOST
from tests.training.test_adapters import base, train_over_ranks, words  # noqa: F401

needs("peft")

from peft import LoraConfig, get_peft_model  # noqa: E402

STEPS, EVERY, WARMUP, PRUNE, LR = 9, 4, 2, 0.9, 1e-2
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "down_proj"], "use_rslora": True}
SETTINGS: dict[str, Any] = {
    "lora__rank": 4,
    "lora__target_modules": LORA["target_modules"],
    "lora__use_rslora": True,
    "lora__restart_every": EVERY,
    "lora__restart_prune": PRUNE,
    "lora__restart_warmup_steps": WARMUP,
    "train__steps": STEPS,
    "train__max_grad_norm": 0.5,
    "optimizer__lr": LR,
    "optimizer__weight_decay": 0.1,
    "optimizer__betas": (0.9, 0.999),
    "optimizer__warmup_steps": 0,
    "checkpoint__every": 3,
}
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": HOST,
    "nvme": {"offload__parameters": "nvme", "offload__optimizer": "nvme", "offload__gradients": "nvme"},
}


def relora(model: Any, batches: list[dict[str, torch.Tensor]], init: Any = True) -> Iterator[tuple[float, Any, Any]]:
    """Yield (loss, model, optimizer) after each step."""
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(**LORA, init_lora_weights=init))
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    optimizer = SameBits(model)
    for step, batch in enumerate(batches):
        restart, number = divmod(step, EVERY)
        if restart and not number:
            torch.manual_seed(seed_of(0, restart))
            for layer in layers:
                layer.merge()
                layer.merged_adapters.clear()
                layer.reset_lora_parameters("default", init)
            for state in optimizer.state.values():
                for moment in (state["exp_avg"], state["exp_avg_sq"]):
                    moment[moment.abs() <= torch.quantile(moment.abs(), PRUNE)] = 0
        for group in optimizer.param_groups:
            jagged = (number + 1) / WARMUP if restart and number < WARMUP else 1.0
            group["lr"] = jagged * (LR * 0.5 * (1 + math.cos(math.pi * (step / STEPS))))
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), model, optimizer


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Record the batches passed to `Engine.step`."""
    batches: list[dict[str, torch.Tensor]] = []
    make = Engine.step

    def step(self: Engine, batch: Any, loss: Any = None) -> Any:
        batches.append({key: value.clone() for key, value in batch.items()})
        return make(self, batch, loss)

    monkeypatch.setattr(Engine, "step", step)
    return batches


def stored(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return all flat tensors in a checkpoint, by parameter name and plane."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    with Reader(folder) as reader:
        for name, entry in reader.contents.items():
            for plane, dtype in entry.planes.items():
                found.setdefault(name, {})[plane] = value = torch.empty(math.prod(entry.shape), dtype=dtype)
                reader.read(name, plane, 0, value)
    return found


def assert_stored(folder: Path, model: Any, optimizer: Any, *, is_changed: bool = True) -> None:
    """Check the matrices and moments in a checkpoint, and the base weights if `is_changed`."""
    found, own = stored(folder), dict(model.named_parameters())
    wanted = [name for name in own if "lora_" in name or (is_changed and "base_layer" in name)]
    assert sorted(found) == sorted(wanted)
    for name, planes in found.items():
        assert torch.equal(planes["weights"], own[name].detach().view(-1)), name
        for plane in planes.keys() - {"weights"}:
            assert torch.equal(planes[plane], optimizer.state[own[name]][plane].view(-1)), (name, plane)


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal"])
def test_every_kind_of_layer_begins_anew_as_it_began(init: Any) -> None:
    """Break: initialize an embedding adapter like an orthogonal linear layer, although the matrices differ."""
    config = LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], init_lora_weights=init)
    model: Any = get_peft_model(llama(), config)
    layers = LoraLayers(model)
    begun = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    anew, again = layers.new_matrices(1), layers.new_matrices(2)
    assert anew.keys() == begun.keys()
    assert len(layers.weights) == 3
    for name, value in anew.items():
        assert value.shape == begun[name].shape
        assert value.any() == begun[name].any(), name
        assert value.any() == (not torch.equal(value, again[name])), name
    for weight in layers.weights:
        shape = dict(model.named_parameters())[weight].shape
        merged = layers.merge(weight, torch.zeros(shape), [anew[name] for name in layers.matrices(weight)])
        assert merged.abs().max() < 1e-6, "it changes no output"


@pytest.mark.slow
@pytest.mark.parametrize(("place", "init"), [*((place, True) for place in PLACES), ("cpu", "gaussian")])
def test_a_run_is_twenty_lines_of_pytorch(
    run: Any,
    base: Path,  # noqa: F811
    tmp_path: Path,
    seen: list[dict[str, torch.Tensor]],
    place: str,
    init: Any,
) -> None:
    """Equal bits: losses, adapter, changed base and moments at each checkpoint, also in the middle of a cycle.

    Resumed runs give the same bits, and text generation works from the export.
    """
    more = {"model__path": str(base), **SETTINGS, **PLACES[place], "offload__nvme_dir": str(tmp_path / "disk")}
    (tmp_path / "disk").mkdir()
    if init != True:  # noqa: E712
        more["lora__init"] = init
    whole, lines, said = run("whole", **more)
    told = "restart {}: the adapter is merged into 6 base weights and initialized again; 90% of its moments"
    assert all(f"step {EVERY * number}  {told.format(number)}" in said for number in (1, 2))
    assert f"reloaded: by transformers, from {whole.export}: logits equal within" in said
    reference = relora(AutoModelForCausalLM.from_pretrained(base), list(seen), init)
    for line, (loss, model, optimizer) in zip(lines, reference, strict=True):
        assert line["loss"] == loss
        if not line["step"] % 3:
            folder = whole.dir / "checkpoints" / f"step-{line['step']}"
            assert_stored(folder, model, optimizer, is_changed=line["step"] > EVERY)
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    exported = load_file(whole.export / "model.safetensors")
    assert all(torch.equal(value, merged[name]) for name, value in exported.items())
    for step in (3, 6):
        cut(whole.dir, f"from-{step}", *range(step + 3, STEPS + 1, 3))
        again, its, _ = run(f"from-{step}", **more | PLACES["device"])
        assert [line["loss"] for line in its] == [line["loss"] for line in lines]
        assert_stored(again.dir / "checkpoints" / f"step-{STEPS}", model, optimizer)
        assert (again.export / "model.safetensors").read_bytes() == (whole.export / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match=r"over a base with 6 changed weights .* with --merge"):
        export_command([str(whole.dir), str(tmp_path / "adapter")])
    assert export_command([str(whole.dir), str(tmp_path / "merged"), "--merge"]) == 0
    assert all(torch.equal(v, merged[n]) for n, v in load_file(tmp_path / "merged" / "model.safetensors").items())
    assert verify_command([str(whole.dir)]) == verify_command([str(whole.export)]) == 0
    assert generate_command([str(whole.export), "--prompt", "a number", "--max-new-tokens", "2"]) == 0


KILLED = """
import os, signal, sys
from offload.engine.engine import Engine
from offload.train import main
from tests.run_folder import cut

prune, pruned = Engine.prune_moments, []

def killing(self, names, share):
    prune(self, names, share)
    pruned.append(share)
    if len(pruned) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

Engine.prune_moments = killing
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_run_that_is_killed_in_a_restart_goes_on_to_the_same_bits(
    run: Any,
    base: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """SIGKILL comes after the merge and the moment pruning, before any save."""
    more = {"model__path": str(base), **SETTINGS, **PLACES["cpu"]}
    whole, lines, _ = run("whole", **more)
    killed = forks.run(["-c", KILLED, *words(tmp_path, "killed", **more)])
    assert killed.returncode == -signal.SIGKILL, killed
    assert not (tmp_path / "killed" / "checkpoints" / f"step-{STEPS}").exists()
    again, its, said = run("killed", **more)
    assert "resumed at step" in said
    assert [line["loss"] for line in its] == [line["loss"] for line in lines]
    mine, wanted = (stored(each.dir / "checkpoints" / f"step-{STEPS}") for each in (again, whole))
    assert mine.keys() == wanted.keys()
    assert all(torch.equal(mine[name][plane], wanted[name][plane]) for name in mine for plane in mine[name])
    assert (again.export / "model.safetensors").read_bytes() == (whole.export / "model.safetensors").read_bytes()


def assert_ranks_as_one(run: Any, tmp_path: Path, last: int, *later: int, **settings: Any) -> None:
    """Train in one process, in two ranks, and in two ranks without the checkpoints of the steps `later`.

    Equal up to the summation order. The resumed run equals the uninterrupted one, bit for bit.
    """
    alone, _, _ = run("alone", **settings)
    whole = train_over_ranks(tmp_path, "whole", **settings)
    cut(whole, "half", *later)
    folders = train_over_ranks(tmp_path, "half", **settings), whole, alone.dir
    half, wanted, one = (stored(folder / "checkpoints" / f"step-{last}") for folder in folders)
    assert half.keys() == wanted.keys() == one.keys()
    for name, planes in wanted.items():
        assert all(torch.equal(half[name][plane], value) for plane, value in planes.items()), name
        assert torch.allclose(planes["weights"], one[name]["weights"], atol=1e-3), name
    *others, its = (load_file(folder / "hf" / "model.safetensors") for folder in folders)
    assert all(torch.allclose(value, its[name], atol=1e-3) for each in others for name, value in each.items())


@pytest.mark.slow
def test_two_ranks_restart_as_one_process_does(run: Any, base: Path, tmp_path: Path) -> None:  # noqa: F811
    more = {"model__path": str(base), **SETTINGS, **PLACES["cpu"], "offload__zero_stage": 3}
    assert_ranks_as_one(run, tmp_path, STEPS, STEPS, **more)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_over_files_in_bf16_what_is_merged_rests_as_it_is_used(run: Any, base: Path, precision: str) -> None:  # noqa: F811
    """The merge adds in fp32 with the newest matrices, also with delayed updates, and rounds at most once."""
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    more = {"model__path": str(base), **SETTINGS, **PLACES["cpu"], "train__precision": precision, "train__delay": 1}
    result, _, said = run("run", **more | {"train__steps": 5, "checkpoint__every": 4, "lora__restart_prune": 1.0})
    assert "restart 1" in said
    assert f"reloaded: by transformers, from {result.export}" in said
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    before, after = (stored(result.dir / "checkpoints" / f"step-{step}") for step in (4, 5))
    files, exported = (load_file(folder / "model.safetensors") for folder in (base, result.export))
    changed = [name for name in after if "base_layer" in name]
    assert len(changed) == 6
    for name in changed:
        own = name.removeprefix("base_model.model.").replace(".base_layer", "")

        def merged(weight: torch.Tensor, states: dict[str, dict[str, torch.Tensor]], name: str = name) -> torch.Tensor:
            a, b = (states[name.replace("base_layer", f"lora_{each}.default")]["weights"] for each in "AB")
            delta = b.view(weight.shape[0], 4) @ a.view(4, weight.shape[1]) * (8 / math.sqrt(4))
            return (weight.float() + delta).to(dtype)

        once = merged(files[own], before)
        assert after[name]["weights"].dtype == dtype
        assert torch.equal(after[name]["weights"], once.view(-1)), name
        assert torch.equal(exported[own], merged(once, after)), name


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora__use_dora": True}, "with use_dora True"),
        ({"lora__target_modules": ["lm_head"]}, "share one weight"),
    ],
)
def test_what_cannot_restart_is_refused_before_the_first_step(
    run: Any,
    base: Path,  # noqa: F811
    seen: list[Any],
    settings: dict[str, Any],
    told: str,
) -> None:
    if settings.get("lora__target_modules"):
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        weights = load_file(base / "model.safetensors")
        del weights["lm_head.weight"]
        save_file(weights, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=told):
        run("run", **{"model__path": str(base), **SETTINGS, **settings})
    assert not seen


def test_parity_is_asked_of_steps_before_a_restart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set --steps to at most 4"):
        parity_command(["--steps", "5", "--lora.rank", "2", "--lora.restart_every", "4"])
