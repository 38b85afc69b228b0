"""Whether the host has the memory that a plan takes, whatever budget it was given."""

from __future__ import annotations

from collections.abc import Sequence

from offload.errors import DoesNotFitError, format_bytes
from offload.planning.memory import Allocation, name_all, without_host_memory


def check_host(
    plan: Sequence[Allocation], free_bytes: int, bound: str, *, given_bytes: int, is_device: bool, num_sharing: int = 1
) -> None:
    """Refuse a rank's plan that the host cannot hold: DoesNotFitError with what bounds it, every allocation and the
    shortfall. Who takes memory that a control group does not have is ended by signal 9, long after a plan could tell.

    free_bytes: what this rank may take of the host's memory. bound: what bounds that, as a sentence names it.
    given_bytes: what the model takes of it until the engine has its weights. is_device: the host computes as well, so
    that the device's memory is of it. num_sharing: ranks of this machine.
    """
    wanted = [
        allocation for allocation in plan if allocation.tier == "cpu" or (is_device and allocation.tier == "device")
    ]
    total = sum(allocation.num_bytes for allocation in wanted)
    if total <= free_bytes + given_bytes:
        return
    there = free_bytes + given_bytes
    ranks = f" for each of the {num_sharing} ranks that share it" if num_sharing > 1 else ""
    raise DoesNotFitError(
        f"the plan needs {format_bytes(total)} ({total} bytes) of host memory and {format_bytes(there)} ({there} "
        f"bytes) are there{ranks}, {format_bytes(total - there)} ({total - there} bytes) too few: {name_all(wanted)}. "
        f"What bounds it is {bound}. Nothing was allocated. Make that {(total - there) * num_sharing} bytes more"
        f"{without_host_memory(plan)}."
    )
