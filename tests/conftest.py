"""Settings of all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# No test is about its own time. The same examples every time; the profile "new" draws others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None)
settings.load_profile("same")


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and children inherit that: the processes that tests
    interrupt are to get it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
