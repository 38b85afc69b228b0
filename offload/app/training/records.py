"""Record files in a run folder: configuration, plan, environment, metrics, trace."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offload.app.config.config import Config
from offload.app.environment import describe_environment
from offload.app.telemetry.loggers import Loggers
from offload.app.telemetry.metrics import MetricsLog
from offload.app.telemetry.trace import Trace
from offload.app.training.decisions import with_decisions
from offload.app.training.planner import RunForecast, describe_budget
from offload.app.training.progress import RunProgress
from offload.app.training.run_folder import RunFolder
from offload.doors import Door
from offload.engine.engine import Engine
from offload.engine.gradients.policies import COARSE_RATIO
from offload.engine.methods.result import StepResult
from offload.errors import format_bytes
from offload.layout.residence import DISK, HOST
from offload.tiers.placement import TIERS

REPORTS: Door[Callable[[Path, Callable[[str], None]], None]] = Door("report", {})
"""Reports by name, written at the end of a run. Door, called with the run folder and a function that prints a line:

    def total(folder, say):
        say(f"{(folder / 'metrics.jsonl').stat().st_size} bytes of metrics")

    REPORTS.register("total", total)
"""


class Records:
    """Record files, written by rank 0. Other ranks open and write nothing.

    Bytes, memory and lanes are rank 0's values; loss, norm and tokens cover all ranks.
    """

    def __init__(self, folder: RunFolder | None = None, say: Callable[[str], None] = print) -> None:
        """`folder`: None on ranks other than 0. `say` receives logger failures."""
        self._folder = folder
        self._say = say
        # Opened after the first step: an earlier failure leaves an empty folder.
        self._metrics: MetricsLog | None = None
        self._loggers: Loggers | None = None
        self._trace: Trace | None = None

    def open(
        self,
        config: Config,
        engine: Engine,
        result: StepResult,
        pids: Sequence[int],
        last_step: int,
        forecast: RunForecast | None,
    ) -> None:
        """Write configuration, plan and environment, after the first step has succeeded.

        `pids`: process ids by rank. `last_step`: resume step. `forecast`: None if unknown.
        """
        if self._folder is None:
            return
        self._folder.write_config(config)
        # Both in one file: a report shows planned and held bytes side by side.
        usage = tiers(engine, config)
        plan: Mapping[str, Any] = {"fits": True, "tiers": usage}
        if forecast is not None:
            plan = forecast.document
        self._folder.write_json("plan.json", {**plan, "held": usage})
        self._folder.write_json(
            "env.json",
            {**describe_environment(), "world_size": len(pids), "host": socket.gethostname(), "pids": list(pids)},
        )
        self._metrics = MetricsLog(self._folder.metrics, last_step)
        self._loggers = Loggers(config.run.report_to, self._folder.path, last_step, dict(config.items()), self._say)
        path = self._folder.path / "trace.json.gz"
        self._trace = Trace(path, result.lanes, is_serial=not engine.overlaps)

    def decide(self, config: Config, engine: Engine) -> Config:
        """Return the configuration with decisions from the steps so far, and rewrite the file.

        On a full disk the previous file stays; a rerun then decides again.
        """
        config = with_decisions(config, engine)
        if self._folder is not None:
            with suppress(OSError):  # the run itself has the decision
                self._folder.write_config(config)
        return config

    def step(self, fields: Mapping[str, Any], begin: float, end: float, engine: Engine) -> None:
        """Record a step in the trace. `begin`, `end`: seconds from `time.perf_counter`."""
        if self._trace is not None:
            self._trace.step(fields["step"], begin, end, engine.spans)

    def mark(self, name: str, begin: float, end: float) -> None:
        """Record work between two steps in the trace."""
        if self._trace is not None:
            self._trace.mark(name, begin, end)

    def write(self, fields: Mapping[str, Any]) -> None:
        if self._metrics is not None and self._loggers is not None:
            self._metrics.write(fields)
            self._loggers.log(fields)

    def amend(self, step: int, fields: Mapping[str, Any]) -> None:
        """Add fields to the last line in metrics.jsonl, if written by this process."""
        if self._metrics is not None and self._loggers is not None and fields:
            self._metrics.amend(fields)
            self._loggers.log({"step": step, **fields})

    def sync(self) -> None:
        """Sync the lines to disk, because a checkpoint relies on them."""
        if self._metrics is not None:
            self._metrics.sync()

    def end_steps(self, say: Callable[[str], None]) -> None:
        """Write the trace, also after a failure. `say` receives a write error."""
        try:
            if self._trace is not None:
                self._trace.write()
        except OSError as error:
            say(f"note: the trace could not be written: {error}")

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self._loggers is not None:
            self._loggers.close()

    def report(self, say: Callable[[str], None]) -> None:
        """Write the reports, also after a failure. `say` receives the path, or the reason for a missing page."""
        if self._folder is not None and self._metrics is not None:  # a run without a step has nothing to report
            for write in REPORTS.values():
                write(self._folder.path, say)


def tiers(engine: Engine, config: Config) -> dict[str, dict[str, Any]]:
    """Return this rank's usage per tier, in forecast format: bytes, budget, allocations by name."""
    budgets = {tier: getattr(config.offload, key) for tier, key in TIERS.items()}
    budgets["pinned"] = budgets[HOST]
    usage: dict[str, dict[str, Any]] = {}
    resting = engine.resting
    # Host memory counts once, as pinned or as pageable, under the same budget.
    for where, name, num_bytes in engine.allocations:
        # States used by the host alone rest in pageable memory.
        if where == HOST and engine.pins and name not in resting:
            where = "pinned"
        of_tier = usage.setdefault(where, {"bytes": 0, "budget_bytes": budgets.get(where), "allocations": []})
        of_tier["bytes"] += num_bytes
        of_tier["allocations"].append({"name": name, "bytes": num_bytes})
    return usage


