"""Preference training: TRL's losses on the same pairs, equal bits on all tiers, and resumed runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from offload import SGD, Trainer
from offload.app.config.config import Config
from offload.app.stored_model import REFERENCE
from offload.engine.companions import add_companion
from offload.engine.engine import Engine
from offload.engine.loss.group_loss import GroupLoss
from offload.errors import ConfigError, DoesNotFitError
from offload.extras.data.tokenizer import train_bpe
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.extras.prefs.beside import DPOBeside
from offload.extras.prefs.losses import DPO, ORPO, LogProbs, Reward
from offload.extras.prefs.preferences import Preferences
from tests.integrations.plain import letters, llama, needs
from tests.matrix import quick
from tests.run_folder import write_rows
from tests.training.conftest import HOST, SHAPES, interrupted_measurement, lines_of
from tests.training.test_resume import make_folder

WORDS = ("apple", "plum", "rose", "stone", "sea", "snow", "coal", "wood")
CHUNKS = {"head_chunk_bytes": 8 * 64 * 4}
WAYS: dict[str, dict[str, Any]] = {"whole": {}, "chunks": CHUNKS, "chunks, two passes": CHUNKS | {"passes": 2}}
TEXTS = [
    {"prompt": f"say {word} ", "chosen": f"a {word}" + " fine" * (i % 3), "rejected": f"no {word}" + "." * (i % 4)}
    for i, word in enumerate(WORDS[:4])
]


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Is there a {word}?"}],
            "chosen": [{"role": "assistant", "content": "Yes, it is there." + "!" * times}],
            "rejected": [{"role": "assistant", "content": "No, go away."}],
        }
        for word in WORDS
        for times in range(3)
    ]
    return str(write_rows(tmp_path / "pairs.jsonl", rows))


def asked(pairs: str, method: str = "dpo", **more: Any) -> dict[str, Any]:
    own = {"data__source": pairs, "train__method": method, "optimizer__lr": 3e-3, "data__sequence_length": 48}
    return own | {"train__steps": 2, "train__batch_size": 3, "checkpoint__export": False} | more


# -- TRL ---------------------------------------------------------------------------------------------------------------


def interleaved(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    return torch.stack([chosen, rejected], 1).flatten(0, 1)


def trainer(kind: str, folder: Path, model: Any, rows: list[dict[str, Any]], **more: Any) -> Any:
    """Return an unmodified TRL trainer."""
    needs("accelerate", "datasets", "trl")
    import trl
    from datasets import Dataset

    if kind == "ORPO":
        from trl.experimental import orpo as trl
    elif kind == "DPO":
        more["ref_model"] = llama(initializer_range=0.2)
    own = {key: more.pop(key) for key in ("center_rewards_coefficient",) if key in more}
    arguments = getattr(trl, f"{kind}Config")(
        str(folder), per_device_train_batch_size=len(rows), report_to="none", bf16=False, use_cpu=True,
        gradient_checkpointing=False, max_length=64, **own,
    )  # fmt: skip
    data = Dataset.from_list(rows)
    return getattr(trl, f"{kind}Trainer")(
        model=model, args=arguments, train_dataset=data, processing_class=letters(), **more
    )


def engine_loss(model: Any, batch: dict[str, torch.Tensor], loss: GroupLoss) -> float:
    with Engine(model, head_chunk_bytes=16 * 64 * 4) as engine:
        return float(engine.step(batch, loss).loss)


def test_dpo_is_trls(tmp_path: Path) -> None:
    """Break: use the reference log-probability of the neighbour row; use the mean instead of the sum."""
    theirs = trainer("DPO", tmp_path, llama(), TEXTS)
    given = next(iter(theirs.get_train_dataloader()))
    wanted = float(theirs.compute_loss(theirs.model, given))
    own = {key: interleaved(*given[key].chunk(2)) for key in ("input_ids", "attention_mask")}
    is_answer = interleaved(*given["completion_mask"].chunk(2))
    batch = own | {"labels": own["input_ids"].masked_fill(is_answer == 0, -100)}
    reference = LogProbs()
    with Engine(llama(initializer_range=0.2)) as engine:
        engine.evaluate(batch, reference)
    batch["reference"] = torch.zeros(batch["labels"].shape)
    batch["reference"][:, 0] = reference.metrics["log_probs"]
    assert engine_loss(llama(), batch, DPO(0.1)) == pytest.approx(wanted, abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_a_reference_beside_the_model_is_the_measured_one(way: str) -> None:
    """Also in two passes. Break: sum the values of both answers; let the reference compute in train mode."""
    ids = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[:, :5] = -100
    labels[1, 17:] = -100
    batch = {"input_ids": ids, "labels": labels}
    measured = LogProbs()
    with Engine(llama(initializer_range=0.2)) as engine:
        engine.evaluate(batch, measured)
    values = torch.zeros(labels.shape)
    values[:, 0] = measured.metrics["log_probs"]
    model, reference = llama(), llama(initializer_range=0.2, attention_dropout=0.5)
    add_companion(model, "reference", reference)
    found = {
        name: trained_twice(each, given, loss, **WAYS[way])
        for name, each, given, loss in (
            ("stored", llama(), {**batch, "reference": values}, DPO(0.1)),
            ("beside", model.train(), batch, DPOBeside(0.1, reference)),
        )
    }
    assert found["beside"] == pytest.approx(found["stored"], abs=1e-6, rel=1e-6)


def trained_twice(model: Any, batch: dict[str, torch.Tensor], loss: GroupLoss, **settings: Any) -> list[float]:
    """Return the losses of two steps."""
    with Engine(model, SGD(lr=0.5), precision="fp32", **settings) as engine:
        return [float(engine.step(batch, loss).loss) for _ in range(2)]


def test_orpo_is_trls(tmp_path: Path) -> None:
    """One pair at a time: TRL counts the prompt in the first term. The mean over pairs follows the paper."""
    wanted, rows = [], []
    for text in TEXTS[1:3]:
        theirs = trainer("ORPO", tmp_path, llama(), [text])
        given = next(iter(theirs.get_train_dataloader()))
        wanted.append(float(theirs.get_batch_loss_metrics(theirs.model, given)[0]))
        rows += [{key: given[f"{side}_{key}"] for key in ("input_ids", "labels")} for side in ("chosen", "rejected")]
    length = max(row["input_ids"].shape[1] for row in rows)

    def padded(key: str, value: int) -> torch.Tensor:
        return torch.cat([torch.nn.functional.pad(r[key], (0, length - r[key].shape[1]), value=value) for r in rows])

    mask = torch.cat([torch.arange(length)[None] < row["input_ids"].shape[1] for row in rows]).long()
    batch = {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}
    loss = ORPO(0.1)
    batch = Preferences("orpo", loss, labels_prompt=True).apply(batch, 0)
    assert engine_loss(llama(), batch, loss) == pytest.approx(sum(wanted) / len(wanted), abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("centering", quick((0.0, 0.01), [0.01]))
def test_a_reward_models_loss_is_trls(tmp_path: Path, centering: float) -> None:
    def judge() -> Any:
        return llama(made=LlamaForSequenceClassification, num_labels=1, pad_token_id=0)

    theirs = trainer("Reward", tmp_path, judge(), TEXTS, center_rewards_coefficient=centering or None)
    given = next(iter(theirs.get_train_dataloader()))
    wanted = float(theirs.compute_loss(theirs.model, dict(given)))
    own = {key: interleaved(*given[key].chunk(2)) for key in ("input_ids", "attention_mask")}
    batch = own | {"labels": own["input_ids"]}
    assert engine_loss(judge(), batch, Reward(centering)) == pytest.approx(wanted, abs=1e-6, rel=1e-6)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "orpo", "reward"])
def test_a_streamed_run_has_the_bits_of_a_resident_one_and_learns(run: Any, pairs: str, method: str) -> None:
    more: dict[str, Any] = {"train__steps": 6, "checkpoint__export": True}
    _, there, said = run("resident", **asked(pairs, method, **more))
    _, here, again = run("streamed", **asked(pairs, method, **more, **HOST))
    for key in ("loss", "grad_norm", "rewards/chosen", "rewards/margins"):
        assert [line[key] for line in here] == [line[key] for line in there]
    assert here[-1]["h2d_bytes"] > 0 == there[-1]["h2d_bytes"]
    assert there[-1]["rewards/accuracies"] == there[-1]["eval_rewards/accuracies"] == 1.0
    assert there[-1]["loss"] < there[0]["loss"]
    assert there[-1]["rewards/margins"] > there[0]["rewards/margins"]
    assert "logits bit-equal" in said
    assert "logits bit-equal" in again
    assert "accuracy 1.00  margin " in said
    assert ("reference: " in said) == (method == "dpo")
    assert "reference: " not in again, "the weights and the data are the same, and their log-probabilities known"
    if method == "dpo":
        assert there[0]["loss"] == pytest.approx(0.693147, abs=1e-6)


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_bits(run: Any, pairs: str, tmp_path: Path) -> None:
    """A checkpoint stores the reference log-probabilities. The trained weights can no longer produce them."""
    settings = asked(pairs, checkpoint__every=1, checkpoint__export=True)
    _, whole, _ = run("halved", **settings)
    shutil.rmtree(tmp_path / "cache/offload/reference")
    for name in ("checkpoints/step-2", "hf"):
        assert (tmp_path / "halved" / name / REFERENCE).exists() == name.startswith("checkpoints")
        shutil.rmtree(tmp_path / "halved" / name)
    assert (tmp_path / "halved/checkpoints/step-1" / REFERENCE).stat().st_size == 4 * 2 * len(WORDS) * 3
    _, again, said = run("halved", **settings)
    assert "reference: " not in said
    assert [(line["loss"], line.get("eval_loss")) for line in again] == [
        (line["loss"], line.get("eval_loss")) for line in whole
    ]


@pytest.mark.slow
def test_a_resumed_run_refuses_other_evaluation_rows(run: Any, pairs: str, tmp_path: Path) -> None:
    """With equally many answers. Break: take the stored values by their number."""
    lines = Path(pairs).read_text().splitlines(keepends=True)
    evaluated = tmp_path / "evaluated.jsonl"
    evaluated.write_text("".join(lines[:6]))
    kept = {"checkpoint__every": 1, "checkpoint__keep": 4, "data__eval_share": 0.0}
    own = asked(pairs, data__eval_source=str(evaluated), **kept)
    _, wanted, _ = run("run", **own)
    saved = {"checkpoint__resume": str(tmp_path / "run" / "checkpoints" / "step-1")}
    _, again, _ = run("again", **own, **saved)
    assert [line["loss"] for line in again] == [line["loss"] for line in wanted[1:]]
    evaluated.write_text("".join(lines[5::-1]))
    with pytest.raises(ConfigError, match=r"reference\.f32 has .* for other rows: the evaluation data has changed"):
        run("other", **own, **saved)


@pytest.mark.slow
def test_another_model_is_the_reference(run: Any, pairs: str, tmp_path: Path) -> None:
    """It has the values that it would have as the initial model, and a resumed run does without it. Break: measure the
    initial model; compare no files of a reference that is there.
    """
    for number, name in enumerate(("one", "other")):
        make_folder("llama", tmp_path / name, number, torch.float32)
    kept = {"checkpoint__every": 1, "checkpoint__keep": 4, "train__head_chunk_bytes": 16 * 384 * 4}

    def values(name: str, path: str, **more: Any) -> tuple[list[float], bytes]:
        _, lines, _ = run(name, **asked(pairs, model__path=str(tmp_path / path), **kept, **more, **HOST))
        return [line["loss"] for line in lines], (tmp_path / name / "checkpoints/step-1" / REFERENCE).read_bytes()

    _, wanted = values("alone", "other")
    reference = tmp_path / "other"
    losses, found = values("compared", "one", prefs__reference=str(reference))
    assert found == wanted != values("initial", "one")[1]
    reference.rename(tmp_path / "gone")
    saved = str(tmp_path / "compared" / "checkpoints" / "step-1")
    own = asked(pairs, model__path=str(tmp_path / "one"), checkpoint__resume=saved)
    _, lines, _ = run("more", **own, prefs__reference=str(reference), **kept, **HOST)
    assert [line["loss"] for line in lines] == losses[1:]
    with pytest.raises(ConfigError, match=r"step-1 is of a run with another prefs\.reference than .*one"):
        run("changed", **own, prefs__reference=str(tmp_path / "one"), **kept, **HOST)


def compared_with_big(pairs: str, folder: Path) -> tuple[dict[str, Any], int]:
    """Return the words of a run with a reference larger than its model, and the bytes of the reference."""
    make_folder("llama", folder / "one")
    shape = {**SHAPES["llama"], "hidden_size": 128, "intermediate_size": 512}
    big = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=384))
    big.save_pretrained(folder / "big")
    own = asked(pairs, model__path=str(folder / "one"), prefs__reference=str(folder / "big"), **HOST)
    return own, sum(each.nbytes for each in big.parameters())


@pytest.mark.slow
def test_a_plan_counts_the_reference_that_is_measured_first(pairs: str, tmp_path: Path) -> None:
    """Break: plan the trained model alone; count the backward of the reference; let its parameters train."""
    own, weight_bytes = compared_with_big(pairs, tmp_path)
    machine = read_machine("rtx-4090")
    overrides = {key.replace("__", "."): value for key, value in own.items()}

    def planned(**more: Any) -> Forecast:
        config = Config.load(overrides=overrides | more)
        return Forecaster(config, 1).predict(config, machine, times=False)

    memory = planned().memory
    first = memory.before["prefs.reference"]
    assert weight_bytes <= first.named_host_bytes < 1.1 * weight_bytes
    assert "unit inputs" not in {each.name for each in first.allocations}
    assert planned(**{"prefs.way": "beside"}).memory.before == {}
    small = planned(**{"offload.host_memory": memory.named_host_bytes + weight_bytes // 2})
    assert not small.fits
    assert "(prefs.reference runs before the first step)" in small.shortage


@pytest.mark.slow
def test_a_reference_that_does_not_fit_is_named(run: Any, with_plan: None, pairs: str, tmp_path: Path) -> None:
    """Break: leave the error of the engine as it is."""
    own, weight_bytes = compared_with_big(pairs, tmp_path)
    with pytest.raises(DoesNotFitError, match=r"prefs\.reference is .*big, .* With all that a step needs"):
        run("run", **own, offload__host_memory=weight_bytes)


@pytest.mark.slow
def test_a_run_with_the_reference_beside(run: Any, pairs: str, tmp_path: Path) -> None:
    """Its losses are those of a measured reference, also after a resume, and for the base of an adapter. Break: leave
    the reference out of the companions; take the adapter into the reference.
    """
    for number, name in enumerate(("one", "other")):
        make_folder("llama", tmp_path / name, number, torch.float32)
    own = asked(pairs, model__path=str(tmp_path / "one"), optimizer__lr=1e-2, **HOST)
    for name, more in ("whole", {}), ("adapter", {"lora__rank": 4}):
        other = "one" if more else "other"
        losses = {}
        for way in ("stored", "beside"):
            given = {**own, **more, "prefs__reference": str(tmp_path / other), "prefs__way": way}
            _, lines, said = run(f"{name}-{way}", **given, checkpoint__every=1, checkpoint__keep=4)
            losses[way] = [line["loss"] for line in lines]
            assert ("reference: " in said) == (way == "stored")
        assert losses["beside"] == pytest.approx(losses["stored"], abs=1e-6, rel=1e-6)
        saved = str(tmp_path / f"{name}-beside" / "checkpoints" / "step-1")
        _, lines, _ = run(f"{name}-more", **given, checkpoint__resume=saved)
        assert [line["loss"] for line in lines] == losses["beside"][1:]


def test_a_reference_with_other_tokens_is_refused(run: Any, pairs: str, tmp_path: Path) -> None:
    """Break: compare the sizes of the vocabularies alone."""
    make_folder("llama", tmp_path / "base")
    train_bpe([f"{number} sheep" for number in range(300)], 384).save_pretrained(tmp_path / "base")
    make_folder("llama", tmp_path / "one")
    own = asked(pairs, model__path=str(tmp_path / "one"), prefs__reference=str(tmp_path / "base"))
    with pytest.raises(ConfigError, match=r"prefs\.reference is .*base, whose tokenizer has other numbers"):
        run("run", **own)
    file = str(tmp_path / "one" / "config.json")
    with pytest.raises(ConfigError, match=r"prefs\.reference is .*config\.json, which has no weights"):
        run("run", **own | {"prefs__reference": file})
    with pytest.raises(ConfigError, match="train.method orpo has no reference"):
        run("run", **own | {"train__method": "orpo"})


def test_a_reference_that_was_interrupted_is_finished(run: Any, pairs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last batch is measured again."""
    with interrupted_measurement(monkeypatch, 3):
        run("first", **asked(pairs))
    _, lines, said = run("second", **asked(pairs))
    assert "of 48 answers, of which 12 are already computed" in said
    assert lines[0]["loss"] == pytest.approx(0.693147, abs=1e-6)


