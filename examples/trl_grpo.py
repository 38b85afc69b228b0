"""GRPO with TRL, with generation by the model and a reward function: python examples/trl_grpo.py [--model MODEL ...]

Each generated token streams the weights once, unless they stay on the device. Use more device memory, or many prompts
at once.
"""

import trl
from datasets import Dataset

import toy
from offload.integrations.transformers import OffloadMixin


class GRPO(OffloadMixin, trl.GRPOTrainer):
    """TRL's trainer, with the model in an engine."""


def letters(completions: list[str], **_: object) -> list[float]:
    """Reward text made of letters."""
    return [sum(each.isalpha() for each in completion) / max(1, len(completion)) for completion in completions]


flags = toy.parse(__doc__, steps=4)
settings = {"max_completion_length": min(16, flags.length), "num_generations": 4}
trainer = GRPO(
    model=toy.model(flags),
    reward_funcs=letters,
    args=trl.GRPOConfig(**toy.arguments(flags, **settings)),
    train_dataset=Dataset.from_list([{"prompt": text[:40]} for text in toy.texts()]),
    processing_class=toy.tokenizer(flags),
    offload={"placement": toy.placement(flags)},
)
trainer.train()
trainer.save_model()
print(f"saved to {flags.output}")
