"""Attention of each rank over whole rows of the batch. A subclass shares rows between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from offload.distributed.comm import Comm
from offload.doors import Door
from offload.engine.units.stages import Host
from offload.tiers.counters import Counters

Batch = Mapping[str, Any]
Copy = Callable[[torch.Tensor], torch.Tensor]


class SharedRows(Protocol):
    """Information about shared rows beyond this rank's tokens."""

    @property
    def targets(self) -> torch.Tensor:
        """Next label for each token on this rank, int64 [rows, own tokens]."""
        ...

    @property
    def needs_mask(self) -> bool:
        """True if a token may not attend to all earlier tokens."""
        ...


class BaseModelHead(Protocol):
    """The head of a model."""

    def base_output(self, run: Callable[[], Any]) -> Any:
        """Run the model and return the base model output; the head does not run."""
        ...


class Attention:
    """Each rank has whole rows. Base class of all objects behind the door `ATTENTIONS`."""

    size = 1
    """Number of ranks with the same rows (`train.sequence_parallel`)."""

    @classmethod
    def open(cls, model: nn.Module, size: int, comm: Comm, counters: Counters) -> Attention:  # noqa: ARG003
        """Return the attention for groups of `size` ranks. Collective. Raises ConfigError."""
        return cls()

    @staticmethod
    def check_model(model: nn.Module, size: int) -> None:
        """Raise ConfigError if `size` ranks cannot share rows in this model, as far as the config shows."""

    def divert(self) -> None:
        """Redirect attention calls to this object."""

    def undo(self) -> None:
        """Restore the original attention."""

    def begin_pass(self, needs_mask: bool) -> None:
        """Start a pass.

        `needs_mask`: on some rank, tokens may not attend to all earlier tokens. All ranks then build masks, so unit
        arguments have equal structure on all ranks.
        """

    def share(self, batch: Batch, loss_fn: object) -> tuple[Batch, SharedRows | None]:  # noqa: ARG002
        """Return this rank's part of a batch, and the shared row information. Collective. Raises ConfigError."""
        return batch, None

    @contextmanager
    def over(
        self,
        shared: SharedRows | None,  # noqa: ARG002
        batch: Batch,
        copy_to_device: Copy,  # noqa: ARG002
    ) -> Iterator[tuple[Batch, Batch]]:
        """Let attention cover all tokens of shared rows during the context.

        Yield (model batch, head batch with shifted labels). `copy_to_device` copies a tensor to the device.
        """
        yield batch, batch

    def check(self, host: Host, head: BaseModelHead | None, shared: SharedRows | None) -> bool:  # noqa: ARG002
        """Compare shared with whole rows in a trial. True after a trial.

        `head`: None if the loss is not computed from hidden states. Collective. Raises ConfigError on all ranks for a
        difference.
        """
        return False

    def refuse_own_loop(self) -> None:
        """Raise ConfigError if rows are shared: a user training loop cannot call the model then."""


ATTENTIONS: Door[type[Attention]] = Door("attention", {"whole": Attention})


def attention_for(size: int) -> type[Attention]:
    """Return the attention class for groups of `size` ranks with the same rows."""
    if size == 1:
        return ATTENTIONS["whole"]
    return ATTENTIONS["shared"]
