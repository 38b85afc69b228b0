"""Key-value caches: off while units stream, because recomputation would append to a cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Caches:
    """The `use_cache` flags in the model configurations."""

    def __init__(self, model: nn.Module) -> None:
        configs: dict[int, Any] = {}
        for module in model.modules():
            config = getattr(module, "config", None)
            if getattr(config, "use_cache", None) is not None:
                configs[id(config)] = config
        self._original_flags = [(config, config.use_cache) for config in configs.values()]

    def turn_off(self) -> None:
        """Set all flags to False."""
        _set_flags((config, False) for config, _ in self._original_flags)

    def restore(self) -> None:
        """Restore the original flags."""
        _set_flags(self._original_flags)

    @contextmanager
    def with_original_flags(self) -> Iterator[None]:
        """Context in which the model configurations have the flags (`use_cache`) from before the engine."""
        current_flags = [(config, config.use_cache) for config, _ in self._original_flags]
        self.restore()
        try:
            yield
        finally:
            _set_flags(current_flags)


def _set_flags(flags: Iterable[tuple[Any, Any]]) -> None:
    for config, flag in flags:
        config.use_cache = flag
