"""Key-value caches: off while units stream, because recomputation would append to a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Caches:
    """The `use_cache` flags in the model configurations."""

    def __init__(self, model: nn.Module) -> None:
        # Modules share configurations, which need not be hashable.
        configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        flags = ((config, getattr(config, "use_cache", None)) for config in configs.values())
        self._original_flags = [(config, flag) for config, flag in flags if flag is not None]

    def turn(self, on: bool) -> None:
        """Set all flags to False, or with `on` to their original values."""
        for config, flag in self._original_flags:
            config.use_cache = on and flag

    @contextmanager
    def with_original_flags(self) -> Iterator[None]:
        """Context in which the model configurations have the flags (`use_cache`) from before the engine."""
        current_flags = [(config, config.use_cache) for config, _ in self._original_flags]
        self.turn(on=True)
        try:
            yield
        finally:
            for config, flag in current_flags:
                config.use_cache = flag
