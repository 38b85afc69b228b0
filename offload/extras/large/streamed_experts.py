"""Experts fetched only if tokens are routed to them, one record (a few experts) at a time.

Calls arrive through the transformers experts interface. Rows are sorted by expert on the device, so the host waits for
the device once a pass: for the number of rows of each expert. Experts in one record run together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn

from offload.distributed.comm import Comm
from offload.engine.units.runner import UnitRunner
from offload.engine.units.stages import Host, Stage
from offload.engine.units.unit import Unit
from offload.errors import ConfigError
from offload.extras.large.adapted_experts import ExpertAdapters, Factors, matrices
from offload.extras.large.expert_rows import ExpertRows, RecordRows
from offload.extras.large.record_forward import RecordForward
from offload.lanes.lanes import Lanes
from offload.layout.regions import Piece, Region
from offload.planning.memory import EXPERT_SLOT
from offload.planning.settings import Settings
from offload.tiers.counters import Counters
from offload.tiers.slots import Slots

IMPLEMENTATION = "offload"
"""Name of this implementation in transformers."""
_STREAMED: WeakValueDictionary[int, StreamedExperts] = WeakValueDictionary()
"""Keyed by id of the module."""


class ExpertRecord(NamedTuple):
    """Experts fetched together."""

    regions: tuple[Region, ...]
    """Regions with the expert weights."""
    experts: range
    """Expert numbers in the layer."""


class RecordStream:
    """Device memory for streaming expert records of all layers, with one record in transfer while another computes.

    The order is known after routing, so there is no recording and no reuse between calls.
    """

    def __init__(self, slots: Slots, lanes: Lanes, counters: Counters, num_places: int) -> None:
        self.slots = slots
        self._lanes = lanes
        self._counters = counters
        self._num_places = num_places

    def pass_over(self, records: Sequence[ExpertRecord]) -> Iterator[ExpertRecord]:
        """Yield each record after the fetch. The record stays valid until the next iteration."""
        slots, num_fetched = self.slots, 0
        slots.forget()  # offsets follow the order of this pass: what a former pass left may lie elsewhere
        for number, record in enumerate(records):
            while num_fetched < min(number + self._num_places, len(records)):
                # In turns: the record before in this place was released in the last iteration.
                offset = num_fetched % self._num_places * (slots.capacity_bytes // self._num_places)
                slots.fetch(slots.cargo_of(records[num_fetched].regions), offset)
                self._counters.count("experts_fetched", len(records[num_fetched].experts))
                num_fetched += 1
            cargo = slots.cargo_of(record.regions)
            slots.use(cargo, record.regions)
            try:
                yield record
            finally:
                slots.release(cargo, record.regions, self._lanes.mark())


class StreamedExperts:
    """The experts of one layer, with the replacement forward."""

    def __init__(
        self, unit: Unit, runner: UnitRunner, stream: RecordStream, comm: Comm, adapters: ExpertAdapters
    ) -> None:
        self.adapters = adapters
        self._unit = unit
        self._runner = runner
        self._stream = stream
        self._comm = comm
        # Inside of transformers' decorator, which would call `_forward` again.
        own: Callable[..., torch.Tensor] = type(unit.module).forward.__wrapped__  # type: ignore[attr-defined]
        self._signature = inspect.signature(own)
        self._forward = RecordForward(unit, own)
        # A record has a region for each dtype, rule or codec of its stacks, all with one name.
        by_name: dict[tuple[str, ...], list[Region]] = {}
        for region in unit.regions:
            by_name.setdefault(region.units, []).append(region)
        self._records = [ExpertRecord(tuple(regions), _experts(regions[0].pieces[0])) for regions in by_name.values()]

    @property
    def module(self) -> nn.Module:
        """The experts module."""
        return self._unit.module

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the combined expert output [tokens, hidden]. Raises ConfigError for arguments not from a router."""
        arguments = tuple(self._signature.bind(self.module, *args, **kwargs).arguments.values())[1:]
        hidden, index, weights = self._check_arguments(arguments)
        changes = self.adapters.active
        if not torch.is_grad_enabled():
            return self.result(hidden, index, weights, changes)
        anchor = self._runner.anchor if self._unit.trainable else None
        return _ExpertsFunction.apply(self, anchor, hidden, index, weights, changes, *matrices(changes))

    def _check_arguments(self, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if len(arguments) == 3 and all(isinstance(value, torch.Tensor) for value in arguments):
            hidden, index, weights = arguments
            is_index = index.dtype in (torch.int64, torch.int32) and index.dim() == 2
            if hidden.dim() == 2 and is_index and index.shape == weights.shape and len(index) == len(hidden):
                return hidden, index, weights
        shown = ", ".join(
            f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            for value in arguments
        )
        raise ConfigError(
            f"offload.experts is streamed, but the experts {self._unit.name} were called with ({shown}) instead of "
            "tokens [tokens, hidden], expert numbers (integers [tokens, choices]) and expert weights [tokens, "
            "choices]. Set --offload.experts whole."
        )

    def result(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, changes: Sequence[Factors]
    ) -> torch.Tensor:
        """Return the expert output. `changes`: of the stacks under adapters.

        A recomputation returns the saved forward output; otherwise experts are computed in ascending order, with the
        same summation order as the family's forward.
        """
        saved = self._runner.outputs.next_replayed()
        if saved is not None:
            return saved
        result = torch.zeros_like(hidden)
        rows = self._rows(index)
        chosen = rows.sort(weights)
        for experts, live in self._fetch_records(rows.hit, descending=False, trains=False):
            group = rows.of_record(experts)
            of_record = [each.of_experts(experts) for each in changes]
            group.add_to(result, self._run(live, of_record, hidden[group.tokens], chosen[group.span], group))
        self._runner.outputs.record(result)
        return result

    def backward(
        self,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        changes: Sequence[Factors],
        gradient: torch.Tensor,
        trains: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
        """Return the gradients for tokens, choice weights, and both factors of each change (None: not trained).

        Expert gradients go to the gradient flow if `trains`. A token's gradients are added from its last
        expert on, as in autograd.
        """
        rows = self._rows(index)
        chosen = rows.sort(weights)
        of_hidden, of_chosen = torch.zeros_like(hidden), torch.zeros_like(chosen)
        of_factors = [torch.zeros_like(each) if each.requires_grad else None for each in matrices(changes)]
        for experts, live in self._fetch_records(rows.hit, descending=True, trains=trains):
            group = rows.of_record(experts)
            of_record = [each.of_experts(experts) for each in changes]
            with torch.enable_grad():
                inputs = [hidden[group.tokens].requires_grad_(), chosen[group.span].requires_grad_()]
                result = self._run(live, of_record, inputs[0], inputs[1], group)
            leaves = matrices(of_record)
            trained = [leaf for leaf in leaves if leaf.requires_grad]
            leaves_only = None if trains else [*inputs, *trained]  # None: weights too, and their hooks take gradients
            torch.autograd.backward(result, gradient[group.tokens], inputs=leaves_only)
            of_rows, of_span = (tensor.grad for tensor in inputs)
            assert of_rows is not None
            group.add_to(of_hidden, of_rows, descending=True)
            if of_span is not None:
                of_chosen[group.span] = of_span
            for of_factor, leaf in zip(of_factors, leaves, strict=True):
                if of_factor is not None and leaf.grad is not None:
                    of_factor[experts.start : experts.stop] = leaf.grad
        return of_hidden, rows.unsort(of_chosen), of_factors

    def _rows(self, index: torch.Tensor) -> ExpertRows:
        """Return the layer's rows, in groups by record."""
        first, last = self._records[0].experts, self._records[-1].experts
        return ExpertRows(index, last.stop, len(first))

    def _fetch_records(
        self, hit: set[int], *, descending: bool, trains: bool
    ) -> Iterator[tuple[range, Mapping[int, nn.Parameter]]]:
        """Yield (experts, Parameters [experts, ...] keyed by model index) for the records with experts in `hit`.

        With `trains`, gradients for all experts in the layer go to the gradient flow. As in plain PyTorch, with one
        gradient per stack, an expert without tokens has gradient 0 and is updated.
        """
        flow, frozen = self._runner.gradients, self._unit.frozen
        order = 1
        if descending:
            order = -1
        hit_on_any_rank = hit
        if self._runner.has_peers and (trains or self._stream.slots.gathers):
            self._runner.exchanges.append(partial(self._repeat_exchanges, descending=descending, trains=trains))
            # The gather of weights and the reduction of gradients are collective.
            hit_on_any_rank = set().union(*self._comm.gather_objects(hit, f"routing of tokens to {self._unit.name}"))
        used = [record for record in self._records if not hit_on_any_rank.isdisjoint(record.experts)][::order]
        for record in self._stream.pass_over(used):
            if trains:
                flow.open_record(record.regions)
            if not hit.isdisjoint(record.experts):
                yield record.experts, self._live(record, trains)
            if trains:
                flow.close_record(record.regions, frozen)
        if trains:
            for record in self._records:
                if record not in used:
                    flow.send_zeros(record.regions, frozen)

    def _repeat_exchanges(self, *, descending: bool, trains: bool) -> None:
        """Repeat the exchanges for experts hit on other ranks, without own tokens."""
        for _ in self._fetch_records(set(), descending=descending, trains=trains):
            pass

    def _live(self, record: ExpertRecord, trains: bool) -> Mapping[int, nn.Parameter]:
        """Return the record's Parameters by model index."""
        slots, frozen = self._stream.slots, self._unit.frozen
        if trains:  # the runner hooks them, so gradients leave as they come
            parameters = self._runner.make_live(record.regions, slots)
        else:
            parameters = slots.parameters(record.regions)
        for piece, parameter in parameters.items():
            if not trains or piece.parameter in frozen:
                parameter.requires_grad_(False)
        return {piece.parameter: parameter for piece, parameter in parameters.items()}

    def _run(
        self,
        live: Mapping[int, nn.Parameter],
        changes: Sequence[Factors],
        rows: torch.Tensor,
        weights: torch.Tensor,
        group: RecordRows,
    ) -> torch.Tensor:
        """Run the experts in a record on their rows."""
        changed = {each.parameter: each.add_to(live[each.parameter]) for each in changes}
        return self._forward(rows, weights, group, {**live, **changed})


class _ExpertsFunction(torch.autograd.Function):
    """Border between the unit graph and the experts, recomputed record by record."""

    @staticmethod
    def forward(
        ctx: Any,
        experts: StreamedExperts,
        _anchor: torch.Tensor | None,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        changes: Sequence[Factors],
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.experts = experts
        ctx.changes = [(each.parameter, each.scale) for each in changes]  # factors are saved as tensors, below
        ctx.save_for_backward(hidden, index, weights, *factors)
        return experts.result(hidden, index, weights, changes)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # As for units: a backward with chosen inputs must not change weight gradients.
        trains = ctx.needs_input_grad[1] and torch._C._will_engine_execute_node(ctx.next_functions[0][0])
        # Detached from the surrounding graph.
        hidden, index, weights, *factors = (tensor.detach() for tensor in ctx.saved_tensors)
        factors = [each.requires_grad_(needs) for each, needs in zip(factors, ctx.needs_input_grad[6:], strict=True)]
        pairs = zip(ctx.changes, factors[::2], factors[1::2], strict=True)
        changes = [Factors(parameter, lhs, rhs, scale) for (parameter, scale), lhs, rhs in pairs]
        of_hidden, of_weights, of_factors = ctx.experts.backward(hidden, index, weights, changes, gradient, trains)
        return None, None, of_hidden, None, of_weights, None, *of_factors


def _experts(piece: Piece) -> range:
    """Return the experts in a piece [experts, ...]."""
    first = piece.begin * piece.shape[0] // piece.numel
    return range(first, first + piece.shape[0])


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run an experts module: streamed, or by the family's forward if not streamed."""
    experts = _STREAMED.get(id(module))
    if experts is not None:
        return experts.forward(*args, **kwargs)
    own: Callable[..., torch.Tensor] = type(module).forward.__wrapped__  # type: ignore[attr-defined]
    return own(module, *args, **kwargs)  # a copy of the model: its configuration names this implementation too


class ExpertStreams(Stage):
    """Expert streaming for all layers of an engine. Left out if experts are fetched whole."""

    def __init__(self, inner: Stage, experts: Sequence[Unit], host: Host) -> None:
        """The device memory of the plan holds two records with overlap, else one."""
        super().__init__(inner)
        self._original_implementations: list[tuple[Any, Any]] = []  # (config, previous implementation) pairs
        # Slots of their own: only a router knows the order, so no recorded pass can predict it.
        # Experts may be stored on the device; then the slots take no memory.
        slots = Slots(
            host.store,
            host.deferred_updates,
            slot_bytes=host.plan.of("device", EXPERT_SLOT).num_bytes,
            slot_name=EXPERT_SLOT,
            decoder=host.slots.weight_decoder,
        )
        stream = RecordStream(slots, host.lanes, host.counters, 2 if host.plan.overlap else 1)
        adapters = [ExpertAdapters.over(unit.name, unit.places, host.model) for unit in experts]
        self._streamed = [
            StreamedExperts(unit, host.runner, stream, host.comm, over)
            for unit, over in zip(experts, adapters, strict=True)
        ]

    @classmethod
    def over(cls, inner: Stage, host: Host, settings: Settings) -> Stage:  # noqa: ARG003
        return cls(inner, [unit for unit in host.units if unit.in_records], host)

    def divert(self) -> None:
        super().divert()
        # Imported already by any model with these experts.
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
        # All layers mostly share one configuration: its previous value is noted once.
        configs: dict[int, Any] = {id(each.module.config): each.module.config for each in self._streamed}
        self._original_implementations = [(config, config._experts_implementation) for config in configs.values()]
        for config in configs.values():
            config._experts_implementation = IMPLEMENTATION
        _STREAMED.update((id(each.module), each) for each in self._streamed)
        for each in self._streamed:
            each.adapters.divert()

    def undo(self) -> None:
        super().undo()
        for config, implementation in self._original_implementations:
            config._experts_implementation = implementation
        for each in self._streamed:
            _STREAMED.pop(id(each.module), None)
            each.adapters.undo()
