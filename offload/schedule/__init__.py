"""Static schedule for weight fetches: order and device addresses. `build` is pure; `execute` runs it on lanes."""
