"""Pauses between restarts, of runs and of services."""

LONGEST_PAUSE_S = 60.0


def pause_before(restart: int) -> float:
    """Returns the pause before a restart, in seconds: none before the first, then 1 s, and twice as long each time, at
    most `LONGEST_PAUSE_S`. `restart`: its number in a row, from 1."""
    return min(2.0 ** (restart - 2), LONGEST_PAUSE_S) if restart > 1 else 0.0
