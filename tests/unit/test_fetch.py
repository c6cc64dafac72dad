"""The fetcher over transports that tests control; the real ones are in tests/contract."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

import pytest

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.transports import Reader, Reading
from rlhf.errors import ServiceLost

SOURCES = [Endpoint(f"127.0.0.1:{number}") for number in range(1, 7)]


class OneIsLost(Reader):
    """The first source is lost; the second answers once it may; the others answer at once."""

    name = "one-is-lost"

    def __init__(self) -> None:
        self.asked: list[Endpoint] = []
        self.may_answer = threading.Event()

    def why_not(self, source: Endpoint, host_id: str) -> None:
        return None

    def check_advert(self, advert: bytes) -> None:
        pass

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        self.asked.append(source)
        if source == SOURCES[0]:
            raise ServiceLost(f"{source} is gone")
        if source == SOURCES[1]:
            assert self.may_answer.wait(10)
        return Reading([memoryview(bytes(r.nbytes)) for r in ranges])

    def close(self) -> None:
        pass


def held_by(sources: Sequence[Endpoint]) -> Batch:
    """A batch of a column per source."""
    columns = {
        source.address: RemoteColumn.of_shard("uint8", (), 4, Shard(source, 1, 64, 4)) for source in sources
    }
    return Batch(4, columns)


def test_once_a_read_has_failed_no_other_of_the_same_fetch_begins():
    transport = OneIsLost()
    with contextlib.closing(Fetcher("host", [transport], max_sources=1)) as fetcher:
        with pytest.raises(ServiceLost):
            fetcher.fetch(held_by(SOURCES[:4]), time.monotonic() + 10)
        transport.may_answer.set()
        fetcher.fetch(held_by(SOURCES[4:]), time.monotonic() + 10)  # queued behind the fetch that failed
        assert set(transport.asked) <= {*SOURCES[:2], *SOURCES[4:]}
