"""The transformers Trainer with an engine against the same Trainer without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers import trainer as trainer_module
from transformers.training_args import OptimizerNames

from offload import SGD, AdamW, Engine, Lion
from offload.errors import ConfigError, MissingLibraryError
from offload.integrations import require_libraries
from offload.integrations.optimizer import OffloadOptimizer, find_own
from offload.integrations.rules import _NAMED, rule_of_arguments, without_decay
from tests.integrations.plain import (
    CLIP,
    LR,
    PLACEMENT,
    assert_same_run,
    assert_same_weights,
    common,
    letters,
    llama,
    logged,
    needs,
    offload_trainer,
    plain_trainer,
    rows,
)
from tests.matrix import quick

needs("accelerate")

from offload.integrations.transformers import (  # noqa: E402
    OffloadCallback,
    OffloadMixin,
    OffloadTrainer,
    offload_optimizer_factory,
)
from offload.integrations.wrap import open_engine  # noqa: E402


@pytest.mark.parametrize("accumulation", quick([1, 4], [4]))
def test_a_run_is_that_of_the_plain_trainer(tmp_path: Path, accumulation: int) -> None:
    how: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "gradient_checkpointing": accumulation == 4}
    plain = plain_trainer(tmp_path / "plain", llama(), **how)
    offloaded = offload_trainer(tmp_path / "offloaded", llama(), OffloadTrainer, **how)
    plain.train()
    offloaded.train()
    assert_same_run(offloaded, plain)


def test_what_is_saved_is_what_the_plain_trainer_saves(tmp_path: Path) -> None:
    """All files are compared: the final folder and a checkpoint, with extra engine states in the checkpoint."""
    how: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "kwargs": {"processing_class": letters()}}
    plain = plain_trainer(tmp_path / "plain", llama(), **how)
    offloaded = offload_trainer(tmp_path / "offloaded", llama(), OffloadTrainer, **how)
    for trainer in (plain, offloaded):
        trainer.train()
        trainer.save_model()
        trainer.save_model()  # overwrites the files
    for folder in (".", "checkpoint-2", "checkpoint-3"):
        there, here = tmp_path / "plain" / folder, tmp_path / "offloaded" / folder
        own = {"offload"} if folder != "." else set()
        assert {each.name for each in here.iterdir()} == {each.name for each in there.iterdir()} | own
        for file in filter(Path.is_file, there.iterdir()):
            if file.suffix in (".json", ".jinja") and file.name != "trainer_state.json":
                assert (here / file.name).read_text() == file.read_text(), file
        assert_same_weights(load_file(here / "model.safetensors"), load_file(there / "model.safetensors"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "offloaded")
    assert_same_weights(dict(loaded.named_parameters()), dict(plain.model.named_parameters()))


class OwnFolders(Trainer):
    """Saves and loads in its own way, like sentence-transformers."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        (Path(output_dir or str(self.args.output_dir)) / "card.md").write_text("own")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        self.model.save_pretrained(folder / "inner")
        (folder / "modules.json").write_text("{}")

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:  # type: ignore[override]
        self.model.load_state_dict(LlamaForCausalLM.from_pretrained(Path(checkpoint_path) / "inner").state_dict())


class OffloadedFolders(OffloadMixin, OwnFolders):
    pass


def files_in(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}


def test_a_trainers_own_ways_of_saving_and_loading_are_called(tmp_path: Path) -> None:
    how: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    plain = plain_trainer(tmp_path / "plain", llama(), OwnFolders, **how)
    offloaded = offload_trainer(tmp_path / "offloaded", llama(), OffloadedFolders, **how)
    for trainer in (plain, offloaded):
        trainer.train()
        trainer.save_model()
    assert files_in(tmp_path / "offloaded") == files_in(tmp_path / "plain")
    for folder in ("inner", "checkpoint-2/inner"):
        there, here = (load_file(tmp_path / way / folder / "model.safetensors") for way in ("plain", "offloaded"))
        assert_same_weights(here, there)
    begun = tmp_path / "plain" / "checkpoint-2"
    again = offload_trainer(tmp_path / "again", llama(), OffloadedFolders, **how)
    again.train(resume_from_checkpoint=str(begun))
    plain_again = plain_trainer(tmp_path / "plain again", llama(), OwnFolders, **how)
    plain_again.train(resume_from_checkpoint=str(begun))
    assert logged(again) == logged(plain_again)
    assert_same_weights(dict(again.engine.named_parameters()), dict(plain_again.model.named_parameters()))


