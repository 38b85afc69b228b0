"""Generate reference pages and the site.

python docs/make.py             # writes docs/reference/{settings,commands,api,errors,support,ways-in}.md, the tables of
                                # the README and of docs/reference/data.md, docs/images/memory.svg, docs/fit-data.js
python docs/make.py --check     # exits with 1 if a page, a table, or a quote of the source is stale
python docs/make.py --picture   # also docs/images/first-run.svg, from a real run
python docs/make.py --site      # also the site, into build/site; needs the extra `docs`

Each text has one source: settings in `offload/app/config/sections.py` and `offload/setting_texts.py`, options in the
command, calls in the docstring, numbers of the README in `benchmarks/results`.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
MADE = "<!-- Made by docs/make.py from {}: change it there, and run `make docs`. -->\n\n"


SETTINGS = """# Settings

Pass settings as `--section.field VALUE` on the command line, or in a YAML file with the same sections
(`--config FILE`). The command line overrides the file. `train`, `plan` and `parity` take all settings.

A size is `6GiB` or `6G`, `512MiB`, `1.5GB`, a number of bytes, or `none` for no limit. An unknown key raises
an error with the most similar name.

"""
COMMANDS_INTRO = """# Commands

`offload COMMAND` and `python -m offload.COMMAND` are the same. Each command takes `--help` and `--version`.
`train`, `plan`, `parity` and `data` show the main settings with `--help`, and all of them with `--help-extra`.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | failed, damaged, or different |
| 2 | bad configuration or input |
| 3 | does not fit a budget or the available memory; nothing was allocated |
| 130 | interrupted; states are saved if possible, and the message names the folder |

"""
API = """# Python

This page lists the public interface. Everything else is internal and may change between versions.

```python
from offload import Engine, Placement, Settings, AdamW
```

"""
RULES = """## Update rules

An update rule is a value: `AdamW(lr=1e-4, groups=(("norm", {"weight_decay": 0.0}),))`. [Update
rules](update-rules.md) describes each one.

"""
LIBRARIES = """## In other libraries' loops

[Other libraries](libraries.md) explains the use.

"""
WAYS_IN = ROOT / "tests" / "integrations" / "ways_in.yaml"
WAYS = {
    "step": "`Engine.step`",
    "loop": "own loop, `engine.update`",
    "wrap": "`offload.wrap`",
    "trainer": "`OffloadTrainer`",
    "accelerate": "`OffloadAccelerator`",
}
WAYS_INTRO = """# Situations by ways in

There are five ways into an engine. In each of them, a situation is *equal* (the weights have the bits of the same loop
in plain PyTorch, with the AdamW of this project), or *refused* (by one error; the cell has the part with the line to
write), or *n/a* (it does not arise, for the reason in the cell).

"""
ERRORS = """# Errors

A command prints an error as one paragraph: the given value, the reason with numbers, and the flag to change. `--debug`
adds the traceback. In Python each error is an `OffloadError` from `offload.errors`, and also one of Python's built-in
errors.

"""


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    head, *lines = ("".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in (titles, *rows))
    return "\n".join([head, f"|{'---|' * len(titles)}", *lines])


def settings_page() -> str:
    """Return the page with all settings for `train`."""
    from offload.app.config.config import Config
    from offload.app.config.options import value_hint
    from offload.conflicts import show

    page = [MADE.format("offload/app/config/sections.py"), SETTINGS]
    for name, section in Config.SECTIONS.items():
        page.append(f"## {name}\n\n{section.__doc__}\n\n")
        for field_name, field in section.model_fields.items():
            default = show(field.get_default())
            values = value_hint(field_name, field).strip("{}").replace(",", "`, `")
            page.append(f"### {name}.{field_name}\n\n")
            page.append(f"Values: `{values}`. Default: `{default}`.\n\n{_sentences(str(field.description))}\n\n")
    return "".join(page)


def commands_page() -> str:
    """Return the page with all commands, from the help texts."""
    from offload.__main__ import COMMANDS
    from offload.app.config.config import Config

    page = [MADE.format("the commands' help"), COMMANDS_INTRO]
    for name, summary in COMMANDS.items():
        page.append(f"## {name}\n\n{summary[0].upper()}{summary[1:]}.\n\n")
        page.append(_help(name, Config.SECTIONS))
        if name == "bench":
            page.extend(f"### bench {part}\n\n{_help(f'bench {part}', {})}" for part in ("step", "nvme"))
    return "".join(page)


def _help(command: str, sections: Any) -> str:
    """Return a command's help as a text block, without the boxes for settings (these have their own page)."""
    from offload.__main__ import module_of

    name, *words = command.split()
    # As wide as a block of the site. This process does nothing else.
    os.environ |= {"COLUMNS": "86", "NO_COLOR": "1", "TERM": "dumb"}
    for option in ("--help", "--help-extra"):
        printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            module_of(name).main([*words, option])
        printed.seek(0)
        text = printed.read()
        if "--help-extra" not in text:
            break
    boxes = re.split(r"(?m)^(?=[\w ]+:$)", text)
    own = [box for box in boxes if not any(box.startswith(f"{name} options:") for name in sections)]
    left_out = "" if len(own) == len(boxes) else "\nand all [settings](settings.md).\n"
    return f"```text\n{''.join(own).strip()}\n```\n{left_out}\n"


