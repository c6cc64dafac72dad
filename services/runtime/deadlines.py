"""Computes how much of the time that a caller waits a rank may use for the call and for its parts."""

from __future__ import annotations

import time

from settings.strict import LONGEST_S

ANSWER_S = 0.5
"""Seconds before a deadline that are reserved for the answer, so that the caller learns what was late."""


def time_to_answer(remaining_s: float) -> float:
    """Returns the seconds that a rank may use for a call whose caller waits for `remaining_s` more seconds:
    `remaining_s`, cut to LONGEST_S, minus ANSWER_S or a tenth of it, whichever is less."""
    remaining_s = min(remaining_s, LONGEST_S)
    return remaining_s - min(ANSWER_S, remaining_s / 10)


def time_to_agree(deadline: float) -> float:
    """Returns the deadline of a part of a call, such as its fetch: earlier than the call's by ANSWER_S or a tenth of
    the time that is left, whichever is less, so that the ranks have time to agree that the part failed.

    Args:
        deadline: Deadline of the call, in seconds of `time.monotonic()`, as is the result.
    """
    return deadline - min(ANSWER_S, (deadline - time.monotonic()) / 10)
