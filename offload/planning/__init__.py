"""What will be needed, before anything is allocated."""
