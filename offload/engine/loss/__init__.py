"""The loss: rules, split into micro-batches, and the head in chunks."""
