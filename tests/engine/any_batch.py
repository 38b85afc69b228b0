"""Tiny models with batches other than [rows, tokens], and batches for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn
from torch.nn import functional

from tests.cases.features import Case, sums_by_layer
from tests.cases.models import SIZES, VOCABULARY, t5
from tests.engine.device import own_device
from tests.engine.handmade import WIDTH, Block

WORDS = VOCABULARY
TEXT: dict[str, Any] = SIZES
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PICTURE = {key: size for key, size in SIZES.items() if key != "vocab_size"} | {"image_size": 8, "patch_size": 4}
IMAGE, BEGIN, END = 5, 6, 7
"""Token ids: image patch, image begin, image end."""


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(seed: int, rows: int, length: int) -> Tensor:
    return torch.randint(10, WORDS, (rows, length), generator=drawn(seed))


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=drawn(seed))


def qwen2_vl() -> nn.Module:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    return t.Qwen2VLForConditionalGeneration(
        t.Qwen2VLConfig(
            text_config={**TEXT, "num_key_value_heads": 2, "rope_parameters": rope},
            vision_config={**vision, "spatial_merge_size": 2, "temporal_patch_size": 2},
            image_token_id=IMAGE,
            vision_start_token_id=BEGIN,
            vision_end_token_id=END,
        )
    )


def patches(seed: int, rows: int) -> dict[str, Any]:
    """Return rows with one image of 16 patches each; the first row has two images."""
    tokens = ids(seed, rows, 18)
    for row, start in [(0, 10), *((row, 2) for row in range(rows))]:
        tokens[row, start], tokens[row, start + 1 : start + 5], tokens[row, start + 5] = BEGIN, IMAGE, END
    labels = tokens.clone()
    labels[0, :3] = -100
    num_images = rows + 1
    return {
        "input_ids": tokens,
        "labels": labels,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == IMAGE).int(),
        "pixel_values": noise(seed, num_images * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * num_images),
    }


def llava() -> nn.Module:
    return t.LlavaForConditionalGeneration(
        t.LlavaConfig(
            vision_config=t.CLIPVisionConfig(**PICTURE),
            text_config=t.LlamaConfig(**TEXT),
            image_token_id=IMAGE,
            vision_feature_layer=-1,
        )
    )


def pictures_and_text(seed: int, rows: int) -> dict[str, Any]:
    batch = pictures_in_rows(seed, [1] * rows)
    batch["labels"][0, :7] = -100
    return batch


def pictures_in_rows(seed: int, of_rows: Sequence[int]) -> dict[str, Any]:
    """Return a batch with `of_rows[i]` images in row i."""
    tokens = ids(seed, len(of_rows), 12)
    for row, number in enumerate(of_rows):
        tokens[row, 1 : 1 + 4 * number] = IMAGE
    return {
        "input_ids": tokens,
        "labels": tokens.clone(),
        "pixel_values": noise(seed, sum(of_rows), 3, 8, 8),
        "position_ids": None,
    }


def text_alone(seed: int, rows: int) -> dict[str, Any]:
    return pictures_in_rows(seed, [0] * rows) | {"pixel_values": None}


def whisper() -> nn.Module:
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8, "max_source_positions": 10}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return t.WhisperForConditionalGeneration(
        t.WhisperConfig(**sizes, **heads, **special, vocab_size=WORDS, max_target_positions=16, dropout=0.0)
    )


def speech(seed: int, rows: int) -> dict[str, Any]:
    labels = ids(seed, rows, 6)
    labels[0, 4:] = -100
    return {"input_features": noise(seed, rows, 8, 20), "labels": labels}


def vit(num_labels: int = 5) -> nn.Module:
    return t.ViTForImageClassification(t.ViTConfig(**PICTURE, **CALM, num_labels=num_labels))


def pictures(seed: int, rows: int) -> dict[str, Any]:
    return {"pixel_values": noise(seed, rows, 3, 8, 8), "labels": torch.arange(rows) % 5}


def masked_vit() -> nn.Module:
    return t.ViTForMaskedImageModeling(t.ViTConfig(**PICTURE, **CALM, encoder_stride=4))


def hidden_patches(seed: int, rows: int) -> dict[str, Any]:
    """Return images with a different share of hidden patches per row, so the loss is not a mean over rows."""
    hidden = torch.arange(4)[None] <= torch.arange(rows)[:, None] % 4
    return {"pixel_values": noise(seed, rows, 3, 8, 8), "bool_masked_pos": hidden}


def clip() -> nn.Module:
    return t.CLIPModel(
        t.CLIPConfig(
            text_config={**TEXT, "max_position_embeddings": 16, "eos_token_id": 2, "projection_dim": 16},
            vision_config={**PICTURE, "projection_dim": 16},
            projection_dim=16,
        )
    )


def pairs(seed: int, rows: int) -> dict[str, Any]:
    tokens = ids(seed, rows, 7)
    tokens[:, -1] = 2
    return {"input_ids": tokens, "pixel_values": noise(seed, rows, 3, 8, 8), "return_loss": True}


def sentences(seed: int, rows: int) -> dict[str, Any]:
    labels = ids(seed + 9, rows, 5)
    labels[0, 2:] = -100
    mask = torch.ones(rows, 9, dtype=torch.long)
    mask[-1, 6:] = 0
    return {"input_ids": ids(seed, rows, 9), "attention_mask": mask, "labels": labels}


def bert_qa() -> nn.Module:
    return t.BertForQuestionAnswering(t.BertConfig(**TEXT, **CALM, max_position_embeddings=32))


def questions(seed: int, rows: int) -> dict[str, Any]:
    kinds = torch.zeros(rows, 9, dtype=torch.long)
    kinds[:, 4:] = 1
    ends = {"start_positions": torch.arange(rows) % 4, "end_positions": 4 + torch.arange(rows) % 5}
    return {"input_ids": ids(seed, rows, 9), "token_type_ids": kinds, **ends}


class Attends(Block):
    """Adds position features [positions, width] and time features [rows, width] to the tokens."""

    def forward(self, h: Tensor, places: Tensor, time: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(h + torch.sin(places)[None] + time[:, None])


class Denoiser(nn.Module):
    """A diffusers-style model without a loss.

    Row tensors, position ids shared by all rows, an optional guidance (None: absent), and shapes as lists.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.places, self.time = nn.Linear(3, WIDTH), nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Attends() for _ in range(2))

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        img_ids: Tensor,
        scale: Tensor,
        img_shapes: list[Any],
        guidance: Tensor | None = None,
    ) -> Tensor:
        assert guidance is None
        assert [height * width for _, height, width in img_shapes] == [hidden_states.shape[1]] * len(hidden_states)
        places, time = self.places(img_ids), self.time(timestep[:, None]) * scale
        h = self.into(hidden_states)
        for block in self.blocks:
            h = block(h, places, time)
        return self.out(h)


