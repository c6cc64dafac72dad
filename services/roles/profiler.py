"""Profiles calls with torch's profiler."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

MAX_CALLS = 100
"""Most calls of one profile: the profiler keeps all their events in memory."""


class CallProfiler:
    """Profiles a number of calls after `arm`, and writes them to a file as one Chrome trace. `arm` may be called on any
    thread, within a call or not; calls run one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = 0
        self._path = Path()
        self._request = 0
        self._profiler: torch.profiler.profile | None = None

    def arm(self, path: Path, calls: int) -> None:
        """Requests a profile of the `calls` calls after the current one. The last of them writes it to the file `path`,
        whose directory is created here. Replaces the path and the count of an earlier request. Raises ValueError for
        more than MAX_CALLS calls."""
        if calls > MAX_CALLS:
            raise ValueError(f"profile: calls is {calls}; at most {MAX_CALLS} are traced")
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._path, self._left = path, calls
            self._request += 1

    @contextmanager
    def around_call(self) -> Iterator[None]:
        """Context manager around each call, which profiles it if a profile was requested before the call. An error of
        the profiler is logged and ends the profile; the call neither fails nor changes by it."""
        with self._lock:
            begun_in = self._request
            if self._left and self._profiler is None:
                self._start()
        try:
            yield
        finally:
            with self._lock:
                if self._profiler is not None and begun_in == self._request:
                    self._left -= 1
                    if not self._left:
                        self._write()

    def _start(self) -> None:
        try:
            profiler = torch.profiler.profile()
            profiler.start()
        except Exception:
            self._left = 0
            logging.exception("profile: the profiler does not start, and %s is not written", self._path)
        else:
            self._profiler = profiler

    def _write(self) -> None:
        """Stops the profiler and writes its file."""
        profiler, self._profiler = self._profiler, None
        assert profiler is not None, "a profile has begun"
        try:
            profiler.stop()
            profiler.export_chrome_trace(str(self._path))
        except Exception:
            logging.exception("profile: %s is not written", self._path)
