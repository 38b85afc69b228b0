"""Kernels on flat arrays: update rules, split masters, sums of squares, bfloat16 conversion.

Only this module, `offload.native.io`, `offload.extras.quant.kernels` and `offload.extras.zeroth.directions` call
the C++ module `offload._core`. Arrays are torch tensors or numpy arrays, contiguous, of any shape, without overlap
within a call. C++ handles CPU arrays; `torch_fallback` runs the same operations in the same order on other devices and
without C++. An invalid argument raises ConfigError with the argument name, before any modification. bfloat16 arrays may
also be int16 or uint16 bits, since numpy has no bfloat16.

Compute functions take `threads` and `isa` (None: default). Results do not depend on either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from ctypes import c_float
from typing import TYPE_CHECKING, Any, TypeVar

from offload.errors import ConfigError, nearest
from offload.native.arrays import (
    BF16,
    BITS16,
    FLOATS,
    FP16,
    FP32,
    FP32_OR_BF16,
    FP32_OR_FP16,
    INT32,
    UINT8,
    address_of,
    dtype_of,
    empty_like,
    flat,
    memory,
    on_cpu,
    tensor,
)
from offload.native.core import core as _core
from offload.native.core import missing_because as _missing_because
from offload.system import threads_within_quota

if TYPE_CHECKING:
    import numpy
    import torch

    A = TypeVar("A", torch.Tensor, numpy.ndarray[Any, Any])

_ISA_NUMBERS = {"avx512": 0, "avx2": 1, "neon": 2, "scalar": 3}  # enum Isa in csrc/cpu.h
_isas: tuple[str, ...] = ()
_default_isa_number = -1
if _core:
    _isas = tuple(_core.supported_isas())
    _default_isa_number = _ISA_NUMBERS[_isas[0]]
_threads = 0  # 0: not set; first use looks up cores and quota


def is_native() -> bool:
    """Return True if the C++ kernels are built and load."""
    return _core is not None


def available_isas() -> tuple[str, ...]:
    """Return the instruction sets available in both processor and C++ kernels, best first. Empty without C++."""
    return _isas


def default_isa() -> str:
    """Return the instruction set for `isa=None`; "torch" without C++."""
    if not _isas:
        return "torch"
    return _isas[0]


def num_threads() -> int:
    """Return the number of threads for `threads=None`: set by `set_threads`, or else the physical cores of this
    process, within the quota of its control groups.
    """
    global _threads
    if _core is None:
        import torch

        return torch.get_num_threads()  # torch computes then
    if _threads == 0:
        _threads = threads_within_quota(_core.physical_cores())
    return _threads


def set_threads(threads: int | None) -> None:
    """Set the default number of threads, at least 1. None: physical cores within the quota."""
    global _threads
    if threads is not None:
        _execution(threads, None)  # raises before the number changes
    _threads = threads or 0


def describe() -> dict[str, Any]:
    """Return the kernel configuration, for `doctor` and the run record."""
    return {
        "native": is_native(),
        "isa": default_isa(),
        "available_isas": list(_isas),
        "threads": num_threads(),
        "module": getattr(_core, "__file__", None),
        "missing_because": _missing_because or None,
    }


def stored(states: Mapping[str, torch.Tensor], name: str) -> Any:
    """Return a moment in kernel form: the plane, or the int8 plane with the scale plane."""
    if f"{name}_scale" in states:
        return (states[name], states[f"{name}_scale"])
    return states[name]


def master(states: Mapping[str, torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the master weights in kernel form: fp32; (high, low) as from `split`; or bf16 for a rule
    without a low half."""
    if "low" in states:
        return (states["weights"], states["low"])
    return states["weights"]


