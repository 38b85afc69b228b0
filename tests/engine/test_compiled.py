"""Blocks under torch.compile: plain PyTorch over the same compiled blocks has the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

from offload import Engine, Placement
from offload.engine.loss.cross_entropy import log_probs_with_gradient
from offload.errors import DoesNotFitError
from offload.extras.large import compiled_forwards as forwards
from offload.extras.large import compiled_loss
from offload.extras.large.compiled_forwards import compile_modules
from offload.extras.plan.op_counter import OpCounter
from offload.planning.settings import Settings
from tests.cases.models import VOCABULARY, batches, build, gemma2, gpt2, llama, qwen3, tokens
from tests.engine.compare import PROPORTIONAL, assert_same, assert_weights, train_both, weights
from tests.engine.device import cpu_only
from tests.engine.documents import by_document, counted, packed
from tests.engine.handmade import (
    Block,
    CheckpointsItself,
    RunningStatistics,
    ScalingBlocks,
    Stack,
    cross_entropy,
    words,
)
from tests.engine.reference import Reference

pytestmark = cpu_only("compiles for the CPU")

LAYERS: dict[Callable[[], nn.Module], Callable[[nn.Module], nn.ModuleList]] = {
    llama: lambda model: model.model.layers,
    qwen3: lambda model: model.model.layers,
    gemma2: lambda model: model.model.layers,
    gpt2: lambda model: model.transformer.h,
}


def backend(factor: float, of_gradients: float = 1.0) -> Callable[..., Any]:
    """Return a backend that runs a graph eagerly and scales the outputs, so that uncompiled calls differ in bits."""

    def multiplying(factor: float) -> Callable[..., Any]:
        def compiled(graph: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
            def run(*args: Any) -> list[Any]:
                return [t * factor if torch.is_tensor(t) and t.is_floating_point() else t for t in graph(*args)]

            return make_boxed_func(run)

        return compiled

    return aot_autograd(fw_compiler=multiplying(factor), bw_compiler=multiplying(of_gradients))


@pytest.fixture(autouse=True)
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a backend with results slightly unlike eager, yet close enough to pass the trial run."""
    torch._dynamo.reset()
    monkeypatch.setattr(forwards, "BACKEND", backend(1 + 2**-18))


def compile_layers(make: Callable[[], nn.Module], model: nn.Module) -> None:
    compile_modules(LAYERS[make](model))


