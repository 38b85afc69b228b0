"""Global state of torch: settings, hooks and caches that model code can change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.nn.utils import parametrize

from offload.engine.units.state_snapshot import restore_dict

Setting = tuple[str, Callable[[], Any], Callable[[Any], Any]]
"""(name, reader, writer) of a global setting."""


def _attribute(owner: Any, key: str) -> Setting:
    return f"{owner.__name__}.{key}", partial(getattr, owner, key), partial(setattr, owner, key)


def settings(device_type: str) -> list[Setting]:
    """Return torch's global settings. Grad mode and function modes are excluded: contexts around a run own these."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    attention = ("flash", "mem_efficient", "math", "cudnn")
    casts: list[Setting] = []
    for name in dict.fromkeys(("cpu", device_type)):
        enabled, enable = torch.is_autocast_enabled, torch.set_autocast_enabled
        casts.append((f"autocast on {name}", partial(enabled, name), partial(enable, name)))
        dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
        casts.append((f"autocast dtype on {name}", partial(dtype, name), partial(set_dtype, name)))
    return [
        ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        ("default device", torch.get_default_device, torch.set_default_device),
        ("deterministic mode", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        ("matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        ("threads", torch.get_num_threads, torch.set_num_threads),
        ("anomaly mode", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        ("autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        *casts,
        *((f"{n} attention", getattr(cuda, f"{n}_sdp_enabled"), getattr(cuda, f"enable_{n}_sdp")) for n in attention),
        *(_attribute(cudnn, key) for key in ("enabled", "benchmark", "deterministic", "allow_tf32")),
        _attribute(torch.backends.mkldnn, "enabled"),
        _attribute(parametrize, "_cache_enabled"),
    ]


def tables() -> list[tuple[Any, str]]:
    """Return (module, name) of torch's global tables: hooks of all modules, and cached parametrizations."""
    names = [name for name in vars(modules) if name.startswith("_global_") and name.endswith("hooks")]
    return [(parametrize, "_cache"), *((modules, name) for name in names)]


class TorchState:
    """Torch's global state at one moment."""

    def __init__(self, device_type: str) -> None:
        self._settings = [(read(), read, write) for _, read, write in settings(device_type)]
        self._tables = [(owner, name, table := getattr(owner, name), dict(table)) for owner, name in tables()]

    def put_back(self) -> None:
        """Restore the state. Casts cached by autocast are dropped: they belong to the graphs of a trial."""
        for value, read, write in self._settings:
            if read() != value:
                write(value)
        for owner, name, table, content in self._tables:
            restore_dict(table, content)
            setattr(owner, name, table)
        torch.clear_autocast_cache()


def with_own_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` with a separate cache inside the caller's `parametrize.cached()`.

    A unit computes weights anew in each use. A cached value of a use without a graph would have no gradient, and one
    with a graph would refer to weights in a slot.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        before, parametrize._cache = parametrize._cache, {}
        try:
            return forward(*args, **kwargs)
        finally:
            parametrize._cache = before

    return run
