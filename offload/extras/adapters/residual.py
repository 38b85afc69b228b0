"""A base minus the initial product of an adapter, W - B0 A0, computed on each read of W from the files.

`BaseReads` reads unfilled base weights while an adapter is initialized, and recognizes the product. PiSSA
(arXiv:2404.02948, equation 4); OLoRA (arXiv:2406.01775, algorithm 1).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from offload.app.hf.deferred_init import SHAPE_OPERATIONS
from offload.app.hf.models import BuiltModel
from offload.app.hf.sources import RemovedProduct, ResidualSource
from offload.errors import ConfigError
from offload.files.sources import Source

_MATRIX = re.compile(r"base_model\.model\.(?P<module>.*)\.lora_(embedding_)?(?P<key>[AB])(\.weight)?")
"""LoRA matrix names in PEFT's files."""


def subtract_products(built: BuiltModel, removed: Mapping[str, RemovedProduct]) -> BuiltModel:
    """Return an unfilled model with the products in `removed` subtracted from its weights.

    Products added to `removed` later are subtracted too.
    """
    names = {id(parameter): name for name, parameter in built.model.named_parameters()}

    def source(name: str) -> Source | None:
        original = built.source(name)
        if original is None or name not in removed:
            return original
        return ResidualSource(original, removed[name])

    def fill(name: str, module: nn.Module) -> Mapping[nn.Parameter, Source]:
        sources = dict(built.fill(name, module) or {})
        for parameter in module.parameters():
            reduced = source(key) if (key := names.get(id(parameter))) in removed else None  # type: ignore[arg-type]
            if reduced is not None:
                sources[parameter] = reduced
        return sources

    return replace(built, fill=fill, source=source)


def to_bytes(removed: Mapping[str, RemovedProduct]) -> bytes:
    """Return the removed products as safetensors bytes."""
    tensors = {f"{name}.{key}": getattr(each, key) for name, each in removed.items() for key in ("left", "right")}
    tensors |= {f"{name}.transposed": torch.tensor(each.transposed) for name, each in removed.items()}
    return safetensors.torch.save(tensors)


def from_bytes(data: bytes) -> dict[str, RemovedProduct]:
    """Return the products from `to_bytes`.

    Each tensor gets separate memory: alignment can change the last bits of a product.
    """
    tensors = {key: value.clone() for key, value in safetensors.torch.load(data).items()}
    names = [key.removesuffix(".left") for key in tensors if key.endswith(".left")]
    return {
        name: RemovedProduct(tensors[f"{name}.left"], tensors[f"{name}.right"], bool(tensors[f"{name}.transposed"]))
        for name in names
    }


