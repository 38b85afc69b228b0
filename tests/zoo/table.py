"""Write docs/families.md: streamed training against plain PyTorch for each family.

Run `python tests/zoo/table.py`.
"""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from offload import Engine  # noqa: E402
from offload.engine.units.unit import Unit  # noqa: E402
from offload.errors import ConfigError  # noqa: E402
from tests.engine.inside import parts_of, steps_of  # noqa: E402
from tests.zoo.families import (  # noqa: E402
    CALLED_AGAIN,
    MADE_IN_BF16,
    OPEN,
    ROUNDING,
    SUMMED_BY_LAYER,
    UNBUILDABLE,
    Family,
    families,
)
from tests.zoo.test_isolation import why_not  # noqa: E402
from tests.zoo.test_zoo import ALWAYS, MICRO, NEVER, FamilySetting, sizes_of, trained  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
HEADER = """# Families

Every class that transformers {transformers} registers for causal language modelling, {total} in all, shrunk to a
tiny model and trained against plain PyTorch {torch} on a CPU: the same weights, batches and random numbers, dropout
where the family has it. Embedding, blocks and head stream. A run has two steps and an evaluation; `bf16` has fp32
master weights. Bit-equal means equal in every bit of the losses, the norm and every weight. Written by
`python tests/zoo/table.py`; `pytest tests/zoo` checks it.

{summary}

- *fp32, bf16*: every unit recomputes in the backward pass (`recompute: always`). *Kept*: every unit that can keeps its
  graph instead (`never`).
- *Sums*: a tensor enters a layer in several places; PyTorch adds its gradients up in the order of the whole graph, a
  streamed layer adds up its own first. Such a family is bit-equal to a plain run that sums layer by layer. In bf16
  also: a layer is called again; PyTorch adds its gradients up in bf16, an engine in fp32.
- *Parts*: micro-batches of 1, 2 and 3 of 4 rows, fp32, against plain PyTorch in the same micro-batches. Equal means
  that losses, norms and weights differ by at most {rounding:.0e} of their size. Dropout is off, since its masks depend
  on the micro-batch. Plain PyTorch makes the loss of every micro-batch and weights it, a streamed model makes that of
  the whole batch: so last bits differ. *By calls*: a unit cannot take the batch in parts, and the model is called once
  for every micro-batch.
- *Resident* is the share of the parameters that stay on the device: final norms and the like, and what other modules
  read (*read from outside*). In a tiny model it is larger than in a real one. *Stays fp32*: transformers keeps these in
  fp32, and so do we.

| family | class | resident | fp32 | bf16 | kept fp32 | kept bf16 | parts | notes |
|---|---|---:|---|---|---|---|---|---|
"""
ISOLATION = """## Documents in one row

Rows that hold several documents (`data.packing_isolated`) give each of them positions from 0. Of {total} families
{apart} keep such documents apart: a document's logits do not change with the documents before it, and they are those of
the document alone. The others mix them: layers with a state or a convolution over the row, positions that the model
makes itself, and classes whose mask is made without the positions (gpt-oss among them).

"""
CALM = "without dropout, with which it seeds the generators from the clock"
RUNS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "fp32": ("fp32", ALWAYS),
    "bf16": ("bf16", ALWAYS),
    "kept fp32": ("fp32", NEVER),
    "kept bf16": ("bf16", NEVER),
}


