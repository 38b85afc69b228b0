"""Read weights from a Hugging Face folder module by module, so a model larger than memory can be loaded.

The model is built with unfilled parameters (`deferred_init.py`). Each parameter then gets its values from the needed
ranges in the safetensors files, renamed and fused by transformers' own rules (`names.py`). Parameters missing from the
files are initialized as in a randomly initialized model.
"""

from __future__ import annotations

import copy
import json
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from offload.app.hf.deferred_init import DeferredInit
from offload.app.hf.names import (
    CannotStream,
    Shape,
    drop_tied,
    drop_unimportant,
    plan_reading,
    plan_writing,
    recompute_buffers,
    stays_fp32,
    tied_names,
    untie,
)
from offload.app.hf.quantized import (
    PlannedWeight,
    QuantizedTensor,
    find_format,
    first_dtype,
    open_folder,
    quantization_settings,
    remove_quantization,
)
from offload.app.hf.sources import (
    FusedSource,
    GrownSource,
    QuantizedStackedSource,
    QuantizedTensorSource,
    StackedSource,
    TensorSource,
    are_equal,
)
from offload.engine.units.offloaded_tensor import OffloadedTensor
from offload.errors import ConfigError, first_names
from offload.files.sources import QuantizedSource, Source
from offload.layout.codecs import Codec
from offload.tiers.host import trim_heap


@dataclass(frozen=True)
class LoadReport:
    """Match between a folder and a model. Parameter names are the model's, unexpected tensor names the files'."""

    tied: dict[str, str] = field(default_factory=dict)  # name -> name it shares values with
    untied: list[str] = field(default_factory=list)  # tied by the configuration, but different in the files
    missing: dict[str, Shape] = field(default_factory=dict)  # initialized randomly
    unexpected: dict[str, Shape] = field(default_factory=dict)  # not read
    grown: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)  # name -> (shape in the files, in the model)


