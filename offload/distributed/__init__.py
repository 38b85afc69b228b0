"""Collectives between ranks, process launch, and detection of lost ranks."""
