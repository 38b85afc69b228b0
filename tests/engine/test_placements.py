"""The placement of states changes no bits. The shapes determine the bytes stored and moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload import Engine, Placement
from offload.errors import ConfigError
from tests.cases.models import build, llama, tokens
from tests.engine.device import own_device
from tests.engine.inside import parts_of
from tests.engine.sizes import Elements, tier_bytes


@pytest.mark.parametrize(("budget", "tier"), [(None, "device"), ("64MiB", "device"), ("256KiB", "cpu")])
def test_auto_takes_the_device_where_it_has_room(budget: str | None, tier: str) -> None:
    engine = Engine(build(llama), placement=Placement("auto", "auto", device_memory=budget))
    other = {"device": "cpu", "cpu": "device"}[tier]
    assert "exp avg" in tier_bytes(engine, tier)
    assert "exp avg" not in tier_bytes(engine, other)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("max_grad_norm", [1.0, None], ids=["clipped", "unclipped"])
@pytest.mark.usefixtures("nothing_left_over")
def test_a_step_moves_each_unit_twice_and_its_gradient_once(
    precision: str, width: int, max_grad_norm: float | None
) -> None:
    """The last forward unit is first in backward and still on the device.

    The embedding backward reads no weights. Small units stay on the device, and are copied there after their update.
    """
    sizes = Elements(build(llama))
    engine = Engine(build(llama), precision=precision, max_grad_norm=max_grad_norm, recompute="always", prefetch=0)
    for seed in range(3):
        engine.step(tokens(seed))
        assert engine.counters.h2d_bytes == width * sizes.fetched
        assert engine.counters.d2h_bytes == width * sizes.all_trained
        assert engine.counters.nvme_read_bytes == engine.counters.nvme_write_bytes == 0
        assert engine.counters.total == engine.counters.h2d_bytes + engine.counters.d2h_bytes


def test_parameters_on_the_device_go_up_once_a_step() -> None:
    total = Elements(build(llama)).all_trained
    engine = Engine(build(llama), placement=Placement("device", "cpu"))
    for seed in range(3):
        engine.step(tokens(seed))
        assert (engine.counters.h2d_bytes, engine.counters.d2h_bytes) == (4 * total, 4 * total)


HOST_BYTES = {("fp32", 1.0): 16, ("fp32", None): 12, ("bf16", 1.0): 14, ("bf16", None): 12}


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "max_grad_norm"), HOST_BYTES)
def test_host_bytes_a_parameter(precision: str, max_grad_norm: float | None) -> None:
    """12 bytes, plus waiting gradients: 2 bytes in bf16, 4 in fp32.

    Without waiting there is one staging buffer; on an accelerator two, to fill one during the other's read.
    """
    sizes = Elements(build(llama))
    engine = Engine(build(llama), precision=precision, max_grad_norm=max_grad_norm)
    engine.step(tokens())
    held = tier_bytes(engine, "cpu")
    staging = held.pop("gradient staging", 0)
    assert sum(held.values()) == HOST_BYTES[precision, max_grad_norm] * sizes.all_trained
    stagings = 1 if own_device().type == "cpu" else 2  # the largest units are neighbours
    assert staging == (0 if max_grad_norm else stagings * max(sizes.trained) * (4 if precision == "fp32" else 2))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_device_bytes(precision: str) -> None:
    width = 4 if precision == "fp32" else 2
    sizes = Elements(build(llama))
    engine = Engine(build(llama), precision=precision)
    held = {name.split(" (")[0]: size for name, size in tier_bytes(engine, "device").items()}
    assert held == {
        "unit slot": width * max(sizes.trained),
        "gradient buffer": width * max(sizes.trained),
        "resident weights": width * sizes.norm,
        "accumulated gradients": 4 * sizes.norm,
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"placement": {"parameter": "cpu"}}, "placement has the unknown field 'parameter' (did you mean parameters?)"),
        ({"placement": "cpu"}, "the placement is 'cpu'; it must be a Placement, or a mapping of its fields"),
        ({"optimizer": torch.optim.AdamW([torch.zeros(2)])}, "the optimizer is a torch.optim.AdamW; it must be"),
        ({"head_chunk_bytes": "much"}, "train.head_chunk_bytes is 'much'; it should be a size such as"),
    ],
)
def test_what_an_engine_cannot_take_is_said_in_a_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(torch.nn.Linear(2, 2), **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_engine_takes_the_fields_of_a_placement_and_says_what_it_is() -> None:
    with Engine(build(llama), placement={"parameters": "cpu", "optimizer": "cpu"}) as engine:
        assert "cpu" in {tier for tier, *_ in engine.allocations}
        where = parts_of(engine).device.torch_device
        assert repr(engine) == f"<Engine: AdamW over LlamaForCausalLM on {where}>"
