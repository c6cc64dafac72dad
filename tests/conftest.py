"""Settings of all tests."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from deploy.certificates import TABLE, write_certificates

# No test is about its own time. The same examples every time; the profile "new" draws others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    """A shell starts background jobs with SIGINT ignored, and children inherit that: the processes that tests
    interrupt are to get it. Workers of pytest-xdist end without taking down all that they have imported, which takes
    seconds. Elsewhere the exemption of `pytest_collection` ends: extension modules warn of objects that are left."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)
    else:
        atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports the tests while garbage collection is disabled, and exempts what they have imported from it: the
    collector's walks over all of that take a third of the time that the imports take."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file security.toml of a CA for all tests, beside its certificates and tokens."""
    directory = tmp_path_factory.mktemp("certificates")
    write_certificates(directory, (), days=1)
    return directory / TABLE


@pytest.fixture(scope="session")
def other_certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of another CA."""
    directory = tmp_path_factory.mktemp("other_certificates")
    write_certificates(directory, (), days=1)
    return directory / TABLE
