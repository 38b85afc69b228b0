"""Project rules not covered by a linter."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path

import pytest

import offload

_ROOT = Path(offload.__file__).parent
_OTHERS = {"_models", "data", "dtype", "forward", "grad", "optimizer", "training", "use_cache"}
"""Attribute names shared between our classes and torch or transformers objects."""


def own_attributes(tree: ast.Module) -> set[str]:
    """Return attribute names assigned by the classes in a file to their objects. A property setter is a method."""
    found = set()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(kind):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                found.add(node.attr)
        for node in kind.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


def setters(tree: ast.Module) -> set[str]:
    """Return the names of properties with a setter."""
    decorated = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {
        n.name for n in decorated if any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in n.decorator_list)
    }


def assigned_elsewhere(sources: Mapping[str, str]) -> list[str]:
    """Return places that assign or delete an attribute owned by classes in other files."""
    trees = {name: ast.parse(text) for name, text in sources.items()}
    own = {name: own_attributes(tree) for name, tree in trees.items()}
    known = set[str]().union(*own.values()) - _OTHERS - set[str]().union(*map(setters, trees.values()))
    others = {name: known - names for name, names in own.items()}
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if not _is_self(node.value) and node.attr in others[name]
    ]


def _is_self(node: ast.AST) -> bool:
    """Return whether a node is the object itself, or torch's context in an autograd function."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "ctx")


def sources() -> dict[str, str]:
    found = {str(path.relative_to(_ROOT)): path.read_text() for path in _ROOT.rglob("*.py")}
    assert len(found) > 100
    return found


def test_no_attribute_is_assigned_in_another_file_than_that_of_its_class() -> None:
    """A reader of a class then sees all changes to its objects."""
    assert assigned_elsewhere(sources()) == []


def test_one_that_is_is_found() -> None:
    one = (
        "class Lane:\n    def __init__(self): self.name, self.error = '', None\n    @property\n    def lr(self): ...\n"
    )
    one += "    @lr.setter\n    def lr(self, value): ...\n"
    other = "def forget(lanes):\n    for lane in lanes:\n        lane.error = None\n        lane.lr = lane.grad = 1\n"
    assert assigned_elsewhere({"one": one, "other": other}) == ["other:3: lane.error"]
    assert not assigned_elsewhere({"one": one + other})


def test_tests_look_into_an_engine_at_one_place() -> None:
    here = Path(__file__).parent
    found = {path.relative_to(here) for path in here.rglob("*.py") if "engine._state" in path.read_text()}
    assert found - {Path(__file__).relative_to(here)} == {Path("engine/inside.py")}


@pytest.mark.parametrize("package", ["engine", "forecast", "lanes", "layout", "planning", "schedule", "tiers"])
def test_each_field_has_its_line(package: str) -> None:
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
                    has_line = isinstance(after, ast.Expr) or re.search(rf"(?m)^\s*[\w, ]*\b{key}\b[\w, ]*:", listed)
                    assert has_line or key.startswith("_"), f"{name}: {kind.name}.{key}"
