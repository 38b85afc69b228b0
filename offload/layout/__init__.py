"""Memory layout of every parameter element: regions, planes, and ranges per rank. Pure functions."""
