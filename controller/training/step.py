"""One training step, as an algorithm sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from copy import copy
from typing import Any, Protocol, Self

from client.session import StepContext
from controller.advantage import Advantage
from controller.role_groups.dataflow import CallRecord, FutureBatch, with_parts
from controller.role_groups.futures import Promise, results, then
from nccl_transfer.refs.batch import Column
from rlhf.errors import InvalidRequest


class Deferring(Protocol):
    """Protocol of executors that call functions later, in the order of the steps; see `Deferral`."""

    def submit(self, function: Callable[[], Any]) -> Promise[Any]:
        """Returns a late future of the result of a function."""
        ...


class Step:
    """One training step, as an algorithm sees it.

    Args:
        context: The step in the session, which its calls belong to.
        draw: Function that draws the next prompts, each repeated for its samples, and their groups.
        pretraining: See Attributes.
        deferral: Calls the functions of the step whose columns are futures, where steps overlap (`run.ahead`) or rows
            are in chunks. Default: neither.
        overlaps: Whether steps overlap. If not, `later` calls functions at once, and `finish` waits.

    Attributes:
        number: Number of the step, from 1.
        context: The step in the session, which its calls belong to.
        prompts: Prompts of the step, each repeated rollout.samples_per_prompt times. Column "prompt_number" [rows]
            int64 is the number of each row's prompt, unique in the run, by which a reward that scores groups finds the
            responses to a prompt.
        groups: Column "group" [rows] int64 of the same rows, with the same numbers as "prompt_number".
        pretraining: Column "pretrain_text" of the same rows; no column if the config has no such texts.
        metrics: Metrics that the algorithm adds to the step, by name.
        given_metrics: Metrics of the rewards as they were given, which replace those that `compute` returns of shaped
            ones.
        calls: Futures of the records of the step's calls, after `finish`.
        records: Records of these calls and of their parts, after `wait`.
        is_finished: Whether `finish` was called.
        batch: Batch that the step trained on, after `finish`.
        is_last: Whether the run ends after this step although `run.steps` is larger; see `stop`.
    """

    def __init__(
        self,
        context: StepContext,
        draw: Callable[[], tuple[FutureBatch, FutureBatch]],
        pretraining: FutureBatch,
        deferral: Deferring | None = None,
        *,
        overlaps: bool = False,
    ) -> None:
        self.number = context.number
        self.context = context
        self._draw = draw
        self.prompts, self.groups = self._next()
        self.pretraining = pretraining.of_step(context)
        self.metrics: dict[str, float] = {}
        self.given_metrics: dict[str, float] = {}
        self.records: list[CallRecord] = []
        self.is_finished = False
        self.batch = self.prompts
        self.is_last = False
        self._deferral, self._overlaps = deferral, overlaps
        self._thread = threading.get_ident()
        self._later: list[Future[Any]] = []
        self.calls: list[Future[CallRecord]] = []

    def rounds(self, most: int) -> Iterator[FutureBatch]:
        """Yields at most `most` batches of prompts with column "group", each with the size of a step: first the
        prompts of the step, then newly drawn ones."""
        yield self.prompts | self.groups
        for _ in range(most - 1):
            prompts, groups = self._next()
            yield prompts | groups

    def compute(self, function: Callable[..., Advantage], *columns: Any, **options: Any) -> FutureBatch:
        """Calls a function that computes advantages, adds its metrics to those of the step, and returns its columns.

        Args:
            function: Function that returns an `Advantage`.
            columns: Positional arguments of the function.
            options: Keyword arguments of the function.

        Raises:
            InvalidRequest: The function raised ValueError or returned no `Advantage`, or a value of its columns is not
                finite.
        """
        try:
            result = function(*columns, **options)
            if not isinstance(result, Advantage):
                raise ValueError(f"the function returned {type(result).__name__}, not Advantage")
            made = result.columns
        except ValueError as error:
            raise InvalidRequest(f"compute_advantage, step {self.number}: {error}") from error
        self.metrics |= result.metrics | self.given_metrics
        return FutureBatch.of(**made).of_step(self.context)

    def later(self, work: Callable[[], FutureBatch], names: Sequence[str], rows: int) -> FutureBatch:
        """Calls a function that makes columns of the step's rows and may wait for others; where steps overlap, later
        and in the order of the steps, so that this returns at once.

        Args:
            work: The function; it returns `rows` rows.
            names: Names of the columns that it returns.
            rows: Number of rows of the result.
        """
        return self.deferred(work, names, rows) if self._overlaps else work()

    def deferred(self, work: Callable[[], FutureBatch], names: Sequence[str], rows: int) -> FutureBatch:
        """Calls a function as `later` does where steps overlap, also where they do not but rows are in chunks."""
        assert self._deferral is not None, "columns are futures"

        def resolve() -> dict[str, Column]:
            with self.context.on_thread():
                return _resolved(work(), names)

        made = self._deferral.submit(resolve)
        self._later.append(made)
        columns = {name: then(made, lambda columns, name=name: columns[name]) for name in names}
        return FutureBatch(rows, columns, step=self.context)

    def apart(self) -> Self:
        """Returns the same step for a function on some of its rows, whose metrics are not those of the step."""
        found = copy(self)
        found.metrics = {}
        return found

    def finish(self, *batches: FutureBatch) -> None:
        """Ends the step, after its last call. Must be called in each step; sets `batch` to the first of these batches,
        which must be the one that the step trained on. Waits for all calls that made the batches, and raises the error
        of the first that fails; where steps overlap, `Run.steps` does so when it ends the step. Errors of other calls
        that make no columns, such as updates, are raised by `Run.steps` when it ends the step, unless they were read
        before. Raises InvalidRequest where the first batch is missing or has no columns."""
        if not (batches and batches[0].columns):
            raise InvalidRequest(
                f"step {self.number}: step.finish has to get the batch that was trained on, first"
            )
        self.batch, self.is_finished = batches[0], True
        self.calls = list(dict.fromkeys(call for batch in batches for call in batch.calls))
        if not self._overlaps:
            self.wait()

    def wait(self) -> None:
        """Waits for the calls that `finish` was given and for the functions that `later` was, and sets `records`.
        Raises the first error."""
        self.records = list(with_parts(results(self.calls)))
        results(self._later)

    def stop(self) -> None:
        """Makes this step the last of the run: `Run.steps` evaluates after it and ends. The step has to be finished
        all the same. Raises InvalidRequest on another thread than that of the loop, as in a function that `later`
        calls: the next step may have begun."""
        if threading.get_ident() != self._thread:
            raise InvalidRequest(
                f"step {self.number}: step.stop can only be called by the loop over the steps"
            )
        self.is_last = True

    def _next(self) -> tuple[FutureBatch, FutureBatch]:
        prompts, groups = self._draw()
        return prompts.of_step(self.context), groups.of_step(self.context)


def _resolved(made: FutureBatch, names: Sequence[str]) -> dict[str, Column]:
    return dict(made.result(names).columns)
