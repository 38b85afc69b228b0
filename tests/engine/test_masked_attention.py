"""Attention with a mask runs without cuDNN where cuDNN's gradients can be NaN, and an error names cuDNN there."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion

from offload import SGD, Engine
from offload.accelerators import masked_attention_fault
from offload.engine.gradients import policies
from offload.engine.units import masked_attention
from offload.engine.units.stages import OriginalForward, Stage
from offload.errors import NonFiniteError
from offload.extras.large import compiled_forwards
from tests.cases.models import build, llama, tokens
from tests.engine.handmade import WIDTH, Block, Stack, cross_entropy, words
from tests.engine.inside import parts_of

FAULT = "torch 2.13.0 on NVIDIA H200"


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (masked_attention, policies):
        monkeypatch.setattr(module, "masked_attention_fault", lambda device: FAULT)


@pytest.mark.parametrize(
    ("version", "hip", "major", "is_faulty"),
    [
        ("2.10.0+cu128", None, 9, False),
        ("2.11.0+cu128", None, 9, True),
        ("2.13.1", None, 9, True),
        ("2.14.0", None, 9, False),
        ("2.13.0+cu130", None, 8, False),
        ("2.13.0+cu130", None, 10, False),
        ("2.13.0+rocm7.1", "7.1", 9, False),
    ],
)
def test_torch_and_card_with_the_fault(
    version: str, hip: str | None, major: int, is_faulty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.version, "hip", hip)
    found = SimpleNamespace(name="NVIDIA H200", major=major, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: found)
    device = torch.device("cuda", 0)
    assert masked_attention_fault(device) == (f"torch {version} on NVIDIA H200" if is_faulty else "")
    assert not masked_attention_fault(torch.device("cpu"))
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        assert not masked_attention_fault(device), "cuDNN is switched off"


@pytest.mark.parametrize("recompute", ["always", "never"])
@pytest.mark.usefixtures("faulty")
def test_calls_with_a_mask_leave_cudnn_out(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward, recomputation and evaluation."""
    calls: list[tuple[bool, bool]] = []
    attend = nn.functional.scaled_dot_product_attention

    def watched(*args: Any, attn_mask: Any = None, **options: Any) -> torch.Tensor:
        calls.append((attn_mask is not None, torch.backends.cuda.cudnn_sdp_enabled()))
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    batch = tokens(0)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 7:] = 0
    padded = {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    with Engine(build(llama), SGD(lr=0.1), precision="fp32", recompute=recompute, max_grad_norm=None) as engine:
        for each, is_masked in ((batch, False), (padded, True)):
            engine.step(each)  # recorded
            engine.evaluate(each)
            for run in (engine.step, engine.evaluate):
                calls.clear()
                run(each)
                assert set(calls) == {(is_masked, not is_masked)}
    assert torch.backends.cuda.cudnn_sdp_enabled()


class Windowed(Block):
    """Attention to all tokens; in rows above 20 tokens, longer than those of a recording, also to the last few.

    The mask of the window is an argument by keyword or by position, or a bias of `multi_head_attention_forward`.
    """

    kind = "keyword"

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        q = self.norm(h).unsqueeze(1)
        mixed = attend(q, q, q)
        if h.shape[1] > 20:
            window = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).tril().triu(-4)
            if self.kind == "heads":
                masked = self.heads(q[:, 0], q[:, 0], q[:, 0], attn_mask=~window)[0].unsqueeze(1)
            else:
                masked = attend(q, q, q, attn_mask=window) if self.kind == "keyword" else attend(q, q, q, window)
            mixed = mixed + masked
        return super().forward(h + mixed.squeeze(1))


