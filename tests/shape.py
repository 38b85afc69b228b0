"""Print the code shape in numbers: a table, and JSON on the last line.

    python -m tests.shape

- rings: Python lines in the core, the application and the extras.
- violations: imports against the ring direction.
- executed, opened, files: executed lines in a warm training step, total lines in their files, and the number of files,
  over all threads.
- settings, choices: command-line fields, and values of those with named values.
- settings_shown, choices_shown: of these, with an effect (`tests.settings_alive`).
- use_calls, use_files: calls in a forward of a warm unit, and the number of files with the called functions.
- prose: relative words per thousand.
- tokens: names, keywords, numbers, strings and operators, without brackets and punctuation.
- conditional: conditional expressions in a thousand lines of code.
- packed: assignments with more than two targets (`tests.air`).
- comments: one comment in how many lines.
- longest: lines of the longest function.
- plan_names, plan_modules: core names imported by the plan, and the number of modules with these names.
- asks: conditions in the core about a feature.

The other keys are in `shape`.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from offload.extras import NEEDS
from tests import air
from tests.prose import Measure
from tests.settings_alive import table as settings_alive

ROOT = Path(__file__).parents[1]
CORE, APPLICATION = "core", "application"
RINGS = {
    CORE: "offload.__init__ offload.accelerators offload.amounts offload.arguments offload.checkpoint "
    "offload.conflicts offload.distributed offload.doors offload.engine offload.errors offload.extras offload.files "
    "offload.fused_attention "
    "offload.interrupts offload.lanes offload.layout offload.machine offload.modules offload.native offload.optim "
    "offload.planning offload.retired offload.schedule offload.setting_texts "
    "offload.sizes offload.system offload.tiers offload.user_cache",
    APPLICATION: "offload.__main__ offload.app offload.export offload.train",
    "large": "offload.extras.large",
    "rules": "offload.extras.rules",
    "zeroth": "offload.extras.zeroth offload.replay",
    "quant": "offload.extras.quant",
    "adapters": "offload.extras.adapters",
    "frozen": "offload.extras.frozen",
    "prefs": "offload.extras.prefs",
    "distill": "offload.extras.distill",
    "contrastive": "offload.extras.contrastive",
    "data": "offload.extras.data offload.data",
    "plan": "offload.extras.plan offload.init offload.plan",
    "tools": "offload.extras.tools offload.bench offload.doctor offload.parity offload.report offload.verify",
    "integrations": "offload.integrations",
    "generate": "offload.extras.generate offload.generate",
}
"""Modules by ring. A package includes all submodules except those named in another line.

