"""Communication between ranks: one interface over gloo (CPU), NCCL (CUDA), or nothing (one rank).

Reductions run in rank order, ((x0 + x1) + x2) + ..., in fp32: each rank receives the other ranks' pieces and adds them
locally. The result depends neither on an algorithm nor on timing. The volume equals a ring: each rank sends (N - 1) / N
of the data (ZeRO, arXiv:1910.02054, section 7).
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import xxhash

from offload.arguments import as_folder
from offload.errors import ConfigError, RankLostError

LOOK_S = 0.2
"""Seconds between two checks for a lost rank during a wait on gloo. A gloo wait cannot be interrupted."""
_CHUNK_MULTIPLE = 256  # elements
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_Value = TypeVar("_Value")


class Coding(Protocol):
    """Quantization of reduction terms for transport. A record, uint8 [`record_bytes`], holds `block` elements."""

    block: int
    record_bytes: int

    def encode(self, values: torch.Tensor, begin: int, records: torch.Tensor) -> None:
        """Quantize values [n] into flat records. `begin` is the first value's position in the reduced tensor."""

    def decode(self, records: torch.Tensor, out: torch.Tensor) -> None:
        """Decode flat records to `out` [n], in any float dtype."""


class Comm:
    """Collectives in a training step. All ranks make the same calls in the same order. Tensor collectives and
    host-value collectives (numbers, objects, flags) have two independent orders.

    Tensors are flat, contiguous and on the device. A gloo call returns when it is done. A CUDA call is enqueued on the
    current stream, except for calls with host results. `operation` names operation and unit ("all-gather of unit
    head"), the same on all ranks, for error messages. After the loss of a rank every call raises RankLostError.

    This base class is a single-rank communicator: nothing is sent, and data already in place is not copied.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device = torch.device("cpu")
    """Device for exchanged tensors."""
    machines: Sequence[int] = (0,)
    """Machine per rank, named by the lowest rank there."""
    local_gpus: Sequence[str | None] = (None,)
    """PCI bus addresses of GPUs used by ranks on this machine. None: unknown."""
    _user: weakref.ref[object] | None = None  # weak: a forgotten engine does not block the next one

    def claim(self, user: object) -> None:
        """Reserve this communicator for `user` until `release`. Two users would interleave their collectives in any
        order.

        Raises:
            ConfigError: another user is alive and has not released the communicator.
        """
        if self.size > 1 and self._user is not None and self._user() is not None:  # one rank has no order to mix up
            raise ConfigError(
                "this comm is in use by an engine that is still open, and two engines would mix up their exchanges: "
                "close that engine first, or pass another comm from open_comm()."
            )
        self._user = weakref.ref(user)

    def release(self) -> None:
        """End the reservation by `claim`."""
        self._user = None

    @property
    def num_machines(self) -> int:
        """Number of machines, if all have equally many ranks; otherwise 1."""
        counts = Counter(self.machines)
        if len(set(counts.values())) == 1:
            return len(counts)
        return 1  # exchanges between machines pair the ranks at one place

    @property
    def most_local(self) -> int:
        """Number of ranks on the machine with the most ranks. All ranks have one plan, which must fit there too."""
        return max(Counter(self.world.machines).values())

    @property
    def num_far(self) -> int:
        """Number of ranks on other machines."""
        return sum(machine != self.machines[self.rank] for machine in self.machines)

    @property
    def world(self) -> Comm:
        """Communicator of all ranks that make the same calls, also of those with other parts of the model."""
        return self

    def squares_of_model(self, squares: Mapping[Any, float]) -> Iterable[float]:
        """Return the squared gradients of the model, given those by `Piece` in this communicator. Collective."""
        return squares.values()

    def folder_of(self, path: str | Path, *, of_model: bool = False) -> Path:  # noqa: ARG002
        """Return the folder for a checkpoint at `path`, or `of_model` for a model. Raises ConfigError for none."""
        return as_folder(path)

    def split(self, num_replicas: int) -> tuple[Comm, Comm]:
        """Return two communicators: for the ranks in this replica, and for the ranks at the same position in every
        replica.

        Ranks on one machine, then neighbours, form a replica. Each communicator has an independent call order. Both
        close with this one. Collective on the first call. Raises ConfigError if the ranks do not form `num_replicas`
        equal replicas.
        """
        if self.size % num_replicas:
            fitting = ", ".join(str(n) for n in range(1, self.size + 1) if self.size % n == 0)
            raise ConfigError(
                f"offload.replicas is {num_replicas}, but {self.size} ranks cannot be divided into that many equal "
                f"replicas: set --offload.replicas to one of {fitting}, or to auto."
            )
        if num_replicas == 1:
            return (self, Comm())
        return self._split(num_replicas)

    def _split(self, num_replicas: int) -> tuple[Comm, Comm]:  # noqa: ARG002
        return self, self

    def neighbours(self, num: int) -> Comm:
        """Return a communicator for a group of `num` neighbour ranks on one machine.

        The group has an independent call order and closes with this communicator. Collective on the first call. Raises
        ConfigError if a machine has no whole number of groups.
        """
        self.group_of(num)
        if num == 1:
            return Comm()
        return self._neighbours(num)

    def _neighbours(self, num: int) -> Comm:  # noqa: ARG002
        return self

    def group_of(self, num: int) -> tuple[int, int]:
        """Return the index of this rank's group with `num` neighbours, and the rank within the group. Raises
        ConfigError like `neighbours`.
        """
        counts = set(Counter(self.machines).values())
        if any(count % num for count in counts):
            num_local = min(counts)
            fitting = ", ".join(str(n) for n in range(1, num_local + 1) if all(count % n == 0 for count in counts))
            raise ConfigError(
                f"train.sequence_parallel is {num}, but a machine has {num_local} ranks, which is no multiple of "
                f"{num}: set --train.sequence_parallel to one of {fitting}, or change the number of ranks with "
                "--gpus or --nproc-per-node."
            )
        groups, _ = self._places(self.size // num)
        return next((number, group.index(self.rank)) for number, group in enumerate(groups) if self.rank in group)

    def _places(self, num_replicas: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the ranks in each replica, and the ranks at each position over all replicas."""
        # Ranks on one machine are neighbours, so the exchanges of a replica stay there as far as possible.
        order = sorted(range(self.size), key=lambda rank: (self.machines[rank], rank))
        num = self.size // num_replicas
        replicas = [order[begin : begin + num] for begin in range(0, self.size, num)]
        return replicas, [list(peers) for peers in zip(*replicas, strict=True)]

    @property
    def is_alive(self) -> bool:
        """False after the caller has destroyed all process groups."""
        return True

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, operation: str) -> None:
        """Fill full [size * n] with all ranks' shards [n], in rank order. shard may be a view of full, in place."""
        _check(full, shard, 1, operation)
        _place(full, shard)

    def reduce_scatter(
        self,
        shard: torch.Tensor,
        full: torch.Tensor,
        operation: str,
        scratch: torch.Tensor,  # noqa: ARG002
        coding: Coding | None = None,  # noqa: ARG002
    ) -> None:
        """Fill shard [n] with this rank's part of the sum over full [size * n] on all ranks.

        The sum runs in rank order in fp32 (fp64 if full is fp64), and is rounded once, to the shard dtype. shard may be
        a view of full, in place. scratch: flat uint8 on the device; more scratch means fewer chunks. coding: quantizes
        terms from other ranks; n is a multiple of its block.
        """
        _check(full, shard, 1, operation)
        _place(shard, full)

    def all_to_all(self, received: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor], operation: str) -> None:  # noqa: ARG002
        """Send pieces[r] to each rank r, and receive rank r's piece for this rank in received[r]. All are flat tensors
        [n] with one dtype, one per rank.
        """
        for to, piece in zip(received, pieces, strict=True):
            _place(to, piece)

    def sum_in_order(self, values: Any, operation: str) -> Any:  # noqa: ARG002
        """Return the float64 sum over ranks, in rank order. A number list gives a list, equal on all ranks; a flat
        float64 device tensor gives a new tensor.
        """
        if isinstance(values, torch.Tensor):
            return values.clone()
        return [float(value) for value in values]

    def broadcast(self, flat: torch.Tensor, source: int, operation: str) -> None:
        """Fill a flat tensor with any dtype, on host or device, with the data from rank `source`."""

    def gather_objects(self, value: _Value, operation: str) -> list[_Value]:  # noqa: ARG002
        """Return all ranks' values, in rank order. Pickled: for small host objects."""
        return [value]

    def from_rank(self, source: int, value: _Value, operation: str) -> _Value:
        """Return the value on rank `source`, on all ranks."""
        return self.gather_objects(value, operation)[source]

    def agree(self, name: str, value: Any) -> None:
        """Check that `value` (dicts, lists, numbers, strings, bytes) is equal on all ranks.

        Raises:
            ConfigError: on all ranks, if a value differs. The message names ranks and dictionary keys.
        """

    def any(self, flag: bool, operation: str) -> bool:  # noqa: ARG002
        """Return True on all ranks if `flag` is true on any rank."""
        return flag

    def barrier(self, operation: str) -> None:
        """Return after all ranks have arrived."""

    @contextmanager
    def turn(self, operation: str) -> Iterator[None]:
        """Context that the ranks enter one after another, in rank order. Contains no collectives. Collective."""
        for rank in range(self.size):
            if rank == self.rank:
                yield
            self.barrier(f"{operation} on rank {rank}")

    def on_lost(self, listener: Callable[[RankLostError], None]) -> None:
        """Register `listener`, called by a watchdog thread after the loss of a rank to wake waiting threads. The
        process ends soon afterwards in any case.
        """

    def close(self, error: BaseException | None = None) -> None:
        """Leave the other ranks. With an error the other ranks end too, and report this error."""

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        self.close(error)


