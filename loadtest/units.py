"""Numbers as people read them."""

from __future__ import annotations


def seconds_text(seconds: float | None) -> str:
    """Three significant digits in a unit that suits: "850 µs", "12.3 ms", "1.50 s"; "-" where not known."""
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-6)} µs"


def rate_text(per_s: float) -> str:
    """Three significant digits or all of the integer part."""
    return f"{per_s:,.0f}" if per_s >= 1000 else _digits(per_s)


def _digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"
