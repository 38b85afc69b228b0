"""Accelerate scripts with an engine against the same scripts without one."""

from __future__ import annotations

from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from offload import AdamW
from offload.errors import ConfigError
from tests.engine.compare import same_bits
from tests.integrations.plain import (
    CLIP,
    LR,
    PLACEMENT,
    SameBits,
    assert_same_weights,
    llama,
    needs,
    rows,
)

needs("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.utils import GradScalerKwargs, ProjectConfiguration  # noqa: E402

from offload.integrations.accelerate import OffloadAccelerator  # noqa: E402

EACH_NODE = ProjectConfiguration(save_on_each_node=True)


class Script:
    """A training script in the style of diffusers: each step accumulates, clips and schedules."""

    def __init__(self, folder: Path, offloads: bool, accumulation: int = 2, clip: float = CLIP, **more: Any) -> None:
        self.limit = clip if offloads else 1e9  # SameBits clips in the optimizer
        make = more.pop("model", llama)
        how: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "cpu": True, **more}
        kind = OffloadAccelerator if offloads else Accelerator
        if offloads:
            placement = {"parameters": "cpu", "optimizer": "cpu", "device_memory": "2MiB"}
            how.setdefault("offload", {"placement": placement})
        self.accelerator, self.folder, model = kind(project_dir=str(folder), **how), folder, make()
        decayed = [p for name, p in model.named_parameters() if "norm" not in name]
        others = [p for name, p in model.named_parameters() if "norm" in name]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        plain: Any = SameBits(model, clip, decayed=lambda name: "norm" not in name)
        optimizer = torch.optim.AdamW(groups, lr=LR, foreach=False) if offloads else plain
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        data = DataLoader(rows(16), batch_size=2)  # type: ignore[arg-type]
        prepared = self.accelerator.prepare(model, optimizer, data, schedule)
        self.model, self.optimizer, self.data, self.schedule = prepared
        self.losses: list[float] = []
        self.norms: list[float] = []

    def run(self, steps: int) -> None:
        accelerator = self.accelerator
        for batch in self.data:
            if steps == 0:
                break
            with accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    self.norms.append(float(accelerator.clip_grad_norm_(self.model.parameters(), self.limit)))
                    steps -= 1
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.accelerator.get_state_dict(self.model))


def test_what_is_saved_of_a_model_in_bf16_is_in_bf16(tmp_path: Path) -> None:
    """Every save call in a script: by the model, by accelerate, and by both."""
    script = Script(tmp_path, True, model=lambda: llama().to(torch.bfloat16))
    script.run(1)
    accelerator, model = script.accelerator, script.accelerator.unwrap_model(script.model)
    wanted, found = {key: value.clone() for key, value in model.state_dict().items()}, script.weights()
    accelerator.save_model(script.model, str(tmp_path / "whole"))
    model.save_pretrained(tmp_path / "folder", state_dict=dict(found))  # save_pretrained empties the dictionary
    for state in (found, *(load_file(tmp_path / name / "model.safetensors") for name in ("whole", "folder"))):
        assert state.keys() == wanted.keys()
        assert [name for name in wanted if not same_bits(state[name], wanted[name])] == []


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_script_runs_as_without_an_engine(
    tmp_path: Path, accumulation: int, recwarn: pytest.WarningsRecorder
) -> None:
    plain, offloaded = (Script(tmp_path, offloads, accumulation) for offloads in (False, True))
    for script in (plain, offloaded):
        script.run(2)
    assert offloaded.losses == plain.losses
    assert offloaded.norms == pytest.approx(plain.norms, rel=1e-6)
    assert offloaded.schedule.get_last_lr() == plain.schedule.get_last_lr()
    assert_same_weights(offloaded.weights(), plain.weights())
    assert offloaded.accelerator.unwrap_model(offloaded.model) is offloaded.model
    assert not [each for each in recwarn if "lr_scheduler" in str(each.message)]


class Hooked(Script):
    """Saves and loads the model in accelerate hooks, like the diffusers scripts. A subclass trains an adapter."""

    kind: Any = LlamaForCausalLM

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__(folder, True, **more)
        self.accelerator.register_save_state_pre_hook(self.on_save)
        self.accelerator.register_load_state_pre_hook(self.on_load)

    def on_save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        if self.accelerator.is_main_process:
            for model in models:
                assert isinstance(self.accelerator.unwrap_model(model), self.kind)
                self.accelerator.unwrap_model(model).save_pretrained(Path(folder) / "model")
                weights.pop()  # accelerate must not save the model again

    def on_load(self, models: list[Any], folder: str) -> None:
        for _ in range(len(models)):
            model = models.pop()  # accelerate must not load the model again
            loaded = self.kind.from_pretrained(folder, subfolder="model")
            model.config = loaded.config
            model.load_state_dict(loaded.state_dict())


