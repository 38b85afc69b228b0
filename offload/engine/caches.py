"""Key-value caches: off while units stream, because recomputation would append to a cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Caches:
    """The `use_cache` flags in the model configurations."""

    def __init__(self, model: nn.Module) -> None:
        found: dict[int, Any] = {}
        for module in model.modules():
            config = getattr(module, "config", None)
            if getattr(config, "use_cache", None) is not None:
                found[id(config)] = config
        self._given = [(config, config.use_cache) for config in found.values()]

    def turn_off(self) -> None:
        """Set all flags to False."""
        _say((config, False) for config, _ in self._given)

    def restore(self) -> None:
        """Restore the original flags."""
        _say(self._given)

    @contextmanager
    def as_given(self) -> Iterator[None]:
        """Context with the original flags in the model configurations."""
        now = [(config, config.use_cache) for config, _ in self._given]
        self.restore()
        try:
            yield
        finally:
            _say(now)


def _say(uses: Iterable[tuple[Any, Any]]) -> None:
    for config, used in uses:
        config.use_cache = used
