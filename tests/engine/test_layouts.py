"""Copied tensors keep strides and alignment, since both decide the summation order in torch kernels."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offload import Engine, Placement
from offload.engine.units.activation_offload import TensorLayout
from tests.cases.models import build
from tests.engine.compare import backward_both, train_both, update_both
from tests.engine.handmade import WORDS, cross_entropy, words
from tests.engine.reference import Reference, count_labels

TEN = 10
"""Width, chosen so that a row (ten floats) does not end on a 16-byte boundary."""


class Channels(nn.Module):
    """Normalize channel-first input, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.BatchNorm1d(TEN), nn.Conv1d(TEN, TEN, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.mix(self.norm(h)))


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(TEN, TEN)

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.mix(h))


class Layered(nn.Module):
    """Apply `view` between embedding and blocks, and `back` between blocks and head."""

    def __init__(self, block: type[nn.Module], view: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 2 * TEN), nn.Linear(TEN, WORDS)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.view, self.back = view, back

    def forward(self, x: Tensor) -> Tensor:
        h = self.view(self.embedding(x))
        for block in self.blocks:
            h = block(h)
        return self.head(self.back(h)).reshape(len(x), -1, WORDS)


def same(h: Tensor) -> Tensor:
    return h


MODELS: dict[str, Callable[[], nn.Module]] = {
    "channel first": lambda: Layered(
        Channels, lambda h: h[..., :TEN].contiguous().transpose(1, 2), lambda h: h.transpose(1, 2)
    ),
    "tokens last": lambda: Layered(Square, lambda h: h[..., :TEN].flatten(0, 1).t().contiguous().t(), same),
    "one of two": lambda: Layered(Square, lambda h: h.chunk(2, -1)[1], same),
    "every other": lambda: Layered(Square, lambda h: h[..., ::2], same),
    "one token": lambda: Layered(Square, lambda h: h[..., :TEN].contiguous()[:, 1], same),
    "expanded": lambda: Layered(Square, lambda h: h[:, :1, :TEN].expand(-1, 6, -1), same),
}


def loss_of(model: nn.Module, seed: int) -> Tensor:
    outputs = model(words(seed)["x"])
    return functional.cross_entropy(outputs.flatten(0, 1), words(seed)["x"][:, : outputs.shape[1]].flatten())


@pytest.mark.parametrize("activations", ["cpu", "nvme"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_an_input_that_waited_below_the_device_comes_back_as_it_lay(
    make: Callable[[], nn.Module], activations: str, tmp_path: Path
) -> None:
    model = build(make)
    reference = Reference(model)
    engine = Engine(model, placement=Placement(activations=activations, nvme_dir=str(tmp_path)))
    for number in range(2):
        backward_both(engine, reference, loss_of, number)
    update_both(engine, reference)
    engine.close()


class Positions(nn.Module):
    """Return a slice of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, TEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[1 : 1 + x.shape[1]]


class FromPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions, self.embedding, self.head = Positions(), nn.Embedding(WORDS, TEN), nn.Linear(TEN, WORDS)
        self.blocks = nn.ModuleList(Square() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        where = self.positions(x)
        for block in self.blocks:
            where = block(where)
        return self.head(self.embedding(x) + where)


def test_a_result_that_is_a_part_of_a_weight_lies_as_it_does_there() -> None:
    train_both(build(FromPositions), [words(seed) for seed in range(3)], loss_fn=cross_entropy, count=count_labels)


def test_a_layout_is_kept_by_its_copies_and_those_of_its_parts() -> None:
    chosen = random.Random(0)
    for _ in range(200):
        axes = chosen.sample(range(4), 4)
        room = torch.randn(32 + 5**4)[chosen.randrange(32) :][: 5**4].view(5, 5, 5, 5)
        tensor = room[tuple(slice(1, chosen.randint(2, 5)) for _ in axes)].permute(axes)[..., 0]
        axis = chosen.randrange(3)
        if chosen.random() < 0.3:
            tensor = tensor.narrow(axis, 0, 1).expand([4 if number == axis else -1 for number in range(3)])
        assert TensorLayout.of(tensor).copy(tensor[:0]).numel() == 0
        begin = chosen.randrange(tensor.shape[axis])
        size = chosen.randint(1, tensor.shape[axis] - begin)
        stored = torch.empty(tensor.shape).copy_(tensor)
        original, part = tensor.narrow(axis, begin, size), stored.narrow(axis, begin, size)
        layout = TensorLayout.of(tensor).part(part, tensor.shape)
        assert layout == TensorLayout.of(original)
        copied = layout.copy(part)
        assert torch.equal(copied, original)
        assert TensorLayout.of(copied) == layout


def test_a_parameter_that_is_a_transposed_view_is_said_to_become_contiguous() -> None:
    model = nn.Linear(TEN, 3)
    model.weight = nn.Parameter(torch.randn(TEN, 3).t())
    with pytest.warns(UserWarning, match="parameter weight is not contiguous.*last bits of results can differ"):
        Engine(model).close()
