"""The gate that holds back a step's calls to trained services until a later step has generated."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patience:
    """How long a thread waits for calls that are held back.

    Attributes:
        limit_s: Longest time to wait while the run stands still, in seconds.
        progress: Function that returns a value that differs from the one before where the run has gone on.
    """

    limit_s: float
    progress: Callable[[], object]


class Gate:
    """Holds back calls of a step until it is opened, and then begins them in order. Thread-safe.

    Args:
        before: Function that is called with False before a call is held back, and, before the algorithm waits for a
            result of the step, with whether the result depends on calls that are held back. It may open this gate and
            other gates. Returns how long to wait; None: no limit.

    Attributes:
        is_open: Whether new calls begin at once.
    """

    def __init__(self, before: Callable[[bool], Patience | None]) -> None:
        self.is_open = False
        self._before = before
        self._kept: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._lock = threading.RLock()

    def reached(self, *, needs_kept: bool) -> Patience | None:
        """Calls `before` with `needs_kept`, unless the gate is open, and returns how long to wait; None: no limit. To
        be called before the algorithm waits for a result of the step or makes a call that is held back."""
        return None if self.is_open else self._before(needs_kept)

    def keep(self, begin: Callable[[], None], result: Future[Any]) -> None:
        """Holds back a call, or begins it if the gate is open.

        Args:
            begin: Function that begins the call without waiting for its result.
            result: Future of the call; `drop` sets its exception.
        """
        self.reached(needs_kept=False)
        with self._lock:
            if not self.is_open:
                self._kept.append((begin, result))
                return
        begin()

    def flush(self) -> None:
        """Begins the calls that are held back, in order. The gate stays closed for later calls."""
        with self._lock:
            while self._kept:
                begin, _ = self._kept.popleft()
                begin()

    def open(self) -> None:
        """Begins the calls that are held back, in order. Later calls begin at once."""
        with self._lock:
            self.flush()
            self.is_open = True

    def drop(self, error: Exception) -> None:
        """Makes the calls that are held back fail with `error`, and opens the gate."""
        with self._lock:
            kept, self._kept = list(self._kept), deque()
            self.is_open = True
        for _, result in kept:
            result.set_exception(error)
