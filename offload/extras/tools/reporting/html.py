"""Fill the HTML templates in this folder and write self-contained pages atomically."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jinja2

from offload.errors import ConfigError, DiskError, allocation_name, errno_text, format_bytes, ratio
from offload.extras.tools.reporting.run_record import seconds_text


def fill(template: str, **values: Any) -> str:
    """Return a filled template from this folder. All values are escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # A misspelt name in a template is an error, not an empty place.
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "allocation": allocation_name,
        "bytes": format_bytes,
        "ratio": ratio,
        "seconds": seconds_text,
    }
    environment.globals["percent"] = _percent
    return environment.get_template(template).render(values)


def check_path(path: Path, option: str) -> None:
    """Raise ConfigError unless the file ends in .html, so a page never overwrites run files.

    `option` names the flag.
    """
    if path.suffix != ".html":
        raise ConfigError(f"{option} is {path}; name a file that ends in .html.")


def write_html(path: Path, text: str, option: str) -> None:
    """Write a page atomically. Raises DiskError with the option name."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")  # file names may be any bytes
        partial.replace(path)
    except OSError as error:
        code = error.errno or 0
        raise DiskError(
            f"{path} cannot be written: {errno_text(code)}; set {option} to another file.", code, path
        ) from None
    finally:
        # After a failure half a page may be left.
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _percent(value: float, whole: float) -> float:
    if not whole:
        return 0.0
    return round(min(100.0, 100 * value / whole), 2)
