"""Corrupt bytes are found by every transport, and their shard stays unreadable."""

from __future__ import annotations

import re

import numpy as np
import pytest

from contract.peer_process import EPOCH, MIB
from contract.transport_helpers import (
    assert_same_bits,
    canned_server,
    fetch,
    moved_to,
    random_array,
    shard_of,
)
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports import host_id
from rlhf.errors import (
    TransferError,
)

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("nbytes", [0, 1, 65_535, 65_536, 65_537, 5 * MIB + 7])
def test_bytes_that_match_their_checksums_arrive(fetcher, checked_peer, nbytes):
    array = random_array("uint8", (1, nbytes))
    assert_same_bits(fetch(fetcher, checked_peer.put(array))["x"], array)


def test_some_rows_of_a_shard_are_verified_too(fetcher, checked_peer):
    array = random_array("int32", (100, 1024))
    rows = np.array([3, 4, 90, 17])
    assert_same_bits(fetch(fetcher, checked_peer.put(array).take(rows))["x"], array[rows])


def test_a_corrupted_byte_is_an_error_that_names_source_shard_and_column_and_lasts(
    fetcher, make, transport, checked_peer
):
    array = random_array("uint8", (2, MIB))
    batch = checked_peer.put(array)
    shard, place = shard_of(batch), re.escape(str(checked_peer.endpoint))
    checked_peer.ask("flip", shard=shard.id, byte=MIB + 70_000)
    with pytest.raises(
        TransferError,
        match=rf"{place}: column 'x', shard {shard.id}: the bytes from {17 * 65536} on do not match",
    ):
        fetch(fetcher, batch)
    checked_peer.ask("flip", shard=shard.id, byte=MIB + 70_000)
    with pytest.raises(TransferError, match=rf"{place}: .*shard {shard.id} is marked bad"):
        fetch(fetcher, batch)
    another = Fetcher(host_id(), [make(transport)])
    with pytest.raises(TransferError, match=rf"{place}: .*shard {shard.id} is marked bad"):
        fetch(another, batch.take(np.arange(1)))
    another.close()


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


def test_what_does_not_ask_for_checksums_is_not_verified(fetcher, peer):
    batch = peer.put(random_array("uint8", (2, 100)))
    peer.ask("flip", shard=shard_of(batch).id, byte=0)
    fetch(fetcher, batch)


def test_a_rank_verifies_its_own_rows_too():
    store = TensorStore(MIB, checksums=True)
    store.endpoint = Endpoint("127.0.0.1:1", host_id(), "", EPOCH, "actor", 0)
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
