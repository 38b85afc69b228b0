"""Decide by size which uses of a unit keep their autograd graph, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from offload.engine.units.activation_offload import ActivationOffload, stretch_of
from offload.engine.units.execution_mode import ExecutionMode
from offload.engine.units.use import Product
from offload.tiers.device import Device

_Key = TypeVar("_Key")
PRODUCTS = "products"
"""The mode in which product outputs are kept, not graphs."""
UseKey = tuple[Any, ...]
"""Kind of a use: unit name, and (shape, dtype) of each input tensor. Uses of one kind have graphs of one size."""
KeptKey = tuple[Any, ...]
"""What is kept or not: a graph (`UseKey`), or in the mode `products` one product (`UseKey`, call number)."""
NO_WORKS: Mapping[Any, float] = MappingProxyType({})


def saved_tensors_watched(watch: Callable[[torch.Tensor], None]) -> AbstractContextManager[Any]:
    """Return a context: autograd passes each strided saved tensor to `watch`."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided:
            watch(tensor)
        return tensor.detach()  # a result that its own graph holds would never be freed

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def saved_tensors_dropped() -> AbstractContextManager[Any]:
    """Return a context: torch chooses kernels as for a graph, but the graph saves nothing and has no backward."""
    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0))


@dataclass(frozen=True)
class GraphChoice:
    """The rule of a `RecomputePolicy`, from numbers of bytes alone: a forecast asks it too.

    Sizes by key are in backward order, because the last graphs are held shortest.
    """

    mode: str
    """Effective mode, see `RecomputePolicy`."""
    has_budget: bool
    """True if device memory is limited."""
    can_offload: bool
    """True if graphs can go to host or NVMe memory."""

    @cached_property
    def fills_device(self) -> bool:
        """True if graphs, or product outputs, take the device memory that everything else leaves."""
        return self.mode in ("auto", PRODUCTS)

    def stays(self, is_selected: bool) -> bool:
        """True if the graph, or the product outputs, of a use stay on the device. `is_selected`: by `on_device`."""
        if self.fills_device:
            return is_selected or not self.has_budget
        return self.mode == "never" and not self.can_offload

    def leaves(self, is_selected: bool) -> bool:
        """True if a graph that does not stay goes to host or NVMe memory. `is_selected`: by `offloaded`."""
        return self.can_offload and (is_selected or self.mode == "never")

    def on_device(
        self, sizes: Mapping[_Key, int], room_bytes: int, works: Mapping[_Key, float] = NO_WORKS
    ) -> list[_Key]:
        """Select what stays on the device, in at most `room_bytes`: first what spares most work for a byte.

        `works`: `Product.work` by key; a key without one spares as much as its bytes. The best choice spares less than
        the first item without room more (the greedy rule for a knapsack).
        """
        left = room_bytes if self.fills_device else 0
        chosen = []
        for key, size in chain.from_iterable(group.items() for group in _by_worth(sizes, works)):
            if size <= left:
                chosen.append(key)
                left -= size
        return chosen

    def offloaded(
        self, sizes: Mapping[_Key, int], room_bytes: int, works: Mapping[_Key, float] = NO_WORKS
    ) -> list[_Key]:
        """Select what goes to host or NVMe memory, in at most `room_bytes`: first what spares most work for a byte.

        What spares the same is spread evenly over the pass: a slow link copies one graph while the units up to the next
        one compute.
        """
        chosen = []
        for group in _by_worth(sizes, works):
            total = sum(group.values())
            passed = used = 0
            for key, size in group.items():
                passed += size
                # The chosen share of the bytes so far is at most the share of all bytes that has room.
                if used + size <= room_bytes and (used + size) * total <= room_bytes * passed:
                    chosen.append(key)
                    used += size
            room_bytes -= used
        return chosen


def _by_worth(sizes: Mapping[_Key, int], works: Mapping[_Key, float]) -> list[Mapping[_Key, int]]:
    """Return the sizes in groups with the same work for a byte, the largest first. A group has the order of `sizes`."""
    groups: dict[float, dict[_Key, int]] = {}
    for key, size in sizes.items():
        groups.setdefault(works.get(key, size) / max(size, 1), {})[key] = size
    return [groups[worth] for worth in sorted(groups, reverse=True)]


