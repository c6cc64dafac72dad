"""Settings of all tests."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

# No test is about its own time. The same examples every time: whoever wants new ones asks for them.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None)
settings.load_profile("same")


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and children inherit that: the processes that tests
    interrupt are to hear it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the tests of a file in one process under `--dist loadgroup`, and all that use the services of `cluster`,
    which are launched once. Other tests (unit, contract) are dealt out one by one."""
    for item in items:
        if (room := item.path.parent.name) in ("integration", "chaos"):
            shares_services = room == "integration" and "cluster" in getattr(item, "fixturenames", ())
            item.add_marker(pytest.mark.xdist_group("cluster" if shares_services else item.path.name))
