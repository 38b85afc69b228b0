"""Named model shapes: Llama-like configurations of many sizes, and published models by name.

The shapes of published models are copied by hand from their config.json files; nothing is downloaded. They are read by
the commands, and by the tables of forecasts in `benchmarks`.
"""

from __future__ import annotations

from typing import Any

Shape = dict[str, Any]
"""A model configuration as plain numbers, as in a config.json."""


def _llama(**shape: Any) -> Shape:
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, **shape}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, groups: int = 8) -> Shape:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip(names, (hidden, intermediate, layers, heads, groups), strict=True))


_LLAMA3 = _llama(vocab_size=128256, max_position_embeddings=131072)
_SMOL = _llama(vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True)
_QWEN3: Shape = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
}  # fmt: skip
_MISTRAL: Shape = {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "vocab_size": 131072, "head_dim": 128,
    "sliding_window": None, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
}  # fmt: skip
_GEMMA3: Shape = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262208,
    "max_position_embeddings": 131072,
}  # fmt: skip
_GPT_OSS: Shape = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "head_dim": 64,
    "max_position_embeddings": 131072, "num_experts_per_tok": 4, "sliding_window": 128,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip
_TIED: Shape = {"tie_word_embeddings": True}
PUBLISHED: dict[str, Shape] = {
    "smollm2-135m": _SMOL | _sizes(576, 1536, 30, 9, 3),
    "smollm2-1.7b": _SMOL | _sizes(2048, 8192, 24, 32, 32),
    "llama-3.2-1b": _LLAMA3 | _TIED | _sizes(2048, 8192, 16, 32),
    "llama-3.2-3b": _LLAMA3 | _TIED | _sizes(3072, 8192, 28, 24),
    "llama-3.1-8b": _LLAMA3 | _sizes(4096, 14336, 32, 32),
    "llama-3.1-70b": _LLAMA3 | _sizes(8192, 28672, 80, 64),
    "qwen3-0.6b": _QWEN3 | _TIED | _sizes(1024, 3072, 28, 16),
    "qwen3-1.7b": _QWEN3 | _TIED | _sizes(2048, 6144, 28, 16),
    "qwen3-4b": _QWEN3 | _TIED | _sizes(2560, 9728, 36, 32),
    "qwen3-8b": _QWEN3 | _sizes(4096, 12288, 36, 32),
    "qwen3-14b": _QWEN3 | _sizes(5120, 17408, 40, 40),
    "qwen3-32b": _QWEN3 | _sizes(5120, 25600, 64, 64),
    "qwen3-30b-a3b": _QWEN3 | _sizes(2048, 6144, 48, 32, 4) | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "mistral-7b": _MISTRAL | _sizes(4096, 14336, 32, 32) | {"vocab_size": 32768, "max_position_embeddings": 32768},
    "mistral-nemo-12b": _MISTRAL | _sizes(5120, 14336, 40, 32),
    "mistral-small-24b": _MISTRAL | _sizes(5120, 32768, 40, 32),
    "mixtral-8x7b": _MISTRAL | _sizes(4096, 14336, 32, 32) | {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 32000,
        "max_position_embeddings": 32768, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "vocab_size": 256000, "head_dim": 256,
        **_sizes(3584, 14336, 42, 16),
    },
    "gemma-3-4b": _GEMMA3 | _sizes(2560, 10240, 34, 8, 4) | {"head_dim": 256},
    "phi-4": {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "vocab_size": 100352,
        "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, **_sizes(5120, 17920, 40, 40, 10),
    },
    "gpt-oss-20b": _GPT_OSS | _sizes(2880, 2880, 24, 64) | {"num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS | _sizes(2880, 2880, 36, 64) | {"num_local_experts": 128},
}  # fmt: skip
"""Published models by their names in lower case."""


SCALES: dict[str, Shape] = {
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
"""Llama-like shapes by their number of parameters."""
PRESETS: dict[str, Shape] = SCALES | PUBLISHED
"""All shapes that `model.preset` may name."""
