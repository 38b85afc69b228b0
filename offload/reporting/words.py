"""Numbers as a page shows them."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """Return a time in three digits: 1.2 ms, 384 ms, 2.52 s, 5 min 10 s."""
    if not seconds:
        return "0"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.5:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:,} min {rest} s"


def count_text(value: float) -> str:
    """Return a number in at most four digits, or by thousands: 0.6377, 6.29, 5,309, 6.83e-06."""
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
