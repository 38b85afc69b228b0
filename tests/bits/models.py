"""Tiny transformers models and batches for the configurations of `make bits`."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t
from torch import nn

FAMILIES = ("llama", "wide_llama", "table", "gemma2", "gpt2", "mixtral", "qwen3_moe", "mamba", "bert", "t5")
"""Models hashed in plain PyTorch to identify a machine. A new entry makes all file sections unknown machines."""
VOCABULARY, LARGE = 64, 4096
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS: dict[str, Any] = {"experts_implementation": "eager"}


def llama(**settings: Any) -> nn.Module:
    return t.LlamaForCausalLM(t.LlamaConfig(**_GROUPED | _SPECIAL | settings))


def wide_llama() -> nn.Module:
    """Return a model with matrices above 4096 elements, the minimum for quantized formats."""
    return llama(hidden_size=64, intermediate_size=90, num_key_value_heads=4, vocab_size=97)


def table() -> nn.Module:
    return llama(vocab_size=LARGE)


def tied_table() -> nn.Module:
    return llama(vocab_size=LARGE, tie_word_embeddings=True)


def gemma2() -> nn.Module:
    """Tied weights, soft-capped attention and logits."""
    caps = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0}
    config = t.Gemma2Config(**_GROUPED | _SPECIAL, head_dim=8, **caps)
    config._attn_implementation = "eager"
    return t.Gemma2ForCausalLM(config)


def gpt2() -> nn.Module:
    """Tied weights and dropout."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
    return t.GPT2LMHeadModel(t.GPT2Config(**sizes | _SPECIAL))


def mixtral() -> nn.Module:
    config = t.MixtralConfig(**_GROUPED, num_local_experts=4)
    return t.AutoModelForCausalLM.from_config(config, **_EXPERTS)


def qwen3_moe() -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return t.AutoModelForCausalLM.from_config(t.Qwen3MoeConfig(**_GROUPED, **experts, head_dim=8), **_EXPERTS)


def mamba() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 4}
    return t.MambaForCausalLM(t.MambaConfig(**sizes, **_SPECIAL))


def bert() -> nn.Module:
    return t.BertForMaskedLM(t.BertConfig(**_SIZES, max_position_embeddings=32))


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    return t.T5ForConditionalGeneration(t.T5Config(**sizes, decoder_start_token_id=0))


class Centred(nn.Module):
    """A block that uses the mean over rows, so no unit can split a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + torch.tanh(self.linear(h - h.mean(0, keepdim=True)))


class CentredModel(nn.Module):
    """A language model with `Centred` blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.blocks = nn.ModuleList(Centred() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        h = self.embedding(input_ids)
        for block in self.blocks:
            h = block(h)
        loss = nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())
        return t.modeling_outputs.CausalLMOutput(loss=loss)


def centred() -> nn.Module:
    return CentredModel()


def build(name: str, adapter: Any = None, seed: int = 0) -> nn.Module:
    """Return a model in train mode with random weights, with a PEFT adapter if given."""
    torch.manual_seed(seed)
    model: nn.Module = globals()[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    if adapter is not None:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**adapter, init_lora_weights=False))
    return model.train()


def tokens(name: str, seed: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return random tokens [rows, length], int64, and the same tokens as labels.

    The first `row % 4` labels of each row are ignored.
    """
    most = LARGE if "table" in name else VOCABULARY
    ids = torch.randint(3, most, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row % 4] = -100
    return {"input_ids": ids, "labels": labels}
