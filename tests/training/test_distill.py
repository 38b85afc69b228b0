"""Distillation: TRL's loss with both models resident, equal bits on all tiers, and runs from a folder."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from offload import SGD, Engine, Placement
from offload.app.config.config import Config
from offload.app.config.sections import ModelSection
from offload.app.hf.companion import beside
from offload.app.hf.models import build_model, fill_all
from offload.engine.companions import add_companion
from offload.engine.loss.loss import Loss
from offload.errors import ConfigError
from offload.extras.adapters.adapters import as_base
from offload.extras.data.tokenizer import train_bpe
from offload.extras.distill.classes import record_type, top_classes
from offload.extras.distill.losses import Distillation, StoredDistillation, divergence
from offload.extras.distill.objective import FromTeacher
from offload.extras.distill.stored import StoredRows, TeacherClasses
from tests.engine.compare import weights
from tests.engine.device import own_device, twin
from tests.engine.inside import parts_of
from tests.integrations.plain import needs
from tests.matrix import matrix, quick
from tests.run_folder import SHAPE, assert_as_planned
from tests.training.conftest import HOST
from tests.training.test_resume import make_folder

VOCABULARY = 128
CHUNKS = {"head_chunk_bytes": 8 * VOCABULARY * 4}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "micro-batches": {"micro_batch_size": 2},
    "chunks": CHUNKS,
    "chunks, micro-batches, kept graphs": CHUNKS | {"micro_batch_size": 2, "recompute": "never"},
}


def student() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, initializer_range=0.3, use_cache=False))


def teacher() -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 16, "attention_dropout": 0.5}
    return Qwen3ForCausalLM(
        Qwen3Config(**sizes, **heads, vocab_size=VOCABULARY, initializer_range=0.3, use_cache=False)
    )


def rows() -> dict[str, torch.Tensor]:
    """Return rows with prompts and padding: without labels."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, VOCABULARY, (4, 24), generator=generator)
    mask = torch.ones_like(ids)
    mask[3, 17:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:2, :9] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    return {key: value.to(own_device()) for key, value in batch.items()}


