"""The tests of `TransportContract` of checksums."""

from __future__ import annotations

import re

import numpy as np
import pytest

from nccl_transfer.fetch import Fetcher
from nccl_transfer.testing.peer_process import MIB
from nccl_transfer.testing.transports.rows import assert_same_bits, fetch, random_array, shard_of
from nccl_transfer.transports import host_id
from rlhf.errors import TransferError


class RowsAreVerified:
    """Corrupt bytes are found, and their shard stays unreadable."""

    @pytest.mark.parametrize("nbytes", [0, 1, 65_535, 65_536, 65_537, 5 * MIB + 7])
    def test_bytes_that_match_their_checksums_arrive(self, fetcher, checked_peer, nbytes):
        array = random_array("uint8", (1, nbytes))
        assert_same_bits(fetch(fetcher, checked_peer.put(array))["x"], array)

    def test_some_rows_of_a_shard_are_verified_too(self, fetcher, checked_peer):
        array = random_array("int32", (100, 1024))
        rows = np.array([3, 4, 90, 17])
        assert_same_bits(fetch(fetcher, checked_peer.put(array).take(rows))["x"], array[rows])

    def test_a_corrupted_byte_is_an_error_that_names_source_shard_and_column_and_lasts(
        self, fetcher, make, checked_peer
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
        another = Fetcher(host_id(), [make()])
        with pytest.raises(TransferError, match=rf"{place}: .*shard {shard.id} is marked bad"):
            fetch(another, batch.take(np.arange(1)))
        another.close()

    def test_what_does_not_ask_for_checksums_is_not_verified(self, fetcher, peer):
        batch = peer.put(random_array("uint8", (2, 100)))
        peer.ask("flip", shard=shard_of(batch).id, byte=0)
        fetch(fetcher, batch)
