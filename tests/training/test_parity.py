"""`offload.parity`: bit-equal sides, and the first difference after a deliberate change on one side."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from offload import parity
from offload.app.hf import read
from offload.app.training import build
from offload.app.training.resident import ResidentTrainer
from offload.errors import ConfigError, DoesNotFitError
from offload.extras.data.tokenizer import train_bpe
from offload.extras.quant import products
from offload.extras.tools import parity_check
from offload.extras.tools.parity_check import WeightComparison, first_mismatch
from offload.optim.sgd import SGD
from tests import forks
from tests.engine.fp8 import LEAST_SIZE
from tests.run_folder import write_rows, write_shape, write_text
from tests.training.conftest import SHAPES
from tests.training.test_distill import write_wide
from tests.training.test_resume import make_folder

Run = Callable[..., tuple[int, dict[str, Any]]]
DISK = ("--offload.parameters", "nvme", "--offload.optimizer", "nvme", "--offload.nvme_dir", ".")
HOST = ("--offload.parameters", "cpu", "--offload.optimizer", "cpu")
PEFT = [pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed: pip install '.[peft]'")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, tokenized once per module."""
    path = tmp_path_factory.mktemp("parity")
    write_text(path)
    return path


@pytest.fixture
def words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Return a function that builds the command line for three compared steps with a tiny model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.chdir(folder)

    def make(*more: str, family: str = "llama", **shape: Any) -> list[str]:
        write_shape(Path("shape"), family, **SHAPES[family], **shape)
        return [
            *("--model.path", "shape/config.json", "--data.source", "text.txt", "--data.sequence_length", "32"),
            *("--train.batch_size", "4", "--train.precision", "fp32", "--optimizer.warmup_steps", "0", "--steps", "3"),
            *more,
        ]

    return make


