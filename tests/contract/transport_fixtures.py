"""Fixtures of the transport suite."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from contract.host_devices import HostCuda, HostNccl
from contract.loopback import CountedCuda
from contract.peer_process import GPU, READERS_GPU, PausingPeerProcess, run_reader
from contract.transport_helpers import Make, making
from nccl_transfer.devices.cuda import Cuda
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.registry import create_readers
from nccl_transfer.testing.peer_process import PeerProcess
from nccl_transfer.transports import host_id
from nccl_transfer.transports.gpu.communicator import Nccl
from nccl_transfer.transports.gpu.cuda_ipc import CudaIpcReader
from nccl_transfer.transports.gpu.nccl import NcclReader

TRANSPORTS = ["memfd", "cuda_ipc", "nccl", "tcp", "grpc"]


@pytest.fixture(scope="module")
def devices() -> str:
    """Kind of the GPUs of all processes, as for `transport_peer`."""
    return "host"


@pytest.fixture(scope="module")
def gpus() -> Callable[[str], tuple[Nccl, Cuda]]:
    """Returns NCCL and a GPU of this process for readers of a transport."""
    return lambda name: (HostNccl(), HostCuda(READERS_GPU if name == "nccl" else GPU))


@pytest.fixture(scope="module")
def shared_peer(tmp_path_factory, devices) -> Iterator[PeerProcess]:
    peer = PausingPeerProcess(tmp_path_factory.mktemp("peer"), arena_mib=80, devices=devices)
    yield peer
    peer.close()


@pytest.fixture
def peer(shared_peer) -> Iterator[PeerProcess]:
    """An empty peer, shared by many tests."""
    yield shared_peer
    shared_peer.release()


@pytest.fixture
def mortal_peer(tmp_path, devices) -> Iterator[PeerProcess]:
    """A peer that a test may stop or kill."""
    peer = PausingPeerProcess(tmp_path, devices=devices)
    yield peer
    peer.kill()
    peer.close()


@pytest.fixture
def other_peer(mortal_peer) -> PeerProcess:
    """A second peer."""
    return mortal_peer


@pytest.fixture
def new_peer(tmp_path, devices) -> Callable[[], PeerProcess]:
    """Starts peers."""
    return lambda: PausingPeerProcess(tmp_path, devices=devices)


@pytest.fixture
def make(gpus) -> Iterator[Make]:
    yield from making(gpus)


@pytest.fixture(params=TRANSPORTS)
def transport(request) -> str:
    return request.param


@pytest.fixture
def fetcher(transport, make) -> Iterator[Fetcher]:
    fetcher = Fetcher(host_id(), [make(transport)])
    yield fetcher
    fetcher.close()


@pytest.fixture
def memfd() -> Iterator[Fetcher]:
    fetcher = Fetcher(host_id(), create_readers(["memfd"]))
    yield fetcher
    fetcher.close()


@pytest.fixture(params=["tcp", "grpc"])
def stream(request) -> Iterator[Fetcher]:
    """A fetcher of each transport that streams."""
    fetcher = Fetcher(host_id(), create_readers([request.param]))
    yield fetcher
    fetcher.close()


@pytest.fixture
def over_grpc() -> Iterator[Fetcher]:
    fetcher = Fetcher(host_id(), create_readers(["grpc"]))
    yield fetcher
    fetcher.close()


@pytest.fixture
def big_peer(tmp_path) -> Iterator[PeerProcess]:
    peer = PausingPeerProcess(tmp_path, arena_mib=1100)
    yield peer
    peer.close()


@pytest.fixture
def in_use(transport, make) -> Iterator[tuple[Fetcher, CountedCuda]]:
    """A fetcher and the GPU it receives into."""
    between = make(transport)
    assert isinstance(between, CudaIpcReader | NcclReader)
    fetcher = Fetcher(host_id(), [between])
    yield fetcher, between._cuda  # type: ignore[misc]
    fetcher.close()


@pytest.fixture
def start_reader(devices) -> Callable[[str, Batch, float], subprocess.Popen[bytes]]:
    """Starts a process that fetches a batch."""
    return partial(run_reader, devices)


@pytest.fixture(scope="module")
def shared_checked_peer(tmp_path_factory) -> Iterator[PeerProcess]:
    peer = PausingPeerProcess(tmp_path_factory.mktemp("checked"), arena_mib=80, checksums=True)
    yield peer
    peer.close()


@pytest.fixture
def checked_peer(shared_checked_peer) -> Iterator[PeerProcess]:
    """An empty peer that computes checksums."""
    yield shared_checked_peer
    shared_checked_peer.release()
