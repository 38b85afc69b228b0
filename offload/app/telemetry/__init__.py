"""Run telemetry: byte counters, times, progress, traces."""