def trained(model: Any, loss: Loss, batch: Any = None, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of two steps, and the weights of the student after them."""
    with Engine(model, SGD(lr=0.5), precision="fp32", max_grad_norm=None, **settings) as engine:
        losses = [engine.step(batch or rows(), loss).loss.item() for _ in range(2)]
        return losses, weights(engine)


def both(frozen: Any = None, **options: Any) -> tuple[Any, Distillation]:
    """Return a student with a teacher as a companion, and the loss."""
    model, frozen = student(), frozen or teacher()
    add_companion(model, "teacher", frozen)
    return model.train(), Distillation(frozen, **options)


def train_by_trl(prepare: Callable[[Any, Any], tuple[Any, Any]], **options: float) -> tuple[list[float], Any]:
    """Return the losses of two steps of plain PyTorch with TRL's divergence, and the student after them.

    prepare: returns what TRL compares, from logits of student and teacher.
    """
    needs("trl")
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    model, frozen, batch = twin(student()), twin(teacher()).eval(), rows()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    for _ in range(2):
        with torch.no_grad():
            of_teacher = frozen(**inputs).logits[:, :-1]
        compared = prepare(model(**inputs).logits[:, :-1], of_teacher)
        divergence = GKDTrainer.generalized_jsd_loss(*compared, batch["labels"][:, 1:], **options)
        optimizer.zero_grad()
        divergence.backward()
        optimizer.step()
        losses.append(divergence.item())
    return losses, model


def assert_trained_alike(found: tuple[list[float], dict[str, torch.Tensor]], wanted: tuple[list[float], Any]) -> None:
    (losses, own), (plain_losses, model) = found, wanted
    assert losses == pytest.approx(plain_losses, abs=1e-6, rel=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(own[name], parameter.detach().cpu(), atol=2e-6), name


@matrix(beta=[0.0, 0.3, 1.0], way=[*WAYS], strength=1)
def test_loss_and_weights_are_trls(beta: float, way: str) -> None:
    """Break: swap teacher and model in `divergence`; let `model.train()` reach the teacher's dropout; count padding."""
    wanted = train_by_trl(lambda own, others: (own, others), beta=beta, temperature=2.0)
    assert_trained_alike(trained(*both(beta=beta, temperature=2.0), **WAYS[way]), wanted)


TOP_K = 5


def stored() -> dict[str, torch.Tensor]:
    """Return rows with the classes of the teacher, measured by an engine."""
    frozen, batch = teacher(), rows()
    frozen.lm_head.requires_grad_(False)
    wanted = TeacherClasses(2.0, TOP_K, VOCABULARY)
    with Engine(frozen, precision="fp32", **CHUNKS) as engine:
        engine.evaluate(batch, wanted.loss)
    labels = batch["labels"].cpu().numpy()
    ends = (labels[:, 1:] != -100).sum(1).cumsum()
    values = StoredRows(Path(), wanted.taken(), ends).of(np.arange(len(labels)), labels)
    return {key: value.to(own_device()) for key, value in (batch | values).items()}


def of_classes(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of `ids` and of all others together."""
    from trl.experimental.server_distillation.server_distillation_trainer import _add_tail_bucket

    return _add_tail_bucket(log_probs.gather(-1, ids), torch.ones_like(ids, dtype=torch.bool))[0]


@pytest.mark.slow
@matrix(beta=[1.0, 0.3, 0.0], way=[*WAYS], strength=1)
def test_the_first_tokens_and_all_others_are_trls(beta: float, way: str) -> None:
    """TRL's divergence over the most probable tokens of the teacher and a tail bucket. Break: leave out the other
    tokens; take the most probable tokens of the model; store the classes of the next token.
    """

    def prepare(own: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits of classes: their log-probabilities."""
        of_teacher = (others / 2.0).log_softmax(-1)
        ids = of_teacher.topk(TOP_K).indices
        return of_classes((own / 2.0).log_softmax(-1), ids), of_classes(of_teacher, ids)

    wanted = train_by_trl(prepare, beta=beta)
    kept = StoredDistillation(record_type(TOP_K, VOCABULARY), beta, temperature=2.0)
    for found in (
        trained(*both(beta=beta, temperature=2.0, top_k=TOP_K), **WAYS[way]),
        trained(student().train(), kept, batch=stored(), **WAYS[way]),
    ):
        assert_trained_alike(found, wanted)


def test_the_others_are_never_a_difference_from_one() -> None:
    """Break: compute the probability of the other tokens as 1 minus that of the first."""
    logits = torch.tensor([[40.0, 0.0, -20.0, -20.0]])
    classes = top_classes(logits, 1.0, 1)
    assert classes.log_probs[0, 1] == pytest.approx(-40, rel=1e-6)
    assert classes.of(logits.log_softmax(1)).equal(classes.log_probs)


def test_a_share_of_the_labels_is_their_cross_entropy() -> None:
    """Break: give the labels the other share."""
    losses = {share: trained(*both(beta=0.5, labels=share), **CHUNKS)[0][0] for share in (0.0, 0.25)}
    model = student()
    with Engine(model, SGD(lr=0.5), precision="fp32", max_grad_norm=None) as engine:
        of_labels = engine.step(rows()).loss.item()
    assert losses[0.25] == pytest.approx(0.75 * losses[0.0] + 0.25 * of_labels, rel=1e-6)


def adapted() -> Any:
    """Return the student with an adapter that changes its logits."""
    needs("peft")
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT about transformers
        return get_peft_model(student(), config).train()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_base_of_an_adapter_is_a_teacher_without_a_copy(way: str) -> None:
    """Break: let the adapter compute for the teacher, in the layers or in the head."""
    with_copy, frozen = adapted(), student()
    add_companion(with_copy, "teacher", frozen)
    wanted, wanted_weights = trained(with_copy, Distillation(frozen), **WAYS[way])
    model = adapted()
    losses, own = trained(model, Distillation(model.get_base_model(), within=as_base), **WAYS[way])
    assert losses == wanted
    assert all(torch.equal(value, wanted_weights[name]) for name, value in own.items())


def test_a_base_computes_in_eval_mode() -> None:
    """Break: leave the modules in train mode; leave them in eval mode."""
    model: Any = adapted()
    base, trainable = model.get_base_model(), [each.requires_grad for each in model.parameters()]
    base.config.attention_dropout = 0.5
    for layer in base.model.layers:
        layer.self_attn.attention_dropout = 0.5
    ids = {"input_ids": rows()["input_ids"].cpu()}
    with as_base(list(base.modules())), torch.no_grad():
        assert torch.equal(base(**ids).logits, student()(**ids).logits)
    assert all(module.training for module in base.modules())
    assert [each.requires_grad for each in model.parameters()] == trainable
    assert not torch.equal(model.eval()(**ids).logits, student().eval()(**ids).logits)


@pytest.fixture
def num_lines() -> int:
    return 150


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder("llama", tmp_path / "base")
    return tmp_path / "base"


class Bare(nn.Module):
    """A teacher without a base model, whose forward alone has logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = teacher()

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def test_a_teacher_without_a_base_model_has_logits_of_all_tokens() -> None:
    """Break: take the head in chunks without a look at the base model."""
    wanted, _ = trained(*both(), **CHUNKS)
    losses, _ = trained(*both(Bare()), **CHUNKS)
    assert losses == pytest.approx(wanted, rel=1e-6)


class ByPlace(Qwen3ForCausalLM):
    """A teacher whose head depends on the places of tokens in a row."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        places = torch.arange(outputs.logits.shape[1], device=outputs.logits.device)
        outputs.logits = outputs.logits * places.cos()[:, None]
        return outputs


def test_a_teacher_whose_head_needs_all_tokens_has_them_at_once() -> None:
    """A few tokens show this before the first step. Break: leave the comparison with plain PyTorch out."""
    wanted, _ = trained(*both(ByPlace(teacher().config)))
    with pytest.warns(match="From here on all logits are computed at once, despite head_chunk_bytes"):
        losses, _ = trained(*both(ByPlace(teacher().config)), **CHUNKS)
    assert losses == pytest.approx(wanted, rel=1e-6)


def test_the_backward_below_the_head_begins_without_values_of_the_teacher() -> None:
    """The backward computes the layers again. Break: keep the term until the end of the step."""
    model, loss = both()
    alive: list[bool] = []
    refs: list[weakref.ref[torch.Tensor]] = []

    def keep(_module: Any, _inputs: Any, hidden: torch.Tensor) -> None:
        refs.append(weakref.ref(hidden))

    def look(_module: Any, _inputs: Any, _output: Any) -> None:
        alive.append(any(ref() is not None for ref in refs))

    model.companions["teacher"].model.norm.register_forward_hook(keep)
    model.model.layers[0].mlp.register_forward_hook(look)
    trained(model, loss, **CHUNKS, recompute="always")
    assert alive[-2:] == [True, False]


def test_slots_hold_both_heads() -> None:
    """They alternate over chunks of tokens. Here a head is the largest unit. Break: leave the heads out of `_slots`."""
    model, frozen = (LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=384)) for _ in range(2))
    head_bytes = model.lm_head.weight.nbytes
    add_companion(model, "teacher", frozen)
    placement = Placement(parameters="cpu", optimizer="cpu")
    with Engine(model, SGD(lr=0.5), precision="fp32", placement=placement, prefetch=0) as engine:
        slots = [num_bytes for _, name, num_bytes in engine.allocations if name.startswith("unit slot")]
    assert slots == [2 * head_bytes]