def api_page() -> str:
    """Return the page about the Python interface, from signatures and docstrings."""
    import offload
    from offload.app.training import callbacks, trainer
    from offload.engine.methods.result import StepResult
    from offload.integrations import accelerate, transformers
    from offload.integrations.wrap import WrappedOptimizer

    page = [MADE.format("the docstrings"), API]
    page.extend(_class(each) for each in (offload.wrap, WrappedOptimizer))
    page.append(_class(offload.Engine, members=True))
    page.extend(_class(each) for each in (offload.Settings, offload.Placement))
    page.append(_class(StepResult))
    page.extend(_class(each) for each in (trainer.Trainer, trainer.TrainResult, callbacks.Callbacks))
    page.extend(_class(each, level=3) for each in (callbacks.TrainState, callbacks.TrainControl))
    page.append(RULES)
    rules = ("AdamW", "Lion", "SGD", "Adafactor", "Muon", "LOMO", "AdaLomo", "MeZO", "UpdateRule")
    page.extend(_class(getattr(offload, name), level=3) for name in rules)
    page.append(LIBRARIES)
    names = ("OffloadTrainer", "OffloadMixin", "OffloadCallback", "OffloadOptimizer", "offload_optimizer_factory")
    page.extend(_class(getattr(transformers, name), level=3) for name in names)
    page.append(_class(accelerate.OffloadAccelerator, level=3))
    return "".join(page)


def _class(thing: Any, level: int = 2, members: bool = False) -> str:
    """Return the section for a class or function."""
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
    """Return the signature; a long one with one argument a line."""
    found = inspect.signature(thing)
    arguments = [
        re.sub(r"'([^']*)'", r"\1", str(each), count=1) for name, each in found.parameters.items() if name != "self"
    ]
    one_line = f"{thing.__name__}({', '.join(arguments)})"
    whole = one_line if len(one_line) < 90 else f"{thing.__name__}(\n    " + ",\n    ".join(arguments) + ",\n)"
    return f"```python\n{whole}\n```\n\n"


def _fields(thing: Any) -> str:
    """Return the dataclass fields with a docstring, from the source."""
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
    """Return a docstring as Markdown: `name: meaning` lines become a list, indented code a code block."""
    out: list[str] = []
    for paragraph in re.split(r"\n\s*\n(?!    )|(?<=:)\n\s*\n", text or ""):
        if paragraph.startswith("    "):
            out.append(f"```python\n{textwrap.dedent(paragraph)}\n```\n\n")
            continue
        text = " ".join(paragraph.split())
        if "\n    " in paragraph:  # an item a line, and indented lines belong to the item
            items = [" ".join(item.split()) for item in re.split(r"\n(?=\S)", paragraph)]
        else:
            items = re.split(r"(?:^|(?<=[.;)] ))(?=[a-z_]+(?:, [a-z_]+)*: )", text)
        if re.match(r"[a-z_]+(, [a-z_]+)*: ", text):
            names = [re.sub(r"^([\w, ]+?):", r"`\1`:", item.strip()) for item in items if item]
            out.append("".join(f"- {name}\n" for name in names) + "\n")
        else:
            out.append(text + "\n\n")
    return "".join(out)


