"""Distillation: a model learns from the probabilities of a frozen teacher, streamed beside the model."""
