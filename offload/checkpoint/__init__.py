"""Checkpoints; weights in and out."""
