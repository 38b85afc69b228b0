"""Runs over two machines against their own plans: step time, and bytes sent to the other machine. The machines are
network namespaces with a slow link between them (tests/cluster/network.py).

python -m benchmarks.machines > benchmarks/results/machines.json     # a quarter of an hour; as root, for `ip netns`

A run measures the network at the start and writes its plan. Bytes are counted by the engine, and by the interface: a
longer run minus a shorter one, frame headers included. All ranks share few cores here, but plans assume separate
machines. The link is so slow that this hardly matters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.extras.tools.benches.report import BenchmarkOutput, Result
from tests import forks
from tests.cluster.network import Network, network
from tests.cluster.test_disks import settings
from tests.cluster.test_machines import started
from tests.forks import MINUTES, ROOT

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
STEPS = (4, 16)
"""Steps of the short and the long run; the first steps are not timed."""
WARM_STEPS = 4
ZERO = ["--offload.replicas", "1"]
CASES: Mapping[str, tuple[int, Sequence[str]]] = {
    "replicas of one rank": (1, []),
    "replicas of two ranks, stage 3": (2, ["--offload.zero_stage", "3"]),
    "replicas of two ranks, stage 2": (2, ["--offload.zero_stage", "2"]),
    "replicas of two ranks, int8": (2, ["--offload.link_gradients", "int8"]),
    "replicas of two ranks that share states": (2, ["--offload.replica_states", "shared", "--offload.zero_stage", "3"]),
    "one copy over all, stage 2": (1, [*ZERO, "--offload.zero_stage", "2"]),
    "one copy over all, stage 3": (1, [*ZERO, "--offload.zero_stage", "3"]),
    "one copy over four ranks, stage 3": (2, [*ZERO, "--offload.zero_stage", "3"]),
}
"""Ranks on each machine, and the settings."""


def main() -> None:
    """Run, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link", default="50mbit", help="what a machine sends at most (default %(default)s)")
    parser.add_argument("--only", nargs="+", default=[""], help="cases in whose names one of these is")
    arguments = parser.parse_args()
    results, off = [], []
    for name, (ranks, words) in CASES.items():
        if not any(part in name for part in arguments.only):
            continue
        short, run = (trained(ranks, words, arguments.link, steps) for steps in STEPS)
        told, sent = run["plan"]["step_seconds"], (run["sent"] - short["sent"]) / (STEPS[1] - STEPS[0])
        planned = run["plan"]["network_bytes_per_step"]
        off.append(told / run["seconds"] - 1)
        details = {"seconds": run["seconds"], "bytes": round(sent), "lanes": run["plan"]["lane_seconds"]}
        results.append(Result(f"{name}: seconds told / taken", round(1 + off[-1], 3), "", details=details))
        results.append(Result(f"{name}: bytes told / counted", round(planned / (ranks * run["counted"]), 4), ""))
        results.append(Result(f"{name}: bytes told / of the interface", round(planned / sent, 4), ""))
        print(*results[-3:], sep="\n", flush=True)
    results.append(Result("seconds, off in the median", round(statistics.median(map(abs, off)), 3), ""))
    print(BenchmarkOutput(results).document())


def trained(ranks: int, words: Sequence[str], link: str, steps: int) -> dict[str, Any]:
    """Return the plan, the seconds and the sent bytes of a run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [*settings(folder, SHAPE), *words, "--train.steps", str(steps), "--run.dir", "run"]
        for number in range(2):  # so that a plan knows the compute rate
            env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            env["XDG_CACHE_HOME"] = str(folder / f"cache-{number}")
            told = forks.run(["-m", "offload.plan", *words], env=env, timeout=MINUTES)
            assert told.returncode == 0, told.stdout + told.stderr
        with network(folder, 2) as machines:
            machines.throttle(link)
            with started(machines, words, ranks=ranks) as agents:
                ended = [each.end(MINUTES) for each in agents]
                assert ended == [0, 0], [each.output for each in agents]
            sent = statistics.mean(sent_by(machines, number) for number in range(2))
        run = next(folder.glob("disk-*/metrics.jsonl")).parent
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        plan = json.loads((run / "plan.json").read_text())
    seconds = [line["step_seconds"] for line in lines[WARM_STEPS:]]
    counted = statistics.median(line["network_bytes"] for line in lines)
    return {"plan": plan, "seconds": statistics.median(seconds or [0]), "counted": counted, "sent": sent}


def sent_by(machines: Network, number: int) -> int:
    """Return the bytes sent by a machine, frame headers included."""
    told = subprocess.run(
        ["ip", "-n", machines.name(number), "-s", "-j", "link", "show", "eth0"], capture_output=True, check=True
    )
    return int(json.loads(told.stdout)[0]["stats64"]["tx"]["bytes"])


if __name__ == "__main__":
    main()
