"""Forecast memory against engine memory, over families, sizes, tiers and settings: a part of
benchmarks/plan_against_actual.py.

There are three comparisons for each configuration: the engine's allocations by name (the worst name counts), the inputs
and graphs that wait for a backward, and the peak of all operations in a step, waiting tensors included. A dispatch mode
observes the peak in a real step, independent of the plan.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from benchmarks import harness
from offload.app.config.sections import OptimizerSection
from offload.app.training.parts import make_rule
from offload.distributed.comm import Comm
from offload.engine.engine import Engine
from offload.engine.prepare import prepare
from offload.engine.units.activation_offload import CHECKPOINTS, GRAPHS
from offload.extras.plan.measure import BatchSpec, measure
from offload.extras.plan.memory import INPUTS, KEPT, OPERATIONS, Footprint, footprint, with_copy
from offload.extras.plan.simulated_ranks import SimulatedRanks
from offload.machine.hardware import Hardware, Rates
from offload.planning.machines import SpecifiedMachine
from offload.planning.settings import Settings
from offload.tiers.counters import Ledger
from offload.tiers.placement import Placement

HERE = Hardware("here", "cpu", 1, None, 1 << 40, 1 << 40, None, False, Rates(1.0, 1.0, 1.0, {}, 1.0, 1.0, 1.0))
NUM_STEPS = 3
"""The first step recomputes everything, and shows the room for saved graphs."""

_GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
_SHAPES: dict[str, dict[str, Any]] = {
    "1M": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "vocab_size": 1024},
    "10M": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "vocab_size": 4096},
    "50M": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 12, "vocab_size": 8192},
    "300M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 20, "vocab_size": 16384},
}
_GPT2 = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 1024}
_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "opt": {
        "hidden_size": 128,
        "ffn_dim": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 1024,
        "word_embed_proj_dim": 128,
    },
    "t5": {"d_model": 128, "d_kv": 32, "d_ff": 344, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0},
    "mixtral": {**_GROUPED, "num_local_experts": 4},
    "qwen3": {**_GROUPED, "head_dim": 32},
    "qwen3_moe": {**_GROUPED, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "llama": _GROUPED,
    "gpt_neox": {"num_attention_heads": 4},
    "bert": {"num_attention_heads": 4},
}
_KINDS = {"bert": "masked", "t5": "seq2seq"}
_PLACED = ("parameters", "optimizer", "activations", "graphs", "graphs_memory", "device_memory", "host_memory")
_CHOSEN = (
    *("precision", "micro_batch_size", "recompute", "max_grad_norm"),
    *("zero_stage", "head_chunk_bytes", "sequence_tile"),
)
"""Fields of a case that are fields of the placement, and of the settings."""


@dataclass(frozen=True)
class Case:
    """A configuration. Fields have the names of settings; `rows` is the total over ranks."""

    family: str = "llama"
    size: str = "1M"
    precision: str = "fp32"
    parameters: str = "cpu"
    optimizer: str = "cpu"
    activations: str = "device"
    graphs: str = "device"
    graphs_memory: str | None = None
    device_memory: str | None = None
    host_memory: str | None = "64GiB"
    micro_batch_size: int | None = None
    recompute: str = "always"
    rule: str = "adamw"
    states: str = "fp32"
    max_grad_norm: float | None = 1.0
    rows: int = 4
    length: int = 64
    ranks: int = 1
    zero_stage: int = 3
    head_chunk_bytes: int | None = None
    sequence_tile: int | str = "none"

    @property
    def kind(self) -> str:
        return _KINDS.get(self.family, "causal")

    def model(self) -> nn.Module:
        shape = (
            _SHAPES[self.size] if self.family in ("llama", "qwen3", "qwen3_moe", "mixtral", "gpt_neox", "bert") else {}
        )
        config = AutoConfig.for_model(
            self.family, **shape | _FAMILIES[self.family], tie_word_embeddings=self.size == "1M"
        )
        auto = {"masked": AutoModelForMaskedLM, "seq2seq": AutoModelForSeq2SeqLM}.get(self.kind, AutoModelForCausalLM)
        return auto.from_config(config, dtype=torch.float32).train()

    def settings(self, folder: str) -> Settings:
        section = OptimizerSection(name=self.rule, lr=1e-3, states=self.states)  # type: ignore[arg-type]
        rule = make_rule(self.rule, dict(section))
        placed, chosen = ({name: getattr(self, name) for name in names} for names in (_PLACED, _CHOSEN))
        placement = Placement(**placed, nvme_dir=folder)
        return Settings(optimizer=rule, placement=placement, device="cpu", **chosen)

    def batch(self, rank: int) -> dict[str, torch.Tensor]:
        rows = self.rows // self.ranks
        ids = torch.randint(3, 1000, (rows, self.length), generator=torch.Generator().manual_seed(rank))
        if self.kind != "seq2seq":
            return {"input_ids": ids, "labels": ids}
        half = self.length // 2
        return {"input_ids": ids[:, :half].contiguous(), "labels": ids[:, half:].contiguous()}

    def __str__(self) -> str:
        own = {key: value for key, value in asdict(self).items() if value != getattr(Case(), key)}
        return " ".join([self.family, self.size, *(f"{k}={v}" for k, v in own.items() if k not in ("family", "size"))])


CASES = [
    Case(),
    Case(precision="bf16"),
    Case(micro_batch_size=1),
    Case(micro_batch_size=2, precision="bf16", recompute="never"),
    Case(recompute="never"),
    Case(recompute="auto", device_memory="24MiB"),
    Case(recompute="products", precision="bf16"),
    Case(recompute="products", micro_batch_size=1, device_memory="6MiB"),
    Case(activations="cpu"),
    Case(activations="nvme", precision="bf16"),
    Case(parameters="device", optimizer="device"),
    Case(parameters="nvme", optimizer="nvme"),
    Case(optimizer="nvme", precision="bf16", states="int8"),
    Case(rule="lion", states="bf16"),
    Case(rule="adafactor", precision="bf16"),
    Case(rule="lomo"),
    Case(rule="muon"),
    Case(rule="mezo"),
    Case(rule="mezo", precision="bf16", size="10M"),
    Case(rule="mezo", micro_batch_size=2),
    Case(max_grad_norm=None),
    Case(head_chunk_bytes=1 << 18),
    Case(head_chunk_bytes=1 << 18, precision="bf16", size="10M", micro_batch_size=2),
    Case(ranks=2),
    Case(ranks=2, zero_stage=1, precision="bf16"),
    Case("gpt2"),
    Case("gpt2", precision="bf16", micro_batch_size=2),
    Case("opt", recompute="never"),
    Case("gpt_neox", size="10M"),
    Case("qwen3", size="10M", precision="bf16", activations="cpu", micro_batch_size=1),
    Case("mixtral", micro_batch_size=2),
    Case("qwen3_moe", precision="bf16"),
    Case("bert", recompute="never"),
    Case("t5"),
    Case(length=1024, rows=2, sequence_tile=128),
    Case("qwen3", precision="bf16", length=512, sequence_tile=64, micro_batch_size=1),
    Case(size="50M", precision="bf16", states="bf16", rows=2),
    Case(size="300M", precision="bf16", parameters="nvme", optimizer="nvme", rows=2, length=32),
]


class Alive(TorchDispatchMode):
    """The memory of live tensors made by operations on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, 0)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if type(tensor) is torch.Tensor:
                self._see(tensor, tensor.untyped_storage().nbytes())
        return result

    def _see(self, tensor: torch.Tensor, num_bytes: int) -> None:
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # an offloaded parameter
            return
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

        def forget() -> None:
            self._known.discard(key)
            self.live_bytes -= num_bytes

        weakref.finalize(storage, forget).atexit = False


