"""Linear layers of blocks multiply in FP8, numbers of eight bits, by `torch._scaled_mm`.

Two recipes of torchao (torchao/float8/config.py: rowwise_with_gw_hp and tensorwise), with scales from the values of
each use. x: input [tokens, K], W: weight [N, K], g: gradient of the result [tokens, N].

| product | fp8_rowwise | fp8_tensorwise |
|---|---|---|
| result x W' | a scale per row of x and of W, e4m3 | a scale for x and one for W, e4m3 |
| gradient of x: g W | a scale per row of g, one for W, e4m3 | a scale for g (e5m2) and one for W (e4m3) |
| gradient of W: g' x | bf16 | a scale for g (e5m2) and one for x (e4m3) |

With a scale per row a token does not depend on the others, so micro-batches have the results of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from offload.accelerators import Accelerator, multiplies_fp8, own_accelerator
from offload.engine.units.find import ParameterPlace, UnitCandidate, find_blocks
from offload.engine.units.stages import Host, Stage
from offload.engine.units.unit import CutLayer, Unit
from offload.engine.units.use import Forward, Use
from offload.errors import ConfigError
from offload.extras.quant.casts import ScaledMatrix, to_fp8
from offload.extras.quant.weight_codes import PRODUCT, WeightCodes, code_bytes, multiply, transposed
from offload.layout.residence import DEVICE
from offload.modules import forwards_replaced
from offload.planning.memory import BESIDE
from offload.planning.settings import Settings

ROWWISE = "fp8_rowwise"
LEAST_SIZE = 1024
"""Smallest K and N of a layer. Below, the casts take longer than the product saves; routers are smaller, too."""
MULTIPLE = 16
"""Sizes in FP8 products are multiples of this number."""
_OTHERS = {ROWWISE: "fp8_tensorwise", "fp8_tensorwise": ROWWISE}
_TRIED_ERROR = 0.1
"""Relative error in the trial of a recipe: FP8 has three bits (e4m3) or two (e5m2) after the first."""
_TRIED_TOKENS = 100
"""Tokens in the trial of a recipe: no multiple of a tile, as in any batch."""


class _Product(torch.autograd.Function):
    """tokens [tokens, K] times weight' [K, N], bf16. `values` and `scale`: the tokens in FP8.

    The graph saves what the gradient of the weight reads: by row tokens in bf16, like a product in bf16, else in FP8.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, values: Tensor, scale: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        ctx.by_row = by_row
        if by_row:
            ctx.save_for_backward(weight, tokens)
        else:
            ctx.save_for_backward(weight, values, scale)
        return PRODUCT(values, scale, weight, by_row, False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        needs_tokens, _, _, needs_weight, _ = ctx.needs_input_grad
        of_tokens = of_weight = None
        if ctx.by_row:
            if needs_tokens:
                of_tokens = PRODUCT(*to_fp8(gradient, by_row=True), weight, True, True)
            if needs_weight:
                # In bf16, as in the recipe: this product sums over tokens, and each token has a scale of its own.
                of_weight = gradient.t() @ saved[0]
            return of_tokens, None, None, of_weight, None
        scaled = to_fp8(gradient, by_row=False, dtype=torch.float8_e5m2)
        if needs_tokens:
            of_tokens = PRODUCT(*scaled, weight, False, True)
        if needs_weight:
            of_weight = multiply(_by_column(scaled), _by_column(ScaledMatrix(*saved)), is_fast=False)
        return of_tokens, None, None, of_weight, None


def _by_column(matrix: ScaledMatrix) -> ScaledMatrix:
    """Return the transposed matrix, with columns of zeros up to a multiple of `MULTIPLE`: a product sums over them."""
    missing = -len(matrix.values) % MULTIPLE
    if not missing:
        return transposed(matrix)
    values = nn.functional.pad(matrix.values.view(torch.uint8), (0, 0, 0, missing)).view(matrix.values.dtype)
    return transposed(ScaledMatrix(values, matrix.scale))


_casts: Any = WeakIdKeyDictionary()
"""The last input and its codes, for the next layer that reads it: query, key and value do one after another."""


def _cast(input: Tensor, tokens: Tensor, by_row: bool) -> ScaledMatrix:  # noqa: A002
    """Return the codes of an input, as rows of tokens; those of the last input if it is the same and unchanged."""
    # In a graph of torch.compile equal operations become one. Inference tensors count no changes.
    if torch.compiler.is_compiling() or input.is_inference():
        return to_fp8(tokens, by_row=by_row)
    state = input._version, by_row
    found = _casts.get(input)
    if found is None or found[0] != state:
        _casts.clear()
        found = _casts[input] = state, to_fp8(tokens, by_row=by_row)
    return found[1]


def _linear_by_row(layer: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002 - the name in nn.Linear
    return _linear(layer, input, by_row=True)


def _linear_by_matrix(layer: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002
    return _linear(layer, input, by_row=False)


def _linear(layer: nn.Linear, input: Tensor, *, by_row: bool) -> Tensor:  # noqa: A002
    """Return the result of a linear layer, multiplied in FP8. Other dtypes than bf16, and no tokens: as without FP8."""
    weight = layer.weight
    # `linear` casts under autocast. A custom function gets its inputs as they are.
    casts = input.dtype != weight.dtype and torch.is_autocast_enabled(input.device.type)
    tokens = input.to(weight.dtype) if casts else input
    if tokens.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or not tokens.numel():
        return nn.functional.linear(input, weight, layer.bias)
    tokens = tokens.reshape(-1, tokens.shape[-1])
    result = _Product.apply(tokens, *_cast(input, tokens.detach(), by_row), weight, by_row)
    result = result.view(*input.shape[:-1], len(weight))
    if layer.bias is not None:
        result = result + layer.bias
    return result


class Fp8Products(Stage):
    """Linear layers inside of blocks multiply in FP8, also in trials and evaluations.

    Trials compare the engine with the same layers in plain PyTorch, so they find models whose results change between
    micro-batches, as with one scale for a matrix. A unit use casts each weight once (`WeightCodes`).
    """

    def __init__(
        self,
        inner: Stage,
        host: Host,
        settings: Settings,
        layers: Collection[nn.Linear],
        accelerator: Accelerator | None,
    ) -> None:
        """`layers`: they multiply in FP8. `accelerator`: the device, if its products are right on the default stream
        alone.
        """
        super().__init__(inner)
        self._model = host.model
        self._settings = settings
        self._layers = frozenset(layers)
        self._accelerator = accelerator
        self._undo = ExitStack()

        # Codes while a unit is in use.
        self._device = host.device
        memory = torch.empty(0, dtype=torch.uint8)
        if num_bytes := host.plan.of(DEVICE, BESIDE).num_bytes:  # none for blocks that stay on the device
            memory = host.device.allocate(BESIDE, num_bytes)
        self._codes = WeightCodes(memory, by_row=settings.matmul == ROWWISE)
        self._weights = dict[int, list[int]]()
        """Parameters with codes, by unit number."""

    @classmethod
    def over(cls, inner: Stage, host: Host, settings: Settings) -> Stage:
        accelerator = own_accelerator(settings.device)
        if accelerator is not None and accelerator.lacks_fp8:
            raise ConfigError(
                f"train.matmul is {settings.matmul}, but {accelerator.describe()['name']} {accelerator.lacks_fp8}: set "
                "--train.matmul precision."
            )
        if accelerator is not None and multiplies_fp8(accelerator.device.type):
            _try_recipe(accelerator, settings.matmul)
        # Before the first step: a model without these layers would silently train in bf16.
        layers = _check_layers(host.model, settings)
        for unit in host.units:
            if isinstance(unit, CutLayer) and unit.module in layers:
                raise ConfigError(
                    f"train.matmul is {settings.matmul}, but {unit.name} is larger than the device memory per unit and "
                    "is split into row blocks, and scales need the whole weight: raise --offload.device_memory, or set "
                    "--train.matmul precision."
                )
        if accelerator is not None and not (settings.matmul == ROWWISE and accelerator.loses_fp8_stream):
            accelerator = None
        return cls(inner, host, settings, layers, accelerator)

    @classmethod
    def beside(cls, model: nn.Module, settings: Settings) -> Callable[[UnitCandidate], int]:
        layers = frozenset(find_layers(find_blocks(model)))

        def num_bytes(unit: UnitCandidate) -> int:
            shapes = [_shape_of(place.module) for place in _places_in(unit.places, layers)]
            return code_bytes(shapes, by_row=settings.matmul == ROWWISE)

        return num_bytes

    @classmethod
    def in_memory(cls, model: nn.Module, settings: Settings) -> AbstractContextManager[None]:
        forward = _linear_by_row if settings.matmul == ROWWISE else _linear_by_matrix
        # Methods, because torch.compile makes a graph for each object in a `partial`.
        return forwards_replaced({layer: MethodType(forward, layer) for layer in find_layers(find_blocks(model))})

    def forward_of(self, unit: Unit, use: Use) -> Forward:
        if self._accelerator is not None and not self._accelerator.is_on_default_stream:
            raise ConfigError(
                f"train.matmul is {ROWWISE}, and this loop computes on a stream of its own, but torch "
                f"{torch.__version__} runs these products of {self._accelerator.describe()['name']} on the default "
                "stream: leave that stream out, install torch 2.12 or newer, or set --train.matmul fp8_tensorwise."
            )
        return super().forward_of(unit, use)

    def enter(self, unit: Unit) -> None:
        super().enter(unit)
        if unit.number not in self._weights:
            self._weights[unit.number] = [place.parameter for place in _places_in(unit.places, self._layers)]
        if indices := self._weights[unit.number]:
            live = unit.live()
            self._codes.open(live[index] for index in indices)

    def leave(self) -> None:
        self._codes.close()
        super().leave()

    def divert(self) -> None:
        super().divert()
        self._undo.enter_context(self.in_memory(self._model, self._settings))

    def undo(self) -> None:
        super().undo()
        self._undo.close()
        self._codes.free()
        self._device.ledger.drop(BESIDE)

    @property
    def description(self) -> str:
        text = f"{len(self._layers)} linear layers of blocks multiply in FP8 ({self._settings.matmul})"
        if not multiplies_fp8(self._device.torch_device.type):
            text += ", emulated in fp32 on this device (slow)"
        return ".\n".join(filter(None, (self.inner.description, text)))


def _try_recipe(accelerator: Accelerator, matmul: str) -> None:
    """Run one layer forward and backward, because torch may lack the products of a recipe for this GPU.

    Raises ConfigError with torch's reason.
    """
    options: Any = {"dtype": torch.bfloat16, "device": accelerator.device, "requires_grad": True}
    tokens, weight = torch.ones(_TRIED_TOKENS, 1024, **options), torch.ones(1024, 1024, **options)
    problem = "the sum of 1,024 ones is wrong"
    try:
        with torch.enable_grad(), torch.inference_mode(False):
            by_row = matmul == ROWWISE
            result = _Product.apply(tokens, *to_fp8(tokens.detach(), by_row=by_row), weight, by_row)
            gradients = torch.autograd.grad(result, (tokens, weight), torch.ones_like(result))
        # All terms are ones, which FP8 represents up to the rounding of a scale.
        pairs = zip((result, *gradients), (1024, 1024, _TRIED_TOKENS), strict=True)
        if all(bool(((product / number - 1).abs() < _TRIED_ERROR).all()) for product, number in pairs):
            return
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    raise ConfigError(
        f"train.matmul is {matmul}, but torch {torch.__version__} does not multiply so on "
        f"{accelerator.describe()['name']} ({problem}): set --train.matmul {_OTHERS[matmul]}, or precision."
    )


def _linears(blocks: Iterable[nn.Module]) -> Iterator[nn.Linear]:
    """Yield the linear layers of blocks with the forward of torch, each once."""
    for module in dict.fromkeys(module for block in blocks for module in block.modules()):
        # A subclass with another forward may read the weight in any way.
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
            yield module


def find_layers(blocks: Iterable[nn.Module]) -> list[nn.Linear]:
    """Return the layers of blocks that multiply in FP8."""
    return [
        layer
        for layer in _linears(blocks)
        if all(size >= LEAST_SIZE and size % MULTIPLE == 0 for size in _shape_of(layer))
    ]


def _places_in(places: Iterable[ParameterPlace], layers: Collection[nn.Module]) -> list[Any]:
    """Return the places where weights multiply in FP8."""
    return [place for place in places if place.key == "weight" and place.module in layers]


def _shape_of(layer: nn.Linear) -> tuple[int, int]:
    """Return the shape of the weight, without reading the weight: a parametrization would compute it."""
    return layer.out_features, layer.in_features


def _check_layers(model: nn.Module, settings: Settings) -> list[nn.Linear]:
    """Return the layers that multiply in FP8. Raises ConfigError for none."""
    blocks = list(find_blocks(model))
    if layers := find_layers(blocks):
        return layers
    shapes = [_shape_of(layer) for layer in _linears(blocks)]
    largest = max(shapes, key=lambda shape: (min(shape), max(shape)), default=None)
    found = "have no torch.nn.Linear"
    if largest is not None:
        found = f"have none; the largest has {list(largest)}"
    raise ConfigError(
        f"train.matmul is {settings.matmul}, for linear layers of {LEAST_SIZE} or more inputs and outputs, in "
        f"multiples of {MULTIPLE}, but the blocks of the model {found}: set --train.matmul precision."
    )
