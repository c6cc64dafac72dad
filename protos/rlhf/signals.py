"""Names of signals, for messages."""

from __future__ import annotations

import signal


def name_of(number: int) -> str:
    """Returns the name of a signal, such as SIGKILL; "signal 40" for one that Python does not name, as most of the
    real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
