"""Engine calls about the optimizer states of single parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from offload.engine.own_loop import OwnLoop
from offload.engine.recovery import Recovery
from offload.engine.state import EngineState
from offload.errors import ConfigError
from offload.layout.regions import ParameterInfo
from offload.telemetry.counters import Counters


class MomentAccess:
    """Engine calls that read, write and clear moments. Each call waits until all earlier updates are done."""

    counters: Counters
    _state: EngineState
    _recovery: Recovery
    _own_loop: OwnLoop

    def _settle(self, operation: str) -> None:
        """Wait for all pending updates before the host reads the states. Collective."""
        raise NotImplementedError

    def _infos_of(self, call: str, names: Iterable[str] | None) -> list[ParameterInfo]:
        """Return parameters by name; None: all. Raises ConfigError for an unknown name."""
        raise NotImplementedError

    @property
    def moments_bytes(self) -> int:
        """Bytes of all moments as `named_moments` yields them."""
        values = self._state.store.values
        return sum(values.moments_bytes(info.index) for info in self._state.infos if info.trainable)

    def named_moments(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield (name, optimizer state) for each trainable parameter, in the format of torch's optimizers: `step`, the
        number of updates as a 0-dim fp32 tensor, and new fp32 CPU copies of the moments, such as `exp_avg`, in the
        parameter's shape (`row_var` and `col_var` with a last, or next to last, dimension of 1). Empty before the first
        update of a parameter.

        names: parameter names, as in `named_parameters`; None: all. Raises ConfigError over several ranks, and for
        moments that are not fp32: `save_checkpoint` writes those.
        """
        wanted = [info for info in self._infos_of("engine.named_moments", names) if info.trainable]
        self._check_moments("read")
        self._settle("named_moments")
        for info in wanted:
            with self._recovery.working(), self.counters.unchanged():
                num_steps, found = self._state.store.values.read_moments(info.index)
            state = {"step": torch.tensor(float(num_steps))} | found
            yield info.name, state if num_steps else {}

    def load_moments(self, moments: Mapping[str, Mapping[str, torch.Tensor | float | None]]) -> None:
        """Set the optimizer states of parameters by name, as `named_moments` yields them or a torch optimizer has them.
        An empty state begins anew. A state without `step` (torch's SGD) counts as one update.

        Raises ConfigError, before the first write, for an unknown name, missing, unknown or misshapen moments, over
        several ranks, and for moments that are not fp32.
        """
        infos = self._infos_of("engine.load_moments", moments)
        self._own_loop.refuse_middle("engine.load_moments")
        self._check_moments("written")
        given: list[tuple[ParameterInfo, int, dict[str, torch.Tensor]]] = []
        for info in infos:
            num_steps = int(moments[info.name].get("step", 1) or 0) if moments[info.name] else 0
            its = {k: v for k, v in moments[info.name].items() if isinstance(v, torch.Tensor) and k != "step"}
            wanted = self._state.store.values.moment_shapes(info.index)
            found = {key: tuple(value.shape) for key, value in its.items()}
            if moments[info.name] and found != wanted:
                raise ConfigError(
                    f"the optimizer state of {info.name} has {_shown(found)}, and {self._state.rules[info.rule].title} "
                    f"has {_shown(wanted)}: give the rule with which the state was made, or begin without a state."
                )
            given.append((info, num_steps, its))
        self._settle("load_moments")
        with self._recovery.working(), self.counters.unchanged():
            for info, num_steps, its in given:
                self._state.store.values.write_moments(info.index, num_steps, its)
            self._state.lanes.drain_updates()

    def prune_moments(self, names: Iterable[str], share: float) -> None:
        """Set the smallest elements of the optimizer state to zero, in each array separately. ReLoRA, arXiv:2307.05695,
        section 3, uses shares of 0.99 and 0.999. Step counts stay unchanged. Collective, with equal arguments on all
        ranks.

        names: parameter names, as in `named_parameters`. share: fraction to clear, 0 to 1; 1 clears all. Raises
        ConfigError for an unknown name, and for a share below 1 with int8 moments.
        """
        wanted = self._infos_of("engine.prune_moments", names)
        self._own_loop.refuse_middle("engine.prune_moments")
        self._settle(f"prune_moments({share})")
        with self._recovery.working(), self.counters.unchanged():
            for info in wanted:
                self._state.store.values.prune_moments(info.index, share)
            self._state.lanes.drain_updates()

    def _check_moments(self, how: str) -> None:
        """Raise ConfigError where moments cannot be read or written by parameter."""
        size, title = self._state.comm.size, self._state.rules[0].title
        narrow = any(
            plane.dtype != torch.float32
            for info in self._state.infos
            if info.trainable
            for plane in self._state.store.values.moment_planes(info.index)
        )
        if size > 1 or narrow:
            why = f"divided over {size} ranks" if size > 1 else f"not fp32 ({title})"
            raise ConfigError(
                f"the optimizer states were to be {how} by parameter, and are {why}: optimizer.save(folder) and "
                "optimizer.load(folder), or engine.save_checkpoint and engine.load_checkpoint, write and read them."
            )


def _shown(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items()) or "no moments"
