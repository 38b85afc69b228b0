"""Equivalence checks: the time, the sample, and the fallback if a pass differs from plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from offload.engine.loss.batch import Batch, check_batch, is_token_batch
from offload.engine.loss.batch_agreement import BatchFacts
from offload.engine.loss.group_loss import group_of
from offload.engine.loss.loss import run_loss
from offload.engine.loss.parts import Losses
from offload.engine.methods.method import Method
from offload.engine.recording.judge import Case, Judge, Verdict
from offload.engine.recording.trial_runs import MOST_CHOICES
from offload.engine.state import EngineState
from offload.engine.units.arguments import Arguments
from offload.errors import ConfigError, OffloadError, warn
from offload.hf.models import in_eval_mode
from offload.tiers.host import trim_heap

_CHUNKS = 2
"""Head chunks in a trial run on a few tokens."""


class Judging:
    """Checks each kind of pass before the first use, and falls back to plainer execution if results differ from the
    model's.
    """

    def __init__(self, state: EngineState, method: Method, losses: Losses, precision: str) -> None:
        self._state, self._method, self._losses = state, method, losses
        self._judge = Judge(state, precision)
        self._judged: dict[str, set[str]] = {}

    @property
    def judged(self) -> dict[str, list[str]]:
        """Checked kinds of passes with the execution at that time, including those before a resume.

        Values: the integers in the batches.
        """
        return {kind: sorted(ints) for kind, ints in self._judged.items()}

    def knows(self, facts: BatchFacts) -> bool:
        """Return whether such passes were checked with the current execution and this batch's integers.

        Also True after many different integers: they are then counts, and select no code path.
        """
        known = self._judged.get(self._kind(facts), set())
        return _ints(facts) in known or len(known) >= MOST_CHOICES

    def begin_again(self, judged: Mapping[str, Iterable[str]]) -> None:
        """Take over the checks from a checkpoint: another batch must not lead to another decision."""
        self._judged = {kind: set(ints) for kind, ints in judged.items()}

    def judge(self, facts: BatchFacts, sample: Batch) -> None:
        """Check passes of this kind on a few rows.

        Collective. Raises ConfigError if every execution differs from the model.
        """
        if facts.plan.has_peers:
            self._refuse_sums(facts, sample)
        tells = self._settle(
            partial(self._difference, facts, sample, cuts=facts.plan.num_parts > 1),
            cuts=facts.plan.num_parts > 1,
            chunks=self._losses.chunk_tokens(facts) > 0,
            recomputes=facts.trains and self._losses.has_gradient,
            interleaves=facts.trains and not self._losses.has_gradient,
        )
        if tells:
            self._judged.setdefault(self._kind(facts), set()).add(_ints(facts))

    def judge_call(self, call: Callable[..., Any], samples: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> None:
        """Check a model call in an own loop, on the first sample that runs.

        The engine does not know how the loop uses the outputs, so every number in the outputs is compared. Collective.
        Raises like `judge`.
        """
        for number, (args, kwargs) in enumerate(samples, 1):
            failure: Exception | None = None
            try:
                self._settle(partial(self._judge.difference, self._case_of_call(call, args, kwargs)), recomputes=True)
            except (OffloadError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                failure = error
            if not self._state.comm.any(failure is not None, "outcome of a sample call"):
                return
            if number == len(samples) and failure is not None:
                raise failure

    def _case_of_call(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Case:
        arguments = Arguments((args, dict(kwargs)))
        own = [t.detach().clone().requires_grad_(t.requires_grad) for t in arguments.tensors]

        def loss() -> torch.Tensor:
            args, kwargs = arguments.fill([t.clone() if t.requires_grad else t for t in own])
            found = [t for t in tree_iter(call(*args, **kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
            return sum(map(_mixed, found), torch.zeros((), device=self._state.device.torch_device))

        def way() -> list[torch.Tensor]:
            made = loss()
            if made.requires_grad:
                self._state.backward(made, None, *own)
            return [made]

        return Case({"": self._state.model, "arguments": own}, loss, way, self._method.hang, leaves=own)

    def _settle(self, differs: Callable[[], Verdict], **uses: bool) -> bool:
        """Find an execution with the same results as the model. Return False if the check had no result. Collective.

        `uses`: the features in use; only these are turned off.
        """
        way = self._state.way
        before, first = copy(way), differs()
        trim_heap()  # the units' gradients were allocated one by one, and left holes in the heap
        if not first.difference:
            return first.tells
        uses["recomputes"] = uses.get("recomputes", False) and self._state.runner.saved.policy.mode != "never"
        for other in before.plainer(**uses):
            way.become(other)
            if not differs().difference:
                break
        else:
            way.become(before)
            if first.is_steady or uses.get("interleaves"):
                raise ConfigError(
                    f"the engine and plain PyTorch give different results: {first.difference}. Code of the model has "
                    "effects that the engine cannot see: it changes state of other modules, uses its own random "
                    "numbers, or gives other results in each run. Pass everything a module reads as arguments and "
                    "everything it computes as results, or train this model without an engine."
                )
            way.become(replace(before, recomputes=before.recomputes and not uses["recomputes"]))
        unsteady = (
            ""
            if first.is_steady
            else (
                "; the model also gives other results in each run, because of state that the engine cannot restore "
                "and that its trial runs have changed"
            )
        )
        changes = way.changes(before)
        warn(
            "the engine and plain PyTorch give different results: "
            f"{first.difference}{unsteady}.{f' From here on {changes}.' if changes else ''}"
        )
        return True

    def _kind(self, facts: BatchFacts) -> str:
        told = facts.plan.ranks[0]
        names = tuple((name, shape if isinstance(shape, str) else len(shape)) for name, shape in told.shapes)
        cuts, chunks = facts.plan.num_parts > 1, self._losses.chunk_tokens(facts) > 0
        modes, way = sorted({each.modes for each in facts.plan.ranks}), vars(self._state.way).values()
        return repr((told.operation, names, told.has_loss_function, cuts, chunks, modes, *way))

    def _refuse_sums(self, facts: BatchFacts, sample: Batch) -> None:
        """Raise ConfigError if the losses from the ranks' rows do not add up to the whole batch's loss.

        No check for token batches: label weights are known for text. No check either for labelled batches without a row
        split, because the model's own loss defines the label weights.
        """
        if is_token_batch(sample, check_batch(sample)):
            return
        difference = facts.form.obstacle
        if difference and all(told.is_labelled for told in facts.plan.ranks):
            return
        if not difference:
            way = self._state.way
            before = way.cut
            way.change(cut="calls")
            try:
                difference = self._difference(facts, sample, cuts=True).difference
            finally:
                way.change(cut=before)
        if difference:
            raise ConfigError(
                f"each of {self._state.comm.size} ranks has a part of the batch, but their losses cannot be combined, "
                f"since the loss of a few rows is not a mean over rows: {difference}. Write your own loop: scale the "
                "loss as needed, and call engine.backward(loss) and engine.update()."
            )

    def _difference(self, facts: BatchFacts, sample: Batch, *, cuts: bool) -> Verdict:
        is_cut, has_chunks = cuts and self._state.way.cut != "whole", self._losses.chunk_tokens(facts) > 0
        facts = facts.of_sample(sample, group_of(facts.loss_fn) if is_cut else None)
        num_tokens = facts.plan.num_targets(replace(facts.rule, by_rows=False))
        case = self._case(facts, max(1, -(-num_tokens // _CHUNKS)) if has_chunks else 0)
        with nullcontext() if facts.trains else in_eval_mode(self._state.model):
            return self._judge.difference(case, is_exact=not is_cut and not has_chunks)

    def _case(self, facts: BatchFacts, chunk_tokens: int) -> Case:
        state, method, trains = self._state, self._method, facts.trains
        has_backward = trains and self._losses.has_gradient
        parts = partial(self._losses.parts, facts, chunk_tokens=chunk_tokens)

        def evaluate() -> list[torch.Tensor]:
            with closing(parts()) as found:
                return [sum(found, torch.zeros((), device=state.device.torch_device))]

        return Case(
            {"": state.model, "batch": facts.batch, "loss_fn": facts.loss_fn},
            lambda: run_loss(state.model, facts.batch, facts.loss_fn, has_gradient=has_backward),
            partial(method.trial, parts) if trains else evaluate,
            method.hang if trains else lambda unit, _: unit.install(unit.live()),
            method.num_passes if trains else 1,
            has_backward,
        )


def _ints(facts: BatchFacts) -> str:
    return repr(sorted({told.ints for told in facts.plan.ranks}))


def _mixed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a mean over all finite elements, with different weights along the last axis."""
    numbers = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).nan_to_num(0.0, 0.0, 0.0)
    weights = torch.arange(1, 1 + (numbers.shape[-1] if numbers.dim() else 1), device=numbers.device).cos()
    return (numbers * weights).sum() / max(1, numbers.numel())