All rings after the first two are extras: an extra may import the core, the application, and the extras in the line of
`offload.extras.NEEDS`.
"""
_PLACES = {name: ring for ring, names in RINGS.items() for name in names.split()}
FEATURES = {
    "codecs": r"codecs?|coded|EXACT|INT8|NF4|frozen_weights|link_weights|link_gradients",
    "delay": r"delay\w*|is_late|speculative|clip",
    "replicas": r"\w*replicas?|replica_states|shares_states",
    "zeroth": r"has_gradients|zeroth\w*|MeZO|num_perturbations",
}
"""Patterns for feature names in conditions."""
TRIALS = {
    "analyses": r"(?<!def )\b_?(isolated|restoring|Trial)\(",
    "put_back": r"def _?(put_back|restor(e|ed|ing)|isolated|\w+_restored|draws_repeated|reset_generators)\(",
    "comparators": r"def _?(same_bits|is_same|is_near|are_near\w*|equals|\w*distance|\w*deviations|\w*reproduces)\(",
    "tolerances": r"^_?[A-Z_]*(TOLERANCE|BOUNDS)S?[A-Z_]* = |(rel_tol=|<=? |> )\d+e-\d+|tolerance = ",
}
"""Patterns for code of trial runs, in `TRIAL_PLACES`: places with a trial run, functions that put back state,
modules that compare the values of two runs, modules with a table or a number for tolerances.
"""
TRIAL_PLACES = ("offload.engine", "offload.extras.large")
LONG_CLASS = 280
CONTENT = (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP)
PUNCTUATION = frozenset("()[]{},:;.")
DIRECTIVE = re.compile(r"# (noqa|type: ignore|ruff:)")
"""Comments for a tool, not for a reader."""


# -- rings -------------------------------------------------------------------------------------------------------------


def sources(root: Path = ROOT / "offload") -> dict[str, str]:
    """Return the package modules: source text by module name."""
    return {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in sorted(root.rglob("*.py"))
    }


def ring_of(module: str) -> str:
    """Return the ring of a module. Raises KeyError for an unknown module."""
    name = "offload.__init__" if module in ("offload", "offload._core") else module
    while name not in _PLACES and "." in name:
        name = name.rpartition(".")[0]
    return _PLACES[name]


@cache
def _nodes(text: str) -> list[ast.AST]:
    """Return all syntax nodes in a module."""
    return list(ast.walk(ast.parse(text)))


def imports(modules: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (module, imported package module) for imports anywhere in a module."""
    for module, text in modules.items():
        found = set()
        for node in _nodes(text):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                within = (f"{node.module}.{alias.name}" for alias in node.names)
                found |= {name if name in modules else node.module for name in within}
        yield from ((module, name) for name in sorted(found) if name.partition(".")[0] == "offload")


