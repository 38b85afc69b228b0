"""Forecast for dispatched blocks: a rank computes an Nth of all blocks, for the rows on all N ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from offload.engine.prepare import EnginePlan
from offload.extras.plan.simulated_lanes import Seconds
from offload.extras.plan.simulated_step import SimulatedCall
from offload.extras.plan.workload import UnitWork, Workload
from offload.machine.hardware import Hardware

_LOOPBACK_BYTES_PER_S = 1.2e9
"""Rate of messages between two ranks over gloo on one machine, in both directions at once, packing included.

Measured for 16 MB, by time on the CPU, on two slow cores.
"""


class DispatchedBlocks:
    """The blocks of a step as rank 0 sees them: blocks 0, N, 2 N, ... are its own. No other rank has more.

    Without dispatch N is 1, and calls and workload stay as they are.
    """

    def __init__(self, blocks: Collection[str], num_ranks: int) -> None:
        """`blocks`: names of streamed blocks. `num_ranks`: N."""
        self._blocks = blocks
        self.num_ranks = num_ranks

    @classmethod
    def of(cls, prepared: EnginePlan) -> DispatchedBlocks:
        """Return the blocks of a plan."""
        sharding, candidates = prepared.plan.residence.sharding, prepared.structure.candidates
        names = {each.name for each in candidates if each.is_block and not each.resident}
        return cls(names, sharding.size if sharding.dispatches else 1)

    def _find(self, works: Sequence[UnitWork]) -> list[int]:
        """Return the indices of blocks; none without dispatch."""
        if self.num_ranks == 1:
            return []
        return [n for n, work in enumerate(works) if work.name in self._blocks]

    def held(self, workload: Workload) -> Workload:
        """Return a workload with the saved inputs of this rank, spread over all blocks.

        Each call has its own inputs: tensors shared by all blocks (masks, positions) come with each message.
        """
        calls, blocks = list(workload.calls), self._find(workload.calls)
        if not blocks:
            return workload
        num_held = self.num_ranks * len(blocks[:: self.num_ranks])  # as many as blocks, or a few more
        # The other calls share tensors with this one.
        most = max((calls[number] for number in blocks), key=lambda call: call.input_bytes)
        keys = "input_bytes", "staying_bytes", "shared_bytes"
        sizes = {key: -(-getattr(most, key) * num_held // len(blocks)) for key in keys}
        for number in blocks:
            calls[number] = replace(calls[number], **sizes)
        return replace(workload, calls=tuple(calls))

    def computed(self, workload: Workload, calls: Sequence[SimulatedCall], hardware: Hardware) -> list[SimulatedCall]:
        """Return the calls of this rank; `calls`: those of gathers, `workload`: with the inputs from `held`.

        An own block takes the rows of all ranks one after another under one fetch, and compute waits for the messages
        with inputs, results and gradients. Meanwhile the other ranks compute the next N - 1 blocks. A pass over U
        blocks has U + N - 1 ticks, a few of them without an own block: then this rank is idle.
        """
        works, num = workload.calls, self.num_ranks
        blocks = self._find(works)
        if not blocks:
            return list(calls)
        own, parts = blocks[::num], workload.num_micro_batches
        idle = SimulatedCall((), 0.0, 0.0)
        num_idle = len(blocks) + num - 1 - num * len(own)  # ticks of the pass beside those with an own block
        found: dict[int, SimulatedCall] = {n: call for n, call in enumerate(calls) if n not in blocks}
        for place, number in enumerate(blocks):
            call, work = calls[number], works[number]
            sent = work.input_bytes + work.result_bytes, work.result_bytes + work.gradient_bytes
            forward_s = call.forward_s + self._message_s(parts * sent[0], hardware)
            backward_s = call.backward_s + self._message_s(parts * sent[1], hardware)
            idle = replace(
                idle,
                forward_s=idle.forward_s + forward_s * num_idle / len(blocks),
                backward_s=idle.backward_s + backward_s * num_idle / len(blocks),
            )
            if number in own:
                found[number] = replace(
                    call,
                    forward_s=num * forward_s,
                    backward_s=num * backward_s,
                    forward_host_s=num * call.forward_host_s,
                    backward_host_s=num * call.backward_host_s,
                    saved_bytes=call.saved_bytes * len(blocks) // len(own),
                    graph_bytes=call.graph_bytes * num,
                    others=tuple(calls[other].regions for other in blocks[place + 1 : place + num]),
                )
        ordered = [found[number] for number in sorted(found)]
        return [*ordered, idle] if num_idle else ordered

    def _message_s(self, num_bytes: int, hardware: Hardware) -> float:
        """Return the mean seconds of a tick for messages. With two ranks both compute for themselves every other tick;
        with more, some ranks exchange in each tick.
        """
        seconds = num_bytes * _second_per_byte(hardware)
        return seconds / 2 if self.num_ranks == 2 else seconds

    def exchanged(self, gathers: Seconds, hardware: Hardware) -> Seconds:
        """Return the seconds of collectives by the bytes of a shard; `gathers`: those without dispatch.

        Two thirds of these bytes (fp32 beside weights in bf16) are gradients: an owner sends N - 1 shards as messages.
        """
        if self.num_ranks == 1:
            return gathers
        one_s = (self.num_ranks - 1) * _second_per_byte(hardware)
        return lambda num_bytes: gathers(num_bytes) / 3 + 2 / 3 * num_bytes * one_s


def _second_per_byte(hardware: Hardware) -> float:
    """Return the seconds for a byte of a message: to the host, to the other process, to the other device."""
    rates = hardware.rates
    second = 1 / min(_LOOPBACK_BYTES_PER_S, rates.host_bytes_per_s)
    if hardware.device != "cpu":
        second += 1 / rates.d2h_bytes_per_s + 1 / rates.h2d_bytes_per_s
    return second
