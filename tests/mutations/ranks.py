"""Ranks: shards, exchanges."""

from __future__ import annotations
