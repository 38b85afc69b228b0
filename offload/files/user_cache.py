"""What may be kept for the user from run to run: made again where it is gone or damaged, never needed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Any


def default_cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/offload`, by default `~/.cache/offload`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "offload"


def read_json(path: Path) -> Any:
    """Return what a file holds; None where there is none, or half of one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def keep_json(path: Path, value: Any) -> None:
    """Put a value into a file in one step, so that who reads it meanwhile sees the old one or the new; a folder that
    cannot be written to is left as it is.
    """
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
