"""`torch.sim`: the counterpart of torch.cuda, without functions unknown to real devices."""

from __future__ import annotations

import os
import struct
import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from tests.accelerator.driver import Driver
from tests.accelerator.rtc import utilities

NAME = "sim"


class Stream:
    """Create a torch.Stream on the given device (None: the current one)."""

    def __new__(cls, device: Any = None, priority: int = 0) -> torch.Stream:  # type: ignore[misc]
        return torch.Stream(device=_as_device(device), priority=priority)


class Event:
    """Create a torch.Event; the first record decides the device. (torch measures no time between subclasses.)"""

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        return torch.Event(NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


class device(AbstractContextManager[None]):  # like torch.cuda.device
    """Make a device current for the thread. None and negative numbers change nothing."""

    def __init__(self, device: Any) -> None:
        self._index = -1 if device is None else _as_device(device).index
        self._before = -1

    def __enter__(self) -> None:
        self._before = torch._C._accelerator_exchangeDevice(self._index)

    def __exit__(self, *error: object) -> None:
        torch._C._accelerator_maybeExchangeDevice(self._before)


def _as_device(device: Any) -> torch.device:
    """Return a device with an index, from any form accepted by torch."""
    if device is None:
        return torch.device(NAME, torch.accelerator.current_device_index())
    found = torch.device(NAME, device) if isinstance(device, int) else torch.device(device)
    if found.type != NAME:
        raise ValueError(f"Expected a {NAME} device, but got: {found}")
    return found if found.index is not None else torch.device(NAME, torch.accelerator.current_device_index())


def make_module(driver: Driver, memory_bytes: int) -> types.ModuleType:
    """Return the module over a loaded library. `memory_bytes`: per device."""
    made = types.ModuleType(f"torch.{NAME}", __doc__)
    made._initialized = True  # type: ignore[attr-defined]
    made._utils = utilities(driver)  # type: ignore[attr-defined]
    parts = (partial(_devices, memory_bytes=memory_bytes), _streams, _memory, _random, _pinning, _debugging)
    for part in parts:
        for function in part(driver):
            setattr(made, function.__name__, function)
    return made


def _devices(driver: Driver, memory_bytes: int) -> Iterable[Callable[..., Any]]:
    def is_available() -> bool:
        return device_count() > 0

    def is_initialized() -> bool:
        return True

    def init() -> None:
        pass

    def _lazy_init() -> None:
        pass

    def _is_in_bad_fork() -> bool:
        return bool(driver.in_bad_fork())

    def device_count() -> int:
        return driver.device_count()

    def current_device() -> int:
        return torch.accelerator.current_device_index()

    def set_device(device: Any) -> None:
        torch.accelerator.set_device_index(_as_device(device).index)

    def get_device_name(device: Any = None) -> str:
        return f"Simulated accelerator {_as_device(device).index}"

    def get_device_capability(device: Any = None) -> tuple[int, int]:
        _as_device(device)
        return 9, 0

    def get_device_properties(device: Any = None) -> types.SimpleNamespace:
        # Like CUDA, works without a context. SIM_FIRST: number of the first visible device.
        number = int(os.environ.get("SIM_FIRST", "0")) + _as_device(device).index
        known = {"major": 9, "minor": 0, "total_memory": memory_bytes, "multi_processor_count": 1}
        return types.SimpleNamespace(name=get_device_name(device), uuid=f"SIM-{number}", **known)

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return True

    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    return (
        *(is_available, is_initialized, init, _lazy_init, _is_in_bad_fork, device_count, current_device, set_device),
        *(get_device_name, get_device_capability, get_device_properties, is_bf16_supported, get_amp_supported_dtype),
        device,
    )


def _streams(driver: Driver) -> Iterable[Callable[..., Any]]:
    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(_as_device(device))

    def default_stream(device: Any = None) -> torch.Stream:
        index = _as_device(device).index
        return torch.Stream(stream_id=0, device_index=index, device_type=int(torch._C._autograd.DeviceType.PrivateUse1))

    def set_stream(stream: torch.Stream | None) -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)

    class stream(AbstractContextManager[None]):  # like torch.cuda.stream
        def __init__(self, stream: torch.Stream | None) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            if self._stream is not None:
                self._stream.__enter__()

        def __exit__(self, *error: Any) -> None:
            if self._stream is not None:
                self._stream.__exit__(*error)

    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(_as_device(device))

    return Stream, Event, current_stream, default_stream, set_stream, stream, synchronize


