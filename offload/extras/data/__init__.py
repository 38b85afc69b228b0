"""Rows from files: the task of a run, and a view of its data."""
