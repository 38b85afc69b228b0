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
from tests.cases.models import build, llama, share, tokens
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
    engine.save_checkpoint(tmp_path / "saved")
    with Engine(model()) as exact:
        exact.load_checkpoint(tmp_path / "saved")
        assert_same(weights(exact), found)
    for _, value in engine.edit([name]):
        value.mul_(1.5)
    assert same_bits(own.get_parameter(name).detach().clone().cpu(), fake_quantised(1.5 * found[name]))


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


def exchanged_bytes(stage: int, tier: dict[str, Any], replicas: int, states: str) -> set[int]:
    """Return the sizes of weight exchanges in two steps, in bytes."""
    with open_comm(times=JOB) as comm:
        within, _ = comm.split(replicas)
        gather, give, exchanged = within.all_gather, within.all_to_all, set[int]()

        def counted(flat: Tensor, what: str) -> None:
            if "(int8)" in what and "gradients" not in what and ("new weights" in what or "all-gather" in what):
                assert flat.dtype == torch.uint8
                exchanged.add(flat.nbytes)

        def gathered(full: Tensor, shard: Tensor, what: str) -> None:
            counted(full, what)
            gather(full, shard, what)

        def given(received: Sequence[Tensor], pieces: Sequence[Tensor], what: str) -> None:
            counted(pieces[0], what)
            give(received, pieces, what)

        within.all_gather, within.all_to_all = gathered, given  # type: ignore[method-assign]
        told: dict[str, Any] = {"zero_stage": stage, "replicas": replicas, "replica_states": states}
        told["placement"] = Placement(**tier)
        with Engine(model(), comm=comm, link_weights="int8", **told) as engine:
            for seed in range(2):
                engine.step(share(tokens(seed), (4 // comm.size,) * comm.size, comm.rank))
    return exchanged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "tier", "replicas", "states"),
    [
        (0, "cpu", 1, "whole"),
        (2, "cpu", 1, "whole"),
        (3, "nvme", 2, "whole"),
        (3, "device", 2, "shared"),
    ],
)
def test_ranks_exchange_codes(stage: int, tier: str, replicas: int, states: str, tmp_path: Path) -> None:
    where = TIERS[tier] | ({"nvme_dir": str(tmp_path)} if tier == "nvme" else {})
    wholes = {up(numel, 4096 * replicas) // 128 * 132 for numel in (97 * 64, 4 * 64 * 64 + 3 * 64 * 90)}
    wanted = {0: set[int](), 3: wholes}.get(stage, {size // 2 for size in wholes})
    found = run(2 * replicas, exchanged_bytes, stage=stage, tier=where, replicas=replicas, states=states)
    assert found == [wanted] * 2 * replicas


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
