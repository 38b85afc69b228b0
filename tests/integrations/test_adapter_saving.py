"""All methods to save an adapter under an engine: each writes the same bytes as a resident run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save

from offload import AdamW, Engine
from offload.errors import ConfigError
from offload.integrations.saving import adapters_state
from tests.engine import ranks
from tests.engine.compare import same_bits
from tests.engine.device import cpu_only
from tests.integrations.plain import (
    CLIP,
    LR,
    PLACEMENT,
    SameBits,
    decays,
    llama,
    needs,
    offload_trainer,
    plain_trainer,
    rows,
)
from tests.matrix import quick

needs("accelerate", "peft")
pytestmark = cpu_only("accelerate does not know the simulated accelerator")

import peft  # noqa: E402
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict  # noqa: E402

from offload.integrations.transformers import OffloadTrainer  # noqa: E402
from tests.integrations import jobs  # noqa: E402
from tests.integrations.test_accelerate import Script  # noqa: E402

CASES: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "v_proj"]},
    "a whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    "dora, dropout": {"target_modules": ["q_proj"], "use_dora": True, "lora_dropout": 0.1},
    "parameters": {"target_modules": ["q_proj"], "target_parameters": ["down_proj.weight"]},
}
FILE = "adapter_model.safetensors"


def adapted(case: str) -> Any:
    model = llama()
    torch.manual_seed(5)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights="gaussian", **CASES[case])
    return get_peft_model(model, config)


def from_the_model(model: Any, folder: Path) -> Iterator[tuple[str, bytes]]:
    """Save in a script that holds only the model."""
    model.save_pretrained(folder / "model", save_embedding_layers=False)
    yield "model.save_pretrained", (folder / "model" / FILE).read_bytes()
    yield (
        "get_peft_model_state_dict",
        save(
            {
                name: value.contiguous()
                for name, value in get_peft_model_state_dict(model, save_embedding_layers=False).items()
            }
        ),
    )
    state = {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}
    yield "state_dict", save(state)
    torch.save(model.state_dict(), folder / "state.pt")
    loaded = torch.load(folder / "state.pt", weights_only=True)
    yield "torch.save", save({name: loaded[name].clone() for name in state})


def of_a_trainer(case: str, folder: Path, offloads: bool, reads: bool = True, **how: Any) -> dict[str, bytes]:
    """Train with checkpoints. The first checkpoint is the best one and is loaded at the end."""
    arguments: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "max_steps": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "kwargs": {"eval_dataset": rows()[:12]},
        **how,
    }
    model = adapted(case)
    trainer = (
        offload_trainer(folder, model, OffloadTrainer, **arguments)
        if offloads
        else plain_trainer(folder, model, **arguments)
    )
    torch.manual_seed(3)
    if not arguments.get("max_grad_norm", CLIP):
        trainer.optimizer = trainer.optimizer and SameBits(trainer.model, clip=0.0, decayed=decays(trainer.model))
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    if not trainer.args.should_save:  # not rank 0
        return {}
    found = {f"checkpoint-{step}": (folder / f"checkpoint-{step}" / FILE).read_bytes() for step in (1, 2, 3)}
    assert trainer.state.best_model_checkpoint == str(folder / "checkpoint-1")
    found["save_model"] = (folder / "saved" / FILE).read_bytes()
    assert len(set(found.values())) == 3, "the best was loaded and saved"
    if reads:
        found |= from_the_model(trainer.accelerator.unwrap_model(trainer.model), folder)
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
        found["push_to_hub"] = (folder / "pushed" / FILE).read_bytes()
    return found


def of_an_own_loop(case: str, folder: Path, offloads: bool) -> dict[str, bytes]:
    """Train in a custom loop."""
    model = adapted(case)
    batches = [{key: torch.stack([row[key] for row in rows(4, seed=seed)]) for key in rows(1)[0]} for seed in (1, 2)]
    if offloads:
        engine = Engine(model, AdamW(lr=LR, weight_decay=0.1, decay_1d=True), PLACEMENT, max_grad_norm=CLIP)
        for batch in batches:
            engine.backward(model(**batch).loss)
            engine.update()
    else:
        plain = SameBits(model)
        for batch in batches:
            model(**batch).loss.backward()
            plain.step()
            plain.zero_grad()
    return dict(from_the_model(model, folder))


def of_accelerate(case: str, folder: Path, offloads: bool) -> dict[str, bytes]:
    """Train in an accelerate script, and save with the documented calls."""
    script = Script(folder, offloads, model=lambda: adapted(case))
    script.run(2)
    model = script.accelerator.unwrap_model(script.model)
    state = script.accelerator.get_state_dict(script.model)
    model.save_pretrained(
        folder / "unwrapped", state_dict=state, save_function=script.accelerator.save, save_embedding_layers=False
    )
    return {"accelerate": (folder / "unwrapped" / FILE).read_bytes(), **dict(from_the_model(model, folder))}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated hub on the local disk."""

    def upload(*_: Any, folder_path: str, **__: Any) -> None:
        shutil.copytree(folder_path, Path(folder_path) / "pushed", ignore=lambda *_: ["pushed"], dirs_exist_ok=True)

    class Repository:
        repo_id = "me/adapter"

    def create(*_: Any, **__: Any) -> Repository:
        return Repository()

    # older and newer versions of Trainer use different owners
    for owner in (huggingface_hub.HfApi, transformers.trainer):
        for name, stand_in in (("create_repo", create), ("upload_folder", upload)):
            monkeypatch.setattr(owner, name, stand_in, raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["trainer", "own loop", "accelerate"])
