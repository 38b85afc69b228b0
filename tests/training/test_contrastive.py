"""Contrastive learning: sentence-transformers' own loss, equal bits on all tiers, and runs from a folder."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    Qwen3Config,
    Qwen3Model,
)

from offload import SGD, Engine, Placement
from offload.app.stored_model import export_stored
from offload.distributed.comm import Comm
from offload.distributed.joining import open_comm
from offload.errors import ConfigError
from offload.extras.adapters.export import export_adapter, export_merged
from offload.extras.contrastive import losses as losses_module
from offload.extras.contrastive.losses import InfoNCE
from offload.extras.data.dataset import build_dataset
from offload.extras.data.encoder import Encoder
from offload.extras.data.findings import Findings
from offload.extras.data.records import Group
from offload.extras.data.settings import DataSettings
from offload.extras.data.sources import Source
from offload.extras.data.tokenizer import train_bpe
from offload.tiers.counters import Ledger
from tests.engine.compare import weights
from tests.engine.device import own_device, twin
from tests.engine.ranks import run as run_ranks
from tests.integrations.plain import letters, needs
from tests.matrix import matrix, quick
from tests.run_folder import assert_as_planned, numbers, write_rows
from tests.training.conftest import HOST, SHAPES

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, Any] = {
    "bert": lambda: BertModel(BertConfig(**SIZES, **NO_DROPOUT), add_pooling_layer=False),
    "modernbert": lambda: ModernBertModel(
        ModernBertConfig(**SIZES, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2)
    ),
    "qwen3": lambda: Qwen3Model(Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16, use_cache=False)),
}
POOLING = {"bert": "mean", "modernbert": "cls", "qwen3": "last"}
WAYS: dict[str, dict[str, Any]] = {
    "one direction": {"symmetric": False},
    "both directions": {},
    "hard negatives": {"negatives": 2},
    "matryoshka": {"negatives": 1, "sizes": (32, 16, 8)},
}
UNCLIPPED: dict[str, Any] = {"precision": "fp32", "max_grad_norm": None}


def made(family: str = "bert") -> Any:
    torch.manual_seed(0)
    return MODELS[family]()


def rows(groups: int = 6, texts: int = 2, *, seed: int = 1) -> dict[str, torch.Tensor]:
    """Return groups of rows with 3 to 12 tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (groups * texts, 12), generator=generator)
    lengths = torch.randint(3, 13, (groups * texts, 1), generator=generator)
    mask = (torch.arange(12) < lengths).long()
    ids = ids * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def with_short_query(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the batch with one token in its first row."""
    found = {key: value.clone() for key, value in batch.items()}
    for key, filler in ("input_ids", 0), ("attention_mask", 0), ("labels", -100):
        found[key][0, 1:] = filler
    return found


def trained(
    family: str, batch: Mapping[str, torch.Tensor], loss: InfoNCE, num_steps: int = 2, **settings: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of some steps, and the weights after them."""
    with Engine(made(family), SGD(lr=1.0), **UNCLIPPED | settings) as engine:
        losses = [engine.step(batch, loss).loss.item() for _ in range(num_steps)]
        return losses, weights(engine)


def sentence_model(model: Any, pooling: str) -> Any:
    """Return a model in memory as one of sentence-transformers, with its pooling."""
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    modes = {"last": "lasttoken"}

    class Given(torch.nn.Module):
        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            return {**features, "token_embeddings": model(**features).last_hidden_state}

    return torch.nn.Sequential(Given(), Pooling(SIZES["hidden_size"], modes.get(pooling, pooling)), Normalize())


@matrix(family=[*MODELS], way=[*WAYS], has_micro_batches=[False, True], strength=1, long=3)
def test_loss_and_gradients_are_sentence_transformers(family: str, way: str, has_micro_batches: bool) -> None:
    """Break: divide the temperature twice; leave the negatives out; pool the padding; take the slopes of one size."""
    needs("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss

    options = WAYS[way]
    texts, pooling = 2 + options.get("negatives", 0), POOLING[family]
    batch = {key: value.to(own_device()) for key, value in rows(texts=texts).items()}
    settings = {"micro_batch_size": 2 * texts} if has_micro_batches else {}
    model = twin(made(family)).train()
    sentences = sentence_model(model, pooling)
    both = ("query_to_doc", "doc_to_query") if options.get("symmetric", True) else ("query_to_doc",)
    compute = MultipleNegativesRankingLoss(sentences, directions=both, partition_mode="per_direction")
    if sizes := options.get("sizes"):
        sentences.get_embedding_dimension = lambda: SIZES["hidden_size"]
        compute = MatryoshkaLoss(sentences, compute, sizes)
    features = [{key: batch[key][number::texts] for key in ("input_ids", "attention_mask")} for number in range(texts)]
    wanted = compute(features, None)
    wanted.backward()
    (loss,), own = trained(family, batch, InfoNCE(pooling=pooling, **options), num_steps=1, **settings)
    assert loss == pytest.approx(wanted.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.cpu()
        distance = (parameter.detach().cpu() - gradient - own[name]).norm()  # the learning rate is 1
        # fp32 sums over all tokens, in another order on each kind of processor.
        assert distance <= 1e-5 * max(1.0, gradient.norm()), name


def test_micro_batches_stay_in_bf16() -> None:
    """The slopes of the loss cancel over the rows. Break: compare the rounding errors that they leave."""
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZES | NO_DROPOUT | {"initializer_range": 0.02}), add_pooling_layer=False)
    ids = torch.randint(3, VOCABULARY, (8, 10))
    with Engine(model, SGD(lr=0.1), precision="bf16", micro_batch_size=2) as engine:
        engine.step({"input_ids": ids, "labels": ids}, InfoNCE())


def test_chunks_of_similarities_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break: take the answers of a chunk from the first rows."""
    batch = rows(groups=7, texts=3)
    wanted, own = trained("bert", batch, InfoNCE(1, sizes=(32, 8)), num_steps=1)
    monkeypatch.setattr(losses_module, "CHUNK_BYTES", 2 * 6 * 14)
    found, chunked = trained("bert", batch, InfoNCE(1, sizes=(32, 8)), num_steps=1)
    assert found == pytest.approx(wanted, rel=1e-6)
    for name, value in own.items():
        assert torch.allclose(chunked[name], value, atol=1e-5), name


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made, at their peak."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = call(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.current += storage.nbytes()
            self.peak = max(self.peak, self.current)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.remove(key)
        self.current -= num_bytes


@pytest.mark.parametrize(
    ("width", "options"), [(64, {}), (384, {"margin": 0.1}), (64, {"negatives": 1, "sizes": (16, 32)})]
)
def test_the_loss_takes_the_memory_that_it_plans(width: int, options: dict[str, Any]) -> None:
    """Break: plan one copy of the vectors less; take the gradient of a chunk by autograd; subtract the largest score
    into a new tensor.
    """
    loss, ledger = InfoNCE(**options), Ledger("device")
    loss.open(Comm(), ledger)
    num_rows = 2048 * loss.group
    states = torch.randn(num_rows, 1, width, requires_grad=True)
    ids = torch.arange(num_rows)[:, None]
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    with PeakBytes(states, ids) as counted:
        loss({"last_hidden_state": states}, batch)
    planned = loss.num_bytes(num_rows, num_rows, width)
    assert ledger.peak_bytes == planned
    assert 0.9 * planned <= counted.peak <= 1.01 * planned  # with hashes and norms


def on_rank(num_ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on five groups: rank 0 has three, rank 1 two."""
    batch = with_short_query(rows(groups=5))
    with open_comm() as comm:
        if num_ranks > 1:
            part = slice(0, 6) if comm.rank == 0 else slice(6, 10)
            batch = {key: value[part] for key, value in batch.items()}
        return trained("bert", batch, InfoNCE(), comm=comm)


@pytest.mark.slow
def test_negatives_come_from_all_ranks() -> None:
    """Two ranks are one but for the order of sums. Break: gather no rows; take the slopes of the own queries alone;
    let the engine weigh ranks by their rows with two tokens.
    """
    (losses, own), other = run_ranks(2, on_rank, num_ranks=2)
    wanted, alone = trained("bert", with_short_query(rows(groups=5)), InfoNCE())
    assert losses == other[0] == pytest.approx(wanted, rel=1e-5)
    for name, value in alone.items():
        assert torch.equal(own[name], other[1][name])
        assert torch.allclose(own[name], value, atol=1e-4), name


@pytest.mark.parametrize("margin", [None, 0.1])
def test_known_and_probable_answers_are_no_negatives(margin: float | None) -> None:
    """Of equal queries and equal answers, also as hard negatives. Break: compare with the own answer alone; with the
    answers of equal queries among the answers alone; leave out the margin.
    """
    texts = [[1, 2, 7], [1, 3, 8], [4, 5, 3], [6, 2, 9]]
    query_ids, answer_ids, negative_ids = zip(*texts, strict=True)
    batch = {"input_ids": torch.tensor(texts).view(12, 1), "labels": torch.ones(12, 1, dtype=torch.int64)}
    vectors = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    queries, answers, negatives = torch.nn.functional.normalize(vectors, dim=1).view(4, 3, 4).unbind(1)
    pairs = set(zip(query_ids, answer_ids, strict=True))
    is_answer = torch.tensor([[(query, text) in pairs for text in answer_ids + negative_ids] for query in query_ids])
    is_query = torch.tensor([[(query, answer) in pairs for query in query_ids] for answer in answer_ids])
    wanted = 0.0
    for scores, left_out in (
        (queries @ torch.cat([answers, negatives]).T, is_answer),
        (answers @ queries.T, is_query),
    ):
        if margin is not None:
            left_out |= scores > scores.diagonal()[:, None] + margin
        left_out.fill_diagonal_(False)
        scores = (scores / 0.5).masked_fill(left_out, -torch.inf)
        wanted += torch.nn.functional.cross_entropy(scores, torch.arange(4)).item() / 2
    loss = InfoNCE(1, temperature=0.5, margin=margin)
    assert loss({"last_hidden_state": vectors[:, None]}, batch).item() == pytest.approx(wanted, rel=1e-6)


def test_a_text_of_one_token_counts() -> None:
    """Break: count rows with a second token, as if it were predicted."""
    loss = InfoNCE()
    with Engine(made(), SGD(lr=1.0), **UNCLIPPED) as engine:
        result = engine.step(with_short_query(rows(groups=3)), loss)
    assert result.tokens == 6
    assert len(loss.metrics["accuracy"]) == 3


def test_accuracy_is_of_the_largest_size() -> None:
    """By the first number alone, no answer is the nearest text. Break: take the first or the last size."""
    vectors = torch.tensor([[1.0, 9.0], [-1.0, 9.0], [1.0, -9.0], [-1.0, -9.0]])
    batch = {"input_ids": torch.arange(8).view(4, 2), "labels": torch.ones(4, 2, dtype=torch.int64)}
    outputs = {"last_hidden_state": vectors[:, None].expand(4, 2, 2)}
    for sizes in (2, 1), (1, 2):
        loss = InfoNCE(sizes=sizes)
        loss.begin()
        loss(outputs, batch)
        loss.keep()
        assert loss.metrics["accuracy"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("pooling", losses_module.POOLINGS)
def test_padding_on_the_left_is_that_on_the_right(pooling: str) -> None:
    """The third query is the first one: its answer is no negative. Break: pool place 0; hash tokens by their place."""
    batch = rows(groups=3)
    for value in batch.values():
        value[4] = value[0]
    states = torch.randn(6, 12, 8, generator=torch.Generator().manual_seed(0))
    wanted = InfoNCE(pooling=pooling)({"last_hidden_state": states}, batch)
    num_filler = int(12 - batch["attention_mask"][4].sum())
    assert num_filler
    for value in (*batch.values(), states):
        value[4] = value[4].roll(num_filler, dims=0)
    found = InfoNCE(pooling=pooling)({"last_hidden_state": states}, batch)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.slow
def test_a_batch_far_larger_than_a_resident_one_fits() -> None:
    """4,096 pairs within the bytes that 64 pairs take in memory, by torch's graph and AdamW's states."""
    sizes = {"num_hidden_layers": 4, "intermediate_size": 128}

    def model() -> Any:
        torch.manual_seed(0)
        return BertModel(BertConfig(**SIZES | NO_DROPOUT | sizes), add_pooling_layer=False)

    kept: dict[int, int] = {}
    few, resident = rows(groups=64), model()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = resident(few["input_ids"], few["attention_mask"])
    del outputs
    num_bytes = sum(kept.values()) + 12 * sum(each.numel() for each in resident.parameters())
    placement = Placement(parameters="cpu", optimizer="cpu", activations="cpu", device_memory=num_bytes)
    with Engine(model(), placement=placement, precision="fp32", micro_batch_size=64) as engine:
        result = engine.step(rows(groups=4096), InfoNCE())
        assert result.tokens == 2 * 4096
        assert engine.counters.peak_device_bytes <= num_bytes


# -- runs --------------------------------------------------------------------------------------------------------------

FILES = ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json", "sentence_bert_config.json")
FLAGS = {"llama": "lasttoken", "bert": "mean_tokens"}
THINGS = ("apple", "plum", "rose", "stone", "sea", "snow", "coal", "wood")


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    """Write queries with an answer and two hard negatives each."""
    found = [
        {
            "query": f"which {thing} is it, number {number}?",
            "positive": f"the {thing} number {number}.",
            "negatives": [f"no {thing} number {number}.", f"{number} is a number."],
        }
        for thing in THINGS
        for number in range(4)
    ]
    return str(write_rows(tmp_path / "queries.jsonl", found))


def asked(pairs: str, **more: Any) -> dict[str, Any]:
    own = {"data__source": pairs, "train__method": "contrastive", "optimizer__lr": 3e-3, "data__sequence_length": 64}
    return own | {"train__steps": 6, "train__batch_size": 8, "contrastive__negatives": 1} | more


def made_by(module: Any, texts: list[str]) -> torch.Tensor:
    return torch.from_numpy(module.encode(texts, convert_to_numpy=True))


@pytest.mark.parametrize("pooling", quick(["mean", "last", "cls"], ["cls"]))
def test_sentence_transformers_loads_an_export(run: Any, pairs: str, tmp_path: Path, pooling: str) -> None:
    """Its vectors are those of the model with the pooling of the run. A resumed run has the same files. Break: write
    another pooling; end each text with an EOS.
    """
    needs("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel, AutoTokenizer

    run("run", family="bert", **asked(pairs, contrastive__pooling=pooling, train__steps=1))
    folder, texts = tmp_path / "run/hf", ["which apple is it?", "the sea, number 3."]
    found = made_by(SentenceTransformer(str(folder), device="cpu"), texts)
    tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        states = model(tokens["input_ids"], tokens["attention_mask"])["last_hidden_state"]
    pooled = losses_module.POOLINGS[pooling](states, tokens["attention_mask"])
    assert torch.allclose(found, torch.nn.functional.normalize(pooled, dim=1), atol=1e-6)


def test_tokens_are_those_of_the_tokenizer(pairs: str) -> None:
    """An embedding is of the tokens of a plain tokenizer call: no other EOS. Break: leave out the case of a group."""
    tokenizer = letters()
    encoder = Encoder(tokenizer)
    assert tokenizer.eos_token_id is not None
    found = encoder.encode([(False, Group("row 1", ("sea", "snow")))], Findings("error"))
    assert [each.ids.tolist() for each in found] == tokenizer(["sea", "snow"])["input_ids"]


def test_a_cut_text_ends_as_the_tokenizer_ends_it(tmp_path: Path) -> None:
    """Break: cut the last tokens; keep them in short rows too."""
    tokenizer = letters()
    ends = [("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A <eos>", special_tokens=ends)
    tokenizer.save_pretrained(tmp_path)
    texts = ["seashell", "a", "snow", "the long sea of sand"]
    path = write_rows(tmp_path / "rows.jsonl", ({"query": text, "positive": text} for text in texts))
    source = Source((str(path),), "contrastive")
    data = build_dataset(
        DataSettings(
            sources=[source],
            tokenizer=str(tmp_path),
            vocab_size=len(tokenizer),
            cache_dir=tmp_path,
            sequence_length=6,
            packing=False,
            grouped="contrastive",
            group=2,
            batch_size=4,
        )
    )
    found = data.batch(0)
    rows = {tuple(ids.tolist()) for ids in found["input_ids"]}
    wanted = tokenizer(texts, truncation=True, max_length=6, padding="max_length")["input_ids"]
    assert rows == {tuple(ids) for ids in wanted}
    assert torch.equal(found["labels"].clamp(min=0), found["input_ids"] * found["attention_mask"])


def test_a_run_resumes_and_an_adapter_learns(run: Any, pairs: str, tmp_path: Path) -> None:
    short = {"train__steps": 3, "checkpoint__every": 2}
    _, lines, _ = run("run", family="bert", **asked(pairs, **short))
    earlier = str(tmp_path / "run" / "checkpoints" / "step-2")
    _, more, _ = run("more", family="bert", **asked(pairs, checkpoint__resume=earlier, **short))
    assert [line["loss"] for line in more] == [line["loss"] for line in lines[2:]]
    for name in ("model.safetensors", *FILES):
        assert (tmp_path / "run/hf" / name).read_bytes() == (tmp_path / "more/hf" / name).read_bytes()
    adapter = {"lora__rank": 4, "lora__target_modules": "all-linear", "train__steps": 8, "optimizer__lr": 1e-2}
    _, adapted, said = run("adapted", family="bert", **asked(pairs, **adapter))
    assert adapted[-1]["loss"] < adapted[0]["loss"]
    assert "reloaded: by peft" in said


@pytest.mark.slow
def test_each_export_has_the_files_and_those_of_the_base(run: Any, pairs: str, tmp_path: Path) -> None:
    """Break: export no file of the objective from a checkpoint; write prompts anew; read them from the base alone."""
    more = {"train__steps": 1, "checkpoint__every": 1}
    run("base", family="bert", **asked(pairs, contrastive__pooling="cls", **more))
    base = tmp_path / "base/hf"
    prompts = {"prompts": {"query": "query: "}, "truncate_dim": 8}
    (base / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (base / "sentence_bert_config.json").write_text('{"do_lower_case": false, "max_seq_length": 512}')
    more["model__path"] = str(base)
    run("whole", **asked(pairs, **more))
    run("adapted", **asked(pairs, lora__rank=4, lora__target_modules="all-linear", optimizer__lr=1e-2, **more))
    whole, adapted = (tmp_path / name / "checkpoints/step-1" for name in ("whole", "adapted"))
    export_stored(whole, tmp_path / "exported")
    export_adapter(adapted, tmp_path / "adapter")
    export_merged(adapted, tmp_path / "merged")
    base.rename(tmp_path / "away")
    run("resumed", **asked(pairs, **more | {"train__steps": 2}, checkpoint__resume=str(whole)))
    for name in ("whole/hf", "adapted/hf", "exported", "adapter", "merged", "resumed/hf"):
        found = {file: json.loads((tmp_path / name / file).read_text()) for file in FILES}
        assert found["config_sentence_transformers.json"].items() >= prompts.items(), name
        assert found["sentence_bert_config.json"] == {"do_lower_case": False, "max_seq_length": 64}, name
        assert found["1_Pooling/config.json"]["pooling_mode_cls_token"] is True, name
        kinds = [module["type"].rpartition(".")[2] for module in found["modules.json"]]
        assert kinds == ["Transformer", "Pooling", "Normalize"], name


@pytest.mark.slow
def test_the_plan_is_the_run(run: Any, with_plan: None, pairs: str, tmp_path: Path) -> None:
    """Break: give the model labels in `BatchSpec.make`; plan the loss without its vectors."""
    own = {"train__micro_batch_size": 4, "train__recompute": "always", "train__steps": 5}
    own |= {"train__batch_size": 32, "contrastive__negatives": 2, "data__eval_share": 0.0}
    _, lines, _ = run("run", **asked(pairs, **own, **HOST))
    plan = assert_as_planned(tmp_path / "run")
    assert lines[-1]["peak_device_bytes"] == plan["tiers"]["device"]["bytes"] + plan["lent_bytes"]


def test_texts_of_one_token_are_trained_on(run: Any, tmp_path: Path) -> None:
    """Break: leave out rows without a token before another."""
    letters_of = ("ag", "bh", "ci", "dj", "ek", "fl")
    path = write_rows(tmp_path / "letters.jsonl", ({"query": a, "positive": b} for a, b in letters_of))
    more = {"contrastive__negatives": 0, "train__batch_size": 6, "train__steps": 1, "data__eval_share": 0.0}
    _, (line,), said = run("run", **asked(str(path), **more))
    assert "left out" not in said
    assert line["tokens"] == 12  # texts


def test_a_masked_language_model_gets_a_pooler(run: Any, pairs: str, tmp_path: Path) -> None:
    """Its folder has none. Break: require all parameters of the base model."""
    config = AutoConfig.for_model("bert", vocab_size=384, **SHAPES["bert"])
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "language")
    train_bpe(numbers(), 384).save_pretrained(tmp_path / "language")
    _, _, said = run("run", **asked(pairs, model__path=str(tmp_path / "language"), train__steps=1))
    assert "not in the files, and initialised at random (pooler.dense.bias, pooler.dense.weight)" in said
    assert "logits bit-equal" in said


@pytest.mark.parametrize("family", quick(FLAGS, ["llama"]))
def test_the_model_decides_the_pooling(run: Any, pairs: str, tmp_path: Path, family: str) -> None:
    """Break: take one pooling for all models."""
    run("run", family=family, **asked(pairs, train__steps=1))
    stored = json.loads((tmp_path / "run/hf/1_Pooling/config.json").read_text())
    assert [key for key, value in stored.items() if value is True] == [f"pooling_mode_{FLAGS[family]}"]


@pytest.mark.slow
def test_a_stored_pooling_is_taken_and_other_options_are_refused(run: Any, pairs: str, tmp_path: Path) -> None:
    """Break: take the mean whatever the folder says; read the pooling alone."""
    run("base", family="bert", **asked(pairs, contrastive__pooling="cls", train__steps=1))
    folder = tmp_path / "base/hf"
    base = {"model__path": str(folder), "train__steps": 1}
    run("again", **asked(pairs, **base))
    assert (tmp_path / "again/hf/1_Pooling/config.json").read_bytes() == (folder / "1_Pooling/config.json").read_bytes()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "max"}')
    with pytest.raises(ConfigError, match=r"has the pooling max, and a run computes mean, last or cls"):
        run("other", **asked(pairs, **base))
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    for pooling in ("auto", "mean"):
        with pytest.raises(ConfigError, match="has model_type 'CrossEncoder', by which sentence-transformers gives"):
            run("other", **asked(pairs, contrastive__pooling=pooling, **base))


def test_refusals(run: Any, pairs: str) -> None:
    with pytest.raises(ConfigError, match=r"jsonl:1 has 2 hard negatives, and contrastive\.negatives is 3"):
        run("run", family="bert", **asked(pairs, contrastive__negatives=3))
    with pytest.raises(ConfigError, match=r"contrastive\.sizes has 64, but the embeddings of the model have 32"):
        run("run", family="bert", **asked(pairs, contrastive__sizes=(64, 8)))
    with pytest.raises(ConfigError, match="model type t5 has no class .* with one hidden state per token"):
        run("run", family="t5", **asked(pairs))
