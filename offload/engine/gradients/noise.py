"""Gradient noise scale (McCandlish et al., arXiv:1812.06162, appendix A.1).

Measures the scatter of micro-batch gradients around the whole batch's gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from offload.distributed.comm import Comm
from offload.layout.regions import ParameterInfo, Piece


class GradientNoise(NamedTuple):
    """Unbiased estimates from one step, over the parameters with separate gradients per micro-batch."""

    trace: float
    """tr(S): trace of the single-target gradient covariance."""
    square: float
    """|G|^2, the true gradient's square: the batch gradient's square minus the noise, so possibly below 0."""
    share: float
    """Fraction of trainable weights in the estimate."""


class NoiseEstimator:
    """Receives gradients together with their batch part (micro-batch); this base class keeps nothing."""

    def forget(self) -> None:
        """Prepare for a step."""

    def cut(self, num_parts: int) -> None:
        """Set the part count for this rank's batch. 1: all gradients belong to one part; 0: parts are unknown."""

    @contextmanager
    def within(self, number: int, count: int) -> Iterator[None]:  # noqa: ARG002
        """Context: gradients belong to part `number` among the `count` parts a unit runs over."""
        yield

    def record(self, piece: Piece, gradient: torch.Tensor, is_sum: bool) -> None:
        """Record a gradient for a parameter piece. `is_sum`: a sum over several parts, split by the unit itself."""

    def estimate(
        self,
        infos: Sequence[ParameterInfo],  # noqa: ARG002
        squares: Mapping[Piece, float],  # noqa: ARG002
        targets: Iterable[int],  # noqa: ARG002
        comm: Comm,  # noqa: ARG002
    ) -> GradientNoise | None:
        """Return the step's noise; None: unknown.

        `squares`: each piece's whole gradient, squared. `targets`: target count in each part on this rank. Collective.
        """
        return None


class MicroBatchNoise(NoiseEstimator):
    """Squares of each part's gradients, by parameter piece.

    A piece counts if each part's gradient came once and separately. Excluded: units that run over the whole batch
    (resident units, a head in chunks), and sums over two uses (tied weights).
    """

    def __init__(self) -> None:
        self._num_parts = 0
        self._part: int | None = None
        self._squares: dict[Piece, dict[int, torch.Tensor]] = {}
        self._mixed: set[Piece] = set()

    def forget(self) -> None:
        self._squares.clear()
        self._mixed.clear()

    def cut(self, num_parts: int) -> None:
        self._num_parts, self._part = num_parts, 0 if num_parts == 1 else None

    @contextmanager
    def within(self, number: int, count: int) -> Iterator[None]:
        before, self._part = self._part, number if count == self._num_parts else None
        try:
            yield
        finally:
            self._part = before

    def record(self, piece: Piece, gradient: torch.Tensor, is_sum: bool) -> None:
        of_parts = self._squares.setdefault(piece, {})
        if self._part is None or self._part in of_parts or (is_sum and self._num_parts > 1):
            self._mixed.add(piece)
        else:
            of_parts[self._part] = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()

    def estimate(
        self, infos: Sequence[ParameterInfo], squares: Mapping[Piece, float], targets: Iterable[int], comm: Comm
    ) -> GradientNoise | None:
        trainable = [piece for piece in squares if infos[piece.parameter].trainable]
        counts, sums = list(targets), list[float]()
        for piece in trainable:  # |g_m|^2 / n_m, for parts with targets
            part_squares = self._squares.get(piece, {})
            sums.append(
                sum(
                    float(part_squares[part]) / count
                    for part, count in enumerate(counts)
                    if count and part in part_squares
                )
            )
        pure = [float(piece not in self._mixed) for piece in trainable]
        own = [*pure, *sums, float(sum(map(bool, counts))), float(sum(counts))]
        *totals, num_parts, num_targets = comm.sum_in_order(own, "noise of the gradients")
        counted = [
            (piece.numel, square, squares[piece])
            for piece, is_pure, square in zip(
                trainable, totals[: len(trainable)], totals[len(trainable) :], strict=True
            )
            if is_pure == comm.size
        ]
        if num_parts < 2 or not counted:
            return None
        # With g_m the sum over the n_m targets of part m, divided by N: E[sum |g_m|^2 N / n_m] = |G|^2 + tr(S) M / N.
        scattered, whole = num_targets * sum(each[1] for each in counted), sum(each[2] for each in counted)
        trace = num_targets * (scattered - whole) / (num_parts - 1)
        share = sum(each[0] for each in counted) / sum(piece.numel for piece in trainable)
        return GradientNoise(trace, whole - trace / num_targets, share)
