"""The page in headless Chromium: phone and screen widths, light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload import report
from offload.errors import ConfigError, DiskError
from offload.extras.data.view import BetterLength, DataView, Piece, Sample, SourceView, describe_rows
from offload.extras.tools.reporting import charts, page
from offload.extras.tools.reporting.html import fill, write_html
from offload.extras.tools.reporting.page import read_views, render, report_run, write_page
from tests.matrix import matrix
from tests.reporting.browser import Browser, browser, find_chromium
from tests.reporting.runs import CONFIG, PLAN, line, usual, write_run

LOOK = r"""
(() => {
  document.querySelectorAll('details').forEach(each => { each.open = true; });
  const cut = [], of = each => each.getAttribute('class') || '';
  const name = each => `${each.tagName} ${of(each)}: ${each.textContent.trim().slice(0, 50)}`;
  const out = (inner, outer) => inner.left < outer.left - 1 || inner.right > outer.right + 1 ||
    inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1;
  for (const each of document.body.querySelectorAll('*')) {
    if (each.closest('svg')) continue;
    if (each.scrollWidth > each.clientWidth && getComputedStyle(each).display !== 'inline') cut.push(name(each));
  }
  for (const svg of document.querySelectorAll('svg')) {
    const box = svg.getBoundingClientRect();
    for (const part of svg.querySelectorAll('text, rect, path, circle'))
      if (out(part.getBoundingClientRect(), box)) cut.push(name(part));
    for (const axis of svg.querySelectorAll('.axis')) {
      const boxes = [...axis.querySelectorAll('text')].map(each => each.getBoundingClientRect());
      boxes.forEach((a, i) => boxes.slice(i + 1).forEach(b => {
        const touch = a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom;
        if (touch) cut.push('labels touch');
      }));
    }
  }
  const style = selector => getComputedStyle(document.querySelector(selector));
  const sizes = [...document.querySelectorAll('.curves text')].map(each => each.getBoundingClientRect().height);
  return {
    cut, width: innerWidth, scrolls: document.documentElement.scrollWidth > innerWidth,
    smallest: Math.min(...sizes), curves: document.querySelectorAll('.curves path').length,
    bars: document.querySelectorAll('.lanes rect').length, text: document.body.innerText,
    page: style('body').backgroundColor, card: style('.card').backgroundColor, ink: style('body').color,
    soft: style('.soft').color,
    lines: [...document.querySelectorAll('.curves g[class^=c]')].map(e => getComputedStyle(e).color),
  };
})()
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip("no chromium or chrome is on PATH")
    with browser(program, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write pages for a usual run, a broken run, large numbers, and several runs together."""
    folder = tmp_path_factory.mktemp("runs")
    long = "model.language_model.layers.0.mixture_of_experts_with_a_very_long_name_that_nothing_breaks"
    alternatives = [{"change": "32 GiB more host memory", "step_seconds": 0.3, "fits": True}]
    plan = {
        **PLAN,
        "step_seconds": 0.4,
        "bound_by": "h2d",
        "tokens_per_second": 250,
        "mfu": 0.31,
        "lane_seconds": {"h2d": 0.123},
    }
    runs = {
        "usual": write_run(folder / "usual", usual(), plan={**plan, "alternatives": alternatives}),
        "first": write_run(folder / "first", usual(1)),
        "broken": write_run(folder / "broken", [], with_trace=False, plan={}),
        "large": write_run(
            folder / ("a-run-with-a-long-name-" * 6),
            [
                {**each, "loss": 12345.678 + each["step"], "tokens": 10**9, "tokens_per_second": 123456789.0}
                for each in usual(2000)
            ],
            plan={
                "tiers": {
                    tier: {"bytes": 10**12, "budget_bytes": 2**41, "allocations": [{"name": long, "bytes": 10**12}]}
                    for tier in ("device", "pinned", "cpu", "nvme")
                }
            },
            config={**CONFIG, "model": {"path": f"/models/{long}", "preset": None}},
        ),
    }
    found = {name: write_page(read_views([path])) for name, path in runs.items()}
    others = [
        write_run(
            folder / f"lr-{number}",
            [line(step, 0.4 + number / 10, lanes={"h2d": (0.2, 0.1)}, eval_loss=number) for step in range(1, 30)],
            config={**CONFIG, "optimizer": {"states": "bf16", "lr": number}},
        )
        for number in range(1, 4)
    ]
    found["several"] = write_page(read_views([runs["usual"], *others]))
    found["data"] = folder / "data.html"
    data = awkward_data(long)
    write_html(found["data"], fill("data.html.j2", view=data, rows=describe_rows(data)), "--page")
    return found


def awkward_data(name: str) -> DataView:
    """Return data with long names, large numbers, text without blanks, and HTML-like text."""
    texts = {"trained": f"{name * 9}</div><b>", "context": f"\t{name * 9}\n\n  two\n", "padding": f"<{name}> x 1,000"}
    pieces = [Piece(text, kind, special, special, 10**9) for kind, text in texts.items() for special in (False, True)]
    bins = tuple((2**power, 10**power) for power in range(12))
    source = SourceView(
        name, f"/data/{name}/*", "messages in parquet", *[10**11] * 2, 0.5, 7, 8, 10**9, 0.1, 6, 5, bins
    )
    sample = Sample(1, 1, "", name, 10**9, 10**9, 10**6, (f"{name}.png",), tuple(pieces))
    told = f"note: {name}", f"data: {name}"
    return DataView(
        (source,) * 3,
        told,
        True,
        "packed",
        "next token",
        64,
        8,
        1,
        *[10**9] * 2,
        0.1,
        BetterLength(10**9, 0.05),
        10**9,
        1e9,
        (sample,),
    )


@matrix(
    strength=1,
    is_dark={"light": False, "dark": True},
    width=[375, 1280],
    name=["usual", "first", "broken", "large", "several", "data"],
)
def test_it_shows_without_complaints_requests_or_cut_text(
    chromium: Browser, pages: dict[str, Path], name: str, width: int, is_dark: bool
) -> None:
    page = chromium.open(pages[name], LOOK, width=width, is_dark=is_dark)
    assert page.complaints == []
    assert page.asked_for == [pages[name].as_uri()]
    assert page.found["width"] == width
    assert page.found["cut"] == []
    assert not page.found["scrolls"]
    if name == "data":
        assert page.found["bars"] == 36
        assert page.found["text"].count("</div><b>") == 2
    elif name != "broken":
        assert page.found["smallest"] > 11  # line height for 10 px text
        assert page.found["curves"] == {"first": 5, "usual": 6, "large": 6, "several": 24}[name]
        assert page.found["bars"] > 5
    for ink in ("ink", "soft"):
        assert _contrast(page.found[ink], page.found["card"]) > 4.5
    assert all(_contrast(color, page.found["card"]) > 3 for color in page.found["lines"])
    assert _luminance(page.found["page"]) < 0.05 if is_dark else _luminance(page.found["page"]) > 0.8


def test_the_check_of_the_page_finds_what_is_cut(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(
        "<meta name=viewport content='width=device-width'><body>"
        "<div class='card soft' style='width:40px;overflow:hidden'>incomprehensibilities</div>"
        "<svg class=curves viewBox='0 0 90 20'><text x=80 y=9>long words</text></svg>"
        "<img src='https://example.invalid/x.png'><script>console.error('no')</script>"
    )
    page = chromium.open(tmp_path / "bad.html", LOOK, width=375)
    assert [each.split()[0] for each in page.found["cut"]] == ["DIV", "text"]
    assert page.complaints
    assert any("example.invalid" in each for each in page.asked_for)


def test_it_says_what_it_shows(chromium: Browser, pages: dict[str, Path]) -> None:
    text = chromium.open(pages["usual"], LOOK, width=1280).found["text"]
    for said in (
        "Slowest step, 17",
        "900 ms",
        "494 ms more than the median step, 494 ms of it in compute",
        "123 ms",
        "The bottleneck is compute",
        "waited for",
        "slot <b>",
        "32 GiB more host memory",
        "By the plan the step is h2d-bound",
        "plan 250",
        "plan 31.0%",
    ):
        assert said in text, said
    text = chromium.open(pages["broken"], LOOK, width=1280).found["text"]
    assert "metrics.jsonl has no steps." in text
    assert "trace.json.gz is missing" in text
    text = chromium.open(pages["several"], LOOK, width=1280).found["text"]
    assert "4 runs" in text
    assert "optimizer.lr" in text


def test_settings_that_differ_are_told_but_for_the_folder(tmp_path: Path) -> None:
    paths = []
    for number in (1, 2):
        config = {**CONFIG, "run": {"dir": str(number), "seed": number}}
        paths.append(write_run(tmp_path / str(number), usual(5), config=config))
    assert [view.differs for view in read_views(paths)] == [(("run.seed", "1"),), (("run.seed", "2"),)]


def test_a_step_takes_no_more_longer_in_a_part_than_as_a_whole(tmp_path: Path) -> None:
    lines = [line(step, 0.5, lanes={"h2d": (0.2, 0.2)}) for step in range(1, 12)]
    lines[7] = line(8, 0.6, lanes={"h2d": (0.2, 0.0)})  # compute takes 0.3 s longer, without a wait
    (view,) = read_views([write_run(tmp_path, lines)])
    assert view.slowest.notes[0] == "100 ms more than the median step, 100 ms of it in compute."


def test_sentences_have_a_space_between_them(tmp_path: Path) -> None:
    lines = [{**each, "step_seconds": 2 * each["step_seconds"]} for each in usual(12)]
    page = render(read_views([write_run(tmp_path, lines, plan={**PLAN, "bound_by": "h2d"})]))
    text = re.sub(r"<(style|script|svg).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL)
    assert "(batches, records). By the plan the step is h2d-bound." in text
    assert not re.findall(r"\w*[a-z)]\.[A-Z]\w*", text)


def test_a_run_has_its_colour_where_another_has_no_curve(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one", usual(5)), write_run(tmp_path / "two", usual(12))
    text = render(read_views([one, two]))
    _, _, chart = text.partition("Evaluation loss")
    chart = chart[: chart.index("</figure>")]
    assert set(re.findall(r'class="(c\d)"', chart)) == {"c1"}


@pytest.mark.slow
def test_the_file_names_nothing_that_is_fetched(pages: dict[str, Path]) -> None:
    for path in pages.values():
        text = path.read_text()
        assert not re.findall(r"(?:src|href|srcset|data|poster|action)\s*=|url\(|@import|<script|<link", text)
        assert set(re.findall(r"https?://[^\s\"'<]*", text)) <= {"http://www.w3.org/2000/svg"}
        assert len(text) < 400_000


def test_a_curve_keeps_every_spike_and_gap() -> None:
    points: list[charts.CurvePoint] = [(step, 1.0) for step in range(10_000)]
    points[5003], points[77] = (5003, 9.0), (77, -3.0)
    points[7000:7500] = [(step, None) for step in range(7000, 7500)]
    found = charts.thin(points)
    assert len(found) < 400
    assert {(5003, 9.0), (77, -3.0)} < set(found)
    assert [step for step, _ in found] == sorted(step for step, _ in found)
    assert any(value is None and 7000 <= step < 7500 for step, value in found)
    assert charts.thin(points[:100]) == points[:100]


@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [5.0, 5.0],
        [1.0, 1.0 + 1e-12],
        [-1.0, 1.0],
        [1e-300, 2e-300],
        [1e30, 1.0],
        [None, None, 2.0, None],
        [-0.0],
    ],
)
def test_any_values_have_a_curve(values: list[Any]) -> None:
    assert charts.curves([list(enumerate(values))])


def test_steps_are_marked_at_a_few_whole_ones_among_them() -> None:
    for first, last in ((1, 1), (1, 2), (1, 3), (4, 9), (1, 40), (1, 120), (31, 1000), (999_990, 1_000_003)):
        ticks = charts.StepAxis(first, last).ticks()
        assert 1 <= len(ticks) <= 6
        assert ticks == sorted(set(ticks))
        assert all(isinstance(tick, int) and first <= tick <= last for tick in ticks)
        assert charts.StepAxis(first, last).project(first, 0, 300) == 0
        assert first == last or charts.StepAxis(first, last).project(last, 0, 300) == 300


def test_no_values_have_none() -> None:
    assert charts.curves([]) is None
    assert charts.curves([[], [(1, None)]]) is None
    assert charts.curves([[(1, 1e300)]]) is None


def test_where_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (write_run(tmp_path / name, usual(5)) for name in ("one", "two"))
    for words, path in (
        ([str(one)], one / "report.html"),
        ([str(one), str(two)], one / "compare.html"),
        ([str(one), "--out", str(tmp_path / "x.html")], tmp_path / "x.html"),
    ):
        assert report.main(words) == 0
        assert capsys.readouterr().out == f"{path}\n"
        assert path.read_text().startswith("<!DOCTYPE html>")
    assert not list(tmp_path.rglob("*.partial"))
    for place in (tmp_path, one / "metrics.jsonl"):
        with pytest.raises(ConfigError, match="name a file that ends in .html"):
            report.main([str(one), "--out", str(place)])
    with pytest.raises(ConfigError, match="is given twice"):
        report.main([str(one), str(two), f"{one}/../one"])
    with pytest.raises(ConfigError, match="7 runs are given"):
        report.main([str(write_run(tmp_path / str(number), usual(1))) for number in range(7)])
    for place in (tmp_path / "missing" / "x.html", tmp_path / ("x" * 300 + ".html")):
        with pytest.raises(DiskError, match="cannot be written: .*--out"):
            report.main([str(one), "--out", str(place)])


def test_a_run_never_fails_for_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path, usual(5))
    said: list[str] = []
    report_run(path, said.append)
    assert said == [f"report: {path / 'report.html'}"]
    monkeypatch.setattr(page, "render", lambda _views: 1 / 0)
    report_run(path, said.append)
    assert said[1].startswith("note: the report could not be written: ZeroDivisionError")


def _luminance(color: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    red, green, blue = ((part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4) for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    """Return the WCAG 2.1 contrast ratio."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)
