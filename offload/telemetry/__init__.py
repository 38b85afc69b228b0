"""Telemetry of a run: byte counters, times, progress, traces."""
