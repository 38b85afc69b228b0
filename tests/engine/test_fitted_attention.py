"""Calls of attention fit the card: grouped heads, dtypes of masks, and cuDNN left out where it can be wrong."""

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
from offload.engine.units import fitted_attention
from offload.errors import NonFiniteError
from offload.extras.large import compiled_forwards
from offload.extras.large.document_operation import OPERATION
from offload.fused_attention import Capability, bound_call, fitted, fused, kernel_of
from tests.cases.models import build, llama, tokens
from tests.engine.handmade import WIDTH, Block, Stack, cross_entropy, words

FAULT = "torch 2.13.0 on NVIDIA H200"
T4, V100, A100, RTX_4090, H200, B200 = (7, 5), (7, 0), (8, 0), (8, 9), (9, 0), (10, 0)
HALF, FULL = torch.float16, torch.float32


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that gives the CPU a compute capability, and cuDNN's fault where the card has it."""

    def give(capability: Capability) -> None:
        monkeypatch.setattr(fitted_attention, "capability_of", lambda _: capability)
        fault = FAULT if capability[0] in (9, 10) else ""
        for module in (fitted_attention, policies):
            monkeypatch.setattr(module, "masked_attention_fault", lambda _: fault)

    return give


# -- the table -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "dtype", "plain", "masked", "grouped"),
    [
        ((6, 0), HALF, "efficient", "efficient", ""),
        (V100, HALF, "efficient", "efficient", ""),
        (T4, HALF, "efficient", "efficient", ""),
        (T4, torch.bfloat16, "", "", ""),
        (T4, FULL, "efficient", "efficient", ""),
        (A100, torch.bfloat16, "flash", "efficient", "flash"),
        (A100, FULL, "efficient", "efficient", ""),
        (RTX_4090, HALF, "flash", "efficient", "flash"),
        (H200, torch.bfloat16, "cudnn", "efficient", "cudnn"),
        (B200, torch.bfloat16, "cudnn", "efficient", "cudnn"),
        (B200, FULL, "efficient", "efficient", ""),
        ((12, 0), torch.bfloat16, "flash", "efficient", "flash"),
        ((12, 1), FULL, "efficient", "efficient", ""),
        (None, FULL, "flash", "flash", "flash"),
        (H200, torch.float64, "", "", ""),
    ],
)
def test_kernel_by_card(
    capability: Capability | None,
    dtype: torch.dtype,
    plain: str,
    masked: str,
    grouped: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0+cu130"))
    kinds = (False, False), (True, False), (False, True)
    assert [fused(capability, dtype, *kind, 128, 128) for kind in kinds] == [plain, masked, grouped]


def test_kernel_by_head_and_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (128, 128), (256, 256), (512, 512), (192, 128), (12, 12)
    found = [fused(H200, HALF, False, False, *each) for each in sizes]
    assert found == ["cudnn", "flash", "efficient", "efficient", "flash"]
    assert [fused(T4, HALF, False, False, *each) for each in sizes] == ["efficient"] * 4 + [""]
    versions = "2.10.0", "2.13.1", "2.14.0"
    by_version = []
    for version in versions:
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        by_version.append((fused(H200, HALF, True, False, 64), fused(T4, HALF, False, True, 64)))
    assert by_version == [("cudnn", ""), ("efficient", ""), ("cudnn", "efficient")]


# -- grouped heads and masks ---------------------------------------------------------------------------------


def heads(num: int, dtype: torch.dtype = FULL) -> Tensor:
    return torch.randn(2, num, 6, 8, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize(("capability", "dtype"), [(T4, FULL), (T4, HALF), (H200, FULL), (H200, torch.bfloat16)])
def test_grouped_heads_are_repeated_where_no_kernel_takes_them(capability: Capability, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = [heads(num, dtype) for num in (4, 2, 2)]
    call = bound_call(tuple(given), {"is_causal": True, "enable_gqa": True})
    found = fitted(capability, call)
    assert kernel_of(capability, found), "a fused kernel"
    assert (found is call) is (capability == H200 and dtype != FULL), "what a kernel takes stays"
    gradients = []
    for each in (call, found):
        result = attend(**each)
        gradients.append([result, *torch.autograd.grad(result.sum(), given)])
    for own, other in zip(*gradients, strict=True):
        assert torch.allclose(own, other, atol=1e-5 if dtype == FULL else 5e-3)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_a_mask_gets_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    """Break: cast without a limit: a row of numbers below all of the dtype becomes a row of -inf, without a mean."""
    least = torch.finfo(FULL).min
    mask = torch.tensor([[0.5, -torch.inf, least], [least, least, least]])
    call = {"query": torch.ones(1, 1, 2, 8, dtype=dtype), "attn_mask": mask}
    found = fitted(H200, call | {"key": call["query"], "value": call["query"]})["attn_mask"]
    assert found.dtype == dtype
    assert found[0, 0] == 0.5
    assert found[0, 1].isneginf()
    assert found[1].isfinite().all()
    for same in (found, mask > 0):
        assert fitted(H200, call | {"attn_mask": same})["attn_mask"] is same


class Calls(TorchFunctionMode):
    """Notes calls of attention: with a mask, with cuDNN, with grouped heads."""

    def __init__(self) -> None:
        self.found: list[tuple[bool, bool, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (attend, nn.functional.multi_head_attention_forward):
            is_masked = kwargs.get("attn_mask") is not None or (func is attend and len(args) > 3)
            is_grouped = kwargs.get("enable_gqa", False)
            self.found.append((is_masked, torch.backends.cuda.cudnn_sdp_enabled(), is_grouped))
        return func(*args, **kwargs)


@pytest.mark.parametrize(("capability", "is_grouped"), [(T4, False), (H200, False), (None, True)])
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_a_model_calls_attention_as_the_card_has_it(
    capability: Capability | None, is_grouped: bool, recompute: str, card: Any
) -> None:
    """In fp32: forward, recomputation, evaluation, and the comparison with plain PyTorch. Break: fit the streamed
    forward alone: the comparison then finds other bits."""
    if capability is not None:
        card(capability)
    batch = tokens(0)
    with Engine(
        build(partial(llama, num_key_value_heads=1)), SGD(lr=0.1), precision="fp32", recompute=recompute
    ) as engine:
        with Calls() as calls:
            engine.step(batch)
            engine.evaluate(batch)
            engine.step(batch)
        assert {each[2] for each in calls.found} == {is_grouped}


def test_documents_in_a_compiled_block_repeat_grouped_heads(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traced block has them in one operation. Break: fit the calls of a graph alone."""
    card(T4)
    starts = torch.tensor([[6, 0, 0, 6, 0, 0]] * 2, dtype=torch.int32)
    given = [heads(num) for num in (4, 2, 2)]
    found = list[bool]()

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        found.append(bool(fitted(T4, bound_call(args, kwargs))["enable_gqa"]))
        return attend(*args, **kwargs)

    monkeypatch.setitem(fitted_attention._FITTED, attend, noted)
    result, _ = OPERATION(*given, starts, None)
    result.sum().backward()
    assert found == [False] * 8, "two documents in each of two rows, twice"


# -- cuDNN ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "hip", "major", "is_faulty"),
    [
        ("2.10.0+cu128", None, 9, False),
        ("2.11.0+cu128", None, 9, True),
        ("2.13.1", None, 9, True),
        ("2.14.0", None, 9, False),
        ("2.13.0+cu130", None, 8, False),
        ("2.13.0+cu130", None, 10, True),
        ("2.13.0+cu130", None, 12, False),
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
def test_calls_with_a_mask_leave_cudnn_out(recompute: str, card: Any) -> None:
    """In forward, recomputation and evaluation."""
    card(H200)
    batch = tokens(0)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 7:] = 0
    padded = {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    with Engine(build(llama), SGD(lr=0.1), precision="fp32", recompute=recompute, max_grad_norm=None) as engine:
        for each, is_masked in ((batch, False), (padded, True)):
            with Calls() as calls:
                engine.step(each)  # recorded
                engine.evaluate(each)
                engine.step(each)
            assert {found[:2] for found in calls.found if found[0]} == ({(True, False)} if is_masked else set())
            assert all(with_cudnn for has_mask, with_cudnn, _ in calls.found if not has_mask)
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


@pytest.mark.parametrize(("kind", "recompute"), [("keyword", "always"), ("position", "never"), ("heads", "always")])
def test_a_mask_made_inside_a_unit_leaves_cudnn_out(kind: str, recompute: str, card: Any) -> None:
    """Also in its first use, later than the recording, and in the recomputation. Other calls keep cuDNN."""
    card(H200)
    model = build(partial(Stack, Windowed))
    for block in model.blocks:
        block.kind = kind
    with Engine(model, SGD(lr=0.1), precision="fp32", recompute=recompute) as engine:
        for length, wanted in ((8, {(False, True)}), (24, {(False, True), (True, False)})):
            for _ in range(3):
                with Calls() as calls:
                    engine.step(words(length=length), loss_fn=cross_entropy)
                assert {each[:2] for each in calls.found} == wanted


def trace_into(found: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled blocks run their graphs, and note the calls of attention there."""

    def compiled(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            with found:
                return graph(*args)

        return run

    torch._dynamo.reset()
    monkeypatch.setattr(compiled_forwards, "BACKEND", compiled)


@pytest.mark.parametrize("length", [8, 24])
def test_a_block_is_compiled_with_attention_as_the_card_has_it(
    length: int, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler chooses the kernels of the calls. Break: compile the graph as it was traced."""
    card(H200)
    found = Calls()
    trace_into(found, monkeypatch)
    with Engine(build(partial(Stack, Windowed)), SGD(lr=0.1), precision="fp32", compile="always") as engine:
        engine.step(words(length=length), loss_fn=cross_entropy)
        assert engine.compiled_classes
    assert {each[:2] for each in found.found} == ({(False, True)} if length == 8 else {(False, True), (True, False)})


def test_a_compiled_block_repeats_grouped_heads(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break: leave `fit_graph` to masks."""
    card(T4)

    class Grouped(Block):
        def forward(self, h: Tensor) -> Tensor:
            q = self.norm(h).unflatten(-1, (-1, 8)).transpose(1, 2)
            mixed = attend(q, q[:, :1], q[:, :1], is_causal=True, enable_gqa=True)
            return super().forward(h + mixed.transpose(1, 2).flatten(-2))

    found = Calls()
    trace_into(found, monkeypatch)
    with Engine(build(partial(Stack, Grouped)), SGD(lr=0.1), precision="fp32", compile="always") as engine:
        engine.step(words(), loss_fn=cross_entropy)
        assert engine.compiled_classes
    assert set(found.found) == {(False, True, False)}


def test_the_flag_is_back_after_a_failed_call(card: Any) -> None:
    card(H200)
    query = torch.ones(1, 1, 2, 8)
    with pytest.raises(RuntimeError), fitted_attention.FittedAttention():
        attend(query, query, query, torch.ones(7, 7, dtype=torch.bool))
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_gradient_that_is_not_finite_names_cudnn(card: Any) -> None:
    card(H200)
    scale = [1.0]
    text = r"cuDNN may be the cause \(torch 2.13.0 on NVIDIA H200\): call torch.*Otherwise: Lower"
    with Engine(build(llama), SGD(lr=0.1), precision="fp32") as engine:
        engine.step(tokens(0), loss_fn=lambda outputs, _batch: outputs.loss * scale[0])
        scale[0] = float("inf")
        with pytest.raises(NonFiniteError, match=text):
            engine.step(tokens(1), loss_fn=lambda outputs, _batch: outputs.loss * scale[0])
