"""The training run: from a configuration to a folder."""
