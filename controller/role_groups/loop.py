"""The controller's event loop, which runs on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import uvloop

from client.waiting import settle

T = TypeVar("T")

CLOSE_S = 5.0
"""Longest time, in seconds, that `Loop.close` waits for running tasks to end, and again for the thread."""
CANCEL_S = 3.0
"""Longest time, in seconds, to wait for cancelled tasks to end."""


class Loop:
    """Event loop on a thread of its own, so that algorithms can be written as blocking code. Starts when it is
    made.

    Args:
        loop: The event loop. Default: one of uvloop.
        name: Name of the thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None, name: str = "grpc") -> None:
        self._loop = loop or uvloop.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Runs the loop until `close`. A task that raises SystemExit ends alone: its future has the exception, which
        asyncio raises here too."""
        while True:
            try:
                return self._loop.run_forever()
            except SystemExit:
                continue

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop and returns a future of its result. Thread-safe. Cancelling the future drops
        the result and does not cancel the coroutine; this costs less than `asyncio.run_coroutine_threadsafe`."""
        future: Future[T] = Future()
        self._loop.call_soon_threadsafe(self._begin, work, future)
        return future

    def _begin(self, work: Coroutine[Any, Any, T], future: Future[T]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._settle, future))

    def _settle(self, future: Future[T], task: asyncio.Task[T]) -> None:
        self._tasks.remove(task)
        if task.cancelled():
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        if error := task.exception():
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs a coroutine on the loop, waits for it, from another thread than the loop's, and returns its result or
        raises its exception. Raises TimeoutError after `timeout_s` seconds; the coroutine then continues."""
        future = self.start(work)
        settle([future])
        return future.result(timeout_s)

    def close(self) -> None:
        """Cancels running tasks, stops the loop, joins its thread and frees the descriptors of the loop. A thread that
        does not end within `CLOSE_S` is left to end with the process, and so are these. Closing it again does
        nothing."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):
            self.start(_cancel_all()).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=CANCEL_S) if tasks else None
