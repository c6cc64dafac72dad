"""An event loop in virtual time: its clock jumps to the next timer when nothing is ready and every thread of the
controller waits."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

from client.waiting import ExecutingThreads


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose time is virtual, in seconds from 0. Callbacks are executed while no counted thread executes, so
    their order does not depend on how fast threads are.

    Args:
        threads: Counts the other threads that execute.
    """

    def __init__(self, threads: ExecutingThreads) -> None:
        self._now = 0.0
        super().__init__(_WaitingSelector(threads, self._pass))

    def time(self) -> float:
        """Returns the virtual time in seconds."""
        return self._now

    def _pass(self, seconds: float) -> None:
        self._now += seconds


class _WaitingSelector(selectors.DefaultSelector):
    """Selector that waits for threads in place of time."""

    def __init__(self, threads: ExecutingThreads, pass_time: Callable[[float], None]) -> None:
        super().__init__()
        self._threads, self._pass_time = threads, pass_time

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        """Waits until no thread executes and returns the ready events; advances the time if there are none."""
        self._threads.wait_until_none()
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            self._threads.stuck = self._threads.stuck or "a thread waits, and no call is under way"
            return super().select(None)
        self._pass_time(timeout)
        return []
