"""Where states live: budgets, exact host memory, the device, and the one owner of "where is it"."""
