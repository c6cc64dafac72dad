"""The fetcher over transports that tests control; the real ones are in tests/contract."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from nccl_transfer import fetch
from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.transports import Reader, Reading
from rlhf.errors import AttachFailed, DeadlineExceeded, Refused, ServiceLost, TransferError

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


def test_once_a_read_has_failed_no_other_of_the_same_fetch_begins(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetch, "MAX_SOURCES", 1)
    transport = OneIsLost()
    with contextlib.closing(Fetcher("host", [transport])) as fetcher:
        with pytest.raises(ServiceLost):
            fetcher.fetch(held_by(SOURCES[:4]), time.monotonic() + 10)
        transport.may_answer.set()
        fetcher.fetch(held_by(SOURCES[4:]), time.monotonic() + 10)  # queued behind the fetch that failed
        assert set(transport.asked) <= {*SOURCES[:2], *SOURCES[4:]}


class Hangs(OneIsLost):
    """The first two sources do not answer before they may; the others answer at once."""

    name = "hangs"

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        self.asked.append(source)
        if source in SOURCES[:2]:
            assert self.may_answer.wait(60)
        return Reading([memoryview(bytes(r.nbytes)) for r in ranges])


def test_fetches_from_ranks_that_hang_delay_no_other_fetch(monkeypatch: pytest.MonkeyPatch):
    """As a service has them that several runs share, or whose calls were cancelled."""
    monkeypatch.setattr(fetch, "MAX_SOURCES", 2)
    transport = Hangs()
    with contextlib.closing(Fetcher("host", [transport])) as fetcher:
        hung = [
            threading.Thread(target=fetcher.fetch, args=(held_by(SOURCES[:3]), time.monotonic() + 60))
            for _ in range(20)
        ]
        for thread in hung:
            thread.start()
        fetched = threading.Event()

        def fetch_from_others() -> None:
            fetcher.fetch(held_by(SOURCES[3:]), time.monotonic() + 60)
            fetched.set()

        other = threading.Thread(target=fetch_from_others)
        other.start()
        try:
            assert fetched.wait(10)
            assert all(thread.is_alive() for thread in hung)
        finally:
            transport.may_answer.set()
            for thread in (*hung, other):
                thread.join()


def test_threads_are_used_again_and_end_with_the_fetcher():
    before, transport = set(threading.enumerate()), Hangs()

    def of_fetches() -> int:
        return sum(
            thread.name.startswith("fetch") for thread in threading.enumerate() if thread not in before
        )

    with contextlib.closing(Fetcher("host", [transport])) as fetcher:
        for _ in range(20):
            fetcher.fetch(held_by(SOURCES[2:]), time.monotonic() + 10)
            assert of_fetches() <= len(SOURCES[2:])
    give_up = time.monotonic() + 10
    while of_fetches() and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not of_fetches()


class CannotAttach(OneIsLost):
    """Is never set up with the first source."""

    name = "cannot-attach"

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        self.asked.append(source)
        if source.address == SOURCES[0].address:
            raise AttachFailed(f"{source}: no cable")
        return Reading([memoryview(bytes(r.nbytes)) for r in ranges])


class Reads(CannotAttach):
    """Ends each read with an error, if it has one."""

    name = "reads"
    error: Exception | None = None

    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        self.asked.append(source)
        if self.error is not None:
            raise self.error
        return Reading([memoryview(bytes(r.nbytes)) for r in ranges])


def test_a_transport_that_cannot_be_set_up_with_a_source_is_replaced_by_the_next_one_for_that_source(caplog):
    first, second = CannotAttach(), Reads()
    restarted = replace(SOURCES[0], epoch=7)
    with contextlib.closing(Fetcher("host", [first, second])) as fetcher:
        for source in (SOURCES[0], SOURCES[0], SOURCES[1]):
            fetcher.fetch(held_by([source]), time.monotonic() + 10)
        assert (first.asked, second.asked) == ([SOURCES[0], SOURCES[1]], [SOURCES[0], SOURCES[0]])
        assert {name: moved.transfers for name, moved in fetcher.traffic().items()} == {
            first.name: 1,
            second.name: 2,
        }
        assert fetcher.failures() == {"cannot-attach": f"{SOURCES[0]}: no cable"}
        assert [record.getMessage() for record in caplog.records] == [
            f"{SOURCES[0]} is read by reads, since cannot-attach failed: {SOURCES[0]}: no cable"
        ]
        fetcher.fetch(held_by([restarted]), time.monotonic() + 10)
        assert first.asked[-1] == restarted


def test_a_transport_without_another_one_is_tried_each_time():
    only = CannotAttach()
    with contextlib.closing(Fetcher("host", [only])) as fetcher:
        for _ in range(2):
            with pytest.raises(TransferError, match=r"no transport reaches .*cannot-attach: .*: no cable"):
                fetcher.fetch(held_by(SOURCES[:1]), time.monotonic() + 10)
        assert (len(only.asked), fetcher.failures()) == (2, {})


@pytest.mark.parametrize("kind", [ServiceLost, DeadlineExceeded, Refused, TransferError])
def test_an_error_of_the_read_itself_is_told_without_another_transport(kind):
    first, second = Reads(), CannotAttach()
    first.error = kind("of the read")
    with (
        contextlib.closing(Fetcher("host", [first, second])) as fetcher,
        pytest.raises(kind, match="of the read"),
    ):
        fetcher.fetch(held_by(SOURCES[:1]), time.monotonic() + 10)
    assert not second.asked
