"""Streamed experts, compared with plain PyTorch: only experts with routed tokens are copied, one record at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as t
from torch import nn
from torch.nn import functional

from offload import AdamW, Engine, MeZO, Muon, Placement
from offload.distributed.joining import open_comm
from offload.engine.prepare import prepare
from offload.errors import ConfigError, DoesNotFitError
from offload.extras.large import cut_experts
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.simulated_ranks import SimulatedRanks
from offload.planning.machines import SpecifiedMachine
from offload.planning.settings import Settings
from tests.cases.models import GROUPED, SPECIAL, batches, build, llama, share, tokens
from tests.engine.compare import assert_same, train_both, weights
from tests.engine.inside import parts_of, states
from tests.engine.ranks import run
from tests.engine.ranks_child import JOB
from tests.engine.reference import fake_quantised

NUM_EXPERTS = 8
FAMILIES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe"]
RULE = AdamW(lr=3e-3, weight_decay=0.1)
_SIZES: dict[str, Any] = {
    "num_local_experts": NUM_EXPERTS,
    "num_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}


def mixture(family: str, **more: Any) -> Callable[[], nn.Module]:
    """Return a constructor for a small model of a family, with the eager expert forward."""
    sizes = GROUPED | SPECIAL | _SIZES | more
    if family == "deepseek_v3":
        sizes |= {**_LATENT, "num_key_value_heads": 4}
    config = t.AutoConfig.for_model(family, **sizes)
    return lambda: t.AutoModelForCausalLM.from_config(config, experts_implementation="eager")


@pytest.fixture(autouse=True)
def one_expert_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_experts, "RECORD_BYTES", 1)


def streamed(**placement: Any) -> Placement:
    return Placement(experts="streamed", **placement)


def count_hits(model: nn.Module) -> Callable[[], int]:
    """Return a counter function: experts with tokens since the last call, summed over layers and calls."""
    hits: list[int] = []
    for module in model.modules():
        if "_is_expert_parallel" in vars(module):
            module.register_forward_pre_hook(
                lambda _, args, kwargs: hits.append(len(([*args, *kwargs.values()])[1].unique())), with_kwargs=True
            )

    def so_far() -> int:
        found = sum(hits)
        hits.clear()
        return found

    return so_far


def quantized_on_the_link(weights: torch.Tensor) -> torch.Tensor:
    """Return the values in int8; the biases of experts stay exact."""
    return weights if weights.dim() == 2 and len(weights) == NUM_EXPERTS else fake_quantised(weights)


def train(model: nn.Module, count: int = 3, **settings: Any) -> Engine:
    """Train next to the reference, with equal bits after every step. Squares of gradients are summed piece by piece."""
    if "link_weights" in settings:
        settings["shown"] = quantized_on_the_link
    return train_both(model, batches(count), norm_within=1e-12, **settings)[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_bits_of_plain_pytorch(family: str) -> None:
    train(build(mixture(family)), 2, optimizer=RULE, placement=streamed()).close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_codes_come_up_as_those_of_whole_experts(family: str, tmp_path: Path) -> None:
    """Break: plan copies by the location of the exact weights; let an expert begin inside a quantization block;
    quantize biases.
    """
    place = streamed(parameters="nvme", optimizer="nvme", nvme_dir=tmp_path)
    make = mixture(family, **({"hidden_size": 160, "intermediate_size": 544} if family == "gpt_oss" else {}))
    with train(build(make), 2, optimizer=RULE, placement=place, link_weights="int8") as engine:
        experts = next(unit for unit in parts_of(engine).units if unit.in_records)
        assert experts.regions[0].travelling_bytes == experts.regions[0].numel // 128 * 132
        assert engine.counters.experts_fetched > 0


@pytest.mark.slow
@pytest.mark.parametrize("link", ["exact", "int8"])
def test_what_comes_up_is_what_tokens_are_routed_to(link: str) -> None:
    """Each expert with tokens is copied twice a step. Shared and other weights move as with whole experts."""
    model = build(mixture("qwen3_moe"))
    hits = count_hits(model)
    with Engine(model, RULE, streamed(), recompute="always", link_weights=link) as engine:
        engine.step(tokens(0, 1))
        hits()
        engine.step(tokens(1, 1))
        num_hit = hits() // 2  # activation recomputation calls the module again
        state = parts_of(engine)
        experts = [unit for unit in state.units if unit.in_records]
        record = experts[0].regions[0]
        streamed_whole = [unit for unit in state.units if not unit.resident and not unit.in_records]
        others = sum(region.travelling_bytes for unit in streamed_whole for region in unit.regions)
        assert 0 < num_hit < 2 * NUM_EXPERTS
        assert engine.counters.experts_fetched == 2 * num_hit
        shared = engine.counters.h2d_bytes - 2 * num_hit * record.travelling_bytes
        assert others < shared <= 2 * others
        device = {name: size for tier, name, size in engine.allocations if tier == "device"}
        assert device["expert slot"] == record.weight_bytes * (2 if engine.overlaps else 1)
        down = sum(unit.weight_bytes for unit in state.units if not unit.in_records)
        assert engine.counters.d2h_bytes == down + num_hit * record.weight_bytes


def test_an_expert_without_tokens_is_updated_as_plain_pytorch_does_it() -> None:
    """The stacked parameter has one gradient, zero for this expert: moments fade and weights decay."""
    model = build(mixture("mixtral"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[0] = 0
            layer.mlp.gate.weight[0, 0] = -1e4  # for a norm output with a positive first element
            layer.post_attention_layernorm.weight[0] = 0
    with train(model, 10, optimizer=RULE, placement=streamed()) as engine:
        found = states(engine)["model.layers.0.mlp.experts.down_proj"]
        assert found.num_steps == 10


@pytest.mark.slow
def test_the_device_need_not_hold_a_layer(tmp_path: Path) -> None:
    """Whole experts end with exit code 3, and `auto` selects streamed experts."""
    make = mixture("qwen3_moe", moe_intermediate_size=512)
    whole = Engine(build(make), RULE, Placement(experts="whole"))
    layer = max(unit.weight_bytes for unit in parts_of(whole).units)
    whole.close()
    with pytest.raises(DoesNotFitError) as refusal:
        Engine(build(make), RULE, Placement(experts="whole", device_memory=layer))
    assert refusal.value.exit_code == 3
    engine = train(build(make), 2, optimizer=RULE, placement=Placement(device_memory=layer))
    assert any(unit.in_records for unit in parts_of(engine).units)
    engine.close()
    with Engine(build(make), RULE, Placement()) as engine:
        assert not any(unit.in_records for unit in parts_of(engine).units)


@pytest.mark.slow
def test_a_checkpoint_does_not_know_how_experts_came_up(tmp_path: Path) -> None:
    make, found = mixture("gpt_oss"), []
    for number, before, after in ((0, "whole", "streamed"), (1, "streamed", "whole"), (2, "whole", "whole")):
        with Engine(build(make), RULE, Placement(experts=before)) as engine:
            engine.step(tokens(0))
            engine.save_checkpoint(tmp_path / str(number))
        with Engine(build(make, seed=5), RULE, Placement(experts=after)) as engine:
            engine.load_checkpoint(tmp_path / str(number))
            engine.step(tokens(1))
            found.append(weights(engine))
    assert_same(found[0], found[2])
    assert_same(found[1], found[2])


@pytest.mark.slow
def test_frozen_experts_and_own_loops_and_evaluation() -> None:
    found = []
    for experts in ("whole", "streamed"):
        model = build(mixture("glm4_moe"))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("down_proj" not in name)
        with Engine(model, RULE, Placement(experts=experts)) as engine:
            losses = [engine.evaluate(tokens(7))]
            for seed in range(2):
                for part in range(2):
                    loss = engine.model(**tokens(10 * seed + part)).loss
                    engine.backward(loss)
                losses.append(engine.update().loss)
            with torch.no_grad():
                losses.append(engine.model(**tokens(3)).loss)
            found.append({**weights(engine), "losses": torch.stack([each.detach().cpu() for each in losses])})
            engine.close(restore=True)
            assert model.config._experts_implementation == "eager"
    assert_same(*found)


def of_ranks(
    experts: str,
    stage: int = 3,
    rows: tuple[int, ...] = (1, 1),
    make: Callable[[], nn.Module] | None = None,
    memory: str | None = None,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """Train on this rank's `rows[rank]` rows, and evaluate the last batch. Return weights and losses.

    In the second step the last rank has room for autograd graphs until the first expert is fetched.
    """
    cut_experts.RECORD_BYTES = 1
    place = Placement(experts=experts, device_memory=memory)
    settings = {"optimizer": RULE, "placement": place, "zero_stage": stage, **settings}
    with open_comm(times=JOB) as comm, Engine(build(make or mixture("qwen3_moe")), comm=comm, **settings) as engine:
        batches = [share(tokens(seed, sum(rows)), rows, comm.rank) for seed in range(2)]
        losses = [engine.step(batches[0]).loss]
        if comm.rank + 1 == comm.size:
            policy: Any = parts_of(engine).runner.saved.policy
            policy.has_room = lambda _num_bytes: not engine.counters.experts_fetched
        losses += [engine.step(batches[1]).loss, engine.evaluate(batches[1])]
        return {**weights(engine), "losses": torch.stack(losses)}


def adapted_attention() -> nn.Module:
    return adapted(target_modules=["q_proj", "v_proj"])()


class Routed(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(32), experts

    def forward(self, h: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        result = self.experts(self.norm(h))
        return h + (result if scale is None else result * scale)


class WithNotes(nn.Module):
    """Each layer runs on the tokens and then, with an argument more, on notes, which belong to no row."""

    def __init__(self) -> None:
        super().__init__()
        model = mixture("qwen3_moe")()
        self.embedding, self.head = model.model.embed_tokens, model.lm_head
        self.layers = nn.ModuleList(Routed(layer.mlp) for layer in model.model.layers)
        self.notes = nn.Parameter(torch.randn(1, 3, 32))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        h, notes = self.embedding(input_ids), self.notes * 1.0
        for layer in self.layers:
            h = layer(h)
            notes = layer(notes, scale=0.5)
            h = h + notes.mean(1, keepdim=True)
        logits = self.head(h)
        return SimpleNamespace(loss=functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))


UNEVEN: dict[str, dict[str, Any]] = {
    "trained": {},
    "graphs where there is room": {"recompute": "auto", "memory": "64MiB"},
    "without a backward": {"make": adapted_attention, "optimizer": MeZO(lr=1e-3, eps=1e-2)},
    "a later call is not cut": {"make": WithNotes},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", UNEVEN)
def test_ranks_may_have_other_numbers_of_micro_batches(case: str) -> None:
    """Break: exchange once per local micro-batch; fetch experts again when a graph is dropped; repeat exchanges in a
    backward by the traits of the unit's last call.
    """
    told = {"rows": (3, 1), "micro_batch_size": 1, **UNEVEN[case]}
    whole, (found, other) = (run(2, of_ranks, experts=experts, **told) for experts in ("whole", "streamed"))
    assert_same(found, other)
    for name, value in whole[0].items():  # the summation order of micro-batches differs
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-4)


def adapted(**lora: Any) -> Callable[[], nn.Module]:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install '.[peft]'")
    return lambda: peft.get_peft_model(mixture("qwen3_moe")(), peft.LoraConfig(r=4, init_lora_weights=False, **lora))


class Shared(nn.Module):
    """Two layers with the same experts."""

    def __init__(self) -> None:
        super().__init__()
        self.model = mixture("mixtral")()
        first, second = self.model.model.layers
        second.mlp.experts.gate_up_proj = first.mlp.experts.gate_up_proj

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch)


REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (llama, {}, r"no experts that are stacked.*--offload.experts whole"),
    (Shared, {}, r"experts\.gate_up_proj is used in 2 places, and shared weights cannot be split"),
    (
        mixture("mixtral"),
        {"optimizer": Muon()},
        r"layers\.0\.mlp\.experts cannot be split by expert: Muon needs .* as a whole",
    ),
    *(
        (mixture("qwen3_moe", moe_intermediate_size=18), how, r"an expert has .* elements of .*, which is no multiple")
        for how in ({"optimizer": AdamW(states="int8")}, {"link_weights": "int8"})
    ),
    (mixture("mixtral"), {"sequence_tile": 4}, r"train.sequence_tile 4.*--train.sequence_tile none"),
]


@pytest.mark.parametrize(("make", "settings", "words"), REFUSED)
def test_what_cannot_be_cut_is_refused(make: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(build(make), placement=streamed(), **settings)


def test_over_replicas_streamed_experts_are_refused_and_auto_stays_whole() -> None:
    """Break: decide only by the size of a layer."""
    with torch.device("meta"):
        model = mixture("qwen3_moe", moe_intermediate_size=512)()
    ranks, machine = SimulatedRanks(2, 2), SpecifiedMachine(read_machine("rtx-4090"), 1)
    with pytest.raises(ConfigError, match=r"experts is streamed, but there are 2 replicas.*--offload.replicas 1, or"):
        prepare(model, Settings(RULE, streamed()), ranks, machine)
    with pytest.raises(DoesNotFitError):
        prepare(model, Settings(RULE, Placement(device_memory=100_000)), ranks, machine)


def test_a_router_that_is_none_is_refused() -> None:
    model = build(mixture("mixtral"))
    experts = model.model.layers[1].mlp.experts
    with Engine(model, RULE, streamed()) as engine:
        with pytest.raises(
            ConfigError, match=r"layers\.1\.mlp\.experts were called with .*float32 \[4, 2\].* instead of tokens"
        ):
            experts(torch.zeros(4, 32), torch.zeros(4, 2), torch.zeros(4, 2))
        engine.step(tokens())
