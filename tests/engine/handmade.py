"""Small models written by hand, each with one habit that streaming could trip over. All take `x`, tokens [batch,
sequence]."""

from __future__ import annotations

from collections import UserList, deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.engine.device import own_device

WIDTH, WORDS = 16, 32


class Log:
    """Of a class: a list for each of its modules, of what a test wants to know of it. The list is the test's: the
    engine, which puts back what a recompute has changed in a module, does not reach it.
    """

    def __init__(self) -> None:
        self._lists: dict[int, list[Any]] = {}

    def __get__(self, module: Any, _owner: type) -> list[Any]:
        return self._lists.setdefault(id(module), [])


class Block(nn.Module):
    """Residual, normalised, with a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(self.norm(h))))


class Stack(nn.Module):
    """Embedding, blocks, head: what the other models vary."""

    def __init__(self, block: type[nn.Module] = Block, depth: int = 3) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class ScalesItsInput(Block):
    def forward(self, h: Tensor) -> Tensor:
        h.mul_(0.9)
        return super().forward(h)


class ReturnsItsInput(Block):
    """Everything happens in place, and the result is the very tensor that came in."""

    def forward(self, h: Tensor) -> Tensor:
        h += self.down(torch.tanh(self.up(self.norm(h.clone()))))
        return h


class ScalingBlocks(Stack):
    def __init__(self) -> None:
        super().__init__(ScalesItsInput)


class InPlaceBlocks(Stack):
    def __init__(self) -> None:
        super().__init__(ReturnsItsInput)


class Gated(Block):
    """Keeps its result of the first operation for backward, not its input."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(torch.sigmoid(h))


class ChangesBetweenUnits(Stack):
    """What a unit returned, and what the next one was given, changes in place afterwards."""

    def __init__(self) -> None:
        super().__init__(Gated)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        h += 0.1
        for block in self.blocks:
            before = h * 1.0
            h = block(before)
            before.mul_(3.0)
            h += 0.01
        return self.head(h)


class Recurrent(Stack):
    """torch's LSTM keeps references to its weights beside the ones in `_parameters`."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.lstm(self.embedding(x))[0]))


class UsedTwice(Stack):
    """Every block runs twice, and its gradients add up."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for _ in range(2):
            for block in self.blocks:
                h = block(h)
        return self.head(h)


class ListedTwice(Stack):
    """The same computation, with each use of a block in the list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*self.blocks, *self.blocks])


class OneBlockInManyPlaces(Stack):
    def __init__(self) -> None:
        super().__init__(depth=1)
        self.blocks = nn.ModuleList([self.blocks[0], Block(), self.blocks[0]])


class ListsOfLists(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for row in self.blocks:
            h = row[1](h) + row[0](h)
        return self.head(h)


class Namespace(nn.Module):
    """A dict of modules that is a mere namespace around the list of blocks; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList(Block() for _ in range(2))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(WORDS, WIDTH), "h": blocks, "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.transformer.wte(x)
        for block in self.transformer.h:
            h = block(h)
        return self.lm_head(self.transformer.ln_f(h))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(), Block(), nn.Linear(WIDTH, WORDS))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TakesAScale(Block):
    def forward(self, h: Tensor, scale: Tensor) -> Tensor:
        return super().forward(h) * scale


class ParameterAsArgument(Stack):
    """A parameter of the model itself goes into every block as an argument."""

    def __init__(self) -> None:
        super().__init__(TakesAScale)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h, scale=self.scale)
        return self.head(h)


class ReadFromOutside(Stack):
    """The embedding's weight is used as the head's, without its module."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return functional.linear(h, self.embedding.weight)


class HandsItsWeightOut(Block):
    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(h), self.up.weight.T


class WeightAsResult(Stack):
    """A unit returns a view of its own weight, which is read when the slot is long another unit's."""

    def __init__(self) -> None:
        super().__init__(HandsItsWeightOut)

    def forward(self, x: Tensor) -> Tensor:
        h, taken = self.embedding(x), []
        for block in self.blocks:
            h, weight = block(h)
            taken.append(weight)
        return self.head(h) * (1 + sum(weight.square().mean() for weight in taken))


