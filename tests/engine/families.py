"""Tiny Hugging Face models of the tested families, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as t
from torch import nn

from tests.engine.device import own_device, set_seed

VOCABULARY = 64
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(**settings: Any) -> nn.Module:
    return t.LlamaForCausalLM(t.LlamaConfig(**GROUPED | SPECIAL | settings))


def qwen3() -> nn.Module:
    return t.Qwen3ForCausalLM(t.Qwen3Config(**GROUPED, head_dim=8))


def gemma2() -> nn.Module:
    """Tied weights, soft-capped attention and logits."""
    config = t.Gemma2Config(**GROUPED | SPECIAL, head_dim=8, final_logit_softcapping=2.0, attn_logit_softcapping=2.0)
    config._attn_implementation = "eager"  # only eager attention caps
    return t.Gemma2ForCausalLM(config)


def gpt2(**settings: Any) -> nn.Module:
    """Tied weights, and dropout everywhere in GPT-2."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
    return t.GPT2LMHeadModel(t.GPT2Config(**sizes | SPECIAL | settings))


def opt() -> nn.Module:
    sizes = {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    }
    return t.OPTForCausalLM(t.OPTConfig(**sizes, **SPECIAL, vocab_size=VOCABULARY, max_position_embeddings=32))


def gpt_neox() -> nn.Module:
    return t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**SIZES | SPECIAL, hidden_dropout=0.1))


def mixtral(**settings: Any) -> nn.Module:
    return t.MixtralForCausalLM(t.MixtralConfig(**GROUPED | settings, num_local_experts=4))


def qwen3_moe() -> nn.Module:
    """Expert weights are one parameter [experts, out, in]."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**GROUPED, **experts, head_dim=8))


def gpt_oss() -> nn.Module:
    """Expert weights are one parameter [experts, in, out], with biases."""
    return t.GptOssForCausalLM(t.GptOssConfig(**GROUPED, head_dim=8, num_local_experts=4, num_experts_per_tok=2))


def llama4() -> nn.Module:
    experts = {"intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2}
    return t.Llama4ForCausalLM(t.Llama4TextConfig(**GROUPED, **SPECIAL, **experts, head_dim=8))


def mamba() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 4}
    return t.MambaForCausalLM(t.MambaConfig(**sizes, **SPECIAL))


def bert(**settings: Any) -> nn.Module:
    return t.BertForMaskedLM(t.BertConfig(**SIZES | settings, max_position_embeddings=32))


def t5(**settings: Any) -> nn.Module:
    """One weight for encoder, decoder and head."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    return t.T5ForConditionalGeneration(t.T5Config(**sizes | settings, decoder_start_token_id=0))


CAUSAL: tuple[Callable[[], nn.Module], ...] = (llama, qwen3, gemma2, gpt2, opt, gpt_neox, mixtral, llama4, mamba)
UNSHIFTED: tuple[Callable[[], nn.Module], ...] = (bert, t5)


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a model in train mode with random weights. Weights initialized to zero or one get noise as well."""
    set_seed(seed)
    model = make().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def tokens(seed: int = 0, rows: int = 4, length: int = 10, *, device: str | None = None) -> dict[str, torch.Tensor]:
    """Return random tokens and labels on `device`. None: the engine's device.

    The labels equal the tokens, except the first `row % 4` labels of each row, which are ignored.
    """
    place = device or own_device()
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row % 4] = -100
    return {"input_ids": ids.to(place), "labels": labels.to(place)}


def batches(count: int, rows: int = 4) -> list[dict[str, torch.Tensor]]:
    return [tokens(seed, rows) for seed in range(count)]