def violations(modules: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return outward imports: from the core, from the application to an extra, between extras outside `NEEDS`."""
    return [
        (one, other)
        for one, other in imports(modules)
        if one != "offload"  # lazy exports, imported on first use
        if ring_of(other) not in (CORE, ring_of(one), *NEEDS.get(ring_of(one), ()))
        if (ring_of(one), ring_of(other)) == (CORE, APPLICATION) or ring_of(other) != APPLICATION
    ]


# -- counts ------------------------------------------------------------------------------------------------------------


def asks(texts: Mapping[str, str]) -> dict[str, int]:
    """Return the number of conditions (if, while, comprehension, comparison result) with each feature name."""
    found = Counter(dict.fromkeys(FEATURES, 0))
    for text in texts.values():
        for node in _nodes(text):
            tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else getattr(node, "ifs", [])
            for test in tests:
                inner = list(ast.walk(test))
                names = {n.attr for n in inner if isinstance(n, ast.Attribute)}
                names |= {n.id for n in inner if isinstance(n, ast.Name)}
                found.update(f for f, pattern in FEATURES.items() if any(re.fullmatch(pattern, n) for n in names))
    return dict(found)


def trials(modules: Mapping[str, str]) -> dict[str, int]:
    """Return the number of places for each pattern of `TRIALS`; of modules for comparators and tolerances."""
    texts = [text for name, text in modules.items() if name.startswith(TRIAL_PLACES)]
    counts = {name: [len(re.findall(pattern, t, re.MULTILINE)) for t in texts] for name, pattern in TRIALS.items()}
    return {
        name: sum(map(bool, found)) if name in ("comparators", "tolerances") else sum(found)
        for name, found in counts.items()
    }


def _definitions(modules: Mapping[str, str], *kinds: type[ast.stmt]) -> list[int]:
    """Return the line count for each definition of the given kinds."""
    nodes = (node for text in modules.values() for node in _nodes(text) if isinstance(node, kinds))
    return [(node.end_lineno or 0) - node.lineno + 1 for node in nodes]


def lexemes(modules: Mapping[str, str]) -> dict[str, int]:
    """Return the number of tokens, code lines and comments."""
    found = Counter(tokens=0, code_lines=0, comments=0)
    for text in modules.values():
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in CONTENT:
                found["tokens"] += token.string not in PUNCTUATION
                lines.update(range(token.start[0], token.end[0] + 1))
            elif token.type == tokenize.COMMENT:
                found["comments"] += not DIRECTIVE.match(token.string)
        found["code_lines"] += len(lines - _docstring_lines(text))
    return dict(found)


def _docstring_lines(text: str) -> set[int]:
    """Return the lines with string statements in a module."""
    strings = (n for n in _nodes(text) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    return {
        line for n in strings for line in range(n.lineno, (n.end_lineno or 0) + 1) if isinstance(n.value.value, str)
    }


def lines_with_air(modules: Mapping[str, str]) -> dict[str, float]:
    """Return `tokens`, and the numbers about thoughts and comments a line."""
    found = lexemes(modules)
    nodes = [node for text in modules.values() for node in _nodes(text)]
    num_lines = sum(len(text.splitlines()) for text in modules.values())
    num_conditional = sum(isinstance(node, ast.IfExp) for node in nodes)
    return {
        "tokens": found["tokens"],
        "conditional": round(1000 * num_conditional / found["code_lines"], 1),
        "packed": sum(map(air.is_packed, nodes)),
        "comments": round(num_lines / max(1, found["comments"])),
    }


def plan_imports(modules: Mapping[str, str]) -> dict[str, int]:
    """Return the number of core names imported by the plan, and of the modules with these names."""
    plan = [text for name, text in modules.items() if name.startswith("offload.extras.plan")]
    nodes = (node for text in plan for node in _nodes(text) if isinstance(node, ast.ImportFrom))
    pairs = {(node.module or "", alias.name) for node in nodes for alias in node.names}
    names = {
        (module, name) for module, name in pairs if module.partition(".")[0] == "offload" and ring_of(module) == CORE
    }
    return {"plan_names": len(names), "plan_modules": len({module for module, _ in names})}


# -- a traced step -----------------------------------------------------------------------------------------------------


class Trace:
    """Collects lines in `offload`, executed by any thread while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self._seen: set[tuple[str, int]] = set()
        self._folder = f"{ROOT / 'offload'}/"

    def __enter__(self) -> Trace:
        threading.settrace(self._enter)  # for threads started later
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _enter(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        code = frame.f_code
        return self._line if code.co_filename.startswith(self._folder) and code.co_name != "<module>" else None

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if self.is_on and event == "line":
            self._seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    def counts(self) -> dict[str, int]:
        """Return the number of executed lines, the total lines in their files, and the file count."""
        files = {name for name, _ in self._seen}
        opened = sum(len(Path(name).read_text().splitlines()) for name in files)
        return {"opened": opened, "executed": len(self._seen), "files": len(files)}


class Use:
    """Counts calls in `offload` during the first forward of a module, in this thread."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._outer: FrameType | None = None
        """The frame of the module's call, while it runs."""
        self._calls: list[str] = []
        """The file of each called function."""
        self._entry = type(module)._call_impl.__code__
        self._folder = f"{ROOT / 'offload'}/"

    def __enter__(self) -> Use:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "return" and frame is self._outer:
            sys.setprofile(None)
        elif event != "call":
            return
        elif self._outer is not None:
            if frame.f_code.co_filename.startswith(self._folder):
                self._calls.append(frame.f_code.co_filename)
        elif frame.f_code is self._entry and frame.f_locals["self"] is self._module:
            self._outer = frame

    def counts(self) -> dict[str, int]:
        """Return the number of calls, and of files with the called functions."""
        return {"use_calls": len(self._calls), "use_files": len(set(self._calls))}


def warm_step() -> dict[str, int]:
    """Train a small model streamed from the CPU tier, count the lines in the fourth step, and in the fifth the calls in
    the forward of a unit.
    """
    import torch
    import transformers as t

    from offload import Engine, Placement

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = t.LlamaForCausalLM(t.LlamaConfig(**sizes, vocab_size=64))
    ids = torch.randint(3, 64, (4, 10))
    place = Placement(parameters="cpu", optimizer="cpu")
    with Trace() as trace, Engine(model, placement=place, device="cpu") as engine:
        for _ in range(3):
            engine.step({"input_ids": ids, "labels": ids})
        engine.finish()
        trace.is_on = True
        engine.step({"input_ids": ids, "labels": ids})
        engine.finish()
        trace.is_on = False
        with Use(model.model.layers[1]) as use:
            engine.step({"input_ids": ids, "labels": ids})
    return trace.counts() | use.counts()


# -- the command -------------------------------------------------------------------------------------------------------


def shape() -> dict[str, Any]:
    """Return all numbers."""
    modules = sources()
    lines: Counter[str] = Counter()
    for name, text in modules.items():
        lines[ring_of(name)] += len(text.splitlines())
    core = {name: text for name, text in modules.items() if ring_of(name) == CORE}
    rings = [lines[CORE], lines[APPLICATION], sum(lines.values()) - lines[CORE] - lines[APPLICATION]]
    wrong = violations(modules)
    functions = _definitions(modules, ast.FunctionDef, ast.AsyncFunctionDef)
    everything = "\n".join(modules.values())
    return {
        "rings": rings,
        "violations": len(wrong),
        **warm_step(),
        **settings_alive.counts(),
        "prose": {name: round(Measure(ROOT / name).relative, 1) for name in ("offload", "docs", "tests")},
        **lines_with_air(modules),
        "longest": max(functions),
        **plan_imports(modules),
        "extras": {name: lines[name] for name in RINGS if name not in (CORE, APPLICATION)},
        "asks": asks(core),
        "trials": trials(modules),
        "nvme": len(re.findall(r"['\"]nvme['\"]", everything)),
        "comm_size": len(re.findall(r"comm\.size\b", everything)),
        "comm_any": len(re.findall(r"comm\.any\b", everything)),
        "classes_over_280": sum(size > LONG_CLASS for size in _definitions(modules, ast.ClassDef)),
        "function_lines": round(sum(functions) / len(functions), 1),
        "tests": sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")),
    }


def rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the table lines."""
    yield "lines of the core, the application, the extras", " / ".join(f"{n:,}" for n in found["rings"])
    yield "  of each extra", ", ".join(f"{name} {n:,}" for name, n in found["extras"].items())
    yield "imports against the rings", str(found["violations"])
    yield "a warm step: lines executed / opened (files)", "{executed:,} / {opened:,} ({files})".format(**found)
    yield "calls (files) in a forward of a unit", "{use_calls} ({use_files})".format(**found)
    yield "tokens", f"{found['tokens']:,}"
    yield "conditional expressions in 1,000 lines of code", str(found["conditional"])
    yield "assignments with more than two targets", str(found["packed"])
    yield "lines for one comment", str(found["comments"])
    yield "core names that the plan imports (modules)", "{plan_names} ({plan_modules})".format(**found)
    yield "tests in the core about", ", ".join(f"{name} {n}" for name, n in found["asks"].items())
    yield "trial runs", ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in found["trials"].items())
    yield '"nvme" as a literal; comm.size; comm.any', f"{found['nvme']}; {found['comm_size']}; {found['comm_any']}"
    yield f"classes over {LONG_CLASS} lines", str(found["classes_over_280"])
    yield "mean lines of a function; of the longest", f"{found['function_lines']}; {found['longest']}"
    yield "lines of tests", f"{found['tests']:,}"
    yield "settings of the command line; shown alive", "{settings}; {settings_shown}".format(**found)
    yield "values of choices; shown alive", "{choices}; {choices_shown}".format(**found)
    yield "relative words in a thousand", ", ".join(f"{name} {n}" for name, n in found["prose"].items())


if __name__ == "__main__":
    result = shape()
    for title, text in rows(result):
        print(f"{title:48} {text}")
    if "--violations" in sys.argv:
        for one, other in violations(sources()):
            print(f"{one} imports {other}")
    print(json.dumps(result))