def to_plain_lora(
    model: Any, config: Any, values: Mapping[str, torch.Tensor], removed: Mapping[str, RemovedProduct]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return configuration and values for a LoRA with twice the rank over the original base.

    The result equals the adapter over the reduced base: B A - B0 A0 = [B, -B0] [A; A0], as PEFT converts
    (`path_initial_model_for_weight_conversion`). `values`: by PEFT's names in an adapter file. Raises ConfigError.
    """
    if config.use_rslora and (config.rank_pattern or config.alpha_pattern):
        raise ConfigError(
            "the adapter cannot be converted for the original base weights: PEFT does not convert use_rslora with "
            "rank_pattern or alpha_pattern. Merge it (offload export RUN OUT --merge)."
        )
    converted, base = dict(values), model.get_base_model()
    for name, value in values.items():
        match = _MATRIX.fullmatch(name)
        if match is not None:
            product, is_b = removed.get(f"{match['module']}.weight"), match["key"] == "B"
            extra = torch.zeros_like(value)
            if product is not None:
                scale = base.get_submodule(match["module"]).scaling[model.active_adapter]
                extra = product.right.to(value.dtype)
                if is_b:  # PEFT multiplies B A by the scale, and the product was removed as a whole
                    extra = (product.left / -scale).to(value.dtype)
            converted[name] = torch.cat([value, extra], dim=int(is_b))
    plain = copy.deepcopy(config)
    plain.init_lora_weights = True
    plain.inference_mode = True
    plain.r = 2 * config.r
    # The scale must not change: alpha / r, or alpha / sqrt(r) with use_rslora.
    factor: float = 2
    if config.use_rslora:
        factor = 2**0.5
    plain.lora_alpha = factor * config.lora_alpha
    plain.rank_pattern = {key: 2 * value for key, value in (config.rank_pattern or {}).items()}
    plain.alpha_pattern = {key: 2 * value for key, value in (config.alpha_pattern or {}).items()}
    return plain, converted


class BaseReads(TorchFunctionMode):
    """Torch function mode: fills base parameters on first read during adapter initialization.

    A parameter gets values when an operation reads it and loses them when an operation reads another parameter, so few
    weights are in memory at once. Written values stay. If a written value equals the weight minus the last matrix
    product, bit for bit, only the product is kept.
    """

    def __init__(self, built: BuiltModel, removed: Mapping[str, RemovedProduct]) -> None:
        """`removed`: products already subtracted from base weights, by weight name."""
        super().__init__()
        self.removed = dict(removed)
        """Products subtracted so far, by base parameter name."""
        # The model as in the files, and minus the products found so far.
        self._base = built
        self._built = subtract_products(built, self.removed)
        self._product: tuple[torch.Tensor, ...] = ()  # operands of the last matrix product
        self._alive = {id(parameter): parameter for parameter in built.model.parameters()}  # keeps ids unique
        self._names = {id(parameter): name for name, parameter in built.model.named_parameters()}
        self._unfilled: dict[int, torch.Tensor] = {}  # by id: unfilled data while the parameter is filled
        self._initial_sources: dict[nn.Parameter, Source] = {}
        self._overwritten: dict[int, torch.Tensor] = {}  # by id: unfilled data before the write

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._release()

    @property
    def changed_names(self) -> list[str]:
        """Names of frozen parameters with changed values."""
        return [self._names[key] for key in self._overwritten if not self._alive[key].requires_grad]

    def restore_unchanged(self) -> None:
        """Drop written values that equal the original ones."""
        for key in list(self._overwritten):
            parameter = self._alive[key]
            source = self._built.source(self._names[key])
            with torch._C.DisableTorchFunction():
                if source is not None and torch.equal(parameter.data.view(-1), source.read(0, parameter.numel())):
                    parameter.data = self._overwritten.pop(key)

    def fill(self, name: str, module: nn.Module) -> Mapping[nn.Parameter, Source]:
        """Fill a module like `BuiltModel.fill`, but leave changed values alone."""
        sources = dict(self._built.fill(name, module) or {})
        for parameter in module.parameters():
            if parameter in self._initial_sources:
                sources[parameter] = self._initial_sources.pop(parameter)
            if id(parameter) in self._overwritten:
                sources.pop(parameter, None)
        return sources

    def source(self, name: str) -> Source | None:
        """Return the base source for a parameter, minus the removed product."""
        return self._built.source(name)

    def unchanged_names(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """Yield (name in the adapted model, name in the base) for each unchanged base parameter."""
        for name, parameter in model.named_parameters():
            if id(parameter) in self._names and id(parameter) not in self._overwritten:
                yield name, self._names[id(parameter)]

    def _release(self, kept: Collection[int] = ()) -> None:
        for key in self._unfilled.keys() - set(kept):
            self._alive[key].data = self._unfilled.pop(key)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        # Shapes, flags and gradients need no values. `data` is how PEFT reads and writes a weight.
        is_attribute = name in ("__get__", "__set__") and owner != "data"
        if is_attribute or name in SHAPE_OPERATIONS:
            return func(*args, **kwargs)
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        keys = [id(each) for each in tensors if id(each) in self._names]
        is_write = name == "__set__" or (name.endswith("_") and not name.endswith("__"))
        if keys:
            self._release(kept=keys)
        for key in keys:
            if key in self._unfilled or key in self._overwritten:
                continue
            source, parameter = self._built.source(self._names[key]), self._alive[key]
            if source is not None:
                self._unfilled[key] = parameter.data
                parameter.data = source.read(0, parameter.numel()).view(parameter.shape)
                continue
            for module in self._built.model.modules():  # not in the files: initialized once, then kept
                if any(each is parameter for each in module._parameters.values()):
                    self._initial_sources.update(self._built.fill("", module) or {})
        # The first tensor is the one written: `w.data = x`, `w.mul_(x)`.
        if keys and is_write and id(tensors[0]) == keys[0]:
            self._overwritten.setdefault(keys[0], self._unfilled.pop(keys[0], tensors[0].data))
        result = func(*args, **kwargs)
        if name in ("matmul", "__matmul__"):
            self._product = args
        elif keys and name == "__set__":
            self._recognize_product(keys[0])
        return result

    def _recognize_product(self, key: int) -> None:
        """Replace a written value by the last matrix product if the product is exactly the difference."""
        name, parameter = self._names[key], self._alive[key]
        source = self._base.source(name)
        if source is None or [each.dim() for each in (parameter, *self._product)] != [2, 2, 2]:
            return
        weight = source.read(0, parameter.numel()).view(parameter.shape)
        left, right = (each.detach().float().clone(memory_format=torch.contiguous_format) for each in self._product)
        # A Conv1D and an embedding store the transposed matrix.
        for transposed in (False, True):
            removed = RemovedProduct(left, right, transposed)
            if removed.product().shape == weight.shape and torch.equal(
                removed.subtract_from(weight), parameter.detach()
            ):
                self.removed[name] = removed
                parameter.data = self._overwritten.pop(key)
                return