def errors_page() -> str:
    """Return the page with errors and exit codes."""
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
    """Return the support tables, each row with its tests."""
    told = yaml.safe_load((ROOT / "docs" / "support.yaml").read_text())
    page = [
        MADE.format("docs/support.yaml and the tests that it names"),
        "# What is supported\n\n",
        told["about"],
        "\n",
    ]
    for shown in told["tables"]:
        columns, rows = shown["columns"], shown["rows"]
        page.append(f"## {shown['title']}\n\n{shown['about']}\n")
        cells = [[name, *(row["cells"].get(column, "") for column in columns)] for name, row in rows.items()]
        page.append(table(["", *columns], cells) + "\n\nShown by:\n\n")
        for name, row in rows.items():
            page.append(f"- {name}: {', '.join(map(_test, row['tests']))}\n")
        page.append("\n")
    return "".join(page)


def ways_page() -> str:
    """Return the table of situations by ways in, each cell with its test."""
    told = yaml.safe_load(WAYS_IN.read_text())
    cells = {row["name"]: [row.get(way, row.get("others")) for way in WAYS] for part in told for row in part["rows"]}
    kinds = [cell.partition(" ")[0] for row in cells.values() for cell in row]
    page = [MADE.format("tests/integrations/ways_in.yaml"), WAYS_INTRO]
    page.append(
        f"`tests/integrations/test_ways_in.py` tests {len(kinds) - kinds.count('n/a')} cells in {len(cells)} rows: "
        f"{kinds.count('equal')} are equal, {kinds.count('refused')} refused, none is silent.\n"
    )
    for part in told:
        page.append(f"\n## {part['title']}\n\n")
        rows = [[row["text"], *(cell.replace(" ", ": ", 1) for cell in cells[row["name"]])] for row in part["rows"]]
        page.append(table(["", *WAYS.values()], rows) + "\n")
    return "".join(page)


def _test(named: str) -> str:
    """Return the name of a test; exit if the test does not exist."""
    path, _, name = named.partition("::")
    if f"def {name}(" not in (ROOT / "tests" / path).read_text():
        raise SystemExit(f"docs/support.yaml names tests/{named}, which is not there.")
    return f"`{named}`"


def _sentences(text: str) -> str:
    """Return the help for a setting, with a line for each special value (`none: ...`, `auto: ...`)."""
    parts = re.split(r"(?<=\.) (?=(?:[a-z0-9_-]+(?: or [a-z]+)?|[0-9]+): )", text)
    return parts[0] + "".join(f"\n\n- `{part.partition(':')[0]}`:{part.partition(':')[2]}" for part in parts[1:])


PAGES: dict[str, Callable[[], str]] = {
    "settings": settings_page,
    "commands": commands_page,
    "api": api_page,
    "errors": errors_page,
    "support": support_page,
    "ways-in": ways_page,
}


RESULTS = ROOT / "benchmarks" / "results"
PLANS, H200, STEPS, FIT, REAL = "readme.json", "gpu-nvidia-h200.json", "step.json", "fit.json", "real_size.json"
HOST_MEMORY = "the host's available memory"
MEASURED = (
    ("Llama-3.1-8B", "H200, 141 GB", None, "8b, compile auto, 32768 tokens a step", "compiled"),
    (
        "Llama-3.1-8B",
        "H200, limited to 24 GiB",
        24 << 30,
        "8b in 24 GiB, a profiled step of 32768 tokens",
        "a single step",
    ),
    ("Llama-3.2-3B", "H200, 141 GB", None, "3b, compile auto, 16384 tokens a step", "compiled"),
)
"""Measured rows: model, card, device budget, result name, mode."""
PLAIN = {"weights": 2, "gradients": 2, "master weights": 4, "moments": 8}
"""Bytes a parameter in plain PyTorch: bf16 with fp32 masters, AdamW."""
CARDS = {"RTX 4090": "RTX 4090, 24 GB", "H100": "H100, 80 GB"}
HOST_OPTIONS = {
    "default": ("AdamW, fp32 moments, clipping", "none: the default"),
    "no clipping": ("no clipping", "`--train.max_grad_norm none`"),
    "bf16 moments": ("bf16 moments", "`--optimizer.states bf16`"),
    "int8 moments": ("int8 moments", "`--optimizer.states int8`"),
    "optimizer on disk": ("optimizer states on disk", "`--offload.optimizer nvme`"),
    "all on disk": ("weights on disk too", "`--offload.parameters nvme`"),
}
"""Rows in the table of host memory: words and flag. The names are those of `benchmarks/plan_tables.py`."""
FIT_CARDS = {"rtx-4070": 12, "rtx-4080": 16, "rtx-4090": 24, "rtx-5090": 32, "h100": 80}
"""Cards in the tables of the page "Will it fit?", with the GB in their name."""
FIT_METHODS = {"full": "All parameters", "lora": "LoRA", "nf4": "LoRA over nf4 weights"}
REAL_MODELS = {
    "3b": "Llama-3.2-3B",
    "8b": "Llama-3.1-8B",
    "qwen3-14b": "Qwen3-14B",
    "gpt-oss-20b": "gpt-oss-20b",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "gpt-oss-120b": "gpt-oss-120b",
}
"""Names of the models in the runs of `benchmarks/real_size.py`, by preset."""


