"""Products in FP8: losses, norms and weights equal plain PyTorch with the same rounding."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.nn.utils import parametrizations
from torch.torch_version import TorchVersion

from offload import Engine, Placement
from offload.accelerators import CudaAccelerator
from offload.engine.units.stages import stages_in_memory
from offload.errors import ConfigError
from offload.extras.large import compiled_forwards
from offload.extras.quant import products, weight_codes
from offload.extras.quant.casts import ScaledMatrix, to_fp8
from offload.extras.quant.products import Fp8Products
from offload.extras.quant.weight_codes import multiply
from offload.planning.memory import BESIDE
from offload.planning.settings import Settings
from tests.cases.models import adapted, batches, build, gpt2, llama, t5, tokens
from tests.engine.compare import assert_same, step_of, train_both, weights
from tests.engine.device import cpu_only, own_device
from tests.engine.fp8 import LEAST_SIZE, multiply_in_fp8
from tests.engine.inside import leave_spare_memory, parts_of, planned_bytes
from tests.engine.reference import Reference, count_labels, sum_by_layer
from tests.engine.test_frozen_weights import dequantised

ROWWISE: dict[str, Any] = {"matmul": "fp8_rowwise", "precision": "bf16"}
TENSORWISE: dict[str, Any] = {"matmul": "fp8_tensorwise", "precision": "bf16"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_SIZE", LEAST_SIZE)


def model(**settings: Any) -> nn.Module:
    """All linear layers in the blocks have multiples of 16; the keys and values of grouped heads are too narrow."""
    return build(lambda: llama(**settings))


def both(settings: dict[str, Any], make: Any = model, **options: Any) -> Engine:
    """Train the engine beside plain PyTorch for two steps and compare all bits."""
    group = partial(multiply_in_fp8, settings["matmul"])
    return train_both(make(), batches(2), group=group, **settings, **options)[0]


def test_steps_are_those_of_plain_pytorch_with_one_scale_for_a_matrix() -> None:
    """tests/cases/features.py has one scale for a row."""
    engine = both(TENSORWISE)
    assert "10 linear layers of blocks multiply in FP8" in engine.told_tiles
    with Engine(model(), precision="bf16") as exact:
        assert exact.step(tokens(0)).loss.item() != Engine(model(), **TENSORWISE).step(tokens(0)).loss.item()


def test_micro_batches_multiply_by_row_as_the_whole_batch_does() -> None:
    """The loss and the gradients of all layers in the blocks have the bits of whole batches in plain PyTorch, where a
    weight gradient is the sum over rows in fp32, rounded once.
    """
    own, wide = build(lambda: llama(num_key_value_heads=4)), {"max_grad_norm": None, "precision": "bf16"}
    plain = Reference(own, group=partial(multiply_in_fp8, "in parts"), **wide)
    loss, _ = plain.step(tokens(0))
    with Engine(own, micro_batch_size=1, matmul="fp8_rowwise", **wide) as engine:
        assert engine.step(tokens(0)).loss.item() == loss.item()
        found = weights(engine)
    layers = [name for name in found if "proj" in name]
    assert len(layers) == 14
    assert_same({name: found[name] for name in layers}, {name: plain.masters[name] for name in layers})


def test_one_scale_for_all_rows_is_found_by_the_trial_runs() -> None:
    """A token depends on all rows. As with any model that mixes rows, batches stay whole, with a warning."""
    with pytest.warns(UserWarning, match="the engine and plain PyTorch give different.*batches are not split"):
        both(TENSORWISE | {"micro_batch_size": 1}, whole=True)


@cpu_only("compiles for the CPU")
def test_compiled_blocks_multiply_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a backend that runs the traced operations, compiled blocks have the bits of plain PyTorch."""
    torch._dynamo.reset()
    monkeypatch.setattr(compiled_forwards, "BACKEND", "aot_eager")
    engine = both(ROWWISE | {"compile": "always"})
    assert engine.compiled_classes
    assert engine.compiled_graphs <= 2, "equal layers share their graphs"


NUM_BYTES = {"fp8_rowwise": 15696, "fp8_tensorwise": 13392}
"""Codes of a block: two of each of 6,656 weights, fp32 scales of 16 bytes or a row; and by row the largest cast."""


