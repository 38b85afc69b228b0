"""An own training loop over the engine: python examples/own_loop.py [--model MODEL ...]"""

import torch

import toy
from offload import AdamW, Engine

flags = toy.parse(__doc__)
tokenizer = toy.tokenizer(flags)
rows = [tokenizer(text, truncation=True, max_length=flags.length)["input_ids"] for text in toy.texts()]
tokens = torch.tensor([row for row in rows if len(row) == flags.length])
precision = "bf16" if flags.bf16 else "fp32"
with Engine(toy.model(flags), AdamW(lr=flags.lr), toy.placement(flags), precision=precision) as engine:
    for step in range(flags.steps):
        batch = tokens[torch.randint(len(tokens), (flags.batch_size,))].to(engine.device)
        for rows_of_it in batch.split(max(1, flags.batch_size // 2)):  # gradients of several backward calls add up
            loss = engine.model(input_ids=rows_of_it, labels=rows_of_it).loss
            engine.backward(loss * len(rows_of_it) / len(batch))
        result = engine.update()
        print(f"step {step + 1}  norm {result.grad_norm:.3f}  moved {engine.counters.total} bytes")
    print(f"eval loss {float(engine.evaluate({'input_ids': tokens[:4], 'labels': tokens[:4]})):.4f}")
    engine.export(flags.output, replace=True)
print(f"saved to {flags.output}")
