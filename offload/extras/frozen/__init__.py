"""Frozen models beside the trained one: in each step, or measured before the first one."""
