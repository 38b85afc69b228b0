"""Hugging Face folders and models: read, written and built in pieces."""
