"""`python -m offload.report`: write one page about a run, or compare several."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import tyro

from offload.app.config.command_line import as_path, parse_options, run_command
from offload.errors import ConfigError

DESCRIPTION = (
    "Write an HTML file about a run, from its folder: curves, the lanes of a median and of the slowest step, memory, "
    "the bottleneck and what to change. The file asks for nothing else and opens offline. Several runs share one page. "
    "A run may still go on, or have been killed. Exit codes: 0 written, 1 failed, 2 bad arguments, or no folder "
    "of a run."
)


@dataclasses.dataclass
class Options:
    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]
    """run folders"""
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE.html")] = None
    """output file; default: RUN/report.html, for several runs FIRST/compare.html"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print the figures as JSON; write no file"""
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """show tracebacks"""


def main(words: list[str]) -> int:
    options = parse_options(Options, words, prog="python -m offload.report", description=DESCRIPTION)
    if not options.runs:
        raise ConfigError("no run is given; name its folder, the --run.dir of train: offload report RUN.")
    from offload.extras.tools.reporting.page import as_json, read_views, write_page

    views = read_views([Path(each).expanduser() for each in options.runs])
    if options.json:
        print(json.dumps(as_json(views), indent=2))
    else:
        print(write_page(views, as_path(options.out)))
    return 0


if __name__ == "__main__":
    run_command(main)
