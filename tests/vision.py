"""Folders with tiny vision-language models, tokenizer and processor, and conversations about coloured squares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers as t
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from offload.extras.data.tokenizer import train_bpe
from tests.run_folder import write_rows

COLOURS = ("red", "green", "blue", "white")
QUESTION = "What colour is the square?"
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
_TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_SIZE = {"height": 8, "width": 8}


def template(place: str, ends: str = "{{ eos_token }}") -> str:
    """Return a chat template with `place` for a picture, and `ends` after each message."""
    return (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}{{ '"
        + place
        + "' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
        + ends
        + "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )


def model_folder(path: Path, family: str = "llava", ends: str = "{{ eos_token }}") -> Path:
    """Write configuration, tokenizer and processor for a model without weights.

    LLaVA has four tokens per picture. Gemma 3 also writes line ends around a picture, and these merge with line ends in
    the text to one token.
    """
    tokenizer = train_bpe([f"{QUESTION} It is {' or '.join(COLOURS)}.\n\n\n\n\nA b c"] * 20, 400)
    own = ("<image>",) if family == "llava" else ("<begin>", "<soft>", "<end>")
    tokenizer.add_tokens([t.AddedToken(token, special=True) for token in own])
    if family == "llava":
        pictures = t.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=_SIZE)
        made: Any = t.LlavaProcessor(
            pictures,
            tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=template("<image>", ends),
        )
        config: Any = t.LlavaConfig(
            vision_config=t.CLIPVisionConfig(**_VISION),
            text_config=t.LlamaConfig(**_TEXT, vocab_size=len(tokenizer)),
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            vision_feature_layer=-1,
        )
    else:
        tokenizer.save_pretrained(path)
        tokens = dict(zip(("boi_token", "image_token", "eoi_token"), own, strict=True))
        tokenizer = t.AutoTokenizer.from_pretrained(path, extra_special_tokens=tokens)
        made = t.Gemma3Processor(
            Gemma3ImageProcessorPil(size=_SIZE), tokenizer, template("<begin>", ends), image_seq_length=4
        )
        config = t.Gemma3Config(
            vision_config=t.SiglipVisionConfig(**_VISION),
            text_config=t.Gemma3TextConfig(**_TEXT, vocab_size=len(tokenizer), query_pre_attn_scalar=8),
            mm_tokens_per_image=4,
            image_token_id=tokenizer.convert_tokens_to_ids("<soft>"),
            boi_token_index=tokenizer.convert_tokens_to_ids("<begin>"),
            eoi_token_index=tokenizer.convert_tokens_to_ids("<end>"),
        )
    config.architectures = None
    config.save_pretrained(path)
    made.save_pretrained(path)
    return path


def square(path: Path, colour: str, size: tuple[int, int] = (10, 12)) -> Path:
    """Write a single-colour picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def about(colours: Sequence[str]) -> list[dict[str, Any]]:
    """Return a conversation with one square per turn (squares/COLOUR.png) and the colour as the answer."""
    turns: list[dict[str, Any]] = []
    for colour in colours:
        shown = {"type": "image", "path": f"squares/{colour}.png"}
        turns.append({"role": "user", "content": [shown, {"type": "text", "text": QUESTION}]})
        turns.append({"role": "assistant", "content": [{"type": "text", "text": f"It is {colour}."}]})
    return turns


def rows_file(path: Path, rows: Sequence[Any]) -> Path:
    """Write rows as JSON lines, with the squares in the same folder."""
    for colour in COLOURS:
        square(path.parent / "squares" / f"{colour}.png", colour)
    return write_rows(path, rows)
