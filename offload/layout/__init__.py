"""Memory layout for all parameter elements: regions, planes, and ranges per rank. Pure functions."""
