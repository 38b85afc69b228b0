"""A MeZO step against two plain forward passes and the update, and against the ideal schedule on simulated links.

python -m benchmarks.zeroth_order > benchmarks/results/zeroth_order.json     # two minutes

`fits`: a model that stays on the device. Plain PyTorch runs it twice without gradients and updates the weights by the
same kernel. There are few tokens a step, with a sixth of the time in Python and in making directions, or as many tokens
as in ZO2. Both run in processes with an allocator that returns no pages; otherwise a random contender pays for new
pages in each step.

`streamed`: the throttle of each link makes the copies of a step take the time of both passes. The ideal step takes the
largest of passes, h2d and d2h, plus the first fetch. Contenders alternate in blocks of steps; a ratio is the median
over rounds of two times measured right after each other.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from offload import Engine, MeZO, Placement
from offload.extras.tools.benches.report import BenchmarkOutput, Result
from offload.extras.zeroth.directions import NoiseRange, descend, perturb
from offload.optim.rule import parameter_key
from tests.engine.inside import parts_of

LAYERS, WIDTH = 8, 256
FEW, MANY = (4, 64), (8, 256)
"""Rows and tokens of the small and the large batch."""
STEPS, ROUNDS = 2, 5
RULE = MeZO(lr=1e-6, eps=1e-3)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "vocab_size": 512}
    config = LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4, **sizes)
    return LlamaForCausalLM(config)


def make_batch(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    ids = torch.randint(512, shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


class Plain:
    """Two forwards and the update; or, as in the original MeZO, with weights perturbed before each forward."""

    def __init__(self, batch: dict[str, Any], perturbs: bool) -> None:
        self._model, self._batch, self._perturbs, self._step = make_model().train(), batch, perturbs, 0
        self._model.config.use_cache = False
        self._keys = [(p, parameter_key(name, 0)) for name, p in self._model.named_parameters()]
        self._own = [p.detach().clone() for p, _ in self._keys]
        self._sides = [[torch.empty_like(p) for p, _ in self._keys] for _ in range(2)]

    @torch.no_grad()
    def step(self) -> None:
        self._step += 1
        losses = []
        for side in range(2):
            for index, (p, key) in enumerate(self._keys if self._perturbs else ()):
                if not side:
                    both = (sides[index].view(-1) for sides in self._sides)
                    perturb(self._own[index].view(-1), *both, RULE.eps, NoiseRange(key, self._step))
                p.data = self._sides[side][index]
            losses.append(float(self._model(**self._batch).loss))
        slope = RULE.slopes([(losses[0], losses[1])])
        for own, (_, key) in zip(self._own, self._keys, strict=True):
            descend(own.view(-1), slope, NoiseRange(key, self._step), lr=RULE.lr)


def rounds(steps: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the step seconds of each contender, by round."""
    for step in steps.values():
        for _ in range(3):
            step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            begin = time.perf_counter()
            for _ in range(STEPS):
                step()
            taken[name].append((time.perf_counter() - begin) / STEPS)
    return taken


def result(name: str, taken: list[float], reference: str, others: list[float]) -> Result:
    ratio = statistics.median(a / b for a, b in zip(taken, others, strict=True))
    details = {"over_reference": ratio, "rounds_ms": [1e3 * each for each in taken]}
    return Result(name, 1e3 * statistics.median(taken), "ms a step", reference, 1 / ratio, details)


def engine(**settings: Any) -> Engine:
    return Engine(make_model(), RULE, **settings)


def fits(shape: tuple[int, int]) -> list[Result]:
    """Measure a model that fits."""
    torch.set_num_threads(1)
    batch, num_tokens = make_batch(shape), shape[0] * shape[1]
    own = engine(placement=Placement(parameters="device", optimizer="device"))
    passes, plain = Plain(batch, perturbs=False), Plain(batch, perturbs=True)
    taken = rounds({"own": lambda: own.step(batch), "passes": passes.step, "plain": plain.step})
    own.close()
    name = f"fits, {num_tokens} tokens a step"
    return [
        result(name, taken["own"], "two plain forwards and the update", taken["passes"]),
        result(f"{name}, as MeZO is written", taken["own"], "with perturbed weights", taken["plain"]),
    ]


def main() -> None:
    os.environ.update({"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)})
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        results = [each for found in processes.map(fits, (FEW, MANY)) for each in found]
    torch.set_num_threads(1)
    batch = make_batch(FEW)
    host = Placement(parameters="cpu", optimizer="cpu")
    free = engine(placement=host, throttle={"h2d": 10**15})
    alone = rounds({"free": lambda: free.step(batch)})["free"]
    regions = parts_of(free).regions
    moved = sum(region.weight_bytes for region in regions)
    free.close()
    for where in ("device", "cpu"):
        rate = moved / (0.9 * statistics.median(alone))
        links = {"h2d": rate, "d2h": rate} if where == "device" else {"h2d": rate}
        played = engine(placement=host, throttle=links, update=where)
        unplayed = engine(placement=host, throttle={"h2d": 10**15}, update=where)
        taken = rounds({"played": lambda e=played: e.step(batch), "free": lambda e=unplayed: e.step(batch)})
        first = max(region.weight_bytes for region in regions) / rate
        ideal = [max(each, moved / rate) + first for each in taken["free"]]
        results.append(result(f"streamed, updates on the {where}", taken["played"], "the ideal schedule", ideal))
        played.close()
        unplayed.close()
    print(BenchmarkOutput(results).document())
    for each in results:
        print(f"{each.name}: {each.details['over_reference']:.3f} of {each.reference}", file=sys.stderr)


if __name__ == "__main__":
    main()
