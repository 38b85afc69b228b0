"""torch treats the simulated device like a GPU."""

import copy
import io

import pytest
import torch

from offload.accelerators import capability_of
from tests.accelerator.build import build

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]


def test_moving_modules_and_tensors(sim):
    layer = torch.nn.Linear(3, 2)
    weight = layer.weight.detach().clone()
    moved = copy.deepcopy(layer).to("sim")
    assert moved.weight.device == torch.device("sim:0")
    assert moved.weight.is_sim
    assert copy.deepcopy(moved).weight.device == torch.device("sim:0")
    assert torch.equal(moved.cpu().weight, weight)
    with torch.device("sim"):
        assert torch.nn.Linear(2, 2).bias.device.type == "sim"


def test_saving_and_loading(sim):
    file = io.BytesIO()
    torch.save({"a": torch.arange(4.0, device="sim:1")}, file)
    for where, expected in ((None, "sim:1"), ("sim:0", "sim:0"), ("cpu", "cpu")):
        file.seek(0)
        found = torch.load(file, map_location=where)["a"]
        assert (str(found.device), found.tolist()) == (expected, [0, 1, 2, 3])


def test_random_numbers_follow_the_state_alone(sim):
    torch.manual_seed(5)
    state = torch.sim.get_rng_state()
    first = torch.randn(100, device="sim"), torch.rand(3, device="sim"), torch.randint(9, (5,), device="sim")
    later = torch.sim.get_rng_state()
    assert not torch.equal(state, later)
    sim.set_jitter(2000, seed=1)
    torch.sim.set_rng_state(state)
    other = torch.Stream("sim:0")
    again = [torch.randn(100, device="sim")]
    with other:
        again += [torch.rand(3, device="sim"), torch.randint(9, (5,), device="sim")]
    torch.accelerator.synchronize()
    for left, right in zip(first, again, strict=True):
        assert torch.equal(left, right)
    assert torch.equal(torch.sim.get_rng_state(), later)
    assert abs(first[0].mean().item()) < 0.5
    assert not torch.equal(torch.randn(100, device="sim"), first[0])


def test_generators_of_ones_own_and_of_each_device(sim):
    torch.manual_seed(5)
    assert torch.equal(torch.randn(4, device="sim:0").cpu(), torch.randn(4, device="sim:1").cpu())
    untouched = torch.sim.get_rng_state()
    generator = torch.Generator("sim").manual_seed(9)
    first = torch.randn(4, device="sim", generator=generator)
    state = generator.get_state()
    second = torch.randn(4, device="sim", generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.randn(4, device="sim", generator=generator), second)
    assert not torch.equal(first, second)
    assert torch.equal(torch.sim.get_rng_state(), untouched)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(4, device="sim", generator=torch.Generator())


def test_dropout_and_checkpointing_draw_the_same_again(sim):
    x = torch.ones(1000, device="sim", requires_grad=True)
    with torch.random.fork_rng(devices=[0], device_type="sim"):
        torch.manual_seed(1)
        kept = torch.utils.checkpoint.checkpoint(torch.nn.functional.dropout, x, 0.5, use_reentrant=False)
        kept.sum().backward()
    assert torch.equal(x.grad, kept.detach())
    assert set(kept.tolist()) == {0.0, 2.0}
    assert 350 < (kept != 0).sum().item() < 650


def test_autocast(sim):
    x, weight = torch.randn(4, 4, device="sim"), torch.randn(4, 4, device="sim", requires_grad=True)
    with torch.autocast("sim", dtype=torch.bfloat16):
        low = torch.nn.functional.linear(x, weight)
        assert (x @ weight).dtype == torch.nn.functional.linear(x, weight).dtype == torch.bfloat16
        assert torch.softmax(low, -1).dtype == torch.float32
        assert torch.nn.functional.layer_norm(low, (4,)).dtype == torch.float32
        assert low.sum().dtype == torch.float32
        assert torch.addcmul(low, x, x).dtype == torch.float32
        assert torch.nn.functional.conv1d(x.view(1, 4, 4), weight.view(4, 4, 1)).dtype == torch.bfloat16
    low.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    on_cpu = x.cpu().bfloat16() @ weight.detach().cpu().bfloat16().t()
    assert torch.equal(low.cpu(), on_cpu)
    assert (x @ x).dtype == torch.float32


def test_nothing_is_built_twice(sim):
    library = build()
    before = library.stat().st_mtime_ns
    assert build().stat().st_mtime_ns == before


def test_the_rules_of_cards_are_not_for_other_devices() -> None:
    """Break: take the number of any device for a compute capability."""
    assert capability_of(torch.device("sim", 0)) is None
