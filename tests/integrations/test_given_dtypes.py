"""Reads and saves by scripts under precision bf16: the weights have the dtype and the bits of the model as given."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer

import offload
from tests.engine.device import cpu_only
from tests.integrations.plain import PLACEMENT, letters, llama, needs, offload_trainer, plain_trainer, reset_accelerate
from tests.matrix import quick

needs("accelerate", "peft")
pytestmark = cpu_only("accelerate does not know the simulated accelerator")

from accelerate import Accelerator  # noqa: E402
from peft import LoraConfig, PromptEncoderConfig, get_peft_model  # noqa: E402

from offload.integrations.accelerate import OffloadAccelerator  # noqa: E402
from offload.integrations.transformers import OffloadTrainer  # noqa: E402
from tests.training.test_read_back import contents  # noqa: E402

STREAMED = "model.layers.0.mlp.up_proj.weight"
READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "clone": lambda p: p.clone(),
    "a product": lambda p: p * 1,
    "float": lambda p: p.float(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "a view": lambda p: p.detach().t().t(),
    "a copy": copy.deepcopy,
    "cat": lambda p: torch.cat([p, p])[: len(p)],
}


def small(dtype: torch.dtype = torch.float32) -> Any:
    """Return a model whose first parameter stays on the device."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config).to(dtype)


def trained(way: str, model: Any, folder: Path) -> Any:
    """Return an engine after two steps in bf16 with a scheme of a script."""
    if way == "trainer":
        trainer = offload_trainer(folder, model, OffloadTrainer, max_steps=2, bf16=True)
        trainer.train()
        return trainer.engine
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "wrap":
        model, optimizer = offload.wrap(model, optimizer, placement=PLACEMENT, precision="bf16")
        engine, backward = optimizer.engine, torch.Tensor.backward
    else:
        accelerator = OffloadAccelerator(cpu=True, mixed_precision="bf16", offload={"placement": PLACEMENT})
        model, optimizer = accelerator.prepare(model, optimizer)
        engine, backward = accelerator.engine, accelerator.backward
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    return engine


@pytest.mark.parametrize("way", quick(["wrap", "accelerate", "trainer"], ["wrap"]))
def test_a_model_given_in_fp32_is_read_and_saved_in_fp32(way: str, tmp_path: Path) -> None:
    engine = trained(way, small(), tmp_path / "run")
    model, masters = engine.model, dict(engine.named_parameters())
    assert (masters[STREAMED] != masters[STREAMED].bfloat16().float()).any(), "the weights have more bits than bf16"
    for name, read in READS.items():
        value = read(model.get_parameter(STREAMED))
        assert value.dtype == torch.float32, name
        assert torch.equal(value.detach() + 0, masters[STREAMED]), name
    assert model.get_parameter(STREAMED).to(torch.bfloat16).dtype == torch.bfloat16
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in masters.items())
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in masters.items())
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["dtype"], config["use_cache"]) == ("float32", way != "trainer"), "the Trainer turns the cache off"
    assert not model.config.use_cache, "units stream without a cache"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(value, masters[name]) for name, value in loaded.named_parameters())
    engine.close(restore=True)
    assert "save_pretrained" not in vars(model)
    assert torch.equal(model.get_parameter(STREAMED), masters[STREAMED])


def test_a_model_given_in_bf16_stays_in_bf16(tmp_path: Path) -> None:
    engine = trained("wrap", small(torch.bfloat16), tmp_path)
    model = engine.model
    assert {value.dtype for value in (*model.parameters(), *model.state_dict().values())} == {torch.bfloat16}
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "bfloat16"
    engine.close()


@pytest.mark.parametrize("place", quick(["model", "model.layers.0.mlp"], ["model.layers.0.mlp"]))
def test_an_interrupted_forward_leaves_fp32_to_the_script(place: str, tmp_path: Path) -> None:
    """A script saves after Ctrl-C: hooks after a forward do not run then."""
    engine = trained("wrap", small(), tmp_path)
    model, masters = engine.model, dict(engine.named_parameters())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.get_submodule(place).register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    handle.remove()
    assert torch.equal(model.state_dict()[STREAMED], masters[STREAMED])
    engine.close()


def saved(way: str, folder: Path, *, bf16: bool, adapted: bool, offloads: bool) -> Path:
    """Return the folder that a script saves after a step, with or without an engine."""
    reset_accelerate()
    tokenizer = letters()  # the end (1) is not the end of the model
    model: Any = llama(eos_token_id=0, tie_word_embeddings=True)
    if adapted:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    if way == "trainer":
        make, kind = (offload_trainer, OffloadTrainer) if offloads else (plain_trainer, Trainer)
        trainer = make(folder, model, kind, max_steps=1, bf16=bf16, kwargs={"processing_class": tokenizer})
        trainer.train()
        trainer.save_model(str(folder))
        return folder
    more: dict[str, Any] = {"offload": {"placement": PLACEMENT}} if offloads else {}
    accelerator = (OffloadAccelerator if offloads else Accelerator)(
        cpu=True, mixed_precision="bf16" if bf16 else "no", **more
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.arange(8)[None]
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    accelerator.unwrap_model(model).save_pretrained(folder, max_shard_size="20KB")  # with an index
    tokenizer.save_pretrained(folder)
    return folder


CASES = [
    (way, bf16, adapted) for way in ("trainer", "accelerate") for bf16 in (True, False) for adapted in (False, True)
]


@pytest.mark.parametrize(("way", "bf16", "adapted"), quick(CASES, [("accelerate", True, False)]))
def test_every_key_that_a_script_saves_is_as_without_an_engine(
    way: str, bf16: bool, adapted: bool, tmp_path: Path
) -> None:
    """Files, configurations, tokenizer, index, and the dtype of each stored weight."""
    ours, theirs = (
        contents(saved(way, tmp_path / name, bf16=bf16, adapted=adapted, offloads=name == "ours"))
        for name in ("ours", "theirs")
    )
    assert ours == theirs


@pytest.mark.parametrize("budget", quick(["none", "160KiB"], ["160KiB"]))
def test_a_learned_prompt_is_saved_in_fp32(budget: str, tmp_path: Path) -> None:
    """PEFT saves the result of a forward. The engine computes in bf16 otherwise."""
    prompt = PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM")
    model: Any = get_peft_model(llama(), prompt)
    model.save_pretrained(tmp_path / "plain")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    model, optimizer = offload.wrap(model, optimizer, precision="bf16", device_memory=budget)
    ids = torch.arange(8)[None]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.save_pretrained(tmp_path / "ours")
    plain, ours = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "ours"))
    assert plain.keys() == ours.keys()
    assert all(torch.equal(ours[name], value) and ours[name].dtype == value.dtype for name, value in plain.items())
    optimizer.engine.close()
