"""Ranks of a plan, without processes."""

from __future__ import annotations

from offload.distributed.comm import Comm, _Value


class SimulatedRanks(Comm):
    """Simulated rank 0 among `size` ranks on one machine, or on several equal machines. No other rank runs: host values
    on all ranks equal rank 0's, and there is no tensor exchange.
    """

    def __init__(self, size: int, num_machines: int = 1) -> None:
        self.size = size
        self.local_size = size // num_machines
        # By rank: the first rank of its machine.
        self.machines = [rank // self.local_size * self.local_size for rank in range(size)]

    def _split(self, num_replicas: int) -> tuple[Comm, Comm]:
        parts = []
        for groups in self._places(num_replicas):
            part = SimulatedRanks(len(groups[0]))
            part.machines = [self.machines[rank] for rank in groups[0]]
            parts.append(part)
        return parts[0], parts[1]

    def _neighbours(self, num: int) -> Comm:
        return self._split(self.size // num)[0]

    def gather_objects(self, value: _Value, operation: str) -> list[_Value]:  # noqa: ARG002
        return [value] * self.size