class Calls(TorchFunctionMode):
    """Notes calls of attention: with a mask or without, with cuDNN or without."""

    def __init__(self) -> None:
        self.found: list[tuple[bool, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (attend, nn.functional.multi_head_attention_forward):
            is_masked = kwargs.get("attn_mask") is not None or (func is attend and len(args) > 3)
            self.found.append((is_masked, torch.backends.cuda.cudnn_sdp_enabled()))
        return func(*args, **kwargs)


@pytest.mark.parametrize(("kind", "recompute"), [("keyword", "always"), ("position", "never"), ("heads", "always")])
@pytest.mark.usefixtures("faulty")
def test_a_mask_made_inside_a_unit_leaves_cudnn_out(kind: str, recompute: str) -> None:
    """Also in its first use, later than the recording, and in the recomputation. Other calls keep cuDNN.

    Breaks: masks among arguments alone; a unit watched in its recording alone, or in the first use alone.
    """
    model = build(partial(Stack, Windowed))
    for block in model.blocks:
        block.kind = kind
    with Engine(model, SGD(lr=0.1), precision="fp32", recompute=recompute) as engine:
        for length, wanted in ((8, {(False, True)}), (24, {(False, True), (True, False)})):
            for _ in range(3):
                with Calls() as calls:
                    engine.step(words(length=length), loss_fn=cross_entropy)
                assert set(calls.found) == wanted
        watched = [each.unit.name for each in watched_uses(engine, words(length=8))]
        assert watched == ["blocks.0", "blocks.1", "blocks.2"], "the embedding makes no mask"


def watched_uses(engine: Engine, batch: dict[str, Tensor]) -> list[masked_attention.Watched]:
    """Return the watched forwards of an evaluation."""
    stage = parts_of(engine).stages
    found: list[masked_attention.Watched] = []
    original = stage.forward_of

    def forward_of(unit: Any, use: Any) -> Any:
        forward = original(unit, use)
        if isinstance(forward, masked_attention.Watched):
            found.append(forward)
        return forward

    stage.forward_of = forward_of
    engine.evaluate(batch, loss_fn=cross_entropy)
    return found


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.usefixtures("faulty")
def test_a_block_with_a_mask_is_compiled_without_cudnn(is_masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler chooses the kernels. Break: compile outside `masks_left_out`."""
    found: set[bool] = set()

    def compiled(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        found.add(torch.backends.cuda.cudnn_sdp_enabled())
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(compiled_forwards, "BACKEND", compiled)
    with Engine(build(partial(Stack, Windowed)), SGD(lr=0.1), precision="fp32", compile="always") as engine:
        engine.step(words(length=24 if is_masked else 8), loss_fn=cross_entropy)
        assert engine.compiled_classes
    assert found == {not is_masked}


class Again(Stage):
    """A stage with another recomputation than forward."""

    def for_recomputation(self, forward: Any) -> Any:
        assert forward is len
        return lambda tensors: (len(tensors), torch.backends.cuda.cudnn_sdp_enabled())


def test_another_stage_gets_its_own_forward_for_the_recomputation() -> None:
    """Break: leave out `for_recomputation`."""
    stage = masked_attention.MaskedAttention(Again(OriginalForward()))
    assert stage.for_recomputation(masked_attention.WithoutCudnn(len))([1, 2]) == (2, False)
    assert stage.for_recomputation(len)([1, 2]) == (2, True)


def test_the_flag_is_back_after_a_failed_forward() -> None:
    def fail() -> None:
        raise ValueError("in the model")

    with pytest.raises(ValueError, match="in the model"):
        masked_attention.WithoutCudnn(fail)()
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.usefixtures("faulty")
def test_a_gradient_that_is_not_finite_names_cudnn() -> None:
    scale = [1.0]
    text = r"cuDNN may be the cause \(torch 2.13.0 on NVIDIA H200\): call torch.*Otherwise: Lower"
    with Engine(build(llama), SGD(lr=0.1), precision="fp32") as engine:
        engine.step(tokens(0), loss_fn=lambda outputs, _batch: outputs.loss * scale[0])
        scale[0] = float("inf")
        with pytest.raises(NonFiniteError, match=text):
            engine.step(tokens(1), loss_fn=lambda outputs, _batch: outputs.loss * scale[0])