def adamw(
    master: A | tuple[A, A],
    exp_avg: A | tuple[A, A],
    exp_avg_sq: A | tuple[A, A],
    grad: A,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    key: int = 0,
    element: int = 0,
    threads: int | None = None,
    isa: str | None = None,
) -> int | torch.Tensor:
    r"""Do one AdamW step in place. Return the number of non-finite new master weights.

    The order of operations follows `torch.optim.AdamW(foreach=False, fused=False)` (Loshchilov and Hutter, algorithm 2,
    https://arxiv.org/abs/1711.05101), with the gradient times `grad_scale`. exp_avg and exp_avg_sq equal torch to the
    bit. So does the master, if torch rounds the square root correctly, as this kernel does (MKL does not). With
    bfloat16 or 8-bit moments the master is within a few ulp, because the kernel saves a division. All arrays have the
    same number of elements.

    master: float32, or a split master (hi, lo), see `split`.
    exp_avg, exp_avg_sq: float32; or bfloat16; or (codes: uint8 [n], scale: float32 [ceil(n / 128)]). The weight update
    uses the new moments before their rounding. bfloat16 moments are rounded stochastically, by a function of `key`,
    `step` and element number; `element`, a multiple of 128, numbers the first element. 8-bit moments are rounded to the
    nearest number in the dynamic map (a tie goes away from 0), times the block scale, the largest magnitude in the
    block. The scale is 0 for a block without normal numbers, and NaN for a block with a non-finite moment.
    grad: float32, or the dtype of hi, not modified. Beside a float32 master also bfloat16 or float16.
    step: number of this step, from 1.

    On other devices the result is a 0-dim int64 tensor there, so no host wait is needed.
    """
    _check_settings(step, lr, betas, eps, weight_decay, grad_scale=grad_scale)
    beta1, beta2 = betas
    # Python floats as in torch. Each is rounded to float32 once, in the array operation.
    scalars = (
        grad_scale,
        1 - lr * weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        eps,
        -(lr / (1 - beta1**step)),
    )
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return _update("adamw", master, moments, grad, scalars, threads, isa, (key, step, element))


def correct_adamw(
    master: A | tuple[A, A],
    exp_avg: A,
    exp_avg_sq: A,
    grad: A,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    applied_scale: float,
    grad_scale: float,
    threads: int | None = None,
    isa: str | None = None,
) -> int | torch.Tensor:
    """Change an `adamw` step done with `applied_scale` into a step with `grad_scale`. Same result type as `adamw`.

    For gradient clipping with a norm known only after the step. Pass the arrays after `adamw`, the same `grad` and the
    same settings. Weight decay does not depend on the gradient and stays applied.

        exp_avg    -= (1 - beta1) (applied_scale - grad_scale) grad
        exp_avg_sq -= (1 - beta2) (applied_scale^2 - grad_scale^2) grad^2, never below 0
        master     += (weight change from the old moments) - (weight change from the new moments)

    Both scales are rounded to float32 as in `adamw`; equal scales change nothing. Moments equal to zero before the step
    get the exact bits of a step with `grad_scale`. The rounding of exp_avg_sq cannot be undone: if the gradient is far
    above earlier gradients and the scale was r times too large, the relative error of a weight change is up to r^2 *
    3e-8 (2e-6 at r = 8, 3e-2 at 1024). A past lost in rounding is replaced by the smallest value consistent with
    exp_avg, so for no r a weight moves farther than AdamW can move it.
    """
    # Rounded as in the step: the difference of the scales is taken in float32.
    applied_scale = c_float(applied_scale).value
    grad_scale = c_float(grad_scale).value
    _check_settings(step, lr, betas, eps, applied_scale=applied_scale, grad_scale=grad_scale)
    beta1, beta2 = betas
    scalars = (
        applied_scale,
        grad_scale,
        1 - beta1,
        1 - beta2,
        _least_v_per_m2(step, beta1, beta2),
        (1 - beta2**step) ** 0.5,
        eps,
        -(lr / (1 - beta1**step)),
    )
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return _update("correct_adamw", master, moments, grad, scalars, threads, isa)


def lion(
    master: A | tuple[A, A],
    exp_avg: A | tuple[A, A],
    grad: A,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    grad_scale: float = 1.0,
    step: int = 1,
    key: int = 0,
    element: int = 0,
    threads: int | None = None,
    isa: str | None = None,
) -> int | torch.Tensor:
    """Do one Lion step in place. Return the number of non-finite new master weights.

    Chen et al., algorithm 2, https://arxiv.org/abs/2302.06675, with the gradient times `grad_scale`:

        master  = (1 - lr weight_decay) master - lr sign(beta1 exp_avg + (1 - beta1) grad)
        exp_avg = beta2 exp_avg + (1 - beta2) grad

    sign(0) is 0. A non-finite gradient or exp_avg makes the weight non-finite. Arrays and result as in `adamw`; `step`,
    `key` and `element` serve the rounding of a bfloat16 exp_avg.
    """
    _check_settings(step, lr, betas, weight_decay=weight_decay, grad_scale=grad_scale)
    beta1, beta2 = betas
    # Differences in double precision, as in `adamw`: 1 - beta2 in float32 would lose digits.
    scalars = (grad_scale, 1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr)
    return _update("lion", master, {"exp_avg": exp_avg}, grad, scalars, threads, isa, (key, step, element))


