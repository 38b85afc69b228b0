"""Later calls that differ from the recorded ones: by structure, by flags, by loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers as T
from torch import Tensor, nn

from offload import SGD, Engine
from offload.errors import ConfigError
from tests.cases.models import GROUPED, SPECIAL, build, llama, mixtral
from tests.engine.compare import step_of
from tests.engine.device import own_device
from tests.engine.handmade import WORDS, Block, Stack, cross_entropy
from tests.engine.inside import steps_of
from tests.engine.reference import Reference, count_labels

RARE = 5
"""Token id; at the start of the last row, `Sometimes` calls blocks with one more argument."""


def mistral() -> nn.Module:
    return T.MistralForCausalLM(T.MistralConfig(**GROUPED | SPECIAL, sliding_window=16))


class Gate(Block):
    def forward(self, h: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(h if gate is None else h * gate[:, None, None])


class Sometimes(Stack):
    """Call blocks with one more argument if the last row begins with `RARE`. A sample with the first rows does not show
    this call.
    """

    def __init__(self) -> None:
        super().__init__(Gate, depth=2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        extra = (torch.linspace(0.5, 1.5, len(x), device=x.device),) if x[-1, 0] == RARE else ()
        for block in self.blocks:
            h = block(h, *extra)
        return self.head(h)


def rare(seed: int, rank: int) -> dict[str, Tensor]:
    x = torch.randint(RARE + 1, WORDS, (4, 6), generator=torch.Generator().manual_seed(10 * seed + rank))
    x[-1, 0] = RARE if rank == 0 and seed else RARE + 1
    return {key: value.to(own_device()) for key, value in {"x": x, "labels": x.flip(1)}.items()}


def tokens(seed: int, length: int = 40, padding: int | None = None) -> dict[str, torch.Tensor]:
    """Return four rows. `padding` adds a mask, with the last `padding` positions of the third row masked, and 3 more in
    the fourth.
    """
    ids = torch.randint(3, 60, (4, length), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padding is not None:
        mask = torch.ones_like(ids)
        if padding:
            mask[2, -padding:] = 0
            mask[3, -padding - 3 :] = 0
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {key: value.to(own_device()) for key, value in batch.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "batches", "rows"),
    [
        (mistral, [tokens(0), tokens(1)], None),  # 40 tokens fill the window; the recorded rows do not
        (
            llama,
            [tokens(0, padding=0), tokens(1, padding=5), tokens(2, padding=0), tokens(3, 12, padding=2), tokens(4)],
            1,
        ),
    ],
)
def test_masks_that_come_and_go_are_recorded_again(make, batches, rows: int | None) -> None:
    model = build(make)
    reference = Reference(model, micro_batch_size=rows)
    engine = Engine(model, micro_batch_size=rows)
    for batch in batches:
        wanted = step_of(reference, batch)
        assert step_of(engine, batch) == (wanted if rows is None else pytest.approx(wanted, rel=1e-6))
    assert steps_of(engine).splits
    assert engine.evaluate(tokens(9, padding=3)).item() > 0


def test_what_no_few_rows_show_is_called_on_one_micro_batch_after_another() -> None:
    """Blocks get one more argument if the last row begins with a rare token."""
    model = build(Sometimes)
    reference = Reference(model, micro_batch_size=1)
    engine = Engine(model, micro_batch_size=1)
    for seed in range(3):
        wanted = step_of(reference, rare(seed, rank=0), cross_entropy, count_labels)
        assert step_of(engine, rare(seed, rank=0), cross_entropy) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
def test_a_flag_that_is_set_later_counts_like_one_that_was_set_before() -> None:
    flagged = Engine(build(lambda: mixtral(output_router_logits=True)), optimizer=SGD(lr=0.0))
    engine = Engine(build(mixtral), optimizer=SGD(lr=0.0))
    plain = engine.step(tokens(0)).grad_norm
    engine.model.config.output_router_logits = True
    assert engine.step(tokens(0)).grad_norm == flagged.step(tokens(0)).grad_norm != plain
    engine.model.config.output_router_logits = False
    assert engine.step(tokens(0)).grad_norm == plain


@pytest.mark.slow
def test_what_is_known_of_one_loss_is_not_used_for_another() -> None:
    engine = Engine(build(llama))
    batch = tokens(0)

    def unshifted(outputs, batch):
        return F.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten())

    assert engine.step(batch, loss_fn=unshifted).tokens == 160
    assert engine.step(batch).tokens == 156
    with pytest.raises(ConfigError, match="no loss"):
        engine.step({"input_ids": batch["input_ids"]})
    scores = {**batch, "labels": torch.rand(4)}  # the model's own loss cannot take these labels
    engine.step(scores, loss_fn=lambda outputs, b: (outputs.logits.mean((1, 2)) - b["labels"]).square().mean())


def test_ranks_are_refused(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        Engine(build(llama))


def test_a_graph_that_outlives_its_engine_goes_quietly(recwarn) -> None:
    engine = Engine(build(llama))
    loss = engine.model(**tokens(0)).loss
    engine.close()
    del loss
    assert not [w for w in recwarn if "Exception ignored" in str(w.message)]
