"""Data sets: order, rows, labels."""

from __future__ import annotations
