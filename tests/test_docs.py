"""Documentation: generated pages match the code, commands run as written, sentences are short."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import unquote

import pytest
import torch
import yaml
from torch import nn

from offload import Engine, plan
from offload.app.config.presets import PRESETS
from tests import forks
from tests.browser import browser
from tests.engine.handmade import WIDTH, Block
from tests.forks import MINUTES, ROOT
from tests.integrations import test_examples

HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))
RUN = [ROOT / "README.md", ROOT / "docs" / "index.md", *HOW_TO]
RUN_ELSEWHERE = ("index", "real-model", "trainer")
"""Pages with commands covered by other tests: the README's commands, and the examples."""
README_BYTES, DESIGN_BYTES = 9600, 16 << 10
NUMBERS = {
    **dict.fromkeys(("8.07", "1.03", "0.52"), ROOT / "docs" / "how-to" / "plan-and-report.md"),
    **dict.fromkeys(("182", "185"), ROOT / "docs" / "families.md"),
}
"""Numbers in the README's sentences, and the page with each."""
MAKE: Any = runpy.run_path(str(ROOT / "docs" / "make.py"))


def blocks(path: Path, kind: str) -> Iterator[str]:
    """Yield fenced blocks of one kind: `sh` blocks run as written, a block without a kind is an example."""
    yield from re.findall(rf"(?ms)^```{kind}\n(.*?)^```$", path.read_text())


def sentences(path: Path) -> list[int]:
    """Return the word count per sentence in paragraphs and list items, without tables and code."""
    text = re.sub(r"(?ms)^```.*?^```$", "\n", path.read_text())
    text = re.sub(r"(?m)^(\||!|#|<!--).*$", "\n", text)
    text = re.sub(r"\]\([^)]*\)|[\[\]*`]", "", text)
    pieces = re.split(r"\n\s*\n|\n- |\n\d+\. |(?<=[.:?!])\s+", text)
    return [count for piece in pieces if (count := len(re.findall(r"[\w'./-]*\w", piece)))]


def shape(line: str) -> str:
    """Return an output line without numbers."""
    return re.sub(r"\d[\d,.]*", "#", line).strip()


