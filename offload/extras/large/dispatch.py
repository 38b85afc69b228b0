"""Dispatch of blocks over ranks: block n runs on rank n modulo N, for the rows of all ranks (pipeline dispatch).

Cards without a fast link between them all fetch the same weights over their own links, or pass them on through the
host. Here the rows move instead: each rank runs the unmodified model over its own rows, and at a block sends the inputs
to the owner of the block and receives the results. A pass over U blocks has U + N - 1 ticks. In tick t rank r is at its
call number t - r, so in every tick the N ranks are at N different blocks, with N different owners: each rank computes
one block in each tick, and waits for nobody in the first and last N - 1 alone. A block stays on its owner for N ticks,
one for each rank, and is fetched once for all of them; meanwhile the next one is fetched. (Breadth-first pipelines:
arXiv:2211.05953; a round over several cards with weights in host memory: RoundPipe.)

The order of all ticks is fixed, so no rank waits for a message that depends on its own, and sums have one order: the
gradients of the ranks are added in rank order, as a reduce-scatter adds them.
"""

from __future__ import annotations

import contextvars
import copy
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from offload.distributed.comm import Comm, pieces_of
from offload.engine.gradients.flow import GradientFlow
from offload.engine.gradients.loss_scale import LossScale
from offload.engine.gradients.rank_sums import ReduceScatter
from offload.engine.gradients.transfer import Gradients, Measure
from offload.engine.units.arguments import Arguments, deliver_result, find_collectors, receive_call
from offload.engine.units.call import UnitCall, join_graph
from offload.engine.units.runner import UnitRunner
from offload.engine.units.stages import Host, Stage
from offload.engine.units.traits import GradientTensors, Rows
from offload.engine.units.unit import Unit
from offload.errors import ConfigError
from offload.extras.large.pairs import Pairs
from offload.interrupts import interrupts
from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import Region
from offload.planning.settings import Settings
from offload.schedule.execute import Executor

_ALIGNMENT = 64  # bytes; tensors in a message begin at a multiple


class DispatchStage(Stage):
    """Takes the calls of blocks from the router. The forwards stay as they are."""

    @classmethod
    def over(cls, inner: Stage, host: Host, settings: Settings) -> Stage:
        if host.plan.residence.sharding.dispatches:
            host.router.target = Dispatch(host, settings).call
        return inner


class FromOwner(ReduceScatter):
    """Sums over ranks, with the gradients of dispatched blocks from the rank that has them.

    `owners`: the rank with the gradients by region index; other regions are reduced over all ranks. `pairs`: messages
    between ranks.
    """

    owners: Mapping[int, int]
    pairs: Pairs

    def begin_step(self) -> None:
        super().begin_step()
        self.owners = {}  # own loops and norms of LOMO compute all blocks on each rank; dispatched forwards name owners

    def reduce(self, region: Region, flat: torch.Tensor, source: Fence, measure: Measure | None) -> Gradients:
        """Send each rank its range of `flat`, fp32 [numel]; on other ranks than the owner `flat` has no memory."""
        owner = self.owners.get(region.index)
        if owner is None:
            return super().reduce(region, flat, source, measure)
        store, comm = self._store, self._store.within
        part = store.sharding.shard(region)
        users: Sequence[Ticket] = ()
        if comm.rank == owner:
            shard, fence = flat[part], source
        else:  # received, so into memory of its own: `flat` has none here
            stretch = self._shards.take_planned(4 * (part.stop - part.start))
            shard, fence = stretch.flat.view(torch.float32), stretch.fence
            users = stretch.users
            stretch.close()  # no other stretch is taken before this one has a writer

        def work() -> None:
            label = f"gradients of {region.name} from rank {owner}"
            if comm.rank == owner:
                pieces = pieces_of(flat.cpu().view(torch.uint8), comm.size)
                self.pairs.swap({rank: piece for rank, piece in enumerate(pieces) if rank != owner}, (), label)
            else:
                shard.copy_(self.pairs.swap({}, [owner], label)[owner].view(torch.float32))
            if measure is not None:
                measure(shard)

        ticket = store.collective_lane.submit(
            work, reads=self._lanes.mark(), users=users, name=f"gradients {region.name}", num_bytes=shard.nbytes
        )
        if comm.rank == owner:
            source.record_reader(ticket)
        else:
            fence.record_writer(ticket)
        return Gradients(region, shard, fence, (ticket,))


