"""What a run folder says: read as far as it can be, since a run may have ended at any moment, or still go on."""

from __future__ import annotations

import gzip
import json
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from offload.errors import ConfigError, counted, shorten

METRICS = "metrics.jsonl"
_STEPS = "steps"


class Piece(NamedTuple):
    """One piece of a lane's work, in seconds of its step, cut off at both ends of it."""

    lane: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class KeptStep:
    """A step that the trace has kept."""

    number: int
    seconds: float
    pieces: tuple[Piece, ...]
    """By their begin; those of one lane do not overlap."""


@dataclass(frozen=True)
class Recorded:
    """A run folder as it was read. What is missing is empty, and told in `notes`."""

    path: Path
    config: Mapping[str, Any]
    """Of config.yaml: sections of settings."""
    plan: Mapping[str, Any]
    env: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...]
    """The lines of metrics.jsonl, by their step."""
    kept: Mapping[int, KeptStep]
    """The steps of trace.json.gz by their number."""
    notes: tuple[str, ...]
    """What was missing or damaged, a sentence each."""
    is_running: bool
    """Another process of this machine is at it."""

    @classmethod
    def read(cls, path: Path, *, is_over: bool = False) -> Recorded:
        """Read the folder of a run. `is_over`: the run has ended, whatever its processes do. Raises ConfigError for
        what is no run.
        """
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise ConfigError(f"{path} {what}; give the folder of a run, which is --run.dir of train.")
        if not any((path / name).is_file() for name in (METRICS, "plan.json", "env.json")):
            raise ConfigError(
                f"{path} is no folder of a run: it has neither {METRICS} nor plan.json nor env.json; give the folder "
                "that train printed after `run folder:`."
            )
        notes: list[str] = []
        env = _mapping(path / "env.json", json.loads, notes)
        return cls(
            path,
            _mapping(path / "config.yaml", yaml.safe_load, notes),
            _mapping(path / "plan.json", json.loads, notes),
            env,
            _lines(path / METRICS, notes),
            _kept(path / "trace.json.gz", notes),
            tuple(notes),
            not is_over and _runs(env, path / "env.json"),
        )

    def setting(self, key: str) -> Any:
        """Return the value of `section.field`, None where the configuration has none."""
        section, _, field = key.partition(".")
        values = self.config.get(section)
        return values.get(field) if isinstance(values, Mapping) else None


def number(fields: Any, *keys: str) -> float | None:
    """Return the finite number under a path of keys, None where there is none."""
    for key in keys:
        fields = fields.get(key) if isinstance(fields, Mapping) else None
    if isinstance(fields, bool) or not isinstance(fields, int | float) or not math.isfinite(fields):
        return None
    return fields


def _mapping(path: Path, parse: Any, notes: list[str]) -> Mapping[str, Any]:
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
    except (OSError, ValueError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read: {shorten(' '.join(str(error).split()))}")
    else:
        if isinstance(found, Mapping):
            return found
        notes.append(f"{path.name} holds no mapping.")
    return {}


def _lines(path: Path, notes: list[str]) -> tuple[Mapping[str, Any], ...]:
    """Return the lines that are whole, one for each step: the last one of those that say the same step."""
    found: dict[int, Mapping[str, Any]] = {}
    num_torn = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    fields = json.loads(line)
                except ValueError:
                    fields = None
                if isinstance(fields, Mapping) and type(fields.get("step")) is int:
                    found[fields["step"]] = fields
                else:
                    num_torn += 1
    except OSError as error:
        notes.append(f"{path.name} {'is missing' if isinstance(error, FileNotFoundError) else 'cannot be read'}.")
        return ()
    if num_torn:
        notes.append(f"{path.name}: {counted(num_torn, 'line')} left out that cannot be read, as of a killed run.")
    if not found:
        notes.append(f"{path.name} has no step.")
    return tuple(found[step] for step in sorted(found))


def _kept(path: Path, notes: list[str]) -> dict[int, KeptStep]:
    """Return the steps of a trace in the Trace Event Format, as `Trace` writes it."""
    try:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        lanes = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
        work = [
            Piece(lanes[each["tid"]], each["name"], each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6)
            for each in events
            if each["ph"] == "X"
        ]
    except FileNotFoundError:
        notes.append(f"{path.name} is missing: it is written when the steps end.")
        return {}
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        notes.append(f"{path.name} cannot be read: {shorten(str(error))}")
        return {}
    kept: dict[int, KeptStep] = {}
    for step in work:
        what, _, which = step.name.partition(" ")
        if step.lane == _STEPS and what == "step" and which.isdigit() and step.end > step.begin:
            kept[int(which)] = KeptStep(int(which), step.end - step.begin, _within(step, work))
    return kept


def _within(step: Piece, work: list[Piece]) -> tuple[Piece, ...]:
    return tuple(
        piece._replace(begin=max(piece.begin, step.begin) - step.begin, end=min(piece.end, step.end) - step.begin)
        for piece in work
        if piece.lane != _STEPS and piece.begin < step.end and piece.end > step.begin
    )


def _runs(env: Mapping[str, Any], path: Path) -> bool:
    """Tell whether one of the processes that wrote env.json is still alive, on this machine."""
    pids = env.get("pids")
    if env.get("host") != socket.gethostname() or not isinstance(pids, list):
        return False
    written = path.stat().st_mtime
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.create_time() <= written and process.status() != psutil.STATUS_ZOMBIE:
                return True
        except (psutil.Error, TypeError, ValueError):
            continue
    return False


def seconds_text(seconds: float) -> str:
    """Return a time in three digits: 1.2 ms, 384 ms, 2.52 s, 5 min 10 s."""
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
    """Return a number in at most four digits, or by thousands: 0.6377, 6.29, 5,309, 6.83e-06."""
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
