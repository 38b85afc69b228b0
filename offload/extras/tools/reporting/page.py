"""Render the report for one or several runs as a self-contained HTML file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from offload.errors import ConfigError, counted, format_bytes
from offload.extras.tools.reporting.advice import Advice, advise
from offload.extras.tools.reporting.charts import curves
from offload.extras.tools.reporting.figures import COMPUTE, SERIES, Figures, StepFigure
from offload.extras.tools.reporting.html import check_path, fill, write_html
from offload.extras.tools.reporting.run_record import RunRecord, count_text, number, seconds_text
from offload.extras.tools.reporting.timeline import Row, rows

MOST_RUNS = 6  # three colours, solid and dashed, for readers with colour blindness
_TITLES = {
    "loss": "Loss",
    "eval_loss": "Evaluation loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens a second",
    "step_seconds": "Seconds a step",
}
_TIERS = {"device": "device", "cpu": "host memory", "pinned": "of it pinned", "nvme": "disk"}


@dataclass(frozen=True)
class StepView:
    """A step with text for the page."""

    title: str
    figure: StepFigure
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    """Sentences about the traced step shown instead, and the difference to the median step."""


@dataclass(frozen=True)
class RunView:
    """A run with text for the page."""

    name: str
    run: RunRecord
    figures: Figures
    advice: tuple[Advice, ...]
    differs: tuple[tuple[str, str], ...]
    """(key, value) for settings with different values between runs."""

    @property
    def about(self) -> str:
        """Model and hardware."""
        run = self.run
        properties = [Path(str(run.setting("model.path") or run.setting("model.preset") or "model unknown")).name]
        if precision := run.setting("train.precision"):
            properties.append(str(precision))
        ranks, gpus = number(run.env, "world_size"), run.env.get("gpus")
        if isinstance(gpus, list) and gpus and isinstance(gpus[0], Mapping):
            properties.append(f"{int(ranks or 1)} x {gpus[0].get('name', 'GPU')}")
        elif isinstance(cpu := run.env.get("cpu"), Mapping):
            properties.append(f"{cpu.get('name') or cpu.get('machine') or 'CPU'}, {cpu.get('num_cores', '?')} cores")
            if ranks and ranks > 1:
                properties.append(f"{int(ranks)} ranks")
        return ", ".join(properties)

    @property
    def state(self) -> str:
        """Progress, as text."""
        num_done, num_requested = self.figures.num_steps, self.figures.num_asked
        progress = counted(num_done, "step")
        if num_requested is not None and num_requested != num_done:
            progress = f"{num_done:,} of {num_requested:,} steps"
        if self.run.is_running:
            progress += "; still going"
        return progress

    @property
    def median(self) -> StepView | None:
        """The median step."""
        return _step_view("Median step", self.figures.median)

    @property
    def slowest(self) -> StepView | None:
        """The slowest step, compared to the median; None: the same step."""
        median, slowest = self.figures.median, self.figures.slowest
        if median == slowest:
            return None
        return _step_view("Slowest step", slowest, median)

    @property
    def lane_plan(self) -> Mapping[str, Any]:
        """Planned seconds per lane; empty: not in the plan."""
        seconds = self.figures.planned.get("lane_seconds")
        if not isinstance(seconds, Mapping):  # a damaged plan.json
            return {}
        return seconds

    @property
    def binds(self) -> str:
        """Sentence about the bottleneck and the distance to its limit."""
        binding = self.figures.binding
        if binding is None:
            return ""
        step, limit = seconds_text(binding.step_s), seconds_text(binding.limit_s)
        if binding.is_serial:
            return f"One thread does all work in turn; of a step of {step}, {binding.lane} takes {limit}."
        return (
            f"The bottleneck is {binding.lane}, busy for {limit} of a median step of {step}: a step takes "
            f"{binding.times_limit:.2f} times as long as {binding.lane} alone."
        )


def read_views(folders: Sequence[Path], *, is_over: bool = False) -> list[RunView]:
    """Read runs and compute the figures. Raises ConfigError. `is_over`: the runs have ended."""
    for index, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:index]]:
            raise ConfigError(f"{folder} is given twice; give each run once.")
    runs = [RunRecord.read(folder, is_over=is_over) for folder in folders]
    names, differing = _names(folders), _differing(runs)
    views = []
    for name, run in zip(names, runs, strict=True):
        figures = Figures.of(run)
        differs = tuple((key, _value_text(key, run.setting(key))) for key in differing)
        views.append(RunView(name, run, figures, advise(run, figures), differs))
    return views


def render(views: Sequence[RunView]) -> str:
    """Return the page."""
    charts = list(_charts(views))
    return fill("page.html.j2", views=views, charts=charts, tier_names=_TIERS, tiles=_tiles, most_runs=MOST_RUNS)


def as_json(views: Sequence[RunView]) -> dict[str, Any]:
    """Return the page figures in JSON form."""
    runs = []
    for view in views:
        about = {"run": str(view.run.path), "is_running": view.run.is_running, "notes": list(view.run.notes)}
        figures = dataclasses.asdict(view.figures)
        binding = view.figures.binding
        if binding is not None:
            figures["binding"]["times_limit"] = binding.times_limit
        for name in ("median", "slowest"):
            step: StepFigure | None = getattr(view.figures, name)
            if step is not None and step.shown is not None:
                # The number alone: the trace file has the spans.
                figures[name]["shown"] = step.shown.number
        runs.append({**about, **figures, "advice": [dataclasses.asdict(each) for each in view.advice]})
    return {"runs": runs}


def write_page(views: Sequence[RunView], out: Path | None = None) -> Path:
    """Write the page atomically to `out`, or to the folder of the first run. Returns the path.

    Raises ConfigError and DiskError.
    """
    if len(views) > MOST_RUNS:
        raise ConfigError(f"{len(views)} runs are given, but a page can show at most {MOST_RUNS}; give fewer.")
    name = "report.html"
    if len(views) > 1:
        name = "compare.html"
    path = out or views[0].run.path / name
    check_path(path, "--out")
    write_html(path, render(views), "--out")
    return path


def report_run(folder: Path, say: Callable[[str], None]) -> None:
    """Write the report for a finished run and print the path. Errors become a note, so the run does not fail."""
    try:
        say(f"report: {write_page(read_views([folder], is_over=True))}")
    except Exception as error:
        say(f"note: the report could not be written: {type(error).__name__}: {' '.join(str(error).split())}")


def _charts(views: Sequence[RunView]) -> Iterator[tuple[str, Markup, list[str]]]:
    """Yield (title, picture, last value per run) for charts with a curve."""
    for name in SERIES:
        svg = curves([view.figures.series[name] for view in views], with_dots=name == "eval_loss")
        if svg is not None:
            ends = [_last(view.figures.series[name]) for view in views]
            yield _TITLES[name], Markup(svg), ends


def _last(points: Sequence[tuple[int, float | None]]) -> str:
    values = [value for _, value in points if value is not None]
    if not values:
        return ""
    return count_text(values[-1])


def _tiles(view: RunView) -> list[tuple[str, str, str]]:
    """Return (name, value, comparison) for the figures at the top."""
    figures, tiles = view.figures, []
    for name, title in (("loss", "loss"), ("eval_loss", "evaluation loss")):
        if text := _last(figures.series[name]):
            tiles.append((title, text, ""))
    planned, rate = figures.planned, figures.tokens_per_second
    of, mfu = number(planned, "tokens_per_second"), number(planned, "mfu")
    if rate is not None:
        tiles.append(("tokens a second", count_text(rate), _compared("plan", of, count_text)))
    if rate is not None and of and mfu is not None:  # a token has the same FLOPs in the plan
        tiles.append(("model FLOPs used", f"{mfu * rate / of:.1%}", f"plan {mfu:.1%}"))
    if figures.median is not None:
        of = number(planned, "step_seconds")
        tiles.append(("median step", seconds_text(figures.median.seconds), _compared("plan", of, seconds_text)))
    for tier in figures.tiers:
        if tier.name in ("device", "cpu") and tier.peak_bytes is not None:
            budget = _compared("of", tier.budget_bytes, format_bytes)
            tiles.append((f"{_TIERS[tier.name]}, peak", format_bytes(tier.peak_bytes), budget))
    return tiles


def _compared(word: str, value: float | None, text_of: Callable[[float], str]) -> str:
    """Return the comparison with a planned value or a limit; empty: there is none."""
    if value is None:
        return ""
    return f"{word} {text_of(value)}"


def _step_view(title: str, step: StepFigure | None, median: StepFigure | None = None) -> StepView | None:
    if step is None:
        return None
    notes: list[str] = []
    lane_rows: tuple[Row, ...] = ()
    if median is not None:
        notes.append(_longer(step, median))
    if step.shown is None:
        notes.append("The trace has no step to show.")
    else:
        lane_rows = rows(step.shown)
        if step.shown.number != step.step:
            notes.append(
                f"The trace keeps only the first, the last and the slowest steps, without step {step.step}: the lanes "
                f"shown are those of step {step.shown.number} ({seconds_text(step.shown.seconds)}), the kept step "
                "nearest in time."
            )
    return StepView(title, step, lane_rows, tuple(notes))


def _longer(step: StepFigure, median: StepFigure) -> str:
    """Return a sentence on the extra time of a step: compute, waiting for a lane, or outside the engine."""
    before, now = _parts(median), _parts(step)
    more = {name: seconds - before.get(name, 0.0) for name, seconds in now.items()}
    most, total = max(more, key=lambda name: more[name]), step.seconds - median.seconds
    extra = min(total, more[most])  # other parts may have been faster
    return f"{seconds_text(total)} more than the median step, {seconds_text(extra)} of it {most}."


def _parts(step: StepFigure) -> dict[str, float]:
    """Return seconds by activity: compute, waiting per lane, and outside the engine."""
    parts: dict[str, float] = {}
    for lane in step.lanes:
        if lane.name == COMPUTE:
            parts["in compute"] = lane.busy_s
        else:
            parts[f"waiting for {lane.name}"] = lane.exposed_s
    return parts | {"outside the engine": max(0.0, step.seconds - sum(parts.values()))}


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest distinct path endings."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _differing(runs: Sequence[RunRecord]) -> list[str]:
    """Return the settings with different values between runs, except the run folder."""
    sections = [each for run in runs for each in run.config.items() if isinstance(each[1], Mapping)]
    keys = dict.fromkeys(f"{section}.{field}" for section, values in sections for field in values)
    return [
        key for key in keys if key != "run.dir" and any(run.setting(key) != runs[0].setting(key) for run in runs[1:])
    ]


def _value_text(key: str, value: Any) -> str:
    if isinstance(value, int) and key.endswith(("_memory", "_bytes")):
        return format_bytes(value)
    if value is None:
        return "none"
    return str(value)