@pytest.fixture
def run(words: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in the test process. Return the exit code and the parsed JSON."""

    def compare(*more: str, **shape: Any) -> tuple[int, dict[str, Any]]:
        code = parity.main(words("--json", *more, **shape))
        return code, json.loads(capsys.readouterr().out)

    return compare


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("--train.precision", "bf16", *DISK, "--offload.device_memory", "1MiB"),
        ("--train.precision", "fp16", "--train.max_grad_norm", "0.5", *DISK),
        ("--optimizer.states", "int8", "--train.max_grad_norm", "none", "--train.recompute", "never", *HOST),
        ("--optimizer.name", "lomo", "--optimizer.lr", "0.01", "--train.max_grad_norm", "0.5", *HOST),
        ("--train.delay", "1", "--train.delay_after", "1", "--train.precision", "bf16", "--steps", "5", *HOST),
        pytest.param(("--lora.rank", "4", "--lora.use_dora", "true", "--lora.dropout", "0.1", *HOST), marks=PEFT),
        ("--train.matmul", "fp8_rowwise", "--train.precision", "bf16"),
        ("--train.matmul", "fp8_tensorwise", "--train.precision", "bf16"),
        ("--model.path", "t5-shape/config.json", "--same-order", *HOST),
    ],
    ids=str,
)
def test_what_is_exact_is_equal_bit_for_bit(
    run: Run, monkeypatch: pytest.MonkeyPatch, folder: Path, settings: tuple[str, ...]
) -> None:
    """T5: each decoder block reads the encoder output once, and all blocks read the position biases."""
    monkeypatch.setattr(products, "LEAST_SIZE", LEAST_SIZE)
    AutoConfig.for_model("t5", vocab_size=384, **SHAPES["t5"]).save_pretrained(folder / "t5-shape")
    code, found = run(*settings)
    assert code == 0
    assert (found["equal"], found["bit_equal"], found["tolerance"], found["order_differs"]) == (True, True, None, [])
    numbers = [step["step"] for step in found["steps"]]
    assert numbers == ([1, 2, 3, 4, 5] if "--train.delay" in settings else [1, 2, 3]), "later ones show what was late"
    assert all(step["loss"]["offloaded"] == step["loss"]["resident"] for step in found["steps"])
    assert len({step["loss"]["offloaded"] for step in found["steps"]}) == len(numbers)
    assert found["weights"]["differing_elements"] == 0 < found["weights"]["elements"]
    approximate = {"--optimizer.states", "--train.delay", "--train.matmul"}
    assert len(found["notes"]) == len(approximate & set(settings))
    if "--train.matmul" in settings:
        assert found["notes"] == [f"products in {settings[1]} are made by the same functions on both sides."]
    assert found["first_difference"] is None


METHODS: dict[str, tuple[str, ...]] = {
    "distill": ("--distill.teacher", "base", "--data.tokenizer", "base", "--distill.labels", "0.2"),
    "contrastive": ("--data.source", "queries.jsonl", "--contrastive.negatives", "1", "--contrastive.sizes", "32,16"),
    "dpo": ("--data.source", "pairs.jsonl", "--prefs.reference", "base", "--data.tokenizer", "base"),
    "orpo": ("--data.source", "pairs.jsonl"),
    "reward": ("--data.source", "pairs.jsonl"),
}


@pytest.fixture
def of_method(run: Run, folder: Path) -> Run:
    """Run the command for a method, with a folder of another model and with rows of its kind."""
    if not (folder / "base").exists():
        make_folder("llama", folder / "base")
        texts = [(f"is {number} there?", f"yes, {number} is there.", f"no {number}.") for number in range(30)]
        queries = [{"query": query, "positive": one, "negatives": [other]} for query, one, other in texts]
        pairs = [{"prompt": prompt, "chosen": one, "rejected": other} for prompt, one, other in texts]
        for name, rows in {"queries": queries, "pairs": pairs}.items():
            write_rows(folder / f"{name}.jsonl", rows)
    return lambda method, *more: run("--train.method", method, *METHODS[method], *HOST, *more)


@pytest.mark.parametrize(
    "method",
    ["distill", "contrastive", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "orpo", "reward"))],
)
def test_a_method_is_compared_with_its_own_loss(of_method: Run, method: str) -> None:
    """Break: train one side with the loss of the model."""
    code, found = of_method(method)
    assert (code, found["bit_equal"], found["weights"]["differing_elements"]) == (0, True, 0)
    assert len({step["loss"]["offloaded"] for step in found["steps"]}) == 3
    assert len(found["notes"]) == (method == "dpo")


@pytest.mark.slow
def test_a_stored_teacher_is_compared(of_method: Run) -> None:
    """Break: leave the stored probabilities out of the batches of one side."""
    code, found = of_method("distill", "--distill.way", "stored", "--distill.top_k", "7")
    assert (code, found["bit_equal"], len(found["notes"])) == (0, True, 1)


@pytest.mark.slow
@pytest.mark.parametrize("same_order", ["false", "true"])
@pytest.mark.parametrize("method", METHODS)
def test_a_method_in_parts_is_within_the_tolerance(of_method: Run, method: str, same_order: str) -> None:
    """Break: cut the rows of a loss over the whole batch; cut a pair."""
    passes = "3"
    if method == "contrastive":
        passes = "1"  # the command refuses more
    parts = ("--train.micro_batch_size", "2", "--train.passes", passes, "--train.head_chunk_bytes", "40KiB")
    code, found = of_method(method, *parts, "--same-order", same_order)
    assert (code, found["equal"]) == (0, True)
    assert found["weights"]["distance"] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("frozen_weights", ["exact", "nf4"])
@pytest.mark.parametrize(
    "adapter", [(), pytest.param(("--lora.rank", "4", "--model.path", "wide"), marks=PEFT)], ids=str
)
def test_a_teacher_in_codes_is_compared(of_method: Run, folder: Path, frozen_weights: str, adapter: Any) -> None:
    """Also the base of an adapter as its teacher. Break: leave the codes of the teacher out of the resident side."""
    write_wide(folder / "wide")
    coded = ("--train.precision", "bf16", "--offload.frozen_weights", frozen_weights)
    code, found = of_method(
        "distill", "--distill.teacher", "wide", *adapter, *coded, *DISK, "--offload.device_memory", "2MiB"
    )
    assert (code, found["bit_equal"]) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["distill", "contrastive"])
def test_another_loss_on_one_side_is_found(of_method: Run, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """A weight of the resident teacher, or a number of the loss."""
    begin = ResidentTrainer.__init__

    def change(resident: ResidentTrainer, model: Any, *args: Any, loss_fn: Any, **settings: Any) -> None:
        if method == "distill":
            model.get_parameter("companions.teacher.model.layers.1.mlp.up_proj.weight").data.mul_(2)
        else:
            loss_fn._temperature *= 1 + 2**-20
        begin(resident, model, *args, loss_fn=loss_fn, **settings)

    monkeypatch.setattr(ResidentTrainer, "__init__", change)
    code, found = of_method(method)
    assert (code, found["first_difference"]["step"], found["first_difference"]["what"]) == (1, 1, "loss")


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_tied_weights_and_dropout_are_equal(run: Run, precision: str) -> None:
    code, found = run("--train.precision", precision, *HOST, family="gpt2", resid_pdrop=0.5)
    assert (code, found["bit_equal"]) == (0, True)
    _, calm = run("--train.precision", precision, *HOST, family="gpt2", resid_pdrop=0.0)
    assert calm["steps"][0]["loss"] != found["steps"][0]["loss"], "dropout was on"


@pytest.mark.slow
def test_an_operation_without_a_repeatable_algorithm_is_named(
    words: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LlamaMLP.forward

    def forward(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x) + x.new_zeros(1).put_(torch.zeros(1, dtype=torch.long), x.new_zeros(1))

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    assert parity.main(words(*HOST)) == 0
    assert "note: put_ does not have a deterministic implementation. So this operation runs" in capsys.readouterr().out
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision"), [("mixtral", "bf16"), ("gemma2", "fp32")])
def test_weights_of_a_folder_are_read_on_both_sides(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, family: str, precision: str
) -> None:
    """The resident side uses the loader in transformers.

    A gemma2 model built in the file dtype has another embedding scale than a model built in the training dtype.
    """
    config = AutoConfig.for_model(family, vocab_size=384, **SHAPES[family])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / family)
    train_bpe(["a number, the next"] * 9, 384).save_pretrained(folder / family)
    words = ("--model.path", family, "--train.precision", precision, *HOST)
    code, found = run(*words)
    assert (code, found["bit_equal"], found["weights"]["differing_elements"]) == (0, True, 0)
    if family == "gemma2":
        build = read.build_empty
        monkeypatch.setattr(read, "build_empty", lambda make, config, _dtype, held: build(make, config, held, held))
        code, found = run(*words)
        assert (code, found["first_difference"]["step"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (("--train.micro_batch_size", "1"), "micro-batches of 1 rows"),
        (("--train.micro_batch_size", "3", "--same-order", "--train.precision", "bf16"), "micro-batches of 3 rows"),
        (("--train.head_chunk_bytes", "40KiB"), "the head in 5 chunks"),
        (("--train.clip", "speculative", "--train.max_grad_norm", "0.1"), "speculative clipping"),
    ],
)
def test_where_the_order_of_sums_differs_a_tolerance_is_told(run: Run, settings: tuple[str, ...], reason: str) -> None:
    code, found = run(*settings, *HOST)
    assert (code, found["equal"], found["bit_equal"]) == (0, True, False)
    assert [text.partition(":")[0].partition(" (")[0] for text in found["order_differs"]] == [reason]
    assert found["tolerance"] in parity_check.TOLERANCES.values()
    assert 0 < found["weights"]["distance"] < found["tolerance"]["weights"]


@pytest.mark.slow
def test_a_wrong_scale_is_beyond_the_tolerance(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    step = ResidentTrainer.step
    monkeypatch.setattr(ResidentTrainer, "step", lambda self, parts: step(self, [(rows, 0.9) for rows, _ in parts]))
    code, found = run("--train.micro_batch_size", "1", *HOST)
    assert (code, found["equal"]) == (1, False)
    assert found["first_difference"]["what"] == "loss"


class Broken:
    """Flips the last bit of one resident weight in the second step of some passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, passes: set[int]) -> None:
        update, begin = ResidentTrainer._update_parameter, ResidentTrainer.__init__
        self.num_passes, name = 0, "model.layers.1.mlp.up_proj.weight"

        def count(resident: ResidentTrainer, *args: Any, **settings: Any) -> None:
            self.num_passes += 1
            begin(resident, *args, **settings)

        def break_one(resident: ResidentTrainer, index: int, gradient: torch.Tensor, scale: float) -> None:
            update(resident, index, gradient, scale)
            info = resident._infos[index]
            if self.num_passes in passes and info.name == name and resident._steps[index] == 2:
                resident._states[index]["weights"].view(torch.int32)[5 * info.shape[1] + 7] += 1

        monkeypatch.setattr(ResidentTrainer, "__init__", count)
        monkeypatch.setattr(ResidentTrainer, "_update_parameter", break_one)