def test_a_filled_model_has_the_weights_of_the_teacher(folder: Path) -> None:
    """Break: fill the trained model alone."""
    write_wide(folder / "wide")
    built, other = (build_model(ModelSection(path=str(path)), seed=0) for path in (folder, folder / "wide"))
    model = fill_all(beside(built, "teacher", other))
    wanted = load_file(folder / "wide" / "model.safetensors")
    assert all(model.get_parameter(f"companions.teacher.{name}").equal(value) for name, value in wanted.items())


def test_the_teacher_has_the_logits_of_one_chunk_at_a_time() -> None:
    """Break: yield the chunks from a loop, whose variable keeps the last one."""
    model, loss = both()
    alive: list[int] = []
    refs: list[weakref.ref[torch.Tensor]] = []

    def watch(_module: Any, _inputs: Any, logits: torch.Tensor) -> None:
        if logits.shape[1] == 8:  # a chunk
            alive.append(sum(ref() is not None for ref in refs))
            refs.append(weakref.ref(logits))

    model.companions["teacher"].lm_head.register_forward_hook(watch)
    trained(model, loss, **CHUNKS)
    assert len(alive) > 8
    assert max(alive) == 0


@pytest.mark.parametrize("settings", [CHUNKS, {}], ids=["chunks", "whole"])
def test_a_batch_without_a_target_is_refused(settings: Any) -> None:
    """Break: let the mean over no tokens be NaN."""
    model, loss = both()
    batch = {**rows(), "labels": torch.full_like(rows()["labels"], -100)}
    with Engine(model, SGD(lr=0.5), **settings) as engine, pytest.raises(ConfigError, match="the batch has no target"):
        engine.step(batch, loss)


