"""Ranks die, stop, leave or get other arguments. All others end, or refuse, with the reason. No rank hangs.

Break: hide an exchange from the watchdog (no unit in the message); handle a lost rank like an error of the step;
compare the arguments of ranks only at the point of use.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.distributed.ranks import Rank
from tests.engine.ranks import processes, run
from tests.engine.ranks_child import OTHER_BATCHES, OTHER_SETTINGS, frozen_later, refused, two_engines

pytestmark = pytest.mark.slow
IN_A_UNIT = r"[a-z][a-z -]+ of (unit )?[\w.]*(embed_tokens|layers\.\d|norm|lm_head)"
"""Pattern for the operation and the unit in the message."""


def lost(rank: Rank) -> str:
    """Return the error message of a rank that ended with code 1."""
    assert rank.end() == 1, rank.output
    told = [line for line in rank.output.splitlines() if "RankLostError:" in line or line.startswith("Error:")]
    assert told, rank.output
    return told[-1]


def in_the_middle(started: list[Rank]) -> None:
    """Wait until all ranks are past the fourth forward."""
    for rank in started:
        rank.wait_for("steady")


def only_logs(folder: Path) -> bool:
    """Return True for a folder with rank logs only, without NVMe tier files."""
    return {path.name[:5] for path in folder.iterdir()} == {"rank-"}


def after_a_kill(folder: Path, *words: str) -> list[str]:
    """Kill rank 1 of 3 in the middle of a step; return the messages of the others. `words`: stage, dispatch."""
    stage, *others = words
    with processes(folder, 3, "steps", "waits", stage, str(folder), *others) as started:
        in_the_middle(started)
        time.sleep(0.5)
        started.pop(1).process.kill()
        messages = [lost(rank) for rank in started]
    for message in messages:
        assert "Rank 1 is lost: its process ended without a message: it was killed" in message
    assert only_logs(folder)
    return messages


def test_a_killed_rank_ends_all_others_and_they_name_it_and_the_unit(tmp_path: Path) -> None:
    """With the default times. Rank 1 is between forward and backward, and the others wait for it."""
    for message in after_a_kill(tmp_path, "3"):
        assert re.search(rf"Rank \d was waiting in {IN_A_UNIT}", message), message


@pytest.mark.parametrize(
    ("way", "stage", "code", "message"),
    [
        ("exception", 3, 1, r"Rank 1 .*ValueError: these data are bad"),
        ("bare exception", 3, 1, r"Rank 1 .*ValueError: these data are bad"),
        ("exit", 3, 3, r"Rank 1 "),
        ("update", 1, 1, r"Rank 1 .*ValueError: these data are bad"),
    ],
)
def test_a_rank_that_fails_in_a_step_ends_all_others(
    tmp_path: Path, way: str, stage: int, code: int, message: str
) -> None:
    """In the loss function, or in an update. The others then wait for the failed rank's weights.

    Break: skip exchanges for failed weights; let the failing rank fetch once more.
    """
    with processes(tmp_path, 2, "steps", way, str(stage), str(tmp_path)) as (waiting, leaving):
        assert leaving.end() == code, leaving.output
        if code == 1:
            assert "these data are bad" in leaving.output
        assert re.search(message, lost(waiting))
    assert only_logs(tmp_path)


def test_a_rank_that_closes_its_engine_early_ends_all_others(tmp_path: Path) -> None:
    """Rank 1 closes after three steps, while the others continue.

    Both ranks refuse. The error is not caught, so both end with code 1, in any order.
    """
    with processes(tmp_path, 2, "steps", "closes", "3", str(tmp_path)) as started:
        assert [rank.end() for rank in started] == [1, 1], [rank.output for rank in started]
        for rank in started:
            assert re.search(r"ConfigError: .*rank 0: step; rank 1: close.*ends the run for all", rank.output)
    assert only_logs(tmp_path)


# -- different arguments ---------------------------------------------------------------------------------------------

NAMED = {
    "lr": r"lr.*0\.06",
    "stage": r"zero_stage",
    "precision": r"precision.*bf16",
    "clipping": r"max_grad_norm.*0\.5",
    "frozen": r"embed_tokens|frozen|trainable",
    "layers": r"layers",
    "width": r"gate_proj|shape|mlp",
    "keys": r"attention_mask",
    "misspelt": r"input_idz",
    "no rows": r"row",
    "no targets": r"target",
    "evaluates": r"evaluat",
    "updates": r"own loop|backward|engine\.model",
}
"""The difference on rank 1, and a pattern for the error message."""


@pytest.mark.parametrize(("way", "num_ranks", "stage"), [*((way, 2, 3) for way in NAMED), ("stage", 3, 0)])
def test_what_one_rank_has_otherwise_is_refused_on_all_with_one_message(way: str, num_ranks: int, stage: int) -> None:
    """All ranks survive and train on. Stages 0 and 2 have the same exchanges: the mismatch would stay hidden."""
    assert {*OTHER_SETTINGS, *OTHER_BATCHES} < {*NAMED}
    errors = run(num_ranks, refused, way=way, zero_stage=stage)
    assert len(set(errors)) == 1, "the same words everywhere"
    kind, message = errors[0]
    assert kind == "ConfigError", message
    if way != "no targets":  # all ranks lack them
        assert re.search(r"rank 1\b" if num_ranks > 2 else "rank", message)
    assert re.search(NAMED[way], message), message


def test_a_second_engine_over_the_comm_of_one_that_is_open_is_refused() -> None:
    """Both engines' lanes would exchange in arbitrary order."""
    for kind, message in run(2, two_engines):
        assert kind == "ConfigError"
        assert re.search(r"comm .* engine that is still open.*open_comm\(\)", message), message


def test_parameters_are_frozen_later_on_all_ranks() -> None:
    assert run(2, frozen_later, zero_stage=3) == [True, True]
