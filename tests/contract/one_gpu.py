"""The contract suite where there is one GPU: `cuda_ipc` between two processes, `nccl` as one rank that sends to itself.

A module that imports everything from here, and has fixtures `cuda`, `nccl` and `devices`, runs all tests of the suite
that are about these two. Of those, one rank of NCCL cannot run the ones in which the source or the reader is a process
of its own that dies or is stopped once the two have a communicator: these are skipped.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from contract import (
    test_cuda_ipc_transport,
    test_gpu_transports,
    test_nccl_transport,
    test_transport_checksums,
    test_transport_choice,
)
from contract.loopback import CountedCuda, LoopbackNccl
from contract.own_transports import OwnTransports
from contract.peer_process import PausingPeerProcess, run_reader
from contract.transport_fixtures import fetcher, in_use
from contract.transport_helpers import Make, making
from contract.transport_peer import PausingPeer, PausingStore
from nccl_transfer.devices.cuda import Cuda
from nccl_transfer.testing.peer_process import EPOCH, PeerProcess
from nccl_transfer.testing.transports.rows import wait_until
from nccl_transfer.transports.gpu.communicator import Nccl

ANSWER_S = 20.0
DIES_WITH_ITSELF = "a rank of nccl that sends to itself dies with itself"

LOST_BEFORE_IT_JOINS = {
    "test_a_peer_that_has_died_is_lost",
    "test_a_peer_that_hangs_ends_the_read_at_its_deadline",
    "test_one_lost_rank_of_several_is_named",
}
"""Tests with a source of `nccl` that may be another process: no communicator is made with it."""


class OwnPeer(PausingPeerProcess):
    """The peer on a thread of this process. What is left of it when it is closed is freed on the GPU, too."""

    def __init__(
        self, directory: Path, nccl: Nccl, cuda: Cuda, arena_mib: int = 80, checksums: bool = False
    ) -> None:
        self.directory = directory
        self.steps = itertools.count(1)
        self.pid = os.getpid()
        self._said: queue.Queue[dict] = queue.Queue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._cuda = CountedCuda(cuda)
        # The reader is to believe that this is another GPU.
        store = PausingStore(arena_mib << 20, checksums, self._say)
        self._peer = PausingPeer(store, EPOCH, self._cuda, nccl, "GPU-itself", self._say)
        self.endpoint = asyncio.run_coroutine_threadsafe(self._peer.start(), self._loop).result(ANSWER_S)

    def _say(self, **event: object) -> None:
        self._said.put(event)

    def answer(self) -> dict:
        return self._said.get(timeout=ANSWER_S)

    def ask(self, op: str, **arguments: object) -> dict:
        return asyncio.run_coroutine_threadsafe(
            self._obey(json.dumps({"op": op, **arguments})), self._loop
        ).result(ANSWER_S)

    def release(self) -> None:
        super().release()
        while not self._said.empty():
            self._said.get()  # of a test that failed before it came to that

    def stop(self) -> None:
        pytest.skip(DIES_WITH_ITSELF)

    def kill(self) -> None:
        pytest.skip(DIES_WITH_ITSELF)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._peer.close(), self._loop).result(ANSWER_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_S)
        self._loop.close()
        self._peer.store.close()
        wait_until(lambda: self._cuda.used == 0)

    async def _obey(self, line: str) -> dict:
        return self._peer.obey(line)


@pytest.fixture(params=["cuda_ipc", "nccl"], scope="module")
def transport(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def looped(nccl) -> LoopbackNccl:
    return LoopbackNccl(nccl)


@pytest.fixture(scope="module")
def start_peer(transport, devices, cuda, looped, tmp_path_factory) -> Callable[..., PeerProcess]:
    """Starts a peer with so many MiB of arena, and checksums or not."""
    directory = tmp_path_factory.mktemp("peer")
    if transport == "nccl":
        return partial(OwnPeer, directory, looped, cuda)
    return partial(PausingPeerProcess, directory, devices=devices)


def closed(peer: PeerProcess) -> Iterator[PeerProcess]:
    yield peer
    peer.close()


def released(peer: PeerProcess) -> Iterator[PeerProcess]:
    yield peer
    peer.release()


@pytest.fixture(scope="module")
def shared_peer(start_peer) -> Iterator[PeerProcess]:
    yield from closed(start_peer(arena_mib=80))


@pytest.fixture
def peer(shared_peer) -> Iterator[PeerProcess]:
    yield from released(shared_peer)


@pytest.fixture(scope="module")
def shared_checked_peer(start_peer) -> Iterator[PeerProcess]:
    yield from closed(start_peer(arena_mib=80, checksums=True))


@pytest.fixture
def checked_peer(shared_checked_peer) -> Iterator[PeerProcess]:
    yield from released(shared_checked_peer)


@pytest.fixture
def big_peer(start_peer) -> Iterator[PeerProcess]:
    yield from closed(start_peer(arena_mib=1100))


@pytest.fixture
def other_peer(start_peer) -> Iterator[PeerProcess]:
    yield from closed(start_peer(arena_mib=16))


@pytest.fixture
def mortal_peer(request, transport, devices, tmp_path) -> Iterator[PeerProcess]:
    if transport == "nccl" and request.node.originalname not in LOST_BEFORE_IT_JOINS:
        pytest.skip(DIES_WITH_ITSELF)
    peer = PausingPeerProcess(
        tmp_path, devices=devices, device_uuid="GPU-of-its-own" if transport == "nccl" else ""
    )
    yield peer
    peer.kill()
    peer.close()


@pytest.fixture
def new_peer(transport, devices, tmp_path) -> Callable[[], PeerProcess]:
    if transport == "nccl":
        pytest.skip(DIES_WITH_ITSELF)
    return lambda: PausingPeerProcess(tmp_path, devices=devices)


@pytest.fixture
def start_reader(transport, devices) -> Callable:
    if transport == "nccl":
        pytest.skip(DIES_WITH_ITSELF)
    return partial(run_reader, devices)


@pytest.fixture
def make(cuda, looped) -> Iterator[Make]:
    yield from making(lambda _: (looped, cuda))


def is_about_gpus(test: Callable) -> bool:
    return not {"transport", "fetcher", "in_use"}.isdisjoint(inspect.signature(test).parameters)


SUITE = [
    test_cuda_ipc_transport,
    test_gpu_transports,
    test_nccl_transport,
    test_transport_checksums,
    test_transport_choice,
]
TESTS = {
    name: test
    for module in SUITE
    for name, test in vars(module).items()
    if name.startswith("test_") and is_about_gpus(test)
}
globals().update(TESTS)


class TestContract(OwnTransports):
    """The contract of both, with the peers of this module."""


__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "big_peer", "checked_peer", "fetcher", "in_use", "looped", "make", "mortal_peer", "new_peer", "other_peer", "peer",
    "shared_checked_peer", "shared_peer", "start_peer", "start_reader", "transport", "TestContract", *TESTS,
]  # fmt: skip
