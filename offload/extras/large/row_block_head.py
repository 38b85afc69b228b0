"""Loss of a causal LM whose output weight is cut into row blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from offload.engine.loss.batch import Batch, Chunk, next_labels
from offload.engine.loss.chunked_head import ChunkedHead, HeadInputs, LogProbLoss
from offload.engine.units.stages import Host
from offload.extras.large.row_blocks import RowBlocks


@dataclass(frozen=True)
class _Targets:
    """The tokens in a chunk, with logit statistics.

    chunk: the tokens.
    labels: the next labels, int64 [n].
    log_sums: log-sum-exp over all blocks so far, fp32 [n].
    label_logits: label logits, fp32 [n].
    """

    chunk: Chunk
    labels: torch.Tensor
    log_sums: torch.Tensor
    label_logits: torch.Tensor


class RowBlockHead(ChunkedHead):
    """Runs a head that is split into row blocks, block by block and chunk by chunk. No token has all logits at once.

    A running log-sum-exp over the vocabulary goes from block to block (Milakov and Gimelshein, arXiv:1805.02867). The
    backward recomputes the block logits and derives the softmax from the final log-sum-exp. The head's own code runs on
    the rows of each block, so soft-capping, scaling and other elementwise code stays unchanged. The engine computes the
    cross entropy.
    """

    def __init__(self, head: ChunkedHead, blocks: RowBlocks) -> None:
        super().__init__(head._model, head._base, blocks.num_rows)
        self._blocks = blocks
        self.num_logits = blocks.most_rows  # of a token at one time: chunks are sized by it

    def mean_loss(self, host: Host, inputs: HeadInputs, tokens: int) -> torch.Tensor:
        def mean(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            slopes = None
            if torch.is_grad_enabled():
                slopes = torch.full_like(values, -inputs.scale / tokens)
            return -values.sum() / tokens, slopes

        return self.loss_from_log_probs(host, inputs, mean)

    def loss_from_log_probs(self, host: Host, inputs: HeadInputs, compute_loss: LogProbLoss) -> torch.Tensor:
        targets, gradient = self._targets(inputs), inputs.gradient
        loss, slopes = compute_loss(self._label_log_probs(targets, inputs.batch))
        if slopes is None:
            return loss
        total = None if gradient is None else torch.zeros_like(gradient, dtype=torch.float32).flatten(0, 1)
        for number in reversed(range(len(self._blocks.blocks))):  # the last one is still on the device
            regions = next(unit.regions for unit in host.units if unit.module is self._blocks.blocks[number])
            with host.gradients.repeated(regions):  # the sum over chunks leaves the device once
                for each in targets:
                    self._backward_over(number, host, inputs, each, slopes, total)
        if gradient is not None and total is not None:
            gradient.copy_(total.view_as(gradient))
        return loss

    def trial_loss(self, inputs: HeadInputs, tokens: int) -> float:
        return -float(self._label_log_probs(self._targets(inputs), inputs.batch).sum()) / tokens

    def sums_over(self, number: int, inputs: HeadInputs) -> Iterator[torch.Tensor]:
        """Yield the log-sum-exp total of each chunk over one block, as costly as a part of the loss."""
        for chunk in inputs.chunks:
            yield self._logits(inputs, chunk, number)[0].float().logsumexp(1).sum()

    def _targets(self, inputs: HeadInputs) -> list[_Targets]:
        """Return the statistics per chunk from a pass over all blocks, without a graph."""
        labels, statistics = next_labels(inputs.batch).flatten(), []
        for chunk in inputs.chunks:
            log_sums = torch.full(chunk.places.shape, -torch.inf, dtype=torch.float32, device=labels.device)
            chunk_labels = labels[chunk.places]
            chunk_labels[chunk.num_targets :] = 0  # filler: any valid label, the results are left out
            statistics.append(_Targets(chunk, chunk_labels, log_sums, torch.zeros_like(log_sums)))
        with torch.no_grad():
            for number in range(len(self._blocks.blocks)):  # outside: a block is fetched once for all chunks
                for each in statistics:
                    logits = self._logits(inputs, each.chunk, number)[0].float()
                    torch.logaddexp(each.log_sums, logits.logsumexp(1), out=each.log_sums)
                    is_inside, column = self._blocks.inside(number, each.labels)
                    each.label_logits.copy_(
                        torch.where(is_inside, logits.gather(1, column[:, None])[:, 0], each.label_logits)
                    )
        return statistics

    def _label_log_probs(self, targets: Sequence[_Targets], batch: Batch) -> torch.Tensor:
        """Return next-label log-probabilities, fp32 [rows, tokens]; 0 without a target."""
        label_log_probs = torch.zeros(batch["labels"].shape, dtype=torch.float32, device=batch["labels"].device)
        for each in targets:
            num = each.chunk.num_targets
            label_log_probs.view(-1)[each.chunk.places[:num]] = (each.label_logits - each.log_sums)[:num]
        return label_log_probs

    def _backward_over(
        self,
        number: int,
        host: Host,
        inputs: HeadInputs,
        targets: _Targets,
        slopes: torch.Tensor,
        total: torch.Tensor | None,
    ) -> None:
        """Recompute the chunk logits over one block and run the backward.

        `slopes`: loss gradient with respect to the log-probabilities, [rows, tokens]. Adds to `total`, the hidden state
        gradients [tokens, hidden].
        """
        num, places = targets.chunk.num_targets, targets.chunk.places
        logits, leaf = self._logits(inputs, targets.chunk, number)
        if not logits.requires_grad:
            return
        # Of a log-probability by the logits: one-hot minus softmax, here the columns of one block.
        gradient = (logits.detach().float() - targets.log_sums[:, None]).exp_().neg_()
        is_inside, column = self._blocks.inside(number, targets.labels)
        gradient.scatter_add_(1, column[:, None], is_inside[:, None].to(gradient.dtype))
        gradient *= slopes.flatten()[places][:, None]
        gradient[num:] = 0
        host.runner.backward(logits, gradient.to(logits.dtype), leaf)
        if total is not None and leaf.grad is not None:
            total[places[:num]] += leaf.grad[0, :num]

    def _logits(self, inputs: HeadInputs, chunk: Chunk, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chunk logits over one block [n, rows], and the hidden state leaf below."""
        run, leaf, _, _ = next(self._runs(inputs._replace(chunks=[chunk])))
        with self._blocks.only(number):
            return run().logits[0], leaf