def test_a_teacher_in_bf16_leaves_an_fp32_model_in_the_precision_of_the_run() -> None:
    """A model with weights in both dtypes has fp32 for a reason. Break: look at the dtypes of both models at once."""
    model, loss = both(teacher().bfloat16())
    with Engine(model, SGD(lr=0.5), precision="bf16") as engine:
        engine.step(rows(), loss)
        assert {info.compute for info in parts_of(engine).infos if not info.companion} == {"bf16"}


def test_a_companion_is_in_no_checkpoint_and_no_export(tmp_path: Path) -> None:
    """The student is stored as if it had been alone. Break: leave out `without_companions`."""
    model, loss = both()
    with Engine(model, SGD(lr=0.5), precision="fp32") as engine:
        engine.step(rows(), loss)
        engine.save_checkpoint(tmp_path / "saved")
        engine.export(tmp_path / "export")
        wanted = weights(engine)
    with safe_open(tmp_path / "export" / "model.safetensors", "pt") as file:
        assert not any(name.startswith("companions.") for name in file.keys())  # noqa: SIM118
    alone = student()
    with Engine(alone, SGD(lr=0.5), precision="fp32") as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert all(torch.equal(value, wanted[name]) for name, value in weights(engine).items())
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path / "export").lm_head.weight, wanted["lm_head.weight"])


def test_reads_and_edits_are_of_the_trained_model_unless_named() -> None:
    """An edit of a companion is in no checkpoint. Break: yield all parameters of the engine."""
    model, _ = both()
    own = [name for name, _ in student().named_parameters()]
    named = "companions.teacher.model.norm.weight"
    with Engine(model) as engine:
        assert list(weights(engine)) == own
        assert [name for name, _ in engine.edit()] == own
        assert [name for name, _ in engine.named_parameters(names=[named])] == [named]
        for _, value in engine.edit([named]):
            value.zero_()
        assert not dict(engine.named_parameters(names=[named]))[named].any()


@pytest.mark.parametrize("tied", ["before", "after"])
def test_a_companion_with_weights_of_the_model_is_refused(tied: str) -> None:
    """They would no longer train. Break: freeze the companion unseen; look when it is added alone."""
    model, frozen = student(), student()
    if tied == "before":
        frozen.model.embed_tokens = model.model.embed_tokens
    add_companion(model, "teacher", frozen)
    if tied == "after":
        frozen.model.embed_tokens = model.model.embed_tokens
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight is shared with a companion"):
        Engine(model)
    assert all(each.requires_grad for each in model.model.parameters())


def test_a_companion_is_added_before_the_engine() -> None:
    """The engine would not stream it. Break: compare the parameters alone."""
    model = student()
    with Engine(model, SGD(lr=0.5)) as engine:
        add_companion(model, "teacher", teacher())
        with pytest.raises(ConfigError, match=r"companions was added after Engine\(\) was created"):
            engine.step(rows())


def test_a_copy_of_a_model_has_a_companion_too() -> None:
    """It stays frozen and in eval mode, and no checkpoint has it. Break: know companions as objects."""
    model, _ = both()
    model = copy.deepcopy(model).train()
    frozen = model.companions["teacher"]
    assert not frozen.training
    with Engine(model, SGD(lr=0.5), precision="fp32") as engine:
        engine.step(rows(), Distillation(frozen))
        assert [name for name, _ in engine.named_parameters()] == [name for name, _ in student().named_parameters()]


