"""Gradients, from autograd to the update."""
