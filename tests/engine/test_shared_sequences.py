"""Sequence parallelism: losses, norms and weights equal plain PyTorch in one process on whole rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from offload import AdamW, Engine, Placement
from offload.distributed.comm import Comm
from offload.distributed.joining import open_comm
from offload.errors import ConfigError
from offload.extras.large.shared_attention import SharedAttention
from offload.planning.settings import Settings
from offload.tiers.counters import Counters
from tests.cases.models import build, llama, opt, tokens
from tests.engine.ranks import run
from tests.engine.ranks_child import CASES, JOB, WITHIN
from tests.engine.shared_child import LENGTH, MIXING, SHARED, rows_of
from tests.engine.test_ranks import MODES, assert_near, plain, train

LAYERS, HEADS, KEYS, WIDTH = 2, 4, 2, 8  # tiny llama


def exchanges_of(size: int, case: str, **settings: Any) -> int:
    """Train on `size` ranks, and compare with plain PyTorch. Return the elements that a rank exchanges in a step."""
    told: dict[str, Any] = {"sequence_parallel": 2, **MODES["deferred"], **settings}
    num_groups = size // told["sequence_parallel"]
    rows = (4 // num_groups,) * num_groups
    (found,) = train(size, {"case": case, "rows": rows, "num_steps": 3, "evaluate": 1, **told})
    assert_near(found, plain(case, 4, 3, "deferred"), WITHIN[CASES[case].precision])
    return found.moved[-1]["all_to_all_elements"]


def exchanged(size: int, passes: int, rows: int = 4) -> int:
    """Return the number of elements a rank exchanges in a step.

    Each pass sends queries, keys and values to heads, and attention results back to tokens.
    """
    own = rows * LENGTH // size
    return passes * LAYERS * own * WIDTH * (HEADS + 2 * max(KEYS, size) + HEADS)


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARED)
def test_losses_norms_and_weights_are_those_of_one_process_on_whole_rows(case: str) -> None:
    """Break: omit the backward of an exchange, or of one tensor; cut labels before the shift; mask only the rank's own
    tokens; use positions relative to the rank's tokens.
    """
    found = exchanges_of(2, case)
    if case in ("packed", "chunks", "tiles", "bf16"):
        assert found == exchanged(2, 3), "a forward, a recompute and a backward"
    if case == "answers alone":
        assert found == exchanged(2, 2), "nothing is recomputed"


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"sequence_parallel": 4}, {}, {"replicas": 2}])
def test_four_ranks_share_rows_or_make_two_groups(settings: dict[str, Any]) -> None:
    """Four ranks have one key head each, two heads twice. Two groups have separate rows, and may be replicas."""
    shared_by = settings.get("sequence_parallel", 2)
    assert exchanges_of(4, "packed", **settings) == exchanged(shared_by, 3, rows=shared_by)


def own_rows() -> None:
    """Call the model after a step, without and with gradients."""
    with open_comm(times=JOB) as comm, Engine(build(llama), comm=comm, sequence_parallel=2) as engine:
        engine.step(rows_of(0))
        few = {"input_ids": tokens(1, 1, 5)["input_ids"]}
        with torch.no_grad():
            assert engine.model(**few).logits.shape[:2] == (1, 5), "a caller's own rows are whole"
        with pytest.raises(ConfigError, match="your own training loop, where the engine cannot split rows"):
            engine.model(**few)


def refusal(make: Callable[[], nn.Module], shared_by: int, alike: bool) -> str:
    """Return the error of an engine, or an empty text. alike: ranks have the same batch."""
    with open_comm(times=JOB) as comm:
        try:
            with Engine(build(make), comm=comm, sequence_parallel=shared_by) as engine:
                engine.step(rows_of(0 if alike else comm.rank))
        except ConfigError as error:
            return str(error)
    return ""


def refused(make: Callable[[], nn.Module] = llama, shared_by: int = 2, alike: bool = True) -> str:
    first, second = run(2, refusal, make=make, shared_by=shared_by, alike=alike)
    assert first == second
    return first


@pytest.mark.slow
@pytest.mark.parametrize("mixing", MIXING)
def test_a_model_that_mixes_tokens_elsewhere_is_refused_before_the_first_step(mixing: str) -> None:
    """Break: skip the comparison; compare the first rank's tokens only."""
    found = refused(MIXING[mixing])
    assert found.startswith("train.sequence_parallel is 2, but ")
    assert ("on shared sequences than on whole ones" in found) != ("router" in found.partition(" Set ")[0])
    assert found.endswith("Set --train.sequence_parallel 1.") or "set --train.sequence_parallel 1" in found


@pytest.mark.slow
def test_what_cannot_be_shared_is_refused_by_its_numbers() -> None:
    run(2, own_rows)
    three = partial(llama, num_attention_heads=3, num_key_value_heads=1, hidden_size=24)
    found = refused(three)
    assert "3 query heads and 1 key-value heads of attention" in found
    assert "set --train.sequence_parallel to one of 1, 3." in found
    assert "a machine has 2 ranks, which is no multiple of 3" in refused(shared_by=3)
    assert "shift_labels" in refused(opt), "its loss takes no labels that are shifted"
    assert "the batch of ranks that share sequences must be the same on all ranks" in refused(alike=False)


def test_ranks_with_other_rotary_frequencies_are_refused() -> None:
    """Positions up to the limit are shared. Break: leave out the check: each rank then takes its own frequencies."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = build(partial(llama, rope_parameters=rope, max_position_embeddings=LENGTH))
    attention = SharedAttention(model, Comm(), Counters())
    own, shared = attention.share(tokens(0, 4, LENGTH, device="cpu"), None)
    assert shared.whole.length == own["labels"].shape[1] == LENGTH
    with pytest.raises(ConfigError, match=r"beyond 12 tokens .* positions for 13: .* --data.sequence_length 12, or"):
        attention.share(tokens(0, 4, LENGTH + 1, device="cpu"), None)


def test_graphs_of_shared_sequences_are_recomputed_or_stay() -> None:
    with pytest.raises(ConfigError, match="train.sequence_parallel is 0; it must be a number of ranks, at least 1."):
        Settings(sequence_parallel=0)
    never = Settings(AdamW(), Placement(graphs="cpu"), sequence_parallel=2, recompute="never")
    assert (never.recompute, Settings(sequence_parallel=2, recompute="auto").recompute) == ("never", "always")


def test_one_queue_for_all_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two communicators launch from two threads; in one queue each could wait for the other."""
    monkeypatch.setattr(Comm, "device", torch.device("cuda"))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ConfigError, match="sequence_parallel is 1, and CUDA_DEVICE_MAX_CONNECTIONS is 1, so all"):
        SharedAttention.open(build(llama), 1, Comm(), Counters())
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert SharedAttention.open(build(llama), 1, Comm(), Counters()).size == 1
