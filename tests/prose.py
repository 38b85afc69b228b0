"""Measure how plain the prose is: docstrings, comments, and the text of pages.

    python -m tests.prose                     # part of make lint: exits with 1 above a limit
    python -m tests.prose PATH --worst 20     # the texts with the highest share

A plain sentence names the thing. Relative words and pronouns stand in place of a noun, so the measure counts them per
thousand words. Texts with 12 words or more also have a limit of their own.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELATIVE = frozenset(["what", "which", "that", "those", "whose", "its", "it", "such"])
"""Words seldom needed in a plain sentence."""
WORD = re.compile(r"[A-Za-z']+")
SHORT = 12
"""Texts with fewer words have no limit of their own."""


@dataclass(frozen=True)
class Limits:
    """Most words per thousand."""

    relative: float
    what: float = 1.5
    of: float = 28
    one_text: float = 150


LIMITS = {
    "offload": Limits(15),
    "docs": Limits(20),
    "README.md": Limits(25, of=30),
    "CONTRIBUTING.md": Limits(25),
    "CHANGELOG.md": Limits(25),
    "benchmarks": Limits(25, of=35, one_text=300),
    "examples": Limits(25),
    "tests": Limits(35, one_text=300),
}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for docstrings, field descriptions and comments, or for the paragraphs of a page."""
    source = path.read_text(errors="ignore")
    if path.suffix == ".md":
        source = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), source, flags=re.DOTALL)
        line = 1
        for block in source.split("\n\n"):
            yield line, re.sub(r"`[^`]*`|\(https?:[^)]*\)|<!--.*?-->", "", block)
            line += block.count("\n") + 2
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


class Measure:
    """Word counts over one file or folder."""

    def __init__(self, root: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.worst: list[tuple[float, str, str]] = []
        """(relative words per thousand, place, text), highest first."""
        files = [root] if root.is_file() else [path for path in root.rglob("*") if path.suffix in (".py", ".md")]
        for path in sorted(files):
            for line, text in texts(path):
                words = [word.lower() for word in WORD.findall(text)]
                self.counts.update(words)
                if len(words) >= SHORT:
                    share = 1000 * sum(word in RELATIVE for word in words) / len(words)
                    self.worst.append((share, f"{path}:{line}", " ".join(text.split())))
        self.worst.sort(reverse=True)

    def share(self, *words: str) -> float:
        """Return the words per thousand."""
        return 1000 * sum(self.counts[word] for word in words) / max(1, self.counts.total())

    @property
    def relative(self) -> float:
        """Relative words per thousand."""
        return self.share(*RELATIVE)

    def line(self) -> str:
        """Return the shares as text."""
        shares = f"relative {self.relative:.1f}, what {self.share('what'):.1f}, of {self.share('of'):.1f}"
        return f"{self.counts.total()} words, per thousand: {shares}"

    def broken(self, limits: Limits) -> list[str]:
        """Return a message for each limit that is exceeded."""
        found = [
            f"{name} {value:.1f} per thousand, at most {limit:g}"
            for name, value, limit in (
                ("relative", self.relative, limits.relative),
                ("what", self.share("what"), limits.what),
                ("of", self.share("of"), limits.of),
            )
            if value > limit
        ]
        return found + [
            f"{place}: {share:.0f} per thousand, at most {limits.one_text:g}: {text[:100]}"
            for share, place, text in self.worst
            if share > limits.one_text
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the shares. Return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.prose", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files or folders (default: the project)")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="print the N texts with the highest share")
    words = parser.parse_args(arguments)
    is_broken = False
    for path in words.paths or [ROOT / name for name in LIMITS]:
        measure = Measure(path)
        name = str(path.resolve().relative_to(ROOT)) if path.resolve().is_relative_to(ROOT) else str(path)
        print(f"{name}: {measure.line()}")
        for share, place, text in measure.worst[: words.worst]:
            print(f"  {share:.0f}  {place}  {text[:160]}")
        for message in measure.broken(LIMITS[name]) if name in LIMITS else ():
            is_broken = True
            print(f"  TOO MUCH: {message}")
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
