"""`builtin:stdlib-chat`: questions and answers from Python standard library docstrings."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import PurePosixPath

import xxhash

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_QUESTIONS = (
    "What does `{name}` do?",
    "Explain the {kind} `{name}` from Python's standard library.",
    "What is `{name}` for?",
    "Give me the documentation of `{name}`.",
    "I found `{name}` in some Python code. What is it?",
    "How would you describe the {kind} `{name}` in `{module}`?",
)


def docstring_chats(source: str, file_name: str) -> Iterator[tuple[int, list[dict[str, str]]]]:
    """Yield (line, messages) for every documented function, class and method in a module, in file order.

    `file_name` is the path inside the standard library, e.g. `asyncio/tasks.py`. A hash of the name selects the
    question wording, so the same Python version gives the same chats.
    """
    parts = PurePosixPath(file_name).with_suffix("").parts
    # A package is the name of its folder.
    if parts[-1] == "__init__":
        parts = parts[:-1]
    module = ".".join(parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old modules
        tree = ast.parse(source)
    for node, qualified, kind in _documented_definitions(tree.body, f"{module}.", "function"):
        # Python's own hash would differ from process to process.
        wording = _QUESTIONS[xxhash.xxh3_64_intdigest(qualified.encode()) % len(_QUESTIONS)]
        question = wording.format(name=qualified, kind=kind, module=module)
        answer = ast.get_docstring(node) or ""
        yield node.lineno, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _documented_definitions(
    body: list[ast.stmt], prefix: str, function_label: str
) -> Iterator[tuple[_Definition, str, str]]:
    for node in body:
        if not isinstance(node, _Definition):
            continue
        is_class = isinstance(node, ast.ClassDef)
        label = function_label
        if is_class:
            label = "class"
        if ast.get_docstring(node):
            yield node, prefix + node.name, label
        # Functions inside of functions are left out: nobody can ask for them by name.
        if is_class:
            yield from _documented_definitions(node.body, f"{prefix}{node.name}.", "method")
