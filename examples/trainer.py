"""transformers' Trainer: python examples/trainer.py [--model MODEL ...], or, over two ranks,
torchrun --nproc-per-node 2 examples/trainer.py
"""

import torch
from transformers import TrainingArguments

import toy
from offload.integrations.transformers import OffloadTrainer

flags = toy.parse(__doc__)
tokenizer = toy.tokenizer(flags)
rows = [tokenizer(text, truncation=True, max_length=flags.length)["input_ids"] for text in toy.texts()]
rows = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in rows if len(row) == flags.length]
trainer = OffloadTrainer(
    model=toy.model(flags),
    args=TrainingArguments(**toy.arguments(flags, gradient_accumulation_steps=2)),
    train_dataset=rows,
    eval_dataset=rows[:8],
    processing_class=tokenizer,
    offload={"placement": toy.placement(flags)},
)
trainer.train()
print(f"eval loss {trainer.evaluate()['eval_loss']:.4f} on rank {trainer.engine.rank} of {trainer.engine.world_size}")
trainer.save_model()
if trainer.engine.rank == 0:
    print(f"saved to {flags.output}")
trainer.engine.close()  # all ranks are done
