"""Makes the generated pages of the reference, and the site.

python docs/make.py             # writes docs/reference/{settings,commands,api,errors,support}.md anew
python docs/make.py --check     # exits with 1 where one of them is stale
python docs/make.py --picture   # docs/images/first-run.svg as well, from a real run
python docs/make.py --site      # the site as well, into build/site; needs the extra `docs`

A setting is explained in `offload/config/sections.py`, an option of a command in that command, a call in its docstring,
and nowhere else.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
MADE = "<!-- Made by docs/make.py from {}: change it there, and run `make docs`. -->\n\n"


SETTINGS = """# Settings

A setting is given as `--section.field VALUE` on the command line, or in a YAML file with the same sections, which
`--config` reads. The command line wins. `train`, `plan`, `parity` and `bench sweep` take all of them.

A size is `6GiB` or `6G`, `512MiB`, `1.5GB`, a number of bytes, or `none` for no limit. An unknown key is refused, with
the name that is probably meant.

"""
COMMANDS_INTRO = """# Commands

`offload COMMAND` and `python -m offload.COMMAND` are the same. Each takes `--help` and `--version`.

| exit code | meaning |
|---|---|
| 0 | fine |
| 1 | failed, damaged, or different |
| 2 | bad configuration or input |
| 3 | does not fit a budget or the memory that there is; nothing was allocated |
| 130 | interrupted; what could be saved is saved, and the message says where |

"""
API = """# Python

What is not on this page is internal, and may change from one version to the next.

```python
from offload import Engine, Placement, Settings, AdamW
```

"""
RULES = """## Update rules

Each is a value: `AdamW(lr=1e-4, groups=(("norm", {"weight_decay": 0.0}),))`. [What they do](update-rules.md).

"""
LIBRARIES = """## In other libraries' loops

[How they are used](libraries.md).

"""
ERRORS = """# Errors

A command prints an error as one paragraph: what was given, why it cannot be, with numbers, and the flag to change.
`--debug` adds the traceback. In Python each is an `OffloadError` from `offload.errors`, and an error of Python's own
kind as well.

"""


def settings_page() -> str:
    """Return the page of all settings of `train`."""
    from offload.config.config import Config
    from offload.config.options import shown, value_of

    page = [MADE.format("offload/config/sections.py"), SETTINGS]
    for name, section in Config.SECTIONS.items():
        page.append(f"## {name}\n\n{section.__doc__}\n\n")
        for field_name, field in section.model_fields.items():
            default = shown(field.get_default())
            values = value_of(field_name, field).strip("{}").replace(",", "`, `")
            page.append(f"### {name}.{field_name}\n\n")
            page.append(f"Values: `{values}`. Default: `{default}`.\n\n{_sentences(str(field.description))}\n\n")
    return "".join(page)


def commands_page() -> str:
    """Return the page of all commands, from their help."""
    from offload.__main__ import COMMANDS
    from offload.config.config import Config

    page = [MADE.format("the commands' help"), COMMANDS_INTRO]
    for name, summary in COMMANDS.items():
        page.append(f"## {name}\n\n{summary[0].upper()}{summary[1:]}.\n\n")
        page.append(_help(name, Config.SECTIONS))
        if name == "bench":
            page.extend(
                f"### bench {part}\n\n{_help(f'bench {part}', {})}" for part in ("step", "nvme", "sweep", "compare")
            )
    return "".join(page)


def _help(command: str, sections: Any) -> str:
    """Return a command's help as a block of text, without the boxes of settings, which have a page of their own."""
    from offload.__main__ import module_of

    name, *words = command.split()
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}  # of a process that does nothing else
    told = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # boxes are drawn where they can be encoded
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        module_of(name).main([*words, "--help"])
    told.seek(0)
    text = told.read()
    boxes = re.split(r"(?m)^(?=╭─ )", text)
    own = [box for box in boxes if not any(box.startswith(f"╭─ {name} options ") for name in sections)]
    left_out = "" if len(own) == len(boxes) else "\nand all [settings](settings.md).\n"
    return f"```text\n{''.join(own).strip()}\n```\n{left_out}\n"