@pytest.mark.slow
def test_it_says_where_it_first_differs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Broken(monkeypatch, {1, 2})
    code, found = run(*HOST)
    assert (code, found["equal"], broken.num_passes) == (1, False, 2)
    first = found["first_difference"]
    assert (first["step"], first["what"], first["element"]) == (2, "weight", [5, 7])
    assert first["parameter"] == "model.layers.1.mlp.up_proj.weight"
    assert 0 < abs(first["offloaded"] - first["resident"]) < 1e-7
    assert found["weights"]["differing_parameters"] > 1, "after the last step more have followed"


@pytest.mark.slow
def test_what_differs_only_undisturbed_is_told_as_such(
    words: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Broken(monkeypatch, {1})
    assert parity.main(words(*HOST)) == 1
    said = capsys.readouterr().out
    assert "depends on the timing between steps" in said
    assert said.endswith("parity: offloaded and resident training differ over 3 steps\n")


def test_what_cannot_be_compared_is_refused(words: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Break: count the steps after the run is made, which may measure a teacher for hours."""
    with pytest.raises(ConfigError, match="draws random numbers"):
        parity.main(words("--train.micro_batch_size", "2", *HOST, family="gpt2"))
    with pytest.raises(ConfigError, match="--steps is 400, but the run has only"):
        parity.main(words(*HOST, "--train.epochs", "0.1", "--steps", "400"))
    with monkeypatch.context() as patch:
        patch.setattr(parity_check, "make_run", None)
        with pytest.raises(ConfigError, match="--steps is 4, but the run has only 3: raise --train.steps"):
            parity.main(words(*HOST, "--train.steps", "3", "--steps", "4"))
    monkeypatch.setattr(parity_check, "memory", lambda: {"available_bytes": 1000})
    with pytest.raises(DoesNotFitError, match=r"on the cpu without .*first weights .* 1000 B are free"):
        parity.main(words(*HOST))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--steps", "0"), "--steps is '0'"),
        (("--same-order", "maybe"), "--same-order is 'maybe'"),
        (("--same-ordre",), "did you mean same-order"),
        (("--offload.link_gradients", "int8"), r"link_gradients is int8.*one process.*--offload\.link_gradients exact"),
        (("--optimizer.name", "mezo"), r"mezo, which has no backward.*offload\.replay.*test_zeroth_order"),
    ],
)
def test_wrong_options_are_refused(given: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parity.main([*given])


@pytest.mark.slow
def test_a_model_that_does_not_fit_takes_no_memory_before_it_is_refused(
    words: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With deterministic algorithms torch fills empty tensors, so a reservation takes real memory."""
    process, taken = psutil.Process(), list[float]()

    def refuse(_config: Any, built: Any, _comm: Any) -> None:
        num_bytes = sum(parameter.nbytes for parameter in built.model.parameters())
        taken.append((process.memory_info().rss - before) / num_bytes)
        raise DoesNotFitError("too large")

    monkeypatch.setattr(build, "build_engine", refuse)
    given = words(*HOST)
    config = AutoConfig.for_model("llama", vocab_size=1 << 20, **SHAPES["llama"])
    config.save_pretrained("shape")
    before = process.memory_info().rss
    with pytest.raises(DoesNotFitError):
        parity.main(given)
    assert taken[0] < 0.5


@pytest.mark.slow
def test_two_ranks_are_equal_within_the_order_of_sums(words: Callable[..., list[str]], folder: Path) -> None:
    done = forks.run(["-m", "offload.parity", "--gpus", "2", "--json", *words("--same-order", *HOST)], cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["equal"], found["ranks"], len(found["steps"])) == (True, 2, 3)
    assert found["order_differs"] == ["2 ranks: each sums the gradients of its own rows, and a part of the norm"]
    assert found["weights"]["distance"] < 1e-5


# -- the resident side and the comparison
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_parts", [1, 2])
def test_the_resident_side_is_a_plain_loop_of_pytorch(num_parts: int) -> None:
    """SGD has the same bits as torch's SGD, so the expected values need no engine code."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=384, **SHAPES["llama"]))
    plain = copy.deepcopy(model)
    cpu, rule = torch.device("cpu"), SGD(lr=0.1, momentum=0.9)
    places = dict.fromkeys((name for name, _ in model.named_parameters()), cpu)
    resident = ResidentTrainer(
        model, rule, precision="fp32", device=cpu, update_devices=places, max_grad_norm=None, seed=0, sums_by_unit=True
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, foreach=False, fused=False)
    for _ in range(3):
        ids = torch.randint(384, (4, 16))
        loss = torch.zeros(())
        for rows in ids.chunk(num_parts):
            part = plain(input_ids=rows, labels=rows).loss / num_parts
            part.backward()
            loss += part.detach()
        norm = sum(p.grad.double().square().sum() for p in plain.parameters()).sqrt().item()
        optimizer.step()
        optimizer.zero_grad()
        found = resident.step([({"input_ids": rows, "labels": rows}, 1 / num_parts) for rows in ids.chunk(num_parts)])
        assert found == (loss.item(), pytest.approx(norm, rel=1e-12))
    for (name, mine), its in zip(resident.weights(), plain.parameters(), strict=True):
        assert torch.equal(mine, its), name


def test_bits_are_compared_and_the_first_is_found() -> None:
    one = torch.tensor([[0.0, 1.0, float("nan")], [2.0, 3.0, 4.0]])
    assert first_mismatch(one, one.clone()) is None
    other = one.clone()
    other[0, 0] = -0.0
    other[1, 2] = 5.0
    assert first_mismatch(one, other) == ((0, 0), 2)
    apart = WeightComparison()
    apart.add(1, "equal", one[1], one[1].clone(), torch.zeros(3))
    assert (apart.distance, apart.first) == (0.0, None)
    apart.add(1, "b", torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0]), torch.zeros(2))
    assert (apart.first.name, apart.first.element, apart.first.offloaded) == ("b", (1,), 4.0)  # type: ignore[union-attr]
    apart.add(1, "c", torch.ones(1), -torch.ones(1))
    assert apart.first.name == "b", "the first stays"  # type: ignore[union-attr]
    apart.add(1, "d", torch.ones(1), torch.tensor([math.nan]))
    assert (apart.fields()["largest_difference"], apart.fields()["distance"]) == ("nan", "nan")
    apart = WeightComparison()
    apart.add(1, "equal", one[1], one[1].clone(), torch.zeros(3))
    apart.add(1, "b", torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0]), torch.zeros(2))
    assert apart.distance == pytest.approx((1 / (4 + 9 + 16 + 9 + 25)) ** 0.5)
    assert (apart.num_elements, apart.differing, apart.largest) == (5, {"b": 1}, 1.0)
