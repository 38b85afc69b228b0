"""Names in the pages exist: modules, classes, functions, attributes, settings, commands and their options."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from offload.__main__ import COMMANDS
from offload.app.config.config import all_keys
from tests.forks import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(path.relative_to(ROOT)) for path in PAGES]
PLACEHOLDERS = {"offload.COMMAND", "section.field"}
COMMON = {"help", "help-extra", "version", "config", "debug", "gpus"}
"""Options of every command."""


def code_blocks(text: str) -> Iterator[str]:
    """Yield the fenced blocks of a page."""
    yield from re.findall(r"(?ms)^```[^\n]*\n(.*?)^```$", text)


def inline_code(text: str) -> Iterator[str]:
    """Yield code within the lines of a page."""
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"(?ms)^```.*?^```$", "", text))


def imports(block: str) -> Iterator[str]:
    """Yield the dotted names that a Python block imports from the package; none from other text."""
    try:
        tree = ast.parse(block)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def dotted_names(text: str) -> set[str]:
    """Return the names of the package in a page: imports, and each `offload.x.y` in code."""
    code = [*code_blocks(text), *inline_code(text)]
    found = {name for each in code for name in imports(each) if name.split(".")[0] == "offload"}
    pattern = r"(?<![\w./~-])offload(?!\.yaml)(?:\.[A-Za-z_]\w*)+(?![\w/-])"
    return (found | {name for each in code for name in re.findall(pattern, each)}) - PLACEHOLDERS


@cache
def exists(name: str) -> bool:
    """Tell whether a dotted name is a setting, or leads from a module over attributes to an object."""
    if name in all_keys():
        return True
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if error.name not in (".".join(parts[: n + 1]) for n in range(len(parts))):
                raise
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return part in getattr(found, "__dataclass_fields__", {})
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_each_name_of_the_package_can_be_imported(path: Path) -> None:
    assert not [name for name in sorted(dotted_names(path.read_text())) if not exists(name)]


@cache
def sources() -> dict[str, list[str]]:
    """Return the texts of the package's modules, by name of a class in the module."""
    found: dict[str, list[str]] = {}
    for path in (ROOT / "offload").rglob("*.py"):
        text = path.read_text()
        for name in re.findall(r"(?m)^class (\w+)", text):
            found.setdefault(name, []).append(text)
    return found


@cache
def classes_in(text: str) -> list[ast.ClassDef]:
    """Return the classes of a module."""
    return [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]


@cache
def attributes(name: str) -> frozenset[str] | None:
    """Return the attributes of a class in the package: of the class, and of `self` in methods; None: no such class."""
    with_class = sources().get(name, [])
    kinds = [node for text in with_class for node in classes_in(text)]
    found: set[str] = set()
    for kind in (each for each in kinds if each.name == name):
        for node in ast.walk(kind):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
        for base in kind.bases:
            found |= attributes(ast.unparse(base).split("[")[0].split(".")[-1]) or set()
    return frozenset(found) if with_class else None


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_each_attribute_of_a_class_of_the_package_exists(path: Path) -> None:
    """`Class.name`, and `engine.name` for `Engine`. Other libraries have the missing classes."""
    text = path.read_text()
    code = "\n".join([*code_blocks(text), *inline_code(text)])
    named = set(re.findall(r"(?<![\w./])([A-Z]\w+)\.([a-z_]\w*)", code))
    named |= {("Engine", name) for name in re.findall(r"(?<![\w./])engine\.([a-z_]\w*)(?=\()", code)}
    known = {kind: attributes(kind) for kind, _ in named}
    unknown = [(kind, name) for kind, name in sorted(named) if name not in (known[kind] or {name})]
    assert not unknown


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_each_setting_on_a_command_line_is_known(path: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--([a-z]+\.[a-z_0-9]+)", path.read_text()))
    assert not named - PLACEHOLDERS - set(all_keys())


def command_options() -> dict[str, set[str]]:
    """Return the options of each command, from the page with the help texts."""
    text = (ROOT / "docs" / "reference" / "commands.md").read_text()
    sections = re.split(r"(?m)^###? ", text)[1:]
    return {each.splitlines()[0]: set(re.findall(r"--([a-z][a-z-]*)", each)) | COMMON for each in sections}


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_each_option_on_a_command_line_is_known(path: Path) -> None:
    options = command_options()
    assert set(COMMANDS) <= set(options)
    text = path.read_text()
    lines = [line for block in code_blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    unknown = []
    for line in (*lines, *inline_code(text)):
        found = re.match(r"(?:\.venv/bin/)?(?:python -m offload\.|offload )([a-z]+)((?: (?:step|nvme)\b)?)(.*)", line)
        if found is None or found[1] not in COMMANDS:
            continue
        known = options[found[1] + found[2]]
        words = re.sub(r"'[^']*'|\"[^\"]*\"| #.*", "", found[3])
        unknown.extend(
            f"{found[1]} --{name}" for name in re.findall(r" --([a-z][a-z-]*)(?![\w.-])", words) if name not in known
        )
    assert not unknown


def test_a_renamed_name_is_found() -> None:
    page = (
        "Call `offload.wrapped` or `offload.Engine.steps`.\n\n```python\nfrom offload.errors import ConfigErrors\n```\n"
    )
    missing = {"offload.wrapped", "offload.Engine.steps", "offload.errors.ConfigErrors"}
    assert {name for name in dotted_names(page) if not exists(name)} == missing
    assert exists("offload.Engine.step")
    assert exists("offload.device_memory")
