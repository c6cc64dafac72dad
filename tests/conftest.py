"""What all tests share."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("rlhf", deadline=None)  # no test is about its own time
settings.load_profile("rlhf")


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and children inherit that: the processes that tests
    interrupt are to hear it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
