"""Corrupt bytes of rows in use, of a rank's own rows, and of rows whose owner cannot be told. The contract of
transports has the rest."""

from __future__ import annotations

import pytest

from contract.transport_helpers import canned_server
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.testing.peer_process import EPOCH, MIB
from nccl_transfer.testing.transports.rows import fetch, moved_to, random_array, shard_of
from nccl_transfer.transports import host_id
from rlhf.errors import (
    TransferError,
)

pytestmark = pytest.mark.timeout(60)


def test_rows_in_use_fail_to_verify_once_their_shard_is_marked_bad(memfd, checked_peer):
    batch = checked_peer.put(random_array("uint8", (2, MIB)))
    got = fetch(memfd, batch)
    checked_peer.ask("flip", shard=shard_of(batch).id, byte=0)
    with pytest.raises(TransferError, match="do not match"):
        fetch(memfd, batch)
    with pytest.raises(TransferError, match="is marked bad"):
        got.verify()


def test_a_byte_that_is_corrupted_on_the_way_is_an_error_also_where_the_owner_cannot_be_told(
    over_grpc, checked_peer
):
    array = random_array("uint8", (1, 100))
    wrong = bytearray(array.tobytes())
    wrong[50] ^= 1
    with canned_server(bytes(wrong)) as address:
        batch = moved_to(checked_peer.put(array), address=address)
        with pytest.raises(TransferError, match=r"column 'x', .*do not match"):
            fetch(over_grpc, batch)
        with pytest.raises(TransferError, match=r"is marked bad: .*column 'x'"):
            fetch(over_grpc, batch)


def test_a_rank_verifies_its_own_rows_too():
    store = TensorStore(MIB, checksums=True)
    store.endpoint = Endpoint("127.0.0.1:1", host_id(), EPOCH, "actor", 0)
    batch = Batch(4, {"x": store.put_column(random_array("int32", (4, 2)), "int32", Lease("session", 1))})
    fetcher = Fetcher(host_id(), [], store)
    fetch(fetcher, batch)
    store._memory(shard_of(batch))[5] ^= 1
    with pytest.raises(TransferError, match="column 'x', shard 1: the bytes from 0 on do not match"):
        fetch(fetcher, batch)
    with pytest.raises(TransferError, match="is marked bad"):
        store.read_bytes(1, 0, 1)
    fetcher.close()
    store.close()