class WithLoss(Trainer):
    """Trains a loss with parameters too, like sentence-transformers."""

    loss: nn.Module

    def create_optimizer(self, *_: Any) -> Any:
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.loss.parameters()])
        return self.optimizer


class OffloadedWithLoss(OffloadMixin, WithLoss):
    pass


def test_parameters_of_a_loss_are_named_as_such(tmp_path: Path) -> None:
    trainer = offload_trainer(tmp_path, llama(), OffloadedWithLoss)
    trainer.loss = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="the Trainer's loss, a Linear, has 2 own parameters .* first weight"):
        trainer.train()


OWN_WAYS = "_save save_model _load_from_checkpoint _load_best_model"
KNOWN = {"sentence_transformers": "_load_best_model _load_from_checkpoint _save"}


@pytest.mark.slow
def test_the_trainers_with_own_ways_to_save_are_known() -> None:
    """Their ways are called, except that the engine loads the best model. A new name here has to be looked at."""
    needs("trl")
    import sentence_transformers
    import trl

    found: dict[str, set[str]] = {}
    for library in (trl, sentence_transformers):
        for name in dir(library):
            each = getattr(library, name)
            if isinstance(each, type) and issubclass(each, Trainer):
                own = {way for way in OWN_WAYS.split() if getattr(each, way) is not getattr(Trainer, way)}
                found.setdefault(library.__name__, set()).update(own)
    assert {name: " ".join(sorted(ways)) for name, ways in found.items() if ways} == KNOWN


@pytest.mark.slow
def test_sentence_transformers_reads_what_its_trainer_saves(tmp_path: Path) -> None:
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
    from transformers import BertConfig, BertModel

    from tests.upstream.stand_ins import tokenizer

    spoken = tokenizer("plain")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(spoken), **sizes)).save_pretrained(tmp_path / "base")
    spoken.save_pretrained(tmp_path / "base")
    texts = ["beautiful is better", "explicit is better", "simple is better", "flat is better"]
    data = Dataset.from_list([{"sentence1": text, "sentence2": texts[0], "score": 0.5} for text in texts])
    model = st.SentenceTransformer(str(tmp_path / "base"), device="cpu")
    more: dict[str, Any] = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    args = st.SentenceTransformerTrainingArguments(output_dir=str(tmp_path / "run"), max_steps=2, save_steps=1, **more)
    offloaded: Any = type("Offloaded", (OffloadMixin, st.SentenceTransformerTrainer), {})
    loss = CosineSimilarityLoss(model)
    trainer = offloaded(model=model, args=args, train_dataset=data, loss=loss)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    wanted = torch.tensor(model.encode(texts))
    for folder in ("out", "run/checkpoint-2"):
        found = st.SentenceTransformer(str(tmp_path / folder), device="cpu").encode(texts)
        assert torch.equal(torch.tensor(found), wanted), folder


@pytest.mark.slow
@pytest.mark.parametrize("at", [2, 3], ids=["in an epoch", "at its end"])
def test_a_resumed_run_is_the_whole_one(tmp_path: Path, at: int) -> None:
    """Equal bits with dropout, in a new trainer and in a trainer that continues."""
    how: dict[str, Any] = {
        "max_steps": 5,
        "save_strategy": "steps",
        "save_steps": 1,
        "lr_scheduler_type": "cosine",
        "accelerator_config": {"use_seedable_sampler": at == 3},  # otherwise torch's generator orders the rows
        "kwargs": {"train_dataset": rows(12)},
    }
    whole = offload_trainer(tmp_path, llama(attention_dropout=0.1), OffloadTrainer, **how)
    whole.train()
    wanted = dict(whole.engine.named_parameters())
    resumed = offload_trainer(tmp_path, llama(attention_dropout=0.1), OffloadTrainer, **how)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert_same_weights(dict(resumed.engine.named_parameters()), wanted)
    assert logged(resumed) == logged(whole)
    if at == 2:  # a second train() would shuffle differently, like the plain trainer
        return
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert_same_weights(dict(resumed.engine.named_parameters()), wanted)