class RecomputePolicy:
    """Chooses by size between saved graph and recomputation. `keep_for` asks for each use.

    Modes: `always` recompute, `never`, or `auto`: save as many graphs as the device budget allows. With graph offload,
    further graphs go to host or NVMe memory as far as space permits.

    `products`: instead of graphs, blocks keep the outputs of matrix products for the recomputation, by the same rule,
    each product for itself: first those that spare most work for a byte.

    In every mode a unit saves a graph with only inputs and weights (embedding, linear head), and recomputes if the
    forward changes inputs or buffers in place or the graph holds weight copies. In `auto`, the first step
    with a new shape recomputes and measures the graph sizes. Later steps save graphs from the last unit backwards,
    because the last graphs are held shortest. Graphs may use the budget minus the peak of everything else, so unit
    inputs always fit.
    """

    def __init__(
        self,
        mode: str,
        device: Device,
        is_weight: Callable[[torch.Tensor], bool],
        execution_mode: ExecutionMode,
        graph_offload: ActivationOffload | None = None,
    ) -> None:
        self.graph_offload = graph_offload
        """Storage for graphs above the device budget. None: no graph offload."""
        self._execution_mode = execution_mode
        self._device = device
        self._ledger = device.ledger
        self._is_weight = is_weight

        # The rule. Of all that it depends on, only the execution mode changes later.
        self._choice_of_setting = GraphChoice(mode, self._ledger.budget_bytes is not None, graph_offload is not None)
        self._choice_without_recomputation = replace(self._choice_of_setting, mode="never")

        # What was measured, and what was chosen from it.
        self._sizes: dict[KeptKey, int] = {}  # bytes of graphs, or of product outputs, on the device
        self._whole_sizes: dict[KeptKey, int] = {}  # bytes of graphs with the unit inputs, which leave the device too
        self._works: dict[KeptKey, float] = {}
        self._num_products: dict[UseKey, int] = {}
        self.on_device: set[KeptKey] = set()
        """Graphs, or product outputs, chosen to stay on the device."""
        self._offloaded: set[KeptKey] = set()

        # Of this step.
        self._used_keys: set[KeptKey] = set()  # with a question about offload
        self._new: list[KeptKey] = []  # measured, in backward order
        self._step_peak_bytes = 0  # of kept tensors
        self._device_peak_bytes = 0

        self._others_peak_bytes = 0  # of everything but kept tensors, over all steps
        self._recomputed_bytes = 0  # of the last measured graph, until the next update of a peak

    @property
    def mode(self) -> str:
        """Effective mode, as in the setting. "never" if the equivalence check has disabled recomputation."""
        return self.choice.mode

    def is_measured(self, key: UseKey) -> bool:
        """True if the sizes are known."""
        return key in self._sizes or key in self._num_products

    def stays(self, key: KeptKey) -> bool:
        """True if this graph, or these outputs, stay on the device."""
        return self.choice.stays(key in self.on_device)

    def keeps_products(self, key: UseKey) -> bool:
        """True if this use keeps any outputs."""
        keys = [(key, number) for number in range(self._num_products.get(key, 0))]
        return not self.choice.has_budget or any(self.stays(each) or each in self._offloaded for each in keys)

    def offloads(self, key: KeptKey) -> bool:
        """True if this graph, or these outputs, now in this step, leave the device."""
        self._used_keys.add(key)
        return self.choice.leaves(key in self._offloaded)

    @property
    def choice(self) -> GraphChoice:
        """The rule in the effective mode."""
        if self._execution_mode.recomputes:
            return self._choice_of_setting
        return self._choice_without_recomputation

    def has_room(self, num_bytes: int) -> bool:
        """True if the budget allows `num_bytes` more for graphs."""
        budget = self._ledger.budget_bytes
        return budget is None or self._graph_bytes + num_bytes <= budget - self._others_peak_bytes

    def add_products(self, use: UseKey, products: Sequence[Product]) -> None:
        """Add the products of one micro-batch."""
        self._num_products[use] = max(len(products), self._num_products.get(use, 0))
        for number, product in enumerate(products):
            key = use, number
            if key not in self._new:
                self._new.insert(0, key)  # measured in the forward, but chosen in backward order
            self._sizes[key] = self._whole_sizes[key] = self._sizes.get(key, 0) + product.num_bytes
            self._works[key] = self._works.get(key, 0.0) + product.work

    def update_peaks(self) -> None:
        """Update peaks after an allocation: graphs, and everything else."""
        # Read directly: a method call per saved tensor would be slow.
        graph_bytes = self._ledger.allocations.get("kept tensors", 0)
        self._step_peak_bytes = max(self._step_peak_bytes, graph_bytes)
        self._others_peak_bytes = max(self._others_peak_bytes, self._ledger.current_bytes - graph_bytes)

    @contextmanager
    def measure(self, key: UseKey, inputs: Sequence[torch.Tensor], num_parts: int) -> Iterator[None]:
        """Measure the graph size in the recomputation of one of `num_parts` micro-batches, unless known or unused."""
        mode = self.mode
        may_keep = self.graph_offload is not None or (mode == "auto" and self._ledger.budget_bytes is not None)
        if not may_keep or mode in ("never", PRODUCTS) or key in self._sizes:
            yield
            return
        self._update_other_peak(self._graph_bytes)  # without this graph
        address = self._device.address
        known = {address(tensor.untyped_storage()) for tensor in inputs}
        storages: dict[int, int] = {}
        whole: dict[tuple[int, int], int] = {}

        def add(tensor: torch.Tensor) -> None:
            if not self._is_weight(tensor):
                storage, stretch = tensor.untyped_storage(), stretch_of(tensor)
                whole[address(stretch), stretch.nbytes] = stretch.nbytes
                if address(storage) not in known:
                    storages[address(storage)] = storage.nbytes()

        with saved_tensors_watched(add):
            yield
        self._recomputed_bytes = sum(storages.values())
        self._sizes[key] = self._recomputed_bytes * num_parts
        self._whole_sizes[key] = sum(whole.values()) * num_parts
        self._new.append(key)

    @contextmanager
    def measurements_discarded(self) -> Iterator[None]:
        """Discard all measurements made during the context (trial runs)."""
        before = {name: copy(value) for name, value in vars(self).items() if type(value) in (dict, set, list, int)}
        try:
            yield
        finally:
            self._device.take_recent_peak()  # the peak of a trial is no peak of a step
            vars(self).update(before)

    def begin_step(self) -> None:
        """Start a step."""
        self._step_peak_bytes = self._graph_bytes
        self._device_peak_bytes = 0
        self._used_keys.clear()

    def end_step(self) -> int:
        """Select graphs to save from the measurements of this step. Returns the peak device memory in bytes."""
        self._update_other_peak(self._step_peak_bytes)
        budget = self._ledger.budget_bytes
        room = 0  # without a budget all graphs stay, chosen or not
        if budget is not None:
            room = budget - self._others_peak_bytes - self._step_peak_bytes
        self.on_device.update(self.choice.on_device({key: self._sizes[key] for key in self._new}, room, self._works))
        others = [key for key in self._new if key not in self.on_device]
        if self.graph_offload is not None and others:
            # All buffers are free by now. Graphs for different shapes never wait at the same time.
            room = self.graph_offload.room_bytes - sum(
                self._whole_sizes[key] for key in self._offloaded & self._used_keys
            )
            sizes = {key: self._whole_sizes[key] for key in others}
            self._offloaded.update(self.choice.offloaded(sizes, room, self._works))
        self._new.clear()
        return self._device_peak_bytes

    def _update_other_peak(self, kept_bytes: int) -> None:
        """Update the peak of memory other than graphs.

        Excludes saved graphs and the graph recomputed since the last update, because the latter may be saved later.
        Only accelerator peaks include temporaries and graphs.
        """
        recent = self._device.take_recent_peak()
        self._device_peak_bytes = max(self._device_peak_bytes, recent)
        self._others_peak_bytes = max(self._others_peak_bytes, recent - kept_bytes - self._recomputed_bytes)
        self._recomputed_bytes = 0

    def retreat(self) -> bool:
        """Halve the room for saved graphs, effective after the next step.

        Without graphs on the device, recompute half of the offloaded ones. Returns False if no graph was selected.
        """
        if self._ledger.budget_bytes is None:
            return False
        if not self.on_device:  # Each offloaded graph passes through device memory on both copies.
            offloaded = [key for key in self._sizes if key in self._offloaded]
            self._offloaded = set(offloaded[1::2])
            return bool(offloaded)
        # As if all were new, with room for half of their bytes: `end_step` chooses again.
        self._new = [key for key in self._sizes if key in self.on_device]
        self._others_peak_bytes = self._ledger.budget_bytes - sum(self._sizes[key] for key in self._new) // 2
        self.on_device.clear()
        return True

    @property
    def _graph_bytes(self) -> int:
        return self._ledger.allocations.get("kept tensors", 0)
