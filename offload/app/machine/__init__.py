"""Description and measured rates of this machine."""
