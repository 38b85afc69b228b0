"""Small handwritten models, each with one property that can break streaming. All take `x`, tokens [batch, sequence]."""

from __future__ import annotations

from collections import UserList, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.engine.device import own_device

WIDTH, WORDS = 16, 32


class Log:
    """One list of test records per module, outside the module.

    The engine restores the state of a module after activation recomputation. These lists keep their entries.
    """

    def __init__(self) -> None:
        self._lists: dict[int, list[Any]] = {}

    def __get__(self, module: Any, _owner: type) -> list[Any]:
        return self._lists.setdefault(id(module), [])


class Block(nn.Module):
    """Residual block with a layer norm and a hidden layer, over hidden states [batch, sequence, width]."""

    def __init__(self, width: int = WIDTH, inner: int = 24) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(self.norm(h))))


class Stack(nn.Module):
    """Embedding, blocks and head: the base class of most models here."""

    block: Callable[[], nn.Module] = Block

    def __init__(self, block: Callable[[], nn.Module] | None = None, depth: int = 3) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList((block or type(self).block)() for _ in range(depth))

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
    """Works in place and returns the input tensor itself."""

    def forward(self, h: Tensor) -> Tensor:
        h += self.down(torch.tanh(self.up(self.norm(h.clone()))))
        return h


class ScalingBlocks(Stack):
    block = ScalesItsInput


class InPlaceBlocks(Stack):
    block = ReturnsItsInput


class Gated(Block):
    """Saves the sigmoid result for backward, not the input."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(torch.sigmoid(h))


class ChangesBetweenUnits(Stack):
    """Unit inputs and outputs change in place after the unit has run."""

    block = Gated

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
    """torch's LSTM keeps references to the weights beside the entries in `_parameters`."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.lstm(self.embedding(x))[0]))


class UsedTwice(Stack):
    """Every block runs twice, and both gradients add up."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for _ in range(2):
            for block in self.blocks:
                h = block(h)
        return self.head(h)


class ListedTwice(Stack):
    """Computes the same as `UsedTwice`: each use of a block is a list entry."""

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
    """A ModuleDict serves only as a namespace around the block list. The head is tied to the embedding."""

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
    """Every block receives a parameter of the model as an argument."""

    block = TakesAScale

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h, scale=self.scale)
        return self.head(h)


class ReadFromOutside(Stack):
    """The embedding weight serves as head weight, without a call of the embedding module."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return functional.linear(h, self.embedding.weight)


class HandsItsWeightOut(Block):
    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(h), self.up.weight.T


class WeightAsResult(Stack):
    """Each unit returns a view of one weight. The model reads the view after the slot belongs to another unit."""

    block = HandsItsWeightOut

    def forward(self, x: Tensor) -> Tensor:
        h, taken = self.embedding(x), []
        for block in self.blocks:
            h, weight = block(h)
            taken.append(weight)
        return self.head(h) * (1 + sum(weight.square().mean() for weight in taken))


class ManyResults(Block):
    """Nested results: a dict, an integer tensor, a non-tensor, the same tensor twice, and an unused tensor."""

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
    block = ManyResults

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h, state, words = self.embedding(x), None, 0
        for block in self.blocks:
            out = block(h, state, gain=0.5)
            h, state, words = sum(out["pair"]), out["state"], words + out["words"] * out["depth"]
            h = h / (1.0 + float(out["scale"].float().cpu().numpy()))  # numpy refuses tensors that require a gradient
        return {"logits": self.head(h) + words.unsqueeze(-1) * 0.01}


class ChangesItsArguments(Block):
    """Adds tensors to container arguments at any depth, removes some, and counts the calls."""

    def forward(self, h: Tensor, losses: list[Tensor], state: dict[str, Any]) -> Tensor:  # type: ignore[override]
        h = super().forward(h) + 0.1 * state["memory"][0] + 0.1 * state["queue"][-1]
        losses.append(h.square().mean())
        state["memory"][0] = torch.sin(h)
        state["queue"].append(h.mean((0, 1)))
        state["seen"].add(len(state["losses"]))  # `state["losses"]` is `losses`
        state[len(losses)] = {"carried": state.pop("carried") + h.mean(), "first": [h]}
        state["carried"] = state[len(losses)]["carried"]
        return h


class ChangesContainers(Stack):
    block = ChangesItsArguments

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


class TakesAnOptionalScale(Block):
    def forward(self, h: Tensor, scale: Tensor | None = None) -> Tensor:
        h = super().forward(h)
        return h if scale is None else h * scale


