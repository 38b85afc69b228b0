"""Quantized gradient exchange between replicas: training equals plain PyTorch in one process with the same quantization
and error feedback.

"Break:" names the mutations caught by each test.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import LOMO, Engine, MeZO
from offload.engine.prepare import Structure
from offload.errors import ConfigError
from offload.extras.plan.simulated_ranks import SimulatedRanks
from offload.layout.codecs import GRADIENT_CODECS
from offload.layout.planes import ERROR
from offload.layout.regions import Region
from offload.layout.sharding import Sharding
from offload.planning.plan import describe_links
from offload.planning.settings import Settings
from tests.cases.models import build, share
from tests.engine.compare import assert_same
from tests.engine.device import cpu_only
from tests.engine.ranks import run
from tests.engine.ranks_child import CASES, SMOOTH, own_loop, own_loss, own_seed, refusal
from tests.engine.reference import Reference
from tests.engine.sizes import Elements
from tests.engine.test_ranks import MODES, PLACEMENTS, ROWS, TIMINGS, settings_of
from tests.engine.test_ranks import train as train_on_ranks
from tests.engine.test_ranks_saving import gone_on, read_all, save
from tests.engine.test_replicas import AXES as OF_REPLICAS
from tests.engine.test_replicas import REPLICAS, in_replicas, trained_on_machines
from tests.matrix import cover

MOST = {"int8": 127, "int4": 7}
BLOCK = 128


def fake_quantised(flat: Tensor, most: int) -> Tensor:
    """Return the values after quantization in 128-element blocks, fp32."""
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / most
    codes = (blocks / scale.clamp(min=1e-38)).round().clamp(-most, most)
    return (codes * scale).view(-1)[: len(flat)]


def has_any(flat: Tensor) -> Tensor:
    """Return a mask: elements in blocks with any non-zero value."""
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    return (blocks != 0).any(1, keepdim=True).expand(-1, BLOCK).reshape(-1)[: len(flat)]


class CodedReplicas:
    """Plain PyTorch in one process: gradients per replica, quantized and summed by each piece's owner."""

    def __init__(
        self,
        case: str,
        size: int,
        replicas: int,
        link: str,
        max_grad_norm: float | None,
        micro_batch_size: int | None = None,
        gives_sums: bool = True,
    ) -> None:
        self.gives_sums = gives_sums
        self.case, self.size, self.replicas, self.most = CASES[case], size, replicas, MOST[link]
        precision = self.case.precision
        exceptions = self.case.reference(precision)
        self.reference = Reference(
            build(self.case.make), SMOOTH, precision, max_grad_norm, micro_batch_size, **exceptions
        )
        infos, regions = layout(case, size, replicas)
        self.owners = {
            infos[piece.parameter].name: owner(region, size, replicas)[begin : begin + piece.numel]
            for region in regions
            for piece, begin in zip(region.pieces, region.offsets, strict=True)
        }
        self.masters = self.reference.masters
        zeros = {name: torch.zeros(master.numel()).bfloat16() for name, master in self.masters.items()}
        self.errors = [dict(zeros) for _ in range(replicas)]

    def coded(self, flat: Tensor, name: str, replica: int, where: Tensor) -> Tensor:
        """Add the stored error to `flat`, quantize and return the dequantized values. Store the new error where `where`
        is true.
        """
        error = self.errors[replica][name]
        goes, both = has_any(flat), flat + error.float()
        made = torch.where(goes, fake_quantised(torch.where(goes, both, 0), self.most), 0)
        self.errors[replica][name] = torch.where(where & goes, (both - made).bfloat16(), error)
        return made

    def update(self, by_rank: Sequence[Mapping[str, Tensor]]) -> float:
        """Update from the gradients per rank. Return the gradient norm."""
        num, sums = self.size // self.replicas, {}
        for name, owners in self.owners.items():
            flats = [grads[name].view(-1) if name in grads else torch.zeros(len(owners)) for grads in by_rank]
            replicas = [sum(flats[r * num + 1 : (r + 1) * num], flats[r * num]) for r in range(self.replicas)]
            total = torch.zeros(len(owners))
            for place in range(self.replicas):
                mine = owners == place
                terms = [
                    flat if replica == place else self.coded(flat, name, replica, mine)
                    for replica, flat in enumerate(replicas)
                ]
                found = sum(terms[1:], terms[0])
                total[mine] = (self.coded(found, name, place, mine) if self.gives_sums else found)[mine]
            if any(name in grads for grads in by_rank):
                sums[name] = total.view(self.masters[name].shape)
        self.reference._sums = sums
        return self.reference.update()

    def step(self, seed: int, rows: Sequence[int]) -> tuple[float, float]:
        """Train on a batch with `rows[rank]` rows per rank. Return (loss, norm)."""
        whole, total, by_rank = self.case.batch(seed, sum(rows)), 0.0, []
        for rank in range(self.size):
            mine, size = share(whole, rows, rank), self.reference.rows or rows[rank]
            for start in range(0, rows[rank], size):
                part = {key: value[start : start + size] for key, value in mine.items()}
                (loss,) = self.reference.losses(part, self.case.loss_fn, self.case.count)
                loss = loss * (self.case.count(part) / self.case.count(whole))
                loss.backward()
                total += loss.item()
                self.reference.collect()
            by_rank.append(self.taken())
        return total, self.update(by_rank)

    def taken(self) -> dict[str, Tensor]:
        """Return the collected gradients and clear them."""
        found, self.reference._sums = self.reference._sums, {}
        return found


