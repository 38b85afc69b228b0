"""The training application: `python -m offload.train`, the commands, and their parts."""
