"""Times at which calls are due, decided before the first call, so that a slow answer delays no later call."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Literal

from rlhf.errors import ConfigError

Arrivals = Literal["poisson", "constant"]


def arrivals(kind: Arrivals, rate: float, seed: int) -> Iterator[float]:
    """Returns an endless iterator over the times at which calls are due, in seconds from the start.

    Args:
        kind: "poisson": independent exponential gaps, as from many independent clients; "constant": equal gaps.
        rate: Calls per second, > 0.
        seed: Seed of the gaps.
    """
    return constant(rate) if kind == "constant" else poisson(rate, seed)


def constant(rate: float) -> Iterator[float]:
    """Returns an endless iterator over 0, 1 / rate, 2 / rate, ..."""
    return (number / rate for number in itertools.count())


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Returns an endless iterator over the events of a Poisson process: gaps are exponential with mean 1 / rate."""
    generator = random.Random(seed)
    return itertools.accumulate(generator.expovariate(rate) for _ in itertools.count())


def ramp(text: str) -> list[float]:
    """Parses a ramp "LOW:HIGH:STEPS" into STEPS levels from LOW to HIGH in geometric progression, rounded to 4 digits.

    Raises:
        ConfigError: The text has another form, or the numbers are out of range.
    """
    try:
        low_text, high_text, steps_text = text.split(":")
        low, high, steps = float(low_text), float(high_text), int(steps_text)
    except ValueError:
        raise ConfigError(f"--ramp: {text!r} is not LOW:HIGH:STEPS, such as 50:800:9") from None
    if not 0 < low < high < float("inf") or steps < 2:
        raise ConfigError(f"--ramp: {text!r}: needs 0 < LOW < HIGH and at least 2 steps")
    factor = (high / low) ** (1 / (steps - 1))
    return [float(f"{low * factor**step:.4g}") for step in range(steps)]
