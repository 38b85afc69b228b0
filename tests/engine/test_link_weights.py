"""int8 copies of trained weights: training equals plain PyTorch with fake-quantized weights bit for bit, masters stay
exact, and links carry quantized bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import SGD, AdamW, Engine, Placement
from offload.app.training.resident import ResidentTrainer, using_link_weights
from offload.distributed.joining import open_comm
from offload.errors import ConfigError
from offload.extras.plan.machine_files import read_machine
from offload.layout.regions import Region
from offload.planning.device_updates import weight_seconds
from offload.planning.machines import Speeds
from offload.planning.settings import parse_throttle
from offload.tiers.slots import Slots
from tests.cases.models import build, first_row, llama, share, tokens
from tests.engine.compare import assert_same, same_bits, weights
from tests.engine.inside import leave_spare_memory, parts_of, planned_bytes
from tests.engine.ranks import run
from tests.engine.ranks_child import JOB
from tests.engine.reference import fake_quantised
from tests.engine.sizes import tier_bytes, up

SIZES = {"hidden_size": 64, "intermediate_size": 90, "num_key_value_heads": 4, "num_hidden_layers": 3}
"""All matrices are quantized. The last quantization block of a 97 x 64 table is partial."""
TIERS: dict[str, dict[str, Any]] = {
    "device": {"parameters": "device", "optimizer": "device"},
    "cpu": {"parameters": "cpu", "optimizer": "cpu"},
    "nvme": {"parameters": "nvme", "optimizer": "nvme", "activations": "nvme"},
    "codes on disk": {"parameters": "nvme", "optimizer": "cpu"},
}


def model(**settings: Any) -> nn.Module:
    return build(lambda: llama(**SIZES | {"vocab_size": 97} | settings))


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["cpu", "codes on disk"])
def test_links_and_tiers_have_the_bytes_of_codes(tier: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each H2D copy has 132 bytes in place of 256 bytes bf16, except vectors. Allocations match the plan."""
    copy_to_device, found = Slots._copy_to_device, {}
    for link in ("exact", "int8"):
        fetched: Counter[Region] = Counter()

        def counted(slots: Slots, region: Region, *args: Any, fetched: Counter[Region] = fetched, **kwargs: Any) -> Any:
            fetched[region] += 1
            return copy_to_device(slots, region, *args, **kwargs)

        monkeypatch.setattr(Slots, "_copy_to_device", counted)
        placement = Placement(**TIERS[tier], nvme_dir=str(tmp_path))
        engine = Engine(model(), link_weights=link, precision="bf16", prefetch=0, placement=placement)
        leave_spare_memory(engine)
        engine.step(tokens(0))
        fetched.clear()
        engine.step(tokens(1))
        assert engine.counters.h2d_bytes == sum(n * region.travelling_bytes for region, n in fetched.items())
        found[link] = {region.name: (n, region.travelling_bytes) for region, n in fetched.items()}
        planned = planned_bytes(engine)
        for where in ("cpu", "nvme"):
            assert all(planned[where, name] == size for name, size in tier_bytes(engine, where).items())
    names = [name for name in found["exact"] if f"{name} (int8)" in found["int8"]]
    assert set(names) == {"model.embed_tokens", *(f"model.layers.{n}" for n in range(3)), "lm_head"}
    sizes = {"model.embed_tokens": [97 * 64], "lm_head": [97 * 64]}
    for name in names:
        num_fetches, _ = found["exact"][name]
        matrices = sizes.get(name, [64 * 64] * 4 + [64 * 90] * 3)
        numel = up(sum(up(size, 128) for size in matrices), 2048)
        assert found["int8"][f"{name} (int8)"] == (num_fetches, numel // 128 * 132)


def test_what_the_link_takes_is_estimated_by_the_bytes_of_codes() -> None:
    throttles, seconds = parse_throttle({"h2d": "1MB"}), {}
    speeds = Speeds(read_machine("rtx-4090"))
    for link in ("exact", "int8"):
        parts = parts_of(Engine(model(), link_weights=link))
        seconds[link] = weight_seconds(parts.regions, parts.plan.residence.sharding, throttles, speeds)
        up_bytes = 2 * sum(region.travelling_bytes for region in parts.regions)
        assert seconds[link] == pytest.approx(up_bytes / 1e6, abs=1e-3)
    assert seconds["int8"] < 0.33 * seconds["exact"], "in fp32"


@pytest.mark.slow
def test_masters_are_what_is_saved_and_exported_and_codes_are_what_is_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    name, own = "model.layers.1.mlp.up_proj.weight", model()
    engine = Engine(own, link_weights="int8")
    engine.step(tokens(0))
    found = weights(engine)
    assert not same_bits(found[name], fake_quantised(found[name]))
    assert same_bits(own.get_parameter(name).detach().clone().cpu(), fake_quantised(found[name]))
    engine.export(tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert_same({each: exported[each] for each in found}, found)
    for _, value in engine.edit([name]):
        value.mul_(1.5)
    assert same_bits(own.get_parameter(name).detach().clone().cpu(), fake_quantised(1.5 * found[name]))


@pytest.mark.slow
def test_checkpoints_have_no_codes(tmp_path: Path) -> None:
    """File sizes equal an exact run, and each run loads the other's checkpoint."""
    engines = {link: Engine(model(), link_weights=link, precision="bf16") for link in ("int8", "exact")}
    wanted = weights(engines["int8"])
    for link, engine in engines.items():
        engine.save_checkpoint(tmp_path / link)
        engine.step(tokens(0))
    one, other = ([file.stat().st_size for file in (tmp_path / link).glob("*.bin")] for link in engines)
    assert one == other
    for link, engine in zip(engines, reversed(engines.values()), strict=True):
        engine.load_checkpoint(tmp_path / link)
        assert_same(weights(engine), wanted)


def test_masters_that_are_alone_on_disk_are_read_from_a_checkpoint(tmp_path: Path) -> None:
    """SGD has no moments, so the masters are alone on disk, beside the quantized copies. Break: treat any weights
    stored alone as the copies for the link.
    """
    place, found = Placement(optimizer="nvme", nvme_dir=str(tmp_path)), []
    for number in range(2):
        with Engine(model(num_hidden_layers=1), SGD(lr=0.01), place, link_weights="int8") as engine:
            if number:
                engine.load_checkpoint(tmp_path / "saved")
            else:
                engine.step(tokens(0))
                engine.save_checkpoint(tmp_path / "saved")
            engine.step(tokens(1))
            found.append(weights(engine))
    assert_same(*found)


def on_ranks(
    stage: int, tier: dict[str, Any], saved: str, replicas: int, states: str
) -> tuple[list[float], dict[str, Tensor], Counter[int]]:
    """Return the losses for a step from the start and for a step from a checkpoint, the final weights, and the number
    of weight exchanges per size in bytes.
    """
    with open_comm(times=JOB) as comm:
        within, _ = comm.split(replicas)
        gather, give, exchanged = within.all_gather, within.all_to_all, Counter[int]()

        def counted(flat: Tensor, what: str) -> None:
            if "(int8)" in what and "gradients" not in what and ("new weights" in what or "all-gather" in what):
                assert flat.dtype == torch.uint8
                exchanged[flat.nbytes] += 1

        def gathered(full: Tensor, shard: Tensor, what: str) -> None:
            counted(full, what)
            gather(full, shard, what)

        def given(received: Sequence[Tensor], pieces: Sequence[Tensor], what: str) -> None:
            counted(pieces[0], what)
            give(received, pieces, what)

        within.all_gather, within.all_to_all = gathered, given  # type: ignore[method-assign]
        told: dict[str, Any] = {"zero_stage": stage, "replicas": replicas, "replica_states": states}
        told["placement"] = Placement(**tier)
        engine = Engine(model(), comm=comm, link_weights="int8", **told)
        losses = []
        for seed in range(2):
            losses.append(engine.step(share(first_row(seed, 4), (4 // comm.size,) * comm.size, comm.rank)).loss.item())
            if seed == 0:
                engine.load_checkpoint(Path(saved))
        found = weights(engine)
        engine.close()
    return losses, found, exchanged


@pytest.mark.parametrize(
    ("stage", "tier", "replicas", "states"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, "cpu", 1, "whole"), (2, "cpu", 1, "whole"))),
        pytest.param(3, "nvme", 2, "whole", marks=pytest.mark.slow),
        (3, "device", 2, "shared"),
    ],
)
def test_ranks_exchange_codes(stage: int, tier: str, replicas: int, states: str, tmp_path: Path) -> None:
    """The two ranks in each replica have the one-process bits, from the start and from a checkpoint."""
    engine = Engine(model(), link_weights="int8")
    losses = [engine.step(first_row(0, 4)).loss.item()]
    engine.save_checkpoint(tmp_path / "saved")
    losses.append(engine.step(first_row(1, 4)).loss.item())
    where = TIERS[tier] | ({"nvme_dir": str(tmp_path)} if tier == "nvme" else {})
    told: dict[str, Any] = {"stage": stage, "tier": where, "saved": str(tmp_path / "saved"), "replicas": replicas}
    told["states"] = states
    for found, weights_of, exchanged in run(2 * replicas, on_ranks, **told):
        assert found == losses
        assert_same(weights_of, weights(engine))
        wholes = {up(numel, 4096 * replicas) // 128 * 132 for numel in (97 * 64, 4 * 64 * 64 + 3 * 64 * 90)}
        assert set(exchanged) == {0: set(), 3: wholes}.get(stage, {size // 2 for size in wholes})


def test_the_resident_side_of_parity_has_the_decoded_weights() -> None:
    engine, batch = Engine(model(), link_weights="int8"), tokens(0, device="cpu")
    own, names = model(), [name for name, _ in model().named_parameters()]
    before = {name: p.detach().clone() for name, p in own.named_parameters()}
    with using_link_weights(own, "fp32", "int8"):
        found = {name: p.detach().clone() for name, p in own.named_parameters()}
        assert_same(found, {name: fake_quantised(value) for name, value in before.items()})
    assert_same({name: p.detach() for name, p in own.named_parameters()}, before)
    cpu = torch.device("cpu")
    resident = ResidentTrainer(
        own,
        AdamW(),
        precision="fp32",
        device=cpu,
        update_devices=dict.fromkeys(names, cpu),
        max_grad_norm=1.0,
        seed=0,
        link_weights="int8",
    )
    for _ in range(2):
        assert engine.step(tokens(0)).loss.item() == pytest.approx(resident.step([(batch, 1.0)])[0], rel=1e-6)


def test_what_is_approximate_is_told() -> None:
    engine = Engine(model(), link_weights="int8", precision="bf16")
    assert engine.told_links == (
        "approximate: 23 of 30 trainable parameters are copied in int8, 122 KiB instead of 236 KiB, and the run "
        "computes with the rounded values; master weights, checkpoints and exports are exact"
    )
    assert Engine(model()).told_links == ""


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="offload.link_weights is 'nf4'.*exact, int8"):
        Engine(model(), link_weights="nf4")
    with pytest.raises(
        ConfigError, match="link_weights is int8, but the model has no trainable parameters for this format"
    ):
        Engine(build(lambda: llama(hidden_size=16, intermediate_size=16)), link_weights="int8")