def results(name: str) -> Any:
    """Return a result file of the benchmarks."""
    return json.loads((RESULTS / name).read_text())


def plain_cell(parameters: int, device_bytes: int) -> str:
    """Return the table cell about plain PyTorch: states alone, without activations."""
    needed = sum(PLAIN.values()) * parameters
    return f"{'out of memory' if needed > device_bytes else 'fits'} ({needed / 2**30:.0f} GiB)"


def plans_table() -> str:
    """Return the README's table of speeds: forecasts, then measured steps."""
    told, seen = results(PLANS), results(H200)
    titles = ("model", "card", "host memory", "tokens a second", "plain PyTorch", "10 M tokens", "source")
    rows: list[list[str]] = []

    def add(model: str, card: str, host: str, plain: str, rate: float, kind: str) -> None:
        rows.append([model, card, host, f"{rate:,.0f}", plain, f"{1e7 / rate / 3600:.1f} h", kind])

    for each in told["rows"]:
        budget = each["device_memory"]
        card = f"{each['gpu']}, limited to {budget.replace('GiB', ' GiB')}" if budget else CARDS[each["gpu"]]
        disk = each["held_bytes"]["disk"]
        host = f"{each['host_gib']} GiB" + (f", {disk / 2**30:.0f} GiB of disk" if disk else "")
        plain = plain_cell(told["parameters"][each["model"]], each["device_bytes"])
        add(each["model"], card, host, plain, each["tokens_per_second"], "forecast")
    values = {each["name"]: each["value"] for each in seen["results"]}
    units = {each["name"]: each["unit"] for each in seen["results"]}
    memory = f"{values[HOST_MEMORY]:.0f} GiB"
    tokens = {model: 0 for model, *_ in MEASURED}
    for model, card, budget, name, mode in MEASURED:
        plain = plain_cell(told["parameters"][model], budget or values["the device's memory"] * 2**30)
        tokens[model] = int(re.findall(r"(\d+) tokens", name)[0])
        is_rate = units[name] == "tokens/s"  # else milliseconds
        rate = values[name] if is_rate else tokens[model] / values[name] * 1e3
        add(model, card, memory, plain, rate, f"measured, {mode}")
    tokens_8b, tokens_3b = (f"{number:,}" for number in tokens.values())
    return (
        f"{table(titles, rows)}\n\n"
        "A forecast is a [plan](benchmarks/plan_tables.py): all parameters, compiled, AdamW with fp32 states, "
        f"{told['tokens_a_step']:,} tokens a\nstep. Measured: [few steps](benchmarks/figures.md#a-real-gpu), random "
        f"weights, {tokens_8b} (8B) and {tokens_3b} (3B)\ntokens a step; a single step overlaps with none before or "
        f"after it. Plain PyTorch: {sum(PLAIN.values())} bytes a\nparameter, without activations; speed unknown."
    )


def host_table() -> str:
    """Return the README's table of host memory by model and option."""
    told = results(PLANS)
    models = list(told["held"]["default"])
    rows = []
    for name, (words, flag) in HOST_OPTIONS.items():
        held = told["held"][name]
        cells = [f"{held[model]['host'] / 2**30:.0f}" for model in models]
        each = [held[model]["host"] / told["parameters"][model] for model in models]
        spread = dict.fromkeys(f"{value:.1f}" for value in (min(each), max(each)))
        rows.append([words, *cells, " to ".join(spread), flag])
    return table(["GiB of host memory", *models, "bytes a parameter", "flag"], rows)


