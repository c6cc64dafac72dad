"""The contract suite of the transports on a real GPU."""

from __future__ import annotations

import pytest

from contract.one_gpu import *  # noqa: F403 - the tests

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def devices() -> str:
    return "gpu"
