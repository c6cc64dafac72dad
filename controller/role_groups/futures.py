"""Futures that are chained and awaited across threads: of an event loop, and of the algorithm's own thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from rlhf.errors import DeadlineExceeded

T = TypeVar("T")


def results(futures: Sequence[Future[T]], timeout_s: float | None = None) -> list[T]:
    """Results of all futures, in order. The first failure ends the wait and is raised: later ones follow from it.

    Args:
        timeout_s: None: no limit here, since every call has a deadline of its own.

    Raises:
        DeadlineExceeded: Some are still pending after this time.
    """
    if len(futures) == 1:
        return [_only(futures[0], timeout_s)]
    done, pending = wait(futures, timeout_s, FIRST_EXCEPTION)
    for future in done:
        future.result()
    if pending:
        raise _late(len(pending), len(futures), timeout_s)
    return [future.result() for future in futures]


def _only(future: Future[T], timeout_s: float | None) -> T:
    """As `results` of one future, without the cost of watching several."""
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():
            raise
        raise _late(1, 1, timeout_s) from None


def _late(pending: int, of: int, timeout_s: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(f"{pending} of {of} results are not there after {timeout_s} s")


def resolved(value: T) -> Future[T]:
    """A future that is already resolved."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def promise() -> Future[Any]:
    """A future that its maker resolves. A caller may stop waiting for it and cannot cancel it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


async def awaited(futures: Iterable[Future[T]]) -> list[T]:
    """Results of all futures, in order; a resolved one costs no turn of the loop. Cancelling the wait cancels none of
    them."""
    return [future.result() if future.done() else await _resolution(future) for future in futures]


async def _resolution(future: Future[T]) -> T:
    """The result of a future. `asyncio.wrap_future` would log the failure of a future whose wait was cancelled."""
    loop, resolved = asyncio.get_running_loop(), asyncio.Event()

    def notice(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolved.set)

    future.add_done_callback(notice)
    await resolved.wait()
    return future.result()


def then(future: Future[T], function: Callable[[T], Any]) -> Future[Any]:
    """The future of `function(result)`; an error passes through."""
    following = promise()

    def pass_on(done: Future[T]) -> None:
        try:
            following.set_result(function(done.result()))
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            following.set_exception(error)

    future.add_done_callback(pass_on)
    return following


def all_of(futures: Sequence[Future[T]]) -> Future[list[T]]:
    """The future of all results, in order, once all are done; the first error in that order passes through."""
    together = promise()

    def settle(_: object = None) -> None:
        left = [future for future in futures if not future.done()]
        if left:
            left[0].add_done_callback(settle)
            return
        try:
            together.set_result([future.result() for future in futures])
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            together.set_exception(error)

    settle()
    return together


def resolve_after(before: Sequence[Future[None]], future: Future[None]) -> None:
    """Resolves a future once all futures before it are resolved."""
    left = [other for other in before if not other.done()]
    if left:
        left[0].add_done_callback(lambda _: resolve_after(left[1:], future))
    else:
        _resolve(future)


_resolving = threading.local()


def _resolve(future: Future[None]) -> None:
    """Resolves a future, and then those that its callbacks resolve: nested, a few hundred of them would exceed Python's
    recursion limit."""
    if hasattr(_resolving, "next"):
        _resolving.next.append(future)
        return
    _resolving.next = waiting = deque([future])
    try:
        while waiting:
            waiting.popleft().set_result(None)
    finally:
        del _resolving.next
