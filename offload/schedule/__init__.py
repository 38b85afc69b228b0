"""The static schedule: which weights come up when, and where they go. `build` is pure; `execute` runs it on lanes."""