class Row:
    """A row of the page, from runs of a family. notes: in order, each once."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.resident = ""
        self.notes = dict.fromkeys([CALM] * family.is_random)
        self.whole = [self.run(*way) for way in RUNS.values()]
        self.parts = {self.run("fp32", settings) for settings in MICRO}

    @property
    def cells(self) -> tuple[str, ...]:
        parts = ", ".join(sorted(self.parts))
        return self.family.name, f"`{self.family.class_name}`", self.resident, *self.whole, parts, "; ".join(self.notes)

    def run(self, precision: str, settings: Mapping[str, Any]) -> str:
        """Return the result of a run in few words."""
        try:
            with trained(FamilySetting(self.family.name, "cpu", precision, "deferred", Path(), settings)) as told:
                by_calls = self._look(precision, *told)
        except Exception as error:
            text = OPEN.get(self.family.name, f"{type(error).__name__}: {error}")
            self.notes[" ".join(text.replace("|", "/").split())[:200]] = None
            return "refused" if isinstance(error, ConfigError) else "differs"
        if "micro_batch_size" in settings:
            return "by calls" if by_calls else "equal"
        is_again = precision == "bf16" and self.family.name in CALLED_AGAIN
        return "sums" if is_again or self.family.name in SUMMED_BY_LAYER else "bit-equal"

    def _look(self, precision: str, engine: Engine, reported: list[str]) -> bool:
        """Note what an engine tells. Return whether it calls the model on one micro-batch after another."""
        parts, sizes = parts_of(engine), sizes_of(engine)
        stay = sum(sizes[unit.name] for unit in parts.units if unit.resident)
        self.resident = f"{stay / sum(info.numel for info in parts.infos):.1%}"
        self.notes |= {f"{text.split()[1]} is read from outside": None for text in reported}
        if precision == "bf16":
            kept = {info.name.rsplit(".", 2)[-2] for info in parts.infos if info.compute == "fp32"}
            if kept:
                self.notes[f"stays fp32: {', '.join(sorted(kept))}"] = None
            if self.family.name in MADE_IN_BF16:
                self.notes["bf16 needs a model made in bf16: its buffers must be"] = None
        unsplit = [unit for unit in parts.units if unit.traits.is_compared and not unit.resident]
        unsplit = [unit for unit in unsplit if not unit.traits.splits and not steps_of(engine).splits]
        self.notes |= {f"by calls: {unit.name} {why_not_split(unit)}": None for unit in unsplit}
        return bool(unsplit)


def why_not_split(unit: Unit) -> str:
    if unit.traits.mutated:
        return "changes an input in place"
    if not all(unit.traits.outputs):
        return "its result has no batch axis"
    return "mixes rows, or differs from use to use"


def main() -> None:
    """Train every family in every way and write the page."""
    torch.set_num_threads(1)
    rows, counted = [], Counter[str]()
    for family in families().values():
        if family.name in UNBUILDABLE:
            rows.append((family.name, f"`{family.class_name}`", *[""] * 6, f"not built: {UNBUILDABLE[family.name]}"))
            continue
        row = Row(family)
        rows.append(row.cells)
        counted.update(name for name, cell in zip(RUNS, row.whole, strict=True) if cell == "bit-equal")
        counted.update(
            {"built": 1, "in parts": row.parts <= {"equal", "by calls"}, "by calls": "by calls" in row.parts}
        )
        print(" | ".join(rows[-1]), flush=True)
    equal = ", ".join(f"{name} {counted[name]}" for name in RUNS)
    summary = (
        f"{len(rows)} classes, {counted['built']} of them built here. Bit-equal: {equal}. Equal in parts, up to the "
        f"order of sums: {counted['in parts']}; {counted['by calls']} of them by calls. The rows of the others say why."
    )
    text = HEADER.format(
        transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        total=len(rows),
        rounding=ROUNDING,
        summary="\n".join(textwrap.wrap(summary, 119)),
    )
    table = "".join(f"| {' | '.join(row)} |\n" for row in sorted(rows))
    PAGE.write_text(f"{text}{table}\n{told_isolation()}", encoding="utf-8")


def told_isolation() -> str:
    """Return the section about several documents in one row."""
    found = {family.name: why_not(family.name) for family in families().values() if family.name not in UNBUILDABLE}
    mixed = ", ".join(sorted(name for name, why in found.items() if why))
    text = ISOLATION.format(total=len(found), apart=sum(not why for why in found.values()))
    return f"{text}{chr(10).join(textwrap.wrap(f'Not apart: {mixed}.', 119))}\n"


if __name__ == "__main__":
    main()
