"""The engine inside other libraries' training loops.

`wrap` for plain PyTorch loops, `transformers` for Trainer and TRL's trainers, `accelerate` for scripts with
Accelerator. The last two need the extra `hf`; no other offload module imports them.
"""
