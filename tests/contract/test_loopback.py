"""The harness by which the suite runs on one GPU, itself run on a GPU made of the host."""

from __future__ import annotations

import pytest

from contract.host_devices import HostCuda, HostNccl
from contract.one_gpu import *  # noqa: F403 - the tests
from contract.peer_process import GPU

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["nccl"], scope="module")
def transport(request) -> str:
    if request.param != "nccl":
        pytest.skip("the transport suite runs it, over the same devices")
    return request.param


@pytest.fixture(scope="module")
def cuda() -> HostCuda:
    return HostCuda(GPU)


@pytest.fixture(scope="module")
def nccl() -> HostNccl:
    return HostNccl()


@pytest.fixture(scope="module")
def devices() -> str:
    return "host"
