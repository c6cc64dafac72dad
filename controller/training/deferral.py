"""Functions of a step whose columns are futures: they run when the columns that they read are there, in the order of
the steps, while the algorithm goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

import numpy as np

from client.session import AFTER_UPDATES
from controller.role_groups.chunks import ChunkedColumn
from controller.role_groups.dataflow import FutureBatch
from controller.role_groups.futures import Promise, on_thread, results
from controller.training.step import Step
from nccl_transfer.refs.batch import Column, LocalColumn
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest

P = ParamSpec("P")
Given = Future[Any]
"""Future of a tuple of a function, the future of its result and the next `Given`; of None at the end of the list."""


class Deferral:
    """Calls functions one at a time, in the order of submission, on its own thread."""

    def __init__(self) -> None:
        self._next: Given = Promise()
        self._error: BaseException | None = None
        self._last: Promise[Any] | None = None
        first = self._next
        on_thread(lambda: self._work(first), "advantages")

    def submit(self, function: Callable[[], Any]) -> Promise[Any]:
        """Returns a future, of lateness `AFTER_UPDATES`, of the result of a function. The function is called after all
        earlier functions have returned; if one of them raised an error, the future has that error instead."""
        result: Promise[Any] = Promise(AFTER_UPDATES)
        self._last = result
        given, self._next = self._next, Promise()
        given.set_result((function, result, self._next))
        return result

    @property
    def is_idle(self) -> bool:
        """Whether all submitted functions have returned."""
        return self._last is None or self._last.done()

    def close(self) -> None:
        """Ends the thread after all submitted functions have returned. Does not wait."""
        given, self._next = self._next, Promise()
        given.set_result(None)

    def _work(self, given: Given) -> None:
        while (found := results([given])[0]) is not None:
            function, result, given = found
            try:
                if self._error:
                    raise self._error
                result.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
                self._error = error
                result.set_exception(error)


def future_columns(
    *names: str, by_group: bool = False
) -> Callable[
    [Callable[Concatenate[Any, Step, FutureBatch, P], FutureBatch]],
    Callable[Concatenate[Any, Step, FutureBatch, P], FutureBatch],
]:
    """Decorator of a function of a run, a step and a batch, which may wait for columns of the batch, change state that
    the run keeps, and returns columns `names` of the same rows. Calls of the decorated function return at once where
    steps overlap (`run.ahead`): the columns are futures. State that the function reads and changes must be read and
    changed by such functions alone.

    Args:
        names: Names of the columns.
        by_group: Whether the values of a row depend on no rows beyond its group, all responses to a prompt. Where rows
            are in chunks of whole groups, and the loss adds up by rows, the function is then called for each chunk when
            its columns are there, so that an update can begin with the first ones. These calls get copies of the
            further arguments, and their metrics are dropped. At last it is called for all rows: metrics, state and the
            column as a whole are of that call.

    Raises:
        InvalidRequest: The function returned other columns, or with `by_group` other values for a chunk alone (where
            columns are futures: when they are read).
    """

    def declare(
        function: Callable[Concatenate[Any, Step, FutureBatch, P], FutureBatch],
    ) -> Callable[Concatenate[Any, Step, FutureBatch, P], FutureBatch]:
        on_copies: Callable[..., FutureBatch] = function

        @wraps(function)
        def call(run: Any, step: Step, batch: FutureBatch, *args: P.args, **options: P.kwargs) -> FutureBatch:
            def work() -> FutureBatch:
                return _checked(function(run, step, batch, *args, **options), names, batch.rows)

            def work_on(chunk: FutureBatch) -> FutureBatch:
                own_args, own_options = deepcopy((args, options))
                return _checked(
                    on_copies(run, step.apart(), chunk, *own_args, **own_options), names, chunk.rows
                )

            chunks = batch.chunks() if by_group else [batch]
            if len(chunks) < 2 or not run.config.algorithm.learns_by_chunk:
                return step.later(work, names, batch.rows)
            parts = [step.deferred(partial(work_on, chunk), names, chunk.rows) for chunk in chunks]
            whole = step.deferred(lambda: _same(work(), FutureBatch.concat(parts)), names, batch.rows)
            sizes = [chunk.rows for chunk in chunks]
            columns: dict[str, Future[Column]] = {
                name: ChunkedColumn(whole[name], [part[name] for part in parts], sizes) for name in names
            }
            return replace(whole, columns=columns)

        return call

    return declare


def _checked(made: FutureBatch, names: Sequence[str], rows: int) -> FutureBatch:
    if set(made.columns) != set(names) or made.rows != rows:
        raise InvalidRequest(
            f"future_columns: the function returned columns {sorted(made.columns)} of {made.rows} rows; it has to "
            f"return {sorted(names)} of {rows}"
        )
    return made


def _same(whole: FutureBatch, parts: FutureBatch) -> FutureBatch:
    """Returns `whole`; raises InvalidRequest where the columns that were computed chunk by chunk have other bits."""
    one, other = (batch.result(whole.columns).columns for batch in (whole, parts))
    differing = [name for name in one if _bits(one[name]) != _bits(other[name])]
    if differing:
        raise InvalidRequest(
            f"future_columns: columns {differing} of a chunk of whole groups are not those among all rows, so they "
            "cannot be computed by_group"
        )
    return whole


def _bits(column: Column) -> tuple[bytes, ...]:
    assert isinstance(column, LocalColumn), "the controller has computed it"
    values = column.values
    parts = (values.values, values.lengths) if isinstance(values, Jagged) else (np.asarray(values),)
    return tuple(part.tobytes() for part in parts)
