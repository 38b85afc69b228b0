"""Division of a step's rows between ranks."""

from __future__ import annotations


def share(num_rows: int, rank: int, world_size: int, group: int = 1) -> slice:
    """Return this rank's rows as a slice. Shares are contiguous and differ by at most one row group."""
    number = num_rows // group
    return slice(number * rank // world_size * group, number * (rank + 1) // world_size * group)
