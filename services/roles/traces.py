"""Traces of calls by torch's profiler."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from services.runtime.worker import Worker


class Traces:
    """Chrome traces of a number of calls, by torch's profiler."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._left = 0
        self._path = Path()
        self._profiler: torch.profiler.profile | None = None

    def arm(self, directory: Path, calls: int) -> Path:
        """Traces the next `calls` calls into one file; returns its path."""
        directory.mkdir(parents=True, exist_ok=True)
        worker = self._worker
        self._path = (
            directory / f"{worker.role}-{worker.ranks.rank}-v{worker.policy_version}-{os.getpid()}.json"
        )
        self._left = calls + 1
        return self._path

    @contextmanager
    def around(self) -> Iterator[None]:
        """A call; the one that armed is not traced itself."""
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
