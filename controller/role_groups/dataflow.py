"""Futures and placement: batches whose columns are still being computed, and who has to wait for whom.

A group call returns at once, with a `FutureBatch`. The call itself starts as soon as its input columns are
there and every earlier call on one of its devices has ended. So one straight-line algorithm runs colocated,
split or interleaved, as the resource pools say (HybridFlow, sections 4.1 and 4.2).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import uvloop

from client.session import StepContext
from nccl_transfer.refs.batch import Batch, Column, concat_columns
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import DeadlineExceeded, InvalidRequest

T = TypeVar("T")

CLOSE_S = 5.0
"""How long a busy loop may hold up the end of a run, and its thread again as long."""


class Loop:
    """The controller's one event loop, on a thread of its own, so that algorithms are plain blocking code."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="grpc", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine on the loop; safe from any thread. Cancelling its future forgets the result and does not
        stop the work, so it needs less than that of `asyncio.run_coroutine_threadsafe`."""
        future: Future[T] = Future()
        self._loop.call_soon_threadsafe(self._begin, work, future)
        return future

    def _begin(self, work: Coroutine[Any, Any, T], future: Future[T]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._settle, future))

    def _settle(self, future: Future[T], task: asyncio.Task[T]) -> None:
        self._tasks.remove(task)
        if task.cancelled():
            future.cancel()
        if not future.set_running_or_notify_cancel():
            return
        if error := task.exception():
            future.set_exception(error)
        else:
            future.set_result(task.result())

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs a coroutine to its end."""
        return self.start(work).result(timeout_s)

    def close(self) -> None:
        """Cancels what still runs and ends the thread; one that is busy ends with its process."""
        with contextlib.suppress(TimeoutError):
            self.start(_cancel_all()).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=3) if tasks else None


@dataclass(frozen=True)
class CallRecord:
    """Record of one finished group call.

    Attributes:
        service, method: Name in the config; Python name of the method.
        started_s, ended_s: Unix time at which its turn came on the first rank, and of the last response.
        metrics: Means over the ranks by name.
        policy_version: Of the service after the call.
        responses: The response of each rank, in rank order.
    """

    service: str
    method: str
    started_s: float
    ended_s: float
    metrics: Mapping[str, float]
    policy_version: int
    responses: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class FutureBatch:
    """Rows x named columns, each resolved or still being computed. The algebra waits for nothing.

    Attributes:
        rows: Number of rows.
        columns: Columns by name.
        calls: The calls that make them.
        step: The step on whose behalf calls on these rows are made, of batches of several steps that of the first;
            None: the one that was begun last.
    """

    rows: int
    columns: Mapping[str, Future[Column]]
    calls: tuple[Future[CallRecord], ...] = field(default=())
    step: StepContext | None = None

    @staticmethod
    def of(**values: np.ndarray | Jagged[np.ndarray] | list[str]) -> FutureBatch:
        """Columns held here."""
        batch = Batch.of(**values)
        return FutureBatch(batch.rows, {name: resolved(column) for name, column in batch.columns.items()})

    def __or__(self, other: FutureBatch) -> FutureBatch:
        """The columns and calls of both; where both have a name, the right one's."""
        if other.rows != self.rows:
            raise InvalidRequest(f"batches of {self.rows} and {other.rows} rows cannot be joined")
        calls = (*self.calls, *(call for call in other.calls if call not in self.calls))
        return FutureBatch(self.rows, {**self.columns, **other.columns}, calls, self.step or other.step)

    def of_step(self, step: StepContext | None) -> FutureBatch:
        """The same rows, as those of a step."""
        return replace(self, step=step)

    def select(self, names: Iterable[str]) -> FutureBatch:
        """Only these columns."""
        return replace(self, columns={name: self[name] for name in names})

    def drop(self, *names: str) -> FutureBatch:
        """All columns but these, of which there may be some."""
        kept = {name: column for name, column in self.columns.items() if name not in names}
        return replace(self, columns=kept)

    def rename(self, **names: str) -> FutureBatch:
        """Columns under other names: `costs.rename(rewards="costs")`, so that two rewards fit into one batch."""
        missing = sorted(set(names) - set(self.columns))
        if missing:
            raise InvalidRequest(f"the batch has no columns {missing}; it has {sorted(self.columns)}")
        renamed = {names.get(name, name): column for name, column in self.columns.items()}
        return replace(self, columns=renamed)

    def take(self, rows: np.ndarray) -> FutureBatch:
        """These rows in this order."""
        taken = {name: then(column, lambda c: c.take(rows)) for name, column in self.columns.items()}
        return replace(self, rows=len(rows), columns=taken)

    def repeat(self, times: int) -> FutureBatch:
        """Every row `times` times, side by side: several samples per prompt."""
        return self.take(np.repeat(np.arange(self.rows), times))

    @staticmethod
    def concat(batches: Sequence[FutureBatch]) -> FutureBatch:
        """The rows of all batches in order, of which there is at least one; only the columns that all have."""
        names = [name for name in batches[0].columns if all(name in batch for batch in batches)]
        joined = {name: then(all_of([batch[name] for batch in batches]), concat_columns) for name in names}
        calls = tuple(dict.fromkeys(call for batch in batches for call in batch.calls))
        step = next((batch.step for batch in batches if batch.step), None)
        return FutureBatch(sum(batch.rows for batch in batches), joined, calls, step)

    def checked(self, check: Callable[[CallRecord], CallRecord]) -> FutureBatch:
        """The same rows, once every call that makes them has passed; what `check` raises is what becomes of them."""
        calls = tuple(then(call, check) for call in self.calls)
        passed: Future[Any] = all_of(calls)
        columns = {
            name: then(all_of([passed, column]), lambda values: values[1])
            for name, column in self.columns.items()
        }
        return replace(self, columns=columns, calls=calls)

    def __getitem__(self, name: str) -> Future[Column]:
        if name not in self.columns:
            raise InvalidRequest(f"the batch has no column {name!r}; it has {sorted(self.columns)}")
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def result(self, names: Iterable[str], timeout_s: float | None = None) -> Batch:
        """Waits for these columns, as `results`."""
        wanted = {name: self[name] for name in names}
        return Batch(self.rows, dict(zip(wanted, results(list(wanted.values()), timeout_s), strict=True)))

    def records(self, timeout_s: float | None = None) -> list[CallRecord]:
        """Waits for all calls, as `results`; in call order."""
        return results(self.calls, timeout_s)


