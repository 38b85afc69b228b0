"""Memory budgets: kept to the byte; a refusal allocates nothing and gives helpful sizes."""

from __future__ import annotations

import re
from typing import Any

import psutil
import pytest
import torch

from offload import LOMO, AdamW, Engine, Placement
from offload.errors import ConfigError, DoesNotFitError, format_bytes
from offload.optim.rule import UpdateRule
from tests.cases.models import build, gemma2, llama, tokens
from tests.engine.compare import assert_same, step_of, weights
from tests.engine.device import LEDGER
from tests.engine.handmade import Stack, cross_entropy, words
from tests.engine.inside import parts_of
from tests.engine.sizes import elements, tier_bytes


@pytest.mark.parametrize(
    "settings", [{}, {"precision": "bf16"}, {"max_grad_norm": None}, {"micro_batch_size": 2}], ids=str
)
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("make", [llama, gemma2])
def test_exactly_enough_is_enough_and_a_byte_less_is_not(make: Any, tier: str, settings: dict[str, Any]) -> None:
    free = Engine(build(make), **settings)
    needed = sum(tier_bytes(free, {"device": "device", "host": "cpu"}[tier]).values())
    key = f"{tier}_memory"
    exactly = Engine(build(make), placement=Placement(**{key: needed}), **settings)
    assert not exactly.told_tiles
    if tier == "device":
        smaller = Engine(build(make), placement=Placement(**{key: needed - 1}), **settings)
        assert "larger blocks are split into modules" in smaller.told_tiles
        assert sum(tier_bytes(smaller, "device").values()) < needed
        return
    with pytest.raises(
        DoesNotFitError, match=rf"offload\.{key} is .*{needed - 1} bytes.*{needed} bytes.*\b1 bytes\b"
    ) as refusal:
        Engine(build(make), placement=Placement(**{key: needed - 1}), **settings)
    assert f"--offload.{key} to {needed}" in str(refusal.value)


@pytest.mark.parametrize("rule", [AdamW(), LOMO()])
def test_gradients_that_do_not_wait_pass_through_memory_that_is_planned(rule: UpdateRule) -> None:
    engine = Engine(build(llama), rule, Placement("device", "device"), max_grad_norm=None)
    planned = {each.name: each.num_bytes for each in parts_of(engine).plan.allocations if each.num_bytes}
    assert {name: size for _, name, size in engine.allocations} == planned


@pytest.mark.slow
def test_states_of_a_small_rule_leave_the_device_room_for_activations() -> None:
    """The optimizer states of a small update rule may fit in a device budget without room for a step. Then they go to
    the host.
    """
    there = Engine(build(llama), LOMO(), Placement("device", "device"), max_grad_norm=None)
    needed = sum(each.num_bytes for each in parts_of(there).plan.allocations if each.tier == "device")
    for share, tier in ((1.05, "cpu"), (2.0, "device")):
        place = Placement("auto", "auto", device_memory=int(share * needed))
        engine = Engine(build(llama), LOMO(), place, max_grad_norm=None)
        assert parts_of(engine).plan.residence.common == tier
        engine.step(tokens())


def test_a_device_below_the_largest_unit_is_refused_by_its_name() -> None:
    model = build(llama)
    model.model.layers[1].self_attn.extra = torch.nn.Parameter(torch.zeros(300, 70))
    largest = 4 * elements(model.model.layers[1])
    with pytest.raises(DoesNotFitError) as refusal:
        Engine(model, placement=Placement(device_memory="20KiB"))
    message = str(refusal.value)
    assert "offload.device_memory is 20 KiB" in message
    assert re.search(rf"largest unit is model\.layers\.1 \({re.escape(format_bytes(largest))} of weights\)", message)
    assert f"unit slot (largest unit: model.layers.1) {format_bytes(largest)} ({largest})" in message


@pytest.mark.slow
@pytest.mark.parametrize("budget", [{"host_memory": "8MiB"}, {"device_memory": "4KiB"}], ids=str)
def test_a_refusal_allocates_nothing_and_leaves_the_model_as_it_was(budget: dict[str, Any]) -> None:
    model = build(Stack)
    model.embedding = torch.nn.Embedding(500_000, 16)
    before = {name: (id(p), p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    process = psutil.Process()
    memory = process.memory_info()
    with pytest.raises(DoesNotFitError, match="Nothing was allocated"):
        Engine(model, placement=Placement(**budget))
    after = process.memory_info()
    assert max(after.rss - memory.rss, after.vms - memory.vms) < 4 << 20, "the states alone are 122 MiB"
    assert [module.training for module in model.modules()] == modes
    for name, parameter in model.named_parameters():
        assert (id(parameter), parameter.data_ptr()) == before[name][:2], name
        assert torch.equal(parameter, before[name][2]), name
    assert all("forward" not in module.__dict__ for module in model.modules())
    Engine(model).step(words(), loss_fn=cross_entropy)


def test_a_refused_transformers_model_keeps_its_cache() -> None:
    model = build(llama)
    with pytest.raises(DoesNotFitError):
        Engine(model, placement=Placement(host_memory=1))
    assert model.config.use_cache is True
    outputs = model(input_ids=tokens()["input_ids"].cpu())
    assert {"cache", "past_key_values"} & outputs.keys()
    outputs.logits.sum().backward()


@LEDGER
def test_unit_inputs_beyond_the_budget_end_the_step_and_a_smaller_batch_goes_on() -> None:
    free = Engine(build(llama))
    device_memory = sum(tier_bytes(free, "device").values()) + (24 << 10)
    engine = Engine(build(llama), placement=Placement(device_memory=device_memory))
    undisturbed = Engine(build(llama))
    for seed in range(3):
        with pytest.raises(DoesNotFitError, match=r"unit inputs.*(micro_batch_size|sequence_length)"):
            engine.step(tokens(seed, rows=16, length=20))
        assert engine.counters.peak_device_bytes <= device_memory
        assert step_of(engine, tokens(seed, rows=1)) == step_of(undisturbed, tokens(seed, rows=1))
    assert_same(weights(engine), weights(undisturbed))


@pytest.mark.parametrize(
    ("settings", "words_"),
    [
        ({"parameters": "gpu"}, r"offload\.parameters.*gpu.*allowed"),
        ({"optimizer": "devise"}, r"offload\.optimizer.*did you mean device"),
        ({"device_memory": "6GB of it"}, r"offload\.device_memory"),
        ({"host_memory": -5}, r"offload\.host_memory"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(settings: dict[str, Any], words_: str) -> None:
    with pytest.raises(ConfigError, match=words_):
        Placement(**settings)
