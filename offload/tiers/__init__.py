"""Storage for states on device, host and NVMe: budgets, exact host memory, and plane locations."""
