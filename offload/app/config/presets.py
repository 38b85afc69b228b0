"""Named model shapes for training from scratch: Llama-like configurations as plain numbers."""

from __future__ import annotations

from typing import Any


def _llama(**shape: Any) -> dict[str, Any]:
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, **shape}


PRESETS: dict[str, dict[str, Any]] = {
    # 1.05 M parameters: the built-in run, two minutes on two CPU cores.
    "tiny": _llama(
        vocab_size=2048, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=True,
    ),
    # 33 M parameters.
    "small": _llama(
        vocab_size=8192, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=2048, tie_word_embeddings=False,
    ),
    # 0.13 G parameters, GPT-2 small shape.
    "125m": _llama(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=12, max_position_embeddings=2048, tie_word_embeddings=False,
    ),
    # 1.24 G parameters, Llama 3.2 1B shape.
    "1b": _llama(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    # 3.2 G parameters, Llama 3.2 3B shape.
    "3b": _llama(
        vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    # 8.0 G parameters, Llama 3.1 8B shape.
    "8b": _llama(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=False,
    ),
    # 70.6 G parameters, Llama 3.1 70B shape.
    "70b": _llama(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=False,
    ),
}  # fmt: skip
