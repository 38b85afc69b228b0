"""Dispatched blocks: one rank computes a block for the rows of all ranks, with the bits of ZeRO's stages.

"Break:" in a docstring names the code mutations the test must detect.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import LOMO, AdamW
from offload.distributed.joining import open_comm
from offload.errors import ConfigError, OffloadError
from offload.lanes.ticket import Ticket
from offload.layout.regions import Region
from offload.planning.settings import Settings
from offload.tiers.slots import Slots
from tests.cases.models import gpt2, share, wide_llama
from tests.cases.run import small
from tests.engine.handmade import TiedBlocks, UsedTwice
from tests.engine.inside import leave_spare_memory
from tests.engine.ranks import run
from tests.engine.ranks_child import CASES, JOB, WITHIN, Found, frozen_llama, odd_llama, opened, trained
from tests.engine.test_overlap import SLOW
from tests.engine.test_ranks import MODES, assert_equal, assert_near, plain, settings_of, train
from tests.engine.test_ranks_faults import after_a_kill
from tests.engine.test_ranks_saving import read_all, save

DISPATCH: dict[str, Any] = {"dispatch": "always", "zero_stage": 2}


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: Any = odd_llama()
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian"))


def both(size: int, **common: Any) -> tuple[Found, Found]:
    """Train on `size` ranks with gathers and with dispatch."""
    common = {"zero_stage": 2, "num_steps": 3, **common}
    gathered, dispatched = train(size, common, common | {"dispatch": "always"})
    return gathered, dispatched


# -- bits --------------------------------------------------------------------------------------------------------------

HOW: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (2, {"rows": (2, 2), "evaluate": 1}),
    "three ranks, more than the blocks": (3, {"rows": (1, 4, 2)} | MODES["speculative"]),
    "four ranks": (4, {"rows": (1, 1, 2, 1), "make": partial(odd_llama, num_hidden_layers=5), "precision": "bf16"}),
    "tied weights": (2, {"case": "tied", "rows": (2, 1)}),
    "experts": (2, {"case": "experts", "rows": (2, 2)}),
    "dropout": (2, {"rows": (2, 2), "make": partial(gpt2, n_layer=3), "optimizer": AdamW(lr=0.05)}),
    "an adapter": (2, {"rows": (2, 2), "make": adapted, "optimizer": AdamW(lr=0.05)}),
    "two dtypes": (2, {"case": "two dtypes", "rows": (2, 2)}),
    "slow links, any order": (2, {"rows": (2, 2), "throttle": SLOW, "delays": 1} | MODES["no clipping"]),
    "stage 1": (2, {"rows": (2, 2), "zero_stage": 1, "throttle": SLOW} | MODES["speculative"]),
    "states on nvme": (
        2,
        {
            "rows": (2, 2),
            "placement": dict.fromkeys(("parameters", "optimizer", "gradients", "activations"), "nvme"),
            "throttle": SLOW,
        },
    ),
    "graphs": (2, {"rows": (2, 2), "recompute": "auto", "placement": {"graphs": "cpu"}, "throttle": SLOW}),
    "products": (2, {"rows": (2, 2), "recompute": "products"}),
    "late updates": (2, {"rows": (2, 2), "delay": 1}),
    "two passes": (2, {"rows": (4, 2), "passes": 2}),
    "a norm in its own pass": (
        2,
        {"rows": (2, 2), "optimizer": LOMO(lr=0.05), "max_grad_norm": 0.2},
    ),
    "weights in int8": (2, {"make": wide_llama, "precision": "bf16", "rows": (2, 2), "link_weights": "int8"}),
}
QUICK = ("dropout",)


SLOWER = [pytest.param(name, marks=pytest.mark.slow) for name in HOW if name not in QUICK]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *SLOWER])
def test_bits_are_those_of_gathers(name: str, tmp_path: Path) -> None:
    """Break: serve the ranks in another order; draw random numbers of the owner; send gradients before the last rank's
    rows; record no use of the blocks of other ranks; keep the owners of the last step.
    """
    size, how = HOW[name]
    if name == "an adapter":
        pytest.importorskip("peft")
    gathered, dispatched = both(size, **{"case": "plain", "folder": str(tmp_path)} | how)
    assert_equal(dispatched, gathered)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_weights_are_those_of_one_process_with_as_many_micro_batches(size: int) -> None:
    """The owner adds the rows of the ranks as one process adds micro-batches. Losses are summed over ranks in another
    order.

    Break: add the gradients in bf16.
    """
    common: dict[str, Any] = {"case": "plain", "num_steps": 3, **MODES["deferred"]}
    many = run(size, trained, runs=[{**common, **DISPATCH, "rows": (1,) * size}])[0][0]
    one = run(1, trained, runs=[{**common, "rows": (size,), "micro_batch_size": 1}])[0][0]
    assert_near(many, one, 1e-6)
    assert all(torch.equal(many.weights[name], value) for name, value in one.weights.items())


def test_micro_batches_and_uneven_rows_are_near_plain_pytorch() -> None:
    """Rank 0 has three micro-batches, rank 1 has one.

    Break: cut the rows of another rank like the own rows.
    """
    common = {"case": "plain", "rows": (3, 1), "num_steps": 3, "evaluate": 1}
    (found,) = train(2, common | DISPATCH | settings_of("micro-batches", "deferred"))
    assert_near(found, plain("plain", 4, 3, "deferred"), WITHIN["fp32"])


# -- bytes -------------------------------------------------------------------------------------------------------------


def moved(runs: list[dict[str, Any]]) -> list[tuple[Counter[str], int]]:
    """Return for each run, in the last of three steps: copies to the device by block, and all bytes copied there."""
    found = []
    with open_comm(times=JOB) as comm, small(), pytest.MonkeyPatch.context() as patch:
        copies, copy = Counter[str](), Slots._copy_to_device

        def counted(self: Slots, region: Region, *given: Any, **also: Any) -> list[Ticket]:
            copies.update([region.name] if ".layers." in region.name else [])
            return copy(self, region, *given, **also)

        patch.setattr(Slots, "_copy_to_device", counted)
        for settings in runs:
            engine, rows = opened(comm, CASES["plain"], **settings), (2,) * comm.size
            leave_spare_memory(engine)
            for step in range(3):
                copies.clear()
                engine.step(share(CASES["plain"].batch(step, sum(rows)), rows, comm.rank))
            found.append((copies.copy(), engine.counters.h2d_bytes))
            engine.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_weights_of_a_block_go_up_once_a_pass_for_all_cards(size: int) -> None:
    """With gathers each card copies all blocks in the forward and again in the backward: `size` times as many bytes.

    Break: fetch a block for each rank's rows; fetch it on every rank.
    """
    common = {"make": partial(odd_llama, num_hidden_layers=12), "zero_stage": 2, "prefetch": 1, "throttle": SLOW}
    by_rank = run(size, moved, runs=[common, common | DISPATCH])
    gathered, dispatched = (sum((found[number][0] for found in by_rank), Counter()) for number in range(2))
    assert len(dispatched) == len(gathered) == 12
    assert set(dispatched.values()) <= {1, 2}, "once in the forward and once in the backward, or kept between them"
    assert all(count <= size * 2 for count in gathered.values())
    assert sum(gathered.values()) >= size * (2 * 12 - 2)
    up, up_by_gathers = (sum(found[number][1] for found in by_rank) for number in (1, 0))
    assert up < 1.1 * up_by_gathers / size, "by the engine's counter"


# -- ranks that end, and other numbers of ranks ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_rank_ends_all_others_and_they_name_it_and_the_tick(tmp_path: Path) -> None:
    for message in after_a_kill(tmp_path, "2", "always"):
        assert re.search(r"was waiting in [\w -]+ of (blocks, tick \d+|(unit )?lm_head)", message), message


@pytest.mark.slow
def test_any_number_of_ranks_resumes(tmp_path: Path) -> None:
    """Two ranks with dispatch save; three ranks with dispatch, and one rank, resume and save the same states.

    Break: leave weights of other owners as they were at the start.
    """
    first = tmp_path / "first"
    common: dict[str, Any] = {"case": "plain", **DISPATCH}
    run(2, save, **common, rows=(2, 1), path=str(first))
    gathered = tmp_path / "gathered"
    run(2, save, **common | {"dispatch": "never"}, rows=(2, 1), path=str(gathered))
    wanted = read_all(gathered)
    for size, path in ((0, first), (3, tmp_path / "again"), (1, tmp_path / "alone")):
        if size:
            run(size, save, **common, rows=(1,) * size, path=str(path), resume=str(first))
        found = read_all(path)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], flat) for key, flat in wanted.items())


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"zero_stage": 3}, "offload.zero_stage is 3"),
        ({"zero_stage": 0}, "offload.zero_stage is 0"),
        ({"replicas": 2}, "offload.replicas is 2"),
        ({"sequence_parallel": 2}, "train.sequence_parallel is 2"),
        ({"placement": {"experts": "streamed"}}, "offload.experts is streamed"),
        ({"placement": {"parameters": "device", "optimizer": "device"}}, "offload.parameters is device"),
    ],
)
def test_settings_without_dispatch_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"offload.dispatch is always, but {message}.*set --offload.dispatch never"):
        Settings(**DISPATCH | settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (TiedBlocks, "blocks.0 and blocks.1 and blocks.2 share weights"),
        (frozen_llama, "block model.layers.0 takes no part in the backward"),
        (UsedTwice, "block blocks.0 was called a second time before the backward"),
    ],
)
def test_blocks_outside_the_order_are_refused_on_all_ranks(make: Any, message: str) -> None:
    for error in run(2, refused, make=make):
        assert f"{message}, but with offload.dispatch always every block of the model runs once" in error


def refused(make: Any) -> str:
    case = CASES["experts" if make in (UsedTwice, TiedBlocks) else "plain"]
    with open_comm(times=JOB) as comm:
        engine = opened(comm, case, **DISPATCH, make=make, optimizer=AdamW(lr=0.05))
        with pytest.raises(OffloadError) as caught:
            engine.step(case.batch(0, 2), loss_fn=case.loss_fn)
        engine.close()
    return str(caught.value)
