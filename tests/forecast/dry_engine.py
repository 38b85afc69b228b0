"""The engine on shapes: its own steps over simulated lanes, with operations counted in place of compute.

Nothing is told again here: uses, recomputation, transfers and updates are those of the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import LlamaConfig, MixtralConfig, PreTrainedConfig

from offload.app.config.config import Config
from offload.engine import memory as engine_memory
from offload.engine import weights as engine_weights
from offload.engine.flow import Flow
from offload.engine.loss.batch import BatchForm
from offload.engine.loss.batch_agreement import PassInputs, RankBatch, agree_on_pass
from offload.engine.loss.chunked_head import ChunkedHead
from offload.engine.loss.loss import LossRule, find_loss, select_inputs
from offload.engine.loss.parts import Losses
from offload.engine.state import EngineState
from offload.engine.steps import METHODS
from offload.engine.units import activation_offload
from offload.engine.units.arguments import deliver_result, receive_call
from offload.engine.units.recompute_policy import saved_tensors_watched
from offload.engine.units.saved_graph import has_only_torch_nodes, is_number
from offload.engine.units.stages import Stage
from offload.engine.units.traits import GraphTraits, RecordedUse, UnitTraits
from offload.engine.units.trial import SavedBytes
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, Use
from offload.extras.large.kept_products import ProductsForward
from offload.extras.plan.forecast import Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.measure import BatchSpec
from offload.extras.plan.memory import INPUTS, KEPT
from offload.extras.plan.op_counter import OpCounter
from offload.extras.plan.simulated_lanes import SimulatedLanes
from offload.extras.plan.simulated_ranks import SimulatedRanks
from offload.extras.plan.simulated_step import (
    SimulatedStep,
    _SimulatedAccelerator,
    _SimulatedMeasures,
    _SimulatedNvme,
    _TimedUpdatePlace,
    simulate,
    without_garbage_collector,
)
from offload.extras.plan.timing import _PART_HOST_S, _USE_HOST_S, STEP_HOST_S, TILE_HOST_S, PlannedStep, compute_seconds
from offload.extras.plan.workload import NO_WORK
from offload.lanes.ticket import Ticket
from offload.planning.memory import BUFFER, SLOT
from offload.tiers.counters import Counters, Ledger
from offload.tiers.store import Store

NUM_STEPS, NUM_WARM = 8, 5
"""Steps, and those before the measured ones. The engine lends spare memory after two steps with equal peaks."""
BYTES = ("h2d", "d2h", "nvme_read", "nvme_write")
_STORAGE_BITS = 48
"""Bits of an address within a storage."""
RECORDED_ROWS = 2, 3
"""Batch rows of the two recording passes."""


class DryCounter(OpCounter):
    """Counts the operations of an engine too. A view of a whole storage is free, and has no values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.set_.source_Storage:
            self._values.pop(args[0], None)
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class CountedLanes(SimulatedLanes):
    """Simulated lanes on which compute takes the time of the operations counted since the last look at the lanes."""

    def __init__(self, step: PlannedStep, counter: OpCounter) -> None:
        plan = step.simulated_plan(sys.maxsize)
        self._step = step
        self._counter = counter
        self._charged = counter.cost
        super().__init__(step.seconds(), in_stream=plan.in_stream, inline=plan.inline, shared=plan.shared)

    def charge(self) -> None:
        """Let compute do the operations so far."""
        cost, self._charged = self._counter.cost - self._charged, self._counter.cost
        if cost.num_operations or cost.moved_bytes:
            self.compute(*compute_seconds(NO_WORK, [cost], 1, self._step.settings, self._step.hardware))

    def mark(self) -> Sequence[Ticket]:
        self.charge()
        return super().mark()

    def compute_after(self, tickets: Sequence[Ticket], *, users: Sequence[Ticket] = ()) -> None:
        self.charge()
        super().compute_after(tickets, users=users)

    def wait(self, tickets: Sequence[Ticket], *, users: Sequence[Ticket] = ()) -> None:
        self.charge()
        super().wait(tickets, users=users)

    def now(self) -> None:
        """Return nothing: the tickets have the times."""

    def record_compute(self, name: str, begin: Any) -> Sequence[Ticket]:
        """End a use: the host has taken the time of one."""
        marks = self.mark()
        is_backward = name.startswith("backward")
        self.spend(_USE_HOST_S[is_backward] + _PART_HOST_S[is_backward] * self._step.workload.num_micro_batches)
        return marks