WAYS = [
    (llama, {"parameters": "nvme", "optimizer": "nvme", "activations": "cpu"}, {"prefetch": 0}),
    (gpt2, {"parameters": "cpu"}, {"recompute": "never"}),
    (gemma2, {"parameters": "device", "optimizer": "cpu"}, {"recompute": "always"}),
    (qwen3, {"parameters": "cpu"}, {"recompute": "always", "micro_batch_size": 2, "within": 1e-6}),
    (gpt2, {"parameters": "cpu"}, {"backend": "inductor"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "placement", "settings"), WAYS)
def test_steps_are_those_of_plain_torch_over_the_same_compiled_blocks(
    tmp_path: Path,
    family: Callable[[], nn.Module],
    placement: dict[str, str],
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every second layer of Gemma 2 has a window, passed as a mask. The other families have only one type of layer."""
    settings = dict(settings)
    if made := settings.pop("backend", None):
        monkeypatch.setattr(forwards, "BACKEND", made)
    engine, _ = train_both(
        build(family),
        batches(3),
        group=partial(compile_layers, family),
        compile="always",
        placement=Placement(**placement, nvme_dir=str(tmp_path) if "nvme" in placement.values() else None),
        **settings,
    )
    assert engine.compiled_graphs in ((2, 4) if family is gemma2 else (2,))


@pytest.mark.slow
def test_equal_layers_share_one_graph_with_gradients_and_one_without() -> None:
    engine = Engine(build(partial(llama, num_hidden_layers=4)), compile="always", recompute="always")
    assert engine.compiled_graphs == 0
    for seed in range(4):
        engine.step(tokens(seed))
        assert engine.compiled_graphs == 2
    engine.evaluate(tokens(9))
    assert engine.compiled_graphs == 3


class Drops(nn.Module):
    """Two products and a dropout: a backward with less memory would draw the dropout again."""

    def __init__(self, rate: float = 0.1, in_attention: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.rate, self.in_attention = nn.Linear(32, 64), nn.Linear(64, 32), rate, in_attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.scaled_dot_product_attention(x, x, x, dropout_p=self.in_attention)
        return x + self.down(functional.dropout(self.up(x), self.rate, self.training))


@pytest.mark.parametrize(
    ("block", "share"),
    [
        (Drops(), 1.0),
        (Drops().eval(), 0.99),
        (Drops(0.0), 0.99),
        (Drops(in_attention=0.1).eval(), 1.0),
        (nn.Dropout2d(), 1.0),
        (nn.RReLU(), 1.0),
    ],
)
def test_a_graph_with_random_numbers_may_keep_all_of_them(
    block: nn.Module, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break: one share for all graphs."""
    found = []

    def look(graph: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        found.append(torch._functorch.config.activation_memory_budget)
        return graph.forward

    monkeypatch.setattr(forwards, "BACKEND", look)
    compile_modules([block])
    state = torch.get_rng_state()
    block(torch.randn(2, 3, 8, 32, generator=torch.Generator().manual_seed(0)))
    assert found == [share]
    torch.set_rng_state(state)


def test_blocks_with_dropout_in_documents_run_uncompiled() -> None:
    """Inside a compiled block they would need a mask over whole rows. Break: remove the refusal from `_attend`."""
    torch._dynamo.reset()
    losses = []
    for compiles in ("never", "always"):
        refusal = "runs uncompiled(.|\n)*dropout, a bias or capped scores, needs a mask"
        with Engine(by_document(build(partial(llama, attention_dropout=0.1))), compile=compiles) as engine:
            with pytest.warns(UserWarning, match=refusal) if compiles == "always" else nullcontext():
                losses.append([float(engine.step(packed(seed)).loss) for seed in (0, 1)])
            assert not engine.compiled_classes
    assert losses[0] == losses[1]


def test_packed_documents_are_one_node_in_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other documents in the rows compile nothing again. Break: trace `_as_mask` in `_attend`."""
    monkeypatch.setattr(forwards, "BACKEND", "aot_eager")
    losses, results = [], []
    for compiles in ("never", "always"):
        with Engine(by_document(build(llama)), compile=compiles) as engine:
            losses.append([float(engine.step(packed(0)).loss)])
            graphs, calls = engine.compiled_graphs, []
            for seed in range(1, 5):
                step = partial(engine.step, packed(seed))
                calls += counted(lambda step=step: losses[-1].append(float(step().loss)), monkeypatch)
            assert engine.compiled_graphs == graphs
            assert graphs == 2 * (compiles == "always")
            assert all(shape[0] == 1 for shape in calls)  # a document
            assert not torch._dynamo.utils.counters["graph_break"]
            results.append(weights(engine))
    assert losses[0] == losses[1]
    assert_same(*results)


def test_auto_compiles_on_a_gpu_alone() -> None:
    assert not Engine(build(llama)).compiles
    found = {device: Settings().compile_on(device) for device in ("cpu", "cuda", "cuda:1", "xpu", "mps")}
    assert found == {"cpu": "never", "cuda": "always", "cuda:1": "always", "xpu": "never", "mps": "never"}
    for how in ("always", "never"):
        assert {Settings(compile=how).compile_on(device) for device in found} == {how}
    by_card = [Settings().compile_on("cuda", capability) for capability in ((6, 0), (6, 1), (7, 0), (7, 5), (12, 1))]
    assert by_card == ["never"] * 2 + ["always"] * 3, "Triton knows no GPU before Volta"
    assert Settings(sequence_parallel=2).compile_on("cuda") == "never"
    assert Settings(placement={"experts": "streamed"}).compile_on("cuda") == "never"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of a compiled loss, with a graph for 8 rows."""
    rows, run = [], compiled_loss.CompiledLoss._run

    def counted(self: Any, logits: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        rows.append(len(logits))
        return run(self, logits, *rest)

    monkeypatch.setattr(compiled_loss, "ROWS", 8)
    monkeypatch.setattr(compiled_loss.CompiledLoss, "_run", counted)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("micro", [None, 2])
def test_a_head_in_chunks_has_a_compiled_loss(tmp_path: Path, micro: int | None, calls: list[int]) -> None:
    """Chunks of 12 tokens have two calls, the second over 4 rows again; a resumed run has the same bits."""
    how: dict[str, Any] = {"compile": "always", "head_chunk_bytes": 12 * VOCABULARY * 4, "micro_batch_size": micro}
    how |= {"optimizer": PROPORTIONAL}
    layers = partial(compile_layers, llama)
    engine, _ = train_both(build(llama), batches(3), group=layers, within=1e-5, **how)
    assert calls == [8] * (2 + 3 * 3 * 2), "a trial, and three chunks in three steps"
    engine.save_checkpoint(tmp_path)
    resumed = Engine(build(llama), **how)
    resumed.load_checkpoint(tmp_path)
    assert resumed.step(tokens(3)).loss == engine.step(tokens(3)).loss
    assert_same(weights(resumed), weights(engine))
    assert len(calls) == 2 + 5 * 3 * 2 + 2
    Engine(build(llama), **{**how, "compile": "never"}).step(tokens(3))
    assert len(calls) == 2 + 5 * 3 * 2 + 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_a_compiled_loss_is_that_of_float64(
    dtype: torch.dtype, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token is sure of its label. Rows have the same bits in each chunk; by shapes, 4 passes move all the bytes."""
    monkeypatch.setattr(forwards, "BACKEND", "aot_eager")
    torch.manual_seed(0)
    logits, labels = (3 * torch.randn(21, 300)).to(dtype), torch.randint(0, 300, (21,))
    logits[5, labels[5]] = 40.0
    slopes = -torch.rand(21)
    term = compiled_loss.CompiledLoss(forwards._compile)
    values, gradient = term(logits, labels, slopes)
    exact = logits.double().requires_grad_()
    log_probs = exact.log_softmax(1).gather(1, labels[:, None])[:, 0]
    (log_probs * slopes.double()).sum().backward()
    torch.testing.assert_close(values.double(), log_probs.detach(), rtol=1e-5, atol=1e-6)
    assert exact.grad is not None
    assert gradient is not None
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=max(1e-5, precision), atol=1e-9)
    part = term(logits[5:], labels[5:], slopes[5:])
    assert torch.equal(part[0], values[5:])
    assert part[1] is not None
    assert torch.equal(part[1], gradient[5:])
    assert calls == [8] * (2 + 3 + 2)
    moved, shapes = {}, [t.to("meta") for t in (logits, labels, slopes)]
    uncompiled = compiled_loss.CompiledLoss(pytest.fail)  # a plan waits for no compiler
    for name, its in {"compiled": uncompiled, "plain": log_probs_with_gradient}.items():
        counter = OpCounter()
        with counter.watching():
            its(*shapes)
        moved[name] = counter.cost.moved_bytes / logits.numel()
    width = dtype.itemsize
    twice = 3 * 8 / 21
    assert moved == pytest.approx({"compiled": 4 * width * twice, "plain": 4 * width + 18}, rel=0.1)


def test_a_compiled_loss_that_is_something_else_runs_as_it_is(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwards, "BACKEND", backend(1.01))
    term, batch = compiled_loss.CompiledLoss(forwards._compile), (torch.randn(12, 9), torch.arange(12) % 9)
    with pytest.warns(UserWarning, match="the loss over the vocabulary .*a compiled value differs by 0.01 of its norm"):
        results = term(*batch, torch.ones(12))
    assert all(map(torch.equal, results, log_probs_with_gradient(*batch, torch.ones(12))))
    assert all(map(torch.equal, term(*batch, torch.ones(12)), results))
    assert calls == [8, 8], "the trial alone"


@pytest.mark.slow
def test_equal_blocks_have_one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with another flag or another module inside have a trial of their own."""
    tried, compare = [], forwards.CompiledForwards._compare

    def counted(self: Any, unit: Any, *rest: Any) -> Any:
        tried.append(unit.name)
        return compare(self, unit, *rest)

    monkeypatch.setattr(forwards.CompiledForwards, "_compare", counted)
    Engine(build(partial(llama, num_hidden_layers=4)), compile="always").step(tokens(0))
    assert len(tried) == 1
    model, _ = build(partial(llama, num_hidden_layers=4)), tried.clear()
    model.model.layers[2].is_special = True
    model.model.layers[3].mlp.act_fn = nn.ReLU()
    Engine(model, compile="always").step(tokens(0))
    assert [name.rpartition(".")[2] for name in tried] == ["0", "2", "3"]


@pytest.mark.slow
def test_before_torch_2_13_each_kind_of_inputs_has_limits_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch then counts the graphs of a code object, over all kinds and engines, up to 8."""
    monkeypatch.setattr(forwards, "_own_limits", dict)
    engine = Engine(build(llama), compile="always", recompute="always")
    for length in range(4, 4 + forwards._MOST_VARIANTS):
        assert engine.step(tokens(0, length=length)).loss > 0
    assert engine.compiled_graphs == 2 * forwards._MOST_VARIANTS
    assert engine.compiled_classes


def fails(_graph: Any, _inputs: Any) -> Any:
    raise RuntimeError("no such machine")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (backend(1.01), "LlamaDecoderLayer .*a compiled result differs by 0.01 of its norm"),
        (backend(1.0, of_gradients=1.01), "a compiled gradient differs by 0.01 of its norm"),
        (fails, "no such machine"),
    ],
)
def test_what_compiled_is_something_else_runs_as_it_is(made: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "BACKEND", made)
    with pytest.warns(UserWarning, match=said):
        train_both(build(llama), batches(2), compile="always")


class Breaks(Block):
    """Read a tensor as a Python number, a graph break."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return super().forward(h) * (1.0 if float(h.detach().sum()) < 1e9 else 0.5)


def test_a_block_that_is_no_graph_runs_as_it_is() -> None:
    with pytest.warns(UserWarning, match="blocks are compiled, but Breaks"):
        train_both(Stack(Breaks), [words(seed) for seed in range(2)], loss_fn=cross_entropy, compile="always")


class Scaled(Block):
    """Read an attribute with a new value in each step."""

    scale = 1.0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return super().forward(h) * self.scale


@pytest.mark.slow
def test_a_block_that_cannot_be_compiled_any_more_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "_MOST_GRAPHS", 1)
    losses = []
    for compiles in ("never", "always"):
        model = build(partial(Stack, Scaled))
        engine = Engine(model, compile=compiles)
        with nullcontext() if compiles == "never" else pytest.warns(UserWarning, match=r"Scaled .*RecompileLimit"):
            for seed in range(4):
                for block in model.blocks:
                    block.scale = 1.0 + seed / 8
                losses.append(engine.step(words(seed), loss_fn=cross_entropy).loss)
    torch.testing.assert_close(losses[:4], losses[4:], rtol=1e-4, atol=0.0)


@pytest.mark.slow
def test_a_block_that_checkpoints_itself_is_compiled() -> None:
    engine, _ = train_both(
        build(partial(Stack, CheckpointsItself)),
        [words(seed) for seed in range(2)],
        group=lambda model: compile_modules(model.blocks),
        loss_fn=cross_entropy,
        compile="always",
        recompute="never",
    )
    assert engine.compiled_classes


@pytest.mark.slow
def test_lengths_beyond_a_few_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "_MOST_VARIANTS", 2)
    engine = Engine(build(llama), compile="always", recompute="never")
    for length in range(4, 4 + forwards._MOST_VARIANTS):
        engine.step(tokens(0, length=length))
    before = engine.compiled_graphs
    with pytest.warns(UserWarning, match="give all batches one length"):
        engine.step(tokens(0, length=20))
    engine.step(tokens(1))
    assert engine.compiled_graphs == before


@pytest.mark.filterwarnings("ignore:blocks are compiled, but")
@pytest.mark.parametrize("make", [ScalingBlocks, RunningStatistics])
def test_a_trial_leaves_inputs_and_buffers_alone_that_no_recording_has_seen_change(make: type[nn.Module]) -> None:
    found = []
    for compiles in ("never", "always"):
        engine = Engine(build(make), compile=compiles)
        with torch.no_grad():
            found.append([engine.model(x=words(0)["x"]), *engine.model.buffers()])
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_a_trial_that_ran_out_of_memory_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the unit would silently run uncompiled from then on."""
    full, distance = [True], forwards.largest_excess

    def measured(*tensors: Any) -> float:
        if full.pop() if full else False:
            raise torch.OutOfMemoryError("no room")
        return distance(*tensors)

    monkeypatch.setattr(forwards, "largest_excess", measured)
    model = build(llama)
    reference = Reference(model, group=partial(compile_layers, llama))
    engine = Engine(model, compile="always", recompute="always")
    with pytest.raises(DoesNotFitError, match="no room"):
        engine.step(tokens(0))
    assert engine.step(tokens(0)).loss.item() == reference.step(tokens(0))[0].item()
    assert_weights(engine, reference)