class HookedAdapter(Hooked):
    def on_save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        from peft import get_peft_model_state_dict

        for model in models:
            assert isinstance(model, type(self.accelerator.unwrap_model(self.model)))
            save_file(get_peft_model_state_dict(model), f"{folder}/adapter.safetensors")
            if weights:
                weights.pop()

    def on_load(self, models: list[Any], folder: str) -> None:
        from peft import set_peft_model_state_dict

        model = models.pop()
        found = set_peft_model_state_dict(model, load_file(f"{folder}/adapter.safetensors"), adapter_name="default")
        assert not found.unexpected_keys


def with_adapter() -> Any:
    needs("peft")
    from peft import LoraConfig, inject_adapter_in_model

    model = llama().requires_grad_(False)
    torch.manual_seed(5)
    return inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), model)  # like add_adapter


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "precision"), [(Hooked, "no"), (HookedAdapter, "bf16")])
def test_hooks_of_a_script_save_and_load_the_model(tmp_path: Path, kind: Any, precision: str) -> None:
    """Hooks receive the model and save the engine weights. The engine trains on with the weights loaded by a hook."""
    how = {"mixed_precision": precision, **({"model": with_adapter} if kind is HookedAdapter else {})}
    whole = kind(tmp_path, **how)
    whole.run(1)
    whole.accelerator.save_state(str(tmp_path / "saved"))
    shown = whole.model.state_dict()
    if kind is Hooked:
        saved = load_file(tmp_path / "saved" / "model" / "model.safetensors")
        assert_same_weights(saved, {name: shown[name] for name in sorted(shown)})
    else:
        saved = load_file(tmp_path / "saved" / "adapter.safetensors")
        assert sorted(value.sum() for value in saved.values()) == sorted(
            value.sum() for name, value in shown.items() if "lora" in name
        )
    assert not list((tmp_path / "saved").glob("model*.safetensors"))
    whole.run(2)
    resumed = kind(tmp_path, **how)
    resumed.accelerator.load_state(str(tmp_path / "saved"))
    resumed.run(2)
    assert_same_weights(resumed.weights(), whole.weights())
    with pytest.raises(ConfigError, match=r"load_state_dict\(\)"):  # outside a hook
        resumed.model.load_state_dict(shown)


@pytest.mark.slow
def test_a_hook_can_neither_save_nothing_nor_load_other_weights(tmp_path: Path) -> None:
    runs = Script(tmp_path, True)
    runs.run(1)
    reads = runs.accelerator.register_save_state_pre_hook(lambda *_: None)
    for read in (lambda its: its.items(), dict, list, lambda its: its["x"], lambda its: torch.save(its, BytesIO())):
        reads.remove()
        reads = runs.accelerator.register_save_state_pre_hook(lambda _, weights, __, read=read: read(weights[0]))
        with pytest.raises(ConfigError, match=r"accelerator.get_state_dict\(model\) on all ranks"):
            runs.accelerator.save_state(str(tmp_path / "saved"))
    reads.remove()
    runs.accelerator.save_state(str(tmp_path / "saved"))
    loads = runs.accelerator.register_load_state_pre_hook(
        lambda models, folder: models[0].load_state_dict(llama().state_dict())
    )
    with pytest.raises(ConfigError, match="loads other values for model.embed_tokens.weight than"):
        runs.accelerator.load_state(str(tmp_path / "saved"))
    loads.remove()
    runs.accelerator.load_state(str(tmp_path / "saved"))
    runs.run(1)


def test_models_beside_the_engines_are_saved_and_loaded_as_ever(tmp_path: Path) -> None:
    accelerator, _, _ = prepared()
    other = accelerator.prepare(torch.nn.Linear(2, 2))
    wanted = {name: value.clone() for name, value in other.state_dict().items()}
    accelerator.save_state(str(tmp_path / "saved"))
    torch.nn.init.zeros_(other.weight)
    accelerator.load_state(str(tmp_path / "saved"))
    assert_same_weights(other.state_dict(), wanted)