@pytest.mark.slow
def test_a_plain_trainer_takes_an_engine_as_its_optimizer(tmp_path: Path) -> None:
    """The callback logs the true norm. The run resumes bit for bit, and saved files hold the weights."""

    def made(**more: Any) -> Any:
        set_seed(0)
        own = {"lr": LR, "weight_decay": 0.1, "placement": PLACEMENT, "max_grad_norm": CLIP}
        how = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **more}
        return Trainer(
            llama(),
            TrainingArguments(**common(tmp_path, **how)),
            train_dataset=rows(),
            optimizer_cls_and_kwargs=(offload_optimizer_factory, own),
            callbacks=[OffloadCallback()],  # the factory adds the callback anyway
        )

    plain = plain_trainer(tmp_path / "plain", llama(), max_steps=4)
    plain.train()
    whole = made()
    whole.train()
    whole.engine = find_own(whole.optimizer).engine
    assert_same_run(whole, plain)
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    wanted = dict(whole.engine.named_parameters())
    assert all(torch.equal(found, wanted[name]) for name, found in saved.named_parameters())
    resumed = made()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    resumed.engine = find_own(resumed.optimizer).engine
    assert_same_run(resumed, plain)
    with pytest.raises(ConfigError, match="given max_grad_norm 0.5, but the Trainer's is 2"):
        made(max_grad_norm=2.0).train()
    assert all(moved > 0 for moved in logged(whole, "offload/bytes"))
    assert all(seconds >= 0 for seconds in logged(whole, "offload/exposed_seconds"))
    own = find_own(whole.optimizer)
    state = own.state_dict()
    own.load_state_dict(state)
    own.load_state_dict(state | {"updates": 7})
    with pytest.raises(ConfigError, match="7 updates, but the engine has made 4.*OffloadCallback"):
        own.step()


