"""Find a model by name alone. Runs before torch is loaded, so a wrong name fails at once."""

from __future__ import annotations

import json
from pathlib import Path

from offload.errors import ConfigError
from offload.files.pointers import refuse_pointers

GGUF_TO_FOLDER = (
    "m = AutoModelForCausalLM.from_pretrained(DIR, gguf_file=FILE, dtype=torch.bfloat16, "
    "quantization_config=GgufConfig(dequantize=True)); vars(m.config).pop('quantization_config', None); "
    "m.hf_quantizer, m.is_quantized = None, False; m.save_pretrained(OUT); "
    "AutoTokenizer.from_pretrained(DIR, gguf_file=FILE).save_pretrained(OUT)"
)
"""Python code for converting a GGUF file to a folder. Needs the package gguf and names from torch and transformers."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def find_model(name: str) -> Path:
    """Resolve the `model.path` setting to a path. If the path does not exist, the name may belong to the hub.

    Raises ConfigError for a path without a readable model, and for an impossible name.
    """
    path = Path(name).expanduser()
    if not path.exists():
        # A name of two parts without an ending may be one of the hub.
        is_path = path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".json" or len(path.parts) > 2
        if is_path or path.suffix in (".gguf", *_WEIGHTS):
            raise ConfigError(missing_message(name))
        return path
    if path.is_file():
        with path.open("rb") as stream:  # often with another ending
            is_gguf = stream.read(4) == b"GGUF"
        if is_gguf or path.suffix == ".gguf":
            raise ConfigError(f"model.path is {name}, {_describe_gguf(path)}.")
        if path.suffix in _WEIGHTS:
            raise ConfigError(
                f"model.path is {name}, a file of weights: set --model.path to its folder, {path.parent}, with a "
                "config.json beside the weights."
            )
        check_json(path, name)
        return path
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"model.path is {name}, {_describe_folder(path)}.")
    check_json(file, name)
    refuse_adapter(path, name)
    return path


def refuse_adapter(folder: Path, name: str) -> None:
    """Raise ConfigError for an adapter beside the weights: `from_pretrained` would apply it. `name`: the model.path."""
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"model.path is {name}, which holds a model and a PEFT adapter (adapter_config.json); transformers would "
            "apply the adapter. Move the adapter into a folder of its own. Then train the model alone, go on with the "
            "adapter by --lora.adapter FOLDER, or merge it by PEFT's merge_and_unload and give the merged model."
        )


def missing_message(name: str) -> str:
    """Return the error sentence for a nonexistent model.path."""
    return f"model.path is {name}, which does not exist; set --model.path to a model folder or a config.json."


def check_json(path: Path, name: str) -> None:
    """Raise ConfigError unless a config.json names an architecture. `name`: the model.path behind it."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        refuse_pointers(path)  # the usual reason in a clone, with a better error
        raise ConfigError(f"model.path is {name}, but {path} is not a JSON file: {error}.") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(f"model.path is {name}, but {path} names no model_type, so the architecture is unknown.")


def _describe_folder(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return (
            "which holds a PEFT adapter and no model: set --lora.adapter to this folder, and --model.path to its base "
            "model"
        )
    if (gguf := next(iter(sorted(folder.glob("*.gguf"))), None)) is not None:
        return f"a folder without config.json, and {gguf.name} in it is {_describe_gguf(gguf)}"
    for run in (folder, *folder.parents[:2]):  # a run folder, its checkpoints, or one of these
        if (run / "hf" / "config.json").is_file():
            return f"a folder of a run, without config.json; its model is --model.path {run / 'hf'}"
    return "a folder without config.json; set --model.path to a Hugging Face model folder"


def _describe_gguf(path: Path) -> str:
    code = GGUF_TO_FOLDER.replace("DIR", repr(str(path.parent))).replace("FILE", repr(path.name))
    return (
        "a GGUF file, with weights rounded for inference. Convert it to a Hugging Face folder with the package gguf: "
        f"`import torch; from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig; {code}`, and set "
        "--model.path to OUT"
    )
