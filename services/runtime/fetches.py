"""Rows of calls on their way to one rank: fetched one call after the other, while earlier calls compute."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from nccl_transfer.fetch import Fetcher
from nccl_transfer.refs import wire
from nccl_transfer.refs.batch import LocalColumn
from nccl_transfer.relay import RelayRequest
from nccl_transfer.store.store import Lease
from nccl_transfer.transports import traffic_since, traffic_to_proto
from rlhf.v1 import common_pb2
from services.runtime.deadlines import time_to_agree
from services.runtime.worker import CallContext, CallRows

Fetch = Callable[[], CallRows]


class FetchQueue:
    """Runs fetches in the order in which they were added, one at a time on a thread. Used from the event loop.

    A fetch that is dropped does not start, or where it has started, runs on to its deadline on its own thread while
    the next ones go on: so a call that nobody waits for holds up no other.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Fetch, asyncio.Future[CallRows]]] = deque()
        self._running: asyncio.Future[CallRows] | None = None
        self._thread = ThreadPoolExecutor(1, "transfer")

    def add(self, fetch: Fetch) -> asyncio.Future[CallRows]:
        """The rows to come. They are cancelled with a fetch that is dropped."""
        rows: asyncio.Future[CallRows] = asyncio.get_running_loop().create_future()
        self._waiting.append((fetch, rows))
        self._start_next()
        return rows

    def drop(self, rows: asyncio.Future[CallRows]) -> None:
        """Nobody waits for these rows any more. No effect where they have come."""
        if rows.done():
            return
        rows.cancel()
        if rows is self._running:
            self._thread.shutdown(wait=False)
            self._thread, self._running = ThreadPoolExecutor(1, "transfer"), None
            self._start_next()

    def close(self) -> None:
        """Drops all fetches."""
        for _, rows in self._waiting:
            rows.cancel()
        self._waiting.clear()
        self._thread.shutdown(wait=False)

    def _start_next(self) -> None:
        while self._waiting and self._running is None:
            fetch, rows = self._waiting.popleft()
            if not rows.done():
                self._running = rows
                fetched = asyncio.get_running_loop().run_in_executor(self._thread, fetch)
                fetched.add_done_callback(lambda fetched, rows=rows: self._end(rows, fetched))

    def _end(self, rows: asyncio.Future[CallRows], fetched: asyncio.Future[CallRows]) -> None:
        error = fetched.exception()
        if not rows.done():
            rows.set_exception(error) if error else rows.set_result(fetched.result())
        if rows is self._running:
            self._running = None
            self._start_next()


def fetch_rows(
    fetcher: Fetcher,
    message: common_pb2.Batch,
    context: CallContext,
    timing: common_pb2.Timing,
    *,
    writable: bool,
) -> CallRows:
    """Fetches the rows of a call, and notes in `timing` what was moved; blocks.

    Args:
        writable: As of `Fetcher.fetch`.

    Raises:
        RlhfError: As of `Fetcher.fetch`.
    """
    batch = wire.from_proto(message)
    inline = (column.nbytes for column in batch.columns.values() if isinstance(column, LocalColumn))
    timing.inline_bytes = sum(inline)
    call = context.call
    relay_request = RelayRequest(
        call.call_id, Lease(call.session, call.step), wire.relays_from_proto(message)
    )
    before = fetcher.traffic()
    fetched = fetcher.fetch(batch, time_to_agree(context.deadline), relay_request, writable=writable)
    # One fetch runs at a time, so the difference is this call's, except where a dropped fetch is still under way.
    for name, moved in traffic_to_proto(traffic_since(fetcher.traffic(), before)).items():
        timing.traffic[name].CopyFrom(moved)
    return CallRows(fetched, wire.row_numbers(message))
