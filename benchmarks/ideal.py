"""The reference for overlap: an ideal list schedule of training steps over measured times, with lanes without overhead.

This module knows nothing of the engine. Each of four lanes (compute, h2d, d2h, update) does one operation at a time,
and starts each operation as soon as the rules permit:

- A use needs its unit on the device. A fetch needs room from the start. Other units are evicted in Belady's order (the
  latest next use first), but never a unit needed earlier than the fetched one. Weights are dead after the unit's
  backward, and the next fetch waits for the update.
- A backward needs a gradient buffer from the start until the gradient's D2H copy ends. Gradients are copied in order.
- An update needs its gradient on the host. In mode `deferred`, and for a correction, the update also needs the last
  gradient of the step, for the norm. In mode `speculative` a unit is fetched again only after the decision on its
  correction.
- A step ends with one host wait: the last gradient arrives before the compute of the next step. Fetches and updates
  continue across this border.

Greedy schedules have anomalies (Graham 1969, "Bounds on multiprocessing timing anomalies"), so `ideal` takes the best
of several.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

LANES = ("compute", "d2h", "update", "h2d")
MODES = ("none", "deferred", "speculative")


@dataclass(frozen=True)
class Unit:
    """Time to move and update a unit. `size` is the share of the capacity: bytes, or 1 for a slot."""

    size: float
    fetch_s: float = 0.0
    land_s: float = 0.0
    update_s: float = 0.0
    correct_s: float = 0.0


@dataclass(frozen=True)
class Use:
    """A compute span; `unit` is None for compute without a unit, such as the loss."""

    seconds: float
    unit: str | None = None
    is_backward: bool = False


@dataclass(frozen=True)
class Work:
    """A training step: the uses in order, the units, and the device capacity (in the unit of `Unit.size`). The last use
    of a unit is its one backward.

    `num_corrected` is for mode `speculative`: the number of corrections. The earliest updates before the norm are
    corrected.
    """

    uses: Sequence[Use]
    units: Mapping[str, Unit]
    capacity: float
    mode: str = "none"
    num_gradient_buffers: int = 2
    num_corrected: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}; it must be one of {', '.join(MODES)}.")
        if self.num_gradient_buffers < 1:
            raise ValueError(f"num_gradient_buffers is {self.num_gradient_buffers}; a backward needs at least one.")
        for name, unit in self.units.items():
            backward = [self.uses[place].is_backward for place in self.places[name]]
            if backward[-1:] != [True] or sum(backward) != 1:
                raise ValueError(f"{name} must have one backward in a step, as its last use.")
            if unit.size > self.capacity:
                raise ValueError(f"{name} takes {unit.size} of a capacity of {self.capacity}.")

    @cached_property
    def places(self) -> dict[str, list[int]]:
        """Positions of each unit in `uses`."""
        return {name: [i for i, use in enumerate(self.uses) if use.unit == name] for name in self.units}


@dataclass(frozen=True)
class Policy:
    """The parameters of a greedy schedule.

    lookahead: number of further units to fetch after the current one. skips: when to fetch a later unit while an
    earlier one waits for its update: never, late (after the step's last gradient) or always. updates: order before the
    last gradient: by arrival, by need (the order of the next step), or none (late). After the last gradient: by need.
    """

    lookahead: int
    skips: str = "never"
    updates: str = "landed"


@dataclass(frozen=True)
class Span:
    """One operation (forward, backward, fetch, land, update, correct), in seconds since the start of the first step."""

    lane: str
    action: str
    unit: str | None
    step: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Ideal:
    """Seconds of a step, and busy seconds of each lane. `spans` has all simulated steps."""

    seconds: float
    busy_s: dict[str, float]
    policy: Policy
    spans: list[Span] = field(repr=False)


def ideal(work: Work, num_steps: int = 12, *, as_block: bool = False) -> Ideal:
    """Return the fastest greedy schedule over all lookaheads within the capacity: the steady state, or with `as_block`
    the result of `simulate_block`.
    """
    run = simulate_block if as_block else simulate
    sizes = itertools.accumulate(sorted(unit.size for unit in work.units.values()))
    most = max(1, sum(size <= work.capacity for size in sizes) - 1)
    skips = ("never", "late", "always") if work.mode == "none" else ("never", "always")
    updates = {"none": ("landed", "need", "late"), "deferred": ("late",), "speculative": ("landed", "need")}[work.mode]
    policies = itertools.product(range(1, most + 1), skips, updates)
    return min((run(work, Policy(*choice), num_steps) for choice in policies), key=lambda run: run.seconds)


def simulate(work: Work, policy: Policy, num_steps: int = 12) -> Ideal:
    """Run `num_steps` steps under one policy; the steady state is the mean of the second half."""
    spans = _Run(work, policy).until(num_steps)
    starts = {span.step: span.begin_s for span in reversed(spans) if span.lane == "compute"}
    num_counted = num_steps // 2
    return _mean(spans, starts[num_steps - num_counted], starts[num_steps], num_counted, policy)


def simulate_block(work: Work, policy: Policy, num_steps: int) -> Ideal:
    """Run `num_steps` steps under one policy. The block starts with all possible work done in advance, and ends when no
    work is left after the last step and before the next.
    """
    run = _Run(work, policy)
    return _mean(run.spans, run.settle(0), run.settle(num_steps), num_steps, policy)


def _mean(spans: list[Span], begin_s: float, end_s: float, num_steps: int, policy: Policy) -> Ideal:
    busy = dict.fromkeys(LANES, 0.0)
    for span in spans:
        busy[span.lane] += max(0.0, min(span.end_s, end_s) - max(span.begin_s, begin_s)) / num_steps
    return Ideal((end_s - begin_s) / num_steps, busy, policy, spans)


Content = tuple[str, int]  # a unit in one step: its weights or its gradient
Started = tuple[str, tuple[str | None, int], float]  # action, content, seconds


class _Run:
    """The state of a simulation."""

    def __init__(self, work: Work, policy: Policy) -> None:
        self.work, self.policy = work, policy
        self.now_s = 0.0
        self.spans: list[Span] = []
        self.stop: float = math.inf  # the first step whose compute must not begin
        self.position = 0  # position of the first unfinished use, over all steps
        self.running: dict[str, Span] = {}  # by lane
        self.held: set[Content] = set()  # weights on the device
        self.leaving: deque[Content] = deque()  # gradients before their D2H copy
        self.num_landed: Counter[int] = Counter()  # by step
        self.landed: list[Content] = []  # gradients before their update
        self.early: list[Content] = []  # updates of this step before the norm was known, in order
        self.updated: set[Content] = set()
        self.owing: list[Content] = []  # corrections to do
        self.effects: dict[str, Callable[[Content], None]] = {
            "fetch": self.held.add,
            "backward": self.leaving.append,
            "land": self.landed.append,
            "update": self.updated.add,
            "correct": self.owing.remove,
        }

    def until(self, step: int) -> list[Span]:
        """Run until the compute of `step` begins."""
        self._start()
        while "compute" not in self.running or self.running["compute"].step != step:
            assert self.running, "nothing runs and nothing may start"
            self._advance()
            self._start()
        return self.spans

    def settle(self, step: int) -> float:
        """Do all work that is allowed before the compute of `step`; return the end time."""
        self.stop = step
        self._start()
        while self.running:
            self._advance()
            self._start()
        assert self.position == step * len(self.work.uses), "nothing runs and nothing may start"
        return self.now_s

    def _start(self) -> None:
        for lane, start in zip(LANES, (self._compute, self._land, self._update, self._fetch), strict=True):
            if lane not in self.running and (started := start()):
                action, content, seconds = started
                self.running[lane] = Span(lane, action, *content, self.now_s, self.now_s + seconds)
                self.spans.append(self.running[lane])

    def _advance(self) -> None:
        self.now_s = min(span.end_s for span in self.running.values())
        for span in [span for span in self.running.values() if span.end_s <= self.now_s]:
            del self.running[span.lane]
            self._end(span)

    def _compute(self) -> Started | None:
        step, place = divmod(self.position, len(self.work.uses))
        use = self.work.uses[place]
        num_waiting = len(self.leaving) + ("d2h" in self.running)
        if (
            step >= self.stop
            or (place == 0 and step > 0 and not self._norm_is_known(step - 1))
            or (use.unit is not None and (use.unit, step) not in self.held)
            or (use.is_backward and num_waiting == self.work.num_gradient_buffers)
        ):
            return None
        return "backward" if use.is_backward else "forward", (use.unit, step), use.seconds

    def _land(self) -> Started | None:
        content = self.leaving.popleft() if self.leaving else None
        return ("land", content, self.work.units[content[0]].land_s) if content else None

    def _update(self) -> Started | None:
        is_late = self.work.mode == "deferred" or self.policy.updates == "late"
        owing = [c for c in self.owing if c in self.updated]
        ready = owing + [c for c in self.landed if not is_late or self._norm_is_known(c[1])]
        if not ready:
            return None
        if self.policy.updates == "need" or self._norm_is_known(ready[0][1]):
            ready.sort(key=lambda content: self.work.places[content[0]][0])
        content = ready[0]
        unit = self.work.units[content[0]]
        if content in owing:
            return "correct", content, unit.correct_s
        self.landed.remove(content)
        if self.work.mode == "speculative" and not self._norm_is_known(content[1]):
            self.early.append(content)
        return "update", content, unit.update_s

    def _fetch(self) -> Started | None:
        seen: dict[str, int] = {}
        for position in range(self.position, self.position + len(self.work.uses)):
            step, place = divmod(position, len(self.work.uses))
            name = self.work.uses[place].unit
            if name is None or seen.get(name) == step:
                continue
            seen[name] = step
            if len(seen) > self.policy.lookahead + 1:
                break
            if (name, step) in self.held:
                continue
            unit = self.work.units[name]
            if step == 0 or self._is_final((name, step - 1)):
                return ("fetch", (name, step), unit.fetch_s) if self._make_room(unit.size, position) else None
            if self.policy.skips == "never" or (self.policy.skips == "late" and not self._norm_is_known(step - 1)):
                break
        return None

    def _make_room(self, size: float, position: int) -> bool:
        """Evict units with the latest next use after `position`, until `size` fits; evict none where it cannot fit."""
        free = self.work.capacity - math.fsum(self.work.units[name].size for name, _ in self.held)
        evicted = []
        for needed, content in sorted(((self._next_use(c), c) for c in self.held), reverse=True):
            if free >= size or needed <= position:
                break
            evicted.append(content)
            free += self.work.units[content[0]].size
        if free >= size:
            self.held.difference_update(evicted)
        return free >= size

    def _next_use(self, content: Content) -> float:
        """Return the next use of the weights: now for weights in use, infinity for dead weights."""
        start = content[1] * len(self.work.uses)
        return next((start + at for at in self.work.places[content[0]] if start + at >= self.position), math.inf)

    def _norm_is_known(self, step: int) -> bool:
        return self.num_landed[step] == len(self.work.units)

    def _is_final(self, content: Content) -> bool:
        """True for final weights of the next step: updated, and corrected where needed."""
        is_sure = self.work.mode != "speculative" or self._norm_is_known(content[1])
        return is_sure and content in self.updated and content not in self.owing

    def _end(self, span: Span) -> None:
        self.position += span.lane == "compute"
        if span.unit is None or span.action == "forward":
            return
        content = (span.unit, span.step)
        self.effects[span.action](content)
        if span.action == "land":
            self.num_landed[span.step] += 1
            if self._norm_is_known(span.step):
                self.owing[:], self.early = self.early[: self.work.num_corrected], []