def _memory(driver: Driver) -> Iterable[Callable[..., Any]]:
    def stats(key: str) -> Callable[..., int]:
        def read(device: Any = None) -> int:
            return torch.accelerator.memory_stats(_as_device(device)).get(key, 0)

        return read

    def memory_stats(device: Any = None) -> dict[str, Any]:
        return torch.accelerator.memory_stats(_as_device(device))

    def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
        return torch._C._accelerator_getDeviceStats(_as_device(device).index)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return torch._C._accelerator_getMemoryInfo(_as_device(device).index)

    def reset_peak_memory_stats(device: Any = None) -> None:
        torch.accelerator.reset_peak_memory_stats(_as_device(device))

    def reset_accumulated_memory_stats(device: Any = None) -> None:
        torch.accelerator.reset_accumulated_memory_stats(_as_device(device))

    def empty_cache() -> None:
        driver.empty_cache()

    def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        driver.set_limit(_as_device(device).index, int(mem_get_info(device)[1] * fraction))

    figures = {
        "memory_allocated": "allocated_bytes.all.current",
        "max_memory_allocated": "allocated_bytes.all.peak",
        "memory_reserved": "reserved_bytes.all.current",
        "max_memory_reserved": "reserved_bytes.all.peak",
    }
    named = []
    for name, key in figures.items():
        function = stats(key)
        function.__name__ = name
        named.append(function)
    return (
        *named,
        *(
            memory_stats,
            memory_stats_as_nested_dict,
            mem_get_info,
            reset_peak_memory_stats,
            reset_accumulated_memory_stats,
            empty_cache,
        ),
        set_per_process_memory_fraction,
    )


def _random(driver: Driver) -> Iterable[Callable[..., Any]]:
    layout = struct.Struct("=QQ")  # seed, offset

    def get_rng_state(device: Any = NAME) -> torch.Tensor:
        index = _as_device(device).index
        numbers = list(layout.pack(driver.current_seed(index), driver.offset(index)))
        return torch.tensor(numbers, dtype=torch.uint8, device="cpu")

    def set_rng_state(new_state: torch.Tensor, device: Any = NAME) -> None:
        driver.set_random_state(_as_device(device).index, *layout.unpack(new_state.numpy().tobytes()))

    def get_rng_state_all() -> list[torch.Tensor]:
        return [get_rng_state(index) for index in range(driver.device_count())]

    def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
        for index, state in enumerate(new_states):
            set_rng_state(state, index)

    def manual_seed(seed: int) -> None:
        driver.seed(torch.accelerator.current_device_index(), int(seed) % 2**64)

    def manual_seed_all(seed: int) -> None:
        for index in range(driver.device_count()):
            driver.seed(index, int(seed) % 2**64)

    def initial_seed() -> int:
        return driver.current_seed(torch.accelerator.current_device_index())

    return (
        *(get_rng_state, set_rng_state, get_rng_state_all, set_rng_state_all),
        *(manual_seed, manual_seed_all, initial_seed),
    )


def _pinning(driver: Driver) -> Iterable[Callable[..., Any]]:
    def host_register(address: int, num_bytes: int) -> int:
        """cudaHostRegister. Returns the error code (0: none)."""
        return driver.host_register(address, num_bytes)

    def host_unregister(address: int) -> int:
        """cudaHostUnregister. Returns the error code (0: none)."""
        return driver.host_unregister(address)

    def take_last_error() -> int:
        """cudaGetLastError: return and clear the error left by a refused call in this thread."""
        return driver.take_error()

    def host_device_pointer(found: Any, address: Any, flags: int) -> int:
        """cudaHostGetDevicePointer. The addresses are equal here."""
        found._obj.value = address.value
        return 0

    runtime = types.SimpleNamespace(
        cudaHostGetDevicePointer=host_device_pointer,
        cudaHostRegister=lambda address, num_bytes, flags: host_register(address, num_bytes),
        cudaHostUnregister=host_unregister,
    )

    def cudart() -> types.SimpleNamespace:
        """Host memory functions of `torch.cuda.cudart()`."""
        return runtime

    return host_register, host_unregister, take_last_error, cudart


def _debugging(driver: Driver) -> Iterable[Callable[..., Any]]:
    modes = ("default", "warn", "error")

    def set_sync_debug_mode(debug_mode: int | str) -> None:
        driver.set_sync_mode(modes.index(debug_mode) if isinstance(debug_mode, str) else debug_mode)

    def get_sync_debug_mode() -> int:
        return driver.sync_mode()

    return set_sync_debug_mode, get_sync_debug_mode
