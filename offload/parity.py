"""`python -m offload.parity`: compare offloaded training with resident training for a user's model and settings."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from offload import __version__
from offload.app.config.command_line import (
    CommandOption,
    importing,
    is_on,
    parse_command,
    run_command,
    say,
    say_nothing,
    take_gpus,
)
from offload.app.launch import end_with_launcher, launch
from offload.errors import ConfigError, counted, shorten

if TYPE_CHECKING:
    from offload.app.config.config import Config
    from offload.extras.tools.parity_check import ParityResult

DESCRIPTION = (
    "Train the first steps of a run twice, offloaded as the settings of train say and resident in plain PyTorch, and "
    "compare every loss, every norm and all weights: bit for bit, or, where the order of sums differs (ranks, "
    "micro-batches, a head in chunks), within a tolerance that is told. Where a bit differs that must not, both sides "
    "train once more to find the first step, parameter and element. Writes no run folder. Exit codes: 0 equal, 1 "
    "differs or failed, 2 bad configuration or input, 3 does not fit resident, 130 interrupted."
)
OPTIONS = {
    "steps": CommandOption("N", "(default: 3)", "How many steps to compare."),
    "same-order": CommandOption(
        "{true,false}",
        "(default: false)",
        "Let the resident side sum as the engine does, where it can: unit by unit, over ranks and micro-batches.",
    ),
    "json": CommandOption("{true,false}", "(default: false)", "Print one JSON object."),
}
ShowLine = Callable[[str], None]


def main(words: list[str]) -> int:
    is_launched = end_with_launcher()
    num_ranks, words = take_gpus(words)
    config, own = parse_command(words, prog="python -m offload.parity", description=DESCRIPTION, own=OPTIONS)
    if not config.optimizer.has_gradients:
        raise ConfigError(
            "optimizer.name is mezo, which has no backward, but the resident side trains by backward. python -m "
            "offload.replay BASE_FOLDER RUN repeats such a run bit for bit; tests/engine/test_zeroth_order.py compares "
            "its steps with MeZO in plain PyTorch."
        )
    num_steps = _steps(own["steps"])
    same_order = is_on(own, "same-order")
    as_json = is_on(own, "json")
    # Within the compared steps alone: a later restart changes nothing here.
    for key in ("lora.restart_every", "optimizer.reset_every"):
        if 0 < (every := config.get(key)) < num_steps:
            raise ConfigError(
                f"--steps is {num_steps}, but the comparison run in plain PyTorch restarts no adapter and resets no "
                f"states ({key} is {every}): set --steps to at most {every}."
            )
    if config.offload.link_gradients != "exact":
        raise ConfigError(
            f"offload.link_gradients is {config.offload.link_gradients}, but the resident side is one process and "
            "sends no gradients: set --offload.link_gradients exact."
        )
    tell: ShowLine = say if as_json else print  # with --json, standard output has the result alone
    if num_ranks > 1:
        config.check_ranks(num_ranks)
        with importing():
            import torch.distributed.launcher.api  # noqa: F401
        return launch("offload.parity", words, num_ranks, debug=config.run.debug, say=tell)
    is_first = os.environ.get("RANK", "0") == "0"
    show_line = tell
    if not is_first:
        show_line = say_nothing
    if not is_launched:
        show_line(f"offload {__version__}: loading torch and transformers ...")
    # cuBLAS reads this variable at initialization; with this value, results are repeatable.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with importing():
        result = compare(config, num_steps, same_order=same_order, show_line=show_line)
    if is_first and as_json:
        print(json.dumps(result.fields(), indent=2))
    elif is_first:
        show(result)
    return 0 if result.is_equal else 1


def compare(config: Config, num_steps: int, *, same_order: bool, show_line: ShowLine) -> ParityResult:
    """Train both sides and compare. Every rank learns whether they are equal; rank 0 has the full result. Collective.

    Raises OffloadError, one on every rank.
    """
    from offload.app.training.ranks import RankExit
    from offload.distributed.joining import open_comm
    from offload.extras.tools.parity_check import check_parity

    comm = open_comm(config.offload.device)
    rank_exit = RankExit(comm)
    check = partial(check_parity, config, num_steps, same_order=same_order, comm=comm, say=show_line)
    try:
        try:
            # A second try needs all ranks in it, and only this rank may have met the operation.
            with _repeatable(strictly=comm.size == 1):
                result = check()
        except RuntimeError as error:
            if "deterministic implementation" not in str(error):
                raise
            # Both sides again, without this demand and with a note.
            show_line(
                f"note: {str(error).partition(',')[0]}. So this operation runs as it is, with attention in plain "
                "matrix products, and may give other bits in every run."
            )
            with _repeatable(strictly=False):
                result = check()
        comm.close()
        return result
    except BaseException as error:
        left = rank_exit.leave(error)
        if left is error:
            raise
        raise left from error


@contextlib.contextmanager
def _repeatable(*, strictly: bool) -> Iterator[None]:
    """Make operations repeatable bit for bit.

    strictly: a nondeterministic operation raises RuntimeError. Otherwise the operation runs anyway, and attention uses
    plain matrix products, because fused GPU kernels keep a fixed summation order only in strict mode.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = memory.fill_uninitialized_memory
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION] if strictly else []
    try:
        torch.use_deterministic_algorithms(True, warn_only=not strictly)
        memory.fill_uninitialized_memory = False  # otherwise a model fills all memory before the plan rejects the model
        with sdpa_kernel([*fused, SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


def show(result: ParityResult) -> None:
    """Print the result."""
    weights = result.weights
    for each in result.steps:
        for quantity, offloaded in each.offloaded.items():
            distance = each.distance(quantity)
            difference = "equal"
            if distance:
                difference = f"apart by {distance:.1e} of it"
            resident = each.resident[quantity]
            print(f"step {each.step}  {quantity}: offloaded {offloaded!r}, resident {resident!r}, {difference}")
    differing = sum(weights.differing.values())
    summary = "every bit is equal"
    if differing:
        summary = (
            f"{differing:,} elements of {counted(len(weights.differing), 'parameter')} differ, by at most "
            f"{weights.largest:.3g}; together by {weights.distance:.1e} of the change in training"
        )
    print(f"weights: {weights.num_elements:,} elements of {counted(weights.num_parameters, 'parameter')}: {summary}")
    for text in result.notes:
        print(f"note: {text}")
    for text in result.reasons:
        print(f"the order of sums differs: {text}")
    if result.tolerance is not None:
        numbers = result.tolerance["numbers"]
        of_weights = result.tolerance["weights"]
        print(
            f"judged by a tolerance: losses and norms within {numbers:g}, weights within {of_weights:g} of their "
            "change in training"
        )
    if result.first is not None and not result.is_bit_equal:
        print(f"first difference: {result.first}")
    elif not result.is_equal:
        print(
            "a comparison after each step finds no difference, so the difference depends on the timing between steps. "
            "Please report this, with the command."
        )
    if not result.is_equal and not result.in_same_order:
        print("if a layer uses an input in several places, --same-order sums in the engine's order.")
    verdict = "are equal within the order of sums"
    if not result.is_equal:
        verdict = "differ"
    elif result.is_bit_equal:
        verdict = "are equal bit for bit"
    print(f"parity: offloaded and resident training {verdict} over {counted(len(result.steps), 'step')}")


def _steps(text: str | None) -> int:
    if text is None:
        return 3
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--steps is {shorten(text)!r}; it should be a whole number of steps, at least 1.")
    return int(text)


if __name__ == "__main__":
    run_command(main)