@contextmanager
def seeing_threads(model: nn.Module, alive: Alive) -> Iterator[None]:
    """Observe forwards on other threads too; side-by-side passes run one at a time."""
    own = threading.get_ident()

    def enter(*_: object) -> None:
        if threading.get_ident() != own:
            modes[threading.get_ident()] = ExitStack()
            modes[threading.get_ident()].enter_context(alive)

    def leave(*_: object) -> None:
        if threading.get_ident() != own:
            modes.pop(threading.get_ident()).close()

    modes: dict[int, ExitStack] = {}
    hooks = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class MemorySource:
    """Peak memory of an engine: by tier and name in the first step, waiting memory in any step, and memory of
    operations.
    """

    allocations: dict[tuple[str, str], int] = field(default_factory=dict)
    waiting: dict[str, int] = field(default_factory=dict)
    operations: int = 0


@contextmanager
def watched(held: dict[tuple[str, str], int]) -> Iterator[None]:
    """Record the peak of every ledger by tier and name."""
    reserve = Ledger.reserve

    def noted(self: Ledger, name: str, num_bytes: int, fix: str = "") -> None:
        reserve(self, name, num_bytes, fix)
        for key, its in self.allocations.items():
            held[self.tier, key] = max(held.get((self.tier, key), 0), its)

    Ledger.reserve = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Ledger.reserve = reserve  # type: ignore[method-assign]


