"""The gradient noise scale: how the gradients of a batch's parts scatter around that of the whole batch (McCandlish et
al., arXiv:1812.06162, appendix A.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from offload.distributed.comm import Comm
from offload.layout.regions import ParameterInfo


class GradientNoise(NamedTuple):
    """Estimates of one step, without bias, over those parameters whose gradients came part by part."""

    trace: float
    """tr(S), of the covariance of the gradients of single targets."""
    square: float
    """|G|^2, of the true gradient: that of the batch less its noise, so that it may be below 0."""
    share: float
    """Of all weights that train, those that it is over."""


class Parts:
    """Is told which part of a batch gradients are of; this one keeps nothing."""

    def forget(self) -> None:
        """A step begins."""

    def cut(self, num_parts: int) -> None:
        """The batch of this rank is cut into so many parts from now on; of one, all gradients are, and of 0, none."""

    @contextmanager
    def within(self, number: int, count: int) -> Iterator[None]:  # noqa: ARG002
        """Within, gradients are of part `number` of the `count` that a unit runs over."""
        yield

    def see(self, index: int, gradient: torch.Tensor, is_sum: bool) -> None:
        """Take what autograd gives parameter number `index`; `is_sum`: of several parts, in pieces of its own."""

    def noise(
        self,
        infos: Sequence[ParameterInfo],  # noqa: ARG002
        squares: Sequence[float],  # noqa: ARG002
        targets: Iterable[int],  # noqa: ARG002
        comm: Comm,  # noqa: ARG002
    ) -> GradientNoise | None:
        """Return the noise of the step that was made; None where it is not known. `squares`: of each parameter's whole
        gradient; `targets`: of each part of this rank. Collective.
        """
        return None


class MeasuredParts(Parts):
    """Squares of each part's gradient, parameter by parameter.

    A parameter counts where its gradient of a part came once and alone: not where a unit runs over the whole batch
    (those that stay on the device, a head in chunks), and not where two uses of it add up (tied weights).
    """

    def __init__(self) -> None:
        self._num_parts = 0
        self._part: int | None = None
        self._squares: dict[int, dict[int, torch.Tensor]] = {}
        self._mixed: set[int] = set()

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

    def see(self, index: int, gradient: torch.Tensor, is_sum: bool) -> None:
        of_parts = self._squares.setdefault(index, {})
        if self._part is None or self._part in of_parts or (is_sum and self._num_parts > 1):
            self._mixed.add(index)
        else:
            of_parts[self._part] = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()

    def noise(
        self, infos: Sequence[ParameterInfo], squares: Sequence[float], targets: Iterable[int], comm: Comm
    ) -> GradientNoise | None:
        trained, counts, sums = [info for info in infos if info.trainable], list(targets), list[float]()
        for info in trained:  # |g_m|^2 / n_m, of the parts that have targets
            found = self._squares.get(info.index, {})
            sums.append(sum(float(found[part]) / count for part, count in enumerate(counts) if count and part in found))
        pure = [float(info.index not in self._mixed) for info in trained]
        own = [*pure, *sums, float(sum(map(bool, counts))), float(sum(counts))]
        *told, num_parts, num_targets = comm.sum_in_order(own, "noise of the gradients")
        counted = [
            (info.numel, square, squares[info.index])
            for info, is_pure, square in zip(trained, told[: len(trained)], told[len(trained) :], strict=True)
            if is_pure == comm.size
        ]
        if num_parts < 2 or not counted:
            return None
        # With g_m the sum over the n_m targets of part m, over N: E[sum |g_m|^2 N / n_m] = |G|^2 + tr(S) M / N.
        apart, whole = num_targets * sum(each[1] for each in counted), sum(each[2] for each in counted)
        trace = num_targets * (apart - whole) / (num_parts - 1)
        share = sum(each[0] for each in counted) / sum(info.numel for info in trained)
        return GradientNoise(trace, whole - trace / num_targets, share)
