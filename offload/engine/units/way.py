"""The way in which an engine makes passes, where it is not the plain one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

_TEXTS = {
    ("cut", "calls"): "the model is called on one micro-batch after the other",
    ("cut", "whole"): "batches stay whole, whatever micro_batch_size says (Engine(rows=...) tells what has rows)",
    ("chunks", False): "the logits are made whole, whatever head_chunk_bytes says",
    ("recomputes", False): "graphs are kept instead of recomputed, where they can be (recompute: never)",
    ("interleaves", False): "the passes on both sides of the weights run one after the other",
}


@dataclass
class Way:
    """How passes are made from now on. What is not the plain way is given up where the judge finds that it matters."""

    cut: str = "units"
    """Who cuts a batch in micro-batches: each of the "units"; or the model is called on one after the other ("calls");
    or the batch stays "whole".
    """
    chunks: bool = True
    """True if a head may make its logits in chunks."""
    recomputes: bool = True
    """True if the forward of a unit may run again in the backward."""
    interleaves: bool = True
    """True if forwards on both sides of the weights run side by side."""

    def become(self, other: Way) -> None:
        """Make passes like that from now on."""
        self.change(**vars(other))

    def change(self, **changes: Any) -> None:
        """Make passes with these changes from now on."""
        vars(self).update(changes)

    def plainer(
        self, *, cuts: bool = False, chunks: bool = False, recomputes: bool = False, interleaves: bool = False
    ) -> Iterator[Way]:
        """Yield plainer ways, those that change least first, of passes that are cut, have chunks, and so on. The last
        one is the plainest.
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

    def changes(self, before: Way) -> str:
        """Return what is otherwise than before, for people."""
        return " and ".join(_TEXTS[item] for item in asdict(self).items() if item not in asdict(before).items())
