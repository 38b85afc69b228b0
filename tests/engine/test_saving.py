"""Engine checkpoints: a resumed run equals an uninterrupted run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from offload import Engine
from offload.app.stored_model import read_stored
from offload.checkpoint.manifest import Manifest
from offload.checkpoint.reader import Reader
from offload.engine.recording.equivalence import PassComparator
from offload.engine.recording.trial_runs import TrialRuns
from offload.errors import CheckpointError, ConfigError, TornError
from offload.lanes.ticket import Ticket
from offload.tiers.nvme import Channel
from tests.cases.models import build, gpt2, llama, tokens
from tests.disks import held_back
from tests.engine import compare
from tests.engine.compare import placed, weights
from tests.engine.device import set_seed
from tests.engine.handmade import Block, RunningStatistics, Stack, cross_entropy, words
from tests.engine.inside import head_of, memory_of, parts_of, settle, steps_of
from tests.engine.test_departures import Sometimes, rare
from tests.engine.test_overlap import deep
from tests.matrix import quick


def make(place: str, folder: Path, **settings: Any) -> Engine:
    return Engine(build(deep), placement=placed(place, folder), **{"max_grad_norm": 0.2, **settings})


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def train(engine: Engine, *seeds: int) -> list[tuple[float, float]]:
    results = [engine.step(tokens(seed)) for seed in seeds]
    return [(result.loss.item(), result.grad_norm) for result in results]


def assert_same(one: Engine, other: Engine) -> None:
    """Compare weights and buffers."""
    compare.assert_same(
        *({**weights(engine), **dict(engine.model.named_buffers(prefix="buffer"))} for engine in (one, other))
    )


@pytest.mark.slow
def test_a_load_reads_nothing_that_it_overwrites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding between parameters is zero, for any previous content in the record buffers."""
    source, engine = make("cpu", tmp_path), make("nvme", tmp_path)
    train(source, 0)
    source.save_checkpoint(tmp_path / "saved")
    train(engine, 0)
    nvme, reads = parts_of(engine).store._nvme, []
    assert nvme is not None
    settle(engine)
    nvme.updates.ring.memory.fill_(0xFF)  # NaN
    read = Channel.read

    def noted(self: Channel, *arguments: Any, **options: Any) -> Any:
        reads.append(options["name"])
        return read(self, *arguments, **options)

    monkeypatch.setattr(Channel, "read", noted)
    engine.load_checkpoint(tmp_path / "saved")
    assert not [name for name in reads if name.startswith("update")]
    monkeypatch.setattr(Channel, "read", read)
    for state in parts_of(engine).store.states.values():
        for part in state.held_tiles:
            lease = part.lend(*part.states)
            parts_of(engine).lanes.wait(lease.reads, users=lease.users)
            for plane in lease.planes.values():
                assert not (plane != plane).any()
            lease.done_reading(Ticket("compute", is_done=True))
    assert train(engine, 1) == train(source, 1)
    source.close()
    engine.close()


