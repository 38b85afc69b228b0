"""Suggest changes to make a run faster or smaller, from its step figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.app.config.rules import RULE_SETTINGS
from offload.errors import format_bytes, ratio
from offload.extras.tools.reporting.figures import COMPUTE, Binding, Figures, LaneShare
from offload.extras.tools.reporting.run_record import RunRecord, number, seconds_text
from offload.lanes.timeline import DISK_LANES

_WORTH = 0.02  # share of a step: shorter waits are not worth a change
_FULL = 0.9  # share of a step: a lane busier than this cannot start earlier
_ROOM = 0.75  # share of a budget: a lower peak leaves room
_ALTERNATIVES = 3
_FAR_SLOWER = 2.0  # times the planned step: beyond normal plan error


@dataclass(frozen=True)
class Advice:
    """One suggested change."""

    change: str
    """A `train` flag, or a sentence if no flag applies."""
    why: str
    saves_s: float | None = None
    """Maximum savings per step, in seconds; None: unknown."""


def advise(run: RunRecord, figures: Figures) -> tuple[Advice, ...]:
    """Return the suggestions, largest savings first."""
    advice: list[Advice] = []
    binding = figures.binding
    if binding is not None:
        advice = _lanes(run, binding)
        if binding.is_serial:
            advice = _serial(binding)
        if binding.outside_s >= _WORTH * binding.step_s:
            why = f"{_of(binding.outside_s, binding)} is spent outside the engine: making batches, writing records"
            advice.append(Advice("Larger steps (--train.batch_size)", why, binding.outside_s))
        # Only where nothing else waits: a faster compute would otherwise wait as well.
        if not advice and binding.lane == COMPUTE:
            advice.append(_computes(run, binding))
    return (*_slower_than_planned(figures), *advice, *_memory(run, figures, advice), *_planned(figures))


def _slower_than_planned(figures: Figures) -> list[Advice]:
    """Return a warning if steps take far longer than planned, since no setting explains the difference."""
    planned = number(figures.planned, "step_seconds")
    if planned is None or figures.binding is None or figures.binding.step_s < _FAR_SLOWER * planned:
        return []
    measured = figures.binding.step_s
    return [
        Advice(
            "Stop other work on this machine during training",
            f"a step takes {ratio(measured / planned)} times as long as planned ({seconds_text(measured)}, plan "
            f"{seconds_text(planned)}): other processes used the processor, the link or the disk, or the plan is wrong",
            measured - planned,
        )
    ]


def _of(seconds: float, binding: Binding) -> str:
    return f"{seconds_text(seconds)} of a step of {seconds_text(binding.step_s)} ({seconds / binding.step_s:.0%})"


def _serial(binding: Binding) -> list[Advice]:
    lanes = sum(each.exposed_s for each in binding.lanes)
    if lanes < _WORTH * binding.step_s:
        return []
    why = (
        f"on a CPU one thread does all work in turn, and {_of(lanes, binding)} is copies and updates; with a GPU "
        "these run beside compute"
    )
    return [Advice("A machine with a GPU", why, lanes)]


def _computes(run: RunRecord, binding: Binding) -> Advice:
    why = f"compute works for {binding.limit_s / binding.step_s:.0%} of a step"
    # On a CPU, products in bf16 are often slower than in fp32.
    if run.setting("train.precision") == "fp32" and (run.env.get("gpus") or []):
        return Advice("--train.precision bf16", f"{why}; it computes in fp32")
    if run.setting("train.recompute") == "always" and not run.is_decided("train.recompute"):
        return Advice(
            "--train.recompute auto", f"{why}; activations are recomputed, even those that would fit in memory"
        )
    return Advice("No offload setting helps: compute is the limit", why)


def _lanes(run: RunRecord, binding: Binding) -> list[Advice]:
    """Return suggestions for lanes compute waits for, one per remedy."""
    waits: dict[str, list[LaneShare]] = {}
    for lane in binding.lanes:
        if lane.exposed_s >= _WORTH * binding.step_s:
            # By remedy: one change often helps two lanes, and is one suggestion.
            waits.setdefault(_remedy(run, lane, binding), []).append(lane)
    advice = []
    for change, lanes in waits.items():
        exposed = sum(each.exposed_s for each in lanes)
        busy = ", ".join(f"{each.name} (busy for {each.busy_s / binding.step_s:.0%} of it)" for each in lanes)
        advice.append(Advice(change, f"compute waits {_of(exposed, binding)} for {busy}", exposed))
    return sorted(advice, key=lambda each: -(each.saves_s or 0.0))


def _remedy(run: RunRecord, lane: LaneShare, binding: Binding) -> str:
    """Return a remedy to start a lane earlier or, for a lane busy almost all the time, to reduce its work."""
    remedies = []
    if lane.name in ("h2d", "d2h"):
        if run.setting("offload.device_memory") is not None and lane.busy_s < _FULL * binding.step_s:
            remedies.append("More --offload.device_memory: more weights stay on the device, others are fetched earlier")
    elif lane.name == "update":
        waits = run.setting("train.clip") == "deferred" and run.setting("train.max_grad_norm") is not None
        if waits and not run.is_decided("train.clip"):
            remedies.append("--train.clip speculative: updates begin in the backward")
        rule = RULE_SETTINGS.get(str(run.setting("optimizer.name")))
        # A rule without the setting has no moments to shrink.
        if rule is not None and "states" in rule.keys and run.setting("optimizer.states") == "fp32":
            remedies.append("--optimizer.states bf16: fewer bytes to read and write")
    elif lane.name in DISK_LANES:
        remedies.append("More --offload.host_memory: fewer states on disk")
        remedies.append("folders on more disks in --offload.nvme_dir")
    elif lane.name == "collective" and not run.is_decided("offload.zero_stage"):
        remedies.append("A lower --offload.zero_stage, if memory holds it")
    remedies.append("more tokens a step (--train.batch_size) over the same bytes")
    text = "; or ".join(remedies)
    return text[0].upper() + text[1:]


def _memory(run: RunRecord, figures: Figures, others: Sequence[Advice]) -> list[Advice]:
    """Return budgets with unused room, except budgets other advice wants to raise."""
    advice = []
    for tier in figures.tiers:
        key = {"device": "offload.device_memory", "cpu": "offload.host_memory"}.get(tier.name)
        if key is None or run.setting(key) is None or any(f"More --{key}" in each.change for each in others):
            continue
        if tier.budget_bytes and tier.peak_bytes and tier.peak_bytes < _ROOM * tier.budget_bytes:
            used = f"the peak on {tier.name} is {format_bytes(tier.peak_bytes)} of {format_bytes(tier.budget_bytes)}"
            # The host budget is for all ranks of a machine, and a peak is of one.
            num_sharing = int(number(run.env, "world_size") or 1)
            rows = ""
            if tier.name == "device":
                num_sharing = 1
                rows = "; or use the rest for more rows in a micro-batch"
            # Without the space, as a word of a command.
            enough = format_bytes(1.05 * tier.peak_bytes * num_sharing).replace(" ", "")
            advice.append(Advice(f"--{key} {enough} would be enough{rows}", used))
    return advice


def _planned(figures: Figures) -> list[Advice]:
    """Return the planned alternatives faster than the current plan."""
    listed = figures.planned.get("alternatives")
    now = number(figures.planned, "step_seconds")
    if not isinstance(listed, list):
        return []
    advice = []
    for each in listed:
        seconds = number(each, "step_seconds")
        if seconds is None or not each.get("fits") or (now is not None and seconds > (1 - _WORTH) * now):
            continue
        why = f"the plan predicts {seconds_text(seconds)} a step"
        saves_s = None
        if now is not None:
            why += f" instead of {seconds_text(now)}"
            saves_s = now - seconds
        advice.append(Advice(str(each.get("change")), why, saves_s))
    return sorted(advice, key=lambda each: -(each.saves_s or 0.0))[:_ALTERNATIVES]