def layout(case: str, size: int, replicas: int) -> tuple[Any, Sequence[Region]]:
    settings = Settings(SMOOTH, precision=CASES[case].precision, replicas=replicas)
    found = Structure.of(build(CASES[case].make), settings, SimulatedRanks(size, replicas), {})
    return found.infos, found.regions


def owner(region: Region, size: int, replicas: int) -> Tensor:
    """Return the replica responsible for each element's sum in a region."""
    shard = torch.arange(region.numel) % (region.numel // (size // replicas))
    return shard // (region.numel // size)


AXES = {
    "link": tuple(MOST),
    **OF_REPLICAS,
    "replicas": REPLICAS,
    "case": ("plain", "tied", "experts", "frozen in bf16"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "case", "rows", "replicas", "stage", "placement", "timing", "mode"),
    [
        ("int8", "experts", "micro-batches", "2 of 2, shared", "3", "all on nvme", "throttled", "deferred"),
        ("int4", "plain", "even", "2 of 1", "0", "weights on the device", "at once", "speculative"),
        *(tuple(one.values()) for one in cover(AXES, 1)),
    ],
)
def test_training_is_that_of_one_process_whose_sums_are_quantised(
    link: str, case: str, rows: str, replicas: str, stage: str, placement: str, timing: str, mode: str, tmp_path: Path
) -> None:
    """All ranks have the same bits. They equal the one-process bits in fp32, unless tied weights are summed in another
    order or an update is corrected: a rounding difference may select the next quantized value.

    Break: forget the error; keep another piece's error; quantize the sum without error feedback on the summing rank;
    send the error for parameters without a gradient; measure the norm before quantization.
    """
    num, each, how = in_replicas(replicas, stage)
    if PLACEMENTS[placement].get("optimizer") == "device" and mode == "speculative":
        mode = "deferred"  # no copy hides behind another there
    shares = ROWS[rows][: num * each]
    settings = {"case": case, "rows": shares, "num_steps": 4, "link_gradients": link, **how}
    settings |= settings_of(rows, mode) | TIMINGS[timing] | {"placement": PLACEMENTS[placement]}
    (found,) = train_on_ranks(num * each, {**settings, "folder": str(tmp_path)})
    micro, most = settings.get("micro_batch_size"), MODES[mode]["max_grad_norm"]
    wanted = CodedReplicas(case, num * each, num, link, most, micro, gives_sums="shared" not in replicas)
    steps = [wanted.step(seed, shares) for seed in range(4)]
    is_bitwise = CASES[case].precision == "fp32" and case != "tied" and mode != "speculative"
    within = 1e-6 if is_bitwise else 1e-3 if CASES[case].precision == "fp32" else 2e-2
    for one, other in zip(found.steps, steps, strict=True):
        assert one[:2] == pytest.approx(other, rel=within)
    # On some processors MKL's last bits depend on the alignment of rows, and micro-batches begin at any row.
    assert_same(found.weights, wanted.masters, 0.0 if is_bitwise and rows != "micro-batches" else within)


def test_own_loops_send_their_sums_once() -> None:
    """Break: quantize the gradients from each pass separately."""
    wanted = CodedReplicas("plain", 2, 2, "int4", 1.0)
    for step in range(3):
        by_rank = []
        for rank in range(2):
            for part in range(2):
                own_loss(wanted.reference.model, CASES["plain"], own_seed(step, part, rank)).backward()
                wanted.reference.collect()
            by_rank.append(wanted.taken())
        wanted.update(by_rank)
    for found in run(2, own_loop, case="plain", num_steps=3, replicas=2, link_gradients="int4"):
        assert_same(found.weights, wanted.masters)


@pytest.mark.slow
def test_a_pass_for_the_norm_alone_keeps_no_error() -> None:
    """Break: store the first pass's error."""
    how = {"case": "plain", "rows": (2, 2), "num_steps": 3, "replicas": 2, "link_gradients": "int4"}
    how |= {"optimizer": LOMO(lr=0.1)}
    one_pass, two_passes = train_on_ranks(2, *({**how, "max_grad_norm": norm} for norm in (None, 1e6)))
    assert [step.loss for step in one_pass.steps] == [step.loss for step in two_passes.steps]
    assert_same(one_pass.weights, two_passes.weights)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stage"), [(2, 0), (4, 3)])
def test_a_run_goes_on_bit_for_bit(size: int, stage: int, tmp_path: Path) -> None:
    """Break: resume without errors; swap the errors between replicas."""
    told = {"zero_stage": stage, "replicas": 2, "link_gradients": "int4"}
    for whole, resumed in run(size, gone_on, case="plain", path=str(tmp_path / "saved"), **told):
        assert resumed == whole
    planes = read_all(tmp_path / "saved")
    assert planes["lm_head.weight", "error-0"].any()
    assert not torch.equal(planes["lm_head.weight", "error-0"], planes["lm_head.weight", "error-1"])
    with Engine(build(CASES["plain"].make), optimizer=SMOOTH) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        engine.export(tmp_path / "hf")


@pytest.mark.slow
def test_another_number_of_replicas_has_all_errors_once(tmp_path: Path) -> None:
    """Break: give every replica all errors; drop the errors from removed replicas."""
    common: dict[str, Any] = {"case": "plain", "link_gradients": "int8"}
    run(3, save, **common, rows=(1, 1, 1), path=str(tmp_path / "by 3"), replicas=3)
    found = read_all(tmp_path / "by 3")
    for size, replicas in ((2, 2), (4, 4)):
        path = tmp_path / f"by {replicas}"
        run(size, save, **common, rows=(1,) * size, path=str(path), resume=str(tmp_path / "by 3"), replicas=replicas)
        its = read_all(path)
        for name in {name for name, plane in its if plane == "error-0"}:
            errors = [found[name, f"error-{n}"].view(torch.bfloat16) for n in range(3)]
            wanted = [errors[0] + errors[2], errors[1]] if replicas == 2 else [*errors, torch.zeros_like(errors[0])]
            assert all(torch.equal(its[name, f"error-{n}"].view(torch.bfloat16), e) for n, e in enumerate(wanted))


@pytest.mark.slow
@cpu_only("ranks of one machine compute on GPUs of their own, whatever machines the test tells of")
def test_links_between_machines_have_the_bytes_of_codes() -> None:
    """For M bytes of bf16 gradients, each of two machines sends half quantized, and half of the sums: 0.52 M with int8,
    0.27 M with int4. ZeRO stage 3 over all ranks sends 3 M (ZeRO++, table 1). With optimizer states sharded over both
    replicas, each sends half the gradients and half the new weights.
    """
    common = {"case": "plain", "rows": (1, 1, 1, 1), "num_steps": 2, "is_counted": True, "precision": "bf16"}
    runs = [{**common, "link_gradients": link} for link in ("exact", "int8", "int4")]
    shared = {**common, "replica_states": "shared"}
    runs += [shared, {**shared, "link_gradients": "int4"}, {**common, "replicas": 1}]
    for found in run(4, trained_on_machines, num_machines=2, runs=runs):
        exact, int8, int4, shared_exact, shared_codes, over_all = (one.moved[1]["network_bytes"] for one in found)
        numel = Elements(build(CASES["plain"].make), 4).all_trained
        assert (int8, int4) == (2 * numel // 4 // 128 * 132, 2 * numel // 4 // 128 * 68)
        assert exact == shared_exact == (4 + 2) * numel // 4  # sums within a replica are fp32
        assert shared_codes == int4 // 2 + 2 * numel // 4
        # Each rank sends its share to every distant rank. Weights still in a slot are not gathered again.
        assert 2.6 * 2 * numel < 2 * over_all <= 3 * 2 * numel
        assert over_all > 5 * int8 > 9 * int4
        held = dict.fromkeys(("exact", "int8"), 0)
        for link, one in zip(held, found, strict=False):
            held[link] = sum(size for _, name, size in one.allocations if name == ERROR.label)
        assert held == {"exact": 0, "int8": 2 * numel // 2}


def refused_over_machines() -> str:
    """Return the error message for one replica over two machines."""
    os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    return refusal(replicas=1, link_gradients="int8")


@cpu_only("ranks of one machine compute on GPUs of their own, whatever machines the test tells of")
def test_what_is_approximate_is_told_and_what_cannot_be_is_refused() -> None:
    (said, _) = run(2, refused_over_machines)
    assert "one replica of the model is sharded over 2 machines" in said
    assert "--offload.replicas auto" in said
    for wrong, text in (
        ({"link_gradients": "nf4"}, "offload.link_gradients is 'nf4'.*exact, int8, int4"),
        ({"link_gradients": "int8", "optimizer": MeZO(lr=1e-3)}, "MeZO has no gradients.*--offload.link_gradients"),
    ):
        with pytest.raises(ConfigError, match=text):
            Engine(build(CASES["plain"].make), **wrong)
    assert Engine(build(CASES["plain"].make), link_gradients="int8").told_links == ""
    sharding = Sharding(replica=1, num_replicas=2, gradients=GRADIENT_CODECS["int4"])
    _, regions = layout("plain", 2, 2)
    assert describe_links(regions, sharding) == (
        "approximate: gradients are sent between 2 replicas in int4; the rounding error of a step is added to the next "
        "one, and takes 72 KiB on each rank"
    )