@pytest.mark.slow
def test_generated_pages_are_those_of_the_code(tmp_path: Path) -> None:
    """On any machine: a page has no folder of its maker."""
    environ = os.environ | {"TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    found = forks.run(["docs/make.py", "--check"], env=environ, timeout=MINUTES)
    assert found.returncode == 0, found.stdout + found.stderr


def test_quoted_code_is_that_of_the_source() -> None:
    assert "title=" in (ROOT / "docs" / "architecture.md").read_text()
    assert not MAKE["stale_quotes"](ROOT)


def test_a_changed_line_of_the_source_makes_its_quote_stale(tmp_path: Path) -> None:
    block = "    x = 1\n    ...\n    if x:\n        y = 3\n"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(f'# Page\n\n```python title="a.py::A.f"\n{block}```\n')
    source = "class A:\n    def f(self):\n        x = 1\n        z = 2\n        if x:\n            y = 3\n"
    (tmp_path / "a.py").write_text(source)
    assert not MAKE["stale_quotes"](tmp_path)
    for line, changed in (("x = 1", "x = 2"), ("x = 1", "x = 1  # one"), ("if x:", "if y:"), ("y = 3", "y = 4")):
        (tmp_path / "a.py").write_text(source.replace(line, changed))
        assert MAKE["stale_quotes"](tmp_path), changed
    (tmp_path / "a.py").write_text(source.replace("def f", "def g"))
    assert MAKE["stale_quotes"](tmp_path) == ["docs/page.md: not (or no longer) in a.py::A.f: x = 1"]


class TwoLayers(nn.Module):
    """The model of the page "The loop, unrolled"."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_the_unrolled_loop_has_the_calls_of_a_step_in_their_order() -> None:
    """Break: exchange two lines of the page. Repeated calls, such as one for each gradient, have one line."""
    page = (ROOT / "docs" / "concepts" / "the-loop.md").read_text()
    told = re.findall(r"(?m)^([A-Z]\w+\.\w+) +([\w/]+\.py)", page)
    made: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and (call := (code.co_qualname, code.co_filename.rpartition("/offload/")[2])) in told:
            made.append(call)

    batch = {"hidden": torch.randn(4, 6, WIDTH)}
    with Engine(TwoLayers()) as engine:
        for _ in range(3):
            engine.step(batch, lambda outputs, _: outputs.square().mean())
        sys.setprofile(note)
        try:
            engine.step(batch, lambda outputs, _: outputs.square().mean())
        finally:
            sys.setprofile(None)
    assert [call for call, _ in groupby(made)] == told


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the result files, in place of the real ones."""
    copy = tmp_path / "results"
    shutil.copytree(ROOT / "benchmarks" / "results", copy)
    monkeypatch.setitem(MAKE["results"].__globals__, "RESULTS", copy)
    return copy


def test_the_memory_of_a_run_is_without_the_save_and_the_export() -> None:
    """Both come after the steps, and take memory up to the host budget."""
    sizes = {"reading the data": 2, "step": 3, "saving the states": 9, "exporting": 8}
    assert MAKE["bytes_until_last_step"](sizes) == 3
    assert MAKE["bytes_until_last_step"](sizes | {"reading the data": 4}) == 4


def test_numbers_of_the_readme_are_those_of_their_sources() -> None:
    text = (ROOT / "README.md").read_text()
    assert MAKE["with_parts"]("README.md") == text, "run docs/make.py"
    assert (ROOT / "docs" / "images" / "memory.svg").read_text() == MAKE["memory_picture"]() + "\n"
    for number, page in NUMBERS.items():
        found = [
            re.findall(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", each) for each in (text, page.read_text())
        ]
        assert all(found), f"{number}: once in README.md, or in {page}"


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("readme.json", r'"tokens_per_second": (\d+)'),
        ("readme.json", r'"Qwen3-32B": \{\s+"host": (\d+)'),
        ("readme.json", r'"parameters": \{\s+"Qwen3-14B": (\d+)'),
        ("gpu-nvidia-h200.json", r'"name": "3b, compile auto, 16384 tokens a step", "value": (\d+)'),
        ("step.json", r'"ratio": (0\.\d+)'),
    ],
)
def test_a_changed_result_makes_the_readme_stale(results: Path, file: str, pattern: str) -> None:
    text, path = (ROOT / "README.md").read_text(), results / file
    told = re.sub(r'\s*\n\s*("value")', r" \1", path.read_text())
    found = re.search(pattern, told)
    assert found, "the file has another form"
    path.write_text(told[: found.start(1)] + "7" + told[found.start(1) :])
    assert MAKE["with_parts"]("README.md") != text


FIT_BYTES, MIN_MODELS, MIN_CARDS = 1 << 20, 20, 10


def test_the_plans_of_the_page_will_it_fit_are_complete() -> None:
    text = (ROOT / "benchmarks" / "results" / "fit.json").read_text()
    page = (ROOT / "docs" / "fit-data.js").read_text()
    assert page == MAKE["fit_data"]() + "\n", "run docs/make.py"
    assert len(page.encode()) <= FIT_BYTES
    told = json.loads(text)
    assert len(told["cards"]) >= MIN_CARDS
    assert len(told["models"]) >= MIN_MODELS
    for name, methods in told["models"].items():
        assert set(methods) == set(told["settings"]) == {"full", "lora", "nf4"}, name
        for method, plans in methods.items():
            assert plans["parameters"] > 1e8, name
            if plans.get("refusal"):
                continue
            sizes = {card: about["hosts_gib"] for card, about in told["cards"].items()}
            assert {card: set(counts) for card, counts in plans["cards"].items()} == {
                card: set(counts) for card, counts in sizes.items() if card in plans["cards"]
            }, (name, method)
            assert set(sizes) - set(plans["cards"]) <= {"rtx-4070"}, "a card for small models may lack large ones"
            for card, counts in plans["cards"].items():
                for count, rows in counts.items():
                    for host, disk, micro_rows, *rest in rows:
                        assert host in sizes[card][count]
                        assert disk in (0, 1)
                        assert len(rest) == (5 if micro_rows else 3), (name, method, card, rest)
                        if micro_rows:
                            rate, device, on_host, on_disk, _ = rest
                            assert rate > 0
                            assert device <= told["cards"][card]["device_gib"] * 1.01
                            assert on_host <= host
                            assert on_disk <= told["cards"][card]["disk_gib"] * disk