class FolderWeights:
    """Weights in a folder for one model. Call `fill(name, module)` just before the module parameters are taken."""

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        deferred: DeferredInit | None = None,
        *,
        files: Mapping[str, Any] | None = None,
        grow: bool = False,
    ) -> None:
        """Plan the reads for `model`, which has unfilled parameters in the wanted dtype. Buffers are read at once.

        - files: readers from `open_folder`. None: open the folder as unquantized.
        - deferred: recording mode during the model build; initializes parameters missing from the files.
        - grow: embeddings may have more rows than in the files. Each added row is the mean of the others (the
          transformers resize samples from a normal distribution around the mean, with a billionth of the width).

        Raises ConfigError, DiskError, CannotStream.
        """
        self._model = model
        self._folder = folder
        if files is None:
            files = open_folder(weight_files(folder), folder, None)
        self._files = files
        state = model.state_dict(keep_vars=True)
        if not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise CannotStream(f"{type(model).__name__} has more than tensors in its state_dict.")
        sources, unexpected, shapes = find_sources(model, folder, self._files)
        self._sources = sources
        # Dtypes before ties: two tied weights are compared as the model will have them.
        self._resolve_dtypes(state)
        grown = self._check_shapes(state, _embeddings(model) if grow else set())
        tied, untied = self._resolve_ties(state)
        # Anew: a cut tie has made another parameter.
        state = model.state_dict(keep_vars=True)
        stored_ids = {id(state[name]) for name in self._sources}
        absent = {name for name, value in state.items() if id(value) not in stored_ids}
        missing, unused = drop_unimportant(model, absent, unexpected)
        self.report = LoadReport(
            tied,
            untied,
            {name: tuple(state[name].shape) for name in sorted(missing)},
            {name: shapes[name] for name in sorted(unused)},
            grown,
        )
        first = {id(state[name]): name for name in reversed(list(self._sources))}  # one of several tied names is read
        self._first = {name: first[id(value)] for name, value in state.items() if id(value) in first}
        # By identity: a module may be copied, with the same parameters in the copy (PEFT's layer_replication).
        parameters = {first: state[first] for first in self._first.values() if isinstance(state[first], nn.Parameter)}
        self._first_by_id = {id(parameter): first for first, parameter in parameters.items()}
        self._pending: dict[str, weakref.ref[nn.Parameter]] = {
            first: weakref.ref(parameter) for first, parameter in parameters.items()
        }
        # The alias keeps the address in use, so no other parameter can get it. Unwritten memory costs nothing.
        self._unfilled = {parameter.data_ptr(): (first, parameter.detach()) for first, parameter in parameters.items()}
        self._unfilled.pop(0, None)  # empty, or on meta
        self.quantized = quantized_codecs(model, self._sources)
        """Parameters stored quantized in the files, and their codecs."""
        self._initial: Callable[[str, nn.Module], None] | None = None
        if deferred is not None:
            # Only for parameters missing in the files: forget all other recorded writes.
            self._initial = deferred.bind(model, only={id(state[name]) for name in absent})
        elif absent & {name for name, _ in model.named_parameters()}:
            raise ConfigError(f"the weights in {folder} lack {', '.join(sorted(absent)[:3])}.")
        for name, source in self._sources.items():
            if not isinstance(state[name], nn.Parameter):
                owner_name, _, key = name.rpartition(".")
                value = source.read(0, math.prod(source.shape)).view(source.shape)
                model.get_submodule(owner_name)._buffers[key] = value

    def fill(self, name: str, module: nn.Module) -> dict[nn.Parameter, Source]:
        """Fill the unfilled parameters of the module `name`.

        Parameters readable in pieces are left to the caller: their sources are returned, once. Memory: fused parameters
        briefly take two or three times their bytes, one group at a time. Raises DiskError.
        """
        trim_heap()  # parameters taken earlier are free by now, but malloc would keep most memory
        wanted: dict[str, nn.Parameter] = {}
        for owner in module.modules():
            for parameter in owner._parameters.values():
                first = self._first_by_id.get(id(parameter), "")
                # A taken parameter was replaced by another object in its place.
                if parameter is not None and first in self._pending and parameter is self._pending[first]():
                    wanted[first] = parameter
        sources: dict[nn.Parameter, Source] = {}
        fused: dict[int, dict[str, torch.Tensor]] = {}  # several parameters may come from one conversion
        for first, target in wanted.items():
            source: Source = self._sources[first]
            self._unfilled.pop(target.data_ptr(), None)
            if isinstance(source, FusedSource):  # any read of a part would convert the whole
                values = fused.get(id(source.conversion)) or source.convert()
                target.data = values.pop(first)
                fused[id(source.conversion)] = {key: each for key, each in values.items() if key in wanted}
            else:
                sources[target] = source
            del self._pending[first]
        if self._initial is not None:
            self._initial(name, module)
        self._refuse_unfilled(name, module)
        return sources

    def _refuse_unfilled(self, prefix: str, module: nn.Module) -> None:
        """Raise ConfigError for a parameter over memory that no value was written to."""
        for key, parameter in module.named_parameters():
            if isinstance(parameter, OffloadedTensor) or parameter.data_ptr() not in self._unfilled:
                continue
            raise ConfigError(
                f"{prefix}.{key} has no values: it is a new parameter over the memory of "
                f"{self._unfilled[parameter.data_ptr()][0]}, which was not read from {self._folder} before. Change the "
                "model after the weights are read: load it with from_pretrained, and pass it without fill."
            )

    def source(self, name: str) -> Source | None:
        """Return the source for a parameter. None: not in any file, initialized instead."""
        if name in self._first:
            return self._sources[self._first[name]]
        return None

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _check_shapes(self, state: Mapping[str, torch.Tensor], may_grow: set[int]) -> dict[str, tuple[Shape, Shape]]:
        """Accept embeddings allowed to grow. Raises ConfigError for any other shape mismatch."""
        grown, mismatches = {}, []
        for name, source in self._sources.items():
            shape, file_shape = tuple(state[name].shape), source.shape
            if shape == file_shape:
                continue
            # New tokens are rows at the end; any other difference means another model.
            grows = (
                isinstance(source, TensorSource) and len(shape) == len(file_shape) > 0 and 0 < file_shape[0] < shape[0]
            )
            if grows and file_shape[1:] == shape[1:] and id(state[name]) in may_grow:
                self._sources[name] = GrownSource(source, shape)
                grown[name] = (file_shape, shape)
            else:
                mismatches.append(f"{name} is {list(file_shape)} in the files and {list(shape)} in the model")
        if mismatches:
            listed = first_names(mismatches, 3, ", and {} more", between="; ")
            raise ConfigError(
                f"the weights in {self._folder} do not fit its configuration: {listed}. "
                "Change the sizes in config.json to those in the files, or give a folder whose configuration and files "
                "belong together."
            )
        return grown

    def _resolve_dtypes(self, state: Mapping[str, torch.Tensor]) -> None:
        """Read as fp32 each tensor that transformers keeps in fp32, for the parameter dtype or the compute dtype."""
        build_dtype = getattr(getattr(self._model, "config", None), "dtype", None)
        is_kept = [stays_fp32(self._model, dtype) for dtype in (getattr(self._model, "dtype", None), build_dtype)]
        for name, source in self._sources.items():
            if state[name].is_floating_point() and any(kept(name) for kept in is_kept):
                source.dtype = torch.float32
                if isinstance(state[name], nn.Parameter) and state[name].dtype != torch.float32:
                    state[name].data = torch.empty(state[name].shape, dtype=torch.float32)

    def _resolve_ties(self, state: Mapping[str, torch.Tensor]) -> tuple[dict[str, str], list[str]]:
        """Tie parameters as configured, except those with different values in the files. Return (tied, untied)."""
        tied: dict[str, str] = {}
        untied: list[str] = []
        for name, other in tied_names(self._model).items():
            if name not in state or other not in state or state[name] is not state[other]:
                continue
            source, other_source = self._sources.get(name), self._sources.get(other)
            # A fine-tune may have trained both apart, and the configuration still ties them.
            if source is None or other_source is None or are_equal(source, other_source):
                tied[name] = other
                if source is not None and other_source is not None:
                    del self._sources[name]
                continue
            untie(self._model, name)
            untied.append(name)
        return tied, untied


