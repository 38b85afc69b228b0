"""Update rules: per-parameter settings, optimizer-state planes, and the update itself."""
