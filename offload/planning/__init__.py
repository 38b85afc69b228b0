"""Plan memory and placement before anything is allocated."""
