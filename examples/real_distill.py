"""Make a student of four fifths of the layers, and texts to train it on, or score models on the texts held out.

    python examples/real_distill.py --teacher /tmp/smollm2/model --output /tmp/student
    python examples/real_distill.py --output /tmp/student --score /tmp/smollm2/model /tmp/student/model

A text is the first sentence about a function in Python's standard library, with its name and arguments. Every 16th is
held out. A score is the loss of a token in 25 of these, in nats, and the share of tokens that the model finds most
probable.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from real_embeddings import functions

_HELD_OUT = 16
_SCORED = 4  # a few of them, to save time


def make_student(teacher: Path, folder: Path) -> None:
    """Write a model of 24 among 30 layers, with the first and the last one, and the tokenizer."""
    model: Any = AutoModelForCausalLM.from_pretrained(teacher)
    layers = model.model.layers
    num_kept = 4 * len(layers) // 5
    kept = [round(number * (len(layers) - 1) / (num_kept - 1)) for number in range(num_kept)]
    model.model.layers = nn.ModuleList([layers[number] for number in kept])
    model.config.num_hidden_layers = num_kept
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(folder)
    print(f"{folder}: {num_kept} of {len(layers)} layers, {model.num_parameters():,} parameters")


def write_texts(output: Path) -> None:
    """Write train.jsonl and held_out.jsonl."""
    rows = [{"text": f"{sentence}: {name}"} for sentence, name in functions()]
    for name, own in (
        ("train", [row for number, row in enumerate(rows) if number % _HELD_OUT]),
        ("held_out", rows[::_HELD_OUT]),
    ):
        (output / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in own))
        print(f"{output}/{name}.jsonl: {len(own):,} texts")


def score(texts: list[str], folder: Path) -> None:
    """Print the mean loss of a token, and the share of most probable tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    with torch.no_grad():
        logits = model(**tokens).logits[:, :-1]
    is_token = tokens["attention_mask"][:, 1:].bool()
    logits, wanted = logits[is_token], tokens["input_ids"][:, 1:][is_token]
    found = (logits.argmax(1) == wanted).float().mean()
    print(f"{folder}: loss {cross_entropy(logits, wanted):.2f}, found {found:.1%} of {len(wanted)} tokens", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, metavar="FOLDER", help="make the student of this model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--score", type=Path, nargs="+", default=[], metavar="FOLDER", help="score these models")
    arguments = parser.parse_args()
    if arguments.teacher:
        make_student(arguments.teacher, arguments.output / "model")
        write_texts(arguments.output)
    if arguments.score:
        rows = (arguments.output / "held_out.jsonl").read_text().splitlines()
        for each in arguments.score:
            score([json.loads(row)["text"] for row in rows[::_SCORED]], each)
