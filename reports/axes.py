"""Axes of charts: round ticks, their labels, and the place of a value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Numbers below it are drawn as 0: their parts would be too small for a float.
_LEAST = 1e-280


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
        ticks: Values of the ticks, each with its label.
        place: Function from a value to its position on the axis, from 0 to 1.
        text: Function that formats a value, for hover titles.
    """

    ticks: Sequence[tuple[float, str]]
    place: Callable[[float], float]
    text: Callable[[float], str]


def linear_axis(values: Sequence[float]) -> Axis:
    """Makes a linear axis from a round tick at or below the smallest value to one at or above the largest."""
    ticks = nice_ticks(min(values), max(values), target=4)
    return _linear(ticks, ticks[0], ticks[-1], "{:.4g}".format)


def step_axis(values: Sequence[float]) -> Axis:
    """Makes a linear axis from the smallest value to the largest, with ticks at whole numbers."""
    low, high = min(values), max(values)
    return _linear(nice_ticks(low, high, target=6, whole=True), low, high, "{:g}".format)


def log_axis(values: Sequence[float], text: Callable[[float], str]) -> Axis:
    """Makes a logarithmic axis between the powers of ten that enclose the values, which must be above 0. `text` makes
    the label of a value."""
    low, high = math.floor(math.log10(min(values)) + 1e-9), math.ceil(math.log10(max(values)) - 1e-9)
    high = max(high, low + 1)
    ticks = [(10.0**power, text(10.0**power)) for power in range(low, high + 1)]
    return Axis(ticks, lambda value: (math.log10(value) - low) / (high - low), text)


def nice_ticks(low: float, high: float, target: int = 5, whole: bool = False) -> list[float]:
    """Returns evenly spaced round numbers, 1, 2 or 5 times a power of ten apart, that enclose [low, high].

    Args:
        target: Number of intervals to aim for; there are at most `target` + 1 intervals, so `target` + 2 numbers.
        whole: Only integers.
    """
    if high - low <= 1e-9 * max(abs(low), abs(high), _LEAST):
        margin = abs(low) / 2 if abs(low) > _LEAST else 0.5
        low, high = low - margin, high + margin
    step = _nice_step((high - low) / target)
    if whole:
        step = max(1.0, step)
    decimals = _decimals(step)
    first, last = low / step, high / step
    # Rounding of a division adds no tick.
    slack = 1e-9 + 4e-16 * max(abs(first), abs(last))
    return [round(i * step, decimals) for i in range(math.floor(first + slack), math.ceil(last - slack) + 1)]


def tick_label(value: float, step: float) -> str:
    """Returns the label of a tick, with as many decimals as ticks that are `step` apart need."""
    if step < 1e-5 or step >= 1e7:
        return f"{value:.3g}"
    return f"{value:,.{_decimals(step)}f}"


def _linear(ticks: Sequence[float], low: float, high: float, text: Callable[[float], str]) -> Axis:
    """Makes the axis from `low` to `high`, with those of the ticks that lie within. Where both are equal, every value
    is placed in the middle."""
    step = ticks[1] - ticks[0]
    shown = [(tick, tick_label(tick, step)) for tick in ticks if low <= tick <= high]
    if low == high:
        return Axis(shown, lambda value: 0.5, text)
    return Axis(shown, lambda value: (value - low) / (high - low), text)


def _nice_step(at_least: float) -> float:
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= at_least * (1 - 1e-9))


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))
