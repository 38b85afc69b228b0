"""The loss of a batch: one pass or several, the model in one call or once per micro-batch, with each backward."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from offload.engine.flow import Flow
from offload.engine.loss.batch import IGNORED, Batch, next_labels
from offload.engine.loss.batch_agreement import PassInputs, PassPlan, RankBatch, agree_on_pass
from offload.engine.loss.chunked_head import HeadInputs, build_chunks
from offload.engine.loss.loss import Loss, LossFunction, Needs, as_loss, labels_of, run_loss, select_inputs
from offload.errors import ConfigError


class Losses:
    """Runs the model on a batch, in micro-batches and with the head in chunks.

    Ranks may have different row counts; all ranks run as many parts as the largest batch needs, and at most as many
    passes as the smallest batch has groups. `num_chunks`: head chunks in the last loss. `chunk_bytes`: limit for logits
    in memory. `has_backward`: a backward follows, so a loss must be a tensor.
    """

    def __init__(self, flow: Flow, chunk_bytes: int | None, has_backward: bool = True) -> None:
        self._model = flow.model
        self._flow = flow
        self.chunk_bytes = chunk_bytes
        self.has_backward = has_backward
        self.num_chunks = 1

    @property
    def _scale(self) -> float:
        """Factor on the loss in a backward. 1 in a trial, whose gradients are compared with those of plain PyTorch."""
        if self._flow.gradients.is_observed:
            return 1.0
        return self._flow.updates.loss_scale.value

    def _run_backward(self, loss: torch.Tensor) -> None:
        gradient = None
        if self._scale != 1.0:
            gradient = torch.full_like(loss, self._scale)
        self._flow.runner.backward(loss, gradient)

    @property
    def is_called_per_micro_batch(self) -> bool:
        """True if some unit cannot cut the batch, so the model is called once per micro-batch."""
        return self._flow.execution_mode.cut == "calls"

    def total(
        self, inputs: PassInputs, chunk_tokens: int | None = None, *, runs_backward: bool = False
    ) -> torch.Tensor:
        """Run the model over a batch; return this rank's loss, fp32 on the device.

        The losses of all ranks add up to the mean over all targets. If possible, the units cut the batch: one model
        call in a pass, and the weights stream once. Otherwise the model is called once per micro-batch. `chunk_tokens`:
        tokens per head chunk; 0: all; None: per `chunk_tokens(inputs)`. `runs_backward`: each loss has its backward at
        once, before the next forward.
        """
        as_loss(inputs.loss_fn).begin()
        count = self._count_passes(inputs)
        if count == 1:
            return self._pass(inputs, chunk_tokens, runs_backward)
        with _leaves(inputs.batch) as batch:
            parts = self._passes(replace(inputs, batch=batch), count)
            # Each pass ends before the rows of the next one are taken.
            first, *others = (self._pass(each, chunk_tokens, runs_backward) for each in parts)
            for other in others:
                first += other
        return first

    def _count_passes(self, inputs: PassInputs) -> int:
        """Return the number of passes. A pass has a row or a group of rows on every rank."""
        group, is_whole = as_loss(inputs.loss_fn).group, self._flow.execution_mode.cut == "whole"
        fewest = min(rank.rows // group for rank in inputs.plan.ranks)
        if is_whole:
            return 1
        return max(1, min(inputs.num_passes, fewest))

    def _passes(self, inputs: PassInputs, count: int) -> Iterator[PassInputs]:
        """Yield the inputs of `count` passes: nearly equal parts of the rows, in order. Collective."""
        plan, form = inputs.plan, inputs.form
        group = as_loss(inputs.loss_fn).group
        own = plan.ranks[plan.rank]
        # A group (rows that one loss term needs together) stays in one pass.
        ends = [own.rows // group * number // count * group for number in range(count + 1)]
        for begin, end in pairwise(ends):
            rows = torch.arange(begin, end, device="cpu")
            batch = form.take(inputs.batch, rows)
            on_host = batch
            labels = inputs.labels
            if labels is not None:
                labels = labels[begin:end]
                on_host = {**batch, "labels": labels}  # counting must not wait for the device
            part = RankBatch.of(own.operation, on_host, end - begin, own.micro_rows, own.has_loss_function)
            agreed = PassPlan([part], rank=0)
            if plan.has_peers:
                agreed = agree_on_pass(self._flow.comm, part)
            part_plan = replace(agreed, step=plan)  # a loss is divided by the weight of the step, not of the pass
            yield replace(inputs, plan=part_plan, batch=batch, labels=labels)

    def _pass(self, inputs: PassInputs, chunk_tokens: int | None, runs_backward: bool) -> torch.Tensor:
        """Run the model over the rows of one pass; return this rank's part of the loss."""
        plan, batch = inputs.plan, inputs.batch
        runner = self._flow.runner
        own = plan.ranks[plan.rank]
        in_calls = plan.num_parts > 1 and self.is_called_per_micro_batch
        # The next label of a rank's last token is on another rank: only the head in chunks receives this label.
        if inputs.shared is not None and (in_calls or self.chunk_tokens(inputs) == 0):
            raise ConfigError(
                f"train.sequence_parallel is {self._flow.attention.size}, but the model runs on one micro-batch "
                "after the other or with a loss over all logits (see the warnings above), and ranks cannot share rows "
                "then: set --train.sequence_parallel 1, or --train.micro_batch_size none."
            )
        if in_calls:
            with _leaves(inputs.batch) as batch:
                return self._total_of_calls(replace(inputs, batch=batch), runs_backward)
        num_parts, rows = 1, own.rows
        if self._flow.execution_mode.cut == "units":
            num_parts, rows = plan.num_parts, own.micro_rows
        total = torch.zeros((), dtype=torch.float32, device=self._flow.device.torch_device)
        # The backward runs inside `micro_batches` too: units cut the batch there as in the forward.
        with runner.as_engine_calls(), runner.micro_batches(own.rows, rows, num_parts):
            if chunk_tokens is None:
                chunk_tokens = self.chunk_tokens(inputs)
            if chunk_tokens:
                return total.add_(self._chunked(inputs, chunk_tokens))
            self.num_chunks = 1
            share = _share_of_loss(inputs)
            loss_fn = inputs.loss_fn
            if not share and not as_loss(loss_fn).obstacle:  # a mean over no targets is NaN, and 0 * NaN too
                batch, loss_fn = _without_ignored(batch), _finite(loss_fn)
            loss = _scale(run_loss(self._model, batch, loss_fn, has_backward=self.has_backward), share, inputs)
            if runs_backward and loss.requires_grad:
                self._run_backward(loss)
        return total.add_(loss.detach().to(torch.float32))

    def _total_of_calls(self, inputs: PassInputs, runs_backward: bool) -> torch.Tensor:
        """Call the model once per micro-batch. All ranks make as many calls as the largest batch needs."""
        plan, batch = inputs.plan, inputs.batch
        rule, weight = inputs.rule, inputs.weight
        own = plan.ranks[plan.rank]
        total = torch.zeros((), dtype=torch.float32, device=self._flow.device.torch_device)
        parts = list(inputs.form.parts(batch, own.rows, own.micro_rows))
        if inputs.labels is None:
            # Without labels the count is of rows or elements, the same number for each row.
            row_targets = plan.num_targets(rule, plan.rank) // own.rows
            starts = range(0, own.rows, own.micro_rows)
            counts = [row_targets * min(own.micro_rows, own.rows - start) for start in starts]
        else:
            counts = [rule.weight(labels) for labels in inputs.labels.split(own.micro_rows)]
        for number in range(plan.num_parts):
            loss_fn = inputs.loss_fn
            # A rank with fewer parts repeats the last one with weight 0: all ranks call the model equally often.
            position = min(number, len(parts) - 1)
            part = parts[position]
            share = 0.0
            if number < len(parts):
                share = counts[position] / max(1, weight)
            extra: dict[str, Any] = {}
            if not share:  # other ranks may have targets here
                if not plan.has_peers:
                    continue
                part, loss_fn = _without_ignored(part), _finite(inputs.loss_fn)
            elif loss_fn is None and rule.takes_count:
                # A loss with a count divides a sum, so the parts add up unscaled.
                share, extra = 1.0, {"num_items_in_batch": inputs.num_targets}
            with self._flow.runner.as_engine_calls():
                loss = run_loss(self._model, part, loss_fn, has_backward=self.has_backward, **extra)
            loss = _scale(loss, share, inputs)
            if runs_backward and loss.requires_grad:
                self._run_backward(loss)
            total += loss.detach().to(torch.float32)
        return total

    def chunk_tokens(self, inputs: PassInputs) -> int:
        """Return the tokens per head chunk; 0 if the logits are computed at once."""
        is_whole = not (as_loss(inputs.loss_fn).needs.allows_chunks and self._flow.execution_mode.chunks)
        if inputs.head is None or is_whole or (self.chunk_bytes is None and inputs.shared is None):
            return 0
        chunk_bytes = self.chunk_bytes or sys.maxsize
        size = max(1, chunk_bytes // (inputs.head.num_logits * 4))
        if inputs.shared is not None:  # only the head receives the shared targets
            return size
        max_tokens = max(1, chunk_bytes // (inputs.head.vocabulary * 4))
        # The largest batch decides for all ranks: with chunks, the head is used another number of times.
        shapes = [dict(announcement.shapes)["labels"] for announcement in inputs.plan.ranks]
        if any(math.prod(shape) > max_tokens for shape in shapes if isinstance(shape, tuple)):
            return size
        return 0

    def _chunked(self, inputs: PassInputs, size: int) -> torch.Tensor:
        """Run the model up to the head, then the head in chunks, forward and backward. Return the loss.

        The backward below the head runs here too, so the returned loss needs no backward.
        """
        head, loss = inputs.head, as_loss(inputs.loss_fn)
        plan, batch = inputs.plan, inputs.batch
        assert head is not None
        assert inputs.labels is not None
        flow, copy_to_device = self._flow, self._flow.device.copy_to_device
        if inputs.shared is None:
            targets = next_labels({"labels": inputs.labels})
        else:
            targets = inputs.shared.targets.cpu()
        # Tokens, even if the loss counts rows; on the rank with the most, because all ranks run equally many chunks.
        max_targets = max(
            plan.num_targets(replace(inputs.rule, counts_rows=False), rank) for rank in range(len(plan.ranks))
        )
        chunks = build_chunks(targets, size, max(1, -(-max_targets // size)), copy_to_device)
        self.num_chunks = len(chunks)
        with flow.attention.over(inputs.shared, batch, copy_to_device) as (model_batch, batch):
            model_inputs = select_inputs(self._model, model_batch, inputs.loss_fn)
            # Before the model, whose saved inputs would wait in memory.
            term = flow.stages.term_of(loss.term(model_inputs, batch, chunks))
            output = head.base_output(lambda: self._model(**model_inputs))
            hidden = output["last_hidden_state"]
            gradient = None
            if hidden.requires_grad:
                gradient = hidden.new_zeros(hidden.shape)
            head_inputs = HeadInputs(output, batch, chunks, gradient, term, self._scale)
            if gradient is not None:
                flow.runner.check_writes()  # the head's gradients may be updated at once
            with flow.runner.whole_batch():
                if loss.needs is Needs.LOG_PROBS:
                    compute_loss = partial(self._loss_and_gradient, inputs, loss)
                    total = head.loss_from_log_probs(flow, head_inputs, compute_loss)
                else:
                    total = head.mean_loss(flow, head_inputs, inputs.num_targets)
            del term, head_inputs  # a companion's hidden states of all tokens
            if gradient is not None:
                flow.runner.backward(hidden, gradient)
        return total

    def _loss_and_gradient(
        self, inputs: PassInputs, loss_fn: Loss, label_log_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss for log-probabilities, and the gradient if a backward follows."""
        share = _share_of_loss(inputs)
        label_log_probs = torch.nn.functional.pad(label_log_probs[:, :-1], (1, 0))  # from next-token to label positions
        label_log_probs.requires_grad_(torch.is_grad_enabled())
        batch = inputs.batch
        if not share:
            batch = _without_ignored(batch)
        loss = _scale(loss_fn.of(label_log_probs, batch), share, inputs)
        if not label_log_probs.requires_grad:
            return loss.detach(), None
        (slopes,) = torch.autograd.grad(loss, label_log_probs)
        return loss.detach(), torch.nn.functional.pad(slopes[:, 1:] * self._scale, (0, 1))


@contextmanager
def _leaves(batch: Batch) -> Iterator[Batch]:
    """Context for several backwards: a batch with leaves in place of tensors with a graph, which one backward frees.
    Afterwards the gradients go on through the graphs.
    """
    graph_inputs = [t for t in batch.values() if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    leaves = {id(t): t.detach().requires_grad_() for t in graph_inputs}
    # By identity: two keys may name one tensor.
    yield {key: leaves.get(id(value), value) for key, value in batch.items()}
    gradients = [(t, leaf.grad) for t in graph_inputs if (leaf := leaves[id(t)]).grad is not None]
    torch.autograd.backward([t for t, _ in gradients], [gradient for _, gradient in gradients])


def _share_of_loss(inputs: PassInputs) -> float:
    """Return the share of this rank's loss, in this pass, in the whole loss."""
    plan = inputs.plan
    if not plan.has_peers and plan.step is None:
        return 1.0  # the only part is the loss as it is, also without a target
    return plan.weight(inputs.rule, plan.rank) / max(1, inputs.weight)


def _scale(loss: torch.Tensor, share: float, inputs: PassInputs) -> torch.Tensor:
    """Scale a loss part by `share`. A group loss with a nonzero share keeps the metrics."""
    if share:
        as_loss(inputs.loss_fn).keep()
    if share == 1.0:
        return loss
    return loss * share


def _finite(loss_fn: LossFunction | None) -> LossFunction | None:
    """Return a loss function of weight 0. Without a target of its own, as in a mask, it is 0 over the outputs, not NaN.

    A `Loss`, and the loss of a model, are finite on a batch from `_without_ignored`.
    """
    if loss_fn is None or isinstance(loss_fn, Loss):
        return loss_fn

    def finite(outputs: Any, batch: Batch) -> torch.Tensor:
        loss = loss_fn(outputs, batch)
        if not isinstance(loss, torch.Tensor) or bool(loss.isfinite().all()):
            return loss
        tensors = [t for t in tree_iter(outputs) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        return sum((t.where(t.isfinite(), 0.0).sum() * 0.0 for t in tensors), torch.zeros_like(loss))

    return finite


def _without_ignored(batch: Batch) -> dict[str, Any]:
    """Return the batch with finite loss even without targets: ignored labels become 0. The result has weight 0."""
    labels = labels_of(batch)
    if labels is None or labels.is_floating_point():
        return dict(batch)
    return {**batch, "labels": labels.masked_fill(labels == IGNORED, 0)}
