"""Plans and budgets."""

from __future__ import annotations
