"""Errors of calls whose results are not waited for, kept until they are raised."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from typing import Any

from rlhf.errors import CallCancelled, RlhfError

READ = "was_read"
"""Key in the attributes of an exception that a wait has raised."""


def mark_read(futures: Sequence[Future[Any]]) -> None:
    """Marks the errors of futures as read; those of pending futures when they fail. Futures that fail for the same
    reason share one error object, so the mark applies to all of them."""
    for future in futures:
        future.add_done_callback(_mark)


def error_of(future: Future[Any]) -> BaseException | None:
    """Returns the error of a future that is done; None where it has none, or was cancelled."""
    return None if future.cancelled() else future.exception()


class UnreadErrors:
    """The errors of some calls, in the order in which the calls were made. Thread-safe."""

    def __init__(self) -> None:
        self._calls: dict[Future[Any], str] = {}

    def watch(self, call: Future[Any], name: str) -> None:
        """Adds a call by its future. `name`: its name in the text of the error."""
        self._calls[call] = name

        def forget(done: Future[Any]) -> None:
            if not error_of(done):
                self._calls.pop(done, None)

        call.add_done_callback(forget)

    def raise_first(self, where: str) -> None:
        """Removes the calls that are done, and raises the first of their errors that is unread and not CallCancelled.
        The raised error has the same class, or is an RlhfError if that class is not a subclass of RlhfError; its
        message contains `where` and the name of the call."""
        done = [(call, name) for call, name in self._calls.copy().items() if call.done()]
        for call, _ in done:
            self._calls.pop(call, None)
        for call, name in done:
            error = error_of(call)
            if error and READ not in error.__dict__ and not isinstance(error, CallCancelled):
                mark_read([call])
                raise _named(error, f"{where}: {name}: {error}") from error


def _mark(done: Future[Any]) -> None:
    if error := error_of(done):
        error.__dict__[READ] = True


def _named(error: BaseException, text: str) -> RlhfError:
    if not isinstance(error, RlhfError):
        return RlhfError(text)
    named = copy(error)
    named.args = (text,)
    return named
