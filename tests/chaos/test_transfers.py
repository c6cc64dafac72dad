"""A process that dies or stops at any moment of a transfer: the other one says who, in time, and leaks nothing."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs.batch import Batch
from nccl_transfer.registry import create_readers
from nccl_transfer.testing.held import Held, assert_no_more_than
from nccl_transfer.testing.peer_process import PeerProcess
from nccl_transfer.transports import host_id
from rlhf.errors import DeadlineExceeded, ServiceLost

pytestmark = pytest.mark.slow

DEADLINE_S = 1.0
MIB = 1 << 20
VALUES = np.arange(4 * MIB, dtype=np.float64)
"""32 MiB: a transfer of 10 ms by memory, of 50 ms by tcp."""


@contextmanager
def peers(directory: Path) -> Iterator[ThreadPoolExecutor]:
    """Starts peers ahead of need."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def start(directory: Path) -> tuple[PeerProcess, Batch]:
    peer = PeerProcess(directory, ["memfd", "tcp", "grpc"], arena_mib=40)
    return peer, peer.put(VALUES)


def read_until_it_fails(
    fetcher: Fetcher, batch: Batch, reading: threading.Event
) -> tuple[Exception, float, int]:
    """Fetches and reads the rows again and again; the error that ends it, when, and how many reads went well."""
    for reads in range(10_000):
        reading.set()
        try:
            rows = fetcher.fetch(batch, time.monotonic() + DEADLINE_S)
            assert float(np.asarray(rows["x"]).sum()) == float(VALUES.sum())
            rows.verify()
        except (ServiceLost, DeadlineExceeded) as error:
            return error, time.monotonic(), reads
    raise AssertionError("10,000 reads of a process that was killed went well")


def strike(peer: PeerProcess, number: signal.Signals, moment: random.Random) -> float:
    """Ends or stops the peer at a random moment; returns when."""
    time.sleep(moment.uniform(0, 0.08))
    struck = time.monotonic()
    os.kill(peer.process.pid, number)
    return struck


def endure(transport: str, number: signal.Signals, times: int, directory: Path) -> None:
    moment = random.Random(times)
    fetcher = Fetcher(host_id(), create_readers([transport]))
    held: Held | None = None
    with peers(directory) as pool, ThreadPoolExecutor(1) as readers:
        following: Future[tuple[PeerProcess, Batch]] = pool.submit(start, directory)
        for turn in range(times):
            peer, batch = following.result(30)
            if turn + 1 < times:
                following = pool.submit(start, directory)
            # The transfer after a restart succeeds.
            np.testing.assert_array_equal(fetcher.fetch(batch, time.monotonic() + 20)["x"], VALUES)
            reading = threading.Event()
            reader = readers.submit(read_until_it_fails, fetcher, batch, reading)
            assert reading.wait(5)
            struck = strike(peer, number, moment)
            if number == signal.SIGSTOP and transport == "memfd":
                # Its memory stays good while it is stopped; only its end is an error.
                os.kill(peer.process.pid, signal.SIGKILL)
            error, ended, _ = reader.result(DEADLINE_S + 10)
            assert ended - struck < DEADLINE_S + 1, f"turn {turn}: {error} came {ended - struck:.2f} s after"
            assert str(peer.endpoint) in str(error)
            peer.kill()
            peer.close()
            del reader, error
            if turn == 2:
                following.result(30)
                held = Held.here()
        following.result(30)
        assert held is not None
        # The pipes of the last peers are closed, of which two were open when the first count was taken.
        assert_no_more_than(held)
    fetcher.close()


CASES = pytest.mark.parametrize(
    ("transport", "number"),
    [(name, number) for name in ("memfd", "tcp", "grpc") for number in (signal.SIGKILL, signal.SIGSTOP)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)


@CASES
@pytest.mark.timeout(120)
def test_a_reader_survives_the_end_of_the_rank_it_reads_from(transport, number, tmp_path):
    endure(transport, number, 6, tmp_path)


@pytest.mark.full
@CASES
@pytest.mark.timeout(600)
def test_a_reader_survives_a_hundred_ends(transport, number, tmp_path):
    endure(transport, number, 100, tmp_path)
