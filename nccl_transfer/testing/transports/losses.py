"""The tests of `TransportContract` of rows that cannot be read."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import ShardRun
from nccl_transfer.testing.peer_process import EPOCH, MIB
from nccl_transfer.testing.transports.rows import assert_same_bits, fetch, fetch_array, moved_to, random_array
from rlhf.errors import DeadlineExceeded, Refused, ServiceLost, TransferError


class RowsAreLost:
    """Rows that were released or whose rank died or hangs are an error, by the deadline, that names the rank."""

    def test_released_rows_are_refused(self, fetcher, peer):
        batch = peer.put(random_array("int32", (4,)))
        fetch(fetcher, batch)
        peer.release()
        with pytest.raises(Refused, match=rf"{re.escape(str(peer.endpoint))}: .*shard \d+ was released"):
            fetch(fetcher, batch)

    def test_rows_whose_place_was_taken_again_are_refused(self, fetcher, peer):
        batch = peer.put(random_array("int32", (4,)))
        peer.release()
        peer.put(random_array("int32", (4,), seed=1))
        with pytest.raises(Refused, match="was released"):
            fetch(fetcher, batch)

    def test_rows_of_another_epoch_are_refused(self, fetcher, peer):
        batch = moved_to(peer.put(random_array("int32", (4,))), epoch=EPOCH - 1)
        with pytest.raises(Refused, match=rf"{re.escape(str(peer.endpoint))}: .*epoch.* 3.*epoch 2"):
            fetch(fetcher, batch)

    def test_a_range_beyond_its_shard_is_an_error(self, fetcher, peer):
        batch = peer.put(random_array("int32", (4,)))
        column = batch["x"]
        assert isinstance(column, RemoteColumn)
        assert isinstance(column.place, ShardRun)
        beyond = Batch(4, {"x": replace(column, place=column.place._replace(start=4))})
        with pytest.raises(TransferError, match="beyond"):
            fetch(fetcher, beyond)

    def test_a_peer_that_has_died_is_lost(self, fetcher, mortal_peer):
        batch = mortal_peer.put(random_array("int32", (4,)))
        mortal_peer.kill()
        start = time.monotonic()
        with pytest.raises(ServiceLost, match=re.escape(str(mortal_peer.endpoint))):
            fetch(fetcher, batch, within_s=10)
        assert time.monotonic() - start < 5

    def test_a_peer_that_dies_between_reads_is_lost_and_what_was_read_stays_good(self, fetcher, mortal_peer):
        array = random_array("int32", (4,))
        batch = mortal_peer.put(array)
        got = fetch(fetcher, batch)
        mortal_peer.kill()
        with pytest.raises(ServiceLost, match=re.escape(str(mortal_peer.endpoint))):
            fetch(fetcher, batch)
        got.verify()
        assert_same_bits(got["x"], array)

    def test_a_peer_that_hangs_ends_the_read_at_its_deadline(self, fetcher, mortal_peer):
        batch = mortal_peer.put(random_array("int32", (4,)))
        mortal_peer.stop()
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=re.escape(str(mortal_peer.endpoint))):
            fetch(fetcher, batch, within_s=0.5)
        assert time.monotonic() - start < 1.5

    def test_a_deadline_that_has_passed_is_noticed_before_anything_is_asked(self, fetcher, peer):
        batch = peer.put(random_array("int32", (4,)))
        with pytest.raises(DeadlineExceeded, match=re.escape(str(peer.endpoint))):
            fetch(fetcher, batch, within_s=-1)

    def test_one_lost_rank_of_several_is_named(self, fetcher, peer, mortal_peer):
        array = random_array("int32", (4,))
        both = Batch.concat([peer.put(array), mortal_peer.put(array)])
        mortal_peer.kill()
        with pytest.raises(ServiceLost, match=re.escape(str(mortal_peer.endpoint))):
            fetch(fetcher, both)

    def test_a_full_arena_is_an_error_that_says_which_key_raises_it_and_what_was_stored_is_not_hurt(
        self, fetcher, mortal_peer
    ):
        stored, late = (random_array("uint8", (size * MIB,), seed=size) for size in (10, 8))
        batch = mortal_peer.put(stored)
        reply = mortal_peer.try_put({"x": (late, "uint8", None)}, "as it is")
        assert reply["error"] == "OutOfSpace"
        assert (
            "8.0 MiB do not fit into the arena of 16.0 MiB, of which 10.0 MiB are in use" in reply["message"]
        )
        assert "raise arena_mb" in reply["message"]
        assert_same_bits(fetch_array(fetcher, batch), stored)
        mortal_peer.release()
        assert_same_bits(fetch_array(fetcher, mortal_peer.put(late)), late)
