"""C functions in the library. ctypes releases the GIL during each call."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_int, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CostFields(ctypes.Structure):
    """Fields of `sim::CostModel`, in order."""

    _fields_ = [
        ("on", ctypes.c_bool),
        *(
            (name, c_double)
            for name in (
                "half_flops_per_s",
                "single_flops_per_s",
                "memory_bytes_per_s",
                "to_device_bytes_per_s",
                "to_host_bytes_per_s",
                "peer_bytes_per_s",
                "kernel_latency_s",
                "copy_latency_s",
                "launch_latency_s",
                "flops_scale",
                "bytes_scale",
            )
        ),
    ]


_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # result type, then argument types
    "configure": (None, c_int, c_size_t, c_size_t, c_size_t),
    "most_devices": (c_int,),
    "device_count": (c_int,),
    "current_device": (c_int,),
    "in_bad_fork": (c_int,),
    "has_context": (c_int, c_int),
    "set_limit": (None, c_int, c_size_t),
    "empty_cache": (None,),
    "host_register": (c_int, c_void_p, c_size_t),
    "host_unregister": (c_int, c_void_p),
    "take_error": (c_int,),
    "registered_ranges": (c_int64,),
    "registered_bytes": (c_int64,),
    "seed": (None, c_int, c_uint64),
    "current_seed": (c_uint64, c_int),
    "offset": (c_uint64, c_int),
    "set_random_state": (None, c_int, c_uint64, c_uint64),
    "counters": (c_int,),
    "counter_name": (c_char_p, c_int),
    "counter": (c_int64, c_int, c_int),
    "busy_seconds": (c_double, c_int, c_int),
    "reset_counters": (None, c_int),
    "set_jitter": (None, c_int64, c_uint64, c_int),
    "set_launch_queue": (None, c_int64),
    "set_poison": (None, c_int),
    "set_computing": (None, c_int),
    "set_sync_mode": (None, c_int),
    "sync_mode": (c_int,),
    "set_cost": (None, c_void_p),
    "launch": (None, c_void_p, c_void_p, c_int, c_uint64, c_int64, c_int64, c_double),
    "hold": (c_void_p, c_int, c_int64),
    "release": (None, c_void_p),
}


@dataclass(frozen=True)
class Driver:
    """`driver.NAME(...)` calls `sim_NAME` in the library."""

    library: ctypes.CDLL

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, f"sim_{name}")


def open_driver(path: Path) -> Driver:
    """Load the library. Loading registers the torch backend."""
    library = ctypes.CDLL(str(path))
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(library, f"sim_{name}")
        function.restype, function.argtypes = result, arguments
    return Driver(library)
