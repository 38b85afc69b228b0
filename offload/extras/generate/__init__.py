"""Inference with streamed weights for models larger than memory, and text sampling."""
