"""The tests of transports between GPUs over the real adapter of cupy, on the fake of cupy: every thread begins on GPU
0, and the peer is on GPU 1, the reader on GPU 1 or 2."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import fake_cupy
import numpy as np
import pytest

from contract import test_device_shards, test_gpu_transports, test_nccl_transport
from contract.fake_gpus import fake_gpus
from contract.host_tensors import HostTensor
from contract.own_transports import OwnTransports
from contract.test_device_shards import lender, one, rank  # noqa: F401 - fixtures
from nccl_transfer.devices.cupy_cuda import CupyCuda
from nccl_transfer.store.leases import Lease

pytestmark = [pytest.mark.timeout(60), pytest.mark.full]

OF_THE_HOST = {
    "test_a_rank_tells_the_nccl_and_the_gpu_that_it_sends_by",
    "test_mixed_versions_of_nccl_are_refused_also_where_the_endpoint_says_otherwise",
    "test_with_certificates_rows_are_sent_by_nccl_only_where_the_config_names_it",
    "test_the_device_decides_which_transports_reach_a_rank",
}
"""Tests with the host implementation of a GPU in themselves."""


@pytest.fixture(scope="module")
def devices() -> str:
    return "fake"


@pytest.fixture(scope="module")
def gpus() -> Iterator[Callable]:
    yield fake_gpus
    fake_cupy.remove()


def is_between_gpus(test: Callable) -> bool:
    return not {"memfd", "stream", "over_grpc"} & set(inspect.signature(test).parameters)


def suite_of(*modules: ModuleType) -> dict[str, Callable]:
    return {
        name: found
        for module in modules
        for name, found in vars(module).items()
        if name.startswith("test_") and name not in OF_THE_HOST and is_between_gpus(found)
    }


globals().update(suite_of(test_device_shards))

TestTransfers = pytest.mark.full(
    type(
        "TestTransfers",
        (),
        {n: staticmethod(t) for n, t in suite_of(test_gpu_transports, test_nccl_transport).items()},
    )
)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"], indirect=True)
class TestContract(OwnTransports):
    """The published contract."""

    # An id of NCCL that its peer never joins keeps its listener, as NCCL's own does.
    test_nothing_is_left_open_of_a_peer_that_died = None  # pyright: ignore[reportAssignmentType]


@pytest.mark.parametrize("transport", ["cuda_ipc"])
def test_a_thread_that_does_not_set_its_device_is_found(rank, lender, monkeypatch):  # noqa: F811
    batch = one(lender)
    rank.fetch(batch)
    monkeypatch.setattr(CupyCuda, "use", lambda self: None)
    with ThreadPoolExecutor(1) as thread:
        assert "not of device 0" in str(thread.submit(rank.fetch, batch).exception(20))
        tensor = HostTensor(np.zeros(4, np.float32), "float32")
        put = thread.submit(rank.store.device.put_column, tensor, Lease("s", 1))
        assert "not of device 0" in str(put.exception(20))
    monkeypatch.undo()
