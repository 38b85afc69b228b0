"""A tiny Hugging Face model of each tested family, and batches. Models with one odd habit: tests/engine/handmade.py.

Loads with an older `offload` too (see tests/cases/features.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers as t
from torch import nn
from torch.nn import functional

from tests.engine.device import own_device, set_seed

VOCABULARY, LARGE = 64, 4096
TABLE_BYTES = 4 * LARGE * 32
"""Embedding size in bytes with the large vocabulary, fp32."""
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


def wide_llama() -> nn.Module:
    """Return a model with matrices above 4096 elements, the minimum for quantized formats."""
    return llama(hidden_size=64, intermediate_size=90, num_key_value_heads=4, vocab_size=97)


def table(**settings: Any) -> nn.Module:
    """Return a model with a large embedding. Batches: `table_tokens`."""
    return llama(vocab_size=LARGE, **settings)


def tied_table() -> nn.Module:
    return table(tie_word_embeddings=True)


def qwen3(**settings: Any) -> nn.Module:
    return t.Qwen3ForCausalLM(t.Qwen3Config(**GROUPED | {"head_dim": 8} | settings))


def mistral(**settings: Any) -> nn.Module:
    """A window of five tokens in each layer."""
    return t.MistralForCausalLM(t.MistralConfig(**GROUPED | SPECIAL | {"sliding_window": 5} | settings))


def gemma2(**settings: Any) -> nn.Module:
    """Tied weights, soft-capped attention and logits."""
    caps = {"head_dim": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0}
    config = t.Gemma2Config(**GROUPED | SPECIAL | caps | settings)
    config._attn_implementation = "eager"  # only eager attention caps
    return t.Gemma2ForCausalLM(config)


def gpt2(**settings: Any) -> nn.Module:
    """Tied weights, and dropout everywhere in GPT-2."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
    return t.GPT2LMHeadModel(t.GPT2Config(**sizes | SPECIAL | settings))


def opt(**settings: Any) -> nn.Module:
    sizes = {key: size for key, size in SIZES.items() if key != "intermediate_size"}
    own = {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32}
    return t.OPTForCausalLM(t.OPTConfig(**sizes | SPECIAL | own | settings))


def gpt_neox(**settings: Any) -> nn.Module:
    return t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**SIZES | SPECIAL | {"hidden_dropout": 0.1} | settings))


def mixtral(**settings: Any) -> nn.Module:
    return t.MixtralForCausalLM(t.MixtralConfig(**GROUPED | {"num_local_experts": 4} | settings))


def qwen3_moe(**settings: Any) -> nn.Module:
    """Expert weights are one parameter [experts, out, in]."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**GROUPED | experts | {"head_dim": 8} | settings))


def freeze(model: nn.Module, *parts: str) -> nn.Module:
    """Freeze parameters with one of `parts` in the name, and unfreeze the others."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in parts))
    return model


MATRICES = [f"{name}_proj.weight" for name in ("k", "v", "o", "gate", "up", "down")]


def adapted() -> nn.Module:
    """Freeze embeddings, heads and most block matrices. The remaining parameters represent adapters."""
    sizes = {"hidden_size": 64, "intermediate_size": 80, "num_key_value_heads": 4, "num_hidden_layers": 3}
    model = llama(**sizes, attention_bias=True, mlp_bias=True)
    return freeze(model, *MATRICES, "_tokens", "lm_head", "1.self_attn.q_proj.weight")


EAGER: dict[str, Callable[[], nn.Module]] = {
    "mixtral": partial(mixtral, experts_implementation="eager"),
    "qwen3_moe": partial(qwen3_moe, experts_implementation="eager"),
}
"""Models that call one expert after another."""


def gpt_oss(**settings: Any) -> nn.Module:
    """Expert weights are one parameter [experts, in, out], with biases. Attention has sinks."""
    sizes = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
    return t.GptOssForCausalLM(t.GptOssConfig(**GROUPED | sizes | settings))


