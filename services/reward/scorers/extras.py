"""Numbers that a reward gives beside the score of a row, such as "acc" of verl's rewards, as metrics of a call."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import SupportsFloat

from rlhf.errors import encodable

Metrics = Mapping[str, tuple[float, float]]
"""Metrics as (sum, count) by name."""

PREFIX = "extra/"
"""Prefix of the names of these metrics, so that no number of a user's is taken for one of the service's own."""
MAX_NAMES = 64
"""Maximum number of these metrics in a call; a reward that names numbers by row would have one for each row."""
MAX_NAME = 100
"""Maximum length of the name of a number."""


def extra_metrics(numbers: Iterable[Mapping[object, object]]) -> dict[str, tuple[float, float]]:
    """Returns metrics over rows: `extra/NAME` for each name of a finite number (or bool) but "score". All else, such as
    text, is left out.

    Args:
        numbers: Numbers of each row, by name.
    """
    sums: dict[str, tuple[float, float]] = {}
    for row in numbers:
        for name, value in row.items():
            if not isinstance(name, str) or name == "score" or not isinstance(value, SupportsFloat):
                continue
            try:
                number = float(value)
            except (OverflowError, TypeError, ValueError):  # also an array of several numbers
                continue
            if math.isfinite(number):
                total, count = sums.get(key := f"{PREFIX}{encodable(name)[:MAX_NAME]}", (0.0, 0.0))
                sums[key] = total + number, count + 1
    return sums


def merged(metrics: Iterable[Metrics]) -> dict[str, tuple[float, float]]:
    """Adds the sums and counts of metrics of the same name. Leaves out names beyond `MAX_NAMES`, in the order in which
    they come, and logs a warning."""
    sums: dict[str, tuple[float, float]] = {}
    dropped: set[str] = set()
    for each in metrics:
        for name, (total, count) in each.items():
            if name not in sums and len(sums) >= MAX_NAMES:
                dropped.add(name)
                continue
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + total, before[1] + count
    if dropped:
        logging.warning(
            "the reward gives numbers of more than %d names; left out: %s",
            MAX_NAMES,
            ", ".join(sorted(dropped)[:5]),
        )
    return sums
