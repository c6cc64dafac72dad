"""Which transport reaches which rank, and a rank's own rows."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import grpc
import numpy as np
import pytest

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.registry import create_readers
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.testing.peer_process import EPOCH, MIB
from nccl_transfer.testing.transports.rows import assert_same_bits, fetch, moved_to, random_array
from nccl_transfer.transports import host_id
from nccl_transfer.transports.memfd import MemfdReader
from rlhf.errors import (
    ConfigError,
    Refused,
    TransferError,
)
from rlhf.v1 import transfer_pb2, transfer_pb2_grpc

pytestmark = pytest.mark.timeout(60)


def test_rows_may_be_written_to_also_where_a_transport_gives_none_such(peer):
    class ReadOnly(MemfdReader):
        def read(self, source, ranges, deadline):
            reading = super().read(source, ranges, deadline)
            return replace(reading, views=[memoryview(bytes(view)) for view in reading.views], remap=None)

    fetcher, array = Fetcher(host_id(), [ReadOnly()]), random_array("int32", (4,))
    got = fetcher.fetch(peer.put(array), time.monotonic() + 20, writable=True)["x"]
    assert isinstance(got, np.ndarray)
    got[:] = 0
    fetcher.close()


def test_ranks_on_the_same_host_use_memory_and_others_tcp(peer):
    batch = peer.put(random_array("int32", (4,)))
    for host, used in ((host_id(), {"memfd"}), ("another host", {"tcp"})):
        fetcher = Fetcher(host, create_readers())
        fetch(fetcher, batch)
        assert set(fetcher.traffic()) == used
        fetcher.close()


def test_network_namespaces_count_as_hosts():
    """Abstract sockets are not seen across network namespaces."""
    command = [sys.executable, "-c", "from nccl_transfer.transports import host_id; print(host_id())"]
    same = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    assert same == host_id()
    other = subprocess.run(["unshare", "-rn", *command], capture_output=True, text=True, timeout=30)
    if other.returncode != 0:
        pytest.skip(f"no network namespaces here: {other.stderr.strip()}")
    assert other.stdout.strip() != same


def test_where_no_transport_reaches_a_rank_the_error_says_why_for_each(peer):
    batch = moved_to(peer.put(random_array("int32", (4,))), address="", host_id="far")
    fetcher = Fetcher(host_id(), create_readers())
    with pytest.raises(
        TransferError,
        match=r"memfd: it is on host 'far', not on '.*'; tcp: it has no data port; grpc: it has no addr",
    ):
        fetch(fetcher, batch)
    fetcher.close()


def test_an_unknown_transport_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match="transport 'rdma' is unknown; known: cuda_ipc, grpc, memfd, nccl, tcp"
    ):
        create_readers(["rdma"])


def test_a_rank_reads_its_own_rows_without_a_transport():
    store = TensorStore(MIB)
    store.endpoint = Endpoint("127.0.0.1:1", host_id(), EPOCH, "actor", 0)
    array = random_array("int32", (4, 2))
    batch = Batch(4, {"x": store.put_column(array, "int32", Lease("session", 1))})
    fetcher = Fetcher(host_id(), [], store)
    got = fetch(fetcher, batch)
    assert_same_bits(got["x"], array)
    assert (fetcher.traffic(), got.fetched_bytes) == ({}, 0)
    store.release("session")
    with pytest.raises(Refused, match="was released"):
        got.verify()
    fetcher.close()
    store.close()


def test_stat_says_what_the_store_holds(peer):
    peer.put(random_array("uint8", (1000,)))
    with grpc.insecure_channel(peer.endpoint.address) as channel:
        stat = transfer_pb2_grpc.TransferServiceStub(channel).Stat(transfer_pb2.StatRequest(), timeout=10)
    assert (stat.arena_bytes, stat.used_bytes, stat.shards) == (80 * MIB, 64 + 1024, 1)
    assert stat.peak_bytes >= stat.used_bytes
