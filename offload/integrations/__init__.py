"""The engine within other libraries' training loops: `transformers` for Trainer and TRL's trainers, `accelerate` for
scripts over accelerate. Each needs its libraries, which are the extra `hf`; nothing else of offload imports them.
"""
