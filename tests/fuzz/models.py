"""Random models: the specification (plain data sampled from a seed), the model, and batches."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from offload.engine.companions import add_companion, companions_of
from offload.engine.loss.loss import find_loss
from offload.extras.distill.losses import Distillation
from tests.cases.models import SPECIAL, bert, gemma2, gpt2, gpt_neox, llama, mistral, mixtral, opt, qwen3
from tests.engine import handmade
from tests.engine.handmade import Block, CheckpointsItself, Prompt, ReturnsItsInput
from tests.fuzz import habits

Spec = dict[str, Any]
"""Specification of a model. A missing key has a plain default, so that cases can shrink."""

# -- families --------------------------------------------------------------------------------------------------------


def _plain(spec: Spec) -> dict[str, Any]:
    return {
        "hidden_size": spec["width"],
        "intermediate_size": spec.get("inner", 24),
        "num_hidden_layers": spec.get("depth", 2),
        "num_attention_heads": spec.get("heads", 2),
        "vocab_size": spec["words"],
        "max_position_embeddings": 64,
        "tie_word_embeddings": spec.get("tied", False),
        **SPECIAL,
    }


def _grouped(spec: Spec) -> dict[str, Any]:
    return _plain(spec) | {"num_key_value_heads": spec.get("groups", spec.get("heads", 2))}


def _renamed(spec: Spec, **names: str) -> dict[str, Any]:
    """Return renamed sizes for a family that always ties the embeddings."""
    return {names.get(key, key): value for key, value in _plain(spec).items() if key != "tie_word_embeddings"}


def _gpt2(spec: Spec) -> dict[str, Any]:
    names = {"hidden_size": "n_embd", "intermediate_size": "n_inner", "num_hidden_layers": "n_layer"}
    return _renamed(spec, **names, num_attention_heads="n_head", max_position_embeddings="n_positions")


def _dropout(spec: Spec, *names: str) -> dict[str, float]:
    return dict.fromkeys(names, spec.get("dropout", 0.0))


FAMILIES: dict[str, Callable[[Spec], nn.Module]] = {
    "llama": lambda s: llama(**_grouped(s), **_dropout(s, "attention_dropout")),
    "qwen3": lambda s: qwen3(**_grouped(s), head_dim=4),
    "gemma2": lambda s: gemma2(**_grouped(s), head_dim=4),
    # Long rows fill the window, short rows do not.
    "mistral": lambda s: mistral(**_grouped(s), sliding_window=6),
    "mixtral": lambda s: mixtral(**_grouped(s), num_local_experts=3),
    "gpt2": lambda s: gpt2(**_gpt2(s), **_dropout(s, "resid_pdrop", "embd_pdrop", "attn_pdrop")),
    "opt": lambda s: opt(
        **_renamed(s, intermediate_size="ffn_dim"), **_dropout(s, "dropout"), word_embed_proj_dim=s["width"]
    ),
    "gpt_neox": lambda s: gpt_neox(**_plain(s), **_dropout(s, "hidden_dropout")),
    "bert": lambda s: bert(**_plain(s), **_dropout(s, "hidden_dropout_prob", "attention_probs_dropout_prob")),
}
UNSHIFTED = ("bert",)
TEACHERS = ("llama", "qwen3", "gemma2", "gpt2")
"""Families of teachers, which take sizes of any other family."""

# -- a mosaic of blocks ----------------------------------------------------------------------------------------------


class Empty(nn.Module):
    """A block without parameters."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()

    def forward(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.sin(h)


class Dropping(Block):
    def forward(self, h: Tensor) -> Tensor:
        return functional.dropout(super().forward(h), 0.2, self.training)


class Noise(nn.Module):
    """Random noise, without parameters."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()

    def forward(self, h: Tensor) -> Tensor:
        return functional.dropout(h, 0.1, self.training)


class Moving(nn.Module):
    """A running mean, updated in every training forward pass."""

    persistent = True

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width), persistent=self.persistent)

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.detach().float().mean((0, 1)), alpha=0.1)
        return h + torch.tanh(self.linear(h - self.mean.to(h.dtype)))


class MovingUnsaved(Moving):
    persistent = False


class Assigning(MovingUnsaved):
    """Replaces the running-mean tensor after every training forward pass. (The oracles leave out evaluations.)"""

    def forward(self, h: Tensor) -> Tensor:
        before = self.mean
        if self.training:
            self.mean = 0.9 * before + 0.1 * h.detach().float().mean((0, 1))
        return h + torch.tanh(self.linear(h - before.to(h.dtype)))


class WeightNormed(Block):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.up = parametrizations.weight_norm(self.up)


class Spectral(Block):
    """The power iteration updates buffers."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.up = parametrizations.spectral_norm(self.up)


class Orthogonal(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.turn = parametrizations.orthogonal(nn.Linear(width, width, bias=False))

    def forward(self, h: Tensor) -> Tensor:
        return h + 0.5 * torch.tanh(self.turn(h))


class Experts(nn.Module):
    """Three experts, selected by the hidden states, so that some get no gradient."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        choice = (h.detach().float()[:, 0, 0] * 100).long() % 3
        for number, expert in enumerate(self.experts):
            rows = (choice == number)[:, None, None]
            if rows.any():
                h = h + torch.tanh(expert(h)) * rows
        return h


class Idle(Block):
    """Has an unused parameter."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.unused = nn.Parameter(torch.ones(inner, 3))


class Narrow(nn.Module):
    """A single vector as the only parameter."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.scale


class Wide(Block):
    """Much larger than the neighbours."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, 7 * inner)


class HalfNorm(Block):
    """bfloat16 weights beside an fp32 norm."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, h: Tensor) -> Tensor:
        normed = (self.norm(h.float()) * self.gain.float()).to(self.up.weight.dtype)
        return h + self.down(torch.tanh(self.up(normed))).to(h.dtype)


TILES: dict[str, type[nn.Module]] = {
    "tile": Block,
    "empty": Empty,
    "dropping": Dropping,
    "noise": Noise,
    "moving": Moving,
    "moving-unsaved": MovingUnsaved,
    "in-place": ReturnsItsInput,
    "checks-itself": CheckpointsItself,
    "weight-norm": WeightNormed,
    "spectral": Spectral,
    "orthogonal": Orthogonal,
    "experts": Experts,
    "idle": Idle,
    "narrow": Narrow,
    "wide": Wide,
    "half-norm": HalfNorm,
    "assigning": Assigning,
}
RANDOM = {"dropping", "noise"}
MOVING = {"moving", "moving-unsaved", "assigning", "spectral"}
MIXING = {"TreesOfTensors", "Sparse"}
"""Handmade models with dependencies between rows."""


class Mosaic(nn.Module):
    """Embedding, tiles, head. Takes `x` [batch, sequence]; with `labels` the model returns the loss.

    - A number in `tiles` repeats the tile at this place.
    - tied: the head uses the embedding weight.
    - prompt: learned rows before the tokens.
    - shift: shifted labels, like a causal model. counts: the loss accepts `num_items_in_batch`.
    - sure: logits for `x` are so large that a label equal to `x` has loss 0.
    - Other keys are habits (habits.py).

    `delta` is added to the embeddings. The tile `skip` is left out; for `skip` 1 the forward pass also reads the head
    weight.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        width, inner, vocabulary = width_of(spec), spec.get("inner", 24), spec["words"]
        self.shift, self.counts, self.sure = (
            spec.get("shift", False),
            spec.get("counts", False),
            spec.get("sure", False),
        )
        self.embedding, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        tiles: list[nn.Module] = []
        for kind in spec.get("tiles", ["tile", "tile"]):
            tiles.append(
                tiles[kind % len(tiles)] if isinstance(kind, int) and tiles else TILES[_name(kind)](width, inner)
            )
        for habit, unit in habits.UNITS.items():
            if habit in spec and spec[habit] != "above":
                tiles.insert(len(tiles) // 2, unit(width, spec[habit]))
        self.is_keeping, self.is_noting = spec.get("keeps") == "above", "writes" in spec
        if spec.get("nested") and len(tiles) > 1:
            half = len(tiles) // 2
            self.tiles: nn.ModuleList = nn.ModuleList([nn.ModuleList(tiles[:half]), nn.ModuleList(tiles[half:])])
        else:
            self.tiles = nn.ModuleList(tiles)
        if spec.get("prompt"):
            self.prompt = Prompt(width)
        if spec.get("tied"):
            self.head.weight = self.embedding.weight
        if spec.get("tied-tiles"):
            downs = [tile.down for tile in tiles if isinstance(tile, Block) and type(tile) not in (Wide, HalfNorm)]
            for down in downs[1:]:
                down.weight = downs[0].weight

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        num_items_in_batch: int | None = None,
        delta: Tensor | None = None,
        skip: int = -1,
    ) -> Any:
        h = self.embedding(x)
        if delta is not None:
            h = h + delta.to(h.dtype)
        if hasattr(self, "prompt"):
            h = torch.cat([self.prompt()[None].expand(len(x), -1, -1), h], 1)
        h = self._through(h, skip)
        if skip == 1:
            h = h + self.head.weight.mean(0)
        logits = self.head(h)[:, -x.shape[1] :]
        if self.sure:
            logits = logits + 200.0 * functional.one_hot(x, logits.shape[-1]).to(logits.dtype)
        if labels is None:
            return logits
        flat = logits.float()
        if self.shift:
            flat, labels = flat[:, :-1], labels[:, 1:]
        summed = self.counts and num_items_in_batch is not None
        loss = functional.cross_entropy(
            flat.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum" if summed else "mean"
        )
        return {"loss": loss / num_items_in_batch if summed else loss, "logits": logits}

    def _through(self, h: Tensor, skip: int) -> Tensor:
        """Return the hidden states after all tiles, plus terms from container arguments."""
        notes: dict[str, Any] = {"terms": [torch.zeros_like(h[:, :1, :1])], "term": torch.ones_like(h[:, :1, :1])}
        self.kept: list[Tensor] = []
        for number, tile in enumerate(self.tiles):
            for one in tile if isinstance(tile, nn.ModuleList) else [tile]:
                if number != skip:
                    h = one(h, notes) if isinstance(one, habits.Writing) else one(h)
                if self.is_keeping:
                    self.kept.append(h.mean((1, 2), keepdim=True))
                if isinstance(one, habits.Keeping) and one.where == "cache" and one.kept is not None:
                    h = h + one.kept.to(h.dtype)
        return sum([*self.kept, *notes["terms"]], h) + notes.get("term", 0.0) if self.is_noting else sum(self.kept, h)


def width_of(spec: Spec) -> int:
    return spec.get("odd", spec.get("width", 0))


def _name(kind: Any) -> str:
    return kind if isinstance(kind, str) else "tile"


# -- sampling --------------------------------------------------------------------------------------------------------


def draw(dice: random.Random, *, gentle: bool = False) -> Spec:
    """Return a random model specification.

    gentle: no randomness, no moving buffers and no mixed rows, so that the loss is equal for one rank and several.
    """
    roll = dice.random()
    if roll < 0.3:
        return _draw_family(dice, gentle)
    if roll < 0.85:
        return _draw_mosaic(dice, gentle)
    unfit = {"Noisy", *MIXING} if gentle else set()
    names = [one.__name__ for one in handmade.MODELS if one.__name__ not in unfit]
    return {"make": "handmade", "name": dice.choice(names), "seed": dice.randrange(99)}


def _sizes(dice: random.Random) -> Spec:
    return {
        "words": dice.choice([16, 23, 32, 67, 97]),
        "inner": dice.choice([7, 16, 24, 53]),
        "seed": dice.randrange(99),
    } | _maybe(dice, 0.2, frozen=lambda: dice.choice(["embed|wte", "0", "1", "up|fc|q_proj", "head", "norm|ln"]))


def _maybe(dice: random.Random, chance: float, **values: Callable[[], Any]) -> dict[str, Any]:
    return {key: value() for key, value in values.items() if dice.random() < chance}


def _draw_family(dice: random.Random, gentle: bool) -> Spec:
    heads = dice.choice([1, 2, 4])
    spec = {"make": dice.choice([*FAMILIES, "llama", "gpt2"]), "heads": heads, "width": heads * dice.choice([4, 8, 12])}
    spec |= {"depth": dice.choice([1, 2, 2, 3, 4]), "groups": dice.choice([1, heads])} | _sizes(dice)
    if spec["make"] == "mixtral":  # grouped matrix products in torch need rows with 16 bytes
        spec |= {"width": 8 * heads, "inner": 16}
    if not gentle:
        spec |= _maybe(dice, 0.3, dropout=lambda: 0.1)
    return spec | _maybe(dice, 0.4, tied=lambda: True)


def _draw_mosaic(dice: random.Random, gentle: bool) -> Spec:
    kinds: list[Any] = sorted(TILES.keys() - (RANDOM | MOVING if gentle else set()))
    tiles = [dice.choice(["tile", "tile", *kinds]) for _ in range(dice.choice([1, 2, 3, 3, 4, 6]))]
    if dice.random() < 0.3:
        tiles.insert(dice.randrange(1, len(tiles) + 1), dice.randrange(len(tiles)))
    spec = {"make": "mosaic", "width": dice.choice([8, 13, 16, 20, 33, 48]), "tiles": tiles} | _sizes(dice)
    spec |= _maybe(dice, 0.2, tied=lambda: True, prompt=lambda: True, nested=lambda: True, half=lambda: True)
    spec |= _maybe(dice, 0.1, **{"tied-tiles": lambda: True})
    if dice.random() < 0.5:
        spec |= {"own-loss": True} | _maybe(dice, 0.5, shift=lambda: True, counts=lambda: True)
        spec |= _maybe(dice, 0.25, sure=lambda: True)
    return spec


# -- construction ----------------------------------------------------------------------------------------------------


def build(spec: Spec) -> nn.Module:
    """Return the model in train mode with random weights. Reseeds the global torch generator."""
    torch.manual_seed(spec.get("seed", 0))
    kind = spec["make"]
    if kind == "handmade":
        model: nn.Module = getattr(handmade, spec["name"])()
    elif kind == "mosaic":
        model = Mosaic(spec)
    else:
        model = FAMILIES[kind](spec)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    if "frozen" in spec:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not re.search(spec["frozen"], name))
        if not any(parameter.requires_grad for parameter in model.parameters()):
            model.requires_grad_(True)
    if spec.get("half"):
        for module in model.modules():
            if isinstance(module, HalfNorm):
                module.up.bfloat16(), module.down.bfloat16()
    if "teacher" in spec:
        add_companion(model, "teacher", FAMILIES[spec["teacher"]](spec | {"depth": 3, "tied": True}))
    return model.train()


def is_family(spec: Spec) -> bool:
    return spec["make"] in FAMILIES


def has_own_loss(spec: Spec) -> bool:
    """Return whether the model computes the loss."""
    return is_family(spec) or bool(spec.get("own-loss"))


def shifts(spec: Spec) -> bool:
    return spec["make"] not in UNSHIFTED if is_family(spec) else bool(spec.get("shift"))


def num_words(spec: Spec) -> int:
    return handmade.WORDS if spec["make"] == "handmade" else spec["words"]


def is_random(spec: Spec) -> bool:
    """Return whether a forward pass uses random numbers."""
    if spec["make"] == "handmade":
        return spec["name"] == "Noisy"
    return bool(spec.get("dropout")) or bool(RANDOM.intersection(map(str, spec.get("tiles", ()))))


def moves(spec: Spec) -> bool:
    """Return whether a forward pass changes buffers."""
    return "keeps" in spec or bool(MOVING.intersection(map(str, spec.get("tiles", ()))))


def mixes_rows(spec: Spec) -> bool:
    """Return whether the output for a row depends on other rows."""
    return moves(spec) or spec.get("name") in MIXING


def shares(model: nn.Module) -> bool:
    """Return whether a weight, or a module with weights, has several places."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return len(names) > len(list(model.parameters()))


def batch(spec: Spec, drawn: Mapping[str, Any], rank: int = 0) -> dict[str, Any]:
    """Return the rows of one rank in a batch from `draw_batch`."""
    rows, length, padding = drawn["rows"][rank], drawn["lengths"][rank], drawn["padding"][rank]
    generator = torch.Generator().manual_seed(1000 * drawn["seed"] + rank)
    ids = torch.randint(3, num_words(spec), (rows, length), generator=generator)
    labels = ids.clone()
    if spec.get("sure"):  # correct labels in most places
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = 3
    for row in range(rows):
        labels[row, : min(row % 3, length - 1)] = -100
    if drawn.get("ignored") and (rows > 1 or len(drawn["rows"]) > 1) and rank == 0:
        labels[: 1 if len(drawn["rows"]) == 1 else rows] = -100  # over several ranks, one rank has no targets
    given: dict[str, Any] = {"input_ids" if is_family(spec) else "x": ids, "labels": labels}
    given |= {"skip": drawn["skip"]} if "skip" in drawn else {}
    if padding and is_family(spec):
        mask = torch.ones_like(ids)
        cut = min(padding, length - 1)
        place = slice(None, cut) if drawn.get("left") else slice(length - cut, None)
        mask[-1, place], labels[-1, place] = 0, -100
        given["attention_mask"] = mask
    elif drawn.get("mask") and is_family(spec):
        given["attention_mask"] = torch.ones_like(ids)
    return given


def cross_entropy(outputs: Any, given: Mapping[str, Tensor]) -> Tensor:
    """Return the mean over the target labels, for a model without a loss."""
    logits = getattr(outputs, "logits", None)
    if logits is None:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    return functional.cross_entropy(logits.float().flatten(0, 1), given["labels"].flatten())


def loss_fn(model: nn.Module, op: Mapping[str, Any]) -> Any:
    """Return the loss function of an operation. None: the loss of the model."""
    kind = op.get("loss_fn")
    if kind != "teacher":
        return cross_entropy if kind else None
    teachers = list(companions_of(model).values())
    if not teachers:  # a smaller case has none
        return None
    return Distillation(teachers[0], beta=0.3, labels=0.2)


def is_own(op: Mapping[str, Any]) -> bool:
    """Return whether the targets of an operation are those of the model's own loss."""
    return op.get("loss_fn") in (None, "teacher")


def loss_of(model: nn.Module, given: dict[str, Any], is_own: bool) -> Tensor:
    """Return the loss from a direct model call: the model loss, or the cross entropy over the outputs."""
    if is_own:
        return find_loss(model(**given))
    inputs = {key: value for key, value in given.items() if key != "labels"}
    return cross_entropy(model(**inputs), given)


def draw_batch(dice: random.Random, world: int, *, alike: bool = False) -> dict[str, Any]:
    """Sample the batch shape by rank: rows, lengths, padding. alike: equal lengths on all ranks."""
    lengths = [dice.choice([2, 3, 3, 4, 5, 6, 8, 9, 13])] * world
    if not alike and world > 1 and dice.random() < 0.3:
        lengths = [dice.choice([2, 3, 4, 7, 9, 12]) for _ in range(world)]
    drawn: dict[str, Any] = {
        "seed": dice.randrange(10**6),
        "rows": [dice.choice([1, 2, 2, 3, 4, 5]) for _ in range(world)],
        "lengths": lengths,
        "padding": [dice.choice([0, 0, 0, 1, 2]) for _ in range(world)],
    }
    if any(drawn["padding"]):  # all ranks pass the same keys
        drawn["mask"] = True
    return drawn | _maybe(dice, 0.2, mask=lambda: True, left=lambda: True, ignored=lambda: True)


def targets(spec: Spec, given: Mapping[str, Tensor], own_loss: bool) -> int:
    """Count the targets in a batch, independently of the engine."""
    labels = given["labels"]
    if own_loss and shifts(spec):
        labels = labels[:, 1:]
    return int((labels != -100).sum())


def bits(value: float) -> float | str:
    """Return a number comparable with ==, with text for NaN."""
    return "nan" if math.isnan(value) else value
