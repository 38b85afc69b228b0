"""Run configuration: sections with defaults and checks, presets, and the command line."""
