"""TRL trainers over an engine against plain TRL trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForSequenceClassification, set_seed

from offload.checkpoint.reader import Reader
from offload.errors import ConfigError
from tests.integrations.plain import (
    SameBits,
    assert_same_run,
    assert_same_weights,
    decays,
    letters,
    llama,
    logged,
    needs,
    offload_trainer,
    plain_trainer,
)

needs("accelerate", "datasets", "trl")

import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl.trainer import grpo_trainer  # noqa: E402

from offload.integrations.transformers import OffloadMixin  # noqa: E402


class SFT(OffloadMixin, trl.SFTTrainer): ...


class DPO(OffloadMixin, trl.DPOTrainer): ...


class KTO(OffloadMixin, trl.KTOTrainer): ...


class Reward(OffloadMixin, trl.RewardTrainer): ...


class GRPO(OffloadMixin, trl.GRPOTrainer): ...


class Sampler:
    """In place of vLLM: samples from a model in memory, with the weights of the engine."""

    def __init__(self, **_: Any) -> None:
        self._model = llama().eval()
        self._dice = torch.Generator().manual_seed(1)
        self.held: list[int] = []
        """At each call, bytes of the device in the ledger of the engine."""
        self._iter_named_params: Any = None  # the engine's weights, from the Trainer

    def _fix_param_name_to_vllm(self, name: str) -> str:
        return name

    def _look(self) -> None:
        (trainer, _) = self._iter_named_params.args
        self.held.append(sum(num_bytes for tier, _, num_bytes in trainer.engine.allocations if tier == "device"))

    def sync_weights(self) -> None:
        self._look()
        self._model.load_state_dict(dict(self._iter_named_params()), strict=False)

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        self._look()
        completions, logs = [], []
        for prompt in prompts:
            ids, chances = list(prompt), []
            for _number in range(6):
                log_probs = self._model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                ids.append(int(torch.multinomial(log_probs.exp(), 1, generator=self._dice)))
                chances.append([float(log_probs[ids[-1]])])
            completions.append(ids[len(prompt) :])
            logs.append(chances)
        return prompts, completions, logs, None


TEXTS = [{"text": "the quick brown fox jumps over the lazy dog " * (1 + number % 3)} for number in range(32)]
PAIRS = [
    {"prompt": "say a word ", "chosen": "a good answer" + "." * (number % 4), "rejected": "bad answer"}
    for number in range(32)
]
JUDGED = [
    {"prompt": "say a word ", "completion": "an answer" + "." * (number % 4), "label": number % 3 > 0}
    for number in range(32)
]


def judge() -> LlamaForSequenceClassification:
    return llama(made=LlamaForSequenceClassification, num_labels=1, pad_token_id=0)


def adapted() -> Any:
    needs("peft")
    from peft import LoraConfig, get_peft_model

    model = llama()
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def number_of_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(each))) for each in completions]


CASES: dict[str, tuple[type, type, type, list[dict[str, Any]], dict[str, Any]]] = {
    "sft nll": (SFT, trl.SFTTrainer, trl.SFTConfig, TEXTS, {"max_length": 64, "loss_type": "nll"}),
    "sft padding_free": (SFT, trl.SFTTrainer, trl.SFTConfig, TEXTS, {"max_length": None, "padding_free": True}),
    "sft packing": (SFT, trl.SFTTrainer, trl.SFTConfig, TEXTS, {"max_length": 64, "packing": True}),
    "dpo": (DPO, trl.DPOTrainer, trl.DPOConfig, PAIRS, {"max_length": 64}),
    "kto": (KTO, trl.KTOTrainer, trl.KTOConfig, JUDGED, {"max_length": 64}),
    "reward": (Reward, trl.RewardTrainer, trl.RewardConfig, PAIRS, {"max_length": 64}),
    "grpo": (
        GRPO,
        trl.GRPOTrainer,
        trl.GRPOConfig,
        [{"prompt": "say a word "}] * 32,
        {"max_completion_length": 8, "num_generations": 4},
    ),
    "lora": (SFT, trl.SFTTrainer, trl.SFTConfig, TEXTS, {"max_length": 64, "loss_type": "nll"}),
}

ACCUMULATED = ("sft nll", "sft padding_free", "dpo", "kto", "grpo")
"""One case per loss type and batch layout. The other cases treat the rows in a step like one of these."""
FEW = ("sft nll", "dpo", "grpo", "lora")
"""One case each: TRL loss over the head, reference model, generated text, adapter."""


def made(name: str, folder: Path, offloads: bool, **more: Any) -> Any:
    kind, plain, arguments, data, settings = CASES[name]
    kwargs: dict[str, Any] = {"train_dataset": Dataset.from_list(data), "processing_class": letters()}
    if name in ("dpo", "kto"):
        kwargs["ref_model"] = llama()
    if name == "grpo":
        kwargs["reward_funcs"] = number_of_letters
    make = offload_trainer if offloads else plain_trainer
    kwargs |= more.pop("kwargs", {})
    model = kwargs.pop("model", None) or (judge() if name == "reward" else adapted() if name == "lora" else llama())
    more = {"bf16": False, **settings, **more}
    return make(folder, model, kind if offloads else plain, arguments, kwargs=kwargs, **more)


@pytest.mark.parametrize(
    ("name", "accumulation"),
    [
        *(pytest.param(n, 1, marks=[] if n in ("sft nll", "dpo") else pytest.mark.slow) for n in CASES),
        *(pytest.param(n, 4, marks=pytest.mark.slow) for n in ACCUMULATED),
    ],
)
def test_a_run_is_that_of_the_plain_trainer(tmp_path: Path, name: str, accumulation: int) -> None:
    """TRL enables gradient checkpointing by default."""
    how: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "max_steps": 2}
    plain, offloaded = (made(name, tmp_path, offloads, **how) for offloads in (False, True))
    for trainer in (plain, offloaded):
        set_seed(1)  # seed for GRPO sampling
        trainer.train()
    assert plain.args.gradient_checkpointing
    assert_same_run(offloaded, plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FEW, "kto"])
def test_a_run_is_evaluated_saved_and_resumed_and_its_best_loaded(tmp_path: Path, name: str) -> None:
    """Equal to the plain trainer, including moments. The chosen metric selects a checkpoint before the last."""
    how: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "greater_is_better": name != "kto",
        "per_device_eval_batch_size": 4,
        "kwargs": {"eval_dataset": Dataset.from_list(CASES[name][3][:4])},
    }
    plain, offloaded = (made(name, tmp_path / str(offloads), offloads, **how) for offloads in (False, True))
    for trainer in (plain, offloaded):
        set_seed(1)
        trainer.train()
    assert_same_run(offloaded, plain)
    assert len(logged(plain, "eval_loss")) == 3
    assert logged(offloaded, "eval_loss") == logged(plain, "eval_loss")
    best = plain.state.best_model_checkpoint
    assert not best.endswith("-3")
    assert offloaded.state.best_model_checkpoint == best.replace("False", "True")
    for step in (1, 2, 3):
        folders = [tmp_path / which / f"checkpoint-{step}" for which in ("False", "True")]
        (file,) = (each.name for each in folders[0].glob("*model.safetensors"))
        assert_same_weights(*(load_file(folder / file) for folder in reversed(folders)))
    resumed = made(name, tmp_path / "True", True, **how)
    set_seed(1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "True" / "checkpoint-2"))
    assert_same_run(resumed, plain)
    assert logged(resumed, "eval_loss") == logged(plain, "eval_loss")
    again, wanted = (tmp_path / which / "checkpoint-3" for which in ("True", "False"))
    assert_same_weights(load_file(again / file), load_file(wanted / file))
    assert_same_moments(again / "offload", wanted / "optimizer.pt", plain)


def assert_same_moments(folder: Path, file: Path, plain: Any) -> None:
    names = {id(parameter): name for name, parameter in plain.model.named_parameters()}
    order = [names[id(p)] for group in plain.optimizer.param_groups for p in group["params"]]
    states = torch.load(file)["state"]
    with Reader(folder) as reader:
        for name, state in zip(order, states.values(), strict=True):
            assert state["step"] == reader.meta["engine"]["updates"][name] == 3
            for plane in ("exp_avg", "exp_avg_sq"):
                found = torch.empty(state[plane].shape)
                reader.read(name, plane, 0, found)
                assert torch.equal(found, state[plane]), (name, plane)


REFERENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft nll", {}),
    "dpo, the adapter off": ("dpo", {}),
    "dpo, the adapter off, computed before": ("dpo", {"precompute_ref_log_probs": True}),
    "dpo, a copy of the adapter": ("dpo", {}),
    "grpo, the adapter off": ("grpo", {"beta": 0.1}),
    "grpo, a copy of the adapter": ("grpo", {"beta": 0.1}),
}
"""Reference policy: the base with the adapter off, or, for further training, the initial adapter."""


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCES)
def test_an_adapter_over_a_frozen_base(tmp_path: Path, name: str) -> None:
    """The reference needs no second model. The policy-reference distance equals the plain trainer, bit for bit."""
    needs("peft")
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights="gaussian")
    kind, settings = REFERENCES[name]
    runs: list[Any] = []
    for offloads in (False, True):
        torch.manual_seed(5)
        own: dict[str, Any] = {"ref_model": None} if kind == "dpo" else {}
        if name.endswith("copy of the adapter"):
            own["model"] = get_peft_model(llama(), config)
        else:
            own["peft_config"] = config
        runs.append(made(kind, tmp_path / str(offloads), offloads, **settings, kwargs=own))
        if not offloads:
            runs[0].optimizer = SameBits(runs[0].model, decayed=decays(runs[0].model))
        set_seed(1)
        runs[-1].train()
    plain, offloaded = runs
    assert_same_run(offloaded, plain)
    for key in {"dpo": ["rewards/margins", "logps/chosen"], "grpo": ["kl"]}.get(kind, []):
        assert logged(offloaded, key) == logged(plain, key)
        assert logged(plain, key)[-1] != 0, "the adapter is away from its reference by now"
    for folder, trainer in ((tmp_path / "plain", plain), (tmp_path / "saved", offloaded)):
        trainer.save_model(str(folder))
    assert_same_weights(*(load_file(tmp_path / each / "adapter_model.safetensors") for each in ("saved", "plain")))


def sampled(folder: Path, **how: Any) -> Any:
    """Return a GRPO trainer over an engine, with texts from `Sampler`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_trainer, "VLLMGeneration", Sampler)
        lent = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True}
        return made("grpo", folder, True, max_steps=3, **lent | how)


