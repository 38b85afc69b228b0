"""Direct preference optimization with TRL and a reference model: python examples/trl_dpo.py [--model MODEL ...]

The reference is a second model, completely on the device. Where it does not fit, precompute its log-probabilities in
TRL (precompute_ref_log_probs), or train an adapter with the base as reference.
"""

import trl
from datasets import Dataset

import toy
from offload.integrations.transformers import OffloadMixin


class DPO(OffloadMixin, trl.DPOTrainer):
    """TRL's trainer, with the model in an engine."""


flags = toy.parse(__doc__, lr=5e-4)
pairs = [{"prompt": text[:40], "chosen": text[40:120], "rejected": text[40:120][::-1]} for text in toy.texts()]
trainer = DPO(
    model=toy.model(flags),
    ref_model=toy.model(flags),
    args=trl.DPOConfig(**toy.arguments(flags, max_length=flags.length)),
    train_dataset=Dataset.from_list(pairs),
    processing_class=toy.tokenizer(flags),
    offload={"placement": toy.placement(flags)},
)
trainer.train()
trainer.save_model()
print(f"saved to {flags.output}")
