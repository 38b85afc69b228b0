"""Project rules not covered by a linter."""

from __future__ import annotations

import ast
import re
from itertools import zip_longest
from pathlib import Path

import pytest

import offload
from offload.setting_texts import TEXTS

_ROOT = Path(offload.__file__).parent


def sources() -> dict[str, str]:
    found = {str(path.relative_to(_ROOT)): path.read_text() for path in _ROOT.rglob("*.py")}
    assert len(found) > 100
    return found


def test_tests_look_into_an_engine_at_one_place() -> None:
    here = Path(__file__).parent
    private = re.compile(r"engine\._(state|memory|weights|flow)\b")
    found = {path.relative_to(here) for path in here.rglob("*.py") if private.search(path.read_text())}
    assert found - {Path(__file__).relative_to(here)} == {Path("engine/inside.py")}


@pytest.mark.parametrize("package", ["engine", "forecast", "lanes", "layout", "planning", "schedule", "tiers"])
def test_each_field_has_its_line(package: str) -> None:
    texts = {key.partition(".")[2] for key in TEXTS}
    for name, text in sources().items():
        if not name.startswith(package):
            continue
        for kind in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
            is_record = any("dataclass" in ast.unparse(d) for d in kind.decorator_list)
            if not is_record and not any(ast.unparse(base) == "NamedTuple" for base in kind.bases):
                continue
            listed = ast.get_docstring(kind) or ""
            for field, after in zip_longest(kind.body, kind.body[1:]):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    key = field.target.id
                    has_line = (
                        key in texts
                        or isinstance(after, ast.Expr)
                        or re.search(rf"(?m)^\s*[\w, ]*\b{key}\b[\w, ]*:", listed)
                    )
                    assert has_line or key.startswith("_"), f"{name}: {kind.name}.{key}"
