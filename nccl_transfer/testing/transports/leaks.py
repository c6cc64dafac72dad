"""The tests of `TransportContract` that descriptors, mappings and threads are released."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.testing.held import Held, assert_no_more_than
from nccl_transfer.testing.peer_process import MIB, PeerProcess
from nccl_transfer.testing.transports.rows import fetch, random_array, wait_until
from nccl_transfer.transports import host_id
from rlhf.errors import ServiceLost


class NothingIsLeft:
    """Both sides release all resources once a reader has closed, or a source has died."""

    def test_restarts_of_a_source_leave_nothing_at_its_readers(self, make, new_peer):
        """Each restart has a new address; the resources of old sources are freed."""
        fetcher = Fetcher(host_id(), [make()])

        def work():
            peer = new_peer()
            fetch(fetcher, peer.put(random_array("int32", (4,))))
            peer.kill()
            peer.close()
            # Resources are freed once the end of their source is known, when the next one is read from.
            wait_until(lambda: not any(each.name == "liveness" for each in threading.enumerate()))

        for _ in range(2):
            work()
        held = Held.here()
        for _ in range(2):
            work()
        assert_no_more_than(held)
        fetcher.close()

    def test_nothing_is_left_open_here_or_there(self, make, peer):
        def work():
            fetcher = Fetcher(host_id(), [make()])
            batch = peer.put(random_array("uint8", (4, MIB)))
            for _ in range(3):
                fetch(fetcher, Batch.concat([batch.take(np.arange(0, 1)), batch]))
            fetcher.close()
            peer.release()

        assert_nothing_is_left_by(work, peer)

    def test_nothing_is_left_open_to_a_source_that_is_forgotten_and_it_can_be_read_again(
        self, make, peer, other_peer
    ):
        """The fetcher stays open, as that of a service that many runs share, and reads from another source."""
        fetcher = Fetcher(host_id(), [make()])
        fetch(fetcher, other_peer.put(random_array("uint8", (4,))))

        def fetch_and_forget():
            fetch(fetcher, peer.put(random_array("uint8", (4, MIB))))
            fetcher.forget(peer.endpoint)
            peer.release()

        held, open_there = Held.here(), len(os.listdir(f"/proc/{peer.pid}/fd"))
        for _ in range(3):
            fetch_and_forget()
        assert_no_more_than(held)
        wait_until(lambda: len(os.listdir(f"/proc/{peer.pid}/fd")) <= open_there)
        fetcher.close()

    def test_nothing_is_left_open_of_a_peer_that_died(self, make, peer, new_peer):
        def work():
            fetcher, doomed = Fetcher(host_id(), [make()]), new_peer()
            try:
                dead = doomed.put(random_array("uint8", (4,)))
                fetch(fetcher, Batch.concat([peer.put(random_array("uint8", (4,))), dead]))
                doomed.kill()
                with pytest.raises(ServiceLost):
                    fetch(fetcher, dead)
            finally:
                doomed.close()
                fetcher.close()

        assert_nothing_is_left_by(work, peer)


def assert_nothing_is_left_by(work: Callable[[], None], peer: PeerProcess) -> None:
    """Asserts that repeated work leaves no descriptor, mapping or thread here, and no descriptor in the peer."""

    def open_there() -> int:
        return len(os.listdir(f"/proc/{peer.pid}/fd"))

    work()
    here, there = Held.here(), open_there()
    for _ in range(3):
        work()
    assert_no_more_than(here)
    wait_until(lambda: open_there() <= there)
