"""Engine settings, validated in one place."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch

from offload.accelerators import compiles_by_default, parse_device
from offload.arguments import check_types
from offload.conflicts import ENGINE_CONFLICTS, refuse
from offload.errors import ConfigError, nearest, shorten
from offload.fused_attention import Capability
from offload.lanes.timeline import LANES, Throttle
from offload.layout.codecs import CODECS, EXACT, GRADIENT_CODECS, LINK_CODECS
from offload.optim.adamw import AdamW
from offload.optim.rule import UpdateRule
from offload.setting_texts import ENGINE_TEXTS, with_texts
from offload.sizes import parse_chunks, parse_size
from offload.tiers.placement import Placement

LEAST_CHUNK_BYTES = 256 << 20
"""Default limit for fp32 logits, in bytes."""
_CHUNK_SHARE = 30
"""The default limit is 1/30 of the device budget; in fp32 the gradient needs as much again.

Larger chunks displace saved graphs; smaller chunks accumulate the head gradient too often.
"""
_THROTTLE_KEYS = ("bandwidth", "latency_seconds")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Settings:
    """Engine settings. Each field is also a keyword of `Engine`.

    optimizer: update rule.
    placement: tier and budget for each kind of state.
    precision: compute dtype: fp32; bf16 (with fp32 masters by default); or fp16, with fp32 masters and a loss scale.
    micro_batch_size: rows per unit run; None: the whole batch.
    rows: batch entries with one item per row. None: all tensors whose first axis has the batch size. A list of names:
        these tensors, along the first axis. A mapping from names: the axis; None for data shared by all rows; the name
        of a tensor [rows, ...] whose product over the other axes counts the entries of each row, as in {"pixel_values":
        "image_grid_thw"}; or a function (batch, row indices int64) returning these rows.
    zero_stage: ZeRO stage, 0 to 3 (arXiv:1910.02054).
    seed: random seed for operations in micro-batches.
    debug: poison released memory. A number also delays lanes at random, with this seed.
    {texts}

    Errors are ConfigError and name the configuration key.
    """

    optimizer: UpdateRule = field(default_factory=AdamW)
    placement: Placement = field(default_factory=Placement)
    precision: str = "fp32"
    matmul: str = "precision"
    max_grad_norm: float | None = 1.0
    clip: str = "auto"
    on_nonfinite: str = "stop"
    micro_batch_size: int | None = None
    passes: int = 1
    rows: Sequence[str] | Mapping[str, Any] | None = None
    recompute: str = "always"
    compile: str = "auto"
    sequence_tile: int | str = "none"
    sequence_parallel: int = 1
    prefetch: str | int = "auto"
    zero_stage: int = 3
    replicas: int | str = "auto"
    replica_states: str = "whole"
    dispatch: str = "never"
    throttle: Mapping[str, Any] | None = None
    seed: int = 0
    debug: bool | int = False
    head_chunk_bytes: float | str | None = "auto"
    delay: int = 0
    delay_after: int = 0
    update: str = "auto"
    frozen_weights: str = EXACT.name
    link_weights: str = EXACT.name
    link_gradients: str = EXACT.name
    device: str | None = None

    def __post_init__(self) -> None:
        # Each value alone.
        _check_rule(self.optimizer)
        object.__setattr__(self, "placement", Placement.of(self.placement))
        check_types(Settings, vars(self))
        _check(self.precision, ("fp32", "bf16", "fp16"), "train.precision")
        _check(self.matmul, ("precision", "fp8_rowwise", "fp8_tensorwise"), "train.matmul")
        _check(self.clip, ("auto", "deferred", "speculative"), "train.clip")
        _check(self.on_nonfinite, ("stop", "skip"), "train.on_nonfinite")
        _check(self.recompute, ("always", "never", "auto", "products"), "train.recompute")
        _check(self.compile, ("auto", "always", "never"), "train.compile")
        tokens = "a number of tokens, at least 1, none for whole sequences, or auto"
        _check_number(self.sequence_tile, 1, "train.sequence_tile", tokens, ("none", "auto"))
        _check_number(self.sequence_parallel, 1, "train.sequence_parallel", "a number of ranks, at least 1")
        _check_number(self.prefetch, 0, "offload.prefetch", "a number of units, at least 0, or auto", ("auto",))
        _check(self.update, ("auto", "cpu", "device", "both"), "offload.update")
        _check(self.frozen_weights, tuple(CODECS), "offload.frozen_weights")
        _check(self.link_weights, tuple(LINK_CODECS), "offload.link_weights")
        _check(self.link_gradients, tuple(GRADIENT_CODECS), "offload.link_gradients")
        _check(self.zero_stage, (0, 1, 2, 3), "offload.zero_stage")
        _check_number(self.replicas, 1, "offload.replicas", "a number of copies, at least 1, or auto", ("auto",))
        _check(self.replica_states, ("whole", "shared"), "offload.replica_states")
        _check(self.dispatch, ("never", "always"), "offload.dispatch")
        _check(self.delay, (0, 1), "train.delay")
        _check_number(self.delay_after, 0, "train.delay_after", "a number of steps, at least 0")
        # Values together, then values that follow from others.
        refuse(chain(*ENGINE_CONFLICTS.values()), self._setting)
        # This object is frozen, and fields derived from others are set once, here.
        experts = self.placement.experts
        if experts == "streamed":  # blocks with streamed experts run their own code
            object.__setattr__(self, "sequence_tile", "none")
        # Each rank would keep graphs by the local memory, and ranks with shared rows exchange inside a unit.
        if self.sequence_parallel > 1 and self.recompute == "auto":
            object.__setattr__(self, "recompute", "always")
        compiles = settle_compile(
            self.compile, experts=experts, sequence_parallel=self.sequence_parallel, recompute=self.recompute
        )
        object.__setattr__(self, "compile", compiles)
        whole = "a whole number, at least 1"
        _check_number(self.micro_batch_size, 1, "train.micro_batch_size", whole, (None,))
        _check_number(self.passes, 1, "train.passes", whole)
        check_max_grad_norm(self.max_grad_norm)
        object.__setattr__(self, "max_grad_norm", self.optimizer.clips_to(self.max_grad_norm))
        # Parsed again where they are used: here a wrong value is refused, before anything is allocated.
        parse_device(self.device)
        parse_throttle(self.throttle)
        self.chunk_bytes(None)

    def _setting(self, key: str) -> Any:
        """Return a value for a table of conflicts."""
        if key == "optimizer.name":
            return type(self.optimizer).__name__
        if key == "optimizer.master":
            return "fp32" if self.optimizer.has_low else "bf16"
        if key == "optimizer.uncorrectable":
            rule = next((rule for rule in self.optimizer.parts if not rule.can_correct), None)
            if rule is None:
                return ""
            states = getattr(rule, "states", "fp32")
            return type(rule).__name__ + (states != "fp32") * f" with states in {states}"
        section, _, name = key.partition(".")
        # Settings of the engine lie in three objects, whatever section of a configuration they are in.
        if section == "offload" and hasattr(self.placement, name):
            return getattr(self.placement, name)
        if section == "optimizer":
            return getattr(self.optimizer, name)
        return getattr(self, name)

    @property
    def resolved_clip(self) -> str:
        """The clip option as far as settings decide: deferred if no correction is needed or possible."""
        corrects = all(rule.can_correct for rule in self.optimizer.parts) and self.max_grad_norm and not self.skips
        if corrects and not self.delay:
            return self.clip
        return "deferred"

    @property
    def host_bound(self) -> str:
        """Reason for updates on the host regardless of `update`; empty if there is none."""
        if self.delay:
            return "train.delay 1 keeps the weights from before an update on the host"
        whole = next((type(rule).__name__ for rule in self.optimizer.parts if rule.by_matrix), "")
        if not whole:
            return ""
        return f"{whole} updates whole parameters, which cannot be streamed in pieces"

    @property
    def throttles(self) -> Mapping[str, Throttle]:
        """Throttles by link name."""
        return parse_throttle(self.throttle)

    def compile_on(self, device: str, capability: Capability | None = None) -> str:
        """Return `compile` without auto: always or never, for a device in torch notation."""
        if self.compile != "auto":
            return self.compile
        if compiles_by_default(device, capability):
            return "always"
        return "never"

    def chunk_bytes(self, device_bytes: int | None) -> int | None:
        """Return the logits limit in bytes (None: no limit), given the device budget in bytes (None: no limit)."""
        limit = parse_chunks(self.head_chunk_bytes, "train.head_chunk_bytes")
        if isinstance(limit, str):
            return max(LEAST_CHUNK_BYTES, (device_bytes or 0) // _CHUNK_SHARE)
        return limit

    @property
    def skips(self) -> bool:
        """True if steps with non-finite gradients are skipped."""
        return self.on_nonfinite == "skip" or self.precision == "fp16"

    @property
    def splits(self) -> bool:
        """True if a step may have several micro-batches, or a block takes the rows of several ranks one by one."""
        return self.micro_batch_size is not None or self.dispatch == "always"

    @property
    def keeps_gradients(self) -> bool:
        """True if gradients wait on the host: for the norm, the finite check, a correction, or a delayed update."""
        waits = self.optimizer.has_gradients and not self.optimizer.drops_gradients
        return self.needs_all_gradients and waits

    @property
    def needs_all_gradients(self) -> bool:
        """True if an update depends on the gradients as a whole."""
        return self.max_grad_norm is not None or self.skips or self.delay > 0

    def delay_seed(self, rank: int = 0) -> int | None:
        """Return the seed for random lane delays on a rank; None: no delays."""
        if self.debug is False:
            return None
        return (int(self.debug) << 16) + rank


Settings.__doc__ = with_texts(Settings.__doc__, ENGINE_TEXTS)


def settle_compile(
    compiles: str,
    *,
    experts: str = "whole",
    sequence_parallel: int = 1,
    recompute: str = "always",
    has_many_lengths: bool = False,
) -> str:
    """Return `compile` as far as the arguments decide: auto is left to the device (`Settings.compile_on`).

    Blocks with streamed experts run their own code. Shared rows and kept products are not traced, and each row length
    is a compilation.
    """
    is_eager = sequence_parallel > 1 or recompute == "products" or has_many_lengths
    if experts == "streamed" or (is_eager and compiles == "auto"):
        return "never"
    return compiles


def _check_rule(rule: Any) -> None:
    if isinstance(rule, UpdateRule):
        return
    is_torch = isinstance(rule, torch.optim.Optimizer)
    shown = f"a torch.optim.{type(rule).__name__}" if is_torch else shorten(repr(rule))
    raise ConfigError(
        f"the optimizer is {shown}; it must be an update rule, such as offload.AdamW(lr=1e-4), with its learning rate "
        "in engine.lr. (To pass a Settings object, write settings=...)"
    )


def check_max_grad_norm(norm: float | None) -> None:
    """Raise ConfigError unless the norm is None or finite and not negative. 0: no clipping."""
    if norm is not None and not (isinstance(norm, int | float) and 0 <= norm < math.inf):
        raise ConfigError(f"train.max_grad_norm is {norm!r}; it must be a finite number, 0 or more; 0 is no clipping.")


def parse_throttle(setting: Any) -> dict[str, Throttle]:
    """Parse {lane: bytes per second} or {lane: {"bandwidth": size per second, "latency_seconds": s}}. None means no
    throttles. Raises ConfigError for anything else.
    """
    lanes = ", ".join(LANES)
    if setting is not None and not isinstance(setting, Mapping):
        raise ConfigError(f"offload.throttle is {setting!r}; it must map lanes to bandwidths, with the lanes {lanes}.")
    throttles = {}
    for lane, value in (setting or {}).items():
        key = f"offload.throttle.{lane}"
        if lane not in LANES:
            raise ConfigError(f"{key}: unknown lane{nearest(str(lane), LANES)}; the lanes are {lanes}.")
        fields = value if isinstance(value, Mapping) else {"bandwidth": value}  # a number alone is the bandwidth
        for name in fields:
            if name not in _THROTTLE_KEYS:
                raise ConfigError(
                    f"{key}.{name}: unknown key{nearest(str(name), _THROTTLE_KEYS)}; allowed: "
                    f"{', '.join(_THROTTLE_KEYS)}."
                )
        bandwidth = fields.get("bandwidth")
        rate = bandwidth
        if not isinstance(bandwidth, float):
            rate = parse_size(bandwidth, f"{key}.bandwidth")
        latency = fields.get("latency_seconds", 0.0)
        if rate is not None and not 0 < rate < float("inf"):
            raise ConfigError(f"{key} is {bandwidth!r}; a bandwidth must be more than 0 bytes per second.")
        if isinstance(latency, bool) or not isinstance(latency, int | float) or not 0 <= latency < float("inf"):
            raise ConfigError(f"{key}.latency_seconds is {latency!r}; it must be a number of seconds, at least 0.")
        throttles[lane] = Throttle(rate, float(latency))
    return throttles


def with_settings(function: _Function) -> _Function:
    """Show the fields of `Settings` in the signature and docstring of a function taking `**settings`."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    # A parameter of the function hides the field with its name.
    known = {each.name for each in own}
    shown = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in dataclasses.fields(Settings)
        if each.name not in known
    ]
    fields_of = inspect.getdoc(Settings) or ""
    function.__doc__ = f"{inspect.getdoc(function) or ''}\n\n{fields_of.split(chr(10) * 2)[1]}".strip()
    function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
    return function


def _check(value: object, allowed: tuple[object, ...], key: str) -> None:
    if value not in allowed:
        names = ", ".join(str(item) for item in allowed)
        raise ConfigError(f"{key} is {value!r}; this version allows {names}.")


def _check_number(value: Any, least: int, key: str, allowed: str, words: tuple[object, ...] = ()) -> None:
    if value not in words and (isinstance(value, str) or value < least):
        raise ConfigError(f"{key} is {value!r}; it must be {allowed}.")