def test_each_way_gives_the_bytes_of_a_resident_run(tmp_path: Path, way: str, case: str) -> None:
    found = []
    for offloads in (True, False):
        (folder := tmp_path / str(offloads)).mkdir()
        torch.manual_seed(3)
        if way == "trainer":
            more = {"push_to_hub": True, "hub_model_id": "me/adapter", "hub_strategy": "end", "hub_token": "none"}
            found.append(of_a_trainer(case, folder, offloads, **more))
        else:
            found.append((of_an_own_loop if way == "own loop" else of_accelerate)(case, folder, offloads))
    mine, wanted = found
    assert mine.keys() == wanted.keys()
    assert [name for name in wanted if mine[name] != wanted[name]] == []


@jobs.as_rank
def saved_by_ranks(folder: str, offloads: bool, zero_stage: int) -> dict[str, bytes]:
    """Return the files saved by rank 0. In ZeRO stage 3 a single rank cannot read the model and gets an error."""
    kwargs: dict[str, Any] = {"eval_dataset": rows()[:12]}
    if offloads:
        kwargs["offload"] = {"placement": PLACEMENT, "zero_stage": zero_stage}
    more = {"max_grad_norm": 0.0, "kwargs": kwargs}
    return of_a_trainer("a whole head", Path(folder), offloads, reads=not offloads or zero_stage < 3, **more)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_two_ranks_save_the_bytes_of_ddp(tmp_path: Path, zero_stage: int) -> None:
    mine, wanted = (
        ranks.run(2, saved_by_ranks, folder=str(tmp_path / str(offloads)), offloads=offloads, zero_stage=zero_stage)[0]
        for offloads in (True, False)
    )
    assert len(mine) == (4 if zero_stage == 3 else 8)
    assert [name for name in mine if mine[name] != wanted[name]] == []


class Normed(torch.nn.Module):
    """A module with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


def of_kind(kind: str) -> Any:
    """Return a PEFT model with an adapter type, or with untrained tensors that PEFT saves beside an adapter."""
    if kind == "running statistics":
        torch.manual_seed(5)
        model: Any = get_peft_model(Normed(), LoraConfig(r=4, target_modules=["inner"], modules_to_save=["norm"]))
        model.base_model.model.norm.modules_to_save["default"].running_mean.add_(3)
        return model
    lora = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    base = llama()
    torch.manual_seed(5)
    if kind in KINDS:
        settings = {"projection_prng_key": 1} if kind in ("VERA", "PVERA", "RANDLORA") else {}
        return get_peft_model(base, peft.PEFT_TYPE_TO_CONFIG_MAPPING[kind](**{**lora, **settings, **KINDS[kind]}))
    model = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, **lora))
    if kind == "a second adapter":
        model.add_adapter("reference", LoraConfig(r=2, init_lora_weights=False, **lora))
    else:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_B" in name)
    return model


KINDS: dict[str, dict[str, Any]] = {
    "VERA": {},
    "PVERA": {},
    "RANDLORA": {},
    "FROD": {},
    "DELORA": {},
    "ADALORA": {"total_step": 10},
    "VBLORA": {"num_vectors": 16, "vector_length": 8},
    "IA3": {"feedforward_modules": []},
    "LOHA": {},
    "LOKR": {},
    "BOFT": {},
    "OFT": {},
    "HRA": {},
    "FOURIERFT": {"n_frequency": 8},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"]},
}
BESIDE = ["a second adapter", "frozen first factors", "running statistics"]


@pytest.mark.parametrize("kind", quick([*BESIDE, *KINDS], [*BESIDE, "VERA"]))
def test_what_peft_saves_and_does_not_train_is_saved_as_it_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, compiler in (("CC", "gcc"), ("CXX", "g++")):  # BOFT sets both and leaves them set if its build fails
        monkeypatch.setenv(name, compiler)
    of_kind(kind).save_pretrained(tmp_path / "wanted")
    model = of_kind(kind)
    with closing(Engine(model, AdamW(lr=LR), PLACEMENT)) as engine:
        model.save_pretrained(tmp_path / "found", state_dict=adapters_state(engine))
    wanted = {path.relative_to(tmp_path / "wanted"): load_file(path) for path in (tmp_path / "wanted").rglob(FILE)}
    assert len(wanted) == (2 if kind == "a second adapter" else 1)
    for path, tensors in wanted.items():
        found = load_file(tmp_path / "found" / path)
        assert found.keys() == tensors.keys()
        assert [name for name in tensors if not same_bits(found[name], tensors[name])] == []


def test_an_export_of_the_whole_model_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    """The names of a model below an adapter fit neither PEFT nor transformers."""
    with closing(Engine(adapted("lora"))) as engine:
        with pytest.raises(ConfigError, match=r"model.save_pretrained\(folder\) writes the adapter"):
            engine.export(tmp_path / "export")
        assert not list(tmp_path.iterdir())
        engine.model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / FILE).is_file()