def sgd(
    master: A | tuple[A, A],
    momentum_buffer: A | None,
    grad: A,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    threads: int | None = None,
    isa: str | None = None,
) -> int | torch.Tensor:
    """Do one SGD step in place. Return the number of non-finite new master weights.

    The order of operations follows `torch.optim.SGD(foreach=False, fused=False)`, with the gradient times `grad_scale`:

        change          = grad + weight_decay master
        momentum_buffer = momentum momentum_buffer + change
        master          = master - lr momentum_buffer

    Without a buffer (None) the last line uses the change. Arrays as in `adamw`; the buffer is float32.
    """
    _check_settings(1, lr, (momentum, 0.0), weight_decay=weight_decay, grad_scale=grad_scale)
    buffers = {}
    if momentum_buffer is not None:
        buffers["momentum_buffer"] = momentum_buffer
    for name, buffer in buffers.items():
        if isinstance(buffer, tuple) or dtype_of(name, buffer) in BF16:
            raise ConfigError(f"{name} has dtype {getattr(buffer, 'dtype', 'of a pair')}; it must be float32.")
    return _update("sgd", master, buffers, grad, (grad_scale, weight_decay, momentum, lr), threads, isa)


def draw(
    out: A, *, key: int, step: int, purpose: int, element: int = 0, threads: int | None = None, isa: str | None = None
) -> A:
    """Fill `out` (int32) with 32 random bits per element and return it. `element`, a multiple of 64, numbers the first
    one.

    The bits depend only on the arguments, see docs/reference/numerics.md. `key` has 64 bits, `step` and `purpose` 32.
    """
    address = n = 0
    if on_cpu(out):
        address, n = memory("out", out, writable=True)
    wrong = dtype_of("out", out) != "int32" or element % 64 or not (0 <= key < 2**64 and 0 <= step < 2**32)
    if wrong:
        raise ConfigError(
            f"out has dtype {out.dtype}, key is {key}, step is {step} and element is {element}; out must be int32, key "
            "must fit in 64 bits, step in 32 bits, and element must be a multiple of 64."
        )
    if _core is None or not on_cpu(out):
        from offload.native import moments

        flattened = tensor("out", out, INT32)
        flattened.copy_(moments.words(flattened.numel(), key, step, purpose, element, flattened.device))
    else:
        _core.draw(address, n // 4, key, step, purpose, element, *_execution(threads, isa))
    return out


def split(
    master: A,
    out: tuple[A, A] | None = None,
    *,
    high: str = "bfloat16",
    threads: int | None = None,
    isa: str | None = None,
) -> tuple[A, A]:
    """Split float32 into (hi: bfloat16, lo: int16), new or `out`. A bijection: `join` restores every bit.

    hi = (bits + 0x8000) >> 16 and lo = bits - (hi << 16): hi is the weight rounded to nearest, ties away from zero.
    Ties to even would not be reversible, because 16 bits cannot distinguish +0x8000 from -0x8000. A NaN may appear as
    zero in hi. With `high` float16, hi is rounded to nearest, ties to even, and lo keeps the float32: 32 bits would not
    be enough for both.
    """
    if out is None:
        out = empty_like(master, high), empty_like(master, _LOWS[high])
    hi, lo = out
    if dtype_of("hi", hi) in FP16:
        hi[...] = master
        lo[...] = master
        return out
    _call("split", [("master", master, FP32), ("hi", hi, BF16), ("lo", lo, BITS16)], threads, isa)
    return out


def join(hi: A, lo: A, out: A | None = None, *, threads: int | None = None, isa: str | None = None) -> A:
    """Return the float32 master, new or `out`, from hi and lo, see `split`. Beside float16 it is lo itself."""
    if dtype_of("hi", hi) in FP16:
        if out is None:
            return lo
        out[...] = lo
        return out
    if out is None:
        out = empty_like(hi, "float32")
    _call("join", [("hi", hi, BF16), ("lo", lo, BITS16), ("out", out, FP32)], threads, isa)
    return out


def sum_squares(x: A, *, threads: int | None = None, isa: str | None = None) -> float:
    """Return the sum of squares for an array in any float dtype, in float64. The order depends only on the length.

    inf and NaN propagate. Waits for the device if `x` is on one.
    """
    return float(_call("sum_squares", [("x", x, FLOATS)], threads, isa))


def copy_sum_squares(source: A, out: A, *, threads: int | None = None, isa: str | None = None) -> float:
    """Copy `source`, in any float dtype, to `out` and return `sum_squares(source)` to the bit, with a single read.

    `out` has the same dtype and length; the copy preserves all bits, also in a NaN. Small arrays take a few
    microseconds and wake no thread. Waits for the device if the arrays are on one.
    """
    # A copy without conversion.
    alike = next(each for each in (FP32, FP16, BF16) if each is BF16 or dtype_of("source", source) in each)
    return float(_call("copy_sum_squares", [("source", source, FLOATS), ("out", out, alike)], threads, isa))


def sum_squares_segments(
    x: Any,
    offsets: Sequence[int] | Any,
    sizes: Sequence[int] | Any,
    *,
    threads: int | None = None,
    isa: str | None = None,
) -> Any:
    """Return float64 [k]: the `sum_squares` of each segment x[offset : offset + size] in the flattened x.

    For a tensor the result is a tensor on the same device, without a host wait; for a numpy array a numpy array.
    """
    import numpy

    # C++ reads both as int64.
    starts = numpy.ascontiguousarray(offsets, dtype=numpy.int64)
    lengths = numpy.ascontiguousarray(sizes, dtype=numpy.int64)
    is_tensor = hasattr(x, "data_ptr")
    if _core is None or not on_cpu(x):
        from offload.native import torch_fallback

        flattened = tensor("x", x, FLOATS)
        _check_segments(starts, lengths, flattened.numel())
        sums = torch_fallback.sum_squares_segments(flattened, starts.tolist(), lengths.tolist())
        if is_tensor:
            return sums
        return sums.numpy()
    address, n, element = flat("x", x, FLOATS)
    _check_segments(starts, lengths, n)
    result = numpy.empty(starts.size, dtype=numpy.float64)
    segments = (starts.ctypes.data, lengths.ctypes.data, result.ctypes.data, starts.size)
    _core.sum_squares_segments(address, element, *segments, *_execution(threads, isa))
    if not is_tensor:
        return result
    import torch

    return torch.from_numpy(result)


def round_bf16_(x: A, *, threads: int | None = None, isa: str | None = None) -> A:
    """Round float32 in place to the nearest bfloat16 values, ties to even. Returns x."""
    _call("round_bf16", [("x", x, FP32)], threads, isa)
    return x


def accumulate(total: A, x: A, *, threads: int | None = None, isa: str | None = None) -> A:
    """Add x (float32, bfloat16 or float16) to `total` (float32) in place. Returns `total`."""
    _call("accumulate", [("total", total, FP32), ("x", x, FLOATS)], threads, isa)
    return total


NUM_ROOFLINE_VARIANTS = 3


def roofline(
    written: Sequence[Any], read: Any, *, variant: int, threads: int | None = None, isa: str | None = None
) -> None:
    """Generate the memory traffic of an update with one addition per word, to measure the memory time alone.

    Reads `read`, and adds 1 to all words in at most 4 `written` arrays, which destroys their content. All arrays have
    the same number of elements, with any dtype. For the benchmark, C++ only. Each `variant` from 0 to
    NUM_ROOFLINE_VARIANTS - 1 prefetches differently; the fastest one is the roofline.
    """
    if _core is None:
        raise ConfigError(f"the C++ kernels are missing ({_missing_because}); build them with `make build`.")
    arrays = [memory("written", array, writable=True) for array in written]
    address, num_bytes = memory("read", read, writable=False)
    n = math.prod(read.shape)
    sizes = [size // n for _, size in arrays]
    place = [place for place, _ in arrays], sizes, address, num_bytes // n, n
    _core.roofline(*place, variant, *_execution(threads, isa))


def _update(
    function: str,
    master: Any,
    moments: Mapping[str, Any],
    grad: Any,
    scalars: tuple[float, ...],
    threads: int | None,
    isa: str | None,
    rounding_key: tuple[int, int, int] = (0, 0, 0),
) -> int | torch.Tensor:
    """Check all arrays and run the update rule `function`.

    `rounding_key`: key, step and element for stochastic rounding.
    """
    # A master is one array or two, with other dtypes and another name in errors.
    weights, lo = master, None
    name, dtypes = "master", FP32
    low_dtypes, grad_dtypes = BITS16, FLOATS
    if isinstance(master, tuple):
        weights, lo = master
        name, dtypes = "hi", BF16
        grad_dtypes = FP32_OR_BF16
        if dtype_of(name, weights) in FP16:
            dtypes, low_dtypes = FP16, FP32
            grad_dtypes = FP32_OR_FP16
    key, step, element = rounding_key
    if not (0 <= key < 2**64 and 0 <= step < 2**32 and element >= 0 and element % BLOCK == 0):
        raise ConfigError(
            f"key is {key}, step is {step} and element is {element}; key must fit in 64 bits, step in 32 bits, and "
            f"element must be a multiple of {BLOCK}."
        )
    state_dtypes = []
    for moment_name, moment in moments.items():
        if isinstance(moment, tuple):
            state_dtypes.append("int8")
        elif dtype_of(moment_name, moment) in BF16:
            state_dtypes.append("bf16")
        else:
            state_dtypes.append("fp32")
    states = next(iter(state_dtypes), "fp32")
    if state_dtypes.count(states) < len(state_dtypes):
        raise ConfigError(
            f"{' and '.join(moments)} are {' and '.join(sorted({*state_dtypes}))}; they must have the same dtype."
        )
    if _core is None or not on_cpu(weights):  # built without a compiler, or weights on a GPU
        from offload.native import device_update, torch_fallback

        first = tensor(name, weights, dtypes)
        low = None
        if lo is not None:
            low = tensor("lo", lo, low_dtypes, first)
        blocks = -(-first.numel() // BLOCK)
        checked: list[torch.Tensor | tuple[torch.Tensor, torch.Tensor]] = []
        for name, moment in moments.items():
            if isinstance(moment, tuple):
                codes = tensor(name, moment[0], UINT8, first)
                checked.append((codes, tensor(f"{name} scale", moment[1], FP32, first, blocks)))
            else:
                checked.append(tensor(name, moment, _MOMENTS[states], first))
        gradient = tensor("grad", grad, grad_dtypes, first)
        arguments = torch_fallback.Arguments(first, low, checked, gradient, scalars, rounding_key)
        count = None
        if not on_cpu(weights):
            count = device_update.update(function, states, arguments, _update)
        if count is None:  # a rule or a device without a kernel of its own
            count = torch_fallback.update(getattr(torch_fallback, function), states, arguments)
        if on_cpu(weights):
            return int(count)
        return count  # a tensor: a number would make the host wait for the device
    # Every array is checked before the call, so an invalid one changes nothing.
    address, n, _ = flat(name, weights, dtypes)
    low_address = address_of("lo", lo, low_dtypes, n)
    addresses = []
    for name, moment in moments.items():
        if isinstance(moment, tuple):
            addresses.append(address_of(name, moment[0], UINT8, n))
            addresses.append(address_of(f"{name} scale", moment[1], FP32, -(-n // BLOCK)))
        else:
            addresses.append(address_of(name, moment, _MOMENTS[states], n))
    grad_address, _, types = flat("grad", grad, grad_dtypes, n)
    execution = _execution(threads, isa)
    if dtypes is FP16:
        types += _COPIED
    arrays = address, low_address, _STATES[states], addresses, grad_address, types, n
    return int(getattr(_core, function)(*arrays, scalars, key, step, element, *execution))


BLOCK = 128
"""Weights per scale in 8-bit moments."""
_STATES = {"fp32": 0, "bf16": 1, "int8": 2}  # enum States in csrc/kernels.h
_LOWS = {"bfloat16": "int16", "float16": "float32"}
_COPIED = 4  # kCopied in csrc/bind.cpp
_MOMENTS = {"fp32": FP32, "bf16": BF16}


def _call(
    function: str, arrays: Sequence[tuple[str, Any, frozenset[str]]], threads: int | None, isa: str | None
) -> Any:
    """Check arrays (name, array, allowed dtypes) with a common length, and run `function` on their device.

    The C++ function takes addresses, dtype numbers for arrays with any float dtype, and the length. The function in
    `torch_fallback` takes tensors.
    """
    if _core is None or not on_cpu(arrays[0][1]):
        from offload.native import torch_fallback

        first = tensor(*arrays[0])
        rest = [tensor(name, array, dtypes, first) for name, array, dtypes in arrays[1:]]
        return getattr(torch_fallback, function)(first, *rest)
    # All checks come before the call, as in `_update`.
    addresses = []
    elements = []
    n = -1  # the first array may have any length
    for name, array, dtypes in arrays:
        address, n, element = flat(name, array, dtypes, n)
        addresses.append(address)
        if dtypes is FLOATS:
            elements.append(element)
    return getattr(_core, function)(*addresses, *elements, n, *_execution(threads, isa))


def _least_v_per_m2(step: int, beta1: float, beta2: float) -> float:
    """Return the smallest possible beta2 v / (beta1 m)^2 for moments m and v before this step.

    m = (1 - beta1) sum beta1^i g_i and v = (1 - beta2) sum beta2^i g_i^2, over step - 1 gradients. By the
    Cauchy-Schwarz inequality m^2 <= v (1 - beta1)^2 / (1 - beta2) sum (beta1^2 / beta2)^i.
    """
    if step == 1 or not 0 < beta1**2 < beta2:  # no past, no past in m, or a useless bound
        return 0.0
    ratio = beta1**2 / beta2
    least = (1 - beta2) / (1 - beta1) ** 2 * (1 - ratio) / (1 - ratio ** (step - 1)) / ratio
    return min(least, 1e30)  # within the range of float32


def _check_settings(
    step: int, lr: float, betas: tuple[float, float], eps: float = 0.0, weight_decay: float = 0.0, **scales: float
) -> None:
    rules = (
        ("step", step, step >= 1, "at least 1, as the first step is 1"),
        ("betas[0]", betas[0], 0 <= betas[0] < 1, "at least 0 and below 1"),
        ("betas[1]", betas[1], 0 <= betas[1] < 1, "at least 0 and below 1"),
        ("lr", lr, 0 <= lr < math.inf, "finite and at least 0"),
        ("eps", eps, 0 <= eps < math.inf, "finite and at least 0"),
        ("weight_decay", weight_decay, 0 <= weight_decay < math.inf, "finite and at least 0"),
        *[(name, scale, -math.inf < scale < math.inf, "finite") for name, scale in scales.items()],
    )
    wrong = [f"{name} is {value!r}; it must be {rule}" for name, value, right, rule in rules if not right]
    if wrong:
        raise ConfigError("; ".join(wrong) + ".")


def _execution(threads: int | None, isa: str | None) -> tuple[int, int]:
    """Return (number of threads, instruction set number) for the C++ module."""
    if threads is None:
        threads = _threads or num_threads()
    elif not isinstance(threads, int) or threads < 1:
        raise ConfigError(f"threads is {threads!r}; it must be a whole number of at least 1, or None for the default.")
    if isa is None:
        return threads, _default_isa_number
    if isa not in _isas:
        why = "no such instruction set is known"
        if isa in _ISA_NUMBERS:
            why = "this processor or build does not have it"
        raise ConfigError(
            f"isa is {isa!r}, but {why}{nearest(str(isa), _isas)}; it must be one of {', '.join(_isas)}, or None."
        )
    return threads, _ISA_NUMBERS[isa]


def _check_segments(offsets: numpy.ndarray[Any, Any], sizes: numpy.ndarray[Any, Any], length: int) -> None:
    if offsets.ndim != 1 or offsets.shape != sizes.shape:
        raise ConfigError(
            f"offsets has shape {offsets.shape} and sizes {sizes.shape}; they must be of one dimension and equal."
        )
    if offsets.size and (offsets.min() < 0 or sizes.min() < 0 or (offsets + sizes).max() > length):
        wrong = int(((offsets < 0) | (sizes < 0) | (offsets + sizes > length)).argmax())
        raise ConfigError(
            f"segment {wrong} has offset {offsets[wrong]} and size {sizes[wrong]}; it must lie within the {length} "
            "elements of x."
        )
