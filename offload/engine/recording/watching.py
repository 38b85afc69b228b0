"""Torch modes with a view of all operations in a pass."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class WatchingMode(TorchDispatchMode):
    """A dispatch mode with compiled functions forced to eager execution.

    Otherwise dynamo permanently gives up each function first called under a mode.
    """

    _stance: AbstractContextManager[Any] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: the torch wrapper against dynamo tracing doubles the time per operation.

        Nothing is compiled here, so the wrapper is not needed.
        """
        return False

    def __enter__(self) -> Self:
        if "torch._dynamo" in sys.modules:  # else nothing was compiled
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._stance is not None:
            self._stance.__exit__(*error)
            self._stance = None