def find_sources(
    model: nn.Module, folder: Path, files: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str], dict[str, Shape]]:
    """Return a source for each model tensor in the files, in the model dtype.

    Return also, for file tensors without a place in the model: the renamed name, and the shape. Raises ConfigError,
    CannotStream.
    """
    state = model.state_dict(keep_vars=True)
    metas = {
        name: torch.empty(file.entries[name].shape, dtype=torch.float32, device="meta") for name, file in files.items()
    }
    try:
        plan = plan_reading(model, metas)
    except ValueError as error:
        raise ConfigError(f"the weights in {folder} do not fit {type(model).__name__}: {error}.") from error
    # The class of a source says how to read: in ranges, in rows, or only as a whole.
    sources, unexpected = dict[str, Any](), dict(plan.unexpected)
    shapes = {name: files[name].entries[name].shape for name in unexpected}
    for conversion in plan.conversions:
        for name, shape in conversion.outputs.items():
            if name not in state:
                unexpected[name], shapes[name] = name, shape
            elif conversion.is_identity:
                key = conversion.sources[0]
                source_class: type[TensorSource] | type[QuantizedTensorSource] = TensorSource
                if isinstance(files[key], QuantizedTensor):
                    source_class = QuantizedTensorSource
                sources[name] = source_class(files[key], key, shape, state[name].dtype)
            elif conversion.is_stacked:
                stacked = StackedSource(files, conversion, shape, state[name].dtype)
                sources[name] = QuantizedStackedSource.of(stacked) or stacked
            else:
                sources[name] = FusedSource(files, conversion, name, shape, state[name].dtype)
    return sources, unexpected, shapes


def quantized_codecs(model: nn.Module, sources: Mapping[str, Source]) -> dict[nn.Parameter, Codec]:
    """Return the model parameters with quantized sources, and their codecs."""
    state = model.state_dict(keep_vars=True)
    return {state[name]: each.codec for name, each in sources.items() if isinstance(each, QuantizedSource)}


def stored_dtype(folder: Path, quantization: Mapping[str, Any] | None) -> torch.dtype:
    """Return the dtype of parameters from a folder whose configuration names none, without reading weights.

    Raises ConfigError, DiskError.
    """
    files = open_folder(weight_files(folder), folder, quantization)
    try:
        return first_dtype(folder, files)
    finally:
        for file in files.values():
            file.close()


def quantized_parameters(model: nn.Module, folder: Path, quantization: Mapping[str, Any]) -> dict[nn.Parameter, Codec]:
    """Return the parameters stored quantized in a folder, and their codecs, without reading weights.

    `model` may be on `meta`. `quantization`: settings from the configuration. Raises ConfigError, DiskError.
    """
    files = open_folder(weight_files(folder), folder, quantization)
    try:
        return quantized_codecs(model, find_sources(model, folder, files)[0])
    finally:
        for file in files.values():
            file.close()


def planned_parameters(
    model: nn.Module, written: nn.Module, path: Path, quantization: Mapping[str, Any], dtype: torch.dtype
) -> dict[nn.Parameter, Codec]:
    """Return the parameters that a folder with this configuration stores quantized, and their codecs, without a folder.

    `model`, `written`: the trained model and the model in the files, on `meta`. Weights have the names and shapes that
    `save_pretrained` gives to those of `written`. `path`: the configuration, for messages. `dtype`: of unquantized
    weights. Raises ConfigError, CannotStream.
    """
    metas = {name: torch.empty(each.shape, device="meta") for name, each in written.state_dict(keep_vars=True).items()}
    weights = []
    for conversion in plan_writing(written, drop_tied(written, metas))[0]:
        module_name, _, key = conversion.sources[0].rpartition(".")
        module = written.get_submodule(module_name)
        weights += [PlannedWeight(name, shape, module_name, module, key) for name, shape in conversion.outputs.items()]
    readers = find_format(path, quantization).planned_readers(written, weights, path, dtype)
    return quantized_codecs(model, find_sources(model, path, readers)[0])