class _Message(NamedTuple):
    """Content of a message between ranks: any small object, and tensors [any shape], None for a missing gradient."""

    value: Any
    tensors: Sequence[torch.Tensor | None]


def _pack(message: _Message) -> torch.Tensor:
    """Return a message as one flat uint8 host tensor: length of the head, head, tensors."""
    metas, end = [], 0
    for tensor in message.tensors:
        meta = None
        if tensor is not None:
            meta = end, tensor.dtype, tuple(tensor.shape)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        metas.append(meta)
    try:
        head = pickle.dumps((message.value, metas))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise _refuse(f"an argument or a result of a block cannot be sent to another rank ({error})") from error
    # Places in the head count from the first tensor, because the length of the head is known only now.
    begin = -(-(8 + len(head)) // _ALIGNMENT) * _ALIGNMENT
    flat = torch.empty(begin + end, dtype=torch.uint8, device="cpu")
    flat[:8].view(torch.int64)[0] = len(head)
    flat[8 : 8 + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for tensor, meta in zip(message.tensors, metas, strict=True):
        if tensor is not None and meta is not None and tensor.numel():
            place = flat[begin + meta[0] : begin + meta[0] + tensor.nbytes]
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return flat


def _unpack(flat: torch.Tensor, device: torch.device) -> _Message:
    """Return the message in a flat uint8 host tensor. On a CPU its tensors are views of `flat`."""
    length = int(flat[:8].view(torch.int64)[0])
    value, metas = pickle.loads(flat[8 : 8 + length].numpy().tobytes())
    data = flat[-(-(8 + length) // _ALIGNMENT) * _ALIGNMENT :].to(device)
    tensors: list[torch.Tensor | None] = []
    for meta in metas:
        if meta is None:
            tensors.append(None)
            continue
        begin, dtype, shape = meta
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        tensors.append(data[begin : begin + num_bytes].view(dtype).view(shape))
    return _Message(value, tensors)


def _attributes_of(unit: Unit) -> dict[tuple[torch.nn.Module, str], Any]:
    """Return the values of all attributes in a block, by module and name."""
    return {(module, name): value for module in unit.modules for name, value in vars(module).items()}


class _Server:
    """Runs the blocks of this rank for the rows of any rank."""

    def __init__(self, host: Host, settings: Settings) -> None:
        self._host = host
        parts = host.device, host.lanes, host.slots, host.executor, host.gradients, host.runner.saved
        # One rank without peers agrees with nobody. Uses are not counted: the rows of all ranks are one use. The scale
        # of a loss is that of the rank with the loss.
        self.runner = UnitRunner(*parts, host.units, loss_scale=LossScale(), seed=settings.seed, comm=Comm())
        self._calls: dict[tuple[str, int], UnitCall] = {}

    def begin(self) -> None:
        """Begin the forwards of a step."""
        main, runner = self._host.runner, self.runner
        self._calls.clear()  # of an interrupted step
        runner.claims.reset()
        # Shared with the main runner: stages keep outputs there, and the recording has found the writes there.
        runner.stages = main.stages
        runner.outputs = main.outputs
        runner.writes = main.writes

    def forward(self, unit: Unit, rank: int, message: _Message) -> _Message:
        """Run the forward for the rows of `rank`: arguments to results."""
        arguments, needs, rows = message.value
        arguments = copy.copy(arguments)
        arguments.tensors = list(message.tensors)
        for tensor, need in zip(arguments.tensors, needs, strict=True):
            if need and not tensor.requires_grad:  # a message carries no graph
                tensor.requires_grad_()
        unit.recall(arguments.structure)  # ranks may call a block in different ways
        call = self._calls[unit.name, rank] = UnitCall(unit, self.runner, rows, arguments)
        before = _attributes_of(unit)
        outputs = call.forward(arguments.tensors)
        result, call.result = call.result, None
        arguments.tensors = []  # the call holds the tree until the backward, and has saved what it needs
        assert result is not None
        result.tensors = []  # they go in the message, not in its pickled head
        changed = [key[1] for key, value in _attributes_of(unit).items() if before.get(key) is not value]
        if changed:
            raise _refuse(f"block {unit.name} changes attributes of modules ({', '.join(changed)})")
        return _Message(result, outputs)

    def backward(self, unit: Unit, rank: int, message: _Message) -> _Message:
        """Run the backward for the rows of `rank`: gradients of results to gradients of arguments."""
        call = self._calls.pop((unit.name, rank))
        with self._host.gradients.repeated(()):  # they add up, and leave with `Dispatch.end_gradients`
            return _Message(None, call.backward(message.tensors, trains=message.value))


class _Pass:
    """One way through all blocks: the ticks in which this rank sends its own calls, and computes those of others."""

    def __init__(self, dispatch: Dispatch, units: Sequence[Unit], is_forward: bool) -> None:
        self._dispatch = dispatch
        self._comm = dispatch.comm
        self._is_forward = is_forward
        self._direction = "forward"
        self._units = list(units)
        if not is_forward:
            self._direction = "backward"
            self._units.reverse()
        self._owners = [dispatch.owner(unit) for unit in self._units]
        self._tick = 0
        self._next = 0  # number of this rank's next call
        self._lag = self._comm.size - 1  # ticks from the first rank's call of a block to that of the last rank

    @property
    def next_unit(self) -> Unit:
        """The block of this rank's next call."""
        return self._units[self._next]

    @property
    def is_over(self) -> bool:
        """True after the last tick."""
        return self._tick == len(self._units) + self._lag

    def call(self, unit: Unit, message: _Message) -> _Message:
        """Have the next block run for the rows of this rank, and compute for others up to the same tick."""
        if self.next_unit is not unit:
            raise _refuse(f"block {unit.name} was called in place of {self.next_unit.name}")
        while self._tick < self._comm.rank + self._next:  # the ticks before this rank's first call
            self._run_tick(None)
        reply = self._run_tick(message)
        assert reply is not None
        self._next += 1
        # No later call of this rank would run the ticks for the calls of the ranks after it.
        while self._next == len(self._units) and not self.is_over:
            self._run_tick(None)
        return reply

    def _run_tick(self, message: _Message | None) -> _Message | None:
        """Send `message` to the owner of the block of this tick, serve another rank, and return the reply."""
        tick, comm = self._tick, self._comm
        units = self._units
        to = None if message is None else self._owners[tick - comm.rank]
        last = tick - self._lag  # the call of the last rank; rank r is at call `tick - r`
        calls = range(max(0, last), min(tick + 1, len(units)))
        # At most one: the calls of a tick are consecutive blocks, with as many different owners.
        asking = next((call for call in calls if self._owners[call] == comm.rank), None)
        source = None if asking is None else tick - asking
        label = f"{self._direction} of blocks, tick {tick}"
        if tick < len(units) and self._owners[tick] != comm.rank:  # once a block: at the first rank's call
            pass_over(self._dispatch.executor, units[tick].regions, backward=not self._is_forward)
        question = self._exchange(message, to, source, f"{label}: inputs")
        answer = None
        if asking is not None and question is not None:
            answer = self._serve(units[asking], tick - asking, question)
        reply = self._exchange(answer, source, to, f"{label}: results")
        if last >= 0 and not self._is_forward:  # after the results: a lane without a thread waits here
            self._dispatch.end_gradients(units[last])
        self._tick += 1
        return reply

    def _serve(self, unit: Unit, rank: int, message: _Message) -> _Message:
        server = self._dispatch.server
        if self._is_forward:
            return server.forward(unit, rank, message)
        return server.backward(unit, rank, message)

    def _exchange(self, message: _Message | None, to: int | None, source: int | None, label: str) -> _Message | None:
        """Send a message to rank `to`, and return the one from rank `source`."""
        if to == source == self._comm.rank:
            self._dispatch.pairs.swap({}, (), label)  # other ranks expect this exchange in the order of all
            return message
        sent = dict[int, torch.Tensor]()
        if to is not None and message is not None:
            sent[to] = _pack(message)
        received = self._dispatch.pairs.swap(sent, () if source is None else [source], label)
        self._dispatch.sent_bytes += sum(map(len, sent.values()))
        if source is None:
            return None
        return _unpack(received[source], self._dispatch.device)


class Dispatch:
    """Calls of blocks in steps, computed by the owners of the blocks.

    `sent_bytes`: activations and their gradients sent to other ranks so far.
    """

    def __init__(self, host: Host, settings: Settings) -> None:
        check_machines(host.comm.num_machines, host.store.between.size)
        exchange = host.gradients.exchange
        assert isinstance(exchange, FromOwner)
        self._host = host
        self.device = host.device.torch_device
        self.executor = host.executor
        self.server = _Server(host, settings)
        self._stream = host.router.target  # for units that stay on each rank

        # Messages between blocks, and those with gradients: the second on a lane, beside the first.
        self.comm = host.comm.neighbours(host.comm.size)  # its own order of exchanges, beside that of the lanes
        self.pairs = Pairs(self.comm)
        self._exchange = exchange
        exchange.pairs = Pairs(host.store.within)
        self.sent_bytes = 0

        # Of the step. None, or over: no block has been called in this direction.
        self._forward: _Pass | None = None
        self._backward: _Pass | None = None
        self._units: list[Unit] = []
        """The dispatched blocks in the order of calls; units kept on the device are not among them."""

    def owner(self, unit: Unit) -> int:
        """Return the rank that computes a block."""
        return self._units.index(unit) % self.comm.size

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call of a unit. Blocks in a step run on their owners, all others here."""
        runner = self._host.runner
        is_step = runner.is_engine_call and torch.is_grad_enabled() and not self._host.gradients.discards_gradients
        if not is_step or not unit.is_block or unit.resident:
            return self._stream(unit, args, kwargs)
        _, collected = find_collectors(contextvars.copy_context())
        # transformers collects in lists by name; torch.compile has other values there.
        if any(
            type(each) is dict and each and all(type(items) is list for items in each.values()) for each in collected
        ):
            raise _refuse("outputs of layers are collected (such as with output_router_logits)")
        with interrupts:
            # In this step. A pass may stand unfinished after a failed step, so its state alone does not tell.
            is_first = not any(map(runner.has_called, self._units))
            if self._forward is None or self._forward.is_over or is_first:
                if not is_first and not (self._backward and self._backward.is_over):
                    raise _refuse(f"block {unit.name} was called a second time before the backward")
                self._begin_forward()
            runner.collect()
            arguments, containers = receive_call(args, kwargs)
            return deliver_result(*self._run(unit, arguments), containers)

    def _run(self, unit: Unit, arguments: Arguments) -> tuple[Arguments, Sequence[torch.Tensor]]:
        rows = self._host.runner.count(unit)
        unit.recall(arguments.structure)
        if rows.is_cut and not unit.traits.can_cut(arguments, rows.batch):
            raise _refuse(f"block {unit.name} was called with arguments that were not recorded")
        if unit.traits.mutated or unit.traits.buffers or unit.traits.changed:
            raise _refuse(f"block {unit.name} changes its inputs, results or buffers in place")
        if not (unit.trainable or any(tensor.requires_grad for tensor in arguments.tensors)):
            raise _refuse(f"block {unit.name} takes no part in the backward")
        return join_graph(_RemoteCall(self, unit, rows, arguments), unit, self._host.runner, arguments)

    def _begin_forward(self) -> None:
        # Anew in each step: units may have become resident.
        self._units = [unit for unit in self._host.units if unit.is_block and not unit.resident]
        shared = [r for unit in self._units for r in unit.regions if len(r.units) > 1]
        if shared:
            raise _refuse(f"{' and '.join(shared[0].units)} share weights")
        self._exchange.owners = {r.index: self.owner(unit) for unit in self._units for r in unit.regions}
        self.server.begin()
        self._forward = _Pass(self, self._units, is_forward=True)
        self._backward = None

    def _begin_backward(self) -> _Pass:
        self._backward = _Pass(self, self._units, is_forward=False)
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        return self._backward

    def _end_backward(self) -> None:
        """Raise ConfigError at the end of a backward without some block: other ranks would wait for its tick."""
        assert self._backward is not None
        if not self._backward.is_over:
            raise _refuse(f"block {self._backward.next_unit.name} had no backward")

    def forward(self, unit: Unit, message: _Message) -> _Message:
        assert self._forward is not None
        return self._forward.call(unit, message)

    def backward(self, unit: Unit, message: _Message) -> _Message:
        backward = self._backward or self._begin_backward()
        return backward.call(unit, message)

    def end_gradients(self, unit: Unit) -> None:
        """Send the gradients of a block from the owner to the ranks that update it."""
        gradients = self._host.gradients
        if self.owner(unit) == self.comm.rank:
            with gradients.repeated(unit.regions):  # its end sends the sums of all ranks' rows
                return
        receive_gradients(gradients, unit.regions)


def check_machines(num_machines: int, num_replicas: int = 1) -> None:
    """Raise ConfigError for ranks on several machines, or in several replicas."""
    if num_machines > 1 or num_replicas > 1:
        raise ConfigError(
            "offload.dispatch is always, but the ranks are on several machines or form several replicas, and "
            "activations are exchanged inside one machine: set --offload.dispatch never, or use one machine with "
            "--offload.replicas 1."
        )


def pass_over(executor: Executor, regions: Sequence[Region], backward: bool) -> None:
    """Note a block's use by another rank: updates and their exchanges have the order of uses, equal on all ranks."""
    executor.enter(regions, backward, reads=False)
    executor.leave(regions, ())


def receive_gradients(flow: GradientFlow, regions: Sequence[Region]) -> None:
    """Take the gradients of a block on another rank like those of an own one."""
    flow.transfer.policy.open()
    for region in regions:
        if region.trainable:
            nothing = torch.empty(region.numel, dtype=torch.float32, device="meta")
            flow.transfer.send(region, nothing, Fence("gradients of another rank"))


class _RemoteCall:
    """A call that the owner of the block computes."""

    def __init__(self, dispatch: Dispatch, unit: Unit, rows: Rows, arguments: Arguments) -> None:
        self._dispatch = dispatch
        self._unit = unit
        self._rows = rows
        self._arguments = arguments
        # Of a `GraphCall`.
        self._signature = unit.gradient_signature(arguments.tensors)
        self.graph = unit.traits.graph(self._signature)
        self.result: Arguments | None = None
        self.dirty: list[torch.Tensor] = []  # `Dispatch` has refused blocks with in-place changes

    def forward(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Have the owner run the forward; return the result tensors."""
        # This call waits in the graph for the backward, without the arguments: the owner saves them.
        arguments, self._arguments = copy.copy(self._arguments), None  # type: ignore[assignment]
        arguments.tensors = []
        value = arguments, self._signature[0], self._rows
        answer = self._dispatch.forward(self._unit, _Message(value, tensors))
        self.result = answer.value
        return [tensor for tensor in answer.tensors if tensor is not None]

    def backward(self, gradients: GradientTensors, trains: bool) -> GradientTensors:
        """Have the owner run the backward; return the gradients of the arguments."""
        return self._dispatch.backward(self._unit, _Message(trains, gradients)).tensors


def _refuse(problem: str) -> ConfigError:
    return ConfigError(
        f"{problem}, but with offload.dispatch always every block of the model runs once in a step, in their order, "
        "with arguments that other ranks may compute from: set --offload.dispatch never."
    )