def api_page() -> str:
    """Return the page of the Python interface, from signatures and docstrings."""
    import offload
    from offload.engine.methods.result import StepResult
    from offload.integrations import accelerate, transformers
    from offload.integrations.wrap import WrappedOptimizer
    from offload.training import callbacks, trainer

    page = [MADE.format("the docstrings"), API]
    page.extend(_class(each) for each in (offload.wrap, WrappedOptimizer))
    page.append(_class(offload.Engine, members=True))
    page.extend(_class(each) for each in (offload.Settings, offload.Placement))
    page.append(_class(StepResult))
    page.extend(_class(each) for each in (trainer.Trainer, trainer.TrainResult, callbacks.Callbacks))
    page.extend(_class(each, level=3) for each in (callbacks.TrainState, callbacks.TrainControl))
    page.append('## Update rules\n\nEach is a value: `AdamW(lr=1e-4, groups=(("norm", {"weight_decay": 0.0}),))`.\n\n')
    rules = ("AdamW", "Lion", "SGD", "Adafactor", "Muon", "LOMO", "AdaLomo", "MeZO")
    page.extend(_class(getattr(offload, name), level=3) for name in rules)
    page.append(LIBRARIES)
    names = ("OffloadTrainer", "OffloadMixin", "OffloadCallback", "OffloadOptimizer", "offload_optimizer_factory")
    page.extend(_class(getattr(transformers, name), level=3) for name in names)
    page.append(_class(accelerate.OffloadAccelerator, level=3))
    return "".join(page)


def _class(thing: Any, level: int = 2, members: bool = False) -> str:
    """Return the section of a class or a function."""
    page = [f"{'#' * level} {thing.__name__}\n\n{_signature(thing)}{_prose(inspect.getdoc(thing))}"]
    page.append(_fields(thing))
    if members:
        for name, value in sorted(_members(thing), key=lambda item: item[0]):
            title = f"{'#' * (level + 1)} {name}\n\n"
            is_call = not isinstance(value, property)
            page.append(title + (_signature(value) if is_call else "") + _prose(inspect.getdoc(value)))
    return "".join(page)


def _members(thing: Any) -> Iterator[tuple[str, Any]]:
    for name in dir(thing):
        value = inspect.getattr_static(thing, name)
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            yield name, value


def _signature(thing: Any) -> str:
    """Return the signature, one argument a line where it is long."""
    found = inspect.signature(thing)
    arguments = [
        re.sub(r"'([^']*)'", r"\1", str(each), count=1) for name, each in found.parameters.items() if name != "self"
    ]
    one_line = f"{thing.__name__}({', '.join(arguments)})"
    whole = one_line if len(one_line) < 90 else f"{thing.__name__}(\n    " + ",\n    ".join(arguments) + ",\n)"
    return f"```python\n{whole}\n```\n\n"


