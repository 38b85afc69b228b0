"""Supervised fine-tuning with TRL: python examples/trl_sft.py [--model MODEL --bf16 --device-memory 20GiB]"""

import trl
from datasets import Dataset

import toy
from offload.integrations.transformers import OffloadMixin


class SFT(OffloadMixin, trl.SFTTrainer):
    """TRL's trainer, with the model in an engine."""


flags = toy.parse(__doc__)
trainer = SFT(
    model=toy.model(flags),
    args=trl.SFTConfig(**toy.arguments(flags, max_length=flags.length, packing=True)),
    train_dataset=Dataset.from_list([{"text": text} for text in toy.texts()]),
    processing_class=toy.tokenizer(flags),
    offload={"placement": toy.placement(flags)},
)
trainer.train()
trainer.save_model()
print(f"saved to {flags.output}")
