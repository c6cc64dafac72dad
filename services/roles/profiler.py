"""Profiles of calls by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

MAX_CALLS = 100
"""Most calls of one profile: the profiler keeps all their events in memory."""


class CallProfiler:
    """Writes a Chrome trace of a number of calls, once it is armed."""

    def __init__(self) -> None:
        self._left = 0
        self._path = Path()
        self._profiler: torch.profiler.profile | None = None

    def arm(self, path: Path, calls: int) -> None:
        """Profiles the next `calls` calls into the file `path`, whose directory is created."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._left = calls + 1

    @contextmanager
    def around_call(self) -> Iterator[None]:
        """A call, profiled where the profiler is armed; the call that arms it is not."""
        if self._left and self._profiler is None:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        try:
            yield
        finally:
            self._left = max(self._left - 1, 0)
            if self._profiler is not None and not self._left:
                self._profiler.stop()
                self._profiler.export_chrome_trace(str(self._path))
                self._profiler = None