@pytest.mark.slow
def test_stored_values_of_another_reference_are_computed_again(run: Any, pairs: str, tmp_path: Path) -> None:
    """Break: use the stored values unseen."""
    _, whole, _ = run("first", **asked(pairs))
    (stored,) = (tmp_path / "cache/offload/reference").glob("*.bin")
    right = stored.read_bytes()
    stored.write_bytes((np.frombuffer(right, "<f4") * 1.1).astype("<f4").tobytes())
    _, again, said = run("second", **asked(pairs))
    assert "the stored log-probabilities are not those of this model" in said
    assert [line["loss"] for line in again] == [line["loss"] for line in whole]
    assert stored.read_bytes() == right


def test_other_weights_are_known_by_their_last_element() -> None:
    """The weight mark in a log covers only the first few thousand elements."""
    marks = []
    for last in (0.0, 1.0):
        model = llama(vocabulary=1000)
        with torch.no_grad():
            model.model.embed_tokens.weight[-1, -1] = last
        with Engine(model) as engine:
            marks.append((engine.weights_mark(), engine.weights_mark(whole=True)))
    assert marks[0][0] == marks[1][0]
    assert marks[0][1] != marks[1][1]


@pytest.mark.slow
def test_a_reward_model_is_no_language_model(run: Any, pairs: str) -> None:
    result, _, _ = run("reward", **asked(pairs, "reward", train__steps=1, checkpoint__export=True))
    config = json.loads((result.export / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    with pytest.raises(ConfigError, match="the model scores texts .* but train.method dpo"):
        run("again", **asked(pairs, model__path=str(result.export)))
    with pytest.raises(ConfigError, match="train.method is orpo, but the model is a masked one"):
        run("masked", "bert", **asked(pairs, "orpo"))


@pytest.mark.slow
def test_the_adapter_of_a_reward_model_goes_on_and_is_merged(run: Any, pairs: str, tmp_path: Path) -> None:
    """PEFT lists two names of classification heads in the adapter, and the model has one."""
    needs("peft")
    from peft import PeftModel

    from offload.extras.adapters.export import export_merged

    base = tmp_path / "base"
    make_folder("llama", base)
    named = asked(pairs, "reward", model__path=str(base), lora__rank=2, checkpoint__every=1, checkpoint__export=True)
    result = run("adapter", **named)[0]
    again = run("adapter", **named | {"train__steps": 3})[0]
    named |= {"train__steps": 1, "lora__adapter": str(result.export)}
    further = run("further", **{key: value for key, value in named.items() if key != "lora__rank"})[0]
    assert again.steps == 3
    assert (further.export / "adapter_config.json").is_file()
    export_merged(again.dir / "checkpoints/step-3", tmp_path / "merged")
    scorer = LlamaForSequenceClassification.from_pretrained(base, num_labels=1)
    wanted = PeftModel.from_pretrained(scorer, again.export).merge_and_unload().state_dict()
    found = LlamaForSequenceClassification.from_pretrained(tmp_path / "merged").state_dict()
    assert found.keys() == wanted.keys()
    assert all(map(torch.equal, found.values(), wanted.values()))


class Watches:
    """A callback that records epochs and evaluation metrics."""

    def __init__(self) -> None:
        self.epochs: list[float] = []
        self.evaluated: list[dict[str, float]] = []

    def on_step_end(self, _config: Any, state: Any, _control: Any, **_more: Any) -> None:
        self.epochs.append(state.epoch)

    def on_evaluate(self, *_args: Any, metrics: dict[str, float], **_more: Any) -> None:
        self.evaluated.append(metrics)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_a_model_and_pairs_that_are_given_in_python(
    pairs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Evaluations report preference metrics and no perplexity.

    The best evaluation selects the checkpoint. One epoch is one pass over the pairs.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = LlamaForSequenceClassification if method == "reward" else LlamaForCausalLM
    config = LlamaConfig(vocab_size=384, num_labels=1, **SHAPES["llama"])
    settings = {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"init": "random"},
        "data": {"sequence_length": 48},
        "train": {"method": method, "steps": 4, "batch_size": 6, "eval_every": 1, "early_stopping_patience": 1},
        "optimizer": {"lr": 1e-2},
        "checkpoint": {"keep_best": True, "export": False},
    }
    watch, rows = Watches(), [json.loads(line) for line in Path(pairs).read_text().splitlines()]
    torch.manual_seed(0)
    result = Trainer(settings, model=made(config), data=rows[4:], eval_data=rows[:4], callbacks=[watch]).run()
    assert "eval_rewards/accuracies" in watch.evaluated[-1]
    assert not {"eval_perplexity", "eval_bits_per_byte"} & watch.evaluated[-1].keys()
    assert result.best.loss == min(each["eval_loss"] for each in watch.evaluated)
    assert (result.dir / f"checkpoints/step-{result.best.step}").is_dir()
    lines = lines_of(result.dir)
    assert watch.epochs[0] == 6 / 20, "in pairs"
    assert lines[-1]["eval_loss"] == watch.evaluated[-1]["eval_loss"]


def test_a_module_without_logits_is_refused(pairs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(384, 8)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.embedding(input_ids).sum() * labels.numel()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="train.method is dpo, but the given model is not a transformers model"):
        Trainer({"train": {"method": "dpo"}, "run": {"dir": str(tmp_path / "run")}}, model=Own(), data=pairs).run()


def test_data_of_another_kind_are_told(run: Any, pairs: str) -> None:
    with pytest.raises(
        ConfigError, match=r"preference, and train.method learns from single texts: set --train.method dpo"
    ):
        run("sft", data__source=pairs)
    with pytest.raises(ConfigError, match=r"text.txt is a text, and train.method dpo, orpo and reward train on pairs"):
        run("text", train__method="dpo")