def test_a_name_in_use_is_refused() -> None:
    model, _ = both()
    with pytest.raises(ConfigError, match="has companions already, or one of the name 'teacher'"):
        add_companion(model, "teacher", nn.Linear(2, 2))


# -- runs --------------------------------------------------------------------------------------------------------------


def asked(folder: Path, **more: Any) -> dict[str, Any]:
    own = {"data__tokenizer": str(folder), "train__method": "distill", "distill__teacher": str(folder)}
    return own | {"train__steps": 4, "optimizer__lr": 3e-3, **HOST} | more


@pytest.mark.parametrize("frozen_weights", quick(["exact", "nf4"], ["exact"]))
def test_a_run_learns_resumes_and_exports(run: Any, folder: Path, tmp_path: Path, frozen_weights: str) -> None:
    """The teacher may have moved. Break: leave the teacher out of `fill`; save the teacher in a checkpoint; count it
    among the weights of the run.
    """
    if frozen_weights == "nf4":
        write_wide(folder)
    coded = {"offload__frozen_weights": frozen_weights}
    _, lines, out = run("run", **asked(folder, checkpoint__every=2, checkpoint__keep=4, **coded))
    losses = [line["loss"] for line in lines]
    assert losses[-1] < losses[0]
    assert "token probabilities of the teacher" in out
    stored = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    assert f"LlamaForCausalLM, {sum(each.numel() for each in stored.values()):,} parameters" in out
    moved, folder = folder, tmp_path / "moved"
    moved.rename(folder)
    saved = str(tmp_path / "run" / "checkpoints" / "step-2")
    _, more, _ = run("more", **asked(folder, checkpoint__resume=saved, **coded))
    assert [line["loss"] for line in more] == losses[2:]
    one, other = (tmp_path / name / "hf" / "model.safetensors" for name in ("run", "more"))
    assert one.read_bytes() == other.read_bytes()
    weights_file = folder / "model.safetensors"
    save_file({name: each + 1 for name, each in load_file(weights_file).items()}, weights_file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"step-2 is of a run with another distill\.teacher than .*moved"):
        run("other", **asked(folder, checkpoint__resume=saved, **coded))


PRIME = 2053
"""A vocabulary: a tensor whose count of numbers is a multiple of it has numbers of all tokens in the vocabulary."""


