"""An own feature without any change in offload: a stage that adds noise to the input of each block during training. The
recomputation in the backward adds no noise, so the clean block gives the gradients.

python examples/noise_stage.py
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offload import AdamW, Engine
from offload.engine.units.stages import STAGES, Host, Stage
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, Use
from offload.planning.settings import Settings

SCALE = 0.1


class InputNoise(Stage):
    """Adds normal noise to the first input of every block."""

    @classmethod
    def over(cls, inner: Stage, host: Host, settings: Settings) -> Stage:  # noqa: ARG003
        return cls(inner)

    def forward_of(self, unit: Unit, use: Use) -> Forward:
        forward = self.inner.forward_of(unit, use)
        if self.is_paused or not unit.is_block or use.needs is None:  # trials, other modules, evaluation
            return forward

        def noisy(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return forward(hidden + SCALE * torch.randn_like(hidden), *args, **kwargs)

        noisy.clean = forward
        return noisy

    def for_recomputation(self, forward: Forward) -> Forward:
        return self.inner.for_recomputation(getattr(forward, "clean", forward))


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, use_cache=False)).train()
    STAGES.register("input noise", InputNoise)
    batch = {"input_ids": torch.arange(64).view(2, 32), "labels": torch.arange(64).view(2, 32)}
    with Engine(model, AdamW(lr=1e-3), recompute="always") as engine:
        for _ in range(5):
            loss = engine.step(batch).loss
            print(f"training with noise {loss:.4f}, evaluation without {engine.evaluate(batch):.4f}")


if __name__ == "__main__":
    main()
