"""Storage of states on device, host and NVMe: budgets, exact host memory, and the location of every plane."""
