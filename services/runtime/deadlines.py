"""Deadlines of calls: how much of a caller's time a call may take."""

from __future__ import annotations

import time

LONGEST_S = 30 * 86_400.0
"""Longest deadline of a call: clocks and timers count no further than some centuries."""

ANSWER_S = 0.5
"""Time before a deadline that is kept for the answer, so that the caller learns what was late."""


def time_to_answer(remaining_s: float) -> float:
    """Time that a call may take in seconds, where its caller waits for `remaining_s`."""
    remaining_s = min(remaining_s, LONGEST_S)
    return remaining_s - min(ANSWER_S, remaining_s / 10)


def time_to_agree(deadline: float) -> float:
    """Deadline of a part of a call, by `time.monotonic()`, which leaves time for ranks to agree that it failed."""
    return deadline - min(ANSWER_S, (deadline - time.monotonic()) / 10)