def latents(seed: int, rows: int, num_places: int = 16) -> dict[str, Any]:
    return {
        "img_ids": noise(seed + 1, num_places, 3),
        "hidden_states": noise(seed, rows, num_places, 4),
        "timestep": torch.linspace(0.1, 0.9, rows),
        "scale": torch.tensor(0.5),
        "img_shapes": [(1, 4, num_places // 4)] * rows,
        "guidance": None,
        "labels": noise(seed + 2, rows, num_places, 4),
    }


def distance(outputs: Any, batch: Any) -> Tensor:
    return functional.mse_loss(getattr(outputs, "sample", outputs), batch["labels"])


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )


def flux_batch(seed: int, rows: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(seed, rows, 16, 4),
        "encoder_hidden_states": noise(seed, rows, 8, 32),
        "pooled_projections": noise(seed, rows, 32),
        "img_ids": noise(seed, 16, 3).abs(),
        "txt_ids": torch.zeros(8, 3),
        "timestep": torch.linspace(0.2, 0.8, rows),
        "guidance": None,
        "labels": noise(seed + 1, rows, 16, 4),
    }


class Masked(Block):
    """Mixes tokens with a mask [tokens, tokens] shared by all rows."""

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        scores = h @ h.transpose(1, 2) / WIDTH + mask
        return super().forward(scores.softmax(-1) @ h)


class SquareMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Masked() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> Any:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h, mask)
        logits = self.head(h)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return t.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def square(seed: int, rows: int, length: int = 6) -> dict[str, Any]:
    x = ids(seed, rows, length)
    return {"x": x, "mask": noise(seed, length, length), "labels": x.flip(1)}


KINDS = {
    "Qwen2-VL": Case(qwen2_vl, batch=patches),
    "LLaVA": Case(llava, batch=pictures_and_text),
    "Whisper": Case(whisper, batch=speech, reference=sums_by_layer),
    "ViT": Case(vit, batch=pictures),
    "masked ViT": Case(masked_vit, batch=hidden_patches),
    "CLIP": Case(clip, batch=pairs),
    "T5": Case(partial(t5, dropout_rate=0.0), batch=sentences, reference=sums_by_layer),
    "BERT's answers": Case(bert_qa, batch=questions),
    "denoiser": Case(Denoiser, batch=latents, loss_fn=distance),
    "square mask": Case(SquareMask, batch=square),
    "Flux": Case(flux, batch=flux_batch, loss_fn=distance, reference=sums_by_layer),
}


def on_device(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch on the engine's device."""
    return {key: value.to(own_device()) if isinstance(value, Tensor) else value for key, value in batch.items()}


def made(name: str, seed: int, rows: int = 4) -> dict[str, Any]:
    """Return a batch for one of `KINDS`, on the engine's device."""
    return on_device(KINDS[name].batch(seed, rows))
