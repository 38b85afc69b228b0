"""Read, write and build Hugging Face folders and models in pieces."""
