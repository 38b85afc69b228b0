"""Full fine-tuning of a Flux transformer by flow matching, like a diffusers script over accelerate.

python examples/diffusers_full.py [--model FOLDER_OF_A_FLUX_TRANSFORMER --bf16 --device-memory 20GiB]

Two lines of a diffusers script change: OffloadAccelerator(..., offload=...) replaces Accelerator(...), and the engine's
export replaces save_pretrained.
"""

from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from diffusers.optimization import get_scheduler
from torch.utils.data import DataLoader

import toy
from offload.integrations.accelerate import OffloadAccelerator

flags = toy.parse(__doc__, lr=1e-4)
torch.manual_seed(0)
accelerator = OffloadAccelerator(
    gradient_accumulation_steps=2,
    mixed_precision="bf16" if flags.bf16 else "no",
    cpu=not torch.accelerator.is_available(),
    offload={"placement": toy.placement(flags)},
)
if flags.model:
    transformer = FluxTransformer2DModel.from_pretrained(flags.model)
else:
    transformer = FluxTransformer2DModel(
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
config = transformer.config
optimizer = torch.optim.AdamW(transformer.parameters(), lr=flags.lr, weight_decay=1e-4)
scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=flags.steps)


def encoded(number: int) -> dict[str, torch.Tensor]:
    """Return an image and a text in encoded form."""
    generator = torch.Generator().manual_seed(number)
    shapes = {"latents": (16, config.in_channels), "text": (8, config.joint_attention_dim)}
    shapes["pooled"] = (config.pooled_projection_dim,)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


data = DataLoader([encoded(number) for number in range(64)], batch_size=flags.batch_size, shuffle=True)
transformer, optimizer, data, scheduler = accelerator.prepare(transformer, optimizer, data, scheduler)
step, batches = 0, iter(data)
while step < flags.steps:
    batch = next(batches, None)
    if batch is None:
        batches = iter(data)
        continue
    with accelerator.accumulate(transformer):
        latents = batch["latents"]
        noise, times = torch.randn_like(latents), torch.rand(len(latents), device=latents.device)
        noisy = (1 - times[:, None, None]) * latents + times[:, None, None] * noise
        dtype = transformer.dtype
        predicted = transformer(
            hidden_states=noisy.to(dtype),
            encoder_hidden_states=batch["text"].to(dtype),
            pooled_projections=batch["pooled"].to(dtype),
            timestep=times.to(dtype),
            img_ids=torch.zeros(latents.shape[1], 3, device=latents.device),
            txt_ids=torch.zeros(batch["text"].shape[1], 3, device=latents.device),
            guidance=torch.ones_like(times).to(dtype) if config.guidance_embeds else None,
        ).sample
        loss = torch.nn.functional.mse_loss(predicted.float(), noise - latents)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(transformer.parameters(), 1.0)
            step += 1
            print(f"step {step}  loss {loss:.4f}  norm {norm:.3f}  lr {scheduler.get_last_lr()[0]:.2e}")
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
accelerator.engine.export(flags.output, replace=True)  # a streamed export, with the names of diffusers
(Path(flags.output) / "model.safetensors").rename(Path(flags.output) / "diffusion_pytorch_model.safetensors")
transformer.save_config(flags.output)
print(f"saved to {flags.output}")
