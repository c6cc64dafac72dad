"""Fetches the rows of calls to one rank, one call after the other, while earlier calls compute."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import LocalColumn
from nccl_transfer.relay import RelayRequest
from nccl_transfer.store.store import Lease
from nccl_transfer.transfer_service import traffic_to_proto
from rlhf.v1 import common_pb2
from services.runtime.deadlines import time_to_agree
from services.runtime.worker import CallContext, CallRows

Fetch = Callable[[], CallRows]
"""Function that fetches the rows of one call and returns them; blocks its thread."""

MOST_ABANDONED = 64
"""Most fetches of a rank that were dropped while they ran and have not ended."""

Abandoned = set[asyncio.Future[CallRows]]
"""Fetches that were dropped while they ran, until they end."""


class FetchQueue:
    """Runs fetches on a thread, one at a time, in the order in which they were added. Its methods are not
    thread-safe: they are used from the event loop alone.

    A fetch that is dropped before it starts never starts. A fetch that is dropped later continues until its deadline,
    or until no session refers to its source rank (`Fetcher.forget`), on a thread that is not reused, while the next
    fetches run on another thread. So a cancelled call delays no other call, unless MOST_ABANDONED dropped fetches are
    running already: then the next fetches of the queue wait for it.

    Args:
        abandoned: Fetches of all queues of the rank that were dropped while they ran.
    """

    def __init__(self, abandoned: Abandoned) -> None:
        self._abandoned = abandoned
        self._fetched: asyncio.Future[CallRows] | None = None
        self._waiting: deque[tuple[Fetch, asyncio.Future[CallRows]]] = deque()
        self._running: asyncio.Future[CallRows] | None = None
        self._thread = _started_thread()

    def add(self, fetch: Fetch) -> asyncio.Future[CallRows]:
        """Adds a fetch; returns a future of its rows, which `drop` and `close` cancel."""
        rows: asyncio.Future[CallRows] = asyncio.get_running_loop().create_future()
        self._waiting.append((fetch, rows))
        self._start_next()
        return rows

    def drop(self, rows: asyncio.Future[CallRows]) -> None:
        """Cancels a fetch, given the future that `add` returned. Has no effect if the rows have arrived."""
        if rows.done():
            return
        rows.cancel()
        if rows is self._running and len(self._abandoned) < MOST_ABANDONED:
            self._abandon()
            self._thread.shutdown(wait=False)
            self._thread, self._running = _started_thread(), None
            self._start_next()

    def close(self) -> None:
        """Cancels all fetches that have not started; the running one ends in the background, and then its thread
        ends."""
        for _, rows in self._waiting:
            rows.cancel()
        self._waiting.clear()
        self._abandon()
        self._thread.shutdown(wait=False)

    def _abandon(self) -> None:
        """Counts the fetch that runs, if one does, as abandoned until it ends."""
        if self._running is not None and self._fetched is not None:
            self._abandoned.add(self._fetched)
            self._fetched.add_done_callback(self._abandoned.discard)
            self._fetched = None

    def _start_next(self) -> None:
        """Starts the first waiting fetch that has not been cancelled, if none is running."""
        while self._waiting and self._running is None:
            fetch, rows = self._waiting.popleft()
            if not rows.done():
                self._running = rows
                fetched = asyncio.get_running_loop().run_in_executor(self._thread, fetch)
                self._fetched = fetched
                fetched.add_done_callback(lambda fetched, rows=rows: self._end(rows, fetched))

    def _end(self, rows: asyncio.Future[CallRows], fetched: asyncio.Future[CallRows]) -> None:
        """Passes the rows or the error of a fetch that has ended to the future `rows`, unless that was cancelled, and,
        unless the fetch was dropped, starts the next one."""
        error = fetched.exception()
        if not rows.done():
            rows.set_exception(error) if error else rows.set_result(fetched.result())
        if rows is self._running:
            self._running = self._fetched = None
            self._start_next()


def _started_thread() -> ThreadPoolExecutor:
    """Returns an executor whose one thread runs already, so that a dropped fetch leaves as many threads as before."""
    thread = ThreadPoolExecutor(1, "transfer")
    thread.submit(int)
    return thread


async def ends_in_time(fetch: asyncio.Future[CallRows], deadline: float) -> bool:
    """Waits for a fetch of a call, and returns whether it has ended in time for the ranks to agree on its outcome. One
    whose transport keeps the deadline of `fetch_rows` has.

    Args:
        fetch: The fetch.
        deadline: Deadline of the call, in seconds of `time.monotonic()`.
    """
    latest = (time_to_agree(deadline) + deadline) / 2  # after the deadline of the fetch
    return bool((await asyncio.wait([fetch], timeout=max(latest - time.monotonic(), 0)))[0])


def fetch_rows(
    fetcher: Fetcher,
    message: common_pb2.Batch,
    context: CallContext,
    timing: common_pb2.Timing,
    *,
    writable: bool,
    on_device: Collection[str] = (),
) -> CallRows:
    """Fetches the rows of a call from the ranks that have them; blocks the thread.

    Args:
        fetcher: Moves the rows.
        message: Batch of the call's request: values of columns, or references to them.
        context: The call, whose deadline limits the fetch.
        timing: Receives the bytes in the message itself and the traffic of each transport.
        writable: Whether the fetched arrays may be written to, as for `Fetcher.fetch`.
        on_device: Names of columns that may stay on the GPU, as for `Fetcher.fetch`.

    Returns:
        The rows, and their numbers in the whole batch.

    Raises:
        RlhfError: The rows could not be fetched, as for `Fetcher.fetch`.
    """
    batch = wire.from_proto(message)
    inline = (column.nbytes for column in batch.columns.values() if isinstance(column, LocalColumn))
    timing.inline_bytes = sum(inline)
    call = context.call
    relay_request = RelayRequest(
        call.call_id, Lease(call.session, call.step), wire.relays_from_proto(message)
    )
    fetched = fetcher.fetch(
        batch, time_to_agree(context.deadline), relay_request, writable=writable, on_device=on_device
    )
    for name, moved in traffic_to_proto(fetched.traffic).items():
        timing.traffic[name].CopyFrom(moved)
    return CallRows(fetched, wire.row_numbers(message))
