"""Evaluation on the held-out rows: an algorithm measures them batch by batch and summarizes the numbers of all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from client.session import StepContext
from controller.data.draws import Limit, rows_that_fit
from controller.data.prompts import PromptData
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import FutureBatch, with_parts
from controller.role_groups.replacement import RESTARTS
from controller.tracking.metrics import Sample
from controller.tracking.recorder import Recorder
from nccl_transfer.refs.batch import LocalColumn
from nccl_transfer.refs.columns import Jagged

ROW = "heldout_row"
"""Name of the column of a batch of held-out rows that has the number of each row among those evaluated, from 0."""

Measured = tuple[Mapping[str, np.ndarray], Sequence[FutureBatch]]
"""Return type of `Evaluation.measure`: arrays with one number per row that it makes of a batch [rows], by name, and the
batches whose calls made them."""


@dataclass(frozen=True)
class Evaluation:
    """Definition of the metrics of held-out rows.

    Attributes:
        measure: Function that measures one batch of held-out rows; called for one batch after another.
        summarize: Function that takes the numbers of all rows by name, and returns the metrics of the evaluation.
        responses: Number of rows that `measure` makes of each held-out row.
    """

    measure: Callable[[FutureBatch], Measured]
    summarize: Callable[[Mapping[str, np.ndarray]], dict[str, float]]
    responses: int = 1


class Evaluator:
    """Evaluates the held-out rows whose prompts are not too long.

    Args:
        data: Held-out rows.
        limit: Limit on the length of their prompts; None: any length.
        batch_rows: Maximum number of rows in a batch, at least one held-out row.
        cluster: Connected services.
        recorder: Records the calls.

    Attributes:
        history: Metrics of each evaluation, in order.
        is_recorded: Whether evaluations are recorded and in `history`. False before the first step of a resumed run,
            which has recorded the step that it is resumed from.
    """

    def __init__(
        self, data: PromptData, limit: Limit | None, batch_rows: int, cluster: Cluster, recorder: Recorder
    ) -> None:
        self.history: list[dict[str, float]] = []
        self.is_recorded = True
        self._data = data
        self._limit = limit
        self._batch_rows = batch_rows
        self._cluster = cluster
        self._recorder = recorder

    @cached_property
    def rows(self) -> np.ndarray:
        """Numbers of the held-out rows that are evaluated [n] int64. Where the length of prompts is limited, the
        first use reads all rows; raises ConfigError where all are too long, or where one is and `data.overlong` is
        "error"."""
        return rows_that_fit(self._data, self._limit, lambda prompt: prompt.text)

    @property
    def left_out(self) -> int:
        """Number of held-out rows that are left out because their prompts are too long. The first use may read all
        rows; see `rows`."""
        return len(self._data) - len(self.rows)

    def evaluate(self, step: StepContext, evaluation: Evaluation) -> dict[str, float]:
        """Evaluates the held-out rows after a step and returns the metrics, with prefix evaluation/,
        time/evaluation_s, and the losses of services in the step so far, with prefix `RESTARTS`. Appends the measured
        metrics to `history` if `is_recorded`. Calls on rows of no step belong to this one. All rows of the step are
        freed after each batch, those of its training too.

        Args:
            step: The step.
            evaluation: Measures the rows.
        """
        started = self._cluster.session.now()
        parts: list[Mapping[str, np.ndarray]] = []
        most = max(1, self._batch_rows // evaluation.responses)
        for batch in batches(self._data, self.rows, most):
            with step.on_thread():
                values, made = evaluation.measure(batch.of_step(step))
            parts.append(values)
            for each in made:
                records = each.records()
                if self.is_recorded:
                    self._recorder.calls(step.number, with_parts(records))
            self._cluster.release(step)
        numbers = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        # As a resumed run reads them, whatever types of numbers they are.
        measured = {name: float(value) for name, value in evaluation.summarize(numbers).items()}
        if self.is_recorded:
            self.history.append(measured)
        metrics = {f"evaluation/{name}": value for name, value in measured.items()}
        metrics["time/evaluation_s"] = self._cluster.session.now() - started
        return metrics | {name: count for name, count in step.noted.items() if name.startswith(RESTARTS)}

    def write_samples(self, step: StepContext | None, samples: Sequence[Sample]) -> None:
        """Writes sample responses of a step (None: the newest) if `is_recorded`."""
        if self.is_recorded:
            self._recorder.samples(self._cluster.session.step_of(step).number, samples)


def batches(data: PromptData, rows: np.ndarray, most: int) -> Iterator[FutureBatch]:
    """Yields rows of the data in batches of at most `most` rows, with column `ROW`, and the same numbers as column
    "prompt_number", by which rewards that score groups see the responses to a prompt together.

    Args:
        data: The rows.
        rows: Numbers of the rows [n] int64.
        most: Maximum number of rows in a batch.
    """
    for first in range(0, len(rows), most):
        part = rows[first : first + most]
        numbers = first + np.arange(len(part))
        yield data.batch(part) | FutureBatch.of(**{ROW: numbers, "prompt_number": numbers})


def row_scores(scored: FutureBatch) -> np.ndarray:
    """Waits for column rewards and returns the score of each response [rows] float64, scores per token summed; NaN for
    a row that was not scored."""
    rewards = scored.result(["rewards"])["rewards"]
    assert isinstance(rewards, LocalColumn), "verdicts are in the response itself"
    values = rewards.values
    if isinstance(values, Jagged):
        return np.asarray([values.row(row).sum() for row in range(values.rows)])
    return np.asarray(values)


def mean_of_scored(scores: np.ndarray) -> float:
    """Returns the mean of the scores [rows] that are not NaN; NaN where all are."""
    found = scores[~np.isnan(scores)]
    return float(np.mean(found)) if len(found) else float("nan")
