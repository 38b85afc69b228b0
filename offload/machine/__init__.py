"""Machine properties and measured rates."""