def _embeddings(model: nn.Module) -> set[int]:
    """Return the ids of parameters with one row per token."""
    modules = []
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            modules.append(getattr(model, name)())
        except (AttributeError, NotImplementedError):  # some families raise for a missing head
            continue
    return {id(parameter) for module in modules if module is not None for parameter in module.parameters()}


def build_empty(
    make: Callable[..., nn.Module],
    config: PreTrainedConfig,
    dtype: torch.dtype,
    parameter_dtype: torch.dtype,
    **options: Any,
) -> Any:
    """Build a model as `from_pretrained(dtype=dtype)` would, with unfilled parameters in the dtype `parameter_dtype`.

    Scales and position tables are rounded to the dtype at build time and keep this rounding under other weights. Call
    under a DeferredInit. `make`: `from_config` of a transformers Auto class, called with `options`.
    """
    model = make(remove_quantization(copy.deepcopy(config)), dtype=dtype, **options)
    recompute_buffers(model)
    if parameter_dtype != dtype:
        replace_parameters(model, make(remove_quantization(copy.deepcopy(config)), dtype=parameter_dtype, **options))
    return model


def replace_parameters(model: nn.Module, other: nn.Module) -> None:
    """Replace the model parameters by those of another model with the same architecture."""
    for module, other_module in zip(model.modules(), other.modules(), strict=True):
        module._parameters.update(other_module._parameters)


def read_model(
    auto: Any,
    folder: Path,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    grow: bool = False,
    **options: Any,
) -> tuple[nn.Module, FolderWeights]:
    """Build the folder's model as `auto.from_pretrained(folder, dtype=dtype)` would, in eval mode, without weights.

    `FolderWeights.fill` provides the weights in the dtype of the files. For quantized weights, the model is the
    dequantized one. `auto`: transformers Auto class. `dtype`: None for the dtype of the files. `options`: for
    `from_config`, for example attn_implementation. Raises ConfigError, DiskError, and CannotStream if only
    `from_pretrained` itself can load the folder.
    """
    if getattr(config, "transformers_weights", None) or getattr(type(config), "extra_files", ()):
        raise CannotStream(f"the configuration in {folder} names separate weight files, which are not supported.")
    files = open_folder(weight_files(folder), folder, quantization_settings(config))
    parameter_dtype = config.dtype or first_dtype(folder, files)
    with DeferredInit(seed) as deferred:
        model: Any = build_empty(auto.from_config, config, dtype or parameter_dtype, parameter_dtype, **options)
    weights = FolderWeights(model, folder, deferred, files=files, grow=grow)
    if (folder / "generation_config.json").is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.name_or_path = model.config.name_or_path = config.name_or_path or str(folder)
    return model.eval(), weights


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files listed in the folder index. Raises ConfigError."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file() and any(folder.glob("pytorch_model*.bin")):
        raise ConfigError(
            f"{folder} has its weights as pytorch_model.bin, a format that can run any code when it is read, and "
            f"cannot be read in parts. {conversion_advice(str(folder), f'{folder}-safetensors')}"
        )
    if not index.is_file():
        others = ", ".join(sorted(file.name for file in folder.glob("*.safetensors"))[:3])
        if others:
            others = f", only {others}"
        raise ConfigError(
            f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json{others}. Give a "
            "folder that save_pretrained has written, or set --model.init random."
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{index} is not a valid index of weight files ({type(error).__name__}: {error}).") from None
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {missing[0]}, which {index.name} names ({len(missing)} of {len(names)} files are "
            "missing). Download the rest."
        )
    return [folder / name for name in names]


def has_weights(folder: Path) -> bool:
    """Return whether a folder has all weight files. False for a file."""
    try:
        return bool(weight_files(folder))
    except ConfigError:
        return False


def conversion_advice(source: str, folder: str) -> str:
    """Return instructions for converting weights to safetensors."""
    return (
        f'Convert them once: python -c "import transformers as t; a, b = {source!r}, {folder!r}; '
        "t.AutoModelForCausalLM.from_pretrained(a, dtype='auto').save_pretrained(b); "
        f't.AutoTokenizer.from_pretrained(a).save_pretrained(b)", and give that folder instead: --model.path {folder}.'
    )
