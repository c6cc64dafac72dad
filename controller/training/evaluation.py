"""Evaluation on the held-out rows: an algorithm measures them batch by batch and summarizes the numbers of all rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from client.session import StepContext
from controller.data.draws import Limit, rows_that_fit
from controller.data.prompts import PromptData
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import FutureBatch
from controller.tracking.recorder import Recorder
from nccl_transfer.refs.batch import LocalColumn
from nccl_transfer.refs.columns import Jagged

ROW = "heldout_row"
"""Column of a batch of held-out rows: the number of each row among those evaluated, from 0."""

Measured = tuple[Mapping[str, np.ndarray], Sequence[FutureBatch]]
"""Numbers by name, one for each row of a batch [rows], and the batches whose calls made them."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of the held-out rows.

    Attributes:
        measure: Called with one batch of rows after the other, in the order of the rows.
        summarize: Called with the numbers of all rows, by name; returns the metrics of the evaluation.
    """

    measure: Callable[[FutureBatch], Measured]
    summarize: Callable[[Mapping[str, np.ndarray]], dict[str, float]]


class Evaluator:
    """Evaluates the held-out rows that are not too long.

    Args:
        data: Held-out rows.
        limit: Of their prompts; None: any length.
        batch_rows: Rows measured at once.
        cluster: Connected services.
        recorder: Records the calls.

    Attributes:
        history: Metrics of each evaluation.
    """

    def __init__(
        self, data: PromptData, limit: Limit | None, batch_rows: int, cluster: Cluster, recorder: Recorder
    ) -> None:
        self.history: list[dict[str, float]] = []
        self._data = data
        self._limit = limit
        self._batch_rows = batch_rows
        self._cluster = cluster
        self._recorder = recorder

    @cached_property
    def rows(self) -> np.ndarray:
        """Numbers of the rows that are evaluated [n] int64."""
        return rows_that_fit(self._data, self._limit, lambda prompt: prompt.text)

    @property
    def left_out(self) -> int:
        """Held-out rows that are too long."""
        return len(self._data) - len(self.rows)

    def evaluate(self, step: StepContext, evaluation: Evaluation) -> dict[str, float]:
        """Metrics of the held-out rows, after a step. The rows of one batch are freed before the next."""
        started = time.time()
        parts: list[Mapping[str, np.ndarray]] = []
        for batch in batches(self._data, self.rows, self._batch_rows):
            values, made = evaluation.measure(batch.of_step(step))
            parts.append(values)
            for each in made:
                self._recorder.calls(step.number, each.records())
            self._cluster.release(step)
        measured = evaluation.summarize({name: np.concatenate([p[name] for p in parts]) for name in parts[0]})
        self.history.append(measured)
        metrics = {f"evaluation/{name}": value for name, value in measured.items()}
        metrics["time/evaluation_s"] = time.time() - started
        return metrics


def batches(data: PromptData, rows: np.ndarray, most: int) -> Iterator[FutureBatch]:
    """These rows of the data in batches of at most `most`, with column `ROW`."""
    for first in range(0, len(rows), most):
        part = rows[first : first + most]
        yield data.batch(part) | FutureBatch.of(**{ROW: first + np.arange(len(part))})


def row_scores(scored: FutureBatch) -> np.ndarray:
    """Score of each response [rows] float64; scores of tokens are summed. Waits for them."""
    rewards = scored.result(["rewards"])["rewards"]
    assert isinstance(rewards, LocalColumn), "verdicts are in the response itself"
    if isinstance(rewards.values, Jagged):
        return np.asarray([row.sum() for row in _rows(rewards.values)])
    return np.asarray(rewards.values)


def mean_of_scored(scores: np.ndarray) -> float:
    """Mean of the scores that are numbers [rows]; not a number where none is."""
    found = scores[~np.isnan(scores)]
    return float(np.mean(found)) if len(found) else float("nan")


def _rows(values: Jagged[np.ndarray]) -> list[np.ndarray]:
    return np.split(values.values, np.cumsum(values.lengths)[:-1]) if values.rows else []
