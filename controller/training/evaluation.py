"""Evaluation on the held-out rows: an algorithm measures them batch by batch and summarizes the numbers of all rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from client.session import StepContext
from controller.config.config import Config
from controller.config.rollout import EvaluationTable
from controller.data.draws import Limit, rows_that_fit
from controller.data.prompts import PromptData
from controller.role_groups.cluster import Cluster
from controller.role_groups.dataflow import FutureBatch, with_parts
from controller.role_groups.replacement import RESTARTS
from controller.tracking.metrics import Sample
from controller.tracking.recorder import Recorder
from controller.training.columns import texts_of
from nccl_transfer.refs.batch import LocalColumn
from nccl_transfer.refs.columns import Jagged
from reports.units import counted
from rlhf.errors import InvalidRequest

SHOWN = "is_shown"
"""Name of the column of a batch of held-out rows that says whether a response to the row is written as a sample
[rows] bool."""

Measured = tuple[Mapping[str, np.ndarray], Sequence[FutureBatch]]
"""Return type of `Evaluation.measure`: arrays with one number per held-out row of a batch, or as many for each row, in
the order of the rows, by name; and the batches whose calls made them."""


@dataclass(frozen=True)
class Evaluation:
    """Definition of the metrics of held-out rows.

    Attributes:
        measure: Function that measures one batch of held-out rows; called for one batch after another. The rows of a
            batch are evaluated by the same settings (`Config.evaluations`).
        summarize: Function that takes the numbers of all rows by name, and returns the metrics of the evaluation. With
            `data.sources`, called for the numbers of each source too.
        responses: Function that returns the number of rows that `measure` makes of each held-out row, by the settings
            of the row. Default: one.
    """

    measure: Callable[[FutureBatch], Measured]
    summarize: Callable[[Mapping[str, np.ndarray]], dict[str, float]]
    responses: Callable[[EvaluationTable], int] = lambda table: 1


class Evaluator:
    """Evaluates the held-out rows whose prompts are not too long.

    Args:
        config: Configuration of the run.
        data: Held-out rows.
        limit: Limit on the length of their prompts; None: any length.
        cluster: Connected services.
        recorder: Records the calls.

    Attributes:
        history: Metrics of each evaluation, in order.
        is_recorded: Whether evaluations are recorded and in `history`. False before the first step of a resumed run,
            which has recorded the step that it is resumed from.
    """

    def __init__(
        self, config: Config, data: PromptData, limit: Limit | None, cluster: Cluster, recorder: Recorder
    ) -> None:
        self.history: list[dict[str, float]] = []
        self.is_recorded = True
        self._samples: list[Sample] = []
        self._config = config
        self._data = data
        self._limit = limit
        self._cluster = cluster
        self._recorder = recorder

    @cached_property
    def rows(self) -> np.ndarray:
        """Numbers of the held-out rows that are evaluated [n] int64. Where the length of prompts is limited, the
        first use reads all rows; raises ConfigError where all are too long, or where one is and `data.overlong` is
        "error"."""
        return rows_that_fit(self._data, self._limit, lambda prompt: prompt.text)

    @property
    def has_stalled(self) -> bool:
        """Whether `run.patience` says that the run ends; see the function of this name."""
        return has_stalled(self._config, self.history)

    @property
    def left_out(self) -> int:
        """Number of held-out rows that are left out because their prompts are too long. The first use may read all
        rows; see `rows`."""
        return len(self._data) - len(self.rows)

    def evaluate(self, step: StepContext, evaluation: Evaluation) -> dict[str, float]:
        """Evaluates the held-out rows after a step and returns the metrics, with prefix evaluation/, with
        `data.sources` also those of the rows of each source, as evaluation/NAME_SOURCE; time/evaluation_s; and the
        losses of services in the step so far, with prefix `RESTARTS`. Appends the measured metrics to `history` if
        `is_recorded`. Calls on rows of no step belong to this one. All rows of the step are freed after each batch,
        those of its training too.

        Args:
            step: The step.
            evaluation: Measures the rows.
        """
        started = self._cluster.session.now()
        self._samples = []
        parts: list[Mapping[str, np.ndarray]] = []
        sources: list[Mapping[str, np.ndarray]] = []
        for batch in self._batches(evaluation):
            with step.on_thread():
                values, made = evaluation.measure(batch.of_step(step))
            parts.append(values)
            if "source" in batch:
                labels = np.asarray(texts_of(batch, "source"))
                sources.append({name: _of_each(labels, each, name) for name, each in values.items()})
            for each in made:
                records = each.records()
                if self.is_recorded:
                    self._recorder.calls(step.number, with_parts(records))
            self._cluster.release(step)
        if self._samples and self.is_recorded:
            self._recorder.samples(step.number, self._samples)
        numbers = _joined(parts)
        found = dict(evaluation.summarize(numbers))
        if sources and numbers:
            source_of = _joined(sources)
            for source in dict.fromkeys(next(iter(source_of.values())).tolist()):
                mine = {name: each[source_of[name] == source] for name, each in numbers.items()}
                found |= {f"{name}_{source}": value for name, value in evaluation.summarize(mine).items()}
        # As a resumed run reads them, whatever types of numbers they are.
        measured = {name: float(value) for name, value in found.items()}
        if self.is_recorded:
            self.history.append(measured)
        metrics = {f"evaluation/{name}": value for name, value in measured.items()}
        metrics["time/evaluation_s"] = self._cluster.session.now() - started
        return metrics | {name: count for name, count in step.noted.items() if name.startswith(RESTARTS)}

    def _batches(self, evaluation: Evaluation) -> Iterator[FutureBatch]:
        def most(table: EvaluationTable) -> int:
            return max(1, self._config.run.evaluation_rows // evaluation.responses(table))

        tables = list(self._config.evaluations.values())
        return batches(self._data, self.rows, tables, most, self._config.run.samples)

    def add_samples(self, samples: Sequence[Sample]) -> None:
        """Adds sample responses to those of the evaluation under way, which are written together at its end."""
        self._samples += samples


def has_stalled(config: Config, history: Sequence[Mapping[str, float]]) -> bool:
    """Whether there were `run.patience` evaluations in a row that did not improve on the best value of
    `checkpoint.best` before them, at the end of the history or earlier; never where it is 0.

    Args:
        config: Configuration of the run.
        history: Metrics of each evaluation, in order, without prefix.
    """
    patience, name = config.run.patience, config.checkpoint.best.removeprefix("evaluation/")
    sign = 1 if config.checkpoint.best_is == "highest" else -1
    best, waited = -math.inf, 0
    for value in (sign * each[name] for each in history if patience and name in each):
        waited = 0 if value > best else waited + 1
        best = max(best, value)
        if waited == patience:
            return True
    return False


def batches(
    data: PromptData,
    rows: np.ndarray,
    tables: Sequence[EvaluationTable],
    most: Callable[[EvaluationTable], int],
    samples: int = 0,
) -> Iterator[FutureBatch]:
    """Yields rows of the data in batches of rows that are evaluated by the same settings, with column `SHOWN`, and
    numbers from 0 as column "prompt_number", by which rewards that score groups see the responses to a prompt together.

    Args:
        data: The rows.
        rows: Numbers of the rows, ascending [n] int64.
        tables: Settings of the rows of each source of `data`.
        most: Function that returns the maximum number of rows in a batch of these settings.
        samples: Number of rows that are shown: the first of each source, then the second of each, and so on.
    """
    source = np.repeat(np.arange(len(data.sizes)), data.sizes)[rows]
    place = np.arange(len(rows)) - np.searchsorted(source, source)
    is_shown = np.zeros(len(rows), bool)
    is_shown[np.lexsort((source, place))[:samples]] = True
    settings = np.asarray([tables.index(table) for table in tables])[source]
    for stretch in np.split(np.arange(len(rows)), np.flatnonzero(np.diff(settings)) + 1):
        size = most(tables[int(settings[stretch[0]])])
        for numbers in (stretch[first : first + size] for first in range(0, len(stretch), size)):
            columns = {SHOWN: is_shown[numbers], "prompt_number": numbers}
            yield data.batch(rows[numbers]) | FutureBatch.of(**columns)


def table_of(config: Config, rows: FutureBatch) -> EvaluationTable:
    """Returns the settings by which rows of a batch of an evaluation are evaluated, which are those of their source."""
    if "source" not in rows:
        return config.rollout.evaluation
    return config.evaluations[texts_of(rows, "source")[0]]


def _joined(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _of_each(labels: np.ndarray, numbers: np.ndarray, name: str) -> np.ndarray:
    """Returns the source of each of the numbers that an evaluation has measured of rows with these sources [rows].
    Raises InvalidRequest where they are not equally many for each row."""
    if len(numbers) % len(labels):
        raise InvalidRequest(
            f"evaluation: {counted(len(numbers), 'number')} {name!r} of {counted(len(labels), 'held-out row')}; it has "
            "to be one for each row, or equally many, so that each source has metrics of its own"
        )
    return np.repeat(labels, len(numbers) // len(labels))


def row_scores(scored: FutureBatch) -> np.ndarray:
    """Waits for column rewards and returns the score of each response [rows] float64, scores per token summed; NaN for
    a row that was not scored."""
    rewards = scored.result(["rewards"])["rewards"]
    assert isinstance(rewards, LocalColumn), "verdicts are in the response itself"
    values = rewards.values
    if isinstance(values, Jagged):
        return np.asarray([values.row(row).sum() for row in range(values.rows)])
    return np.asarray(values)


def mean_of_scored(scores: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Returns the mean of the scores [rows] that are not NaN, with a weight for each [rows] where there are `weights`;
    NaN where all are NaN."""
    is_scored = ~np.isnan(scores)
    if not is_scored.any():
        return float("nan")
    return float(np.average(scores[is_scored], weights=None if weights is None else weights[is_scored]))
