"""Batches whose columns are still being computed.

A group call returns a `FutureBatch` at once. The call itself is sent as soon as its input columns are resolved and
its turn on its devices has come (`placement`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from client.session import StepContext
from controller.role_groups.futures import all_of, resolved, results, then
from nccl_transfer.refs.batch import Batch, Column, concat_columns
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest


@dataclass(frozen=True)
class CallRecord:
    """Record of one finished group call.

    Attributes:
        service, method: Name in the config; Python name of the method.
        started_s, ended_s: Unix time of its turn on the first rank, and of the last response.
        metrics: Means over the ranks by name.
        policy_version: Policy version of the service after the call.
        responses: Response of each rank, in rank order.
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
    """Rows x named columns, each resolved or still being computed. The algebra never waits.

    Attributes:
        rows: Number of rows.
        columns: Columns by name.
        calls: The calls that make them.
        step: The step on whose behalf calls on these rows are made; None: the step begun last. A batch joined of
            several steps has the first of them.
    """

    rows: int
    columns: Mapping[str, Future[Column]]
    calls: tuple[Future[CallRecord], ...] = field(default=())
    step: StepContext | None = None

    @staticmethod
    def of(**values: np.ndarray | Jagged[np.ndarray] | list[str]) -> FutureBatch:
        """A batch of columns that the controller holds."""
        batch = Batch.of(**values)
        return FutureBatch(batch.rows, {name: resolved(column) for name, column in batch.columns.items()})

    def __or__(self, other: FutureBatch) -> FutureBatch:
        """The columns and calls of both; the right operand's where names are equal."""
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
        """All columns but these; missing ones are ignored."""
        kept = {name: column for name, column in self.columns.items() if name not in names}
        return replace(self, columns=kept)

    def rename(self, **names: str) -> FutureBatch:
        """Columns under other names: `costs.rename(rewards="costs")` lets two rewards be in one batch."""
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
        """Every row `times` times, side by side, for several samples per prompt."""
        return self.take(np.repeat(np.arange(self.rows), times))

    @staticmethod
    def concat(batches: Sequence[FutureBatch]) -> FutureBatch:
        """The rows of all batches in order, at least one batch; only the columns that all batches have."""
        names = [name for name in batches[0].columns if all(name in batch for batch in batches)]
        joined = {name: then(all_of([batch[name] for batch in batches]), concat_columns) for name in names}
        calls = tuple(dict.fromkeys(call for batch in batches for call in batch.calls))
        step = next((batch.step for batch in batches if batch.step), None)
        return FutureBatch(sum(batch.rows for batch in batches), joined, calls, step)

    def checked(self, check: Callable[[CallRecord], CallRecord]) -> FutureBatch:
        """The same rows, resolved once `check` has passed every call that makes them; its error becomes theirs."""
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
        """These columns. Waits and raises as `results`."""
        wanted = {name: self[name] for name in names}
        return Batch(self.rows, dict(zip(wanted, results(list(wanted.values()), timeout_s), strict=True)))

    def records(self, timeout_s: float | None = None) -> list[CallRecord]:
        """Records of all calls, in call order. Waits and raises as `results`."""
        return results(self.calls, timeout_s)
