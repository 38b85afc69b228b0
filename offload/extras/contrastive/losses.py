"""InfoNCE over embeddings: each query finds its answer among those of the whole batch, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch.nn.functional import normalize

from offload.distributed.comm import Comm
from offload.engine.loss.batch import Batch
from offload.engine.loss.group_loss import GroupLoss
from offload.layout.residence import DEVICE
from offload.planning.memory import LOSS
from offload.tiers.counters import Ledger

CHUNK_BYTES = 4 << 20
"""Similarities at a time with their masks, in bytes."""
_SIMILARITY_BYTES = 4 + 2
"""Bytes of a similarity: fp32, whether it is left out, and a comparison on the way to this."""
_LEAST_NORM = 1e-12  # as in torch.nn.functional.normalize
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
    """fp32 [texts, groups, width]."""
    keys: torch.Tensor
    """A hash of each text, int64 [texts, groups]."""


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
        self._ledger = Ledger(DEVICE)
        self._pool = POOLINGS[pooling]
        self._temperature = temperature
        self._symmetric = symmetric
        self._sizes = sizes
        self._margin = margin
        self._tilt = 0.0
        """Weight of a slope that is the same for all unit vectors."""

    def trial(self) -> InfoNCE:
        # Slopes of InfoNCE cancel over the rows, which in bf16 leaves rounding errors alone.
        loss = copy(self)
        loss._tilt = 1 / self._temperature
        return loss

    def open(self, comm: Comm, ledger: Ledger) -> None:
        self._comm = comm
        self._ledger = ledger

    def num_bytes(self, num_rows: int, num_own_rows: int, width: int) -> int:
        """Two copies of the own embeddings; those of all ranks with gradients, also in the largest size; and a chunk of
        similarities.
        """
        size, num_groups = max(self._sizes, default=width), num_rows // self.group
        num_texts = num_rows - num_groups
        chunk_bytes = _SIMILARITY_BYTES * num_texts * min(num_groups, _num_chunk_rows(num_texts))
        return 4 * (2 * width * (num_own_rows + num_rows) + 2 * size * num_rows) + chunk_bytes

    def of(self, outputs: Any, batch: Batch) -> torch.Tensor:
        ids = batch["input_ids"]
        mask = batch.get("attention_mask")
        if mask is None:
            mask = torch.ones_like(ids)
        is_real = self._counted(batch, ids.device)
        pooled = self._pool(outputs["last_hidden_state"], mask)
        vectors = pooled.view(len(is_real), self.group, -1).transpose(0, 1)[:, is_real]
        own = Points(vectors, _keys(ids, mask).view(-1, self.group).T[:, is_real])
        whole, begin = self._gather(own)
        mine = slice(begin, begin + vectors.shape[1])
        num_bytes = self.num_bytes(whole.keys.numel(), len(ids), vectors.shape[2])
        with self._ledger.reserve_until(LOSS, num_bytes, is_over=lambda: False):
            losses, are_found, gradient = self._terms(whole, has_gradient=vectors.requires_grad)
        self._newest = {"accuracy": are_found[mine].float()}
        loss = losses[mine].sum()
        if vectors.requires_grad:
            # The value is of the own queries. The gradient is that of the queries on all ranks.
            product = (vectors * gradient[:, mine]).sum()
            loss = loss + (product - product.detach())
        if self._tilt:
            direction = normalize(torch.arange(vectors.shape[2], device=vectors.device).cos(), dim=0)
            loss = loss + self._tilt * (normalize(vectors, dim=2) @ direction).sum()
        return loss / max(1, vectors.shape[1])

    def _gather(self, own: Points) -> tuple[Points, int]:
        """Return the points of all ranks in their order, and the position of the own ones."""
        device = own.vectors.device
        ranks = self._comm.gather_objects(
            (own.vectors.detach().cpu(), own.keys.cpu()), "embeddings of the rows of all ranks"
        )
        begin = sum(keys.shape[1] for _, keys in ranks[: self._comm.rank])
        vectors, keys = (torch.cat(each, 1).to(device) for each in zip(*ranks, strict=True))
        return Points(vectors, keys), begin

    @torch.no_grad()
    def _terms(self, whole: Points, *, has_gradient: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the loss of each group [groups], whether its answer is the most similar text by the largest size, bool
        [groups], and the gradient of the sum of all losses, like the vectors.
        """
        losses = whole.vectors.new_zeros(whole.vectors.shape[1])
        gradient = torch.zeros_like(whole.vectors)
        found = {}
        for size in self._sizes or (whole.vectors.shape[2],):
            found[size] = self._add_size(whole, size, losses, gradient, has_gradient)
        return losses, found[max(found)], gradient

    def _add_size(
        self, whole: Points, size: int, losses: torch.Tensor, gradient: torch.Tensor, has_gradient: bool
    ) -> torch.Tensor:
        """Add the losses by the first `size` numbers, and their gradient. Return whether each answer is the most
        similar text, bool [groups].

        Without autograd: the graph of a chunk would be several times as large as its similarities.
        """
        cut = whole.vectors[..., :size]
        norms = torch.linalg.vector_norm(cut, dim=2, keepdim=True).clamp(min=_LEAST_NORM)
        unit = cut / norms
        slopes = torch.zeros_like(unit)
        compare = partial(self._compare, unit, slopes, has_gradient)
        queries, answers = whole.keys[:2]
        # All answers come first, so the number of a group is also that of its answer.
        texts = whole.keys[1:].flatten()
        are_found = torch.zeros_like(queries, dtype=torch.bool)
        num_rows = _num_chunk_rows(len(texts))
        for begin in range(0, len(queries), num_rows):
            rows = slice(begin, min(begin + num_rows, len(queries)))
            terms, are_found[rows] = compare(0, slice(1, None), rows, _are_partners(queries, answers, rows, texts))
            losses[rows] += terms
            if self._symmetric:
                losses[rows] += compare(1, slice(1), rows, _are_partners(answers, queries, rows, queries))[0]
        along = (unit[..., None, :] @ slopes[..., None])[..., 0]  # a product and a sum would copy all
        slopes.addcmul_(unit, along, value=-1)
        gradient[..., :size] += slopes.div_(norms)
        return are_found

    def _compare(
        self,
        unit: torch.Tensor,
        slopes: torch.Tensor,
        has_gradient: bool,
        member: int,
        others: slice,
        rows: slice,
        left_out: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the part of the cross entropy in the loss, for a member of the groups `rows` among other members, and
        whether the own one is the most similar. Add the gradient to `slopes`.

        unit, slopes: [texts, groups, width]. left_out: bool [rows, others]; the own one always counts.
        """
        points, texts = unit[member, rows], unit[others].view(-1, unit.shape[2])
        scores = points @ texts.T
        own = scores.diagonal(rows.start).clone()
        if self._margin is not None:
            left_out |= scores > own[:, None] + self._margin
        left_out.diagonal(rows.start).fill_(False)
        scores.div_(self._temperature).masked_fill_(left_out, -torch.inf)
        highest, places = scores.max(1, keepdim=True)
        sums = scores.sub_(highest).exp_().sum(1, keepdim=True)
        terms = (highest + sums.log())[:, 0] - own / self._temperature
        share = 1 / (1 + self._symmetric)
        if has_gradient:
            scores.div_(sums).diagonal(rows.start).sub_(1)
            scores *= share / self._temperature
            slopes[member, rows].addmm_(scores, texts)
            slopes[others].view(-1, unit.shape[2]).addmm_(scores.T, points)
        return share * terms, places[:, 0] == torch.arange(rows.start, rows.stop, device=places.device)


def _num_chunk_rows(num_texts: int) -> int:
    return max(1, CHUNK_BYTES // (_SIMILARITY_BYTES * max(1, num_texts)))


def _are_partners(own: torch.Tensor, partners: torch.Tensor, rows: slice, texts: torch.Tensor) -> torch.Tensor:
    """Return whether each text is the partner of a text equal to that of a row, bool [rows, texts].

    own, partners: hashes of pairs of texts, int64 [groups]. rows: some groups. texts: hashes, int64 [texts].
    """
    is_equal = own == own[rows, None]
    found = torch.zeros(len(is_equal), len(texts), dtype=torch.bool, device=texts.device)
    # One comparison for most batches: equal texts are rare, and all pairs of groups and texts would be many.
    for places in is_equal.byte().topk(int(is_equal.sum(1).max())).indices.T:
        known = torch.where(own[places] == own[rows], partners[places], partners[rows])
        found |= texts == known[:, None]
    return found


def _keys(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a hash of the tokens of each row, int64 [rows]: a polynomial modulo 2**64, the same for any padding."""
    powers = torch.full(ids.shape[1:], _FACTOR, dtype=torch.int64, device=ids.device).cumprod(0)
    return ((ids + 1) * mask * powers[mask.cumsum(1) - 1]).sum(1)