def bytes_until_last_step(sizes: Mapping[str, int]) -> int:
    """Return the most bytes among the phases of a run, given in its order, up to the steps.

    A save and an export take memory up to the host budget.
    """
    phases = list(sizes)
    return max(sizes[phase] for phase in phases[: phases.index("step") + 1])


def real_rows() -> Iterator[dict[str, str]]:
    """Yield the cells of the last run of each title at real size on few cores, by column."""
    for title, (*_, run) in results(REAL)["runs"].items():
        preset, _, trained = title.partition(", ")
        plan, seconds = run["plan"], run["seconds"]
        planned_bytes = plan["device bytes"] + plan["host bytes"] + plan["operation bytes"] + run["program bytes"]
        bytes_of = {
            "process memory": bytes_until_last_step(run["private bytes"]),
            "planned memory": planned_bytes,
            "device budget used": run["device bytes"],
            "disk": run["disk bytes"],
        }
        seconds_of = {
            "first step": seconds["first step"],
            "a step": seconds["steady step"],
            "planned step": plan["steady step"],
        }
        yield {
            "model": REAL_MODELS[preset],
            "trained": trained,
            **{name: f"{size / 2**30:.1f} GiB" if size else "–" for name, size in bytes_of.items()},
            **{name: f"{each:.0f} s" for name, each in seconds_of.items()},
        }


def real_table() -> str:
    """Return the table of all runs at real size."""
    rows = list(real_rows())
    return table(list(rows[0]), [list(row.values()) for row in rows])


def real_readme() -> str:
    """Return the README's table of runs at real size: of each model the run farthest from its plan, in few columns."""
    shown: dict[str, dict[str, str]] = {}
    for row in real_rows():
        if row["model"] not in shown or _off(row) > _off(shown[row["model"]]):
            shown[row["model"]] = row
    titles = ("model", "trained", "memory (plan)", "disk", "a step (plan)")
    rows = [
        [
            row["model"],
            row["trained"],
            f"{row['process memory']} ({row['planned memory'].split()[0]})",
            row["disk"],
            f"{row['a step']} ({row['planned step'].split()[0]})",
        ]
        for row in shown.values()
    ]
    return table(titles, rows)


def _off(row: Mapping[str, str]) -> float:
    """Return how far a run is from its plan, in memory or seconds: 1 is as planned."""
    pairs = (("process memory", "planned memory"), ("a step", "planned step"))
    return max(float(row[held].split()[0]) / float(row[told].split()[0]) for held, told in pairs)


def steps_text() -> str:
    """Return the README's sentence about step times on CPU cores."""
    ratios: dict[str, list[float]] = {}
    (threads,) = {each["threads"] for each in results(STEPS)["results"]}
    for each in results(STEPS)["results"]:
        if each["ratio"]:
            ratios.setdefault(each["name"].partition(" (")[0], []).append(1 / each["ratio"])

    def span(name: str) -> str:
        return f"{min(ratios[name]):.2f} to {max(ratios[name]):.2f}"

    return (
        f"On two CPU cores (33 M Llama, {threads} threads), a step took {span('engine')} times plain PyTorch, and\n"
        f"{span('engine, states on nvme')} with states on disk; "
        f"DeepSpeed ZeRO-3 {span('DeepSpeed ZeRO-3, CPU offload')}, and {span('DeepSpeed ZeRO-3, NVMe offload')}:"
    )


def row_keys_table() -> str:
    """Return the table with the keys of a row, by `row_keys.ROW_KEYS`. Neighbours with equal cells are one line."""
    from offload.extras.data.row_keys import ROW_KEYS

    lines: dict[tuple[str, ...], list[str]] = {}
    for key in ROW_KEYS:
        cells = (key.forms, _formats(key.honoured), _formats(key.refused - key.honoured), key.effect)
        lines.setdefault(cells, []).append(f"`{key.name}`")
    rows = [[", ".join(names), *cells] for cells, names in lines.items()]
    return table(["key", "values", "read in", "refused in", "effect"], rows)


def _formats(formats: frozenset[str]) -> str:
    from offload.extras.data.row_keys import WITH_ANSWERS

    return "all with answers" if formats == WITH_ANSWERS else ", ".join(f"`{name}`" for name in sorted(formats))


def message_keys_table(title: str, name: str) -> str:
    """Return the table with the keys of a message or the types of a part, by a table in `row_keys`."""
    from offload.extras.data import row_keys

    cells = [(", ".join(f"`{each}`" for each in key.names), key.forms, key.effect) for key in getattr(row_keys, name)]
    return table([title, "values", "effect"], cells)


