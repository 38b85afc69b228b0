"""A tiny model for every causal language model registered in transformers.

Configurations shrink by field name: a width becomes 64 for `hidden_size`, `d_model` and `n_embd`. Per-layer lists keep
the first layers with all layer types. `OVERRIDES` has values beyond these rules, with reasons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.cases.features import DTYPES, Case
from tests.engine.reference import sum_by_layer

ROWS, TOKENS, VOCABULARY = 4, 14, 160
ROUNDING = 1e-6
"""Distance from plain PyTorch in fp32 where sums have another order, as in parts of a batch."""
FIRST_WORD = 6
"""Batch tokens lie between this and 128: smaller ids are padding, begin and end, larger ones images or sound."""

_RULES: tuple[tuple[str, int], ...] = (
    (r"num_nextn_predict_layers|num_kv_shared_layers|num_semantic_quantizers|type_vocab_size|(?!kv).*_channels", 0),
    (
        r"(encoder_|decoder_|num_|n_)?(hidden_)?layers?|num_(encoder|decoder|blocks|stack).*layers|num_blocks|num_layers_per_stack",
        2,
    ),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_(start|end)_index|attn_layer_offset|n_shared_experts", 1),
    (r".*(period|every_n_layers|sliding_window_pattern|layer_interval|layer_group_size|layers_per_attn_res_block)", 2),
    (r"(num_|n_|moe_num_)?(routed_|local_)?experts", 4),
    (r"(moe_)?(num_)?(experts_per_tok(en)?|top_?k|moe_k)|zero_expert_num|n_groups?|num_expert_group", 2),
    (r"topk_group|.*ngroups|mamba_n_groups", 1),
    (r".*(num_key_value_heads|n_kv_heads|kv_n_heads|num_kv_heads|linear_num_key_heads)", 2),
    (r".*(num_.*heads(_per_layer)?|n_heads?|attention_heads|num_query_groups|index_n_heads)", 4),
    (r"index_head_dim", 32),
    (r"qk_head_dim", 32),
    (r".*(head_dim|headdim|d_head|dim_head|head_size|kv_channels|rotary_dim|d_kv|rel_extent)", 16),
    (r".*lora_rank|.*_rank|hc_lowrank", 16),
    (r"(encoder_|decoder_|mamba_|ssm_)?(d_state|state_size)", 16),
    (r"index_topk.*", 8),
    (r".*chunk(_size|_length)|.*block_size", 16),
    (r".*vocab(_size)?(_per_layer_input|_base)?", VOCABULARY),
    (
        r".*max.*_positions?(_embeddings)?|n_positions|n_ctx|max_seq_len|context_length|model_max_length|.*max_distance",
        64,
    ),
    (r".*sliding_window(_size)?|.*window_size|local_attention.*", 8),
    (r".*(intermediate|inner|ffn|dff|d_ff|dim_ff|feed_forward|mlp).*(_size|_dim|dim)?", 96),
    (r"hidden_size_per_layer_input|router_hidden_size|ple_embed_dim", 32),
    (
        r".*(hidden_size.*|d_model|n_embd|embed(ding)?_(dim|size)|emb_dim|lru_width|embed_proj_dim|dim_model_base|d_ssm)",
        64,
    ),
    (r".*(height|width|image_size|crop_size)", 32),
    (r"patch_size", 8),
)
_UNSET = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
"""Sizes left open in some default configurations."""
_PATTERNS = {re.compile(f"(?:{pattern})$"): value for pattern, value in _RULES}
_TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}
_RANDOM = re.compile(r"drop|jitter|noise")
_SPECIAL = re.compile(r".*(token_id|token_index|_id|_index|_idx)$")
_LAYER_NUMBERS = re.compile(r".*(_layers|_layer_ids|_idxs|_indices)$")
_NUM_LAYERS = (  # the first name in the configuration counts
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)


@dataclass(frozen=True)
class Family:
    """A model class with a tiny configuration."""

    name: str
    class_name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    batch_kind: str = "tokens"

    @property
    def model_class(self) -> type[nn.Module]:
        return getattr(transformers, self.class_name)

    def config(self) -> PreTrainedConfig:
        """Return the tiny configuration."""
        return shrink(self.model_class.config_class, self.overrides)

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float32, calm: bool = False) -> nn.Module:
        """Return a model with random weights in train mode, built in `dtype` like `from_pretrained`.

        A `calm` model has no dropout, dropped layers or noise, because their masks depend on the micro-batch.
        """
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = self.model_class(self.config()).train()
        finally:
            torch.set_default_dtype(before)
        with torch.no_grad():  # zero weights would hide errors in earlier layers
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        for module in model.modules() if calm else ():
            for key, value in vars(module).items():
                if isinstance(value, float) and (_RANDOM.search(key) or isinstance(module, nn.Dropout)):
                    setattr(module, key, 0.0)
        return model

    @property
    def is_random(self) -> bool:
        """Whether two plain runs differ: with dropout, the clock seeds the generators."""
        return self.name == "reformer"

    def case(self, precision: str, **settings: Any) -> Case:
        """Return this family as a case of the table. `settings`: keywords for `Engine`."""
        splits = "micro_batch_size" in settings  # parts of a batch draw dropout masks of their own
        dtype = DTYPES[precision] if self.name in MADE_IN_BF16 else torch.float32
        make = partial(self.build, dtype=dtype, calm=splits or self.is_random)

        sums_otherwise = splits or (precision == "bf16" and self.name in CALLED_AGAIN)

        def reference(_: str) -> Mapping[str, Any]:
            group = {"group": sum_by_layer} if self.name in SUMMED_BY_LAYER else {}
            return {"kept": kept_in_fp32(make()), **group}

        return Case(
            make,
            {"precision": precision, **settings},
            batch=lambda seed, _rows: self.batch(seed),
            shifts=self.name not in UNSHIFTED,
            reference=reference,
            within=ROUNDING if sums_otherwise else None,
        )

    def batch(self, seed: int = 0) -> dict[str, torch.Tensor]:
        """Return ROWS x TOKENS tokens. The labels are the same tokens, some ignored."""
        generator = torch.Generator().manual_seed(seed)
        shape = (ROWS, TOKENS)
        if self.batch_kind == "codebooks":  # the model builds the input from shifted labels
            return {"labels": torch.randint(FIRST_WORD, 128, (*shape, 4), generator=generator)}
        tokens = torch.randint(FIRST_WORD, 128, shape, generator=generator)
        labels = tokens.clone()
        labels[0, :3] = labels[1, -2:] = labels[3, 5] = -100
        batch = {"input_ids": tokens, "labels": labels}
        if self.batch_kind == "pixels":
            batch["pixel_values"] = torch.randn(ROWS, 3, 32, 32, generator=generator)
        return batch


def kept_in_fp32(model: nn.Module) -> Callable[[str], bool]:
    """Return whether a parameter is computed in fp32 under precision bf16: by its class, or as it was made."""
    patterns = {
        rf"(^|\.){pattern.replace('.*', '[^.]*')}(\.|$)"
        for module in model.modules()
        for key in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for pattern in getattr(module, key, None) or ()
    }
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    is_mixed = len(set(dtypes.values())) > 1

    def is_kept(name: str) -> bool:
        return dtypes[name] == torch.float32 and (is_mixed or any(re.search(pattern, name) for pattern in patterns))

    return is_kept


def shrink(config_class: type[PreTrainedConfig], overrides: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Return the default configuration with all known sizes shrunk, and with `overrides`."""
    return config_class(**_small_fields(config_class(), overrides or {}))


