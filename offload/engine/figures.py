"""Figures of an engine: decisions, devices, memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from offload.distributed.comm import Comm
from offload.engine.analysis import Analysis
from offload.engine.flow import Flow
from offload.engine.memory import Memory
from offload.engine.recovery import Recovery
from offload.engine.state import EngineState
from offload.engine.steps import Steps
from offload.engine.units.activation_offload import GRAPHS
from offload.engine.weights import Weights
from offload.lanes.timeline import Span
from offload.planning.plan import describe_frozen_weights, describe_links


class Figures:
    """The part of `Engine` that shows decisions and measurements. A read changes no state."""

    comm: Comm
    _state: EngineState
    _memory: Memory
    _weights: Weights
    _flow: Flow
    _recovery: Recovery
    _steps: Steps

    @property
    def max_grad_norm(self) -> float | None:
        """Clipping norm, unless `update` receives another one; None: no clipping."""
        return self._weights.updates.max_norm

    @property
    def clip(self) -> str:
        """Clipping mode: deferred or speculative; auto until the first steps have decided."""
        return self._weights.updates.clip

    @property
    def groups(self) -> list[tuple[float, float, list[str]]]:
        """Groups of trainable parameters with equal updates: (learning rate multiplier, weight decay, parameter names).

        Groups with the engine's own learning rate come first.
        """
        names_by_group: dict[tuple[float, float], list[str]] = {}
        for info in self._weights.updates.tiles.settings.infos:
            if info.trainable:
                names_by_group.setdefault((info.lr_scale, info.weight_decay), []).append(info.name)
        return [(*group, names) for group, names in sorted(names_by_group.items(), key=lambda item: item[0][0] != 1.0)]

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.comm.size

    @property
    def num_steps(self) -> int:
        """Number of completed steps, including those before a loaded checkpoint."""
        return self._flow.runner.step_number

    @property
    def prefetch(self) -> int:
        """Least number of units to prefetch; spare device memory allows more."""
        return self._memory.plan.ahead

    @property
    def updates_on(self) -> str:
        """Device for updates of host states: cpu, device, or both."""
        return self._memory.plan.update

    @property
    def head_chunks(self) -> int:
        """Number of logit chunks in the last loss."""
        return self._steps.losses.num_chunks

    @property
    def compiles(self) -> bool:
        """True if blocks are to run compiled: `compile: always`, or auto on a GPU."""
        return self._flow.compiles

    @property
    def compiled_graphs(self) -> int:
        """Number of graphs built by torch.compile so far, from blocks; 0 without `compiles`."""
        return self._flow.stages.num_graphs

    @property
    def compiled_classes(self) -> frozenset[type]:
        """Block classes that ran compiled, without a refusal."""
        return self._flow.stages.compiled

    @property
    def pins(self) -> bool:
        """True if host memory for transfers is registered with the device driver, up to the driver's limit."""
        return self._memory.store.pinned_bytes > 0

    @property
    def overlaps(self) -> bool:
        """True if copies and updates run beside compute."""
        return self._memory.lanes.overlap

    @property
    def analysis(self) -> Analysis:
        """Results of all trial runs so far: a JSON value for `Engine(analysis=...)`.

        Complete after the first step. With sequence tiles, another engine repeats the recording.
        """
        return self._steps.analysis

    @property
    def spans(self) -> list[Span]:
        """Work on every lane in the last step."""
        return self._steps.method.spans

    @property
    def graphs_on_host_bytes(self) -> int:
        """Host memory in bytes for saved autograd graphs (`Placement(graphs="cpu")`)."""
        return self._memory.host.allocations.get(GRAPHS, 0)

    @property
    def head_chunk_bytes(self) -> int | None:
        """Limit for logits in memory at a time, in bytes as fp32; None: no limit."""
        return self._steps.losses.chunk_bytes

    @property
    def allocations(self) -> list[tuple[str, str, int]]:
        """Memory reservations on all tiers: (tier, name, bytes)."""
        if self._recovery.is_idle:
            with self._recovery.working():
                self._flow.runner.collect()
        ledgers = (self._memory.device.ledger, self._memory.host, self._memory.disk)
        return [(ledger.tier, name, size) for ledger in ledgers for name, size in ledger.allocations.items()]

    @property
    def update_devices(self) -> Mapping[str, torch.device]:
        """Compute device for the update of each parameter, by name."""
        on_host = self._memory.plan.updated_on_host(self._weights.regions)
        devices = self._memory.device.torch_device, torch.device("cpu")
        return {info.name: devices[info.index in on_host] for info in self._weights.infos}

    @property
    def told_updates(self) -> str:
        """Text about the update devices of host states; empty if all updates run on the host."""
        return self._memory.plan.describe_updates(self._weights.regions)

    @property
    def told_tiles(self) -> str:
        """Text about split units and sequence tiles due to little device memory; empty if none."""
        return ".\n".join(filter(None, (self._flow.splitting.description, self._flow.stages.description)))

    @property
    def told_frozen_weights(self) -> str:
        """Text about frozen weights that are quantized or read from the model files; empty if none."""
        return describe_frozen_weights(self._weights.infos, self._weights.regions, self._memory.plan.residence)

    @property
    def told_links(self) -> str:
        """Text about quantized transfers of weights and gradients, and their approximations; empty if none."""
        return describe_links(self._weights.regions, self._memory.plan.residence.sharding)

    @property
    def resting(self) -> frozenset[str]:
        """Names of host allocations the device never copies from; they are not pinned."""
        return self._memory.plan.residence.resting_labels(self._weights.regions)
