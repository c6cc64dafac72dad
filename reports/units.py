"""Formats numbers for people: bytes, durations, figures and rates."""

from __future__ import annotations

import math

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(num_bytes: float) -> str:
    """Formats a number of bytes, such as "512 B", "1.5 KiB" or "310 MiB"."""
    power = min(len(_UNITS) - 1, max(0, int(num_bytes).bit_length() - 1) // 10)
    value = num_bytes / 1024**power
    return f"{value:.{0 if power == 0 or value >= 100 else 1}f} {_UNITS[power]}"


def counted(number: float, noun: str) -> str:
    """Formats a number of things with their noun in the singular or plural: "1 rank", "2 ranks"."""
    shown = f"{number:g}" if isinstance(number, float) else number
    return f"{shown} {noun}{'' if number == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """Formats a duration in seconds, such as "4.2 s", "3 min 20 s" or "2 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def figure_text(value: float) -> str:
    """Formats a number with three significant digits or all of its integer part: "0.00123", "12.3", "12,345"."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent_text(fraction: float) -> str:
    """Formats a fraction as a percentage, such as "61.2 %" for 0.612."""
    return f"{100 * fraction:.1f} %"


def seconds_text(seconds: float | None) -> str:
    """Formats a time with three significant digits, in µs, ms or s: "850 µs", "12.3 ms", "1.50 s"; "-" for None."""
    if seconds is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} µs"


def rate_text(per_s: float) -> str:
    """Formats a rate with three significant digits, zeros at the end included, or all of its integer part: "1.20",
    "45.7", "12,345"."""
    return f"{per_s:,.0f}" if per_s >= 1000 else _three_digits(per_s)


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"
