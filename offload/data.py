"""`python -m offload.data`: show the data as seen by a run, before the run starts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from offload.app.config.command_line import (
    CommandOption,
    as_path,
    importing,
    is_on,
    parse_command,
    run_command,
    say,
    take_gpus,
)
from offload.app.telemetry.progress import fitted
from offload.errors import ConfigError, counted, shorten

if TYPE_CHECKING:
    from rich.text import Text

    from offload.extras.data.view import DataView, Piece, Sample, SourceView

DESCRIPTION = (
    "Show the data as a run with the settings of train would train on them: sources, what is skipped, lengths of "
    "documents, how rows are cut, and the first rows with what is trained in them. Data are prepared as a run prepares "
    "them, and kept in the cache; no weights are read, and there is no run folder. Exit codes: 0 shown, 1 failed, 2 "
    "bad configuration or data."
)
OPTIONS = {
    "samples": CommandOption("N", "(default: 3)", "How many rows to show, from the first of the first step on."),
    "page": CommandOption("FILE.html", "", "Write an HTML file, which asks for nothing else, and not to the terminal."),
    "json": CommandOption("{true,false}", "(default: false)", "Print one JSON object."),
}
_MOST_ROWS = 1000
_STYLES = {"trained": "green", "context": "", "padding": "dim"}
_BAR = 40  # characters of the longest bar
_MOST_DOCUMENTS = 4  # per row, on a terminal
_HEAD, _TAIL = 600, 300  # characters shown from a long piece


def main(words: list[str]) -> int:
    num_ranks, words = take_gpus(words)
    config, own = parse_command(words, prog="python -m offload.data", description=DESCRIPTION, own=OPTIONS)
    num_samples = _num_samples(own["samples"])
    as_json = is_on(own, "json")
    page = as_path(own["page"])
    from offload.app.training.task import check_names

    check_names(config)
    with importing():
        from offload.extras.data.view import describe_rows, look_at_data
        from offload.extras.tools.reporting.html import check_path, fill, write_html
    if page is not None:
        # Before the data are read: a wrong name is told at once.
        check_path(page, "--page")
    view = look_at_data(config, num_ranks, num_samples, say)
    if page is not None:
        write_html(page, fill("data.html.j2", view=view, rows=describe_rows(view)), "--page")
    if as_json:
        print(json.dumps(dataclasses.asdict(view), indent=2))
    elif page is not None:
        print(page)
    else:
        _show(view)
    return 0


def _num_samples(text: str | None) -> int:
    if text is None:
        return 3
    if not text.isdecimal() or int(text) > _MOST_ROWS:
        raise ConfigError(f"--samples is {shorten(text)!r}; it should be a number of rows, from 0 to {_MOST_ROWS:,}.")
    return int(text)


def _show(view: DataView) -> None:
    from rich.console import Console

    from offload.extras.data.view import describe_rows

    console = Console(highlight=False, markup=False)
    in_colour = console.color_system is not None and not console.no_color
    told = "\n".join((*view.told, describe_rows(view)))
    if console.is_terminal:
        told = fitted(told, console.width)
    console.print(told, soft_wrap=True)
    for source in view.sources:
        console.print("\n".join(_lengths(view, source)), soft_wrap=True)
    if view.samples:
        console.print()
        console.print(_legend(in_colour), soft_wrap=True)
    for sample in view.samples:
        console.print(f"\n{sample.title}", style="bold", soft_wrap=True)
        console.print(_row(sample, in_colour), soft_wrap=True)


def _lengths(view: DataView, source: SourceView) -> Iterator[str]:
    """Yield a document-length histogram for a source, with the row length marked."""
    from offload.extras.data.view import describe_padding

    of = ""
    if len(view.sources) > 1:
        of = f"{source.name}, "
    yield f"\n{of}documents by tokens; {source.cut}; {describe_padding(source.padding_share)}"
    most = max(count for _, count in source.histogram)
    width = len(f"{source.histogram[-1][0]:,}")
    for end, count in source.histogram:
        bar = "█" * -(-_BAR * count // most)
        yield f"  up to {end:>{width},}  {bar}{' ' * bool(bar)}{count:,}"
        if end == view.sequence_length:
            yield f"  {'-' * (6 + width)}  a row has {counted(end, 'token')}"


def _legend(in_colour: bool) -> Text:
    from rich.text import Text

    if not in_colour:
        return Text("⟦trained on⟧, context; ‖ another document of the row begins")
    parts = ("trained on", _STYLES["trained"]), ", context, ", ("padding", _STYLES["padding"])
    more = "; ", ("special tokens", "bold"), "; ", ("‖", "cyan"), " another document of the row begins"
    return Text.assemble(*parts, *more)


def _row(sample: Sample, in_colour: bool) -> Text:
    """Return the row text, limited to the first documents; trained tokens are in colour or between marks."""
    from rich.text import Text

    opening, closing = "⟦", "⟧"
    if in_colour:
        opening = closing = ""
    row = Text()
    is_open = False
    begins = [index for index, piece in enumerate(sample.pieces) if piece.begins_document]
    left_out = max(0, len(begins) - _MOST_DOCUMENTS)
    end = None
    if left_out:
        end = begins[_MOST_DOCUMENTS]
    for piece in sample.pieces[:end]:
        is_trained = piece.kind == "trained"
        if is_open and (piece.begins_document or not is_trained):
            row.append(closing)
            is_open = False
        if piece.begins_document:
            row.append("\n‖ ", "cyan")
        if is_trained and not is_open:
            row.append(opening)
            is_open = True
        row.append(_shown(piece), f"{_STYLES[piece.kind]}{' bold' * (piece.is_special and piece.kind != 'padding')}")
    if is_open:
        row.append(closing)
    if left_out:
        row.append(f"\n[... {counted(left_out, 'document')} more, which --page shows ...]")
    return row


def _shown(piece: Piece) -> str:
    """Return a piece for the terminal; a long one is cut to both ends."""
    text = piece.text
    left_out = len(text) - _HEAD - _TAIL
    if left_out <= 0:
        return text
    return f"{text[:_HEAD]} [... {left_out:,} characters, which --page shows ...] {text[-_TAIL:]}"


if __name__ == "__main__":
    run_command(main)
