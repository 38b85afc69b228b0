"""Static fetch schedule: time and device address of each weight fetch. `build` is pure; `execute` runs it on lanes."""
