"""Which of a mixture's experts a step brings up, where they are streamed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from offload.engine.assemble import Structure
from offload.engine.units.find import Candidate
from offload.errors import format_bytes
from offload.forecast.workload import Workload
from offload.layout.regions import Region
from offload.planning.memory import transient_gradient_bytes

_SURE = 0.99
"""The share of experts that count as all."""


@dataclass(frozen=True)
class RoutedExperts:
    """The streamed experts of one block, as a step is played: all that come up as if they did so together, since what
    moves is the same, and thousands of records would take minutes.
    """

    hit: tuple[Region, ...]
    """What a micro-batch is likely to bring up, in a region of those that are alike."""
    missed: tuple[Region, ...]
    """What is updated alone."""
    record_bytes: int
    """Bytes of a record that come up."""

    @property
    def travelling_bytes(self) -> int:
        """Bytes that come up."""
        return sum(region.travelling_bytes for region in self.hit)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that come up, as they are used."""
        return sum(region.weight_bytes for region in self.hit)

    def gradient_bytes(self, wide: bool = False) -> int:
        """Bytes of the gradients that come down; `wide`: as of `transient_gradient_bytes`."""
        return sum(transient_gradient_bytes(region, wide) for region in self.hit)


def routed_experts(structure: Structure, workload: Workload) -> dict[str, RoutedExperts]:
    """Return the streamed experts of each block by its name, and how many of them a micro-batch is likely to need: as
    many as with a router that spreads tokens evenly.
    """
    found = {}
    plans = {unit.name: unit for unit in structure.units}
    for experts in (unit for unit in structure.candidates if unit.records):
        block = next(u.name for u in structure.candidates if u.is_block and experts.name.startswith(f"{u.name}."))
        records = plans[experts.name].records
        misses = _miss(experts) ** (_tokens(workload) * _num_experts(experts) / len(records))
        num_hit = math.ceil(len(records) * (1 - misses))
        hit, missed = (tuple(_merged(chain.from_iterable(its))) for its in (records[:num_hit], records[num_hit:]))
        found[block] = RoutedExperts(hit, missed, sum(region.travelling_bytes for region in records[0]))
    return found


def _merged(regions: Iterable[Region]) -> Iterator[Region]:
    """Yield one region for all that are alike, which has the number of the first."""
    alike: dict[object, list[Region]] = {}
    for region in regions:
        key = region.compute, region.trainable, region.has_low, region.rule, region.link
        alike.setdefault(key, []).append(region)
    for its in alike.values():
        begins = accumulate((region.numel for region in its), initial=0)
        yield replace(
            its[0],
            pieces=tuple(piece for region in its for piece in region.pieces),
            offsets=tuple(
                begin + offset for begin, region in zip(begins, its, strict=False) for offset in region.offsets
            ),
            numel=sum(region.numel for region in its),
        )


def told_experts(structure: Structure, workload: Workload) -> list[str]:
    """Say, for people, what streamed experts buy; nothing where there are none."""
    experts = next((unit for unit in structure.candidates if unit.records), None)
    if experts is None:
        return []
    plan = next(unit for unit in structure.units if unit.name == experts.name)
    layer_bytes, num_experts = sum(region.weight_bytes for region in plan.regions), _num_experts(experts)
    tokens, hit = round(_tokens(workload)), num_experts * (1 - _miss(experts) ** _tokens(workload))
    border = math.ceil(math.log(1 - _SURE) / math.log(_miss(experts))) if _miss(experts) else 1
    saves = "no bytes are saved" if tokens >= border else f"{1 - hit / num_experts:.0%} of their bytes are saved"
    told = (
        f"experts are streamed: those of a layer ({format_bytes(layer_bytes)}) need not be on the device at once. For "
        f"{tokens} tokens a micro-batch about {hit:.0f} of {num_experts} come up, so that {saves}; they are from below "
        f"{border} tokens where a router spreads them evenly, and from below several times as many where it does not."
    )
    return [told]


def _num_experts(experts: Candidate) -> int:
    first = experts.records[0][0].parameter
    return sum(piece.parameter == first for record in experts.records for piece in record)


def _miss(experts: Candidate) -> float:
    """Return the probability that a token is not routed to an expert, as far as the configuration tells it."""
    config = getattr(experts.module, "config", None)
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None) or 1
    return max(0.0, 1 - chosen / _num_experts(experts))


def _tokens(workload: Workload) -> float:
    """Return the tokens of a micro-batch."""
    return workload.num_tokens / workload.num_micro_batches