def granite_swa() -> nn.Module:
    """Attention has sinks, over the whole row and over six tokens."""
    kinds = {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
    return t.GraniteSWAForCausalLM(t.GraniteSWAConfig(**GROUPED | SPECIAL | kinds))


def with_sinks(model: nn.Module) -> nn.Module:
    """Return a model with fused attention over sinks, where it has sinks."""
    from offload.distributed.comm import Comm
    from offload.engine.units.attention import ATTENTIONS
    from offload.tiers.counters import Counters

    ATTENTIONS["sinks"].open(model, 1, Comm(), Counters()).divert()
    return model


def llama4() -> nn.Module:
    experts = {"intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2}
    return t.Llama4ForCausalLM(t.Llama4TextConfig(**GROUPED, **SPECIAL, **experts, head_dim=8))


def mamba() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 4}
    return t.MambaForCausalLM(t.MambaConfig(**sizes, **SPECIAL))


def bert(**settings: Any) -> nn.Module:
    return t.BertForMaskedLM(t.BertConfig(**SIZES | {"max_position_embeddings": 32} | settings))


def embedder() -> nn.Module:
    """Return an encoder without a head."""
    return t.BertModel(t.BertConfig(**SIZES | {"max_position_embeddings": 32}), add_pooling_layer=False)


def t5(**settings: Any) -> nn.Module:
    """One weight for encoder, decoder and head."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
    return t.T5ForConditionalGeneration(t.T5Config(**sizes | settings, decoder_start_token_id=0))


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
        loss = functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())
        return t.modeling_outputs.CausalLMOutput(loss=loss)


CAUSAL: tuple[Callable[[], nn.Module], ...] = (llama, qwen3, gemma2, gpt2, opt, gpt_neox, mixtral, llama4, mamba)


@dataclass(frozen=True)
class Adapted:
    """A model with an adapter of PEFT. settings: keywords for `LoraConfig`."""

    make: Callable[[], nn.Module]
    settings: Mapping[str, Any]

    def __call__(self) -> nn.Module:
        return self.make()


def lora(make: Callable[[], nn.Module], **settings: Any) -> Adapted:
    return Adapted(make, {"r": 4, "target_modules": ["q_proj", "down_proj"], **settings})


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a model in train mode with random weights. Weights initialized to zero or one get noise as well."""
    set_seed(seed)
    model = make().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    if isinstance(make, Adapted):
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**make.settings, init_lora_weights=False))
    return model.train()


def tokens(
    seed: int = 0, rows: int = 4, length: int = 10, *, device: str | None = None, words: int = VOCABULARY
) -> dict[str, torch.Tensor]:
    """Return random tokens below `words` and labels, int64 [rows, length], on `device`. None: the engine's device.

    The labels equal the tokens, except the first `row % 4` labels of each row, which are ignored.
    """
    place = device or own_device()
    ids = torch.randint(3, words, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row % 4] = -100
    return {"input_ids": ids.to(place), "labels": labels.to(place)}


table_tokens = partial(tokens, words=LARGE)


def first_row(seed: int, rows: int) -> dict[str, torch.Tensor]:
    """Return rows with targets in the first row only. The first row is the same for any number of rows."""
    batch = tokens(seed, 1)
    ids = torch.cat([batch["input_ids"], *(tokens(100 + row, 1)["input_ids"] for row in range(1, rows))])
    labels = torch.cat([batch["labels"], torch.full_like(ids[1:], -100)])
    return {"input_ids": ids, "labels": labels}


def share(batch: Mapping[str, torch.Tensor], rows: Sequence[int], rank: int) -> dict[str, torch.Tensor]:
    """Return a rank's rows. `rows`: the number of rows per rank."""
    begin = sum(rows[:rank])
    return {key: value[begin : begin + rows[rank]] for key, value in batch.items()}


def batches(count: int, rows: int = 4) -> list[dict[str, torch.Tensor]]:
    return [tokens(seed, rows) for seed in range(count)]
