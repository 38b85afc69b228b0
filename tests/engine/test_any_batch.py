"""Batches with more than [rows, tokens]: images, speech, several label tensors, None, numbers, lists."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offload import Engine
from offload.distributed.joining import open_comm
from offload.errors import ConfigError
from tests.cases.models import build, llama, tokens
from tests.engine.any_batch import (
    IMAGE,
    KINDS,
    distance,
    latents,
    llava,
    made,
    noise,
    on_device,
    pictures_in_rows,
    qwen2_vl,
    text_alone,
    vit,
)
from tests.engine.compare import (
    PROPORTIONAL,
    assert_same,
    assert_weights,
    step_of,
    train_both,
    weights,
)
from tests.engine.inside import parts_of
from tests.engine.ranks import run
from tests.engine.reference import Reference
from tests.leaks import no_graph_is_left
from tests.matrix import matrix

ROUNDING = 2e-6
MIXING = ("CLIP", "masked ViT")
"""Models with a loss other than a mean over rows."""


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_step_and_an_evaluation_equal_plain_pytorch(name: str) -> None:
    kind, some = KINDS[name], [made(name, seed) for seed in range(3)]
    engine, reference = train_both(build(kind.make), some, loss_fn=kind.loss_fn, **kind.reference("fp32"))
    reference.model.eval()
    with torch.no_grad():
        (wanted,) = reference.losses(made(name, 5), kind.loss_fn, len)
    assert engine.evaluate(made(name, 5), kind.loss_fn).item() == wanted.item()


# -- micro-batches ---------------------------------------------------------------------------------------------------


def in_parts(name: str, size: int, batches: list[Any], is_plain: bool = False, **settings: Any) -> Engine:
    return beside_whole(build(KINDS[name].make), KINDS[name].loss_fn, size, batches, is_plain, **settings)


def beside_whole(
    model: nn.Module, loss_fn: Any, size: int, batches: Sequence[Any], is_plain: bool, **settings: Any
) -> Engine:
    """Train in micro-batches and compare with plain PyTorch on whole batches. Only the summation order differs."""
    reference = Reference(model, PROPORTIONAL)
    engine = Engine(model, PROPORTIONAL, micro_batch_size=size, **settings)
    parts_of(engine).execution_mode.cut = "calls" if is_plain else "units"
    for batch in map(on_device, batches):
        assert step_of(engine, batch, loss_fn) == pytest.approx(step_of(reference, batch, loss_fn), rel=ROUNDING)
        assert_weights(engine, reference, ROUNDING)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_plain"),
    [*zip(KINDS, itertools.cycle([False, True])), *((name, True) for name in MIXING)],
)
def test_micro_batches_equal_the_whole(name: str, is_plain: bool) -> None:
    """A batch stays whole, with a warning, if the shapes or the loss forbid cutting."""
    batches = [made(name, seed, rows=5) for seed in range(2)]
    stays = name == "Qwen2-VL" or (is_plain and name in MIXING)
    with says_that_it_stays_whole() if stays else nullcontext():
        engine = in_parts(name, 2, batches, is_plain)
    assert parts_of(engine).execution_mode.cut == ("whole" if stays else "calls" if is_plain else "units")
    engine.evaluate(batches[0], KINDS[name].loss_fn)
    engine.close()


def says_that_it_stays_whole() -> Any:
    return pytest.warns(UserWarning, match=r"not split, despite micro_batch_size or passes \(see Engine\(rows=")


def images_of(key: str, batch: Any, numbers: Tensor) -> Tensor:
    """Return the images for the rows `numbers`. Row 0 has two images, every other row one."""
    per_image = len(batch[key]) // len(batch["image_grid_thw"])
    images = [image for row in numbers.tolist() for image in ((0, 1) if row == 0 else (row + 1,))]
    return torch.cat([batch[key][image * per_image : (image + 1) * per_image] for image in images])


@pytest.mark.slow
def test_what_rows_have_is_told_by_functions() -> None:
    rows = {key: partial(images_of, key) for key in ("pixel_values", "image_grid_thw")}
    engine = in_parts("Qwen2-VL", 2, [made("Qwen2-VL", seed, rows=5) for seed in range(2)], rows=rows)
    assert parts_of(engine).execution_mode.cut == "calls"
    engine.close()


@pytest.mark.slow
def test_what_rows_have_is_told_by_another_tensor() -> None:
    batches = [made("Qwen2-VL", seed, rows=5) for seed in range(2)]
    for batch in batches:  # drop the second image of row 0
        for key in ("input_ids", "labels"):
            batch[key][0, 10:16] = 40
        batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
        batch["pixel_values"], batch["image_grid_thw"] = batch["pixel_values"][16:], batch["image_grid_thw"][1:]
    engine = in_parts("Qwen2-VL", 2, batches, rows={"pixel_values": "image_grid_thw"})
    assert parts_of(engine).execution_mode.cut == "calls"
    with pytest.raises(ConfigError, match=r"is \[5, 3\].* gives 80 entries for 5 rows; .* is \[79, 96\]"):
        engine.step(batches[0] | {"pixel_values": batches[0]["pixel_values"][1:]})
    with pytest.raises(ConfigError, match="rows names 'pixel_value', which is not in the batch.*pixel_values"):
        Engine(build(qwen2_vl), rows=["pixel_value"]).step(batches[0])
    with pytest.raises(ConfigError, match=r"axis 1 as the row axis of pixel_values, but pixel_values is \[80, 96\]"):
        Engine(build(qwen2_vl), rows={"pixel_values": 1}).step(batches[0])
    engine.close()


# -- tensors mistaken for rows -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "is_plain"), [((16, 5, 16), False), ((5, 16), True)])
def test_as_many_positions_as_rows(num_rows: tuple[int, ...], is_plain: bool) -> None:
    """`img_ids` has as many positions as the batch has rows. `rows={"img_ids": None}` declares them no rows; without
    this setting, a pass over few rows fails and the batch stays whole.
    """
    batches = [on_device(latents(seed, rows)) for seed, rows in enumerate(num_rows)]
    assert batches[0]["img_ids"].shape[0] == 16
    engine = in_parts("denoiser", 3, batches, is_plain, rows={"img_ids": None})
    assert parts_of(engine).execution_mode.cut == ("calls" if is_plain else "units")
    with says_that_it_stays_whole():
        in_parts("denoiser", 3, batches, is_plain)
    train_both(build(KINDS["denoiser"].make), batches, loss_fn=distance)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def hidden(self, x: Tensor, scale: Tensor | float = 1.0, shift: Tensor | float = 0.0) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * scale + shift
        return x


class Prototypes(Hidden):
    """Score rows by similarity to prototypes. The batch has as many prototypes as rows."""

    def forward(self, x: Tensor, prototypes: Tensor) -> Tensor:
        return self.hidden(x) @ prototypes.T


def test_a_table_of_as_many_entries_as_rows() -> None:
    def nearest(outputs: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(outputs, batch["labels"])

    batch = on_device({"x": torch.randn(4, 8), "prototypes": torch.randn(4, 8), "labels": torch.tensor([2, 0, 3, 1])})
    with says_that_it_stays_whole():
        beside_whole(build(Prototypes), nearest, 2, [batch, batch], True).close()
    beside_whole(build(Prototypes), nearest, 2, [batch, batch], True, rows={"prototypes": None}).close()


def near(outputs: Tensor, batch: Any) -> Tensor:
    return functional.mse_loss(outputs, batch["labels"])


class Halved(Hidden):
    """Halve the weights in eval mode, as RWKV does."""

    is_halved = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_halved == self.training:
            with torch.no_grad():
                for block in self.blocks:
                    block.weight.mul_(2 if self.training else 0.5)
            self.is_halved = not self.training
        return self.hidden(x)


def test_a_model_that_writes_to_its_weights_has_them_from_the_next_pass_on() -> None:
    """The warning comes from whichever pass detects the write. The engine undoes writes by a trial run."""
    batches = [{"x": noise(number, 4, 8), "labels": noise(number + 1, 4, 8)} for number in range(2)]
    with pytest.warns(UserWarning, match=r"unit blocks\.\d is read from outside .*its weights stay on the device"):
        beside_whole(build(Halved), near, 2, batches, is_plain=False).close()


def test_a_loss_may_ask_weights_for_anything_but_values() -> None:
    """PEFT asks each weight for the device when it disables an adapter, as TRL does in a loss of DPO. Break: count the
    question as a read.
    """
    model = build(llama)

    def asking(outputs: Any, batch: Any) -> Tensor:
        for weight in model.parameters():
            assert weight.device is not None
            assert weight.shape.numel() == weight.numel()
            assert weight.dtype.is_floating_point
            assert weight.is_contiguous()
            assert weight.stride()[-1] == 1
        loss: Tensor = outputs.loss
        return loss

    with warnings.catch_warnings(), Engine(model) as engine:
        warnings.simplefilter("error")  # no unit has to stay on the device
        engine.step(tokens(0, 4), asking)


class Scaled(Hidden):
    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        return self.hidden(x, scale=scales.mean())


def test_a_loss_in_double_precision_trains() -> None:
    """The engine sums losses in fp32, so the plain pass of the equivalence check has a loss in fp32 too."""

    def double(outputs: Tensor, batch: Any) -> Tensor:
        return functional.mse_loss(outputs.double(), batch["labels"].double()) / 3

    engine = Engine(build(Scaled), PROPORTIONAL)
    batch = on_device({"x": noise(0, 4, 8), "labels": noise(1, 4, 8), "scales": torch.ones(4)})
    wanted = engine.evaluate(batch, double).item()
    assert engine.step(batch, double).loss.item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.filterwarnings("ignore:the engine and plain PyTorch give different results")
@pytest.mark.parametrize("is_plain", [False, True])
def test_what_is_the_same_in_all_rows_tells_nothing(is_plain: bool) -> None:
    """Scales equal to 1 give the same result as one value per row and as values shared by all rows. Later scales do
    not.
    """

    scales = torch.ones(4), torch.ones(4), torch.linspace(0.5, 2, 4), torch.linspace(2, 0.1, 4)
    batches = [{"x": noise(0, 4, 8), "scales": each, "labels": noise(1, 4, 8)} for each in scales]
    beside_whole(build(Scaled), near, 2, batches, is_plain).close()


class Offset(Hidden):
    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """offsets: [any number, 8]. Every row adds the mean over the first axis."""
        return self.hidden(x) + offsets.mean(0)


@pytest.mark.filterwarnings("ignore:the engine and plain PyTorch give different results")
@pytest.mark.parametrize("is_plain", [False, True])
def test_a_loss_that_is_the_same_by_chance_does_not_tell_what_rows_are(is_plain: bool) -> None:
    """With labels far above all outputs, the L1 loss is linear, so a mean over parts equals the whole by chance. The
    second batch breaks this.
    """

    def far(outputs: Tensor, batch: Any) -> Tensor:
        return functional.l1_loss(outputs, batch["labels"])

    batches = [
        {"x": noise(number, 4, 8), "offsets": noise(number + 2, 4, 8), "labels": labels}
        for number, labels in enumerate((torch.full((4, 8), 50.0), noise(5, 4, 8)))
    ]
    beside_whole(build(Offset), far, 2, batches, is_plain).close()


class TimeMajor(Hidden):
    def forward(self, x: Tensor, shifts: Tensor) -> Tensor:
        """x: [rows, 8]; shifts: [3, rows, 8]."""
        return self.hidden(x, shift=shifts.sum(0))


@matrix(strength=1, rows=[4, 3], is_plain=[False, True])
def test_rows_along_another_axis(rows: int, is_plain: bool) -> None:
    whole = {"x": noise(0, rows, 8), "shifts": noise(1, 3, rows, 8), "labels": noise(2, rows, 8)}
    with says_that_it_stays_whole():
        beside_whole(build(TimeMajor), near, 2, [whole, whole], is_plain).close()
    beside_whole(build(TimeMajor), near, 2, [whole, whole], is_plain, rows={"shifts": 1}).close()


# -- batches of several types in turn ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LLaVA", "T5"])
def test_nothing_keeps_what_a_model_collects_on_its_way(name: str) -> None:
    """The vision tower collects hidden states in a list held by a context variable. No autograd graph may remain
    there.
    """
    kind, batch = KINDS[name], made(name, 0)
    engine = Engine(build(kind.make))
    with no_graph_is_left():
        engine.step(batch, kind.loss_fn)
        engine.model(**{key: value for key, value in batch.items() if key != "labels" or kind.loss_fn is None})
    engine.close()


def test_a_model_in_which_nothing_is_called_by_the_batch_keeps_its_weights() -> None:
    """Without an image, weights in the vision tower do not change, not even by moments or weight decay."""
    engine = Engine(build(llava))
    before = weights(engine)
    engine.step(on_device(text_alone(0, 4)))
    moved = {name for name, value in weights(engine).items() if not torch.equal(value, before[name])}
    assert moved
    assert not any("vision" in name or "projector" in name for name in moved)
    engine.close()


PICTURES = ([1, 1, 1, 1], [1, 0, 1, 0], [2, 0, 1, 1], [1, 1, 1, 1])


@pytest.mark.slow
def test_pictures_that_come_in_other_numbers_than_rows() -> None:
    """Two of four rows have no image, or one row has two. Images pass through the tower and do not count as rows."""

    batches = [on_device(pictures_in_rows(seed, PICTURES[seed])) for seed in range(4)]
    train_both(build(llava), batches)
    with says_that_it_stays_whole():
        in_parts("LLaVA", 2, batches).close()


# -- batch contents ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tokens_of_a_step() -> None:
    wanted = {"LLaVA": 4 * 11 - 6, "ViT": 4, "CLIP": 4, "BERT's answers": 4, "denoiser": 4 * 16 * 4, "Whisper": 22}
    for name, number in wanted.items():
        engine = Engine(build(KINDS[name].make))
        assert engine.step(made(name, 0), KINDS[name].loss_fn).tokens == number, name
        engine.close()


def test_labels_of_a_regression_are_all_targets() -> None:
    batch = {**made("ViT", 0), "labels": on_device({"labels": noise(3, 4, 1)})["labels"]}
    model = build(lambda: vit(num_labels=1))
    engine, _ = train_both(model, [batch, batch])
    assert engine.step(batch).tokens == 4
    engine.close()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("position_ids", {1, 2}, "position_ids"),
        ("position_ids", object(), "position_ids"),
        ("num_items_in_batch", torch.tensor(7), "the batch has num_items_in_batch, but the engine passes"),
    ],
)
def test_values_of_other_kinds_are_refused_by_name(key: str, value: Any, said: str) -> None:
    """A count of targets is made by the engine."""
    with Engine(build(llama)) as engine:
        with pytest.raises(ConfigError, match=said):
            engine.step({**tokens(), key: value})
        assert engine.step({**tokens(), "position_ids": None}).loss.isfinite()


# -- ranks -------------------------------------------------------------------------------------------------------------


def refused(name: str) -> str:
    """Take a step on 3 rows of rank 0 or 2 rows of rank 1. Return the error message."""
    with open_comm() as comm, Engine(build(KINDS[name].make), PROPORTIONAL, comm=comm) as engine:
        with pytest.raises(ConfigError) as caught:
            engine.step(made(name, comm.rank, 3 - comm.rank), KINDS[name].loss_fn)
        return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXING)
def test_two_ranks_of_a_loss_that_is_no_mean_are_refused(name: str) -> None:
    for message in run(2, refused, name=name):
        assert "not a mean over rows" in message
        assert "engine.backward" in message


def with_pictures(of_rows: Sequence[Sequence[int]], micro_batch_size: int | None) -> Any:
    """Train on LLaVA rows; `of_rows[rank]` has the number of images per row. Return ([(loss, norm)], weights)."""
    make = KINDS["LLaVA"].make
    with open_comm() as comm, Engine(build(make), PROPORTIONAL, comm=comm, micro_batch_size=micro_batch_size) as engine:
        batches = [on_device(pictures_in_rows(2 * step + comm.rank, of_rows[comm.rank])) for step in range(3)]
        return [step_of(engine, batch) for batch in batches], weights(engine)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_ranks_with_other_numbers_of_pictures(micro_batch_size: int | None) -> None:
    """The ranks see different batch types, and each records separately. If one rank cannot cut a batch, both keep
    theirs whole. The label counts weigh the ranks.
    """
    found = run(2, with_pictures, of_rows=([1, 1, 1, 1], [1, 0, 1]), micro_batch_size=micro_batch_size)
    reference = Reference(build(llava), PROPORTIONAL)
    for step in range(3):
        parts = [on_device(pictures_in_rows(2 * step + rank, each)) for rank, each in enumerate(([1] * 4, [1, 0, 1]))]
        whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0] if key != "position_ids"}
        wanted = step_of(reference, whole)
        for steps, _ in found:
            assert steps[step] == pytest.approx(wanted, rel=ROUNDING)
    for _, values in found:
        assert_same(values, reference.masters, ROUNDING)
