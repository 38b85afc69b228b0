"""Expected traffic for streamed experts in mixture-of-experts models."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain

from offload.engine.prepare import Structure
from offload.engine.units.find import UnitCandidate
from offload.errors import format_bytes
from offload.extras.plan.workload import Workload
from offload.layout.regions import Region
from offload.planning.memory import transient_gradient_bytes

_SURE = 0.99
"""Expert share treated as "all experts"."""


@dataclass(frozen=True)
class RoutedExperts:
    """Streamed experts in one block, merged for simulation.

    All fetched experts are treated as one transfer. The bytes are the same, and simulating thousands of records would
    take minutes.
    """

    hit: tuple[Region, ...]
    """Experts one micro-batch is expected to fetch, with like regions merged."""
    missed: tuple[Region, ...]
    """Experts updated without being fetched."""
    record_bytes: int
    """Bytes copied to the device per expert record."""

    @property
    def travelling_bytes(self) -> int:
        """Bytes copied to the device."""
        return sum(region.travelling_bytes for region in self.hit)

    @property
    def weight_bytes(self) -> int:
        """Fetched weight bytes in compute dtype."""
        return sum(region.weight_bytes for region in self.hit)

    def gradient_bytes(self, wide: bool = False) -> int:
        """Return the gradient bytes copied to the host. `wide` as in `transient_gradient_bytes`."""
        return sum(transient_gradient_bytes(region, wide) for region in self.hit)


def routed_experts(structure: Structure, workload: Workload) -> dict[str, RoutedExperts]:
    """Return the streamed experts by block name, split into fetched and unused experts.

    The expected number assumes a router with an even token distribution.
    """
    experts_by_block = {}
    plans = {unit.name: unit for unit in structure.units}
    for experts in (unit for unit in structure.candidates if unit.records):
        # The experts are a module inside of their block.
        block = next(u.name for u in structure.candidates if u.is_block and experts.name.startswith(f"{u.name}."))
        records = plans[experts.name].records
        # A record is missed if each token misses each of its experts.
        misses = _miss_probability(experts) ** (_tokens(workload) * _num_experts(experts) / len(records))
        num_hit = math.ceil(len(records) * (1 - misses))
        hit, missed = (
            tuple(_merge_regions(chain.from_iterable(records_part)))
            for records_part in (records[:num_hit], records[num_hit:])
        )
        experts_by_block[block] = RoutedExperts(hit, missed, sum(region.travelling_bytes for region in records[0]))
    return experts_by_block


def _merge_regions(regions: Iterable[Region]) -> Iterator[Region]:
    """Merge regions with equal properties. A merged region has the index of the first."""
    groups: dict[object, list[Region]] = {}
    for region in regions:
        key = region.compute, region.trainable, region.has_low, region.rule, region.codec, region.link
        groups.setdefault(key, []).append(region)
    for group in groups.values():
        begins = accumulate((region.numel for region in group), initial=0)
        yield replace(
            group[0],
            pieces=tuple(piece for region in group for piece in region.pieces),
            offsets=tuple(
                begin + offset for begin, region in zip(begins, group, strict=False) for offset in region.offsets
            ),
            numel=sum(region.numel for region in group),
        )


def describe_experts(structure: Structure, workload: Workload) -> str:
    """Describe the benefit from streamed experts. Empty without streamed experts."""
    experts = next((unit for unit in structure.candidates if unit.records), None)
    if experts is None:
        return ""
    plan = next(unit for unit in structure.units if unit.name == experts.name)
    layer_bytes, num_experts = sum(region.weight_bytes for region in plan.regions), _num_experts(experts)
    tokens, miss = round(_tokens(workload)), _miss_probability(experts)
    hit = num_experts * (1 - miss ** _tokens(workload))
    # The tokens n with 1 - miss^n = _SURE.
    min_tokens = math.ceil(math.log(1 - _SURE) / math.log(miss)) if miss else 1
    saves = "no bytes are saved" if tokens >= min_tokens else f"{1 - hit / num_experts:.0%} of their bytes are saved"
    return (
        f"experts are streamed: those of a layer ({format_bytes(layer_bytes)}) need not be on the device at once. For "
        f"{tokens} tokens in a micro-batch about {hit:.0f} of {num_experts} are copied to the device, so {saves}. "
        f"Streaming saves bytes below {min_tokens} tokens if the router spreads tokens evenly, and below several times "
        "as many if not."
    )


def _num_experts(experts: UnitCandidate) -> int:
    return sum(record[0].shape[0] for record in experts.records)


def _miss_probability(experts: UnitCandidate) -> float:
    """Return the probability for a token to skip a given expert.

    Reads `num_experts_per_tok` or `moe_topk` from the config, and assumes top-1 routing without these fields.
    """
    config = getattr(experts.module, "config", None)
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None) or 1
    return max(0.0, 1 - chosen / _num_experts(experts))


def _tokens(workload: Workload) -> float:
    """Return tokens per micro-batch."""
    return workload.num_tokens / workload.num_micro_batches
