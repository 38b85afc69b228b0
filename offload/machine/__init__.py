"""Properties and measured rates of the machine."""
