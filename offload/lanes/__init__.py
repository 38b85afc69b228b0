"""Lanes: ordered queues of work beside the compute thread, the tickets they give, and the race rule."""
