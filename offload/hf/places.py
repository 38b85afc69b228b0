"""Where a model is, by its name alone: asked before torch is loaded, so that a wrong name is refused at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from offload.errors import ConfigError
from offload.files.pointers import refuse_pointers

GGUF_TO_FOLDER = (
    "m = AutoModelForCausalLM.from_pretrained(DIR, gguf_file=FILE, dtype=torch.bfloat16, "
    "quantization_config=GgufConfig(dequantize=True)); del m.config.quantization_config; m.hf_quantizer = None; "
    "m.is_quantized = False; m.save_pretrained(OUT); "
    "AutoTokenizer.from_pretrained(DIR, gguf_file=FILE).save_pretrained(OUT)"
)
"""What makes a folder of a GGUF file, in Python, with the package gguf and the names of torch and transformers."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


class Place(NamedTuple):
    """What a name says: a path that exists, or one that does not and may be the name of a model of the hub."""

    path: Path
    exists: bool


def find_model(name: str) -> Place:
    """Return what the model.path of a configuration names. Raises ConfigError for what holds no model that can be read,
    and where the name can be of no model.
    """
    path = Path(name).expanduser()
    if not path.exists():
        is_path = path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".json" or len(path.parts) > 2
        if is_path or path.suffix in (".gguf", *_WEIGHTS):
            raise ConfigError(missing(name))
        return Place(path, exists=False)
    if path.is_file():
        _check_file(path, name)
        return Place(path, exists=True)
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"model.path is {name}, {_without_config(path)}.")
    check_json(file, name)
    return Place(path, exists=True)


def missing(name: str) -> str:
    """Return the sentence about a model.path that is nowhere."""
    return f"model.path is {name}, which does not exist; set --model.path to a model folder or a config.json."


def check_json(path: Path, given: str) -> None:
    """Raise ConfigError unless a config.json names an architecture; `given`: the model.path that led there."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse_pointers(path)
        raise ConfigError(f"model.path is {given}, but {path} is not a JSON file: {error}.") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(f"model.path is {given}, but {path} names no model_type, so the architecture is unknown.")


def _check_file(path: Path, name: str) -> None:
    with path.open("rb") as stream:
        is_gguf = stream.read(4) == b"GGUF"
    if is_gguf or path.suffix == ".gguf":
        raise ConfigError(f"model.path is {name}, {_of_gguf(path)}.")
    if path.suffix in _WEIGHTS:
        raise ConfigError(
            f"model.path is {name}, a file of weights: set --model.path to its folder, {path.parent}, which has to "
            "hold config.json too."
        )
    check_json(path, name)


def _without_config(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return (
            "which holds an adapter of PEFT and no model: set --lora.adapter to it, and --model.path to the model that "
            "it is of"
        )
    if (gguf := next(iter(sorted(folder.glob("*.gguf"))), None)) is not None:
        return f"a folder without config.json, and {gguf.name} in it is {_of_gguf(gguf)}"
    return "a folder without config.json; set --model.path to a Hugging Face model folder"


def _of_gguf(path: Path) -> str:
    code = GGUF_TO_FOLDER.replace("DIR", repr(str(path.parent))).replace("FILE", repr(path.name))
    return (
        f"a GGUF file, whose weights are rounded for inference and are no Hugging Face folder. Make one, "
        f"with the package gguf: `import torch; from transformers import AutoModelForCausalLM, AutoTokenizer, "
        f"GgufConfig; {code}`, and set --model.path to OUT"
    )