def test_groups_of_the_optimizer_are_those_of_the_rule(tmp_path: Path) -> None:
    """The learning rates keep the ratio. A frozen model in the same script does not change.

    The optimizer may hold frozen parameters: a clip of all others is one of all that train.
    """
    accelerator = OffloadAccelerator(cpu=True, offload={"placement": PLACEMENT})
    model, frozen = llama(), llama().requires_grad_(False)
    model.model.norm.requires_grad_(False)
    head = list(model.lm_head.parameters())
    rest = [p for p in model.parameters() if all(p is not h for h in head)]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": head, "lr": LR / 10}]
    prepared = accelerator.prepare(model, torch.optim.AdamW(groups, lr=LR, weight_decay=0.0), frozen)
    model, optimizer, other = prepared
    assert other is frozen
    assert isinstance(accelerator.engine.optimizer, AdamW)
    assert [(scale, decay, len(names)) for scale, decay, names in accelerator.engine.groups] == [
        (1.0, 0.1, 19),
        (pytest.approx(0.1), 0.0, 1),
    ]
    batch = {key: value[None] for key, value in rows(1)[0].items()}
    assert torch.equal(frozen(**batch).loss, model(**batch).loss)
    accelerator.backward(model(**batch).loss)
    accelerator.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    assert accelerator.engine.lr == LR


def prepared(**more: Any) -> tuple[OffloadAccelerator, Any, Any]:
    """Return (accelerator, model, optimizer)."""
    accelerator = OffloadAccelerator(cpu=True, offload={"placement": PLACEMENT})
    model: Any = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR, **more))
    return accelerator, model, optimizer


def test_floats_for_a_model_in_bf16_are_refused_with_the_line_to_write() -> None:
    """Plain accelerate has autocast for them; bf16 tensors train."""
    accelerator = OffloadAccelerator(cpu=True, mixed_precision="bf16", offload={})
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model, optimizer = accelerator.prepare(layers, torch.optim.SGD(layers.parameters(), lr=0.1))
    for context in (torch.no_grad, nullcontext):
        with context(), pytest.raises(ConfigError, match=r"float32.*without the autocast.*x.to\(torch.bfloat16\)"):
            model(torch.randn(4, 8))
    accelerator.backward(model(torch.randn(4, 8).to(torch.bfloat16)).float().square().mean())
    optimizer.step()


class Scaled(nn.Module):
    """Multiplies by a matrix that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.register_buffer("matrix", torch.eye(8))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(self.embedding(input_ids), self.matrix)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("loop", ["engine.step", "script"])
def test_a_model_that_multiplies_bf16_by_its_own_floats_is_refused(loop: str) -> None:
    """Such as the matrices of VeRA, which are buffers."""
    accelerator = OffloadAccelerator(cpu=True, mixed_precision="bf16", offload={})
    layers, tokens = Scaled(), torch.arange(8).view(2, 4)
    model, _ = accelerator.prepare(layers, torch.optim.SGD(layers.parameters(), lr=0.1))
    step = accelerator.engine.step if loop == "engine.step" else lambda batch: model(**batch)
    with pytest.raises(ConfigError, match="its own float32 tensors, such as buffers.*--train.precision fp32"):
        step({"input_ids": tokens, "labels": tokens})


def over_all(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("model", "optimizer", "how", "told"),
    [
        (lambda: llama().to("meta"), over_all, {}, "embed_tokens.weight is on the device 'meta'"),
        (llama, over_all, {"kwargs_handlers": [GradScalerKwargs(init_scale=1.0)]}, "GradScalerKwargs.*own loss scale"),
        (llama, over_all, {"project_config": EACH_NODE}, "save_on_each_node.*a folder shared by all machines"),
        (llama, lambda _: over_all(llama()), {}, "not with the model that they train"),
        (
            llama,
            lambda model: torch.optim.AdamW(list(model.parameters())[:1]),
            {},
            "20 parameters with requires_grad are not in the optimizer, first model",
        ),
    ],
)
def test_what_cannot_be_prepared_is_refused(model: Any, optimizer: Any, how: dict[str, Any], told: str) -> None:
    made = model()
    with pytest.raises(ConfigError, match=told):
        OffloadAccelerator(cpu=True, **how).prepare(*([] if "train" in told else [made]), optimizer(made))


def test_a_second_model_is_refused() -> None:
    accelerator, _, _ = prepared()
    other = llama()
    with pytest.raises(ConfigError, match="a single engine, for a single model"):
        accelerator.prepare(other, over_all(other))
