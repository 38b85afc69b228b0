"""InfoNCE over embeddings: each query finds its answer among those of the whole batch, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch.nn.functional import normalize

from offload.distributed.comm import Comm
from offload.engine.loss.batch import Batch
from offload.engine.loss.group_loss import GroupLoss

CHUNK_BYTES = 32 << 20
"""Similarities in fp32 at a time, in bytes: a chunk has some four tensors of this size with its graph."""
_FACTOR = 6364136223846793005  # odd, so no power of it modulo 2**64 is even


def _mean(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # A product of matrices, because a masked copy of all states would be as large as they are.
    sums = (mask[:, None].to(states.dtype) @ states)[:, 0]
    return sums.float() / mask.sum(1, keepdim=True).clamp(min=1)


def _last(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _at((mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1), states)


def _cls(states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return _at(mask.long().argmax(1), states)  # the first token, after padding on the left


def _at(places: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    return states[torch.arange(len(states), device=states.device), places].float()


POOLINGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"mean": _mean, "last": _last, "cls": _cls}
"""By name, functions from hidden states [rows, tokens, width] and a mask [rows, tokens] to embeddings, fp32 [rows,
width].
"""


class Points(NamedTuple):
    """Embeddings of groups of texts: a query, its answer, and hard negatives."""

    vectors: torch.Tensor
    """fp32 [groups, texts, width]."""
    keys: torch.Tensor
    """A hash of each text, int64 [groups, texts]."""


class InfoNCE(GroupLoss):
    """Mean over queries of the cross entropy of the answer among all answers and negatives in the batch (van den Oord
    et al. 2018, arXiv:1807.03748, equation 4), by cosine similarities over `temperature`.

    A group of rows is a query, its answer, and `negatives` hard negatives. Left out are texts that answer an equal
    query of the batch, also where they are hard negatives, and, with a margin, texts more similar to the query than the
    answer plus `margin` (Zhang et al. 2025, arXiv:2506.05176, equation 2): they are probably answers too.

    symmetric: half of the loss is the cross entropy of the query of each answer, among all queries.
    sizes: the loss is the sum over the first so many numbers of the embeddings (Kusupati et al. 2022,
    arXiv:2205.13147). Empty: all numbers.

    A group counts if each of its rows has a label. Over ranks, each one computes the terms of all, in one order.
    """

    own: ClassVar[frozenset[str]] = frozenset({"labels"})
    obstacle = "its loss compares each row with all others"
    shifts = False

    def __init__(
        self,
        negatives: int = 0,
        pooling: str = "mean",
        temperature: float = 0.05,
        symmetric: bool = True,
        sizes: Sequence[int] = (),
        margin: float | None = None,
    ) -> None:
        super().__init__()
        self.group = 2 + negatives
        self._comm = Comm()
        self._pool = POOLINGS[pooling]
        self._temperature = temperature
        self._symmetric = symmetric
        self._sizes = sizes
        self._margin = margin

    def open(self, comm: Comm) -> None:
        self._comm = comm

    def of(self, outputs: Any, batch: Batch) -> torch.Tensor:
        ids = batch["input_ids"]
        mask = batch.get("attention_mask")
        if mask is None:
            mask = torch.ones_like(ids)
        is_real = self._counted(batch, ids.device)
        pooled = self._pool(outputs["last_hidden_state"], mask)
        vectors = pooled.view(len(is_real), self.group, -1)[is_real]
        own = Points(vectors, _keys(ids, mask).view(-1, self.group)[is_real])
        whole, begin = self._gather(own)
        mine = slice(begin, begin + len(vectors))
        losses, are_found, gradient = self._terms(whole, has_gradient=vectors.requires_grad)
        self._newest = {"accuracy": are_found[mine].float()}
        loss = losses[mine].sum()
        if gradient is not None:
            # The value is of the own queries. The gradient is that of the queries on all ranks.
            product = (vectors * gradient[mine]).sum()
            loss = loss + (product - product.detach())
        return loss / max(1, len(vectors))

    def _gather(self, own: Points) -> tuple[Points, int]:
        """Return the points of all ranks in their order, and the position of the own ones."""
        device = own.vectors.device
        ranks = self._comm.gather_objects(
            (own.vectors.detach().cpu(), own.keys.cpu()), "embeddings of the rows of all ranks"
        )
        begin = sum(len(keys) for _, keys in ranks[: self._comm.rank])
        vectors, keys = (torch.cat(each).to(device) for each in zip(*ranks, strict=True))
        return Points(vectors, keys), begin

    def _terms(self, whole: Points, *, has_gradient: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the loss of each group [groups], whether its answer is the most similar text by the largest size, bool
        [groups], and the gradient of the sum of all losses, like the vectors. Similarities exist for some rows at a
        time.
        """
        vectors, keys = whole
        losses = vectors.new_zeros(len(vectors))
        are_found = keys.new_zeros(len(keys), dtype=torch.bool)
        gradient = None
        if has_gradient:
            gradient = torch.zeros_like(vectors)
        num_rows = max(1, CHUNK_BYTES // (4 * max(1, keys[:, 1:].numel())))
        sizes = self._sizes or (vectors.shape[2],)
        for size in sizes:
            with torch.set_grad_enabled(has_gradient):
                leaf = vectors[..., :size].clone().requires_grad_(has_gradient)
                unit = normalize(leaf, dim=2)
                cut = unit.detach().requires_grad_(has_gradient)
                slopes = torch.zeros_like(cut)
                for rows in torch.arange(len(vectors), device=vectors.device).split(num_rows):
                    if not len(rows):  # no rank has a group
                        break
                    terms, are_nearest = self._terms_of(Points(cut, keys), rows)
                    losses[rows] += terms.detach()
                    if size == max(sizes):
                        are_found[rows] = are_nearest
                    if has_gradient:
                        slopes += torch.autograd.grad(terms.sum(), cut)[0]
                if gradient is not None:
                    gradient[..., :size] += torch.autograd.grad(unit, leaf, slopes)[0]
        return losses, are_found, gradient

    def _terms_of(self, points: Points, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of the groups `rows`, and whether their answers are the most similar texts."""
        vectors, keys = points
        # All answers come first, so the number of a group is also that of its answer.
        texts, text_keys = vectors[:, 1:].transpose(0, 1).flatten(0, 1), keys[:, 1:].T.flatten()
        queries, answers = keys[:, 0], keys[:, 1]
        is_answer = _are_partners(queries, answers, rows, text_keys)
        terms, are_found = self._cross_entropy(vectors[rows, 0], texts, rows, is_answer)
        if self._symmetric:
            is_query = _are_partners(answers, queries, rows, queries)
            terms = (terms + self._cross_entropy(vectors[rows, 1], vectors[:, 0], rows, is_query)[0]) / 2
        return terms, are_found

    def _cross_entropy(
        self, points: torch.Tensor, texts: torch.Tensor, targets: torch.Tensor, left_out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cross entropy of each point's text, number `targets` [points], and whether it is the most similar.

        points, texts: unit vectors [points or texts, width]. left_out: bool [points, texts]; a target always counts.
        """
        similarities = points @ texts.T
        own = similarities.gather(1, targets[:, None])
        if self._margin is not None:
            left_out = left_out | (similarities.detach() > own.detach() + self._margin)
        left_out = left_out.scatter(1, targets[:, None], torch.zeros_like(left_out[:, :1]))
        scores = (similarities / self._temperature).masked_fill(left_out, -torch.inf)
        return scores.logsumexp(1) - own[:, 0] / self._temperature, scores.argmax(1) == targets


def _are_partners(own: torch.Tensor, partners: torch.Tensor, rows: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """Return whether each text is the partner of a text equal to that of a row, bool [rows, texts].

    own, partners: hashes of pairs of texts, int64 [groups]. rows: groups, int64 [rows]. texts: hashes, int64 [texts].
    """
    is_equal = own == own[rows, None]
    found = torch.zeros(len(rows), len(texts), dtype=torch.bool, device=texts.device)
    # One comparison for most batches: equal texts are rare, and all pairs of groups and texts would be many.
    for places in is_equal.byte().topk(int(is_equal.sum(1).max())).indices.T:
        known = torch.where(own[places] == own[rows], partners[places], partners[rows])
        found |= texts == known[:, None]
    return found


def _keys(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a hash of the tokens of each row, int64 [rows]: a polynomial modulo 2**64, the same for any padding."""
    powers = torch.full(ids.shape[1:], _FACTOR, dtype=torch.int64, device=ids.device).cumprod(0)
    return ((ids + 1) * mask * powers[mask.cumsum(1) - 1]).sum(1)
