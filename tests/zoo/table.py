"""Write docs/families.md: streamed training against plain PyTorch for each family.

Run `python tests/zoo/table.py`.
"""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from offload.errors import ConfigError  # noqa: E402
from tests.zoo.compare import ALWAYS, MICRO, NEVER, STEPS, Mode, Outcome, examine  # noqa: E402
from tests.zoo.families import OPEN, ROWS, Family, families  # noqa: E402
from tests.zoo.isolation import why_not  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
HEADER = """# Families

Every class that transformers {transformers} registers for causal language modelling, {total} in all, shrunk to a
tiny model and trained against plain PyTorch {torch} on a CPU: the same weights, batches and random numbers, dropout
where the family has it. Embedding, blocks and head stream. `fp32` is {fp32} steps and the loss in eval mode, `bf16` is
{bf16} step with fp32 master weights. Bit-equal means equal in every bit of the losses, the norm, every gradient and
every weight. Written by `python tests/zoo/table.py`; `pytest tests/zoo` checks it.

{summary}

- *fp32, bf16*: every unit recomputes in the backward pass (`recompute: always`). *Kept*: every unit that can keeps its
  graph instead (`never`).
- *Parts*: micro-batches of 1, 2 and 3 of {rows} rows, fp32, two steps against plain PyTorch in the same micro-batches;
  the largest difference of the three. Dropout is off, since its masks depend on the micro-batch. Plain PyTorch makes
  the loss of every micro-batch and weights it, a streamed model makes that of the whole batch: so last bits differ.
  *by calls*: a unit cannot take the batch in parts, and the model is called once for every micro-batch.
- A difference is that of the gradients, as a share of the largest one in the unit. *Sums*: a tensor enters a layer in
  several places; PyTorch adds its gradients up in the order of the whole graph, a streamed layer adds up its own first.
  Such a family is bit-equal to a plain run that sums layer by layer. *Steep*: plain PyTorch differs as much from itself
  when it takes the batch whole.
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
RUNS = {
    "fp32": ("fp32", ALWAYS),
    "bf16": ("bf16", ALWAYS),
    "kept fp32": ("fp32", NEVER),
    "kept bf16": ("bf16", NEVER),
} | {f"fp32 in parts of {mode.rows}": ("fp32", mode) for mode in MICRO}


def main() -> None:
    """Examine every family and write the page."""
    torch.set_num_threads(1)
    rows, equal, within, by_calls, built = [], Counter[str](), Counter[str](), 0, 0
    for family in families().values():
        if family.unbuildable:
            rows.append((family.name, f"`{family.class_name}`", *[""] * 6, f"not built: {family.unbuildable}"))
            continue
        built += 1
        outcomes = {name: run(family, precision, mode) for name, (precision, mode) in RUNS.items()}
        found = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Outcome)}
        equal.update(name for name, outcome in found.items() if outcome.is_equal)
        within.update(name for name, outcome in found.items() if outcome.is_within_rounding)
        by_calls += any(outcome.unsplit for outcome in found.values())
        rows.append(describe(family, outcomes))
        print(" | ".join(rows[-1]), flush=True)
    whole = [f"{name} {equal[name]}" for name, (_, mode) in RUNS.items() if not mode.rows]
    parts = [
        f"{mode.rows} of {ROWS} rows {within[name]} (bit-equal {equal[name]})"
        for name, (_, mode) in RUNS.items()
        if mode.rows
    ]
    summary = (
        f"{len(rows)} classes, {built} of them built here. Bit-equal: {', '.join(whole)}. Within the order of sums: "
        f"{', '.join(parts)}; {by_calls} of them by calls. The rows of the others say why."
    )
    text = HEADER.format(
        transformers=transformers.__version__,
        torch=torch.__version__.split("+")[0],
        total=len(rows),
        summary="\n".join(textwrap.wrap(summary, 119)),
        rows=ROWS,
        **STEPS,
    )
    PAGE.parent.mkdir(exist_ok=True)
    table = "".join(f"| {' | '.join(row)} |\n" for row in sorted(rows))
    PAGE.write_text(f"{text}{table}\n{told_isolation()}", encoding="utf-8")


def told_isolation() -> str:
    """Return the section about several documents in one row."""
    found = {family.name: why_not(family.name) for family in families().values() if not family.unbuildable}
    mixed = ", ".join(sorted(name for name, why in found.items() if why))
    text = ISOLATION.format(total=len(found), apart=sum(not why for why in found.values()))
    return f"{text}{chr(10).join(textwrap.wrap(f'Not apart: {mixed}.', 119))}\n"


def run(family: Family, precision: str, mode: Mode) -> Outcome | str:
    """Return the outcome, or the error text."""
    try:
        return examine(family, precision, mode)
    except ConfigError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"


def describe(family: Family, outcomes: dict[str, Outcome | str]) -> tuple[str, ...]:
    """Return a table row."""
    whole = [outcomes[name] for name, (_, mode) in RUNS.items() if not mode.rows]
    parts = [outcomes[name] for name, (_, mode) in RUNS.items() if mode.rows]
    notes, resident = [CALM] * family.is_random, ""
    for outcome in whole:
        if isinstance(outcome, str):
            notes.append(OPEN.get(family.name) or shorten(outcome))
            continue
        resident = f"{outcome.resident_parameters / outcome.num_parameters:.1%}"
        if not outcome.is_equal and not outcome.why:
            notes.append(OPEN.get(family.name, "not explained"))
        notes += [f"{text.split()[1]} is read from outside" for text in outcome.reported]
        if outcome.kept_fp32:
            kept = {name.rsplit(".", 2)[-2] for name in outcome.kept_fp32}
            notes.append(f"stays fp32: {', '.join(sorted(kept))}")
        if outcome.is_made_in_bf16:
            notes.append("bf16 needs a model made in bf16: its buffers must be")
    for outcome in parts:
        if isinstance(outcome, str):
            notes.append(OPEN.get(family.name) or shorten(outcome))
            continue
        if not outcome.is_within_rounding:
            notes.append("in parts not explained")
        reasons: dict[str, list[str]] = {}
        for name, reason in outcome.unsplit.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            notes.append(f"by calls: {names[0]}{more} {reason}")
    cells = [*map(cell_of_whole, whole), cell_of_parts(parts)]
    return family.name, f"`{family.class_name}`", resident, *cells, "; ".join(dict.fromkeys(notes))


def cell_of_whole(outcome: Outcome | str) -> str:
    if isinstance(outcome, str):
        return outcome.split(":", 1)[0]
    difference = outcome.differences.get("gradient", 0.0)
    return "bit-equal" if outcome.is_equal else f"{difference:.0e}{', sums' if outcome.why else ''}"


def cell_of_parts(outcomes: list[Outcome | str]) -> str:
    found = [outcome for outcome in outcomes if isinstance(outcome, Outcome)]
    if len(found) < len(outcomes):
        return next(outcome for outcome in outcomes if isinstance(outcome, str)).split(":", 1)[0]
    if all(outcome.is_equal for outcome in found):
        return "bit-equal"
    largest = max(max(outcome.differences.values()) for outcome in found)
    marks = [", steep"] * any(outcome.order for outcome in found) + [", by calls"] * any(o.unsplit for o in found)
    return f"{largest:.0e}{''.join(marks)}"


def shorten(failure: str) -> str:
    return " ".join(failure.split(": ", 1)[1].replace("|", "/").split())[:200]


if __name__ == "__main__":
    main()