@pytest.mark.slow
@pytest.mark.parametrize("clip", [CLIP, 0.0])
def test_the_factory_alone_clips_as_its_trainer_says(tmp_path: Path, clip: float) -> None:
    """The Trainer finds no gradients and passes no clip limit; the callback is added automatically."""

    def made(**settings: Any) -> Any:
        set_seed(0)
        own = {"lr": LR, "weight_decay": 0.1, "placement": PLACEMENT, **settings}
        args = TrainingArguments(**common(tmp_path, max_grad_norm=clip))
        factory: Any = (offload_optimizer_factory, own)
        return Trainer(llama(), args, train_dataset=rows(), optimizer_cls_and_kwargs=factory)

    plain = plain_trainer(tmp_path / "plain", llama())
    plain.optimizer.clip = clip
    plain.train()
    assert max(plain.optimizer.optimizer.norms) > CLIP
    alone = made()
    alone.train()
    alone.engine = find_own(alone.optimizer).engine
    assert_same_run(alone, plain)
    with pytest.raises(ConfigError, match=rf"max_grad_norm 2.0, but the Trainer's is {clip}"):
        made(max_grad_norm=2.0).train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "is_made"),
    [("load_best_model_at_end", False), ("load_best_model_at_end", True), ("auto_find_batch_size", False)],
)
def test_a_plain_trainer_is_refused_what_it_would_stumble_over_later(
    tmp_path: Path, argument: str, is_made: bool
) -> None:
    """The best weights would be loaded after the last step, into a model that rejects them."""
    how = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1, argument: True}
    args, model = TrainingArguments(**common(tmp_path, **how)), llama()
    settings: dict[str, Any] = {"optimizer_cls_and_kwargs": (offload_optimizer_factory, {"placement": PLACEMENT})}
    if is_made:
        engine = Engine(model, AdamW(lr=LR), PLACEMENT, max_grad_norm=CLIP)
        settings = {"optimizers": (OffloadOptimizer(engine), None), "callbacks": [OffloadCallback()]}
    trainer = Trainer(model, args, train_dataset=rows(), eval_dataset=rows(4), **settings)
    with pytest.raises(ConfigError, match=argument):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_factory_that_is_called_while_another_model_trains_is_not_that_trainers(tmp_path: Path) -> None:
    found = []

    class ByHand(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            found.append(offload_optimizer_factory()(llama(), lr=LR, placement=PLACEMENT, max_grad_norm=2.0))

    plain = plain_trainer(tmp_path, llama(), kwargs={"callbacks": [ByHand()]}, max_steps=1)
    plain.train()
    assert found[0].engine.max_grad_norm == 2.0
    assert not any(isinstance(each, OffloadCallback) for each in plain.callback_handler.callbacks)


def test_what_does_not_go_with_an_engine_is_refused_by_name(tmp_path: Path) -> None:
    def refused(match: str, offload: Any = None, kwargs: Any = None, **more: Any) -> None:
        settings = {"offload": {"placement": PLACEMENT} | (offload or {}), **(kwargs or {})}
        with pytest.raises(ConfigError, match=match):
            offload_trainer(tmp_path, llama(), OffloadTrainer, kwargs=settings, **more).train()

    refused("auto_find_batch_size is True.*gradient_accumulation_steps", auto_find_batch_size=True)
    refused("torch_compile_backend is 'aot_eager'.*torch_compile=True is enough", torch_compile_backend="aot_eager")
    refused("torch_compile_mode is 'max-autotune'", torch_compile_mode="max-autotune")
    refused("optim is 'ademamix_8bit'.*adamw_torch, .*sgd.*states='int8'", optim="ademamix_8bit")
    refused("Adafactor uses the learning rate unchanged.*adamw_torch, ", optim="adafactor")
    refused("neither dampening nor Nesterov", optim="sgd", optim_args="momentum=0.9,nesterov=true")
    refused("save_on_each_node is True.*a folder shared by all machines", save_on_each_node=True)
    refused("bf16_full_eval is True.*set bf16=True", bf16_full_eval=True)
    how = {
        "load_best_model_at_end": True,
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
    }
    refused("save_only_model=False", save_only_model=True, kwargs={"eval_dataset": rows(4)}, **how)
    refused("offload has max_grad_norm=2.0, but the Trainer's arguments have 0.5", {"max_grad_norm": 2.0})
    refused("offload has 'prefetsch', which is not a setting", {"prefetsch": 2})
    refused("train.noise_scale is no longer a setting: measure", {"noise_scale": True})
    refused("precision='fp32', and the Trainer's arguments bf16=True", {"precision": "fp32"}, bf16=True)
    unclipped = {"precision": "fp32", "max_grad_norm": None}  # as 0, so the next difference is refused
    refused("precision='fp32', and the Trainer's arguments bf16=True", unclipped, bf16=True, max_grad_norm=0.0)
    spread = llama()
    spread.hf_device_map = {"model": 0, "lm_head": "disk"}
    with pytest.raises(ConfigError, match="device_map over 0, disk.*device_map=None"):
        open_engine(spread, AdamW(), {})
    model = llama()
    plain = torch.optim.AdamW(model.parameters())
    refused(
        "Trainer has a AdamW, and offload has the update rule SGD", {"optimizer": SGD()}, {"optimizers": (plain, None)}
    )
    saved = plain_trainer(tmp_path / "plain", llama(), save_strategy="steps", save_steps=3)
    saved.train()
    offloaded = offload_trainer(tmp_path, llama(), OffloadTrainer)
    with pytest.raises(ConfigError, match="has no folder 'offload': another trainer saved it"):
        offloaded.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-3"))


@pytest.mark.parametrize("name", [each.value for each in OptimizerNames])
def test_every_name_of_optim_is_a_rule_or_refused(name: str, tmp_path: Path) -> None:
    """A new optimizer name in transformers needs a decision: see `_NAMED`."""
    args = TrainingArguments(str(tmp_path), optim=name, use_cpu=True, report_to=[])
    if name not in _NAMED:
        with pytest.raises(ConfigError, match=f"optim is '{name}', and offload has no equivalent update rule.*sgd"):
            rule_of_arguments(args, ["a"], {"a"})
        return
    rule: Any = rule_of_arguments(args, ["a"], {"a"})
    kind = SGD if name == "sgd" else Lion if "lion" in name else AdamW
    assert type(rule) is kind
    assert getattr(rule, "states", "fp32") == ("int8" if "8bit" in name else "fp32")
    assert (rule.lr, rule.weight_decay) == (args.learning_rate, args.weight_decay)


@pytest.mark.slow
def test_bf16_computes_as_the_engine_does(tmp_path: Path) -> None:
    """No autocast: same as `engine.step` on the same batches. Saved weights are the fp32 masters."""
    trainer = offload_trainer(tmp_path, llama(), OffloadTrainer, bf16=True, lr_scheduler_type="constant")
    batches: list[Any] = []
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: batches.append(collate(rows)) or batches[-1]
    trainer.train()
    rule = without_decay(AdamW(lr=LR, weight_decay=0.1), [n for n, _ in llama().named_parameters() if "norm" in n])
    with Engine(llama(), rule, PLACEMENT, precision="bf16", max_grad_norm=CLIP) as engine:
        for number, batch in enumerate(batches[:3]):
            loss = engine.model(**batch, num_items_in_batch=int((batch["labels"][:, 1:] != -100).sum())).loss
            engine.backward(loss)
            engine.update()
            assert logged(trainer)[number] == pytest.approx(float(loss))
        wanted = dict(engine.named_parameters())
    assert_same_weights(dict(trainer.engine.named_parameters()), wanted)
    trainer.save_model()
    names = [name for name in wanted if name in load_file(tmp_path / "model.safetensors")]
    assert_same_weights(load_file(tmp_path / "model.safetensors"), {name: wanted[name] for name in sorted(names)})


def test_a_missing_library_is_named_with_the_extra() -> None:
    with pytest.raises(MissingLibraryError, match=r"needs none_such, which is not installed: pip install none_such"):
        require_libraries("transformers", "none_such")


def test_what_is_pushed_is_what_was_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The push at the end runs without a hub: the test inspects the folder at the upload call."""
    pushed: list[dict[str, torch.Tensor]] = []

    def upload_folder(*, folder_path: str, **_: Any) -> None:
        pushed.append(load_file(Path(folder_path) / "model.safetensors"))
        assert not list(Path(folder_path).glob(".*"))

    api = type("Api", (), {"upload_folder": staticmethod(upload_folder)})
    monkeypatch.setattr(trainer_module, "hf_api", lambda: api, raising=False)
    monkeypatch.setattr(trainer_module, "upload_folder", upload_folder, raising=False)
    trainer = offload_trainer(tmp_path, llama(), OffloadTrainer, max_steps=1)
    monkeypatch.setattr(trainer, "init_hf_repo", lambda **_: setattr(trainer, "hub_model_id", "none/such"))
    trainer.train()
    trainer.push_to_hub()
    trainer.args.push_to_hub = True
    trainer.save_model()
    wanted = dict(trainer.engine.named_parameters())
    for each in pushed:
        assert_same_weights(each, {name: wanted[name] for name in each})
        assert set(each) == set(wanted)
    assert len(pushed) == 2


@pytest.mark.slow
def test_a_model_that_is_made_anew_gets_an_engine_of_its_own(tmp_path: Path) -> None:
    """Each train() of a Trainer with model_init builds a new model."""
    trainer = offload_trainer(tmp_path, None, OffloadTrainer, kwargs={"model_init": lambda: llama()})
    trainer.evaluate(rows(4))
    first, found = trainer.engine, []
    for _ in range(2):
        set_seed(0)
        trainer.train()
        found.append(dict(trainer.engine.named_parameters()))
    assert first.closed
    assert not trainer.engine.closed
    assert_same_weights(*found)


@pytest.mark.slow
def test_gradients_of_a_run_that_was_interrupted_are_in_no_other(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    whole = offload_trainer(tmp_path / "whole", llama(), OffloadTrainer, max_steps=1, gradient_accumulation_steps=2)
    whole.train()
    trainer = offload_trainer(tmp_path / "cut", llama(), OffloadTrainer, max_steps=1, gradient_accumulation_steps=2)
    callback = Interrupt()
    trainer.add_callback(callback)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(callback)
    trainer.train()
    norms = [each.state.log_history[0]["grad_norm"] for each in (trainer, whole)]
    assert norms[0] == norms[1]


def test_weights_of_an_earlier_save_in_more_files_give_way(tmp_path: Path) -> None:
    """Otherwise from_pretrained would read the old files in the index."""
    old = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    for name in old:
        (tmp_path / name).write_text("of an earlier run")
    (tmp_path / "README.md").write_text("of the user")
    trainer = offload_trainer(tmp_path, llama(), OffloadTrainer, max_steps=1)
    trainer.train()
    trainer.save_model()
    assert not [name for name in old if (tmp_path / name).exists()]
    assert (tmp_path / "README.md").read_text() == "of the user"
    assert (tmp_path / "model.safetensors").is_file()