def _fields(thing: Any) -> str:
    """Return the fields of a dataclass that have a line of their own, from its source."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    except (OSError, TypeError):
        return ""
    body, found = getattr(tree, "body", []), []
    for field, line in itertools.pairwise(body):
        is_text = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            found.append(f"- `{field.target.id}`: {' '.join(inspect.cleandoc(line.value.value).split())}\n")
    return "".join(found) + "\n" if found else ""


def _prose(text: str | None) -> str:
    """Return a docstring as Markdown: `name: meaning` lines become a list, indented code a block."""
    out: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text or ""):
        if paragraph.startswith("    "):
            out.append(f"```python\n{textwrap.dedent(paragraph)}\n```\n\n")
            continue
        text = " ".join(paragraph.split())
        items = re.split(r"(?:^|(?<=[.;)] ))(?=[a-z_]+(?:, [a-z_]+)*: )", text)
        if re.match(r"[a-z_]+(, [a-z_]+)*: ", text):
            names = [re.sub(r"^([\w, ]+?):", r"`\1`:", item.strip()) for item in items if item]
            out.append("".join(f"- {name}\n" for name in names) + "\n")
        else:
            out.append(text + "\n\n")
    return "".join(out)


def errors_page() -> str:
    """Return the page of errors and exit codes."""
    from offload import errors

    page = [MADE.format("offload/errors.py"), ERRORS]
    kinds = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, errors.OffloadError)]
    for kind in kinds:
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
        page.append(
            f"## {kind.__name__}\n\nExit code {kind.exit_code}; also a {bases}.\n\n{_prose(inspect.getdoc(kind))}"
        )
    return "".join(page)


def support_page() -> str:
    """Return what trains in which library's loop, each cell with the test that shows it."""
    told = yaml.safe_load((ROOT / "docs" / "support.yaml").read_text())
    page = [
        MADE.format("docs/support.yaml and the tests that it names"),
        "# What is supported\n\n",
        told["about"],
        "\n",
    ]
    for table in told["tables"]:
        columns = table["columns"]
        page.append(f"## {table['title']}\n\n{table['about']}\n")
        page.append(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n")
        for row, told_of in table["rows"].items():
            page.append(f"| {row} | {' | '.join(told_of['cells'].get(column, '') for column in columns)} |\n")
        page.append("\nShown by:\n\n")
        for row, told_of in table["rows"].items():
            page.append(f"- {row}: {', '.join(map(_test, told_of['tests']))}\n")
        page.append("\n")
    return "".join(page)


def _test(named: str) -> str:
    """Return the name of a test, which has to exist."""
    path, _, name = named.partition("::")
    if f"def {name}(" not in (ROOT / "tests" / path).read_text():
        raise SystemExit(f"docs/support.yaml names tests/{named}, which is not there.")
    return f"`{named}`"


def _sentences(text: str) -> str:
    """Return a setting's help with a line for each special value (`none: ...`, `auto: ...`)."""
    parts = re.split(r"(?<=\.) (?=(?:[a-z0-9_-]+(?: or [a-z]+)?|[0-9]+): )", text)
    return parts[0] + "".join(f"\n\n- `{part.partition(':')[0]}`:{part.partition(':')[2]}" for part in parts[1:])


PAGES: dict[str, Callable[[], str]] = {
    "settings": settings_page,
    "commands": commands_page,
    "api": api_page,
    "errors": errors_page,
    "support": support_page,
}


def picture() -> None:
    """Write docs/images/first-run.svg: the terminal of a real run."""
    from rich.console import Console

    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "offload.train", "--train.steps", "60", "--run.dir", f"{folder}/run"]
        told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = told.replace(folder, "runs").splitlines()
    console = Console(record=True, width=110, file=io.StringIO())
    console.print("$ offload train", style="bold green", highlight=False)
    for line in lines:
        if not line.startswith(("sample:", "offload ", "report:")):
            name, colon, rest = line.partition(":")
            is_named = bool(colon) and " " not in name
            text = Text.assemble((name + colon, "bold cyan"), rest) if is_named else Text(line)
            console.print(text, overflow="ellipsis", no_wrap=True)
    drawn = console.export_svg(title="offload train", unique_id="run")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # they would be fetched
    (ROOT / "docs" / "images" / "first-run.svg").write_text(drawn)


def site(root: Path) -> int:
    """Build the site of a checkout into its build/site; return the exit code, which is not 0 after any warning."""
    words = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    if code := subprocess.run(words, cwd=root).returncode:
        return code
    built = root / "build" / "site"
    for page in built.rglob("*.html"):  # a page from the disk may not start workers, and nothing is fetched for that
        own = os.path.relpath(built / "worker.js", page.parent)
        page.write_text(page.read_text().replace("https://unpkg.com/iframe-worker/shim", own))
    return 0


def main(words: list[str]) -> int:
    """Do what the words say; return the exit code."""
    stale = []
    for name, make in PAGES.items():
        path, text = REFERENCE / f"{name}.md", make().rstrip() + "\n"
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(path.relative_to(ROOT))
        if "--check" not in words:
            path.write_text(text)
    print(*(f"{'stale' if '--check' in words else 'written'}: {path}" for path in stale), sep="\n")
    if "--picture" in words:
        picture()
    if "--site" in words:
        return site(ROOT)
    return 1 if stale and "--check" in words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
