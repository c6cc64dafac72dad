"""The gate that holds back a step's calls to trained services until a later step has generated."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Gate:
    """Keeps the calls of a step that have to wait, in order, until it is opened. Thread-safe.

    Args:
        before: Function that is called before a call is kept, with False, and before the algorithm waits for a result
            of the step, with whether calls that the gate keeps make that result. It may open this gate and others.

    Attributes:
        is_open: Whether calls enter at once.
    """

    def __init__(self, before: Callable[[bool], None]) -> None:
        self.is_open = False
        self._before = before
        self._kept: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._lock = threading.RLock()

    def reached(self, *, needs_kept: bool) -> None:
        """Tells `before`, unless the gate is open, that the algorithm is about to wait for a result of the step, or to
        make a call that is kept. `needs_kept`: see `before`."""
        if not self.is_open:
            self._before(needs_kept)

    def keep(self, begin: Callable[[], None], result: Future[Any]) -> None:
        """Keeps a call, or begins it where the gate is open.

        Args:
            begin: Function that begins the call, without waiting for it.
            result: Future of the call, which `drop` makes fail.
        """
        self.reached(needs_kept=False)
        with self._lock:
            if not self.is_open:
                self._kept.append((begin, result))
                return
        begin()

    def flush(self) -> None:
        """Begins the calls that are kept, in order; later calls are kept again."""
        with self._lock:
            while self._kept:
                begin, _ = self._kept.popleft()
                begin()

    def open(self) -> None:
        """Begins the calls that are kept; later calls begin at once."""
        with self._lock:
            self.flush()
            self.is_open = True

    def drop(self, error: Exception) -> None:
        """Makes the calls that are kept fail with `error`, and opens the gate."""
        with self._lock:
            kept, self._kept = list(self._kept), deque()
            self.is_open = True
        for _, result in kept:
            result.set_exception(error)