def fit_page() -> dict[str, Any]:
    """Return all data of the page "Will it fit?": the plans, and what the page offers beside them."""
    plans, offered = results(FIT), yaml.safe_load((ROOT / "docs" / "fit.yaml").read_text())
    plans["older"] = older_plans()
    for key, covered in list(offered["covered"].items()):
        covered["plans_of"] = [card for card in covered["plans_of"] if card in plans["cards"]]
        if not covered["plans_of"]:
            del offered["covered"][key]
    return {**plans, **offered}


def older_plans() -> list[str]:
    """Return the entries of the page that were planned before the last change of rates: model, method, card."""
    from benchmarks import forecasts

    return sorted(forecasts.older("fit"))


def fastest(page: dict[str, Any], rows: list[Any], host: int, has_disk: bool) -> list[Any] | None:
    """Return the fastest plan for a size of host memory in GiB, as docs/fit.js does; None: no plan fits."""
    room = page["host_share"] * (host - page["system_gib"])
    usable = [row for row in rows if row[2] and (row[0] <= host or row[5] <= room) and row[1] <= has_disk]
    return max(usable, key=lambda row: row[3], default=None)


def fit_cell(page: dict[str, Any], rows: list[Any]) -> str:
    """Return a cell: the smallest host memory with a plan and the speed, without a disk, and with one where smaller."""
    texts: list[str] = []
    least = max(page["hosts_gib"]) + 1
    for has_disk in (False, True):
        for host in (size for size in page["hosts_gib"] if size < least):
            row = fastest(page, rows, host, has_disk)
            if row is not None:
                texts.append(f"{host} GiB{' and a disk' if row[1] else ''}: {row[3]:,}")
                least = host
                break
    return "<br>".join(texts) or "–"


def fit_tables() -> str:
    """Return the tables of the page "Will it fit?", for a reader without scripts: one for each method."""
    page, parts = fit_page(), []
    cards = [card for card in FIT_CARDS if card in page["cards"]]
    titles = [f"{page['cards'][card]['name']}, {FIT_CARDS[card]} GB" for card in cards]
    for method, title in FIT_METHODS.items():
        cells = []
        for name, methods in page["models"].items():
            row = [name]
            for card in cards:
                rows = methods[method].get("cards", {}).get(card, {}).get("1")
                mark = " †" if f"{name}, {method}, {card}" in page["older"] else ""
                row.append("not planned" if rows is None else fit_cell(page, rows) + mark)
            cells.append(row)
        parts.append(f"### {title}\n\n{table(['model', *titles], cells)}")
    if page["older"]:
        from benchmarks.plan_tables import OLDER

        parts.append(OLDER)
    return "\n\n".join(parts)


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"plans": plans_table, "real": real_readme, "host": host_table, "steps": steps_text},
    "docs/how-to/large-model.md": {"real": real_table},
    "docs/fit.md": {"tables": fit_tables},
    "docs/reference/data.md": {
        "row keys": row_keys_table,
        "message keys": lambda: message_keys_table("key", "MESSAGE_KEYS"),
        "part types": lambda: message_keys_table("type", "PART_TYPES"),
    },
}


def with_parts(page: str) -> str:
    """Return a page with its generated parts: each stands between `<!-- NAME: ... -->` and `<!-- end NAME -->`."""
    text = (ROOT / page).read_text()
    for name, make in PARTS[page].items():
        begin, end = re.search(rf"<!-- {name}: .*?-->\n", text), text.find(f"<!-- end {name} -->")
        if begin is None or end < begin.end():
            raise SystemExit(f"{page} lacks the marker <!-- {name}: ... --> or <!-- end {name} -->.")
        text = f"{text[: begin.end()]}\n{make()}\n\n{text[end:]}"
    return text


STYLE = """text{font:13px system-ui,sans-serif;fill:#1f2933}.s{font-size:11px;fill:#52606d}.w{fill:#fff;font-size:12px}
.bg{fill:#fff}.card{fill:none;stroke:#52606d;stroke-width:2}
.over{fill:none;stroke:#c0392b;stroke-width:2;stroke-dasharray:5 4}
.bad{fill:#c0392b;font-weight:600}.c{fill:#3b6fb6}.u{fill:#2f8f6b}.d{fill:#b4692a}.p{fill:#7a5ba6}.m{fill:#54708c}
@media (prefers-color-scheme:dark){.bg{fill:#161b22}text{fill:#dfe6ee}.s{fill:#9fb0c0}.w{fill:#fff}.card{stroke:#9fb0c0}
.over{stroke:#ff7b72}.bad{fill:#ff7b72}}"""