class CalledTwoWays(Stack):
    """Every block is listed twice: called with a positional tensor, then with keywords for two, one without rows."""

    block = TakesAnOptionalScale

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.blocks = nn.ModuleList([*self.blocks, *self.blocks])

    def forward(self, x: Tensor) -> Tensor:
        h, blocks = self.embedding(x), list(self.blocks)
        for block in blocks[:2]:
            h = block(h)
        for block in blocks[2:]:
            h = block(scale=torch.linspace(0.5, 1.5, WIDTH).to(h), h=h)
        return self.head(h)


class SkipsFromEarlyToLate(Stack):
    """All later units and the head read the first result."""

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.embedding(x)
        for block in self.blocks:
            h = block(h) + first
        return self.head(h + first)


class DropsOut(Block):
    """Applies dropout with p=0.5 to the result."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, h: Tensor) -> Tensor:
        return self.dropout(super().forward(h))


class NoisyBlock(Block):
    def forward(self, h: Tensor) -> Tensor:
        return functional.dropout(super().forward(h), 0.2, self.training) + 0.01 * torch.randn_like(h)


class Noisy(Stack):
    """Samples random numbers inside units and between them."""

    block = NoisyBlock

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = functional.dropout(block(h), 0.1, self.training)
        return self.head(h)


class Single(nn.Module):
    """One module with parameters and nothing else. The input is a float tensor without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WORDS, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.only(functional.one_hot(x, WORDS).to(self.only.weight.dtype))


class Bare(nn.Linear):
    """The model is the only module with weights."""

    def __init__(self) -> None:
        super().__init__(WORDS, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.one_hot(x, WORDS).to(self.weight.dtype))


class TiedBlocks(Stack):
    """All blocks share one matrix: this region has several users, besides the own region of each block."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:]:
            block.down.weight = self.blocks[0].down.weight


class CheckpointsItself(Block):
    """Recomputes the block in `torch.utils.checkpoint` and so reads the weights during backward."""

    def forward(self, h: Tensor) -> Tensor:
        return h + checkpoint(super().forward, h, use_reentrant=False)


class Checkpointed(Stack):
    block = CheckpointsItself


class Normalised(nn.Module):
    """Batch norm: every forward in train mode changes buffers (the running statistics)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + torch.tanh(self.norm(self.linear(h).transpose(1, 2)).transpose(1, 2))


class RunningStatistics(Stack):
    block = Normalised


class Prompt(nn.Module):
    """The forward takes no arguments."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.words, self.mixed = nn.Parameter(torch.randn(3, width)), nn.Parameter(torch.randn(width, width))

    def forward(self) -> Tensor:
        return torch.tanh(self.words @ self.mixed)


class Prompted(nn.Module):
    """A learned prompt before the tokens, in a model without blocks."""

    depth = 0

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.prompt, self.head = nn.Embedding(WORDS, WIDTH), Prompt(), nn.Linear(WIDTH, WORDS)
        if self.depth:
            self.blocks = nn.ModuleList(Block() for _ in range(self.depth))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.prompt()[None].expand(len(x), -1, -1), self.embedding(x)], 1)
        for block in self.blocks if self.depth else ():
            h = block(h)
        return self.head(h.cumsum(1))[:, -x.shape[1] :]


class PromptedBlocks(Prompted):
    depth = 2


class MovingPrompt(Prompt):
    """Every forward changes a buffer."""

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


class SpectralNorm(nn.Module):
    """A parametrization (a module without inputs) computes one weight from others, and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        parametrizations.spectral_norm(self.middle)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(x))))


WITHOUT_INPUTS = (Prompted, PromptedBlocks, PromptedAndMoving, SpectralNorm)
"""Models with a parameter-holding module that takes no tensor in forward."""


class MultipliesSparsely(Block):
    """Builds a sparse matrix from weight elements, as some adapters do."""

    def forward(self, h: Tensor) -> Tensor:
        number = torch.arange(24, device=h.device)
        values = self.up.weight.float().flatten()[:24]
        places = torch.stack([number, number % WIDTH])
        sparse = torch.sparse_coo_tensor(places, values, (24, WIDTH), check_invariants=False)
        ones = torch.ones(WIDTH, 1, device=h.device)
        return super().forward(h) + torch.sparse.mm(sparse, ones).mean().to(h.dtype)


class Sparse(Stack):
    block = MultipliesSparsely


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
    CalledTwoWays,
)


class Running(nn.Module):
    """Subtracts a running mean, so the result depends on a buffer. `persistent`: the buffer is in the state dict."""

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
    """Return random tokens and labels on the engine's device. Two labels are ignored (-100)."""
    generator = torch.Generator().manual_seed(seed)
    batch = {key: torch.randint(0, WORDS, (rows, length), generator=generator) for key in ("x", "labels")}
    batch["labels"][0, :2] = -100
    return {key: value.to(own_device()) for key, value in batch.items()}


def cross_entropy(outputs: Tensor | dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy in fp32 over the labels that are not ignored."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    return functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
