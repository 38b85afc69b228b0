"""What a training step takes, played before it is made: the engine's own schedule over lanes in counted time.

An `Executor`, the engine's own, brings weights up ahead of compute and thinks that it does so in the engine's slots.
Its fetches, the landings, updates and activations are submitted as the engine submits them, in the same order, behind
the same fences, and each takes what its bytes take on its link. So nothing here says how lanes overlap: that follows.

What is not played: random delays, evaluations, checkpoints, and steps of own loops that add several backwards up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.schedule.play import Call, Engine, Play
from offload.schedule.play_backward import PlayBackward
from offload.schedule.play_forwards import PlayForwards
from offload.schedule.virtual_states import Seconds

_NUM_STEPS, _NUM_WARM = 6, 3
"""Played, and of these not counted. The first one fetches on demand; then what a step leaves on the device may differ
from step to step for a while.
"""


@dataclass(frozen=True)
class Simulated:
    """A steady step: its seconds; of each link, and of compute, the busy ones; how long compute had nothing to do for
    each link; bytes written to disk.
    """

    seconds: float
    busy_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    nvme_written_bytes: float


def simulate(
    calls: Sequence[Call], engine: Engine, seconds: Mapping[str, Seconds], num_steps: int = _NUM_STEPS
) -> Simulated:
    """Play steps of these calls and return the steady one: the mean of the later half.

    seconds: what bytes take, by link: "h2d", "d2h", "update", "nvme_read", "nvme_write", "collective" (given this
    rank's own bytes of what all exchange); "update_on_device", and "here" for what compute does with states itself.
    """
    kind: type[Play] = PlayBackward if engine.has_backward else PlayForwards
    play = kind(calls, engine, seconds)
    warm = min(_NUM_WARM, num_steps - 1)
    for _ in range(warm):
        play.step()
    before = play.state()
    for _ in range(num_steps - warm):
        play.step()
    after, count = play.state(), num_steps - warm
    mean = [{name: (b[name] - a.get(name, 0.0)) / count for name in b} for a, b in zip(before, after, strict=True)]
    return Simulated(mean[0]["now"], mean[1], mean[2], mean[0]["written"])
