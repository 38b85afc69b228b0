"""What the machine has and can do."""
