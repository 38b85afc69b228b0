"""Quantized weights and gradients: int8, int4 and nf4 records, and quantized model folders."""
