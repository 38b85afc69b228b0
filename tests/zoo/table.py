"""Writes docs/families.md: what training each family, streamed, gave against plain PyTorch.

Run `python tests/zoo/table.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from offload.errors import ConfigError  # noqa: E402
from tests.zoo.compare import STEPS, Outcome, examine  # noqa: E402
from tests.zoo.families import OPEN, Family, families  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
HEADER = """# Families

Every class that transformers {transformers} registers for causal language modelling, {total} in all, shrunk to a
tiny model and trained against plain PyTorch {torch} on a CPU: the same weights, batches and random numbers, dropout
where the family has it. Embedding, blocks and head stream, and every unit recomputes in the backward pass. `fp32` is
{fp32} steps and the loss in eval mode, `bf16` is {bf16} step with fp32 master weights. Bit-equal means equal in every
bit of the losses, the norm, every gradient and every weight. Written by `python tests/zoo/table.py`; `make test-zoo`
checks it.

{summary}

A difference is that of the gradients, as a share of the largest one in the unit. *Sums*: a tensor enters a layer in
several places; PyTorch adds its gradients up in the order of the whole graph, a streamed layer adds up its own first.
Such a family is bit-equal to a plain run that sums layer by layer.

*Resident* is the share of the parameters that stay on the device: final norms and the like, and what other modules
read (*read from outside*). In a tiny model it is larger than in a real one. *Stays fp32*: transformers keeps these in
fp32, and so do we.

| family | class | resident | fp32 | bf16 | notes |
|---|---|---:|---|---|---|
"""


def main() -> None:
    """Examine every family and write the page."""
    torch.set_num_threads(1)
    rows, equal, built = [], {"fp32": 0, "bf16": 0}, 0
    for family in families().values():
        if family.unbuildable:
            rows.append((family.name, f"`{family.class_name}`", "", "", "", f"not built: {family.unbuildable}"))
            continue
        built += 1
        outcomes = {precision: run(family, precision) for precision in STEPS}
        for precision, outcome in outcomes.items():
            equal[precision] += isinstance(outcome, Outcome) and outcome.is_equal
        rows.append(describe(family, outcomes))
        print(" | ".join(rows[-1]), flush=True)
    summary = (
        f"{len(rows)} classes, {built} of them built here. Equal in fp32: {equal['fp32']}, in bf16: {equal['bf16']}; "
        "the rows of the others say why."
    )
    text = HEADER.format(
        transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        total=len(rows),
        summary=summary,
        **STEPS,
    )
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text + "".join(f"| {' | '.join(row)} |\n" for row in sorted(rows)), encoding="utf-8")


def run(family: Family, precision: str) -> Outcome | str:
    """Return what was found, or why nothing was."""
    try:
        return examine(family, precision)
    except ConfigError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"


def describe(family: Family, outcomes: dict[str, Outcome | str]) -> tuple[str, ...]:
    """Return a row of the table."""
    cells, notes, resident = [], [], ""
    for outcome in outcomes.values():
        if isinstance(outcome, str):
            kind, text = outcome.split(": ", 1)
            cells.append(kind)
            notes.append(OPEN.get(family.name) or " ".join(text.replace("|", "/").split())[:200])
            continue
        resident = f"{outcome.resident_parameters / outcome.num_parameters:.1%}"
        difference = outcome.differences.get("gradient", 0.0)
        cells.append("bit-equal" if outcome.is_equal else f"{difference:.0e}{', sums' if outcome.why else ''}")
        if not outcome.is_equal and not outcome.why:
            notes.append(OPEN.get(family.name, "not explained"))
        notes += [f"{text.split()[1]} is read from outside" for text in outcome.reported]
        if outcome.kept_fp32:
            kept = {name.rsplit(".", 2)[-2] for name in outcome.kept_fp32}
            notes.append(f"stays fp32: {', '.join(sorted(kept))}")
        if outcome.is_made_in_bf16:
            notes.append("bf16 needs a model made in bf16: its buffers must be")
    return family.name, f"`{family.class_name}`", resident, *cells, "; ".join(dict.fromkeys(notes))


if __name__ == "__main__":
    main()
