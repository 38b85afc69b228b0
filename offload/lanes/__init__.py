"""Lanes (ordered work queues beside the compute thread), their tickets, and the race rule for buffers."""
