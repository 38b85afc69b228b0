"""Recording passes, trial runs and equivalence checks before the first step."""