@cpu_only("compiles for the CPU")
@pytest.mark.parametrize(
    ("settings", "of_weights", "of_inputs", "of_gradients"),
    [
        (ROWWISE | {"micro_batch_size": 1}, 3, 64, 40),
        (ROWWISE | {"micro_batch_size": 1, "compile": "always"}, 3, 0, 0),  # in the graph
        (ROWWISE | {"micro_batch_size": 1, "recompute": "never"}, 2, 32, 40),
        (ROWWISE | {"micro_batch_size": 1, "recompute": "products"}, 2, 64, 40),
        (TENSORWISE, 2, 16, 10),
    ],
)
def test_weights_are_cast_once_in_a_use_and_inputs_once_for_their_layers(
    settings: dict[str, Any], of_weights: int, of_inputs: int, of_gradients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights: in the forward, and in the backward for the recomputation and for the gradient, whatever the
    micro-batches; with one scale for both the codes are one cast. Inputs: two layers read one of the four in a block.
    With one scale, the gradient of a weight has the codes of the forward.

    Breaks: `close` at the end of a micro-batch, or no `close` at all; `_casts` left empty.
    """
    torch._dynamo.reset()
    monkeypatch.setattr(compiled_forwards, "BACKEND", "aot_eager")
    casts = Counter[object]()

    def count(module: ModuleType) -> None:
        def cast(matrix: torch.Tensor, **options: Any) -> ScaledMatrix:
            casts[module] += 1
            return to_fp8(matrix, **options)

        monkeypatch.setattr(module, "to_fp8", cast)

    count(weight_codes)
    if of_inputs:  # a counter would break a graph
        count(products)
    with Engine(model(), **settings) as engine:
        for seed in range(3):
            casts.clear()
            engine.step(tokens(seed))
        assert casts[weight_codes] == of_weights * 10
        assert casts[products] == of_inputs + of_gradients
        assert planned_bytes(engine)["device", BESIDE] == NUM_BYTES[settings["matmul"]]


def test_an_input_changed_in_place_is_cast_again() -> None:
    """Break: no version in `_cast`."""
    layers = [nn.Linear(LEAST_SIZE, LEAST_SIZE, dtype=torch.bfloat16, device=own_device()) for _ in range(2)]
    values = torch.ones(4, LEAST_SIZE, dtype=torch.bfloat16, device=own_device())
    first = products._linear_by_row(layers[0], values)
    values[0] = 3
    assert products._linear_by_row(layers[1], values).equal(products._linear_by_row(layers[1], values.clone()))
    assert not products._linear_by_row(layers[0], values).equal(first)


@cpu_only("compiles for the CPU")
@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["fp8_rowwise", "fp8_tensorwise"])
def test_compiled_blocks_cast_an_input_once_and_beside_its_neighbours(matmul: str) -> None:
    """Seven layers read four inputs. Breaks: no `joint_custom_pre_pass`, or the tag `needs_fixed_stride_order`."""
    torch._dynamo.reset()
    own = model(num_key_value_heads=4).bfloat16()
    hidden = torch.randn(2, 8, 32, dtype=torch.bfloat16)
    embeddings = own.model.rotary_emb(hidden, torch.arange(8)[None])
    with stages_in_memory(own, Settings(matmul=matmul, precision="bf16")), torch.no_grad(), fresh_cache():
        layer = own.model.layers[0]
        compiled_forwards.compile_modules([layer])
        _, (code,) = run_and_get_code(partial(layer, hidden, position_embeddings=embeddings))
    read = re.findall(r"offload\.fp8_product\.default\((\w+), ", code)
    assert (len(read), len(set(read))) == (7, 4)
    assert not re.findall(r"aten\.\w*(norm|_to_copy)\S*\(", code), "all casts are in fused kernels"


def test_layers_cut_out_of_blocks_multiply_as_in_whole_blocks() -> None:
    """A budget below a block makes its modules units."""
    places = [Placement(device_memory=size, activations="cpu") for size in (None, "40KiB")]
    engines = [Engine(model(), placement=place, **ROWWISE) for place in places]
    assert [any(unit.is_block for unit in parts_of(engine).units) for engine in engines] == [True, False]
    losses = [[engine.step(tokens(seed)).loss.item() for seed in range(2)] for engine in engines]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("codec", ["nf4", "int8", "fp8"])
def test_quantized_frozen_weights_are_decoded_and_then_cast(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base = build(adapted)
    group = partial(multiply_in_fp8, "fp8_rowwise")
    plain = dequantised(base, codec, torch.bfloat16)
    train_both(base, batches(2), plain=plain, group=group, frozen_weights=codec, **ROWWISE)


def test_steps_over_fp8_codes_are_those_over_exact_weights(tmp_path: Path) -> None:
    """With one scale for a matrix, from the disk, and resumed. The link moves half the bytes. By row only the decoded
    weights have these steps: the gradient of an input casts the whole weight.

    Break: a scale for each record.
    """
    states = {"parameters": "nvme", "optimizer": "nvme", "nvme_dir": str(tmp_path)}
    settings = TENSORWISE | {"prefetch": 0}
    with Engine(build(adapted), placement=Placement(parameters="cpu", optimizer="cpu"), **settings) as exact:
        leave_spare_memory(exact)
        wanted = [step_of(exact, tokens(seed)) for seed in range(3)]
        masters, exact_bytes = weights(exact), exact.counters.h2d_bytes
    settings |= {"frozen_weights": "fp8", "placement": Placement(**states)}
    with Engine(build(adapted), **settings) as engine:
        found = [step_of(engine, tokens(seed)) for seed in range(2)]
        engine.save_checkpoint(tmp_path / "saved", trained_only=True)
    with Engine(build(adapted), **settings) as engine:
        leave_spare_memory(engine)
        engine.load_checkpoint(tmp_path / "saved")
        found.append(step_of(engine, tokens(2)))
        shares = [(region.weight_bytes, region.travelling_bytes) for region in parts_of(engine).regions]
        own, moved = weights(engine), engine.counters.h2d_bytes
    assert found == wanted
    trained = [name for name, weight in engine.model.named_parameters() if weight.requires_grad]
    assert_same({name: own[name] for name in trained}, {name: masters[name] for name in trained})
    assert exact_bytes - moved == 2 * sum(whole - codes for whole, codes in shares), "twice a step"
    assert sum(codes for whole, codes in shares if codes < whole) == 88 * 1028, "the blocks' linear layers"


def test_other_layers_keep_their_products() -> None:
    """Heads, embeddings, narrow layers and layers of another class stay in bf16; the original forwards come back."""
    own = model()
    engine = Engine(own, **ROWWISE)
    changed = [
        f"model.layers.{name}" for name, module in own.model.layers.named_modules() if has_own(module) and "." in name
    ]
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert changed == [f"model.layers.{number}.{name}" for number in range(2) for name in names]
    engine.close(restore=True)
    assert not any(map(has_own, own.modules()))
    batch = tokens(0, device=own.bfloat16().device)
    exact = own(**batch).loss.item()
    with stages_in_memory(own, Settings(**ROWWISE)):
        assert own(**batch).loss.item() != exact
    assert own(**batch).loss.item() == exact


def has_own(module: nn.Module) -> bool:
    return "forward" in vars(module)


def test_a_weight_computed_from_parameters_is_cast() -> None:
    """Break: read `weight` in `_find_layers`, before the engine has weights on the device."""

    def make() -> nn.Module:
        own = llama()
        for layer in own.model.layers:
            parametrizations.weight_norm(layer.mlp.up_proj)
        return own

    engine = both(ROWWISE, lambda: build(make))
    assert "10 linear layers" in engine.told_tiles


def test_fp32_layers_in_a_bf16_model_are_multiplied_in_fp32() -> None:
    """T5 keeps one projection of each layer in fp32."""

    def group(model: nn.Module) -> None:
        sum_by_layer(model)
        multiply_in_fp8("fp8_rowwise", model)

    own, kept = build(lambda: t5(dropout_rate=0.0)), lambda name: name.endswith("DenseReluDense.wo.weight")
    train_both(own, batches(2), count=count_labels, group=group, kept=kept, **ROWWISE)


def test_a_matrix_in_fp8_is_scaled_to_the_largest_number() -> None:
    matrix = torch.tensor([[1.0, -3.0], [0.0, 0.0], [1e30, 2e30]], dtype=torch.bfloat16, device=own_device())
    by_row = to_fp8(matrix, by_row=True)
    assert by_row.values.float().tolist() == [[144.0, -448.0], [0.0, 0.0], [224.0, 448.0]]
    assert torch.allclose(by_row.scale[:, 0].cpu(), torch.tensor([3 / 448, 1e-12 / 448, 2e30 / 448]), rtol=1e-2)
    assert to_fp8(matrix, by_row=False).values.float().tolist() == [[0.0, 0.0], [0.0, 0.0], [224.0, 448.0]]
    bad = torch.tensor([[1.0, torch.nan], [torch.inf, 1.0]], dtype=torch.bfloat16, device=own_device())
    ones = ScaledMatrix(
        torch.ones(16, 2, device=own_device()).to(torch.float8_e4m3fn), torch.ones(16, 1, device=own_device())
    )
    if own_device().type != "cuda":
        assert multiply(to_fp8(bad, by_row=True), ones, is_fast=True).isnan().all(), "non-finite values are seen"


SMALL = Placement(device_memory="64KiB", activations="cpu")


@pytest.mark.parametrize(
    ("make", "least", "settings", "text"),
    [
        (llama, 32, {"matmul": "fp8"}, "train.matmul is 'fp8'; this version allows precision, fp8_rowwise, fp8_tensor"),
        (llama, 32, {"matmul": "fp8_rowwise"}, "FP8 products return bf16.*--train.precision bf16"),
        (llama, 1024, ROWWISE, r"1024 or more inputs.*the largest has \[48, 32\]: set --train.matmul prec"),
        (gpt2, 1024, ROWWISE, "have no torch.nn.Linear"),
        (
            partial(llama, intermediate_size=512),
            32,
            ROWWISE | {"placement": SMALL},
            "proj is larger than the device memory per unit and is split into row blocks.*--offload.device_memory",
        ),
    ],
)
def test_models_and_settings_without_fp8_products_are_refused(
    make: Any, least: int, settings: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "LEAST_SIZE", least)
    with pytest.raises(ConfigError, match=text):
        Engine(build(make), **settings)


def test_devices_without_fp8_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name="RTX 3090", total_memory=1, major=8, minor=6)
    module = SimpleNamespace(cudart=None, get_device_properties=lambda _device: found)
    accelerator = CudaAccelerator(torch.device("cuda"), module)
    assert accelerator.lacks_fp8 == "has compute capability 8.6, and FP8 products need 8.9 or above"
    monkeypatch.setattr(products, "own_accelerator", lambda _name: accelerator)
    text = "train.matmul is fp8_rowwise, but RTX 3090 has compute capability 8.6.*--train.matmul precision"
    with pytest.raises(ConfigError, match=text):
        Fp8Products.over(None, None, Settings(**ROWWISE))  # type: ignore[arg-type]


def card(**settings: Any) -> Any:
    """A card that multiplies in FP8, played by the CPU."""
    device = torch.device("cpu")
    usual = {"device": device, "lacks_fp8": "", "loses_fp8_stream": False, "is_on_default_stream": True}
    return SimpleNamespace(describe=lambda: {"name": "RTX 5090"}, **(usual | settings))


def emulated(left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor, other: torch.Tensor, **_: Any) -> Any:
    return ((left.float() @ right.float()) * scale * other).bfloat16()


def not_supported(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`\nmore")


@cpu_only("the card is played by the CPU")
@pytest.mark.parametrize("settings", [ROWWISE, TENSORWISE])
@pytest.mark.parametrize(
    ("product", "problem"),
    [
        (emulated, ""),
        (not_supported, "CUBLAS_STATUS_NOT_SUPPORTED"),
        (
            lambda *each, **_: torch.zeros(len(each[0]), each[1].shape[1], dtype=torch.bfloat16),
            "the sum of 1,024 ones is wrong",
        ),
        (
            lambda *each, **_: torch.full((len(each[0]), each[1].shape[1]), float("nan"), dtype=torch.bfloat16),
            "is wrong",
        ),
    ],
)
def test_a_recipe_is_tried_before_the_weights_are_read(
    settings: dict[str, Any], product: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS has no row scales on some cards and versions; the error came in the first step."""
    monkeypatch.setattr(products, "own_accelerator", lambda _name: card())
    for module in (products, weight_codes):
        monkeypatch.setattr(module, "multiplies_fp8", lambda _device_type: True)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    if not problem:
        with Engine(model(), **settings) as engine:
            assert engine.step(tokens(0)).loss.isfinite()
        return
    other = ({"fp8_rowwise", "fp8_tensorwise"} - {settings["matmul"]}).pop()
    text = rf"{settings['matmul']}, but torch .* on RTX 5090 \(.*{problem}.*\): set --train.matmul {other}"
    with pytest.raises(ConfigError, match=text):
        Engine(model(), **settings)


@pytest.mark.slow
@cpu_only("the card is played by the CPU")
def test_products_that_lose_the_stream_are_refused_inside_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = card(loses_fp8_stream=True)
    monkeypatch.setattr(products, "own_accelerator", lambda _name: found)
    with Engine(model(), **ROWWISE) as engine:
        engine.step(tokens(0))
        found.is_on_default_stream = False
        with pytest.raises(ConfigError, match=r"on a stream of its own.*install torch 2.12.*fp8_tensorwise"):
            engine.step(tokens(0))
        found.is_on_default_stream = True
        engine.step(tokens(0))
    found.is_on_default_stream = False
    for settings, loses in ((TENSORWISE, True), (ROWWISE, False)):
        found.loses_fp8_stream = loses
        with Engine(model(), **settings) as engine:
            engine.step(tokens(0))


@pytest.mark.parametrize(
    ("version", "minor", "loses"), [("2.11.0+cu126", 9, True), ("2.12.0", 9, False), ("2.11.0", 6, False)]
)
def test_cards_whose_products_lose_the_stream(
    version: str, minor: int, loses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    found = SimpleNamespace(name="RTX 4090", major=8, minor=minor)
    streams = {"current_stream": lambda _device: "side", "default_stream": lambda _device: "first"}
    module = SimpleNamespace(get_device_properties=lambda _device: found, **streams)
    accelerator = CudaAccelerator(torch.device("cuda"), module)
    assert accelerator.loses_fp8_stream is loses
    assert not accelerator.is_on_default_stream
    module.current_stream = module.default_stream
    assert accelerator.is_on_default_stream