def results(futures: Sequence[Future[T]], timeout_s: float | None = None) -> list[T]:
    """Waits for all of them, or until the first fails: its error is the cause of those that follow.

    Args:
        timeout_s: None: for as long as they take. Every call has a deadline of its own.

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
    """As `results` of one, which needs no watch over several."""
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done():
            raise
        raise _late(1, 1, timeout_s) from None


def _late(pending: int, of: int, timeout_s: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(f"{pending} of {of} results are not there after {timeout_s} s")


def resolved(value: T) -> Future[T]:
    """A future that is there already."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def promise() -> Future[Any]:
    """A future to be resolved here: who waits for it may give up, but cannot cancel it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


async def awaited(futures: Iterable[Future[T]]) -> list[T]:
    """Their results; one that is there already costs no turn of the loop. Who gives up waiting cancels none of them."""
    return [f.result() if f.done() else await asyncio.shield(asyncio.wrap_future(f)) for f in futures]


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
    """Resolves a future once all those before it are: a call that failed early still keeps its place in the order."""
    left = [other for other in before if not other.done()]
    if left:
        left[0].add_done_callback(lambda _: resolve_after(left[1:], future))
    else:
        _resolve(future)


_resolving = threading.local()


def _resolve(future: Future[None]) -> None:
    """Resolves a future, and those that wait for it alone one after the other: within each other, a few hundred would
    exceed Python's depth of calls."""
    if hasattr(_resolving, "next"):
        _resolving.next.append(future)
        return
    _resolving.next = waiting = deque([future])
    try:
        while waiting:
            waiting.popleft().set_result(None)
    finally:
        del _resolving.next


class Place:
    """A call's place in the order of calls on its devices.

    Args:
        queue: Whose ranks run the call.
        before: The last calls on its devices.
        patience_s: See below.

    Attributes:
        first: What has to have happened before the call may be sent.
        patience_s: Longest time that the call may wait for its inputs and for its turn, in seconds.
    """

    def __init__(self, queue: object, before: Sequence[Place], patience_s: float) -> None:
        self.queue = queue
        self.patience_s = patience_s
        # Calls that share a queue are ordered by the ranks: the next may be sent as soon as this one has been.
        self.first = [each.sent if each.queue is queue else each.ended for each in before]
        self.sent, self.ended = promise(), promise()
        self._all_before = [each.ended for each in before]

    def was_sent(self) -> None:
        """The call's ranks have it."""
        self.sent.set_result(None)

    def leave(self) -> None:
        """The call has ended, or will not be made; it keeps its place in the order until those before it are gone."""
        if not self.sent.done():
            resolve_after(self.first, self.sent)
        resolve_after(self._all_before, self.ended)


class Placement:
    """Keeps calls on common devices in call order, and lets all others run at the same time."""

    def __init__(self) -> None:
        self._last: dict[str, Place] = {}
        self._unfinished: dict[Place, float] = {}

    def longest_wait_s(self) -> float:
        """Seconds that all unfinished calls may take, one after another."""
        return sum(self._unfinished.copy().values())

    def enter(self, devices: frozenset[str], queue: object, time_s: float) -> Place:
        """Takes a place in the order; called in program order.

        A call may wait for as long as all unfinished calls before it, on whatever devices, may take one after another.
        Calls that keep to their time never make a later one give up, and no call waits for ever.

        Args:
            devices: Where the call runs.
            queue: Whose ranks run the call: calls of one queue run on the same ranks, in the order in which they are
                sent, so several may be under way.
            time_s: Longest time of the call itself, once its turn has come.
        """
        before = list({id(last): last for device in devices if (last := self._last.get(device))}.values())
        patience_s = self.longest_wait_s() + time_s
        place = Place(queue, before, patience_s)
        self._last.update(dict.fromkeys(devices, place))
        self._unfinished[place] = time_s
        place.ended.add_done_callback(lambda _: self._unfinished.pop(place, None))
        return place