@pytest.mark.slow
def test_a_flipped_bit_tears_the_engine_until_a_sound_one_is_loaded(tmp_path: Path) -> None:
    engine = make("cpu", tmp_path)
    train(engine, 0)
    for name in ("good", "bad"):
        engine.save_checkpoint(tmp_path / name)
    wanted = train(engine, 1)
    file = tmp_path / "bad" / "rank-0.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-0\.bin is damaged"):
        engine.load_checkpoint(tmp_path / "bad")
    with pytest.raises(TornError):
        engine.step(tokens(1))
    engine.load_checkpoint(tmp_path / "good")
    assert train(engine, 1) == wanted
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_what_is_saved_is_what_was_when_the_save_began(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    engine, twin = make(place, tmp_path, precision="bf16"), make(place, tmp_path, precision="bf16")
    for each in (engine, twin):
        train(each, 0, 1, 0, 1)  # until the spare memory is in use
    twin.save_checkpoint(tmp_path / "wanted", {"note": 1})
    before = engine.allocations
    with monkeypatch.context() as during:
        held_back(during, gate)
        saving = engine.begin_checkpoint(tmp_path / "found", {"note": 1})
        copied = [size for _, name, size in engine.allocations if name == "copy for a checkpoint"]
        assert copied >= [sum(file.stat().st_size for file in (tmp_path / "wanted").glob("*.bin"))]
        wanted = train(engine, 2, 3)
        assert not saving.is_done
        assert not (tmp_path / "found").exists()
        gate.set()
        saving.finish()
    assert engine.allocations == before
    assert files(tmp_path / "found") == files(tmp_path / "wanted")
    engine.load_checkpoint(tmp_path / "found")
    assert train(engine, 2, 3) == wanted
    engine.close()
    twin.close()


@pytest.mark.slow
def test_what_is_told_beside_the_states_is_what_was_when_the_save_began(tmp_path: Path) -> None:
    """Later changes to the note, and decisions at the first batch with another shape, do not enter the checkpoint."""
    engine, note = make("cpu", tmp_path), {"losses": [1.0]}
    train(engine, 0)
    engine.save_checkpoint(tmp_path / "wanted", note)
    with engine.begin_checkpoint(tmp_path / "found", note) as saving:
        note["losses"].append(2.0)
        engine.step({**tokens(1), "attention_mask": torch.ones_like(tokens(1)["input_ids"])})
        saving.finish()
    assert files(tmp_path / "found") == files(tmp_path / "wanted")
    with pytest.raises(ConfigError, match="JSON"):
        engine.begin_checkpoint(tmp_path / "other", {"note": object()})
    assert not (tmp_path / "other").exists()
    assert engine.load_checkpoint(tmp_path / "found") == {"losses": [1.0]}
    engine.close()


@pytest.mark.slow
def test_a_copy_gives_way_to_who_needs_its_memory(tmp_path: Path) -> None:
    """The budget has room for half a copy of the states. The save waits until the other half is on disk."""
    engine = make("cpu", tmp_path)
    size = sum(size for tier, _, size in engine.allocations if tier == "cpu")
    engine.close()
    placement = placed("cpu", tmp_path, host_memory=size + size // 2)
    engine = Engine(build(deep), placement=placement, max_grad_norm=0.2)
    train(engine, 0)
    host = memory_of(engine).host
    with engine.begin_checkpoint(tmp_path / "saved") as saving:
        assert host.current_bytes == host.budget_bytes
        host.reserve("something", size // 4)
        assert saving.is_done
        host.drop("something")
        assert host.current_bytes == size
        saving.finish()
    assert host.peak_bytes == host.budget_bytes
    engine.load_checkpoint(tmp_path / "saved")
    engine.close()


def test_a_save_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    engine = make("cpu", tmp_path)
    train(engine, 0)
    threads, before = threading.active_count(), engine.allocations
    with engine.begin_checkpoint(tmp_path / "saved"):
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
    assert (threading.active_count(), engine.allocations) == (threads, before)
    train(engine, 1)
    engine.close()


@pytest.mark.parametrize("rows", [None, 2])
def test_dropout_goes_on_where_it_was(rows: int | None, tmp_path: Path) -> None:
    """Dropout uses the current generators; with micro-batches it uses the step number."""
    whole, resumed = (Engine(build(gpt2), micro_batch_size=rows) for _ in range(2))
    train(whole, 0)
    whole.save_checkpoint(tmp_path / "saved")
    wanted = train(whole, 1)
    set_seed(7)
    resumed.load_checkpoint(tmp_path / "saved")
    assert train(resumed, 1) == wanted


@pytest.mark.slow
def test_the_first_batch_does_not_decide_about_the_head(tmp_path: Path) -> None:
    """Rows of two tokens are too short for head chunks, the later rows are not."""

    def text(length: int) -> dict[str, Tensor]:
        return {key: value[:, :length] for key, value in tokens(0).items()}

    size = 4 * 4 * 64 * 3
    whole, other, resumed = (Engine(build(deep), head_chunk_bytes=size) for _ in range(3))
    whole.step(text(2))
    whole.save_checkpoint(tmp_path / "saved")
    resumed.load_checkpoint(tmp_path / "saved")
    other.step(text(8))
    assert head_of(whole) is not None
    assert head_of(other) is not None
    assert steps_of(whole).trial_runs.loss_decisions == steps_of(other).trial_runs.loss_decisions
    assert whole.step(text(8)).loss == resumed.step(text(8)).loss
    assert_same(resumed, whole)
    # The saved decision holds, even if a new probe would differ. A recording of the kind of batch would have the head.
    (key,) = steps_of(whole).trial_runs.loss_decisions
    steps_of(whole).trial_runs.loss_decisions[key][2] = 0
    steps_of(whole).known.results.clear()
    whole.save_checkpoint(tmp_path / "saved")
    resumed.load_checkpoint(tmp_path / "saved")
    resumed.step(text(8))
    assert head_of(resumed) is None


SPECULATIVE: dict[str, Any] = {
    "clip": "speculative",
    "max_grad_norm": 0.05,
    "placement": placed("cpu", Path()),
}


class Mixes(Block):
    """Mixes the rows in some batches."""

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return super().forward(h - h.mean(0, keepdim=True) if bool((x[:, 0] == 0).all()) else h)


class MixesSome(Stack):
    def __init__(self) -> None:
        super().__init__(Mixes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h, x)
        return self.head(h)


class ComesAgain(Stack):
    def forward(self, x: torch.Tensor, again: bool = False) -> torch.Tensor:
        h = self.embedding(x)
        for block in (*self.blocks, *self.blocks[:again]):
            h = block(h)
        return self.head(h)


@pytest.mark.slow
def test_a_kind_of_pass_that_comes_again_late_is_confirmed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed engine does not record again a kind of batch from the checkpoint, also after a pass with another
    shape. It compares the first one only.
    """
    whole, second, third = (Engine(build(MixesSome), micro_batch_size=2) for _ in range(3))
    whole.step(words(0), cross_entropy)
    whole.save_checkpoint(tmp_path / "saved")
    second.load_checkpoint(tmp_path / "saved")
    one = {key: value[:2] for key, value in words(2).items()}  # too few rows to cut
    assert whole.step(one, cross_entropy).loss == second.step(one, cross_entropy).loss
    second.save_checkpoint(tmp_path / "again")
    third.load_checkpoint(tmp_path / "again")
    compare_passes, compared = PassComparator.compare, []
    monkeypatch.setattr(TrialRuns, "on_batch", lambda *_: pytest.fail("it is recorded again"))
    monkeypatch.setattr(PassComparator, "compare", lambda *a, **k: compared.append(1) or compare_passes(*a, **k))
    for seed, num_compared in ((1, 2), (3, 0)):
        compared.clear()
        wanted = whole.step(words(seed), cross_entropy).loss
        assert second.step(words(seed), cross_entropy).loss == wanted
        assert third.step(words(seed), cross_entropy).loss == wanted
        assert len(compared) == num_compared


class MixesWhereTold(MixesSome):
    """`skip` leaves out the row-mixing blocks."""

    def forward(self, x: torch.Tensor, skip: int = 0) -> torch.Tensor:
        return self.head(self.embedding(x)) if skip else super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["never stops", "goes on", "is interrupted"])
def test_a_number_that_chooses_another_way_through_the_model_is_judged(tmp_path: Path, how: str) -> None:
    """Also in a resumed run and after an interrupt: the checked pass had other argument values."""
    engine = Engine(build(MixesWhereTold), micro_batch_size=1)
    engine.step({**words(0), "skip": 1}, cross_entropy)
    if how == "goes on":
        engine.save_checkpoint(tmp_path / "saved")
        engine = Engine(build(MixesWhereTold), micro_batch_size=1)
        engine.load_checkpoint(tmp_path / "saved")
    elif how == "is interrupted":

        def interrupted(outputs: Any, batch: Any) -> torch.Tensor:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.step(words(0), interrupted)
    mixed = words(1)
    mixed["x"][:, 0] = 0
    with pytest.warns(UserWarning, match="batches are not split"):
        engine.step({**mixed, "skip": 0}, cross_entropy)


class ReadsItsHead(Stack):
    """Some batches read the head weight outside the head."""

    def forward(self, x: Tensor, reads: bool = False) -> Tensor:  # type: ignore[override]
        return super().forward(x) + (self.head.weight.sum() if reads else 0.0)


GOES_ON: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Mapping[str, Any], Mapping[str, Any]]] = {
    "running statistics": (RunningStatistics, {"micro_batch_size": 1}, words(), words()),
    # The gradient of a unit used twice arrives last, and this order affects the rounding in speculative clipping.
    "order of gradients": (ComesAgain, SPECULATIVE, {**words(0), "again": True}, words(1)),
    "batches left uncut": (Sometimes, {"micro_batch_size": 1}, rare(1, rank=0), rare(1, rank=1)),
    # A resident unit is never cut into micro-batches. Cutting would change the summation order.
    "resident unit": (ReadsItsHead, {"micro_batch_size": 1}, {**words(1), "reads": True}, words(2)),
}
"""Model, settings, the batch before the checkpoint, and the batch after it."""


@pytest.mark.filterwarnings(
    "ignore:unit head is read from outside", "ignore:the engine and plain PyTorch give different"
)
@pytest.mark.parametrize("what", quick(GOES_ON, list(GOES_ON)[:2]))
def test_what_was_decided_before_a_checkpoint_holds_after_it(what: str, tmp_path: Path) -> None:
    make, settings, before, after = GOES_ON[what]
    whole, resumed = (Engine(build(make), **settings) for _ in range(2))
    whole.step(before, cross_entropy)
    whole.save_checkpoint(tmp_path / "saved")
    resumed.load_checkpoint(tmp_path / "saved")
    one, other = (engine.step(after, cross_entropy) for engine in (whole, resumed))
    assert (one.loss, one.grad_norm, one.corrected) == (other.loss, other.grad_norm, other.corrected)
    assert bool(one.corrected) == (settings is SPECULATIVE)
    assert [steps_of(engine).losses.is_called_per_micro_batch for engine in (whole, resumed)] == [make is Sometimes] * 2
    assert_same(resumed, whole)


@pytest.mark.slow
def test_a_checkpoint_from_before_decisions_were_kept_is_loaded(tmp_path: Path) -> None:
    whole, resumed = make("cpu", tmp_path), make("cpu", tmp_path)
    train(whole, 0)
    whole.save_checkpoint(tmp_path / "saved")
    path = tmp_path / "saved" / "manifest.json"
    manifest = Manifest.decode(path.read_bytes(), path)
    del manifest.meta["engine"]["analysis"]
    path.write_bytes(manifest.encode())
    resumed.load_checkpoint(tmp_path / "saved")
    assert train(resumed, 1) == train(whole, 1)
    assert_same(resumed, whole)


def test_what_says_how_to_build_the_model_lies_beside_its_states(tmp_path: Path) -> None:
    engine = make("cpu", tmp_path, precision="bf16")
    use_cache = build(deep).config.use_cache
    engine.save_checkpoint(tmp_path / "saved", files={"tokenizer.json": b"{}"})
    with Reader(tmp_path / "saved") as reader:
        assert set(reader.attached) == {"config.json", "generation_config.json", "tokenizer.json"}
    config = AutoConfig.from_pretrained(tmp_path / "saved")
    assert (config.architectures, config.dtype) == (["LlamaForCausalLM"], torch.bfloat16)
    assert config.use_cache == use_cache
    engine.close()


@pytest.mark.slow
def test_a_checkpoint_may_leave_out_what_is_frozen(tmp_path: Path) -> None:
    """The resuming engine already has the frozen weights. Reading a model from the checkpoint alone is refused."""

    def frozen(place: str) -> Engine:
        model = build(deep)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
        return Engine(model, placement=placed(place, tmp_path))

    whole = frozen("nvme")
    train(whole, 1)
    whole.save_checkpoint(tmp_path / "all")
    whole.save_checkpoint(tmp_path / "saved", trained_only=True)
    trained = sum(value.numel() for _, value in whole.named_parameters(trained_only=True))
    left_out = sum(value.numel() for _, value in whole.named_parameters()) - trained
    sizes = [sum(map(len, files(tmp_path / name).values())) for name in ("all", "saved")]
    assert sizes[0] - sizes[1] >= 4 * left_out
    with Reader(tmp_path / "saved") as reader:
        assert {name for name, _ in whole.named_parameters(trained_only=True)} == set(reader.contents)
    wanted = train(whole, 2)
    resumed = frozen("cpu")
    for name in ("saved", "all"):
        resumed.load_checkpoint(tmp_path / name)
        assert train(resumed, 2) == wanted
        assert_same(resumed, whole)
    for name in ("saved", "all"):
        with pytest.raises(
            ConfigError,
            match=r"other frozen parameters: \d+ are trainable now but were frozen in the checkpoint, such as lm_head",
        ):
            make("cpu", tmp_path).load_checkpoint(tmp_path / name)
    with pytest.raises(ConfigError, match="has only trained parameters.*without the frozen weights"):
        read_stored(tmp_path / "saved")
    with Engine(build(deep)) as engine:
        engine.save_checkpoint(tmp_path / "nothing is frozen", trained_only=True)
    read_stored(tmp_path / "nothing is frozen")[1].close()


def test_metadata_other_than_json_are_refused_before_a_write(tmp_path: Path) -> None:
    with Engine(build(llama)) as engine, pytest.raises(ConfigError, match=r"must be JSON .* Tensor is not JSON"):
        engine.save_checkpoint(tmp_path / "saved", meta={"scores": torch.zeros(2)})
    assert not list(tmp_path.iterdir())
