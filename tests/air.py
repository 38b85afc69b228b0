"""Find lines with more than one thought.

    python -m tests.air             # part of make lint: exits with 1 after a fault in a file of HELD
    python -m tests.air FILE ...    # faults in other files

- An assignment has at most two targets. A value taken apart into names is one thought and may have more.
- A conditional expression is not inside another one, in a test, in a subscript, or in a keyword argument.
- A comprehension has at most two `for`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
HELD = [
    "offload/*.py",
    "offload/app/*.py",
    "offload/app/config/*.py",
    "offload/app/hf/*.py",
    "offload/app/telemetry/*.py",
    "offload/app/training/*.py",
    "offload/checkpoint/*.py",
    "offload/distributed/*.py",
    "offload/engine/**/*.py",
    "offload/extras/adapters/*.py",
    "offload/extras/data/*.py",
    "offload/extras/generate/*.py",
    "offload/extras/large/*.py",
    "offload/extras/plan/adapted_stacks.py",
    "offload/extras/plan/alternatives.py",
    "offload/extras/plan/dispatched.py",
    "offload/extras/plan/forecast.py",
    "offload/extras/plan/levers.py",
    "offload/extras/plan/machine_files.py",
    "offload/extras/plan/memory.py",
    "offload/extras/plan/op_counter.py",
    "offload/extras/plan/probe.py",
    "offload/extras/plan/routed.py",
    "offload/extras/plan/run_forecast.py",
    "offload/extras/plan/search.py",
    "offload/extras/plan/simulated_lanes.py",
    "offload/extras/plan/simulated_ranks.py",
    "offload/extras/frozen/*.py",
    "offload/extras/prefs/*.py",
    "offload/extras/quant/*.py",
    "offload/extras/rules/*.py",
    "offload/extras/tools/**/*.py",
    "offload/extras/zeroth/*.py",
    "offload/files/*.py",
    "offload/integrations/*.py",
    "offload/lanes/*.py",
    "offload/layout/*.py",
    "offload/machine/*.py",
    "offload/native/*.py",
    "offload/optim/*.py",
    "offload/planning/*.py",
    "offload/schedule/*.py",
    "offload/tiers/*.py",
]
"""Patterns for the files that keep the rule. A folder joins as soon as it has no faults."""
_MOST_TARGETS = 2
_MOST_LOOPS = 2


def is_packed(node: ast.AST) -> bool:
    """True for an assignment with more than two targets. A value taken apart into names does not count."""
    if not isinstance(node, ast.Assign):
        return False
    targets = [part for target in node.targets for part in _parts(target)]
    is_display = isinstance(node.value, ast.Tuple | ast.List)
    takes_apart = len(node.targets) == 1 and not is_display and all(isinstance(part, ast.Name) for part in targets)
    return len(targets) > _MOST_TARGETS and not takes_apart


def _parts(target: ast.expr) -> list[ast.expr]:
    """Return the single targets in a target."""
    if isinstance(target, ast.Tuple | ast.List):
        return [part for element in target.elts for part in _parts(element)]
    return [target.value if isinstance(target, ast.Starred) else target]


def _narrow_places(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield (description, child) for children too narrow for a conditional expression."""
    match node:
        case ast.IfExp():
            yield from (("inside another", child) for child in ast.iter_child_nodes(node))
        case ast.If(test=test) | ast.While(test=test):
            yield "in a test", test
        case ast.comprehension(ifs=tests):
            yield from (("in a test", test) for test in tests)
        case ast.Subscript(slice=index):
            yield "in a subscript", index
        case ast.keyword(value=value):
            yield "in a keyword argument", value


def faults(text: str) -> list[tuple[int, str]]:
    """Return (line, description) for each fault in a module."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if is_packed(node):
            found.add((node.lineno, f"more than {_MOST_TARGETS} targets in an assignment"))
        if len(getattr(node, "generators", ())) > _MOST_LOOPS:
            found.add((node.lineno, f"a comprehension with more than {_MOST_LOOPS} `for`"))
        for place, child in _narrow_places(node):
            inner = (each for each in ast.walk(child) if isinstance(each, ast.IfExp))
            found.update((each.lineno, f"a conditional expression {place}") for each in inner)
    return sorted(found)


def held_files() -> list[Path]:
    """Return the files of `HELD`. Raises ValueError for a pattern without a file."""
    found = []
    for pattern in HELD:
        files = sorted(ROOT.glob(pattern))
        if not files:
            raise ValueError(f"{pattern} of HELD has no file")
        found += files
    return found


def main(words: Sequence[str]) -> int:
    """Print the faults in the named files, or in all of `HELD`. Returns 1 if there are any."""
    files = [Path(word) for word in words] or held_files()
    lines = [f"{path}:{line}: {fault}" for path in files for line, fault in faults(path.read_text())]
    print(*lines, sep="\n", end="\n" * bool(lines))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