def memory_picture() -> str:
    """Return docs/images/memory.svg: the states of an 8B model beside a card with 24 GB."""
    told, left, scale = results(PLANS), 150, 3.75
    rows = [each for each in told["rows"] if each["model"] == "Llama-3.1-8B" and not each["device_memory"]]
    card = rows[0]["device_bytes"] / 2**30 * scale
    label = "Memory of an 8B model: plain PyTorch needs more than 24 GB; offload uses card, host memory and disk"
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 236" role="img" aria-label="{label}">',
        f'<style>\n{STYLE}\n</style>\n<rect class="bg" width="860" height="236" rx="8"/>',
        f'<text class="s" x="{left + card / 2:.0f}" y="22" text-anchor="middle">the card: 24 GB</text>',
    ]

    def bar(kind: str, x: float, y: int, gib: float, words: str) -> float:
        width = gib * scale
        drawn.append(f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="34"/>')
        kind, below = ("w", 21) if width > 8 * len(words) else ("s", 53)
        drawn.append(
            f'<text class="{kind}" x="{x + width / 2:.1f}" y="{y + below}" text-anchor="middle">{words}</text>'
        )
        return x + width

    def title(y: int, words: str, below: str) -> None:
        drawn.append(f'<text x="14" y="{y + 15}">{words}</text><text class="s" x="14" y="{y + 31}">{below}</text>')

    def outline(y: int) -> None:
        drawn.append(f'<rect class="card" x="{left}" y="{y - 5}" width="{card:.1f}" height="44" rx="4"/>')

    parameters, x, y = told["parameters"]["Llama-3.1-8B"], float(left), 36
    total = sum(PLAIN.values()) * parameters / 2**30
    title(y, "plain PyTorch", f"8B: {total:.0f} GiB of states")
    for kind, (name, size) in zip("cpmu", PLAIN.items(), strict=True):
        x = bar(kind, x, y, size * parameters / 2**30, name)
    drawn.append(
        f'<rect class="over" x="{left + card:.1f}" y="{y - 5}" width="{x - left - card + 5:.1f}" height="44" rx="4"/>'
    )
    drawn.append(f'<text class="bad" x="{x + 16:.0f}" y="{y + 21}">out of memory</text>')
    outline(y)
    for y, each in zip((100, 164), rows, strict=True):
        held = {place: size / 2**30 for place, size in each["held_bytes"].items()}
        title(y, "offload", f"a host with {each['host_gib']} GiB")
        x = left + held["device"] * scale
        drawn.append(f'<rect class="c" x="{left}" y="{y}" width="{x - left:.1f}" height="34"/>')
        drawn.append(f'<text class="s" x="{x + 6:.1f}" y="{y + 21}">{held["device"]:.0f} GiB</text>')
        outline(y)
        x = bar("u", left + card + 10, y, held["host"], f"host: {held['host']:.0f} GiB")
        if held["disk"]:
            bar("d", x + 4, y, held["disk"], f"disk: {held['disk']:.0f} GiB")
    drawn.append(
        f'<text class="s" x="{left}" y="222">On the card: blocks that compute now or next. Host and disk: weights, '
        "gradients, moments. By plan.</text>\n</svg>"
    )
    return "\n".join(drawn)


def fit_data() -> str:
    """Return docs/fit-data.js: the plans of the page "Will it fit?", as a script, which also loads from the disk."""
    page = fit_page()
    models = page.pop("models")
    lines = [f'"{key}": {json.dumps(value)}' for key, value in page.items()]
    lines.extend(f'"{name}": {json.dumps(plans, separators=(",", ":"))}' for name, plans in models.items())
    first, rest = ",\n".join(lines[: len(page)]), ",\n".join(lines[len(page) :])
    return (
        f"// Made by docs/make.py from benchmarks/results/{FIT} and docs/fit.yaml.\n"
        f'window.FIT = {{\n{first},\n"models": {{\n{rest}\n}}\n}};'
    )


QUOTE = re.compile(r'(?ms)^```\w+ title="([\w/.]+\.(?:py|cpp|h|inl))(?:::([\w.]+))?"\n(.*?)^```$')
"""A block of a page that quotes the source: file, class or function (none: the whole file), code."""


def stale_quotes(root: Path) -> list[str]:
    """Return a message for each code block in the pages whose text is not in the source named by its title.

    A block contains whole lines in source order. A line `...` stands for left-out lines. The indentation of the
    source may be left out.
    """
    found = []
    for page in sorted((root / "docs").rglob("*.md")):
        for path, name, block in QUOTE.findall(page.read_text()):
            missing = _missing(_source(root / path, name), block)
            if missing is not None:
                title = f"{path}::{name}" if name else path
                found.append(f"{page.relative_to(root)}: not (or no longer) in {title}: {missing}")
    return found


def _source(path: Path, name: str) -> list[str]:
    """Return the lines of a class or function (dotted name), or of the whole file. Empty if not found."""
    if not path.is_file():
        return []
    text = path.read_text()
    if not name:
        return text.splitlines()
    node: Any = ast.parse(text)
    for part in name.split("."):
        node = next((each for each in getattr(node, "body", ()) if getattr(each, "name", "") == part), None)
    return [] if node is None else text.splitlines()[node.lineno - 1 : node.end_lineno]


def _missing(source: list[str], block: str) -> str | None:
    """Return the first line of the first passage of a block that is not in the source; None: all are there."""
    end = 0
    for passage in re.split(r"(?m)^[ ]*\.\.\.\n", block):
        lines = textwrap.dedent(passage).splitlines()
        starts = range(end, len(source) - len(lines) + 1)
        begin = next((n for n in starts if _dedented(source[n : n + len(lines)]) == lines), None)
        if begin is None:
            return lines[0].strip()
        end = begin + len(lines)
    return None


def _dedented(lines: list[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).splitlines()


def picture() -> None:
    """Write docs/images/first-run.svg: the terminal in a real run."""
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
            console.print(text)
    drawn = console.export_svg(title="offload train", unique_id="run")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # a browser would fetch these
    (ROOT / "docs" / "images" / "first-run.svg").write_text(drawn)


def site(root: Path) -> int:
    """Build the site for a checkout into build/site there. Return the exit code: not 0 after any warning."""
    if importlib.util.find_spec("zensical") is None:
        raise SystemExit("The site is built by zensical, which is not installed: pip install '.[docs]', or make setup.")
    words = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    if code := subprocess.run(words, cwd=root).returncode:
        return code
    built = root / "build" / "site"
    for source in ("make.py", "support.yaml", "fit.yaml"):  # sources of pages
        (built / source).unlink(missing_ok=True)
    for page in built.rglob("*.html"):  # pages on disk may not start workers, and nothing is fetched
        own = os.path.relpath(built / "worker.js", page.parent)
        text = page.read_text().replace("https://unpkg.com/iframe-worker/shim", own)
        page.write_text(_EXAMPLE.sub(functools.partial(_with_example, root, page), text))
    return 0


_EXAMPLE = re.compile(r'(?<=href=")(?:\.\./)+(examples/[^"#]+)')


def _with_example(root: Path, page: Path, link: re.Match[str]) -> str:
    """Copy a file of the examples into the site. Return the link to the copy."""
    built = root / "build" / "site"
    copy = built / link[1]
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(root / link[1], copy)
    return os.path.relpath(copy, page.parent)


def main(words: list[str]) -> int:
    """Run the command line; return the exit code."""
    stale = []
    made = {REFERENCE / f"{name}.md": make for name, make in PAGES.items()}
    made |= {ROOT / page: functools.partial(with_parts, page) for page in PARTS}
    made[ROOT / "docs" / "images" / "memory.svg"] = memory_picture
    made[ROOT / "docs" / "fit-data.js"] = fit_data
    for path, make in made.items():
        text = make().rstrip() + "\n"
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(path.relative_to(ROOT))
        if "--check" not in words:
            path.write_text(text)
    print(*(f"{'stale' if '--check' in words else 'written'}: {path}" for path in stale), sep="\n")
    quotes = stale_quotes(ROOT)
    print(*quotes, sep="\n")
    if "--picture" in words:
        picture()
    if "--site" in words and (code := site(ROOT)):
        return code
    return 1 if quotes or (stale and "--check" in words) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
