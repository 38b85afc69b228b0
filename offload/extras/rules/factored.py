"""Second moments per row and column instead of per element (Adafactor, arXiv:1804.04235), for `by_matrix` rules."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from offload.errors import ConfigError
from offload.extras.rules.pieces import PIECE, count_of, master_piece, put_piece
from offload.layout.planes import Factor
from offload.optim.rule import UpdateRule, UpdateStep, check_number

_ROWS = Factor("row_var", "rows")
_COLUMNS = Factor("col_var", "columns")
_ELEMENTS = Factor("variance", "elements")
FACTORS = _ROWS, _COLUMNS, _ELEMENTS


class _MatrixPiece(NamedTuple):
    """Part of a parameter on this rank: rows of one or more matrices, or a range of a vector. `begin` in the flat
    parameter, and shape.
    """

    span: slice
    shape: tuple[int, int, int]
    matrices: slice = slice(0, 1)
    rows: slice = slice(0, 1)


_Take = Callable[[_MatrixPiece], torch.Tensor]
"""Function from a piece to a tensor [matrices, rows, columns]."""


class Factored(UpdateRule):
    """Base class for rules with factored second moments. The update is the gradient divided by the root second
    moment, scaled by the root mean square of the parameter. For a matrix, row means and column means approximate the
    second moment.

    All sums are float64 pairwise sums, identical on every machine. Temporaries cover one piece at a time, in three
    passes over a parameter: means, update length, update.
    """

    by_matrix: ClassVar[bool] = True
    steered: ClassVar[tuple[str, ...]] = ("beta2_decay", "eps", "d")

    beta2_decay: float
    eps: tuple[float | None, float]
    d: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -math.inf < self.beta2_decay <= 0.0:
            raise ConfigError(f"optimizer.beta2_decay is {self.beta2_decay!r}; it must be a number, at most 0.")
        check_number("d", self.d, 1.0)
        if not all(0.0 <= number < math.inf for number in self.eps if number is not None):
            raise ConfigError(
                f"optimizer.eps is {self.eps!r}; it must be two finite numbers, not negative; the first may be none."
            )
        # A list from a configuration file would make the rule unhashable.
        object.__setattr__(self, "eps", tuple(self.eps))

    @classmethod
    def configured(cls, settings: Mapping[str, Any]) -> UpdateRule:
        return super().configured({**settings, "eps": None})  # the configured eps is one number, for AdamW

    @property
    def factors(self) -> tuple[Factor, ...]:
        return FACTORS

    # -- differences between the rules -------------------------------------------------------------------------

    @property
    def _floor(self) -> float:
        """Constant added to the squared gradient."""
        return 0.0

    @abstractmethod
    def _inverse_root(self, rows: torch.Tensor, columns: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return the inverse root of the second moment approximated by the factors, as a new tensor.

        rows: [matrices, rows, 1]. columns: [matrices, 1, columns]. mean: mean over all rows, [matrices, 1, 1].
        """

    @abstractmethod
    def _inverse_root_of(self, variance: torch.Tensor) -> torch.Tensor:
        """Return the inverse root of an elementwise second moment, as a new tensor."""

    @abstractmethod
    def _rates(self, by: UpdateStep, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (factor on the normalized update, learning rate for the weight decay).

        size: root mean square of the parameter, 0-dim float64.
        """

    # -- the update ------------------------------------------------------------------------------------------

    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        shape, learn = by.shape, self._learn_factors
        if len(shape) < 2:  # a vector is a matrix with one column
            shape, learn = (gradients.numel(), 1), self._learn_elements
        pieces = list(_pieces_of(shape))

        def gradient(piece: _MatrixPiece) -> torch.Tensor:
            gradient_piece = gradients[piece.span].float()
            if by.scale != 1.0:  # without clipping a product would only copy
                gradient_piece = gradient_piece * by.scale
            return gradient_piece.view(piece.shape)

        size = _zero(gradients)
        for piece in pieces:
            size += _fold(master_piece(states, piece.span).double().square_(), 0)
        inverse_root = learn(states, by, pieces, gradient)
        length = _zero(gradients)
        for piece in pieces:
            # Computed twice, for the length and again below: kept between, the update would be a copy of the parameter.
            update = inverse_root(piece).mul_(gradient(piece))
            length += _fold(update.double().square_().view(-1), 0)
        root = math.sqrt(gradients.numel())
        rate, decay_rate = self._rates(by, size.sqrt() / root)
        rate = (rate / (length.sqrt() / (root * self.d)).clamp(min=1.0)).float()  # an update longer than d is cut
        num_wrong = torch.zeros((), dtype=torch.int64, device=gradients.device)
        for piece in pieces:
            update = inverse_root(piece).mul_(gradient(piece)).mul_(rate)
            weights = master_piece(states, piece.span)
            if by.weight_decay:
                weights.mul_((1.0 - decay_rate * by.weight_decay).float())
            num_wrong += put_piece(states, piece.span, weights.sub_(update.view(-1)))
        return count_of(num_wrong)

    def _learn_factors(
        self, states: Mapping[str, torch.Tensor], by: UpdateStep, pieces: Sequence[_MatrixPiece], gradient: _Take
    ) -> _Take:
        """Update the factors of matrices for this step. Return a function from a piece to the inverse root of the
        second moment.
        """
        num_rows, num_columns = by.shape[-2:]
        rows, columns = states[_ROWS.name].view(-1, num_rows), states[_COLUMNS.name].view(-1, num_columns)
        # Whole means first: each piece of the update needs the columns of all rows.
        by_row = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
        by_column = torch.zeros(columns.shape, dtype=torch.float64, device=rows.device)
        for piece in pieces:
            squares = gradient(piece).double().square_()
            by_row[piece.matrices, piece.rows] = _fold(squares, -1)
            by_column[piece.matrices] += _fold(squares, -2)
        _approach(rows, by_row.div_(num_columns).add_(self._floor), by.step**self.beta2_decay)
        _approach(columns, by_column.div_(num_rows).add_(self._floor), by.step**self.beta2_decay)
        mean = (_fold(rows.double(), -1) / num_rows).float()[:, None, None]

        def inverse_root(piece: _MatrixPiece) -> torch.Tensor:
            means = rows[piece.matrices, piece.rows].unsqueeze(-1), columns[piece.matrices].unsqueeze(-2)
            return self._inverse_root(*means, mean[piece.matrices])

        return inverse_root

    def _learn_elements(
        self, states: Mapping[str, torch.Tensor], by: UpdateStep, pieces: Sequence[_MatrixPiece], gradient: _Take
    ) -> _Take:
        """Same as `_learn_factors`, for a vector."""
        variance = states[_ELEMENTS.name]
        for piece in pieces:
            squares = gradient(piece).double().square_().add_(self._floor)
            _approach(variance[piece.span], squares.view(-1), by.step**self.beta2_decay)
        return lambda piece: self._inverse_root_of(variance[piece.span]).view(piece.shape)


def _zero(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64, device=like.device)


def _approach(average: torch.Tensor, value: torch.Tensor, weight: float) -> None:
    """Move fp32 averages toward float64 values by the fraction `weight` of the difference."""
    average.copy_(torch.sub(value, average).mul_(weight).add_(average))


def _fold(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Return pairwise sums along a dimension. Elementwise additions only, so thread count and vector width do not
    matter.
    """
    while (count := values.shape[dim]) > 1:
        half = count // 2
        sums = values.narrow(dim, 0, half) + values.narrow(dim, half, half)
        if count % 2:
            sums.select(dim, 0).add_(values.select(dim, count - 1))
        values = sums
    return values.sum(dim)


def _pieces_of(shape: Sequence[int]) -> Iterator[_MatrixPiece]:
    """Split a parameter into pieces with about PIECE elements: several matrices, or some rows from one."""
    count = math.prod(shape[:-2])
    rows, columns = shape[-2:]
    if rows * columns <= PIECE:
        size, step = rows * columns, PIECE // (rows * columns)
        for begin in range(0, count, step):
            end = min(begin + step, count)
            yield _MatrixPiece(
                slice(begin * size, end * size), (end - begin, rows, columns), slice(begin, end), slice(0, rows)
            )
        return
    step = max(1, PIECE // columns)
    for matrix in range(count):
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            span = slice((matrix * rows + begin) * columns, (matrix * rows + end) * columns)
            yield _MatrixPiece(span, (1, end - begin, columns), slice(matrix, matrix + 1), slice(begin, end))


@dataclass(frozen=True)
class Adafactor(Factored):
    """Factored second moments without a first moment (Shazeer & Stern, arXiv:1804.04235), computed like
    `torch.optim.Adafactor`.

    `groups` and `decay_1d`: see `UpdateRule`. The learning rate is relative to the weight magnitude and at most 1 /
    sqrt(step). An n x m parameter stores n + m numbers, a vector one per element. Sums are float64 where torch uses
    float32: an update agrees with torch within a few parts in 10 million, and has the same bits for any number of
    threads.
    """

    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    decay_1d: bool = False
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    @property
    def _eps(self) -> float:
        if self.eps[0] is None:
            return torch.finfo(torch.float32).eps
        return self.eps[0]

    def _inverse_root(self, rows: torch.Tensor, columns: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return (rows * columns).div_(mean.clamp(min=self._eps)).clamp_(min=self._eps**2).rsqrt_()

    def _inverse_root_of(self, variance: torch.Tensor) -> torch.Tensor:
        return variance.clamp(min=self._eps**2).rsqrt_()

    def _rates(self, by: UpdateStep, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rate = size.clamp(min=self.eps[1]) * min(by.lr, by.step**-0.5)
        return rate, torch.full_like(rate, by.lr)


@dataclass(frozen=True)
class AdaLomo(Factored):
    """LOMO with an adaptive learning rate (Lv et al., arXiv:2310.10195, algorithm 1): factored second moments, and
    updates normalized per parameter.

    `groups` and `decay_1d`: see `UpdateRule`. For gradient g and step t, r and c approach the row and column means of
    g^2 + eps[0] with weight t^beta2_decay. Then u = g / sqrt(r c / mean(r)), and w -= lr max(eps[1], rms(w)) u / max(1,
    rms(u) / d), so the learning rate is relative to the weight magnitude. An n x m parameter stores n + m numbers.
    Gradients are dropped at once, and clipping is unnecessary; if a norm is requested or non-finite gradients are
    skipped, a step needs a separate backward.
    """

    lr: float = 1e-3
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (1e-30, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    decay_1d: bool = False
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    drops_gradients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps[0] or self.eps[0] < torch.finfo(torch.float32).tiny:
            raise ConfigError(f"optimizer.eps is {self.eps!r}; the first must be at least 1.2e-38 for AdaLomo.")

    @property
    def _floor(self) -> float:
        return self.eps[0] or 0.0

    def _inverse_root(self, rows: torch.Tensor, columns: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return (rows / mean).rsqrt_() * columns.rsqrt()  # multiplied first, both factors could underflow in fp32

    def _inverse_root_of(self, variance: torch.Tensor) -> torch.Tensor:
        return variance.rsqrt()

    def _rates(self, by: UpdateStep, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rate = size.clamp(min=self.eps[1]) * by.lr
        return rate, rate
