"""Units: modules whose parameters travel together, and what runs, saves and recomputes them."""