DOCUMENT = """
const element = () => ({
  children: [], style: {}, listeners: {},
  append(...given) { this.children.push(...given); },
  replaceChildren(...given) { this.children = given; },
  addEventListener(name, call) { this.listeners[name] = call; },
  get text() { return this.children.map((each) => each.text ?? each).join(" "); },
});
const fields = Object.fromEntries(["model", "method", "card", "count", "host", "disk"].map((key) => [key, element()]));
const answer = element();
const form = { ...element(), elements: fields };
global.window = {};
global.document = { getElementById: (id) => (id === "fit-form" ? form : answer), createElement: element };
global.history = { replaceState() {} };
Object.defineProperty(global, "navigator", { value: {} });
const fs = require("fs");
const [data, page, points] = process.argv.slice(1).map((path) => fs.readFileSync(path, "utf8"));
eval(data);
const told = JSON.parse(points).map((point) => {
  global.location = { search: `?${new URLSearchParams(point)}`, hash: "" };
  eval(page);
  return answer.text;
});
console.log(JSON.stringify(told));
"""
"""A document for docs/fit.js, which prints the answer to each point as a text."""


def fit_answers(points: list[dict[str, Any]], folder: Path) -> list[str]:
    """Return the answers of the page "Will it fit?", by its script."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    (folder / "points.json").write_text(json.dumps(points))
    words = [node, "-e", DOCUMENT, "--", *(str(ROOT / "docs" / name) for name in ("fit-data.js", "fit.js"))]
    found = subprocess.run([*words, str(folder / "points.json")], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    answers: list[str] = json.loads(found.stdout)
    return answers


def test_the_table_of_support_is_made_from_tests_that_are_there() -> None:
    """Break: rename a test of the table."""
    assert MAKE["support_page"]().rstrip() + "\n" == (ROOT / "docs" / "reference" / "support.md").read_text(), (
        "run docs/make.py"
    )


def test_the_page_will_it_fit_answers_each_size_by_the_plans(tmp_path: Path) -> None:
    page = MAKE["fit_page"]()
    points = [
        {"model": model, "method": method, "card": card, "count": "1", "host": host, "disk": disk}
        for model in ("Llama-3.2-3B", "Llama-3.1-8B", "Mixtral-8x7B")
        for method in ("full", "nf4")
        for card in ("rtx-4080", "h100")
        for host in page["hosts_gib"]
        if card != "h100" or host >= 32
        for disk in (0, 1)
    ]
    num_fitting = 0
    for point, told in zip(points, fit_answers(points, tmp_path), strict=True):
        rows = page["models"][point["model"]][point["method"]]["cards"][point["card"]]["1"]
        row = MAKE["fastest"](page, rows, point["host"], point["disk"])
        num_fitting += row is not None
        if row is not None:
            assert told.startswith("It fits."), (point, told)
            assert f" {row[3]:,} tokens/s " in told, (point, told)
            assert f"--model.path {page['hubs'][point['model']]} " in told
            continue
        is_known = any(not each[2] and each[0] >= point["host"] and each[1] >= point["disk"] for each in rows)
        assert told.startswith("It does not fit." if is_known else "No plan fits."), (point, told)
        assert "The smallest change that fits: " in told
    assert 0 < num_fitting < len(points)


def test_a_shortage_on_the_card_says_where_else_the_states_may_lie(tmp_path: Path) -> None:
    page = MAKE["fit_page"]()
    points = [
        {"model": model, "method": method, "card": card, "count": "1", "host": row[0], "disk": row[1]}
        for model, methods in page["models"].items()
        for method, plans in methods.items()
        for card, counts in plans["cards"].items()
        for row in counts["1"]
        if not row[2] and row[3] and not row[4] and not row[5]
    ]
    answers = fit_answers(points, tmp_path)
    assert any("or a disk can hold it." in told for told in answers)
    for told in answers:
        change = told.partition("The smallest change that fits: ")[2]
        assert not ("of device memory is missing" in told and re.match(r"[\d,]+ GiB of host memory|a disk", change)), (
            told
        )


def test_a_card_without_plans_has_the_answers_of_smaller_cards(tmp_path: Path) -> None:
    point = {"model": "Llama-3.1-8B", "method": "full", "card": "rtx-5080", "count": "1", "host": 192, "disk": 0}
    smaller = {**point, "card": "rtx-4080"}
    too_small = {**point, "card": "t4", "host": 16}
    told, planned, refused = fit_answers([point, smaller, too_small], tmp_path)
    assert told.startswith("It fits. Speed unknown: no plan of this card")
    assert "tokens/s" in planned
    assert told.partition("Command:")[2] == planned.partition("Command:")[2]
    assert refused.startswith("No plan fits. This card has no plans of its own")
    page = MAKE["fit_page"]()
    assert set(page["hubs"]) == set(page["models"])


def test_the_page_about_plans_names_every_preset() -> None:
    page = (ROOT / "docs" / "how-to" / "plan-and-report.md").read_text()
    assert not [name for name in PRESETS if f"`{name}`" not in page]


def test_the_workflow_publishes_the_site_that_make_docs_builds() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "site.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    commands = [step["run"] for step in steps if "run" in step]
    targets = [command.split()[1] for command in commands if command.startswith("make ")]
    assert targets == ["docs"]
    assert re.search(r"(?m)^docs:.*\n.*docs/make\.py --site$", (ROOT / "Makefile").read_text())
    (uploaded,) = (step["with"]["path"] for step in steps if "upload" in step.get("uses", ""))
    assert f'site_dir = "{uploaded}"' in (ROOT / "zensical.toml").read_text()
    assert workflow["jobs"]["publish"]["needs"] == "build"
    assert "secrets" not in json.dumps(workflow)


def test_sizes() -> None:
    assert (ROOT / "README.md").stat().st_size <= README_BYTES
    assert (ROOT / "docs" / "design.md").stat().st_size <= DESIGN_BYTES


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_sentences_are_short(path: Path) -> None:
    found = sentences(path)
    assert statistics.mean(found) <= 18, found
    assert max(found) <= 45, found


def test_links_of_the_pages_outside_the_site_lead_somewhere() -> None:
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "benchmarks").rglob("*.md")):
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(#[^)]*)?\)", path.read_text()):
            page = (path.parent / target).resolve() if target else path
            assert page.exists(), f"{path.name}: {target}"
            if anchor and page.suffix == ".md":
                titles = re.findall(r"(?m)^#+ (.*)$", page.read_text())
                known = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert anchor[1:] in known, f"{path.name}: {target}{anchor}"


def test_each_page_is_in_the_menu_once() -> None:
    def pages(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            for target in entry.values():
                yield from [target] if isinstance(target, str) else pages(target)

    menu = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(pages(menu)) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
    (how_to,) = (entry["How-to"] for entry in menu if "How-to" in entry)
    assert sorted(pages(how_to)) == [f"how-to/{path.name}" for path in HOW_TO]


WINDOW = """
const element = () => ({ append() {} });
const inside = {
  document: { createElement: element, body: { append(script) { inside.script = script; } } },
  dispatchEvent(event) { this.onmessage(event); },
  MessageEvent,
};
global.location = { protocol: "file:" };
global.window = global;
global.document = { createElement: () => ({ contentWindow: inside }), body: element() };
eval(require("fs").readFileSync(process.argv[1], "utf8"));
const told = [];
const told_of = (side) => (event) => { told.push(`${side} ${event.data.text}`); event.data.text = "changed"; };
const worker = new Worker("search.js");
inside.onmessage = told_of("inside");
worker.onmessage = told_of("outside");
const early = { text: "early" }, late = { text: "late" }, answer = { text: "answer" };
worker.postMessage(early);
inside.script.onload();
worker.postMessage(late);
inside.postMessage(answer);
told.push("sent");
setTimeout(() => console.log(JSON.stringify([told, early.text, late.text, answer.text])), 10);
"""
"""A window for docs/worker.js, with a script in it that answers."""


def test_messages_to_the_search_are_copies_that_arrive_later() -> None:
    """As with a worker of the browser. Break: give the object itself, or call the receiver at once."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    told = subprocess.run([node, "-e", WINDOW, "--", ROOT / "docs" / "worker.js"], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout) == [
        ["sent", "inside early", "inside late", "outside answer"],
        "early",
        "late",
        "answer",
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A warning fails."""
    copy = tmp_path_factory.mktemp("site")
    for folder in ("docs", "examples"):
        shutil.copytree(ROOT / folder, copy / folder)
    shutil.copy(ROOT / "zensical.toml", copy)
    assert MAKE["site"](copy) == 0
    return copy / "build" / "site"


@pytest.mark.slow
def test_addresses_in_the_site_lead_to_its_own_files(site: Path) -> None:
    pages = {page.resolve(): page.read_text() for page in site.rglob("*.html") if page.name != "404.html"}
    ids = {page: set(re.findall(r"\bid=[\"']?([^\"'\s>]+)", text)) for page, text in pages.items()}
    for page, text in pages.items():
        fetched = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?://[^\" >]*)", text)
        assert not fetched, page.name
        for address in re.findall(r"(?:href|src)=\"?([^\" >]+)", text):
            target, _, anchor = address.partition("#")
            if re.match(r"\w+:", address):
                continue
            file = (page.parent / target.partition("?")[0]).resolve() if target else page
            assert file.exists(), f"{page.name}: {address}"
            assert not anchor or file not in ids or unquote(anchor) in ids[file] | {"__tabbed"}, (
                f"{page.name}: {address}"
            )


@pytest.mark.slow
def test_a_site_on_the_disk_finds_what_is_typed(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.size(1280)
        page.open((site / "how-to" / "disk.html").as_uri())
        page.value("document.querySelector('.md-search__button').click()")
        shadow = "document.activeElement.shadowRoot"
        page.wait(f"!!{shadow}?.querySelector('input')")
        page.type("moments")
        found = page.wait(f"/[1-9]\\d* result/.test({shadow}.textContent) && {shadow}.textContent")
        assert page.value(f"{shadow}.querySelector('input').value") == "moments"
        assert "moments" in found


@pytest.mark.slow
def test_no_command_is_cut_at_the_width_of_a_page(site: Path, tmp_path: Path) -> None:
    cut = """[...document.querySelectorAll("pre > code")].filter((code) => code.scrollWidth > code.clientWidth + 1
        && !code.closest(".language-text")).map((code) => code.innerText)"""
    with browser(tmp_path) as page:
        for width in (1280, 390):
            page.size(width)
            for path in [site / "index.html", site / "fit.html", *(site / "how-to").glob("*.html")]:
                page.open(path.as_uri())
                assert page.value("document.documentElement.scrollWidth") <= width, path.name
                assert not page.value(cut), (path.name, width)


def test_a_site_without_its_maker_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=re.escape("pip install '.[docs]'")):
        MAKE["site"](tmp_path)


def test_what_is_not_run_here_is_run_elsewhere() -> None:
    start, train, trainer = (
        "".join(blocks(ROOT / page, "sh")) for page in ("docs/index.md", "README.md", "docs/how-to/trainer.md")
    )
    assert start.replace("/tmp/start-run", "/tmp/readme-run") in train
    assert trainer == "".join(f"python examples/{name}.py\n" for name in test_examples.AS_WRITTEN)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in RUN if path.stem not in RUN_ELSEWHERE], ids=lambda path: path.stem)
def test_commands_run_as_they_are_written(path: Path, tmp_path: Path) -> None:
    """All `sh` blocks on a page run in order in the project folder, with a test folder for /tmp.

    The `python` blocks run too. A `py` block continues the previous ones.
    """
    environ = os.environ | forks.commands(tmp_path / "bin")
    script = "set -e\n" + "\n".join(blocks(path, "sh")).replace("/tmp/", f"{tmp_path}/")
    if any(blocks(path, "python")) and re.search(r"engine\.step|\.run\(\)", path.read_text()):
        (tmp_path / "loop.py").write_text("\n".join([*blocks(path, "python"), *blocks(path, "py")]))
        script += f"\ncd {tmp_path} && python loop.py"
    assert script != "set -e\n", "nothing on this page runs"
    found = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-3000:]
    said = [shape(line.replace(str(tmp_path), "/tmp")) for line in found.stdout.splitlines()]
    for line in "".join(blocks(path, "output")).splitlines():
        assert shape(line) in said, f"{line!r} is not in the output of the page's commands"


def test_the_notebook_of_a_real_model_has_the_commands_of_the_page() -> None:
    """tests/integrations/test_real_model.py runs the page."""
    cells = json.loads((ROOT / "examples" / "real_model.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    page = "".join(blocks(ROOT / "docs" / "how-to" / "real-model.md", "sh"))
    assert "\n".join(each.removeprefix("!") for each in code[1:]) == page.strip()


@pytest.mark.parametrize("name", ["first_steps", "prove_it", "real_model"])
def test_a_notebook_on_an_empty_machine_gets_the_project_or_says_from_where(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break: install `..` in any folder."""
    cells = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    first = code[0].partition("\nos.chdir(")[0]
    assert first.startswith("import importlib.util\n")
    ran: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda words, **_how: ran.append(words))
    monkeypatch.delenv("OFFLOAD", raising=False)
    with pytest.raises(SystemExit, match="outside a clone"):
        exec(first, {})
    assert not ran
    for project, commands in ((str(ROOT), []), ("https://host/offload", [["git", "clone"]])):
        monkeypatch.setenv("OFFLOAD", project)
        exec(first, {})
        *before, install = ran
        assert [words[:2] for words in before] == commands
        assert install[-1] == f"{tmp_path / 'offload-clone' if commands else ROOT}[hf]"
        ran.clear()
    (tmp_path / "offload-1-py3.whl").touch()
    exec(first, {})
    assert ran[0][-1] == "offload-1-py3.whl[hf]"