def _small_fields(default: PreTrainedConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that differ from the default, with shrunk sub-configurations."""
    fields = {key: value for key, value in vars(default).items() if not key.startswith("_")}
    small: dict[str, Any] = {}
    depth_name = next((name for name in _NUM_LAYERS if isinstance(fields.get(name), int)), None)
    depth = fields[depth_name] if depth_name else 0
    kept = _representative_layers(fields, depth)
    specials = 0
    for key, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            inner = overrides.get(key, {})
            small[key] = inner if isinstance(inner, PreTrainedConfig) else type(value)(**_small_fields(value, inner))
        elif _has_layer_numbers(key, value):
            small[key] = [kept.index(layer) for layer in value if layer in kept]
        elif isinstance(value, (list, tuple)) and depth and len(value) == depth and key != "architectures":
            small[key] = type(value)(_small_value(key, value[index]) for index in kept)
        elif value is None and key in _UNSET:
            small[key] = _UNSET[key]
        elif key == "is_decoder":
            small[key] = True
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        elif key == depth_name:
            small[key] = len(kept)
        elif _SPECIAL.match(key):
            small[key] = _TOKENS.get(key, VOCABULARY - 1 - specials if value > 128 else value)
            specials += key not in _TOKENS and value > 128
        elif key.endswith("num_key_value_heads") and value == fields.get(key.replace("key_value", "attention")):
            small[key] = 4
        else:
            small[key] = _small_value(key, value)
    small.update({key: value for key, value in overrides.items() if not isinstance(fields.get(key), PreTrainedConfig)})
    return {
        key: value
        for key, value in small.items()
        if key in overrides or isinstance(value, PreTrainedConfig) or value != fields.get(key)
    }


def _small_value(key: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return value
    for pattern, limit in _PATTERNS.items():
        if pattern.match(key):
            return min(value, limit or value)
    return value


def _representative_layers(fields: Mapping[str, Any], depth: int) -> list[int]:
    """Return the first layer numbers with every value in every per-layer list, at least two."""
    kept: set[int] = set()
    for key, values in fields.items():
        if _has_layer_numbers(key, values):
            kept.update((values[0], next((layer for layer in range(depth) if layer not in values), values[0])))
        elif isinstance(values, (list, tuple)) and depth and len(values) == depth and key != "architectures":
            kept.update(values.index(value) for value in values)
    for layer in range(depth):
        if len(kept) >= 2:
            break
        kept.add(layer)
    return sorted(kept)


def _has_layer_numbers(key: str, value: Any) -> bool:
    """Return whether a list has layer numbers instead of one entry per layer."""
    return isinstance(value, list) and bool(value) and bool(_LAYER_NUMBERS.match(key)) and value == sorted(set(value))


_SHARED_BLOCKS = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
OVERRIDES: dict[str, dict[str, Any]] = {
    # hidden_size * expand must equal heads * head size
    "bamba": {"mamba_d_head": 32, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_d_head": 32, "layer_types": ["linear_attention", "full_attention"]},
    "mamba2": {"head_dim": 32},
    # required fields without a default
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "eos_token_id": 2,
    },
    "xmod": {"default_language": "en_XX"},
    # all default layers have one type, but the family has two
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"]},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 8},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    # random blocks need more blocks than 14 tokens give at the default size
    "big_bird": {"block_size": 1, "num_random_blocks": 1},
    "bigbird_pegasus": {"block_size": 1, "num_random_blocks": 1},
    # head_dim must be the sum of both head parts
    "dots3_note_text": {
        "head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    # the head size differs by layer, with a separate field
    "gemma4_text": {"global_head_dim": 32},
    "gemma4": {"text_config": {"global_head_dim": 32}},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gemma4_unified": {"text_config": {"global_head_dim": 32}},
    # towers without effect on text, shrunk to a small model
    "got_ocr2": {"vision_config": {"output_channels": 16}},
    "phi4_multimodal": {
        "audio_config": {"nemo_conv_channels": 32, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32}
    },
    # the last layers reuse keys and values of an earlier layer with the same type
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
        "num_kv_shared_layers": 2,
    },
    # all hybrid layers share one block: the test needs two hybrid layers
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": _SHARED_BLOCKS,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": _SHARED_BLOCKS,
        "hybrid_layer_ids": [1, 3],
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
    },
    # bucket hashing needs several chunks; learned axial positions fix the text length
    "reformer": {
        "axial_pos_embds": False,
        "local_attn_chunk_length": 7,
        "lsh_attn_chunk_length": 7,
        "num_buckets": 2,
        "hash_seed": 0,
    },
}
BATCHES: dict[str, str] = {"musicgen_decoder": "codebooks", "musicgen_melody_decoder": "codebooks", "git": "pixels"}
_DRAFTS = "drafts for another model: it takes that model's embeddings, keys and values, and computes no loss"
UNBUILDABLE: dict[str, str] = {
    "gemma3n": "its vision tower comes from the package timm",
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
}
MADE_IN_BF16 = ("deepseek_v4", "minimax", "musicgen_decoder", "musicgen_melody_decoder", "openai-gpt", "xglm")
"""Families with buffers in the dtype of construction: a model made in fp32 fails in bf16, also in plain PyTorch."""
SUMMED_BY_LAYER = ("blt", "inkling2_loop_text", "inkling2_text", "xlm")
"""Families with a tensor that enters a layer in several places: gradients of the layer are summed first."""
CALLED_AGAIN = ("dory", "hrm_text")
"""Families that call a layer again: PyTorch adds its gradients up in bf16, an engine in fp32."""
UNSHIFTED = (
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "cpmant",
    "marian",
    "mbart",
    "musicgen_decoder",
    "musicgen_melody_decoder",
    "mvp",
    "pegasus",
    "plbart",
    "prophetnet",
    "trocr",
    "whisper",
    "xlm",
    "xlnet",
)
"""Families in which the first label of a row is a target."""
OPEN: dict[str, str] = {}
"""Families without exact training, with reasons. Tests are strict: a fixed family must leave this list."""


_OWN = {
    "Dots3NoteForCausalLM": "dots3_note_text",
    "Emu3ForCausalLM": "emu3_text_model",
    "GPT2LMHeadModel": "gpt2",
    "Llama4ForCausalLM": "llama4_text",
    "LlamaForCausalLM": "llama",
    "MllamaForCausalLM": "mllama_text_model",
    "MusicgenForCausalLM": "musicgen_decoder",
    "MusicgenMelodyForCausalLM": "musicgen_melody_decoder",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen4ExpForCausalLM": "qwen4_exp_text",
}
"""Configuration names for classes registered first under another name.

A lookup from the classes would import all of them, four seconds in every worker.
"""


def buildable() -> list[Any]:
    """Return a pytest parameter for every family. Families without a model are skipped."""
    import pytest

    marks = {name: [pytest.mark.skip(reason=why)] for name, why in UNBUILDABLE.items()}
    return [pytest.param(name, marks=marks.get(name, [])) for name in families()]


@cache
def families() -> dict[str, Family]:
    """Return every family by name. A class with several names appears once, under the configuration name."""
    first: dict[str, str] = {}
    for name, class_name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        first.setdefault(class_name, _OWN.get(class_name, name))
    return {
        name: Family(name, class_name, OVERRIDES.get(name, {}), BATCHES.get(name, "tokens"))
        for class_name, name in first.items()
    }