class ManyResults(Block):
    """Nested results: a dict, an integer tensor, something that is no tensor, the same tensor twice, one that is
    never used."""

    def forward(self, h: Tensor, state: dict[str, Tensor] | None, *, gain: float) -> dict[str, object]:  # type: ignore[override]
        h = super().forward(h) * gain
        if state is not None:
            h = h + 0.1 * state["hidden"]
        words = h.argmax(-1)
        return {
            "pair": (h, h),
            "state": {"hidden": torch.sin(h)},
            "words": words,
            "depth": 1,
            "scale": h.detach().abs().max(),
            "unused": h * 2,
        }


class TreesOfTensors(Stack):
    def __init__(self) -> None:
        super().__init__(ManyResults)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h, state, words = self.embedding(x), None, 0
        for block in self.blocks:
            out = block(h, state, gain=0.5)
            h, state, words = sum(out["pair"]), out["state"], words + out["words"] * out["depth"]
            h = h / (1.0 + float(out["scale"].float().cpu().numpy()))  # numpy refuses what requires a gradient
        return {"logits": self.head(h) + words.unsqueeze(-1) * 0.01}


class ChangesItsArguments(Block):
    """Puts tensors into containers among its arguments, at any depth, takes some out, and counts."""

    def forward(self, h: Tensor, losses: list[Tensor], state: dict[str, Any]) -> Tensor:  # type: ignore[override]
        h = super().forward(h) + 0.1 * state["memory"][0] + 0.1 * state["queue"][-1]
        losses.append(h.square().mean())
        state["memory"][0] = torch.sin(h)
        state["queue"].append(h.mean((0, 1)))
        state["seen"].add(len(state["losses"]))  # which is the same list
        state[len(losses)] = {"carried": state.pop("carried") + h.mean(), "first": [h]}
        state["carried"] = state[len(losses)]["carried"]
        return h


class ChangesContainers(Stack):
    def __init__(self) -> None:
        super().__init__(ChangesItsArguments)

    def forward(self, x: Tensor) -> Tensor:
        h, losses, seen = self.embedding(x), [], set()
        memory, queue = UserList([h]), deque([h.mean((0, 1))], maxlen=2)
        state = {"memory": memory, "queue": queue, "seen": seen, "losses": losses, "carried": h.sum() * 0}
        for block in self.blocks:
            h = block(h, losses, state)
        assert seen == {1, 2, 3}
        assert state["losses"] is losses
        assert len(losses) == 3
        assert state["queue"] is queue
        more = [state["carried"], *(state[number]["first"][0].mean() for number in seen)]
        return self.head(h + memory[0] + sum(queue)) + sum(losses) + sum(more)


class SkipsFromEarlyToLate(Stack):
    """One unit's result is read by all the later ones, and by the loss."""

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.embedding(x)
        for block in self.blocks:
            h = block(h) + first
        return self.head(h + first)


class DropsOut(Block):
    """Drops half of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, h: Tensor) -> Tensor:
        return self.dropout(super().forward(h))


class NoisyBlock(Block):
    def forward(self, h: Tensor) -> Tensor:
        return functional.dropout(super().forward(h), 0.2, self.training) + 0.01 * torch.randn_like(h)


class Noisy(Stack):
    """Draws random numbers inside units and between them."""

    def __init__(self) -> None:
        super().__init__(NoisyBlock)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = functional.dropout(block(h), 0.1, self.training)
        return self.head(h)


class Single(nn.Module):
    """One module with parameters, and nothing else; the input needs no gradient and is no integer."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WORDS, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.only(functional.one_hot(x, WORDS).to(self.only.weight.dtype))


class Bare(nn.Linear):
    """The model is itself the module that has the weights."""

    def __init__(self) -> None:
        super().__init__(WORDS, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.one_hot(x, WORDS).to(self.weight.dtype))


class TiedBlocks(Stack):
    """All blocks share one matrix: a region with more users than one, besides the blocks' own."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:]:
            block.down.weight = self.blocks[0].down.weight


class CheckpointsItself(Block):
    """Recomputes a part of itself: it reads its weights during its own backward."""

    def forward(self, h: Tensor) -> Tensor:
        return h + checkpoint(super().forward, h, use_reentrant=False)


class Checkpointed(Stack):
    def __init__(self) -> None:
        super().__init__(CheckpointsItself)


class Normalised(nn.Module):
    """Running statistics: buffers that every forward in train mode changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.norm(self.linear(h).transpose(1, 2)).transpose(1, 2))


