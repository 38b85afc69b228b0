"""GPU updates in one kernel launch, compiled at run time from the C++ expressions of the CPU kernels
(`csrc/device_update.inl`).

Compiled rules: AdamW and Lion with fp32, bf16 or 8-bit moments, SGD, and the AdamW correction. All other work runs as
torch operations (`torch_fallback`): rules written in torch (Muon, factored rules, MeZO), corrections between equal
scales, sums of squares, and devices without run-time compilation. Before first use a kernel must reproduce the CPU bits
on a test with ordinary and extreme numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from offload.native.moments import BLOCK
from offload.native.run_time_kernels import ELEMENTS, Launch, Program, RunTimeKernels
from offload.native.torch_fallback import Arguments, join, split

_RULES = {  # function: (file, scalar class, {number of moments: rule class}, rule class for bf16 and 8-bit moments)
    "adamw": ("adamw", "AdamwScalars", {2: "AdamwStep"}, "AdamwShortStep"),
    "correct_adamw": ("adamw", "CorrectionScalars", {2: "AdamwCorrection"}, ""),
    "lion": ("lion", "LionScalars", {1: "LionStep"}, "LionStep"),
    "sgd": ("sgd", "SgdScalars", {0: "SgdStep", 1: "SgdMomentumStep"}, ""),
}
_MASTERS = {torch.float32: "WholeMaster", torch.bfloat16: "SplitMaster", torch.float16: "CopiedMaster"}
_EACH = 8  # elements per thread
_NUM_SCALARS = 8
KERNELS = RunTimeKernels(
    "Updates on {device} run as torch operations (some thirty launches each), because their own kernels do not work "
    "there ({reason}). Results are equal up to the last bits."
)


class KernelVariant(NamedTuple):
    """Compile-time variant of a kernel: a function of `offload.native.kernels`, plus array dtypes."""

    function: str
    states: str
    num_moments: int
    master: torch.dtype
    gradients: torch.dtype

    @property
    def program(self) -> Program:
        """The program of this variant."""
        file, scalars, rules, of_rounded = _RULES[self.function]
        rule = of_rounded
        if self.states == "fp32":
            rule = rules[self.num_moments]
        master, gradient = _MASTERS[self.master], ELEMENTS[self.gradients]
        arguments = (
            f"offload::{rule}, offload::{scalars}, offload::{master}, offload::States::{self.states}, {gradient}"
        )
        # The kernel file is named by a macro: the included text is one for all rules.
        source = f'#define OFFLOAD_KERNEL "{file}_kernel.inl"\n#include "device_update.inl"\n'
        return Program.of(source, f"update<{arguments}>")


def update(function: str, states: str, arguments: Arguments, on_host: Callable[..., int | Tensor]) -> Tensor | None:
    """Run `torch_fallback.update` as one kernel launch, with the same result. Returns None if no kernel exists.
    `on_host` runs the same update on host arrays, for the comparison before first use.
    """
    master, _, moments, grad, scalars, _ = arguments
    if not KERNELS.can_run(master.device) or (function == "correct_adamw" and scalars[0] == scalars[1]):
        return None
    variant = KernelVariant(function, states, len(moments), master.dtype, grad.dtype)
    find_difference = partial(_find_difference, master.device, variant, len(scalars), on_host)
    launch = KERNELS.find(master.device, variant.program, find_difference)
    if launch is None:
        return None
    return _launch(launch, arguments)


def _launch(launch: Launch, arguments: Arguments) -> Tensor:
    master, lo, moments, grad, scalars, (key, step, element) = arguments
    count = torch.zeros((), dtype=torch.int64, device=master.device)
    if not master.numel():  # a launch without blocks is an error of the driver
        return count
    if lo is None:
        lo = master  # in places unused by the kernel, which takes all arguments in any variant
    pairs = [moment if isinstance(moment, tuple) else (moment, master) for moment in moments]
    pairs += [(master, master)] * (2 - len(pairs))
    values, scales = zip(*pairs, strict=True)
    # The kernel takes 32-bit words: a 64-bit number is passed in halves.
    halves = [half for number in (master.numel(), key) for half in (number & 0xFFFFFFFF, number >> 32)]
    numbers = [*halves, step, element & 0xFFFFFFFF, element >> 32]
    padded = [*map(float, scalars), *[0.0] * (_NUM_SCALARS - len(scalars))]
    passed = [master, lo, *values, *scales, grad, count, *numbers, *padded]
    launch(-(-master.numel() // _EACH), passed)
    return count


def _find_difference(
    device: torch.device,
    variant: KernelVariant,
    num_scalars: int,
    on_host: Callable[..., int | Tensor],
    launch: Launch,
) -> str:
    """Compare a test update on the device with the C++ kernels, bit for bit. Waits for the device."""
    n = 20 * BLOCK + 7  # whole blocks, and a part of one
    words = torch.arange(4 * n, dtype=torch.int64, device="cpu").mul_(0x9E3779B1).bitwise_and_(0xFFFFFFFF).sub_(2**31)
    random_values = words.int().view(torch.float32)  # arbitrary bit patterns
    # typical training values
    random_values.view(4, n)[:, : n // 2] = torch.sin(torch.arange(n // 2, device="cpu")) * 1e-2
    weight, m, v, grad = (each.clone() for each in random_values.split(n))
    v.abs_()
    grad = grad.to(variant.gradients)

    def stored(exact: Tensor) -> tuple[Tensor, ...]:
        if variant.states == "int8":
            return exact.view(torch.int32).bitwise_and(255).to(torch.uint8), exact[: -(-n // BLOCK)].abs()
        if variant.states == "bf16":
            exact = exact.bfloat16()
        return (exact,)

    master: tuple[Tensor, ...] = (weight,)
    is_split = variant.master != torch.float32
    if is_split:
        low = {torch.bfloat16: torch.int16, torch.float16: torch.float32}[variant.master]
        master = torch.empty(n, dtype=variant.master, device="cpu"), torch.empty(n, dtype=low, device="cpu")
        split(weight, *master)
    host_arrays = [master, *map(stored, (m, v)[: variant.num_moments])]
    device_arrays = [tuple(part.to(device, copy=True) for part in each) for each in host_arrays]
    scalars = (0.75, 0.5, 0.1, 0.9, 0.3, 0.25, 1e-3, -1e-2)[:num_scalars]
    rounding_key = (2**63 + 12345, 7, 5 * BLOCK)
    (whole, *lows), *moments = device_arrays
    of_device = [as_argument(each) for each in moments]
    arguments = Arguments(whole, next(iter(lows), None), of_device, grad.to(device), scalars, rounding_key)
    num_nonfinite = _launch(launch, arguments)
    host_moments = {str(index): as_argument(each) for index, each in enumerate(host_arrays[1:])}
    expected = on_host(
        variant.function, as_argument(host_arrays[0]), host_moments, grad, scalars, None, None, rounding_key
    )
    results = [tuple(part.cpu() for part in each) for each in device_arrays]
    if is_split:
        results[0], host_arrays[0] = ((join(*each),) for each in (results[0], host_arrays[0]))
    parts = ((a, b) for f, h in zip(results, host_arrays, strict=True) for a, b in zip(f, h, strict=True))
    is_equal = all(bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in parts)  # NaN equals NaN here
    if is_equal and int(num_nonfinite) == int(expected):
        return ""
    return f"{variant.function} with {variant.states} moments gives other bits than on the host"


def as_argument(parts: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, Tensor]:
    """Return arrays in the kernel argument format: one tensor, or a pair."""
    if len(parts) == 1:
        return parts[0]
    return (parts[0], parts[1])
