"""`memfd`: rows are read in place, and the memory of a rank that died is released."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, ShardRun
from nccl_transfer.registry import create_readers
from nccl_transfer.store.arena import COPIED_BYTES
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.testing.held import Held, assert_no_more_than
from nccl_transfer.testing.peer_process import EPOCH, MIB
from nccl_transfer.testing.transports.rows import assert_same_bits, fetch, fetch_array, random_array
from nccl_transfer.transports import host_id
from nccl_transfer.transports.memfd_source import MemfdSource
from rlhf.errors import (
    Refused,
    ServiceLost,
)

pytestmark = pytest.mark.timeout(60)


def test_the_arena_of_a_rank_that_died_is_let_go_of_although_nobody_reads(memfd, mortal_peer, peer):
    fetch(memfd, peer.put(random_array("int32", (4,))))
    before = Held.here()
    array = random_array("int32", (4,), seed=1)
    rows = fetch(memfd, mortal_peer.put(array))
    mortal_peer.kill()
    assert_same_bits(rows["x"], array)
    del rows
    assert_no_more_than(before)


def test_memory_is_not_read_through_a_transport_that_was_closed(peer):
    fetcher = Fetcher(host_id(), create_readers(["memfd"]))
    batch = peer.put(random_array("int32", (4,)))
    fetcher.close()
    before = Held.here()
    with pytest.raises(Refused, match=f"{re.escape(str(peer.endpoint))}: this end was closed"):
        fetch(fetcher, batch)
    assert_no_more_than(before)


def test_readers_map_an_arena_once_and_much_that_they_may_write_to_anew(memfd, peer):
    little, much = (peer.put(random_array("uint8", (nbytes,))) for nbytes in (COPIED_BYTES, COPIED_BYTES + 1))
    rows = [fetch(memfd, little)]
    mapped = Held.here().memfd_mappings
    rows += [fetch(memfd, batch) for batch in (little, much) for _ in range(3)]
    rows += [memfd.fetch(little, time.monotonic() + 20, writable=True) for _ in range(3)]
    assert Held.here().memfd_mappings == mapped
    rows += [memfd.fetch(much, time.monotonic() + 20, writable=True) for _ in range(3)]
    assert Held.here().memfd_mappings == mapped + 3


def test_a_shard_that_a_message_names_twice_is_looked_at_both_times(memfd, peer):
    """The second description is right; the first points into another shard, or beyond the arena."""
    array = random_array("int64", (8,))
    batch = peer.put(array)
    good = batch["x"]
    assert isinstance(good, RemoteColumn)
    assert isinstance(good.place, ShardRun)
    shard = good.place.shard
    for offset in (shard.offset + 64, 80 * MIB - 4, 1 << 62):
        forged = replace(good, place=good.place._replace(shard=replace(shard, offset=offset)))
        both = Batch(3, {"x": forged.take(slice(0, 3)), "y": good.take(slice(5, 8))})
        with pytest.raises(Refused, match="was released"):
            fetch(memfd, both)


def test_a_peer_that_dies_before_it_hands_out_its_arena_is_lost(memfd, mortal_peer):
    batch = mortal_peer.put(random_array("uint8", (4,)))
    mortal_peer.stop()
    threading.Timer(0.2, mortal_peer.kill).start()
    with pytest.raises(ServiceLost, match=re.escape(f"{mortal_peer.endpoint}: cannot be reached or died: ")):
        fetch(memfd, batch, within_s=10)


def test_memory_of_a_hanging_peer_that_is_known_already_can_be_read(memfd, mortal_peer):
    array = random_array("int32", (4,))
    batch = mortal_peer.put(array)
    fetch(memfd, batch)
    mortal_peer.stop()
    assert_same_bits(fetch(memfd, batch)["x"], array)


def test_rows_released_while_they_are_used_fail_to_verify(memfd, peer):
    got = fetch(memfd, peer.put(random_array("int32", (4,))))
    got.verify()
    peer.release()
    with pytest.raises(Refused, match="was released"):
        got.verify()


def test_rows_that_lie_side_by_side_are_not_copied(memfd, peer):
    got = fetch_array(memfd, peer.put(random_array("uint8", (4, MIB))))
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "rlhf-arena" in line]
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in mapped]
    address = got.ctypes.data
    assert any(first <= address and address + got.nbytes <= last for first, last in spans)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_arena(peer):
    script = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "s.connect('\\0' + sys.argv[1]); print(socket.recv_fds(s, 64, 1)[:2])"
    )
    command = [sys.executable, "-I", "-c", script, peer.endpoint.adverts["memfd"].decode()]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert answer.stdout.strip() == "(b'', [])", answer.stderr


def test_a_closed_arena_server_leaves_no_thread_and_no_descriptor():
    before = Held.here()
    store = TensorStore(MIB)
    store.endpoint = Endpoint("127.0.0.1:1", host_id(), EPOCH)
    server = MemfdSource(store)
    fetcher = Fetcher(host_id(), create_readers(["memfd"]))
    endpoint = replace(store.endpoint, adverts={"memfd": server.advert()})
    store.endpoint = endpoint
    fetch(fetcher, Batch(2, {"x": store.put_column(np.zeros(2), "float64", Lease("session", 1))}))
    server.close()
    fetcher.close()
    store.close()
    assert_no_more_than(before)
