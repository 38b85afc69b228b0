"""Tools: comparison of runs with plain PyTorch, reports, benchmarks, diagnosis of the machine."""
