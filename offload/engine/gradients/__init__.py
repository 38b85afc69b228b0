"""Gradients from autograd's hands to the update."""
