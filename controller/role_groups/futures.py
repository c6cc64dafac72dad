"""`concurrent.futures.Future`s that are chained, and awaited from an event loop or from the algorithm's thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from client.unread import error_of, mark_read
from client.waiting import settle, thread_begins
from rlhf.errors import DeadlineExceeded

T = TypeVar("T")


def results(futures: Sequence[Future[T]], timeout_s: float | None = None) -> list[T]:
    """Waits for all futures and returns their results, in order. Raises the exception of the first future that fails,
    without waiting for the others; the errors of all of them are then read (see `mark_read`).

    Args:
        futures: The futures.
        timeout_s: Longest time to wait, in seconds. None: no limit, since every call has a timeout of its own.

    Raises:
        DeadlineExceeded: Futures are still pending after `timeout_s`.
    """
    settle(futures)
    try:
        return _results(futures, timeout_s)
    except Exception:
        if any(future.done() and error_of(future) for future in futures):
            mark_read(futures)
        raise


def _results(futures: Sequence[Future[T]], timeout_s: float | None) -> list[T]:
    if len(futures) == 1:
        return [_only(futures[0], timeout_s)]
    done, pending = wait(futures, timeout_s, FIRST_EXCEPTION)
    for future in done:
        future.result()
    if pending:
        raise _late(len(pending), len(futures), timeout_s)
    return [future.result() for future in futures]


def _only(future: Future[T], timeout_s: float | None) -> T:
    """Returns the result of one future, or raises its exception, or DeadlineExceeded after `timeout_s` seconds (None:
    no limit). Costs less than waiting for several."""
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():  # its own error, or it has ended meanwhile
            return future.result()
        raise _late(1, 1, timeout_s) from None


def _late(pending: int, of: int, timeout_s: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(f"{pending} of {of} results are not there after {timeout_s} s")


def resolved(value: T) -> Future[T]:
    """Returns a future that is already resolved to `value`."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


class Promise(Future[T]):
    """Pending future for its maker to resolve; `Future.cancel` has no effect on it.

    Attributes:
        lateness: How long the call that makes the result is kept back; see `StepContext.gate_of`.
    """

    def __init__(self, lateness: int = 0) -> None:
        super().__init__()
        self.lateness = lateness
        self.set_running_or_notify_cancel()


def lateness_of(futures: Iterable[Future[Any]]) -> int:
    """Returns the greatest lateness of a `Promise` among the futures and those that they were made from by `then` or
    `all_of`; 0 if there is none. Does not depend on which futures are resolved."""
    return max((future.lateness for future in futures if isinstance(future, Promise)), default=0)


def pass_on(
    source: Future[T], target: Future[Any], function: Callable[[T], Any] = lambda result: result
) -> None:
    """Returns without waiting; `target` gets `function(result)`, where `result` is that of `source`. An exception of
    `source` or of `function` becomes that of `target`."""

    def settle(done: Future[T]) -> None:
        try:
            target.set_result(function(done.result()))
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            target.set_exception(error)

    source.add_done_callback(settle)


def on_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Calls a function on a thread of this name, which does not keep the process from ending; returns a future of its
    result."""
    ended: Future[T] = Future()

    def execute() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the future is read
            ended.set_exception(error)
        finally:
            ends()

    ends = thread_begins()
    threading.Thread(target=execute, name=name, daemon=True).start()
    return ended


async def awaited(futures: Iterable[Future[T]]) -> list[T]:
    """Awaits one future after another on an event loop and returns their results, in order; raises the exception of
    the first one in order that failed. Cancelling the coroutine cancels none of the futures."""
    return [future.result() if future.done() else await _resolution(future) for future in futures]


async def _resolution(future: Future[T]) -> T:
    """Awaits the result of a future. Unlike `asyncio.wrap_future`, it does not log the failure of a future whose wait
    was cancelled."""
    loop, resolved = asyncio.get_running_loop(), asyncio.Event()

    def notice(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolved.set)

    future.add_done_callback(notice)
    await resolved.wait()
    return future.result()


def then(future: Future[T], function: Callable[[T], Any]) -> Future[Any]:
    """Returns a future of `function(result)`, where `result` is that of `future`; `function` is called on the thread
    that resolves `future`. An exception of `future` or of `function` becomes that of the returned future."""
    following: Promise[Any] = Promise(lateness_of([future]))
    pass_on(future, following, function)
    return following


def all_of(futures: Sequence[Future[T]]) -> Future[list[T]]:
    """Returns a future of the results of all futures, in order, which is resolved when all are done. If
    futures fail, its exception is that of the first failed one in the order of `futures`."""
    together: Promise[Any] = Promise(lateness_of(futures))
    _gather(deque(futures), [], [], together)
    return together


def _gather(
    left: deque[Future[T]], values: list[T], errors: list[BaseException], together: Future[list[T]]
) -> None:
    """Moves the results of the futures `left`, in order, to `values` or to `errors`, and resolves `together` when all
    are there. Returns without waiting."""

    def go_on(done: Future[T]) -> None:
        left.appendleft(done)
        _gather(left, values, errors, together)

    while left:
        first = left.popleft()  # a future keeps its callbacks, so they must not refer to it
        if not first.done():
            first.add_done_callback(go_on)
            return
        try:
            values.append(first.result())
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            errors.append(error)
    if errors:
        together.set_exception(errors[0])
    else:
        together.set_result(values)


def resolve_after(before: Sequence[Future[Any]], future: Future[None]) -> None:
    """Returns without waiting; `future` is resolved to None as soon as all futures in `before` are done, with a result
    or an error."""
    _resolve_after(deque(before), future)


def _resolve_after(left: deque[Future[Any]], future: Future[None]) -> None:
    """As `resolve_after`; removes the futures that are done from `left`."""
    while left:
        first = left.popleft()  # a future keeps its callbacks, so they must not refer to it
        if not first.done():
            first.add_done_callback(lambda _: _resolve_after(left, future))
            return
    _resolve(future)


_resolving = threading.local()


def _resolve(future: Future[None]) -> None:
    """Resolves a future, and then, one after another, those that its callbacks resolve: nested calls for a few
    hundred of them would exceed Python's recursion limit."""
    if hasattr(_resolving, "next"):
        _resolving.next.append(future)
        return
    _resolving.next = waiting = deque([future])
    try:
        while waiting:
            waiting.popleft().set_result(None)
    finally:
        del _resolving.next
