"""Weights for inference that need not fit the memory, and the sampling of text with them."""