Groups = Sequence[Sequence[int]] | None
"""Disjoint rank lists, one per process group. None: one group with all ranks."""


def pieces_of(full: torch.Tensor, size: int) -> list[torch.Tensor]:
    return list(full.view(size, -1))


def _place(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` to `target`, unless both are the same memory."""
    if target.data_ptr() != source.data_ptr() or target.dtype != source.dtype:
        target.copy_(source)


def _check(full: torch.Tensor, shard: torch.Tensor, size: int, operation: str) -> None:
    if full.dim() != 1 or shard.dim() != 1 or full.numel() != size * shard.numel():
        shapes = f"full {tuple(full.shape)}, shard {tuple(shard.shape)}"
        raise ValueError(
            f"{operation}: {shapes}; both must be flat, and full must have {size} times the elements of shard."
        )
    if not full.is_contiguous() or not shard.is_contiguous() or full.device != shard.device:
        raise ValueError(f"{operation}: full and shard must be contiguous, on one device.")


def digest(value: Any) -> int:
    """Hash `value` (dicts, lists, numbers, strings, bytes) to a signed 64-bit number."""
    data = value
    if not isinstance(value, bytes):
        data = json.dumps(value, sort_keys=True, default=repr).encode()
    return xxhash.xxh64_intdigest(data) - (1 << 63)  # in the range of int64, to travel in a tensor