def test_the_device_is_lent_to_vllm_while_it_generates(tmp_path: Path) -> None:
    """Break: generate without `parked`."""
    runs = []
    for park in (True, False):
        trainer = sampled(tmp_path, gradient_accumulation_steps=2, kwargs={"park": park})
        trainer.train()
        held = trainer.vllm_generation.held
        assert len(held) == 6
        assert not any(held) if park else all(held)
        runs.append((logged(trainer), logged(trainer, "grad_norm"), dict(trainer.engine.named_parameters())))
    assert runs[0][:2] == runs[1][:2]
    assert runs[0][0]
    assert_same_weights(runs[0][2], runs[1][2])


def test_a_park_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use_vllm=True"):
        made("grpo", tmp_path, True, kwargs={"park": True})
    with pytest.raises(ConfigError, match="every 1 batches of a step of 2"):
        sampled(tmp_path, gradient_accumulation_steps=2, steps_per_generation=1, kwargs={"park": True})
    server = {"vllm_mode": "server", "vllm_importance_sampling_correction": False}  # else TRL asks the server first
    with pytest.raises(ConfigError, match="vllm_mode is 'server'"):
        sampled(tmp_path, **server, kwargs={"park": True})
    with pytest.raises(ConfigError, match="set vllm_enable_sleep_mode=True"):
        sampled(tmp_path, vllm_enable_sleep_mode=False, kwargs={"park": True})
