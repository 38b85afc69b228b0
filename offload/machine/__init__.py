"""Machine properties: memory limits, cores and rates."""
