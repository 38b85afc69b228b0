"""Collectives between ranks, process launch, and lost-rank detection."""
