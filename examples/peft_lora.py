"""A LoRA adapter over a frozen streamed base: python examples/peft_lora.py [--model MODEL ...]

The base needs host memory for its weights alone. The adapter is saved in PEFT's format.
"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments

import toy
from offload.integrations.transformers import OffloadTrainer

flags = toy.parse(__doc__)
tokenizer = toy.tokenizer(flags)
rows = [tokenizer(text, truncation=True, max_length=flags.length)["input_ids"] for text in toy.texts()]
rows = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in rows if len(row) == flags.length]
config = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
trainer = OffloadTrainer(
    model=get_peft_model(toy.model(flags), config),
    args=TrainingArguments(**toy.arguments(flags)),
    train_dataset=rows,
    processing_class=tokenizer,
    offload={"placement": toy.placement(flags)},
)
trainer.train()
trainer.save_model()
print(f"saved to {flags.output}")
