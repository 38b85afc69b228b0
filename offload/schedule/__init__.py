"""Static weight fetch schedule: order and device addresses. `build` is pure; `execute` runs schedules on lanes."""
