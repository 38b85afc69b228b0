"""Parking: an engine between two steps without memory on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.distributed.outcomes import share_failure
from offload.engine.loss.batch_agreement import RankBatch, agree_on_pass
from offload.engine.state import EngineState
from offload.engine.steps import Steps
from offload.errors import DoesNotFitError, format_bytes
from offload.machine.limits import memory
from offload.tiers.blocks import as_bytes, drop_caches
from offload.tiers.host import Arena

_PARKED = "parked states"


class Parking:
    """Gives the memory of the device back, and takes it again. States of the device wait in host memory.

    No owner of device memory knows of it: the tensors stay, and the device takes the memory from under them. Weights
    are copies of states, and everything else on the device has a meaning within a step alone.
    """

    def __init__(self, state: EngineState, steps: Steps) -> None:
        self._flow = state.flow
        self._memory = state.memory
        self._steps = steps
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Each block of states on the device, flat, with its copy in host memory."""

    def park(self) -> None:
        """Give the memory back. All updates are done. Collective; without effect on a parked engine.

        Raises DoesNotFitError if host memory has no room for the states of the device. After any error all ranks are as
        before.
        """
        flow, recovery = self._flow, self._flow.recovery
        if recovery.is_parked:
            return
        with recovery.working():
            try:
                with share_failure(flow.comm, "park"):
                    self._copies = self._copy_states()
                    self._move_states(self._copies)
                    flow.move_buffers(torch.device("cpu"))
            except BaseException:
                self._return_states()
                flow.move_buffers(flow.device.torch_device)
                raise
            # All ranks go on, so none may fail: the rest only forgets and frees.
            flow.runner.reset()
            flow.spare_memory.give_back()
            flow.executor.reset(keep_orders=True)
            flow.slots.park()
            self._steps.foreign_writes.forget()
            flow.show_placeholders()
            drop_caches()
            flow.lanes.finish()
            flow.device.park()
            recovery.is_parked = True

    def _copy_states(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (block, copy in host memory) for all blocks of the device with states."""
        host = self._memory.host
        present = {block._cdata for block in self._flow.device.blocks.present()}
        blocks = {}
        for arrays, name in self._memory.store.places():
            block = arrays[name].untyped_storage()
            if block._cdata in present:
                blocks[block._cdata] = as_bytes(block)
        num_bytes = sum(block.nbytes for block in blocks.values())
        free = memory()["available_bytes"] // self._flow.comm.world.local_size
        if num_bytes > free:
            raise DoesNotFitError(
                f"engine.park() moves {format_bytes(num_bytes)} of states from the device to host memory, and "
                f"{format_bytes(free)} are free for each rank.",
                "Set --offload.optimizer nvme or cpu, which keeps fewer states on the device.",
            )
        host.reserve(_PARKED, num_bytes)
        arena = Arena(num_bytes)
        copies = [(block, arena.take(block.nbytes, torch.uint8)) for block in blocks.values()]
        for block, copy in copies:
            copy.copy_(block)
        return copies

    def resume(self) -> None:
        """Take the memory again. Collective; without effect on an engine that is not parked.

        Raises DoesNotFitError if another program has taken the memory. After any error all ranks stay parked.
        """
        flow, recovery = self._flow, self._flow.recovery
        agree_on_pass(flow.comm, RankBatch("resume"))
        if not recovery.is_parked:
            return
        with recovery.working():
            try:
                with share_failure(flow.comm, "resume"):
                    self._take_memory()
            except BaseException:
                flow.move_buffers(torch.device("cpu"))
                flow.device.park()
                raise
            self._return_states()
            recovery.is_parked = False
            flow.slots.resume()
            flow.show_weights()
            self._steps.foreign_writes.note()

    def _take_memory(self) -> None:
        flow = self._flow
        try:
            flow.device.resume()
            for block, copy in self._copies:
                block.copy_(copy)
            flow.move_buffers(flow.device.torch_device)
            flow.device.wait()  # lanes read the states in other streams
        except torch.OutOfMemoryError as error:
            raise DoesNotFitError(
                f"engine.resume() found the memory of the device taken, so the engine stays parked: {error}",
                "Free the memory that others hold there, and call engine.resume() again.",
            ) from error

    def _return_states(self) -> None:
        """Let the store find its states on the device again. Frees the copies."""
        self._move_states((copy, block) for block, copy in self._copies)
        self._copies = []
        self._memory.host.drop(_PARKED)

    def _move_states(self, moved: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Let the store find its states in other blocks. `moved`: (old, new)."""
        targets = {old.untyped_storage()._cdata: new for old, new in moved}
        for arrays, name in list(self._memory.store.places()):
            array = arrays[name]
            target = targets.get(array.untyped_storage()._cdata)
            if target is not None:
                view = torch.empty(0, dtype=array.dtype, device=target.device)
                view.set_(target.untyped_storage(), array.storage_offset(), array.shape, array.stride())
                arrays[name] = view