class RunningStatistics(Stack):
    def __init__(self) -> None:
        super().__init__(Normalised)


class Prompt(nn.Module):
    """Its forward takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mixed = nn.Parameter(torch.randn(3, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self) -> Tensor:
        return torch.tanh(self.words @ self.mixed)


class Prompted(nn.Module):
    """A learned prompt before the tokens, in a model without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.prompt, self.head = nn.Embedding(WORDS, WIDTH), Prompt(), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.prompt()[None].expand(len(x), -1, -1), self.embedding(x)], 1)
        return self.head(self.between(h).cumsum(1))[:, -x.shape[1] :]

    def between(self, h: Tensor) -> Tensor:
        return h


class PromptedBlocks(Prompted):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def between(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h


class MovingPrompt(Prompt):
    """It moves a buffer in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self) -> Tensor:
        self.mean.lerp_(self.words.detach().mean(0), 0.1)
        return super().forward() + self.mean


class PromptedAndMoving(Prompted):
    def __init__(self) -> None:
        super().__init__()
        self.prompt = MovingPrompt()


class Parametrized(nn.Module):
    """A weight that a module without arguments makes of others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(x))))


class WeightNorm(Parametrized):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.middle)


class SpectralNorm(Parametrized):
    """The making moves buffers as well."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.middle)


class Orthogonal(Parametrized):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.orthogonal(self.middle)


WITHOUT_INPUTS: tuple[type[nn.Module], ...] = (
    Prompted,
    PromptedBlocks,
    PromptedAndMoving,
    WeightNorm,
    SpectralNorm,
    Orthogonal,
)
"""Models with a module that has parameters and whose forward takes no tensor."""


class MultipliesSparsely(Block):
    """Makes a sparse matrix of elements of a weight, as some adapters do."""

    def forward(self, h: Tensor) -> Tensor:
        number = torch.arange(24, device=h.device)
        values = self.up.weight.float().flatten()[:24]
        places = torch.stack([number, number % WIDTH])
        sparse = torch.sparse_coo_tensor(places, values, (24, WIDTH), check_invariants=False)
        ones = torch.ones(WIDTH, 1, device=h.device)
        return super().forward(h) + torch.sparse.mm(sparse, ones).mean().to(h.dtype)


class Sparse(Stack):
    def __init__(self) -> None:
        super().__init__(MultipliesSparsely)


MODELS: tuple[type[nn.Module], ...] = (
    Stack,
    *((Sparse,) if own_device().type in ("cpu", "cuda") else ()),  # the simulated accelerator has no sparse tensors
    ScalingBlocks,
    InPlaceBlocks,
    ChangesBetweenUnits,
    OneBlockInManyPlaces,
    ListsOfLists,
    Namespace,
    Chain,
    ParameterAsArgument,
    WeightAsResult,
    TreesOfTensors,
    SkipsFromEarlyToLate,
    Noisy,
    Single,
    Bare,
    TiedBlocks,
    Checkpointed,
)


class Running(nn.Module):
    """Shifts by a running mean, which decides its result; `persistent`: that is a part of the model's state."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=persistent)

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.float().mean((0, 1)), alpha=0.1)
        return h + torch.tanh(self.linear(h - self.mean.to(h.dtype)))


class Shifting(Stack):
    def __init__(self) -> None:
        super().__init__(lambda: Running(persistent=False), depth=2)
        self.blocks.append(Running(persistent=True))


def words(seed: int = 0, rows: int = 4, length: int = 6) -> dict[str, Tensor]:
    """Return a batch of tokens, where engines compute, and the labels to predict, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    batch = {key: torch.randint(0, WORDS, (rows, length), generator=generator) for key in ("x", "labels")}
    batch["labels"][0, :2] = -100
    return {key: value.to(own_device()) for key, value in batch.items()}


def cross_entropy(outputs: Tensor | dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """The mean over the labels that are not ignored, in fp32."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    return functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
