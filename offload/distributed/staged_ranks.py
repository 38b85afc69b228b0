"""Exchanges of an accelerator for which torch has no backend of its own: over gloo, by way of the host."""

from __future__ import annotations

from typing import Any

import torch

from offload.accelerators import open_accelerator
from offload.distributed.comm import Ranks


class StagedRanks(Ranks):
    """Several ranks, each on an accelerator. The host waits for what it brings down, and for what it takes up."""

    def _open_device(self) -> None:
        self._accelerator = open_accelerator(self.device)
        self._accelerator.enter()

    def _enter(self) -> None:
        self._accelerator.enter()

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, what: str) -> None:
        host = _on_host(full)
        super().all_gather(host, shard.cpu(), what)
        _take_up(full, host)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, what: str, scratch: torch.Tensor) -> None:
        host = _on_host(shard)
        super().reduce_scatter(host, full.cpu(), what, _on_host(scratch))
        _take_up(shard, host)

    def sum_in_order(self, values: Any, what: str) -> Any:
        if not isinstance(values, torch.Tensor):
            return super().sum_in_order(values, what)
        return super().sum_in_order(values.cpu(), what).to(values.device)

    def broadcast(self, flat: torch.Tensor, source: int, what: str) -> None:
        self._accelerator.current_stream().synchronize()  # copies that it comes after may still use the host's memory
        host = flat.cpu()
        super().broadcast(host, source, what)
        _take_up(flat, host)


def _on_host(flat: torch.Tensor) -> torch.Tensor:
    """Return room for a tensor on the host: itself, if it is there."""
    return flat if flat.is_cpu else torch.empty_like(flat, device="cpu")


def _take_up(flat: torch.Tensor, host: torch.Tensor) -> None:
    if flat is not host:
        flat.copy_(host)
