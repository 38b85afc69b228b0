"""Argument checks for kernels and I/O engines: dtype, length, device, contiguity and address of torch or
numpy arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offload.errors import ConfigError

if TYPE_CHECKING:
    import torch

# Name by dtype. Torch dtypes are added with the first tensor: importing this module must not import torch.
_dtype_names: dict[Any, str] = {}

FP32 = frozenset({"float32"})
FP16 = frozenset({"float16"})
BF16 = frozenset({"bfloat16", "bits16"})  # numpy has no bfloat16: int16 or uint16 holds the bits
FP32_OR_BF16 = FP32 | BF16
FP32_OR_FP16 = FP32 | FP16
FLOATS = FP32_OR_BF16 | FP16
BITS16 = frozenset({"bits16"})
UINT8 = frozenset({"uint8"})
INT32 = frozenset({"int32"})
_ALLOWED = {
    FP32: "float32",
    FP16: "float16",
    BF16: "bfloat16, or its bits as int16 or uint16",
    FP32_OR_BF16: "float32 or bfloat16, or the bits of bfloat16 as int16 or uint16",
    FP32_OR_FP16: "float32 or float16",
    FLOATS: "float32, float16 or bfloat16, or the bits of bfloat16 as int16 or uint16",
    BITS16: "int16",
    UINT8: "uint8",
    INT32: "int32",
}
_ELEMENTS = {"bfloat16": 1, "bits16": 1, "float16": 2}  # enum Element in csrc/kernels.h; else 0


def flat(name: str, array: Any, allowed: frozenset[str], length: int = -1) -> tuple[int, int, int]:
    """Return (address, number of elements, number of the dtype in C++) for a CPU array.

    `length` is the required number of elements (-1: any). Raises ConfigError with `name`.
    """
    # no function call, because this lookup runs for every array
    dtype_name = _dtype_names.get(getattr(array, "dtype", None))
    if dtype_name not in allowed:
        dtype_name = _check_dtype(name, array, allowed)
    try:
        address = array.data_ptr()
    except AttributeError:  # numpy
        num_elements = array.size
        contiguous = array.flags.c_contiguous
        on_cpu = True
        address = array.__array_interface__["data"][0]
    else:
        num_elements = array.numel()
        contiguous = array.is_contiguous()
        on_cpu = array.is_cpu
    if not on_cpu:
        raise ConfigError(
            f"{name} is on {array.device}, but other arrays of this call are on the CPU; they must be on one device."
        )
    if not contiguous:
        raise ConfigError(f"{name} is not contiguous (shape {tuple(array.shape)}); pass a contiguous array.")
    if length >= 0 and num_elements != length:
        raise _wrong_length(name, num_elements, length)
    return address, num_elements, _ELEMENTS.get(dtype_name or "", 0)


def address_of(name: str, array: Any, allowed: frozenset[str], length: int = -1) -> int:
    """Return the address of a CPU array, checked as by `flat`; 0, the null pointer of C++, for None."""
    if array is None:
        return 0
    return flat(name, array, allowed, length)[0]


def memory(name: str, array: Any, *, writable: bool) -> tuple[int, int]:
    """Return (address, number of bytes) for a CPU array with any dtype. `writable`: the array must not be read-only.

    Raises ConfigError with `name`.
    """
    if hasattr(array, "data_ptr"):
        address = array.data_ptr()
        num_bytes = array.numel() * array.element_size()
        is_cpu = array.is_cpu
        contiguous = array.is_contiguous()
        read_only = False
    elif hasattr(array, "__array_interface__"):
        address = array.__array_interface__["data"][0]
        num_bytes = array.nbytes
        is_cpu = True
        contiguous = array.flags.c_contiguous
        read_only = not array.flags.writeable
    else:
        raise ConfigError(f"{name} is a {type(array).__name__}; it must be a torch tensor or a numpy array.")
    if not (is_cpu and contiguous) or (writable and read_only):
        wrong = "read-only"
        if not is_cpu:
            wrong = f"on {array.device}"
        if not contiguous:
            wrong = "not contiguous"
        raise ConfigError(f"{name} is {wrong} (shape {tuple(array.shape)}); it must be contiguous CPU memory.")
    return address, num_bytes


def tensor(
    name: str, array: Any, allowed: frozenset[str], like: torch.Tensor | None = None, length: int | None = None
) -> torch.Tensor:
    """Return the array as a flat tensor view: a float dtype, int16 (for BITS16), or another allowed dtype.

    `like` is a tensor with the required device, and with the required length unless `length` is given. Raises
    ConfigError with `name`.
    """
    import torch

    dtype_name = _check_dtype(name, array, allowed)
    if not _is_contiguous(array):  # before `from_numpy`, which refuses some strides in other words
        raise ConfigError(f"{name} is not contiguous (shape {tuple(array.shape)}); pass a contiguous array.")
    if not isinstance(array, torch.Tensor):
        array = torch.from_numpy(array)
    result: torch.Tensor = array.detach().view(-1)  # autograd would refuse a change in place
    if allowed is BITS16:
        result = result.view(torch.int16)
    elif dtype_name in FP32_OR_BF16 - FP32:  # numpy has the bits of bfloat16 as integers
        result = result.view(torch.bfloat16)
    if like is not None and result.device != like.device:
        raise ConfigError(
            f"{name} is on {result.device}, the first array of this call on {like.device}; they must be on one device."
        )
    if like is not None:
        if length is None:
            length = like.numel()
        if result.numel() != length:
            raise _wrong_length(name, result.numel(), length)
    return result


def _is_contiguous(array: Any) -> bool:
    if hasattr(array, "data_ptr"):
        return array.is_contiguous()
    return array.flags.c_contiguous


def _wrong_length(name: str, num_elements: int, expected: int) -> ConfigError:
    if name.endswith(" scale"):
        return ConfigError(
            f"{name} has {num_elements} elements; it must have {expected}, one per 128 elements of the first array."
        )
    return ConfigError(
        f"{name} has {num_elements} elements, the first array of this call has {expected}; they must be equal."
    )


def on_cpu(array: Any) -> bool:
    """Return True for an array in host memory. numpy arrays always are."""
    return bool(getattr(array, "is_cpu", True))


def empty_like(array: Any, dtype_name: str) -> Any:
    """Return a new array like `array` with dtype "float32", "bfloat16" (numpy: uint16) or "int16"."""
    if hasattr(array, "data_ptr"):
        import torch

        return torch.empty(array.shape, dtype=getattr(torch, dtype_name), device=array.device)
    import numpy

    numpy_names = {"bfloat16": "uint16"}  # numpy has no bfloat16: the bits
    return numpy.empty(array.shape, dtype=numpy_names.get(dtype_name, dtype_name))


def _check_dtype(name: str, array: Any, allowed: frozenset[str]) -> str | None:
    dtype_name = dtype_of(name, array)
    if dtype_name not in allowed:
        dtype = str(array.dtype).removeprefix("torch.")
        raise ConfigError(f"{name} has dtype {dtype}; it must be {_ALLOWED[allowed]}.")
    return dtype_name


def dtype_of(name: str, array: Any) -> str | None:
    """Return the name of the array dtype, None for a dtype without kernels. Raises ConfigError if
    `array` is no array.
    """
    try:
        return _dtype_names[array.dtype]
    except (KeyError, AttributeError):
        pass
    # The first array of its library, imported by the caller already.
    if hasattr(array, "data_ptr"):
        import torch

        names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int16: "bits16", torch.uint16: "bits16"}
        names |= {torch.float16: "float16", torch.uint8: "uint8", torch.int32: "int32"}
        _dtype_names.update(names)
        return _dtype_names.get(array.dtype)
    if hasattr(array, "__array_interface__"):
        import numpy

        _dtype_names.update({numpy.dtype("f4"): "float32", numpy.dtype("i2"): "bits16", numpy.dtype("u2"): "bits16"})
        _dtype_names.update({numpy.dtype("f2"): "float16", numpy.dtype("u1"): "uint8", numpy.dtype("i4"): "int32"})
        return _dtype_names.get(array.dtype)
    raise ConfigError(f"{name} is a {type(array).__name__}; it must be a torch tensor or a numpy array.")