class DryDevice(_SimulatedAccelerator):
    """An accelerator without storage, of which the tensors are on `meta`."""

    torch_device = torch.device("meta")

    def __init__(self, ledger: Ledger, lanes: CountedLanes, counter: OpCounter) -> None:
        super().__init__(ledger, copies_aside=False)
        self._lanes = lanes
        self._counter = counter
        self._peak_bytes = 0

    def allocate(self, name: str, num_bytes: int, fix: str = "") -> torch.Tensor:
        with torch.utils._mode_utils.no_dispatch():  # in the ledger: no memory of an operation
            return super().allocate(name, num_bytes, fix)

    def address(self, memory: torch.Tensor | torch.UntypedStorage) -> int:
        if memory.device.type != "meta":
            return super().address(memory)
        if isinstance(memory, torch.UntypedStorage):
            return memory._cdata << _STORAGE_BITS
        begin = memory.storage_offset() * memory.itemsize
        return self.address(torch.Tensor.untyped_storage(memory)) + begin

    def copy_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("meta")

    def copy_to_host(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        marks = self._lanes.mark()

        def wait() -> torch.Tensor:
            self._lanes.wait(marks)
            return self.to_host(values)

        return wait

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(values.shape, dtype=values.dtype, device="cpu")

    def take_recent_peak(self) -> int:
        """Return the planned memory, and the most that operations have held."""
        waiting = sum(self.ledger.allocations.get(name, 0) for name in (INPUTS, KEPT))
        peak = self.ledger.current_bytes - waiting + self._counter.peak_bytes
        self._counter.begin()
        self._peak_bytes = max(self._peak_bytes, peak)
        return peak

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes


class DryMeasures(_SimulatedMeasures):
    """Measures without values. A first gradient is copied, a further one is added."""

    def __init__(self, store: Store, square: float) -> None:
        self._regions = list(store.states)
        self.has_peers = store.comm.size > 1
        super().__init__(self._regions, square)

    def begin_step(self) -> None:
        self.touched = {region.index: [False] * len(region.pieces) for region in self._regions}

    def record_square(self, piece: Any, square: float | None) -> None:
        """Do nothing: the squares are given."""

    def complete(self, region: Any) -> None:
        """Do nothing: the squares are given."""


class _SavedTensors(SavedBytes):
    """Bytes that a graph saves, and whether weights are among them."""

    def __init__(self, inputs: Sequence[torch.Tensor], flow: Flow) -> None:
        super().__init__(inputs, flow.device)
        self._slots = flow.slots
        self.has_weights = False

    def add(self, tensor: torch.Tensor) -> None:
        if self._slots.holds(tensor):
            self.has_weights = True
        elif not is_number(tensor):
            super().add(tensor)


class ShapeRecording:
    """What a recording learns from shapes alone: batch axes, saved bytes, and shared inputs."""

    def __init__(self, flow: Flow, rows: int, before: ShapeRecording | None) -> None:
        self._flow = flow
        self._before = before
        self.rows = rows
        self.uses: dict[str, RecordedUse] = {}
        self._inputs: list[tuple[UnitTraits, list[torch.Tensor]]] = []

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one use of a unit."""
        runner = self._flow.runner
        arguments, containers = receive_call(args, kwargs)
        traits = unit.learn(arguments.structure)
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in arguments.tensors]
        saved = _SavedTensors(leaves, self._flow)
        runner.enter(unit)
        use = Use(runner, arguments, leaves, arguments.others)
        with torch.enable_grad(), saved_tensors_watched(saved.add):
            result = runner.run(unit, use, unit.forward)
        runner.leave()
        others = list(arguments.others)
        shapes = [[t.shape for t in tensors] for tensors in (leaves, result.tensors)]
        recorded = self.uses[unit.name] = RecordedUse(shapes[0], others, shapes[1], saved.num_bytes)
        if self._before is None:
            keeps_nothing = has_only_torch_nodes(result.tensors) and not saved.num_bytes
            detached = frozenset(i for i, t in enumerate(result.tensors) if not t.requires_grad)
            graph = GraphTraits(detached, keeps_nothing, saved.has_weights or not keeps_nothing)
            traits.learn_use(unit.gradient_signature(arguments.tensors), graph, set(), set(), is_first=True)
        else:
            rows = self._before.rows, self.rows
            traits.learn_rows(self._before.uses[unit.name], recorded, rows, is_first=True)
        self._inputs.append((traits, list(arguments.tensors)))
        original = {id(leaf): tensor for leaf, tensor in zip(leaves, arguments.tensors, strict=True)}
        outputs = [original.get(id(t), t.detach().requires_grad_(t.requires_grad)) for t in result.tensors]
        return deliver_result(result, outputs, containers)

    def finish(self) -> None:
        """Note the inputs that several units receive."""
        received = [id(tensor) for _, tensors in self._inputs for tensor in tensors]
        for traits, tensors in self._inputs:
            traits.shared.update(i for i, tensor in enumerate(tensors) if received.count(id(tensor)) > 1)


class _AttendingForward:
    """A forward in which fused attention, which is no operation of torch on shapes, is kept as a product too."""

    def __init__(self, forward: Forward, products: ProductsForward, counter: OpCounter) -> None:
        self._forward = forward
        self.products = products
        self._counter = counter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._counter.products = self.products
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._counter.products = None


class AttendingForwards(Stage):
    """The outermost stage: tells the counter which forward keeps the outputs of products."""

    def __init__(self, inner: Stage, counter: OpCounter) -> None:
        super().__init__(inner)
        self._counter = counter

    def forward_of(self, unit: Unit, use: Use) -> Forward:
        forward = self.inner.forward_of(unit, use)
        is_kept = isinstance(forward, ProductsForward)
        return _AttendingForward(forward, forward, self._counter) if is_kept else forward

    def for_recomputation(self, forward: Forward) -> Forward:
        if not isinstance(forward, _AttendingForward):
            return self.inner.for_recomputation(forward)
        again = self.inner.for_recomputation(forward.products)
        return _AttendingForward(again, forward.products, self._counter)


def _no_snapshot() -> Any:
    """Take none: no step here is repeated."""


def run_model(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of the model."""
    return find_loss(model(**select_inputs(model, batch, None)))


class DryEngine:
    """An engine on shapes, with the plan of a planned step. It takes the model for good."""

    def __init__(self, model: nn.Module, step: PlannedStep, batch: BatchSpec) -> None:
        self.counter = DryCounter()
        self.lanes = lanes = CountedLanes(step, self.counter)
        self._model = model
        self._batch = batch
        prepared, settings = step.prepared, step.settings
        simulated = step.simulated_plan(sys.maxsize)
        limit = settings.max_grad_norm or 1.0
        square = (2.0 * limit) ** 2 if simulated.corrects else 0.0
        self._hardware = step.hardware
        self._settings = settings

        def open_device(_accelerator: object, ledger: Ledger, **_: Any) -> DryDevice:
            ledger.budget_bytes = step.memory.budget
            return DryDevice(ledger, lanes, self.counter)

        def open_nvme(*_: Any, rings: Mapping[str, int], counters: Counters, **__: Any) -> _SimulatedNvme:
            return _SimulatedNvme(rings, lanes, counters)

        stand_ins = {
            "own_accelerator": lambda _: None,
            "open_device": open_device,
            "open_lanes": lambda *_, **__: lanes,
            "Nvme": open_nvme,
        }
        ranks = SimulatedRanks(simulated.residence.sharding.num_ranks, simulated.num_machines)
        measures = patch.object(engine_weights, "Measures", lambda store: DryMeasures(store, square))
        with patch.multiple(engine_memory, **stand_ins), measures:
            self.state = EngineState(model, replace(prepared, settings=settings), Counters(), ranks)
        self.flow = self.state.flow
        self._take_over(step)
        losses = Losses(self.flow, prepared.chunk_bytes, settings.optimizer.has_gradients)
        self.method = METHODS[settings.optimizer.method](self.flow, settings, losses, _no_snapshot)
        tiles = self.flow.updates.tiles
        tiles.place = _TimedUpdatePlace(tiles.place, lanes, TILE_HOST_S)
        self.flow.updates.decide(simulated.settings.clip)

    def _take_over(self, step: PlannedStep) -> None:
        """Reroute the units, as `assemble` does after it has stored the weights."""
        flow = self.flow
        self._model.train()
        flow.caches.turn(on=False)
        for unit in flow.units:
            for place in unit.places:
                unit.placeholders[place.parameter] = flow.ownership.placeholders[place.parameter]
            unit.install(unit.placeholders)
        flow.stages = flow.runner.stages = AttendingForwards(flow.stages, self.counter)
        flow.stages.divert()
        for unit in flow.units:
            if unit.resident:
                flow.keep(unit)
            else:
                unit.route(flow.router)
        for region in step.regions:
            if len(region.units) > 1:
                flow.gradients.make_lasting(region)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        room = {"available_bytes": self._hardware.host_bytes}
        with (
            without_garbage_collector(),
            patch.object(activation_offload, "memory", lambda: room),
            self.counter.watching(),
            torch.enable_grad(),
        ):
            yield

    def record(self) -> None:
        """Run the model twice on a few rows, to learn the traits of the units."""
        flow, before = self.flow, None
        with self._counting():
            for rows in RECORDED_ROWS:
                recording = ShapeRecording(flow, rows, before)
                flow.executor.begin("recording")
                with flow.router.diverted(recording.call):
                    run_model(self._model, self._batch.make(rows))
                recording.finish()
                flow.executor.end()
                before = recording
        flow.device.take_recent_peak()

    def step(self) -> None:
        """Make one step."""
        with self._counting():
            self.method.step(self._inputs())
            self.lanes.compute(0.0, STEP_HOST_S)

    def _inputs(self) -> PassInputs:
        """Return a batch of shapes. On the host, each label counts."""
        settings, rows = self._settings, self._batch.rows
        batch = self._batch.make(rows)
        on_host = {name: torch.ones(like.shape, dtype=like.dtype, device="cpu") for name, like in batch.items()}
        own = RankBatch.of("step", on_host, rows, settings.micro_batch_size, has_loss_function=False)
        plan = agree_on_pass(self.flow.comm, own)
        head, form = ChunkedHead.of(self._model, self._vocabulary), BatchForm.of(on_host)
        return PassInputs(plan, batch, None, on_host["labels"], LossRule(), head, form, None, settings.passes)

    @property
    def _vocabulary(self) -> int:
        config: Any = self._model.config
        return int(config.vocab_size)

    def run(self) -> SimulatedStep:
        """Return the mean of the last steps."""
        self.record()
        for number in range(NUM_STEPS):
            if number == NUM_WARM:
                before = self._times()
            self.step()
        count, counters = NUM_STEPS - NUM_WARM, self.flow.counters
        mean = [
            {name: (seconds[name] - first.get(name, 0.0)) / count for name in seconds}
            for first, seconds in zip(before, self._times(), strict=True)
        ]
        moved = {name: float(getattr(counters, f"{name}_bytes")) for name in BYTES}
        return SimulatedStep(mean[0]["now"], mean[1], mean[2], moved)

    def _times(self) -> tuple[dict[str, float], ...]:
        return {"now": self.lanes.now_s}, dict(self.lanes.busy_s), dict(self.lanes.exposed_s)

    @property
    def other_bytes(self) -> int:
        """Peak device bytes, without those that the engine lends to slots and gradient buffer."""
        flow = self.flow
        return flow.device.peak_bytes - flow.slots.capacity_bytes - flow.gradients.buffer_bytes

    def close(self) -> None:
        """Free the host memory."""
        self.state.close(restore=False)


@dataclass(frozen=True)
class Compared:
    """A planned step, and the same step of an engine on shapes."""

    planned: SimulatedStep
    dry: SimulatedStep
    planned_bytes: int
    """Peak device bytes of the plan, without slots and gradient buffer."""
    dry_bytes: int
    slots_bytes: tuple[int, int]
    """Device memory for streamed weights: planned, and of the engine on shapes."""


BASE = {
    "model.preset": "tiny",
    "data.sequence_length": 1024,
    "data.packing_isolated": False,
    "train.batch_size": 8,
    "train.precision": "bf16",
    "train.compile": "never",
    "train.recompute": "always",
    "train.head_chunk_bytes": "none",
    "offload.nvme_dir": ["/disk"],
    "offload.parameters": "cpu",
    "offload.optimizer": "cpu",
    "offload.device_memory": "6GiB",
}
# Not among them: streamed experts, because the router's values decide what is fetched, and MeZO, because each pass has
# a thread of its own, which no counter watches, and the noise takes hundreds of operations for each 2 Mi weights.
CASES: dict[str, dict[str, Any]] = {
    "always": {},
    "never": {"train.recompute": "never", "offload.device_memory": "16GiB"},
    "auto": {"train.recompute": "auto", "offload.device_memory": "5GiB"},
    "micro-batches": {"train.micro_batch_size": 2},
    "micro-batches, auto": {"train.micro_batch_size": 2, "train.recompute": "auto"},
    "inputs on the host": {"offload.activations": "cpu"},
    "graphs on the host": {"train.recompute": "never", "offload.graphs": "cpu"},
    "inputs on disk": {"offload.activations": "nvme"},
    "states on disk": {"offload.optimizer": "nvme"},
    "all on disk": {"offload.optimizer": "nvme", "offload.parameters": "nvme"},
    "states on the device": {
        "offload.optimizer": "device",
        "offload.parameters": "device",
        "offload.device_memory": "16GiB",
    },
    "updates on the device": {"offload.update": "device"},
    "speculative": {"train.clip": "speculative"},
    "no norm": {"train.max_grad_norm": 0},
    "delay": {"train.delay": 1},
    "lomo": {"optimizer.name": "lomo"},
    "adapters": {"lora.rank": 16},
    "adapters, auto": {"lora.rank": 16, "train.recompute": "auto"},
    "products": {"train.recompute": "products"},
    "products, micro-batches": {"train.recompute": "products", "train.micro_batch_size": 2},
    "passes": {"train.passes": 2},
    "passes of micro-batches": {"train.passes": 2, "train.micro_batch_size": 2},
    "chunked head": {"train.head_chunk_bytes": "16MiB"},
    "chunked head, micro-batches": {"train.head_chunk_bytes": "16MiB", "train.micro_batch_size": 2},
    "graphs on the host, micro-batches": {
        "train.recompute": "never",
        "train.micro_batch_size": 2,
        "offload.graphs": "cpu",
    },
    "graphs on disk": {"train.recompute": "never", "offload.graphs": "nvme"},
    "2 ranks": {"offload.zero_stage": 3},
    "2 ranks, whole weights": {"offload.zero_stage": 1},
    "experts": {"offload.experts": "whole"},
}
NUM_RANKS = {"2 ranks": 2, "2 ranks, whole weights": 2}
"""Ranks of the cases with more than one."""
MACHINES = ("rtx-4090", "rtx-3090", "h200")


def model_config(num_layers: int = 6) -> LlamaConfig:
    """Return a model with wide layers, so that neither launches nor links alone decide a step."""
    return LlamaConfig(
        vocab_size=4096,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )


def experts_config(num_layers: int = 4) -> MixtralConfig:
    """Return a model with experts, two for each token."""
    return MixtralConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        num_local_experts=8,
        num_experts_per_tok=2,
    )


ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {"experts": experts_config}
"""Models of the cases with another one than `model_config`."""


def compare(name: str, machine: str) -> Compared:
    """Plan a step, simulate it, and run it on shapes."""
    config, hardware = Config.load(None, {**BASE, **CASES[name]}), read_machine(machine)
    num_ranks = NUM_RANKS.get(name, 1)
    forecaster = Forecaster(config, num_ranks, architecture=ARCHITECTURES.get(name, model_config)())
    forecast = forecaster.predict(config, hardware)
    assert forecast.step is not None, forecast.notes
    step = forecast.step
    plan = step.simulated_plan(sys.maxsize)
    with without_garbage_collector():
        planned = simulate(step.calls, plan, step.seconds())
    rows, length = config.train.batch_size // num_ranks, int(config.data.sequence_length or 0)
    engine = DryEngine(forecaster._built.model, step, BatchSpec("causal", rows, length))
    dry = engine.run()
    least_bytes = step.plan.range(SLOT)[0] + step.plan.range(BUFFER)[0]
    compared = Compared(
        planned,
        dry,
        step.memory.device_bytes - least_bytes,
        engine.other_bytes,
        (plan.capacity_bytes, engine.flow.slots.capacity_bytes),
    )
    engine.close()
    return compared
