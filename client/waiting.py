"""Waits of a controller's threads for futures. A simulation replaces this module alone: its clock stands still while a
thread executes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from rlhf.errors import DeadlineExceeded

CHECK_S = 1.0
"""Interval, in seconds, at which a waiting thread checks whether the simulation is stuck."""
EXECUTES_S = 600.0
"""Longest time, in seconds, that the simulation waits for executing threads."""


class ExecutingThreads:
    """Counts the threads that execute; those that wait in `settle` are left out. Thread-safe.

    Attributes:
        stuck: Reason why no remaining thread can resolve a future; empty while the simulation can continue.
    """

    def __init__(self) -> None:
        self.stuck = ""
        self._count, self._is_over = 0, False
        self._changed = threading.Condition()

    def begin(self) -> None:
        """Counts one thread more."""
        with self._changed:
            self._count += 1

    def end(self) -> None:
        """Counts one thread less."""
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Stops counting; `wait_until_none` then returns at once."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait_until_none(self) -> None:
        """Blocks until no thread executes, counting has stopped, or `stuck` is set. Sets `stuck` if threads still
        execute after `EXECUTES_S` seconds."""
        with self._changed:
            if not self._changed.wait_for(self._is_at_rest, EXECUTES_S):
                self.stuck = f"a thread has executed for {EXECUTES_S:g} s without a wait"

    def _is_at_rest(self) -> bool:
        return self._count == 0 or self._is_over or bool(self.stuck)

    def wait(self, future: Future[Any]) -> None:
        """Blocks until a future is done, and counts the calling thread as waiting. The thread that resolves the future
        counts it as executing again, so that the count is never too low.

        Raises:
            DeadlineExceeded: The simulation is stuck, so no thread can resolve the future.
        """
        resumed = threading.Event()

        def resume(_: object) -> None:
            self.begin()
            resumed.set()

        future.add_done_callback(resume)
        self.end()
        while not resumed.wait(CHECK_S):
            if self.stuck:
                raise DeadlineExceeded(f"the simulation is stuck: {self.stuck}")


_counted: ExecutingThreads | None = None


@contextmanager
def counting() -> Iterator[ExecutingThreads]:
    """Context manager that counts the executing threads of this process: the calling thread, and the threads that
    `thread_begins` adds. Raises ValueError if another simulation counts threads already."""
    global _counted
    if _counted is not None:
        raise ValueError("threads are counted already: one simulation at a time")
    _counted = threads = ExecutingThreads()
    threads.begin()
    try:
        yield threads
    finally:
        _counted = None
        threads.stop()


def settle(futures: Iterable[Future[Any]]) -> None:
    """Blocks until all futures are done where threads are counted; returns at once otherwise. To be called before a
    thread waits for futures. Raises DeadlineExceeded where a simulation is stuck."""
    if _counted is not None:
        for future in futures:
            if not future.done():
                _counted.wait(future)


def thread_begins() -> Callable[[], None]:
    """Counts a thread that is about to start. Returns the function that the thread calls at its end. The function is
    bound to the current simulation, since a thread may outlive it."""
    threads = _counted
    if threads is None:
        return lambda: None
    threads.begin()
    return threads.end
