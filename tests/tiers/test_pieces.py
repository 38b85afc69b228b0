"""A parameter cut into pieces over several units: results do not depend on the cuts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from offload.lanes.lanes import Lanes
from offload.layout.build_regions import build_regions
from offload.layout.regions import ParameterInfo, Piece
from offload.optim.adamw import AdamW
from offload.optim.update import UpdateSettings, update_tile
from offload.tiers.counters import Ledger
from offload.tiers.device import CpuDevice
from offload.tiers.store import Store

SHAPE = (6, 8, 48)
EXPERT = 8 * 48


class Stack:
    """Store with one stacked parameter. `rows`: row ranges per unit, within 0 to 5."""

    def __init__(self, rows: Sequence[Sequence[tuple[int, int]]], rule: AdamW, precision: str) -> None:
        self.infos = [ParameterInfo(0, "experts", SHAPE, True, precision, bf16_source=False)]
        units = {
            f"unit {number}": [Piece(0, begin * EXPERT, (end - begin, *SHAPE[1:])) for begin, end in its]
            for number, its in enumerate(rows)
        }
        self.rule = rule
        regions = build_regions(self.infos, units, [rule.moments])
        lanes = Lanes(overlap=False, throttle={})
        device, host = CpuDevice(Ledger("device", None), False), Ledger("cpu")
        self.store = Store(regions, self.infos, device=device, host=host, lanes=lanes)
        self.values = self.store.values

    def update(self, gradient: torch.Tensor) -> None:
        """Run one update with gradients for all pieces."""
        for state in self.store.states.values():
            flat = torch.zeros(state.region.numel)
            for position, piece in enumerate(state.region.pieces):
                flat[state.span(position)] = gradient.view(-1)[piece.begin : piece.end]
            touched = [True] * len(state.region.pieces)
            for tile in state.tiles:
                planes = {**tile.planes, "gradients": flat[tile.begin : tile.end]}
                update_tile(state, tile, planes, touched, UpdateSettings([self.rule], self.infos, 0.01, seed=3), 1.0)
            state.count(touched)


WHOLE = [[(0, 6)]]
CUT = [[(4, 6), (0, 1)], [(1, 2)], [(2, 4)]]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_parameter_in_pieces_is_written_and_read_as_a_whole_one(precision: str) -> None:
    torch.manual_seed(0)  # without ties: split weights round them away from zero, torch to even
    value = torch.randn(SHAPE)
    stack = Stack(CUT, AdamW(), precision)
    stack.values.write(0, lambda begin, end: value.view(-1)[begin:end], value.dtype)
    assert torch.equal(stack.values.read(0), value)
    for begin, end in ((0, 6 * EXPERT), (EXPERT - 3, EXPERT + 5), (4 * EXPERT, 4 * EXPERT), (7, 5 * EXPERT + 1)):
        assert torch.equal(stack.values.read_range(0, begin, end), value.view(-1)[begin:end])
    assert torch.equal(stack.values.read_local(0), value if precision == "fp32" else value.bfloat16())


@pytest.mark.parametrize(
    ("rule", "precision"),
    [(AdamW(), "fp32"), (AdamW(), "bf16"), (AdamW(states="bf16"), "bf16"), (AdamW(states="int8"), "bf16")],
    ids=["fp32", "split", "bf16 states", "int8 states"],
)
def test_updates_have_the_same_bits_wherever_a_parameter_is_cut(rule: AdamW, precision: str) -> None:
    """Includes rules that draw random numbers (bf16 states): draws depend on the element index in the parameter."""
    value, found = torch.randn(SHAPE), []
    for rows in (WHOLE, CUT):
        stack = Stack(rows, rule, precision)
        stack.values.write(0, lambda begin, end: value.view(-1)[begin:end], value.dtype)
        noise = torch.Generator().manual_seed(1)
        for _ in range(3):
            stack.update(torch.randn(SHAPE, generator=noise))
        found.append(stack.values.read(0))
    assert torch.equal(*found)
    assert not torch.equal(found[0], value)
