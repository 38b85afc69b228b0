"""The core in which a model runs itself: stable parameters, hooks, torch's own checkpointing. Chosen in tests alone."""
