"""What ranks exchange, and how none of them hangs."""