class LargestLogits(TorchDispatchMode):
    """Notes the most tokens with numbers of the whole vocabulary in a result of torch."""

    num_tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if not isinstance(each, torch.Tensor) or each.device.type == "meta" or each.dtype == torch.uint8:
                continue  # a plan has shapes alone, and a copy of a weight is in bytes
            if each.numel() % PRIME == 0:
                self.num_tokens = max(self.num_tokens, each.numel() // PRIME)
        return results


@pytest.mark.parametrize("kind", quick(["equal", "other", "stored"], ["equal"]))
def test_logits_of_all_tokens_never_exist(run: Any, folder: Path, tmp_path: Path, kind: str) -> None:
    """In trials, steps, evaluations and after a resume. If a model begins as its teacher, the gradients of the
    divergence are rounding errors. Break: compare these for a trial of the chunks; run the teacher's head on all tokens
    anywhere.
    """
    for path in folder, tmp_path / "other":
        shape = SHAPE | {"max_position_embeddings": 256, "vocab_size": PRIME}
        LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(path)
    own = {"model__path": str(folder), "train__batch_size": 2, "data__sequence_length": 256, "train__eval_every": 1}
    own |= {"train__head_chunk_bytes": 64 * PRIME * 4, "checkpoint__every": 1}
    if kind != "equal":
        own["distill__teacher"] = str(tmp_path / "other")
    if kind == "stored":
        own |= {"distill__way": "stored", "distill__top_k": 7}
    with LargestLogits() as logits:
        run("run", **asked(folder, **own | {"train__steps": 1}))
        run("run", **asked(folder, **own | {"train__steps": 2, "checkpoint__resume": "auto"}))
    assert logits.num_tokens == 64


@pytest.mark.slow
@pytest.mark.parametrize("way", ["beside", "stored"])
def test_the_plan_is_the_run(run: Any, with_plan: None, folder: Path, tmp_path: Path, way: str) -> None:
    """Break: measure the head of the teacher with every token; keep its hidden states until the end of the step; count
    the teacher among the parameters.
    """
    own = {"offload__device_memory": "1MiB", "train__head_chunk_bytes": 16 * 384 * 4, "train__recompute": "always"}
    own |= {"distill__way": way, "distill__top_k": 64}
    _, lines, _ = run("run", **asked(folder, **own, train__steps=5))
    plan = assert_as_planned(tmp_path / "run")
    stored = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    assert plan["num_parameters"] == sum(each.numel() for each in stored.values())
    device = plan["tiers"]["device"]["bytes"] + plan["lent_bytes"]
    assert lines[-1]["peak_device_bytes"] == pytest.approx(device, rel=0.02)


def write_wide(folder: Path) -> None:
    """Write a model with matrices of at least 4096 elements, the fewest in codes."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=384)).save_pretrained(folder)


@pytest.mark.slow
def test_an_adapter_learns_from_its_base_without_a_copy(
    run: Any, with_plan: None, folder: Path, tmp_path: Path
) -> None:
    """The run equals one with a copy of the folder, and takes less memory. Break: build the base as a
    companion; compare the names and not the folders.
    """
    write_wide(folder)
    copied = shutil.copytree(folder, tmp_path / "copied")
    own = asked(folder, model__path=f"{folder}/../{folder.name}", lora__rank=4, distill__labels=0.5)
    _, lines, out = run("run", **own)
    assert "the teacher is the base of the adapter" in out
    _, wanted, said = run("with-copy", **own | {"distill__teacher": str(copied)})
    assert "the teacher is the base" not in said
    assert [line["loss"] for line in lines] == [line["loss"] for line in wanted]
    files = [tmp_path / name / "hf" / "adapter_model.safetensors" for name in ("run", "with-copy")]
    assert files[0].read_bytes() == files[1].read_bytes()
    plans = [assert_as_planned(tmp_path / name) for name in ("run", "with-copy")]
    base_bytes = sum(each.nbytes for each in load_file(folder / "model.safetensors").values())
    planned = [sum(tier["bytes"] for tier in plan["tiers"].values()) for plan in plans]
    assert planned[0] < planned[1] - base_bytes / 2


@pytest.mark.slow
def test_a_resumed_adapter_learns_from_its_base_too(run: Any, folder: Path, tmp_path: Path) -> None:
    """Break: take the reduced base of PiSSA for the teacher."""
    own = asked(folder, model__path=str(folder), lora__rank=4)
    _, wanted, _ = run("run", **own, checkpoint__every=2, checkpoint__keep=4)
    saved = str(tmp_path / "run" / "checkpoints" / "step-2")
    _, lines, out = run("more", **own, checkpoint__resume=saved)
    assert "the teacher is the base of the adapter" in out
    assert [line["loss"] for line in lines] == [line["loss"] for line in wanted[2:]]
    _, _, out = run("reduced", **own, lora__init="pissa")
    assert "the teacher is the base" not in out


def other_tokens(folder: Path) -> Path:
    """Write a tokenizer trained on another text."""
    train_bpe([f"{number} sheep" for number in range(300)], 384).save_pretrained(folder / "other")
    return folder / "other"


def test_refusals(run: Any, folder: Path, tmp_path: Path) -> None:
    """Break: leave out a refusal."""
    with pytest.raises(ConfigError, match=r"distill\.teacher is not set"):
        run("run", **asked(folder, distill__teacher=None))
    with pytest.raises(ConfigError, match="train.method sft has no teacher"):
        run("run", **asked(folder, train__method="sft"))
    with pytest.raises(ConfigError, match=r"other numbers for \d+ tokens of 384, such as"):
        run("run", **asked(folder, data__tokenizer=str(other_tokens(tmp_path))))
    own = asked(folder, model__preset="tiny")
    with pytest.raises(ConfigError, match="probabilities for 384 tokens, but the model has 2,048"):
        run("run", without=("model__path",), **own)
    with pytest.raises(ConfigError, match="a teacher does not share rows over ranks"):
        run("run", **asked(folder, train__sequence_parallel=2))
    LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=384, max_position_embeddings=64)).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"positions for 64 tokens, but data\.sequence_length is 96"):
        run("run", **asked(folder, data__sequence_length=96))
    with pytest.raises(ConfigError, match=r"distill\.teacher is .*config\.json, which has no weights"):
        run("run", **asked(folder, distill__teacher=str(folder / "config.json")))
    with pytest.raises(
        ConfigError, match=r"distill\.teacher is .*nowhere, which does not exist; set --distill\.teacher"
    ):
        run("run", **asked(folder, distill__teacher=str(folder / "nowhere")))
    file = folder / "model.safetensors"
    stored = load_file(file)
    del stored["lm_head.weight"]
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"the files of .*base lack lm_head\.weight\. .* all weights"):
        run("run", **asked(folder))
    AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", vocab_size=384, **SHAPE)).save_pretrained(folder)
    with pytest.raises(ConfigError, match="a model of the kind masked: only causal"):
        run("run", **asked(folder))


def test_a_router_loss_and_more_tensors_are_not_left_out_in_silence(run: Any, folder: Path, tmp_path: Path) -> None:
    """More tensors, such as layers for speculative decoding. Break: say nothing; refuse a teacher for any note."""
    write_wide(folder)
    weights_file = folder / "model.safetensors"
    save_file(load_file(weights_file) | {"mtp.proj.weight": torch.zeros(2)}, weights_file, {"format": "pt"})
    make_folder("mixtral", tmp_path / "experts")
    file = tmp_path / "experts" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"output_router_logits": True}))
    _, _, out = run("run", **asked(folder, model__path=str(file.parent), train__steps=1))
    assert f"{folder}: 1 of the weights are not read: the model has no place for them (mtp.proj.weight)." in out
    assert "output_router_logits of the model's configuration has no effect" in out


def test_a_teacher_has_the_attention_of_the_run(folder: Path) -> None:
    """Break: leave model.attention out of the teacher's settings."""
    config = Config.load(
        overrides={"distill.teacher": str(folder), "train.method": "distill", "model.attention": "eager"}
    )
    teachers = FromTeacher.companions(config, student(), lambda section: build_model(section, seed=0))
    assert teachers["teacher"].model.config._attn_implementation == "eager"


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_tokens_that_a_teacher_rules_out_add_nothing(beta: float) -> None:
    """Break: leave out the mask: 0 * -inf."""
    torch.manual_seed(0)
    logits, of_teacher = torch.randn(3, 6, requires_grad=True), torch.randn(3, 6)
    of_teacher[:, 4:] = -torch.inf
    found = divergence(logits.log_softmax(1), of_teacher.log_softmax(1), beta)
    student, teacher = logits.softmax(1), of_teacher.softmax(1)
    mixture = (1 - beta) * student + beta * teacher
    possible = teacher[:, :4]
    wanted = (possible * (possible / mixture[:, :4]).log()).sum(1)
    if beta:
        wanted = beta * wanted + (1 - beta) * (student * (student / mixture).log()).sum(1)
    torch.testing.assert_close(found, wanted)
    slopes = [torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (found, wanted)]
    torch.testing.assert_close(*slopes)


def test_packed_documents_stay_below_the_rope_limit_of_the_teacher(run: Any, folder: Path, tmp_path: Path) -> None:
    """Break: look at the limit of the trained model alone."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **factors}
    config = LlamaConfig(**SHAPE, vocab_size=384, max_position_embeddings=64, rope_parameters=rope)
    shutil.copytree(folder, tmp_path / "long")
    LlamaForCausalLM(config).save_pretrained(tmp_path / "long")
    own = asked(folder, distill__teacher=str(tmp_path / "long"), data__packing=True, data__packing_isolated=True)
    with pytest.raises(ConfigError, match="beyond 16 tokens a model has other rotary frequencies"):
        run("run", **own)


@pytest.mark.parametrize("way", quick(["beside", "stored"], ["beside"]))
def test_a_teacher_that_mixes_the_documents_of_a_row_is_refused(run: Any, folder: Path, way: str) -> None:
    """Break: test the trained model alone."""
    make_folder("mamba", folder)
    packed = {"data__packing": True, "data__packing_isolated": True, "distill__way": way, "distill__top_k": 7}
    with pytest.raises(ConfigError, match="documents .*would not be isolated"):
        run("run", **asked(folder, **packed))
