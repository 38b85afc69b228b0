"""The engine inside other libraries' training loops.

`wrap` for plain PyTorch loops, `transformers` for Trainer and TRL's trainers, `accelerate` for scripts with
Accelerator. The last two need the extra `hf`; no other offload module imports them.
"""

from __future__ import annotations

import importlib.util

from offload.errors import MissingLibraryError


def require_libraries(*libraries: str) -> None:
    """Raise MissingLibraryError if a library is not installed."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingLibraryError(
            f"this integration needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed: pip install {' '.join(missing)}."
        )
