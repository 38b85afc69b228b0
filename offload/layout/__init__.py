"""Where each element of each parameter lies: regions, planes, and the ranges of ranks. Pure."""
