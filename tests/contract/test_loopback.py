"""The harness by which `nccl` runs on one GPU, itself run on a GPU made of the host."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from contract.host_devices import HostCuda, HostNccl
from contract.loopback import LoopbackNccl, OwnPeer
from contract.test_transports import assert_same_bits, fetch, random_array
from nccl_transfer.fetch import Fetcher
from nccl_transfer.transports import host_id
from nccl_transfer.transports.nccl import NcclTransport
from rlhf.errors import Refused

MIB = 1 << 20


@pytest.fixture
def looped() -> Iterator[tuple[Fetcher, OwnPeer]]:
    nccl, cuda = LoopbackNccl(HostNccl()), HostCuda("GPU-1")
    peer = OwnPeer(nccl, cuda, 8 * MIB)
    fetcher = Fetcher(host_id(), [NcclTransport(nccl, cuda)])
    yield fetcher, peer
    fetcher.close()
    peer.close()
    deadline = time.monotonic() + 5
    while cuda.used and time.monotonic() < deadline:
        time.sleep(0.01)  # an abort that is under way frees what it was used on
    assert cuda.used == 0


def test_a_rank_receives_what_it_sends_itself(looped):
    fetcher, peer = looped
    array = random_array("int32", (100, 5_000))
    batch = peer.put(array)
    for rows in (np.arange(100), np.array([7, 7, 3]), np.array([99])):
        assert_same_bits(fetch(fetcher, batch.take(rows))["x"], array[rows])


def test_a_refusal_is_told_as_between_processes(looped):
    fetcher, peer = looped
    batch = peer.put(random_array("int32", (4,)))
    peer.release()
    with pytest.raises(Refused, match="was released"):
        fetch(fetcher, batch)
