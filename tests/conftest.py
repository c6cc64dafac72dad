"""Settings of all tests."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

# No test is about its own time. The same examples every time; the profile "new" draws others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None)
settings.load_profile("same")


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and children inherit that: the processes that tests
    interrupt are to get it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`, the tests of a module run on one worker, and those of all modules with fixture `cluster`
    of `integration/conftest.py` on the same one: each worker that has the fixture starts all of its services."""
    sharing = {
        item.path
        for item in items
        if item.path.parent.name == "integration" and "cluster" in getattr(item, "fixturenames", ())
    }
    for item in items:
        group = "cluster" if item.path in sharing else f"{item.path.parent.name}/{item.path.stem}"
        item.add_marker(pytest.mark.xdist_group(group))
