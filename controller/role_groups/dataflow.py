"""Batches whose columns are still being computed.

A group call returns a `FutureBatch` without waiting. Its requests are sent when its input columns are resolved and
the calls before it on the same devices have ended (see `placement`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from client.session import StepContext
from client.unread import error_of
from controller.role_groups.chunks import ChunkedColumn, sizes_of, taken
from controller.role_groups.futures import all_of, lateness_of, resolved, results, then
from nccl_transfer.refs.batch import Batch, Column, concat_columns
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import DeadlineExceeded, InvalidRequest, RlhfError

T = TypeVar("T")


@dataclass(frozen=True)
class CallRecord:
    """Record of a finished group call.

    Attributes:
        service, method: Name of the service in the config, and Python name of the method.
        started_s, ended_s: Unix times, in seconds, at which the first rank began to execute the call, and at which
            the last rank responded.
        metrics: Mean of each metric over the ranks, by name.
        policy_version: Policy version of the service after the call.
        responses: Response message of each rank, in rank order.
        parts: Records of the calls made for it: those that offloaded and onloaded services before it, and those that a
            transfer of weights consists of.
        chunks: For a call whose rows were sent in chunks, the records of the calls that it consists of, in order. Their
            responses are those of this record, and their parts are its parts.
    """

    service: str
    method: str
    started_s: float
    ended_s: float
    metrics: Mapping[str, float]
    policy_version: int
    responses: tuple[Any, ...]
    parts: tuple[CallRecord, ...] = ()
    chunks: tuple[CallRecord, ...] = ()

    @property
    def sent(self) -> tuple[CallRecord, ...]:
        """Records of the calls that were sent: `chunks`, or this one."""
        return self.chunks or (self,)

    @property
    def seconds(self) -> float:
        """Duration of the call in seconds, without the time between its chunks."""
        return sum(call.ended_s - call.started_s for call in self.sent)


@dataclass(frozen=True, eq=False)
class FutureBatch:
    """A batch of rows with named columns, each of which is a future. Only `result`, `records` and `metrics` wait;
    the other methods return new batches without waiting.

    Attributes:
        rows: Number of rows.
        columns: Future of each column, by name.
        calls: Futures of the records of the calls that make the columns.
        step: The step that calls on these rows belong to; None: the step begun last. A batch that is joined from
            batches of several steps has the first of them.
    """

    rows: int
    columns: Mapping[str, Future[Column]]
    calls: tuple[Future[CallRecord], ...] = field(default=())
    step: StepContext | None = None

    @staticmethod
    def of(**values: np.ndarray | Jagged[np.ndarray] | list[str]) -> FutureBatch:
        """Makes a batch from values that the controller holds, by name of the column."""
        batch = Batch.of(**values)
        return FutureBatch(batch.rows, {name: resolved(column) for name, column in batch.columns.items()})

    def __or__(self, other: FutureBatch) -> FutureBatch:
        """Joins two batches of the same rows: returns the columns and calls of both. Where both have a column of the
        same name, that of `other` is taken.

        Raises:
            InvalidRequest: The batches have different numbers of rows.
        """
        if other.rows != self.rows:
            raise InvalidRequest(f"batches of {self.rows} and {other.rows} rows cannot be joined")
        calls = (*self.calls, *(call for call in other.calls if call not in self.calls))
        return FutureBatch(self.rows, {**self.columns, **other.columns}, calls, self.step or other.step)

    def of_step(self, step: StepContext | None) -> FutureBatch:
        """Returns the same rows with `step` as the step that calls on them belong to."""
        return replace(self, step=step)

    def select(self, names: Iterable[str]) -> FutureBatch:
        """Returns a batch with only the named columns. Raises InvalidRequest where one is missing."""
        return replace(self, columns={name: self[name] for name in names})

    def drop(self, *names: str) -> FutureBatch:
        """Returns a batch without the named columns; names that it does not have are ignored."""
        kept = {name: column for name, column in self.columns.items() if name not in names}
        return replace(self, columns=kept)

    def rename(self, **names: str) -> FutureBatch:
        """Renames columns, given as old=new: `scored.rename(rewards="costs")`. Raises InvalidRequest where one is
        missing."""
        missing = sorted(set(names) - set(self.columns))
        if missing:
            raise InvalidRequest(f"the batch has no columns {missing}; it has {sorted(self.columns)}")
        renamed = {names.get(name, name): column for name, column in self.columns.items()}
        return replace(self, columns=renamed)

    def take(self, rows: np.ndarray) -> FutureBatch:
        """Returns the rows with indices `rows` [n] int64, in this order. Rows that ascend stay in their chunks."""
        columns = {name: taken(column, rows) for name, column in self.columns.items()}
        return replace(self, rows=len(rows), columns=columns)

    def repeat(self, times: int) -> FutureBatch:
        """Repeats every row `times` times; its copies are neighbours. For several samples per prompt."""
        return self.take(np.repeat(np.arange(self.rows), times))

    @staticmethod
    def concat(batches: Sequence[FutureBatch]) -> FutureBatch:
        """Concatenates the rows of at least one batch, in order. Columns that are not in all batches are dropped."""
        names = [name for name in batches[0].columns if all(name in batch for batch in batches)]
        joined = {name: then(all_of([batch[name] for batch in batches]), concat_columns) for name in names}
        calls = tuple(dict.fromkeys(call for batch in batches for call in batch.calls))
        step = next((batch.step for batch in batches if batch.step), None)
        return FutureBatch(sum(batch.rows for batch in batches), joined, calls, step)

    def in_chunks(self, sizes: Sequence[int]) -> FutureBatch:
        """Returns the same rows in chunks of consecutive rows. A call that computes each row by itself is made once for
        each chunk, when its columns are there, and the columns that it returns are in these chunks again.

        Args:
            sizes: Number of rows of each chunk, in order.
        """
        columns: dict[str, Future[Column]] = {
            name: ChunkedColumn.cut(column, sizes) for name, column in self.columns.items()
        }
        return replace(self, columns=columns)

    def chunks(self) -> list[FutureBatch]:
        """Returns the chunks that the rows are in, at least one. Where only some columns are in chunks, the others are
        cut likewise; where columns are in different chunks, all rows are one chunk."""
        sizes = sizes_of(self.columns.values())
        if len(sizes) < 2:
            return [self]
        cut = {name: ChunkedColumn.cut(column, sizes).chunks for name, column in self.columns.items()}
        return [
            replace(self, rows=rows, columns={name: chunks[number] for name, chunks in cut.items()})
            for number, rows in enumerate(sizes)
        ]

    def checked(self, check: Callable[[CallRecord], CallRecord]) -> FutureBatch:
        """Returns the same rows, with columns that are resolved only when `check` has returned for the record of
        every call that makes them. An exception that `check` raises becomes that of the columns."""
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
        """Waits for the named columns and returns them as a resolved batch. Raises InvalidRequest where one is missing,
        the error of a call that failed, or DeadlineExceeded after `timeout_s` seconds (None: no limit)."""
        wanted = {name: self[name] for name in names}
        return Batch(
            self.rows, dict(zip(wanted, self._waited(list(wanted.values()), timeout_s), strict=True))
        )

    def records(self, timeout_s: float | None = None) -> list[CallRecord]:
        """Waits for all calls and returns their records, in the order of `calls`. Raises the error of a call that
        failed, or DeadlineExceeded after `timeout_s` seconds (None: no limit)."""
        return self._waited(self.calls, timeout_s)

    def metrics(self, timeout_s: float | None = None) -> dict[str, float]:
        """Waits for all calls and returns each of their metrics by name, as the mean over the calls that have it.
        Raises the error of a call that failed, or DeadlineExceeded after `timeout_s` seconds (None: no limit)."""
        return mean_metrics(self.records(timeout_s))

    def _waited(self, awaited: Sequence[Future[T]], timeout_s: float | None) -> list[T]:
        """Waits for futures and returns their results. Before, notifies the gates of the step, so that they begin the
        calls on which the futures depend. On a thread on which they cannot, their limit holds where `timeout_s` is
        None.

        Raises:
            RlhfError: The run has stood still up to this limit. It is no DeadlineExceeded, after which a run may be
                restarted (`Restarts`): it would come again.
        """
        patience = self.step.reached(lateness_of(awaited)) if self.step else None
        if self.step is None or patience is None or timeout_s is not None:
            return results(awaited, timeout_s)
        while True:
            before = patience.progress()
            try:
                return results(awaited, patience.limit_s)
            except DeadlineExceeded as error:
                if any(error_of(each) for each in awaited if each.done()):
                    raise
                if patience.progress() != before:
                    continue
                raise RlhfError(
                    f"step {self.step.number}: {error}: the calls that make them are held back (run.ahead) until the "
                    "loop over the steps goes on, and this is another thread"
                ) from None


def with_parts(records: Iterable[CallRecord]) -> Iterator[CallRecord]:
    """Yields records, each after its `parts`."""
    for record in records:
        yield from record.parts
        yield record


def mean_metrics(records: Sequence[CallRecord]) -> dict[str, float]:
    """Returns the mean of each metric over the calls that have it, by name."""
    names = dict.fromkeys(name for record in records for name in record.metrics)
    values = {name: [r.metrics[name] for r in records if name in r.metrics] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}
