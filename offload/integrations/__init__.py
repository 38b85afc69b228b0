"""The engine inside other libraries' training loops.

`transformers` for Trainer and TRL's trainers, `accelerate` for scripts with Accelerator. Both need the extra `hf`; no
other offload module imports them.
"""