def actual(case: Case, folder: str, comm: Comm | None = None) -> MemorySource:
    """Run a few steps; return the held memory."""
    torch.manual_seed(0)
    peaks: dict[tuple[str, str], int] = {}
    rank = 0 if comm is None else comm.rank
    model = case.model()
    with watched(peaks), Engine(model, settings=case.settings(folder), comm=comm) as engine:
        engine.step(case.batch(rank))
        held = MemorySource(dict(peaks))
        for _ in range(NUM_STEPS - 1):
            alive = Alive()
            with alive, seeing_threads(model, alive):
                engine.step(case.batch(rank))
        held.operations = alive.peak_bytes
    for (_, name), num_bytes in peaks.items():
        if name in (INPUTS, KEPT, CHECKPOINTS, GRAPHS):
            held.waiting[name] = num_bytes
    return held


def planned(case: Case, folder: str) -> MemorySource:
    """Return the forecast memory."""
    found = forecast(case, folder)
    held = MemorySource(
        {(a.tier, a.name): a.num_bytes for a in found.allocations if a.name not in (INPUTS, KEPT, OPERATIONS)}
    )
    held.waiting = {a.name: a.num_bytes for a in found.allocations if a.name in (INPUTS, KEPT, CHECKPOINTS, GRAPHS)}
    of_device = (a.num_bytes for a in found.allocations if a.name in (INPUTS, KEPT, OPERATIONS))
    held.operations = sum(of_device)
    return held


def forecast(case: Case, folder: str) -> Footprint:
    """Return the forecast memory of a run that saves checkpoints."""
    with torch.device("meta"):
        model = case.model()
    prepared = prepare(model, case.settings(folder), SimulatedRanks(case.ranks), SpecifiedMachine(HERE, case.ranks))
    work = measure(model, BatchSpec(case.kind, case.rows // case.ranks, case.length), prepared)
    return with_copy(footprint(prepared, work, HERE, case.ranks), prepared, trained_only=False)


def compare(case: Case) -> dict[str, Any]:
    """Return the ratios of forecast to held memory."""
    with tempfile.TemporaryDirectory() as folder:
        told = planned(case, folder)
        if case.ranks == 1:
            was = actual(case, folder)
        else:
            was = harness.over_ranks(case.ranks, actual, case, folder)
    waits = {INPUTS, KEPT, CHECKPOINTS, GRAPHS}
    names = sorted({key for key in (*told.allocations, *was.allocations) if key[1] not in waits})
    ratios = {f"{t}: {n}": _ratio(told.allocations.get((t, n), 0), was.allocations.get((t, n), 0)) for t, n in names}
    worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
    bytes_told, bytes_was = (sum(held.allocations.get(key, 0) for key in names) for held in (told, was))
    return {
        "case": str(case),
        "allocated_bytes": bytes_was,
        "allocated_ratio": _ratio(bytes_told, bytes_was),
        "worst_allocation": worst,
        "worst_ratio": ratios[worst],
        "waiting_bytes": sum(was.waiting.values()),
        "waiting_ratio": _ratio(sum(told.waiting.values()), sum(was.waiting.values())),
        "operations_bytes": was.operations,
        "operations_ratio": _ratio(told.operations, was.operations),
    }


def _ratio(told: float, was: float) -> float:
    return told / was if was else 1.0 if not told else float("inf")
