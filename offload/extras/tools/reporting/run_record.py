"""Read a run folder.

Missing and damaged files are tolerated, because a run can end at any moment or still be running.
"""

from __future__ import annotations

import gzip
import json
import math
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from offload.errors import ConfigError, counted, shorten, unless_absent

METRICS = "metrics.jsonl"
_STEPS = "steps"


class TraceSpan(NamedTuple):
    """One interval of lane work, in seconds from the step start, clipped to the step."""

    lane: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class TracedStep:
    """A step in the trace."""

    number: int
    seconds: float
    spans: tuple[TraceSpan, ...]
    """Sorted by start; without overlap within a lane."""


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run folder. Missing files are empty and listed in `notes`."""

    path: Path
    config: Mapping[str, Any]
    """Setting sections from config.yaml."""
    decided: frozenset[str]
    """Settings decided by the program, by the comments in config.yaml, as `section.field`."""
    plan: Mapping[str, Any]
    env: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...]
    """Lines of metrics.jsonl in step order."""
    traced_steps: Mapping[int, TracedStep]
    """Steps in trace.json.gz, by number."""
    notes: tuple[str, ...]
    """Sentences about missing or damaged files."""
    is_running: bool
    """True if a process of this run is alive on this machine."""

    @classmethod
    def read(cls, path: Path, *, is_over: bool = False) -> RunRecord:
        """Read a run folder. Raises ConfigError for other folders.

        `is_over`: the run has ended, whatever its processes do.
        """
        if not path.is_dir():
            problem = unless_absent(path, "is a file")
            raise ConfigError(f"{path} {problem}; give the folder of a run, the --run.dir of train.")
        if not any((path / name).is_file() for name in (METRICS, "plan.json", "env.json")):
            raise ConfigError(
                f"{path} is not the folder of a run: it has neither {METRICS} nor plan.json nor env.json; give the "
                "folder that train printed after `run folder:`."
            )
        notes: list[str] = []
        env = _mapping(path / "env.json", json.loads, notes)
        return cls(
            path,
            _mapping(path / "config.yaml", yaml.safe_load, notes),
            _decided(path / "config.yaml"),
            _mapping(path / "plan.json", json.loads, notes),
            env,
            _lines(path / METRICS, notes),
            _traced_steps(path / "trace.json.gz", notes),
            tuple(notes),
            not is_over and _runs(env, path / "env.json"),
        )

    def setting(self, key: str) -> Any:
        """Return the value of `section.field`; None: not in the configuration."""
        section, _, field = key.partition(".")
        return value_at(self.config, section, field)

    def is_decided(self, key: str) -> bool:
        """Return True if the program decided the value: no advice then."""
        return key in self.decided


def value_at(fields: Any, *keys: str) -> Any:
    """Return the value at a key path; None: no such key, also in a damaged file."""
    for key in keys:
        if not isinstance(fields, Mapping):
            return None
        fields = fields.get(key)
    return fields


def number(fields: Any, *keys: str) -> float | None:
    """Return the finite number at a key path; None: no such number."""
    value = value_at(fields, *keys)
    # In Python, true is a number.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def whole_number(fields: Any, *keys: str) -> int | None:
    """Return the number at a key path as an integer; None: no such number."""
    value = number(fields, *keys)
    if value is None:
        return None
    return int(value)


def _mapping(path: Path, parse: Any, notes: list[str]) -> Mapping[str, Any]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
    except (OSError, ValueError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read: {shorten(' '.join(str(error).split()))}")
    else:
        if isinstance(content, Mapping):
            return content
        notes.append(f"{path.name} does not hold a mapping.")
    return {}


def _decided(path: Path) -> frozenset[str]:
    """Return the settings with the comment "resolved" (`Config.to_yaml`)."""
    keys, section = [], ""
    with suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, rest = line.partition(":")
            if not line.startswith(" "):
                section = name
            elif rest.rpartition("# ")[2].startswith("resolved"):  # the last one: a value may have a "# " too
                keys.append(f"{section}.{name.strip()}")
    return frozenset(keys)


def _lines(path: Path, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    """Return the complete lines in step order. For repeated steps, the last line counts."""
    steps: dict[int, Mapping[str, Any]] = {}
    num_torn = 0
    try:
        # A killed run may end its last line within a character.
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    fields = json.loads(line)
                except ValueError:
                    fields = None
                if isinstance(fields, Mapping) and type(fields.get("step")) is int:
                    # A resumed run writes the steps since the checkpoint again.
                    steps[fields["step"]] = fields
                else:
                    num_torn += 1
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
        return ()
    except OSError:
        notes.append(f"{path.name} cannot be read.")
        return ()
    if num_torn:
        notes.append(f"{path.name}: {counted(num_torn, 'line')} left out as unreadable, perhaps from a killed run.")
    if not steps:
        notes.append(f"{path.name} has no steps.")
    return tuple(steps[step] for step in sorted(steps))


def _traced_steps(path: Path, notes: list[str]) -> dict[int, TracedStep]:
    """Return the steps in a Trace Event Format file written by `Trace`."""
    try:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        lanes = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
        work = [
            TraceSpan(lanes[each["tid"]], each["name"], each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6)  # from µs
            for each in events
            if each["ph"] == "X"
        ]
    except FileNotFoundError:
        notes.append(f"{path.name} is missing: a run writes it after its last step.")
        return {}
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        notes.append(f"{path.name} cannot be read: {shorten(str(error))}")
        return {}
    traced_steps: dict[int, TracedStep] = {}
    for step in work:
        word, _, number = step.name.partition(" ")
        if step.lane == _STEPS and word == "step" and number.isdigit() and step.end > step.begin:
            spans = tuple(
                span._replace(begin=max(span.begin, step.begin) - step.begin, end=min(span.end, step.end) - step.begin)
                for span in work
                if span.lane != _STEPS and span.begin < step.end and span.end > step.begin
            )
            traced_steps[int(number)] = TracedStep(int(number), step.end - step.begin, spans)
    return traced_steps


def _runs(env: Mapping[str, Any], path: Path) -> bool:
    """Return True if a process recorded in env.json is alive on this machine."""
    pids = env.get("pids")
    if env.get("host") != socket.gethostname() or not isinstance(pids, list):
        return False
    written = path.stat().st_mtime  # when the run began
    for pid in pids:
        try:
            process = psutil.Process(pid)
            # A later process may have got the same number.
            if process.create_time() <= written and process.status() != psutil.STATUS_ZOMBIE:
                return True
        except (psutil.Error, TypeError, ValueError):  # it has ended, or env.json is damaged
            continue
    return False


def seconds_text(seconds: float) -> str:
    """Return a duration in three digits: 1.2 ms, 384 ms, 2.52 s, 5 min 10 s."""
    if not seconds:
        return "0"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.5:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:,} min {rest} s"


def count_text(value: float) -> str:
    """Return a number in at most four digits, with thousands separators: 0.6377, 6.29, 5,309, 6.83e-06."""
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