def test_each_cell_of_the_ways_in_is_whole() -> None:
    """Break: end a cell in the middle of code."""
    rows = [line for line in MAKE["ways_page"]().splitlines() if line.startswith("|")]
    for cell in "|".join(rows).split("|"):
        for opening, closing in ("()", "[]", "{}"):
            assert cell.count(opening) == cell.count(closing), cell
        assert cell.count("`") % 2 == 0, cell


PLANNED = [
    page
    for page in RUN
    if re.search(r"(?m)^offload plan .*--hardware", page.read_text())
    and "tokens/s, " in "".join(blocks(page, "output"))
]
"""Pages with figures of plans for a machine from a specification, which are the same everywhere."""


@pytest.mark.slow
@pytest.mark.parametrize("path", PLANNED, ids=lambda path: path.stem)
def test_figures_of_plans_are_those_the_command_prints(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = "\n".join(blocks(path, "sh")).replace("\\\n", " ")
    for command in re.findall(r"(?m)^offload plan (.*--hardware.*)$", commands):
        plan.main(shlex.split(command))
    said = capsys.readouterr().out.splitlines()
    figures = [line for line in "".join(blocks(path, "output")).splitlines() if " tokens/s, " in line]
    assert all(line in said for line in figures), said
    ratios = re.findall(r"`([\d.]+x)` means", path.read_text())
    assert all(any(line.endswith(f": {ratio}") for line in said) for ratio in ratios), said


def notebook_code(name: str) -> str:
    """Return the code cells of a notebook as one script. A line with a leading ! is a command."""
    cells = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return "import subprocess\n" + re.sub(r"(?m)^!(.*)$", r'subprocess.run(f"""\1""", shell=True, check=True)', code)


@pytest.mark.slow
def test_the_notebook_runs_from_the_top(tmp_path: Path) -> None:
    environ = os.environ | forks.commands(tmp_path / "bin")
    found = forks.run(["-c", notebook_code("first_steps")], cwd=tmp_path, env=environ, timeout=MINUTES)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-3000:]
    losses = re.findall(r"plain (\S+), streamed (\S+)", found.stdout)
    assert losses
    assert all(plain == streamed for plain, streamed in losses), losses