def describe_tiers(engine: Engine, config: Config, folder: Path) -> str:
    """Return the `tiers` result and the run folder as text."""
    usage = tiers(engine, config)
    texts = []
    for tier, each in usage.items():
        texts.append(f"{tier} {format_bytes(each['bytes'])}{describe_budget(usage, tier)}")
    descriptions = engine.told_updates, engine.told_frozen_weights, engine.told_links
    where = "".join(f"; {description}" for description in descriptions if description)
    text = f"tiers: between steps {', '.join(texts)}{where}; run folder: {folder}"
    if engine.told_tiles:
        text += f"\n{engine.told_tiles}."
    if config.offload.nvme_dir and DISK not in usage:
        text += "\nnote: offload.nvme_dir is set but unused: the tiers above have room for all states."
    return text


def describe_streaming(last: Mapping[str, Any], engine: Engine) -> list[str]:
    """Return lines about streaming for the end of a run. Empty: all states were on the device.

    `last`: fields from the last metrics.jsonl line. The host peak there also has copies for checkpoints and inputs of
    units; `engine` holds only the states now.
    """
    sizes = {key: format_bytes(value) for key, value in last.items() if key.endswith("_bytes")}
    has_disk = last.get("nvme_read_bytes", 0) > 0
    host_bytes = sum(num_bytes for where, _, num_bytes in engine.allocations if where == HOST)
    # Graphs on the host are a choice of the run, not states without room on the device.
    host_bytes -= last.get("graphs_on_host_bytes", 0)
    # With fewer states on the host than bytes on the device, the device could have held all states.
    if not last.get("d2h_bytes") or not (has_disk or host_bytes > last["peak_device_bytes"]):
        return []
    disk, states = "", f"{format_bytes(host_bytes)} of states on the host"
    if has_disk:
        disk, states = f", {sizes['nvme_read_bytes']} from disk", "the host and disk"
    return [
        f"streamed: from {states}, through a device that held {sizes['peak_device_bytes']}",
        f"moved: {sizes['h2d_bytes']} to the device and {sizes['d2h_bytes']} to the host{disk}, in the last step",
    ]


def describe_coarse(progress: RunProgress) -> list[str]:
    """Return a line about steps with coarse corrections. Empty: none."""
    text = (
        f"coarse: in {progress.num_coarse} of {progress.num_done} steps the gradients were clipped more than "
        f"{COARSE_RATIO:g} times harder than their first updates had assumed; the corrections of these steps are less "
        "exact than others. --train.clip deferred needs no corrections."
    )
    if not progress.num_coarse:
        return []
    return [text]


def step_fields(
    progress: RunProgress, num_tokens: int, result: StepResult, seconds: float, engine: Engine, config: Config
) -> dict[str, Any]:
    """Return the metrics.jsonl fields for the step after `progress`.

    num_tokens: without padding. seconds: whole step time. Unlike `result.seconds` it includes batch preparation and the
    passes before the first step; updates may continue into the next step.
    """
    counters = engine.counters
    fields: dict[str, Any] = {
        "step": progress.num_done + 1,
        "tokens": num_tokens,
        "tokens_seen": progress.num_tokens + num_tokens,
        "targets": result.tokens or 0,
        "loss": float(result.loss),
        "lr": engine.lr,
        "grad_norm": float(result.grad_norm),
        "tokens_per_second": num_tokens / max(seconds, 1e-9),  # a coarse clock may show no time
        "step_seconds": seconds,
        "h2d_bytes": counters.h2d_bytes,
        "d2h_bytes": counters.d2h_bytes,
        "nvme_read_bytes": counters.nvme_read_bytes,
        "nvme_write_bytes": counters.nvme_write_bytes,
        "lanes": {name: asdict(lane) for name, lane in result.lanes.items()},
        "peak_device_bytes": counters.peak_device_bytes,
        "peak_host_bytes": counters.peak_host_bytes,
        "peak_pinned_bytes": counters.peak_pinned_bytes,
    }
    if config.train.precision == "fp16":
        fields["loss_scale"] = result.loss_scale
    if engine.world_size > 1:
        fields |= {
            "all_gather_elements": counters.all_gather_elements,
            "reduce_scatter_elements": counters.reduce_scatter_elements,
            "network_bytes": counters.network_bytes,
        }
    if config.train.sequence_parallel > 1:
        fields["all_to_all_elements"] = counters.all_to_all_elements
    if counters.experts_fetched:
        fields["experts_fetched"] = counters.experts_fetched
    if engine.compiles:
        fields["compiled_graphs"] = engine.compiled_graphs
    if config.offload.graphs == "cpu":
        fields["graphs_on_host_bytes"] = engine.graphs_on_host_bytes
    if result.measured is not None:
        fields |= result.measured.fields()
    if config.train.clip != "deferred":
        fields |= {"corrected": result.corrected, "coarse": result.coarse}
    return fields
