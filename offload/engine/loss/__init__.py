"""The loss: how it is found, cut into parts, and computed over chunks of the head."""
