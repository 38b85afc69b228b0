"""Formats of quantized model folders: the file tensors in one weight."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from offload.app.hf.quantized import (
    FLOATS,
    Format,
    PlannedWeight,
    QuantizedTensor,
    known_formats,
    model_dtype,
    quantization_method,
    unsupported_error,
)
from offload.errors import ConfigError
from offload.extras.quant import file_codecs as codec
from offload.extras.quant.codecs import dynamic_map, nf4_levels
from offload.extras.quant.file_codecs import BitsandbytesNf4Codec, FileCodec, TiledCodec, rounding
from offload.extras.quant.planned_files import (
    PlannedFile,
    Select,
    empty,
    is_expert,
    is_grouped_linear,
    is_linear,
    target_of,
    unless_skipped,
)
from offload.files.safetensors_file import TensorEntry, TensorFile
from offload.files.sources import ReopenFile

_ROWS = 16  # rows in a record if every row has a separate scale: aligned for any even width


@dataclass(frozen=True)
class MemberTensor:
    """One tensor in a file, holding a part of a quantized weight."""

    file: TensorFile
    key: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.entries[self.key].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.file.entries[self.key].dtype

    def value(self) -> torch.Tensor:
        """Return the whole tensor. Raises DiskError."""
        return self.file.read(self.key).view(self.shape)


@dataclass(frozen=True)
class RecordPart:
    """A tensor as a sequence of equal byte groups, one group for each record."""

    tensor: MemberTensor
    num_bytes: int

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return the bytes for records `first` to `last`, uint8 [n, num_bytes], zero-padded past the tensor end.

        Raises DiskError.
        """
        width = self.tensor.dtype.itemsize
        begin, end = (min(each * self.num_bytes // width, math.prod(self.tensor.shape)) for each in (first, last))
        # The last record may be partial: a matrix need not have a multiple of its rows.
        values = self.tensor.file.read(self.tensor.key, begin, end).view(torch.uint8)
        num_missing = (last - first) * self.num_bytes - len(values)
        return torch.nn.functional.pad(values, (0, num_missing)).view(-1, self.num_bytes)


@dataclass(frozen=True)
class SharedPart:
    """Bytes shared by all records."""

    values: torch.Tensor

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return the bytes for records `first` to `last`, uint8 [n, num_bytes]."""
        return self.values.view(1, -1).expand(last - first, -1)


Assembly = tuple[tuple[int, ...], FileCodec, Sequence[RecordPart | SharedPart]]
"""Shape, codec and record parts of a weight."""


@dataclass
class RecordTensor(QuantizedTensor):
    """A quantized weight with one tensor per record part."""

    codec: FileCodec
    parts: Sequence[RecordPart | SharedPart]
    entries: dict[str, TensorEntry]
    """Weight name -> dtype and shape."""
    _cache: tuple[tuple[int, int], torch.Tensor] | None = field(default=None, repr=False)

    def records(self, begin: int, end: int) -> torch.Tensor:
        first, last = begin // self.codec.block, -(-end // self.codec.block)
        return self.codec.join([part.read(first, last) for part in self.parts])

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        # Dequantized records stay cached until a read reaches their end: a weight is read in consecutive pieces.
        entry, block = self.entries[name], self.codec.block
        numel = math.prod(entry.shape)
        if end is None:
            end = numel
        first, last = begin // block, -(-end // block)
        low, high = first * block, min(last * block, numel)
        if self._cache is None or self._cache[0] != (low, high):
            self._cache = (low, high), self.codec.read(self.records(low, high), slice(0, high - low), entry.dtype)
        values = self._cache[1][begin - low : end - low].clone()
        if end == high:
            self._cache = None
        return values

    def reopen_files(self, reopen: ReopenFile) -> RecordTensor:
        parts = [
            RecordPart(MemberTensor(reopen(part.tensor.file), part.tensor.key), part.num_bytes)
            if isinstance(part, RecordPart)
            else part
            for part in self.parts
        ]
        return RecordTensor(self.codec, parts, self.entries)

    def close(self) -> None:
        for part in self.parts:
            if isinstance(part, RecordPart):
                part.tensor.file.close()


class TensorFormat(Format):
    """Format with several file tensors per weight."""

    marker: str
    """Tensor name suffix found for every quantized weight."""
    members: tuple[str, ...]
    """Name suffixes for all tensors in a weight."""
    weight = ".weight"
    """Weight name suffix."""

    @abstractmethod
    def assemble(self, tensors: Mapping[str, MemberTensor], dtype: torch.dtype) -> Assembly:
        """Return one weight, given the tensors by name suffix and the model dtype. Raises ConfigError, DiskError."""

    @abstractmethod
    def selector(self, model: nn.Module) -> Select:
        """Return which weights of a model the configuration quantizes.

        Raises ConfigError with a part that is not supported without files.
        """

    @abstractmethod
    def planned_members(self, weight: PlannedWeight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the file tensors of one weight by name suffix. Raises ConfigError with the unsupported feature.

        Values matter only where `assemble` reads them; the others are on `meta`.
        """

    def planned_readers(
        self, model: nn.Module, weights: Sequence[PlannedWeight], path: Path, dtype: torch.dtype
    ) -> dict[str, TensorFile | QuantizedTensor]:
        tensors: dict[str, torch.Tensor] = {}
        try:
            is_quantized = self.selector(model)
            for weight in weights:
                if not is_quantized(weight):
                    tensors[weight.name] = empty(weight.shape, dtype)
                    continue
                if not weight.name.endswith(self.weight):
                    raise ConfigError(f"with {weight.name} in one tensor")
                stem = weight.name.removesuffix(self.weight)
                tensors |= {stem + end: each for end, each in self.planned_members(weight, dtype).items()}
        except ConfigError as error:
            raise unsupported_error(path, quantization_method(self._quantization), str(error)) from None
        return self._readers(dict.fromkeys(tensors, PlannedFile(path, tensors)), path, dtype)

    def readers(self, files: Mapping[str, TensorFile], folder: Path) -> dict[str, TensorFile | QuantizedTensor]:
        return self._readers(files, folder, None)

    def _readers(
        self, files: Mapping[str, TensorFile], folder: Path, dtype: torch.dtype | None
    ) -> dict[str, TensorFile | QuantizedTensor]:
        """Return the readers. `dtype`: of unquantized weights; None: the one of the folder."""
        readers: dict[str, TensorFile | QuantizedTensor] = dict(files)
        stems = [name.removesuffix(self.marker) for name in files if name.endswith(self.marker)]
        members_by_stem = {
            stem: {end: MemberTensor(files[stem + end], stem + end) for end in self.members if stem + end in files}
            for stem in stems
        }
        for member in (member for members in members_by_stem.values() for member in members.values()):
            # The parts are no tensors of the model, and one may have the name of the weight.
            del readers[member.key]
        dtype = dtype or model_dtype(folder, readers)
        for stem, members in members_by_stem.items():
            try:
                shape, codec_, parts = self.assemble(members, dtype)
            except KeyError as error:
                raise ConfigError(
                    f"{folder} has {stem}{self.marker} but no {stem}{error.args[0]}: download the folder again."
                ) from None
            name = stem + self.weight
            readers[name] = RecordTensor(codec_, parts, {name: TensorEntry(dtype, shape, 0, 0)})
        return readers


class BlockFp8(TensorFormat):
    """fp8 with a scale for each matrix block, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3)."""

    title = "block-wise fp8 as DeepSeek-V3's (fp8)"
    marker, members = ".weight_scale_inv", (".weight", ".weight_scale_inv")

    def assemble(self, tensors: Mapping[str, MemberTensor], dtype: torch.dtype) -> Assembly:
        codes, scales = tensors[".weight"], tensors[".weight_scale_inv"]
        block = self._quantization.get("weight_block_size")
        return _assemble_grid("block fp8", codec.FLOAT8, codes, codes.shape, scales, block, (dtype,))

    def selector(self, model: nn.Module) -> Select:
        told = self._quantization
        if told.get("modules_to_convert") or told.get("expert_dtype", "fp8") != "fp8":
            raise ConfigError("with quantized embeddings, or with experts in fp4")
        skipped = told.get("modules_to_not_convert", told.get("ignored_layers"))
        kinds = (is_linear, is_grouped_linear, is_expert)
        return unless_skipped(model, skipped, lambda weight: any(is_kind(weight) for is_kind in kinds))

    def planned_members(self, weight: PlannedWeight, dtype: torch.dtype) -> dict[str, torch.Tensor]:  # noqa: ARG002
        block = self._quantization.get("weight_block_size")
        # `assemble` reads the value of a scale for the whole matrix.
        scales = torch.ones(1)
        if block is not None:
            scales = empty(_grid(weight.shape, block), torch.float32)
        return {".weight": empty(weight.shape, torch.float8_e4m3fn), ".weight_scale_inv": scales}


class GptOss(TensorFormat):
    """mxfp4 for all experts in a layer at once, with each matrix transposed."""

    title = "mxfp4 as gpt-oss's"
    marker = "_blocks"
    members = "_blocks", "_scales"
    weight = ""  # the stack of experts is a parameter itself

    def assemble(self, tensors: Mapping[str, MemberTensor], dtype: torch.dtype) -> Assembly:
        codes, exponents = tensors["_blocks"], tensors["_scales"]
        if len(codes.shape) != 4 or codes.shape[3] != 16 or codes.shape[:3] != exponents.shape:
            raise _unsupported_error(codes, f"has shape {list(codes.shape)}, not [experts, columns, blocks, 16]")
        num, columns, blocks, _ = codes.shape
        mxfp4 = codec.Mxfp4Codec(32 * blocks, columns, rounding(dtype))
        parts = [RecordPart(member, size) for member, size in zip((exponents, codes), mxfp4.fields, strict=True)]
        return (num, mxfp4.rows, columns), mxfp4, parts

    def selector(self, model: nn.Module) -> Select:
        skipped = self._quantization.get("modules_to_not_convert")
        return unless_skipped(model, skipped, lambda weight: is_expert(weight) and len(weight.shape) == 3)

    def planned_members(self, weight: PlannedWeight, dtype: torch.dtype) -> dict[str, torch.Tensor]:  # noqa: ARG002
        num, rows, columns = weight.shape
        if rows % 32:
            raise ConfigError(f"with {weight.name} of {rows} rows, not a multiple of 32")
        shape = num, columns, rows // 32
        return {"_blocks": empty((*shape, 16), torch.uint8), "_scales": empty(shape, torch.uint8)}


class BitsAndBytes(TensorFormat):
    """nf4 (QLoRA, arXiv:2305.14314), with block magnitudes quantized (double quantization) or in fp32."""

    title = "nf4 as bitsandbytes saves it"
    marker = ".weight.quant_state.bitsandbytes__nf4"
    members = (
        ".weight",
        ".weight.absmax",
        ".weight.quant_map",
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        marker,
    )

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        super().__init__(quantization)
        quant_type = quantization.get("bnb_4bit_quant_type", "fp4") if quantization.get("load_in_4bit") else "int8"
        if quant_type != "nf4":
            raise ConfigError(f"as {quant_type} of bitsandbytes")

    def assemble(self, tensors: Mapping[str, MemberTensor], dtype: torch.dtype) -> Assembly:
        codes, state = tensors[".weight"], json.loads(bytes(tensors[self.marker].value().tolist()))
        shape = tuple(state["shape"])  # the codes themselves are stored in one column
        # bitsandbytes dequantizes into the dtype of the state, then transformers casts to the model's.
        rounds = rounding(getattr(torch, state["dtype"]), dtype)
        sizes = state["blocksize"], state.get("nested_blocksize", 256)
        tables = [(tensors[".weight.quant_map"], nf4_levels())]
        if ".weight.nested_quant_map" in tensors:
            tables.append((tensors[".weight.nested_quant_map"], dynamic_map()))
        # The decoder has its own tables.
        if sizes != (64, 256) or not all(
            torch.allclose(member.value(), table, rtol=1e-6, atol=1e-9) for member, table in tables
        ):
            problem = f"has blocks of {sizes[0]} and {sizes[1]} values, where only 64 and 256 with QLoRA's tables are"
            raise _unsupported_error(codes, f"{problem} supported")
        if len(tables) == 1:
            grid = TiledCodec("nf4", codec.NF4, 256, 64, (1, 64), torch.float32, rounds)
            scales = RecordPart(tensors[".weight.absmax"], grid.fields[0])
            return shape, grid, [scales, RecordPart(codes, grid.fields[1])]
        members = codes, tensors[".weight.absmax"], tensors[".weight.nested_absmax"]
        nested = BitsandbytesNf4Codec(rounds)
        parts = [RecordPart(member, size) for member, size in zip(members, nested.fields[:3], strict=True)]
        offset = torch.tensor([state["nested_offset"]], dtype=torch.float32).view(torch.uint8)
        return shape, nested, [*parts, SharedPart(offset)]

    def selector(self, model: nn.Module) -> Select:
        if any(isinstance(module, Conv1D) for module in model.modules()):
            raise ConfigError("in layers of class Conv1D")
        skipped = self._quantization.get("llm_int8_skip_modules")
        return unless_skipped(model, skipped, is_linear)

    def planned_members(self, weight: PlannedWeight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        numel = math.prod(weight.shape)
        state = {"shape": list(weight.shape), "dtype": str(dtype).removeprefix("torch."), "blocksize": 64}
        members = {
            ".weight": empty((-(-numel // 2), 1), torch.uint8),
            ".weight.absmax": empty((-(-numel // 64),), torch.float32),
            ".weight.quant_map": nf4_levels(),
        }
        if self._quantization.get("bnb_4bit_use_double_quant"):
            state |= {"nested_blocksize": 256, "nested_offset": 0.0}
            members |= {
                ".weight.absmax": empty((-(-numel // 64),), torch.uint8),
                ".weight.nested_absmax": empty((-(-numel // (64 * 256)),), torch.float32),
                ".weight.nested_quant_map": dynamic_map(),
            }
        return members | {self.marker: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


class CompressedTensors(TensorFormat):
    """Integers or fp8 with a scale for each row group, row, block or matrix."""

    title = "pack-quantized int4, int-quantized int8 and float-quantized fp8 of compressed-tensors"
    marker = ".weight_scale"
    members = (".weight", ".weight_packed", ".weight_shape", ".weight_zero_point", marker)

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        super().__init__(quantization)
        groups = quantization.get("config_groups") or {}
        self._blocks = [(group.get("weights") or {}).get("block_structure") for group in groups.values()]
        formats = {group.get("format") or quantization.get("format") for group in groups.values()}
        for format_ in sorted(map(str, formats or {quantization.get("format")})):
            if format_ not in ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"):
                raise ConfigError(f"as {format_} of compressed-tensors")
        for group in groups.values():
            weights = group.get("weights") or {}
            if not weights.get("symmetric", True):
                raise ConfigError("as integers with zero points (asymmetric) of compressed-tensors")
            if weights.get("num_bits", 8) not in (4, 8) or weights.get("actorder"):
                feature = "with actorder"
                if not weights.get("actorder"):
                    feature = f"with {weights['num_bits']} bits"
                raise ConfigError(f"{feature} of compressed-tensors")

    def assemble(self, tensors: Mapping[str, MemberTensor], dtype: torch.dtype) -> Assembly:
        scales = tensors[self.marker]
        if ".weight_zero_point" in tensors and tensors[".weight_zero_point"].value().any():
            raise _unsupported_error(tensors[".weight_zero_point"], "has a zero point other than 0")
        rounds = scales.dtype, dtype
        if ".weight_packed" not in tensors:
            codes = tensors[".weight"]
            numbers: codec.NumberFormat = codec.FLOAT8 if codes.dtype == torch.float8_e4m3fn else codec.INT8
            if codes.dtype not in (torch.int8, torch.float8_e4m3fn):
                raise _unsupported_error(
                    codes, f"has dtype {codes.dtype} with a scale, where only int8 and float8_e4m3fn are supported"
                )
            block = next(filter(None, self._blocks), None)
            return _assemble_grid(
                f"{numbers.label} (compressed-tensors)", numbers, codes, codes.shape, scales, block, rounds
            )
        codes, shape = tensors[".weight_packed"], tuple(tensors[".weight_shape"].value().tolist())
        bits = 32 * codes.shape[-1] // shape[-1]  # codes are packed along a row, into words of 32 bits
        if shape[-1] % 8 or bits not in (4, 8):  # a row of other lengths ends within a word
            raise _unsupported_error(
                codes,
                f"has rows of {shape[-1]} values in {codes.shape[-1]} words, where only 4 or 8 bits a value are "
                "supported",
            )
        numbers = codec.INT4 if bits == 4 else codec.PACKED8
        return _assemble_grid(f"{numbers.label} (compressed-tensors)", numbers, codes, shape, scales, None, rounds)

    def selector(self, model: nn.Module) -> Select:  # noqa: ARG002
        ignored = self._quantization.get("ignore") or ()
        return lambda weight: (
            weight.key != "bias" and self._group(weight) is not None and target_of(weight, ignored) is None
        )

    def _group(self, weight: PlannedWeight) -> Mapping[str, Any] | None:
        """Return the group of the configuration for a weight. None: not quantized."""
        groups = (self._quantization.get("config_groups") or {}).values()
        by_target = {target: group for group in groups for target in group.get("targets") or ()}
        target = target_of(weight, by_target)
        if target is None or not by_target[target].get("weights"):  # a group may quantize activations alone
            return None
        return by_target[target]

    def planned_members(self, weight: PlannedWeight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        group, shape = self._group(weight) or {}, weight.shape
        told = group["weights"]
        rows, width = math.prod(shape[:-1]), shape[-1]
        size, bits = told.get("group_size"), told.get("num_bits", 8)
        # Without a strategy, compressed-tensors derives one from the group size; -1: a scale for each row.
        by_size = "tensor"
        if size is not None:
            by_size = "group" if size > 0 else "channel"
        strategy = told.get("strategy") or ("block" if told.get("block_structure") else by_size)
        tiles = {"group": (1, size), "channel": (1, width), "block": told.get("block_structure")}
        scale_dtype = getattr(torch, str(told.get("scale_dtype") or dtype).removeprefix("torch."))
        if strategy == "tensor":
            scales = torch.ones(1, dtype=scale_dtype)
        elif (tile := tiles.get(strategy)) is None or not all(tile):
            raise ConfigError(f"with a scale by {strategy}")
        else:
            scales = empty(_grid(shape, tile), scale_dtype)
        if (group.get("format") or self._quantization.get("format")) != "pack-quantized":
            number = torch.int8
            if told.get("type") == "float":
                number = torch.float8_e4m3fn
            return {".weight": empty(shape, number), self.marker: scales}
        return {
            ".weight_packed": empty((rows, -(-width * bits // 32)), torch.int32),
            ".weight_shape": torch.tensor(shape),
            self.marker: scales,
        }


def _grid(shape: Sequence[int], tile: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of scales for a matrix, with one scale per tile."""
    return -(-math.prod(shape[:-1]) // tile[0]), -(-shape[-1] // tile[1])


def _assemble_grid(
    label: str,
    numbers: codec.NumberFormat,
    codes: MemberTensor,
    shape: tuple[int, ...],
    scales: MemberTensor,
    block: Sequence[int] | None,
    rounds: Sequence[torch.dtype],
) -> Assembly:
    """Return the same triple as `Format.assemble`, for codes [.., rows, columns] and one scale per tile.

    `block`: rows and columns per tile in the configuration; they need not divide the matrix. None: equal tiles.
    """
    if scales.dtype not in FLOATS:
        raise _unsupported_error(scales, f"has dtype {scales.dtype}, where only floating-point scales are supported")
    rows, width = math.prod(shape[:-1]), shape[-1]
    is_per_matrix = math.prod(scales.shape) == 1
    grid = (math.prod(scales.shape[:-1]), *scales.shape[-1:])  # a single scale may have no axis
    if is_per_matrix:
        tile = _ROWS, width
    elif block and _grid(shape, block) == grid:
        tile = block[0], block[1]
    elif rows % grid[0] or width % grid[1]:
        raise _unsupported_error(
            scales,
            f"has shape {list(scales.shape)} for a weight of shape {list(shape)}, not one for each of equal blocks",
        )
    else:
        tile = rows // grid[0], width // grid[1]
    # A tile over two experts of a stack would mix their scales.
    if width % 2 or (len(shape) > 2 and shape[-2] % tile[0]):
        raise _unsupported_error(
            codes, f"has shape {list(shape)}, where only an even width and whole blocks in each matrix are supported"
        )
    record = tile[0] * -(-_ROWS // tile[0])  # whole tiles of at least _ROWS rows
    codec_grid = TiledCodec(label, numbers, record, width, tile, scales.dtype, rounding(*rounds))
    scale_part: RecordPart | SharedPart = RecordPart(scales, codec_grid.fields[0])
    if is_per_matrix:
        scale_part = SharedPart(scales.value().view(-1).view(torch.uint8))
    return shape, codec_grid, [scale_part, RecordPart(codes, codec_grid.fields[1])]


def _unsupported_error(member: MemberTensor, problem: str) -> ConfigError:
    return ConfigError(
        f"the quantized tensor {member.key} in {member.file.path} {problem}. Supported: {known_formats()}. Give "
        "the folder of the unquantized model."
    )
