"""The Muon update rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from offload.errors import ConfigError
from offload.extras.rules.pieces import PIECE, count_of, master_piece, put_piece
from offload.layout.planes import Plane
from offload.layout.regions import align
from offload.optim.adamw import AdamW
from offload.optim.rule import ParameterTraits, RuleChoice, UpdateRule, UpdateStep, check_number

_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_MOST_STEPS = 100  # as torch
_ALIGNMENT = 256  # bytes: products over memory with another start may have other bits


@dataclass(frozen=True)
class Muon(UpdateRule):
    """Momentum with orthogonalization (Jordan et al., https://kellerjordan.github.io/posts/muon/), computed like
    `torch.optim.Muon`.

    Applies to matrices in blocks, and to experts stored as one three-dimensional parameter. `rest` is the rule for all
    other parameters: embeddings, the head, vectors, convolutions. `groups`: see `UpdateRule`; groups in `rest` apply to
    the parameters updated by `rest`. The ratio between both learning rates stays constant.

    A matrix is orthogonalized by `ns_steps` Newton-Schulz steps in bf16 on the device; the result bits depend on the
    matrix products there. adjust_lr_fn: None or "original" multiplies the learning rate for an n x m matrix by
    sqrt(max(1, n / m)); "match_rms_adamw" by 0.2 sqrt(max(n, m)), so a good rate for AdamW is good here too
    (arXiv:2502.16982).
    """

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    rest: UpdateRule = field(default_factory=AdamW)
    decay_1d: bool = False
    groups: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    by_matrix: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("momentum", self.momentum)
        # Another Muon has no rule for these either; a rule without gradients trains by another method.
        if isinstance(self.rest, Muon) or not self.rest.has_gradients:
            raise ConfigError(
                f"Muon's rest is {self.rest!r}; it must be an update rule for parameters that are no matrices, such as "
                "AdamW."
            )
        if not 0 <= self.ns_steps < _MOST_STEPS:
            raise ConfigError(
                f"optimizer.ns_steps is {self.ns_steps!r}; it must be a whole number below {_MOST_STEPS}."
            )
        if self.adjust_lr_fn not in _ADJUSTMENTS:
            raise ConfigError(
                f"optimizer.adjust_lr_fn is {self.adjust_lr_fn!r}; it must be original, match_rms_adamw or none."
            )

    @classmethod
    def configured(cls, settings: Mapping[str, Any]) -> UpdateRule:
        rest = AdamW.configured({**settings, "groups": ()})
        # The learning rate of the command line is one for AdamW, and this adjustment fits it.
        adjust = settings.get("adjust_lr_fn") or "match_rms_adamw"
        return super().configured({**settings, "rest": rest, "adjust_lr_fn": adjust, "eps": None})  # eps: for AdamW

    @property
    def moments(self) -> tuple[Plane, ...]:
        return (Plane("momentum_buffer", torch.float32),)

    @property
    def others(self) -> tuple[UpdateRule, ...]:
        return self.rest.parts

    def default(self, parameter: ParameterTraits) -> RuleChoice:
        # Three axes are the experts of a layer in one parameter: a matrix each.
        is_matrix = len(parameter.shape) in (2, 3) and not parameter.is_filter and not parameter.is_embedding
        if parameter.in_block and is_matrix and 0 not in parameter.shape:
            return RuleChoice(0, 1.0, self.weight_decay)
        chosen = self.rest.choose(parameter)
        return replace(chosen, rule=1 + chosen.rule, lr_scale=chosen.lr_scale * self.ratio(self.rest))

    def workspace_bytes(self, shape: tuple[int, ...]) -> int:
        return sum(align(2 * size, _ALIGNMENT) for size in _sizes(*shape[-2:]))

    def update(self, states: Mapping[str, torch.Tensor], gradients: torch.Tensor, by: UpdateStep) -> int | torch.Tensor:
        rows, columns = by.shape[-2:]
        num_wrong = torch.zeros((), dtype=torch.int64, device=gradients.device)
        memory = by.workspace
        if memory is None:
            memory = torch.empty(self.workspace_bytes(by.shape), dtype=torch.uint8, device=gradients.device)
        work, end = [], 0  # parts of one planned buffer
        for size in _sizes(rows, columns):
            work.append(memory[end : end + 2 * size].view(torch.bfloat16))
            end += align(2 * size, _ALIGNMENT)
        factor = math.sqrt(max(1, rows / columns))
        if self.adjust_lr_fn == "match_rms_adamw":
            factor = 0.2 * math.sqrt(max(rows, columns))
        adjusted = by.lr * factor
        step = max(1, PIECE // columns)
        for matrix in range(0, gradients.numel(), rows * columns):
            for begin in range(matrix, matrix + rows * columns, PIECE):
                piece = slice(begin, min(begin + PIECE, matrix + rows * columns))
                gradient = gradients[piece].float()
                if by.scale != 1.0:
                    gradient = gradient * by.scale
                # torch's operations in torch's order, for its bits.
                momentum = states["momentum_buffer"][piece].lerp_(gradient, 1 - self.momentum)
                change = momentum
                if self.nesterov:
                    change = gradient.lerp(momentum, self.momentum)
                work[0][begin - matrix : piece.stop - matrix].copy_(change.bfloat16())
            orthogonal = self._orthogonalised(rows, columns, work)
            for row in range(0, rows, step):
                last = min(row + step, rows)
                piece = slice(matrix + row * columns, matrix + last * columns)
                weights = master_piece(states, piece).view(-1, columns)
                weights.mul_(1 - by.lr * by.weight_decay)
                weights.add_(orthogonal[row:last].to(weights.device), alpha=-adjusted)
                num_wrong += put_piece(states, piece, weights.view(-1))
        return count_of(num_wrong)

    def _orthogonalised(self, rows: int, columns: int, work: list[torch.Tensor]) -> torch.Tensor:
        """Return the approximate orthogonal factor of a matrix, bf16 [rows, columns] on the device.

        work: four bf16 buffers, all overwritten; the first holds the matrix. Operations and order follow torch.
        """
        first, second, gram, update = work
        is_tall = rows > columns
        short, long = min(rows, columns), max(rows, columns)
        momentum = first.view(rows, columns)
        if is_tall:  # the Gram matrix then has the smaller side
            momentum = momentum.T
        momentum.div_(momentum.norm().clamp(min=self.eps))
        gram, update = gram.view(short, short), update.view(short, short)
        a, b, c = self.ns_coefficients
        for _ in range(self.ns_steps):
            torch.mm(momentum, momentum.T, out=gram)
            torch.addmm(gram, gram, gram, beta=b, alpha=c, out=update)
            target = second.view(short, long)
            torch.addmm(momentum, update, momentum, beta=a, out=target)
            momentum = target
            first, second = second, first  # so the next step writes over the matrix before
        if is_tall:
            return momentum.T
        return momentum


def _sizes(rows: int, columns: int) -> tuple[int, int, int, int]:
    """Return element counts for a matrix, the next iterate, the Gram matrix, and a polynomial in the Gram matrix."""
    return rows * columns, rows * columns, min(rows, columns) ** 2, min(rows, columns) ** 2
