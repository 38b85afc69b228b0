"""Pass settings, and simpler alternatives to be tried if results differ from plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

_DESCRIPTIONS = {
    ("cut", "calls"): "the model is called once per micro-batch",
    ("cut", "whole"): "batches are not split, despite micro_batch_size or passes (see Engine(rows=...))",
    ("chunks", False): "all logits are computed at once, despite head_chunk_bytes",
    ("recomputes", False): "autograd graphs are saved instead of recomputed where possible (recompute: never)",
    ("interleaves", False): "the two forwards of a MeZO step run one after the other",
}


@dataclass
class ExecutionMode:
    """How units run in all passes after the recording: micro-batches by unit, logits in chunks, and so on.

    An option ends where the equivalence check finds other results than in plain PyTorch.
    """

    cut: str = "units"
    """Micro-batch cutting.

    "units": each unit cuts the batch. "calls": the model is called once per micro-batch. "whole": no cutting.
    """
    chunks: bool = True
    """True if a head may compute logits in chunks."""
    recomputes: bool = True
    """True if a unit forward may run again in the backward."""
    interleaves: bool = True
    """True if forwards on both sides of the weights run interleaved."""

    def adopt(self, other: ExecutionMode) -> None:
        """Take over all settings of `other`."""
        self.change(**vars(other))

    def change(self, **changes: Any) -> None:
        """Change some settings."""
        vars(self).update(changes)

    def plainer_modes(
        self, *, cuts: bool = False, chunks: bool = False, recomputes: bool = False, interleaves: bool = False
    ) -> Iterator[ExecutionMode]:
        """Yield simpler settings, smallest change first, last the simplest combination.

        The arguments say which features the pass uses.
        """
        changes: list[dict[str, Any]] = []
        if cuts:
            changes += [{"cut": cut} for cut in {"units": ("calls", "whole"), "calls": ("whole",)}.get(self.cut, ())]
        for name, is_used in (("chunks", chunks), ("recomputes", recomputes), ("interleaves", interleaves)):
            if is_used and getattr(self, name):
                changes.append({name: False})
        for change in changes:
            yield replace(self, **change)
        if len(changes) > 1:
            yield replace(self, **{name: value for change in changes for name, value in change.items()})

    def describe_changes(self, before: ExecutionMode) -> str:
        """Return the changed settings as text."""
        return " and ".join(_DESCRIPTIONS[item] for item in asdict(self).items() if item not in asdict(before).items())
