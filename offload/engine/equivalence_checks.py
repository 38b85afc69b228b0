"""Equivalence checks: the time, the sample, and the fallback if a pass differs from plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from functools import partial

import torch
from torch.utils._pytree import tree_iter

from offload.engine.entries import ModelCall
from offload.engine.flow import Flow
from offload.engine.loss.batch import Batch, check_batch, is_token_batch
from offload.engine.loss.batch_agreement import PassInputs
from offload.engine.loss.loss import Loss, as_loss, run_loss
from offload.engine.loss.parts import Losses
from offload.engine.methods.method import Method
from offload.engine.recording.equivalence import EquivalenceResult, PassComparator, PassPair
from offload.engine.recording.known import KnownPasses
from offload.engine.units.arguments import Arguments
from offload.engine.units.trial import ENGINE_ERRORS
from offload.errors import ConfigError, DoesNotFitError, warn
from offload.modules import in_eval_mode
from offload.tiers.host import trim_heap

_CHUNKS = 2
"""Head chunks in a trial run on a few tokens."""
_UNSTEADY = (
    "; the model also gives other results in each run, because of state that the engine cannot restore and that its "
    "trial runs have changed"
)


class EquivalenceChecks:
    """Checks each kind of pass before the first use, and falls back to plainer execution if results differ from the
    model's.
    """

    def __init__(self, flow: Flow, method: Method, losses: Losses, known: KnownPasses, precision: str) -> None:
        self._flow = flow
        self._method = method
        self._losses = losses
        self._known = known
        self._comparator = PassComparator(flow, precision)

    def check(self, inputs: PassInputs, sample: Batch) -> None:
        """Check passes of this kind on a few rows.

        Collective. Raises ConfigError if every execution differs from the model.
        """
        if inputs.plan.has_peers:  # each rank has a part of the batch, so no mode would help
            self._refuse_sums(inputs, sample)
        is_conclusive = self._choose_mode(
            partial(self._compare, inputs, sample, cuts=inputs.plan.num_parts > 1),
            cuts=inputs.cuts,
            chunks=self._losses.chunk_tokens(inputs) > 0,
            recomputes=inputs.is_training and self._losses.has_backward,
            interleaves=inputs.is_training and not self._losses.has_backward,
        )
        if is_conclusive:
            self._known.add_check(inputs, has_chunks=self._losses.chunk_tokens(inputs) > 0)

    def find_difference(self, inputs: PassInputs, sample: Batch) -> str:
        """Return the first difference of passes with results of another engine. Empty: the passes are checked.

        Collective. Raises DoesNotFitError and OutOfMemoryError.
        """
        cuts, has_chunks = inputs.plan.num_parts > 1, self._losses.chunk_tokens(inputs) > 0
        result = self._try(partial(self._compare, inputs, sample, cuts=cuts))
        if result.is_conclusive and not result.difference:
            self._known.add_check(inputs, has_chunks=has_chunks)
        return result.difference

    def find_difference_of_call(self, samples: Sequence[ModelCall]) -> str:
        """Like `find_difference`, for a call in an own loop, on the first sample that runs."""
        for sample in samples:
            result = self._try(partial(self._comparator.compare, self._call_pair(sample)))
            if not result.has_failed:
                break
        return result.difference

    def _try(self, compare: Callable[[], EquivalenceResult]) -> EquivalenceResult:
        """Return the result of a check; an error, or a write to weights, is a difference."""
        runner = self._flow.runner
        try:
            with runner.writes.watched(self._flow.units):
                result = compare()
                runner.check_writes()
            return result
        except (DoesNotFitError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            runner.has_failed = False  # the caller analyses the model again, and needs no reset
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            return EquivalenceResult(text, is_repeatable=True, is_conclusive=True, has_failed=True)

    def check_call(self, samples: Sequence[ModelCall]) -> None:
        """Check a model call in an own loop, on the first sample that runs.

        The engine does not know how the loop uses the outputs, so every number in the outputs is compared. Collective.
        Raises like `check`.
        """
        for number, sample in enumerate(samples, 1):
            failure: Exception | None = None
            try:
                self._choose_mode(partial(self._comparator.compare, self._call_pair(sample)), recomputes=True)
            except ENGINE_ERRORS:
                raise
            except Exception as error:
                failure = error
            # All ranks go on to the next sample together: a check is collective.
            if not self._flow.comm.any(failure is not None, "outcome of a sample call"):
                return
            if number == len(samples) and failure is not None:
                raise failure

    def _call_pair(self, call: ModelCall) -> PassPair:
        arguments = Arguments((call.args, dict(call.kwargs)))
        own = [t.detach().clone().requires_grad_(t.requires_grad) for t in arguments.tensors]

        def loss() -> torch.Tensor:
            given = list(own)
            for number, tensor in enumerate(own):
                if tensor.requires_grad:  # torch forbids the model to change a leaf in place
                    given[number] = tensor.clone()
            args, kwargs = arguments.fill(given)
            results = tree_iter(call.module(*args, **kwargs))
            outputs = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
            return sum(map(_weighted_mean, outputs), torch.zeros((), device=self._flow.device.torch_device))

        def run_engine() -> list[torch.Tensor]:
            total = loss()
            if total.requires_grad:  # not for outputs without a gradient, which add up to a constant
                self._flow.runner.backward(total, None, *own)
            return [total]

        return PassPair({"arguments": own}, loss, run_engine, self._method.install_weights, leaves=own)

    def _choose_mode(self, compare: Callable[[], EquivalenceResult], **uses: bool) -> bool:
        """Find an execution with the same results as the model. Return False if the check had no result. Collective.

        `uses`: the features in use; only these are turned off.
        """
        mode = self._flow.execution_mode
        before, first = copy(mode), compare()
        trim_heap()  # the units' gradients were allocated one by one, and left holes in the heap
        if not first.difference:
            return first.is_conclusive
        # Units that never recompute would only repeat the first run.
        uses["recomputes"] = uses.get("recomputes", False) and self._flow.runner.saved.policy.mode != "never"
        for other in before.plainer_modes(**uses):
            mode.adopt(other)
            if not compare().difference:
                break
        else:
            mode.adopt(before)
            if first.is_repeatable or uses.get("interleaves"):
                raise ConfigError(
                    f"the engine and plain PyTorch give different results: {first.difference}. Code of the model has "
                    "effects that the engine cannot see: it changes state of other modules, uses its own random "
                    "numbers, or gives other results in each run. Pass everything a module reads as arguments and "
                    "everything it computes as results, or train this model without an engine."
                )
            # Each run differs, so no comparison tells anything: the mode closest to plain PyTorch remains.
            mode.adopt(replace(before, recomputes=before.recomputes and not uses["recomputes"]))
        text = f"the engine and plain PyTorch give different results: {first.difference}"
        if not first.is_repeatable:
            text += _UNSTEADY
        text += "."
        if changes := mode.describe_changes(before):
            text += f" From here on {changes}."
        warn(text)
        return True

    def _refuse_sums(self, inputs: PassInputs, sample: Batch) -> None:
        """Raise ConfigError if the losses from the ranks' rows do not add up to the whole batch's loss."""
        if difference := inputs.rule.obstacle or self._find_difference_of_sums(inputs, sample):
            raise ConfigError(
                f"each of {len(inputs.plan.ranks)} ranks has a part of the batch, but their losses cannot be combined, "
                f"since the loss of a few rows is not a mean over rows: {difference}. Write your own loop: scale the "
                "loss as needed, and call engine.backward(loss) and engine.update()."
            )

    def _find_difference_of_sums(self, inputs: PassInputs, sample: Batch) -> str:
        """Return the difference between the loss of the sample and the sum over its rows. Empty: none.

        No check for token batches: label weights are known for text. No check either for labelled batches without a row
        split, because the model's own loss defines the label weights, and for a loss that gathers the rows itself.
        """
        if is_token_batch(sample, check_batch(sample)) or as_loss(inputs.loss_fn).obstacle:
            return ""
        if inputs.form.is_whole:
            if all(rank_batch.is_labelled for rank_batch in inputs.plan.ranks):
                return ""
            return inputs.form.obstacle
        # One call of the model for each micro-batch stands for the call on each rank.
        mode = self._flow.execution_mode
        before = mode.cut
        mode.change(cut="calls")
        try:
            return self._compare(inputs, sample, cuts=True).difference
        finally:
            mode.change(cut=before)

    def _compare(self, inputs: PassInputs, sample: Batch, *, cuts: bool) -> EquivalenceResult:
        is_whole = self._flow.execution_mode.cut == "whole"
        has_chunks = self._losses.chunk_tokens(inputs) > 0
        is_cut = (cuts or inputs.num_passes > 1) and not is_whole
        micro_rows = None
        if cuts and not is_whole:  # as few rows as a loss can take: the sample has few
            micro_rows = as_loss(inputs.loss_fn).group
        inputs = inputs.of_sample(sample, micro_rows)
        if isinstance(inputs.loss_fn, Loss):
            inputs = replace(inputs, loss_fn=inputs.loss_fn.trial())
        chunk_tokens = 0
        if has_chunks:  # a few tokens would fit into one chunk
            num_tokens = inputs.plan.num_targets(replace(inputs.rule, counts_rows=False))
            chunk_tokens = max(1, -(-num_tokens // _CHUNKS))
        model = self._flow.model
        method, losses = self._method, self._losses
        has_backward = inputs.is_training and losses.has_backward

        def plain_loss() -> torch.Tensor:
            return run_loss(model, inputs.batch, inputs.loss_fn, has_backward=has_backward).to(torch.float32)

        roots = {"batch": inputs.batch, "loss_fn": inputs.loss_fn}
        if inputs.is_training:
            run_streamed = partial(method.trial, inputs, chunk_tokens)
            pair = PassPair(roots, plain_loss, run_streamed, method.install_weights, method.num_passes, has_backward)
        else:
            pair = PassPair(
                roots,
                plain_loss,
                lambda: [losses.total(inputs, chunk_tokens)],
                lambda unit, _: unit.install(unit.live()),
                has_backward=False,
            )
        with ExitStack() as stack:
            if not inputs.is_training:
                stack.enter_context(in_eval_mode(model))
            # Micro-batches and chunks add up in another order.
            return self._comparator.compare(pair, is_exact=not is_cut and not has_chunks)


def _weighted_mean(tensor: torch.Tensor) -> torch.Tensor:
    """Return a mean over all finite elements, with different weights along the last axis."""
    numbers = tensor
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    numbers = numbers.nan_to_num(0.0, 0.0, 0.0)
    length = 1  # of a tensor without axes
    if numbers.dim():
        length = numbers.shape[-1]
    weights = torch.arange(1, 1 + length, device=numbers.device).cos()
    return (numbers * weights).sum() / max(1, numbers.numel())
