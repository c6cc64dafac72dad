"""Writes checkpoints in the background: on one thread, while the compute thread goes on."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rlhf.errors import Restarted
from services.storage.written import WrittenFile

REMEMBERED = 4
"""Number of checkpoints whose outcome is remembered."""


class BackgroundWriter:
    """Writes checkpoints one after another on a thread of its own. Thread-safe as far as calls are made from the
    compute thread (`start`, `close`) and the event loop (`writing`).

    Args:
        prepare_thread: Called on the thread at its start; see `Worker.prepare_thread`. Default: does nothing.
    """

    def __init__(self, prepare_thread: Callable[[], None] = lambda: None) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=prepare_thread)
        self._writes: dict[Path, Future[list[WrittenFile]]] = {}

    def start(self, directory: Path, write: Callable[[], list[WrittenFile]]) -> None:
        """Queues the write of a checkpoint and returns without waiting.

        Args:
            directory: Directory of the checkpoint.
            write: Function that writes it, and returns the files that it has written.
        """
        remembered = list(self._writes.items())[1 - REMEMBERED :]
        self._writes = {**dict(remembered), directory: self._thread.submit(_written, write)}

    def writing(self, directory: Path) -> Future[list[WrittenFile]]:
        """Returns the future of the files of the checkpoint that was started in `directory`. Raises Restarted where
        none was started there by this process, or it is no longer remembered; see REMEMBERED."""
        if directory not in self._writes:
            raise Restarted(f"this process of the rank writes no checkpoint to {directory}")
        return self._writes[directory]

    def close(self) -> None:
        """Drops the writes that have not begun, and returns without waiting for the one that has."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _written(write: Callable[[], list[WrittenFile]]) -> list[WrittenFile]:
    """Returns the files that `write` has written. An error of it is raised with its traceback as a note: the frames of
    a traceback would keep the copy of the state in memory for as long as the outcome is remembered."""
    try:
        return write()
    except BaseException as error:  # noqa: BLE001 - it is raised again
        error.add_note(traceback.format_exc())
        error.__cause__ = error.__context__ = None
        del write
        raise error.with_traceback(None)  # noqa: B904 - it is the same error
