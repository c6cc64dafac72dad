"""Rewards and costs for algorithms: one service, a weighted sum of several, or different ones by the rows' source;
and what becomes of rows that could not be scored. They never count as zero."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from client.session import StepContext
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.futures import all_of, then
from controller.role_groups.roles import RewardGroup
from nccl_transfer.refs.batch import Column, LocalColumn
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest, RewardFailed

Verdict = float | np.ndarray
"""A score of the response, or one per token of it [tokens]."""

Recipe = Mapping[str, float]
"""Weight of each service."""


@dataclass(frozen=True)
class Failures:
    """Policy for rows that could not be scored.

    Attributes:
        policy: stop, retry or drop_group; see `algorithm.on_failed_reward`.
        retries: How often a row is sent again, with retry.
    """

    policy: str = "stop"
    retries: int = 0


@dataclass(frozen=True)
class WeightedRows:
    """The rows [n] of a batch that one service scores, each with a weight [n]."""

    service: str
    group: RewardGroup
    rows: np.ndarray
    weights: np.ndarray


class Reward:
    """A reward or cost of a run.

    Args:
        name: What the algorithm calls it.
        groups: The services by name.
        recipes: By source of the rows, the weight of each service.
        failures: What is done about rows that could not be scored.
        step_of: The step of a batch, which notes what was done about them.
    """

    def __init__(
        self,
        name: str,
        groups: Mapping[str, RewardGroup],
        recipes: Mapping[str, Recipe],
        failures: Failures,
        step_of: Callable[[FutureBatch], StepContext],
    ) -> None:
        self._name = name
        self._groups = groups
        self._recipes = recipes
        self._failures = failures
        self._step_of = step_of

    def score(self, batch: FutureBatch, column: str = "rewards", **others: FutureBatch) -> FutureBatch:
        """The batch with its rewards, without the groups of rows that could not be scored where the config says to
        drop those. A row's group is that of column "group"; without that column it is the row.

        A reward made of several services has their scores too, unweighted and of the whole response, in columns
        "rewards/SERVICE" [rows] float64: not a number where that service does not score the row.

        Args:
            column: What the rewards are called.
            others: Rows that belong to those of the batch, by the name of the column of their rewards: one to each row,
                or to every so many that lie side by side.

        Raises:
            RewardFailed: Rows could not be scored, or, where they are dropped, none could. At once, or where the config
                says to stop, once the rewards are resolved.
        """
        asked = {column: batch, **others}
        if self._failures.policy != "drop_group":
            for name, rows in asked.items():
                made = self.compute_reward(rows)
                names = {old: name + old.removeprefix("rewards") for old in made.columns}
                batch |= made.rename(**names).repeat(batch.rows // rows.rows)
            return batch
        settled = {name: self._settle(rows).repeated(batch.rows // rows.rows) for name, rows in asked.items()}
        failed = [row for each in settled.values() for row in each.causes]
        kept = rows_to_keep(np.asarray(sorted(set(failed)), np.int64), _groups_of(batch))
        self._step_of(batch).note("reward/rows_dropped", batch.rows - len(kept))
        if not len(kept):
            raise next(each for each in settled.values() if each.causes).error(self._name)
        scored = batch.take(kept)
        for name, each in settled.items():
            columns = {name: _column([each.verdicts[row] for row in kept], self._name)}
            columns |= {f"{name}/{service}": scores[kept] for service, scores in each.parts.items()}
            scored |= FutureBatch(len(kept), FutureBatch.of(**columns).columns, each.calls)
        return scored

    def compute_reward(self, batch: FutureBatch) -> FutureBatch:
        """rewards: one per row [rows] float64, or one per response token (jagged). Of a reward made of several services
        also their scores, as `score` says.

        Raises:
            RewardFailed: Rows could not be scored, with the cause of the first; when resolved, or, after retries, at
                once.
        """
        if self._failures.policy == "retry":
            settled = self._settle(batch)
            if settled.causes:
                raise settled.error(self._name)
            parts_of = {f"rewards/{service}": scores for service, scores in settled.parts.items()}
            columns = FutureBatch.of(rewards=_column(settled.verdicts, self._name), **parts_of).columns
            return FutureBatch(batch.rows, columns, settled.calls, batch.step)
        parts = self._parts(batch)
        made = [part.group.compute_reward(_rows_of(batch, part.rows)) for part in parts]
        if not self._composed and len(parts) == 1 and np.all(parts[0].weights == 1):
            return made[0]
        rewards = then(
            all_of([each["rewards"] for each in made]),
            lambda columns: LocalColumn(_column(self._combined(batch.rows, parts, columns), self._name)),
        )
        calls = tuple(call for each in made for call in each.calls)
        columns = {"rewards": rewards}
        for service in self._composed:
            columns[f"rewards/{service}"] = self._part_scores(service, batch.rows, parts, made)
        return FutureBatch(batch.rows, columns, calls, batch.step)

    @property
    def _composed(self) -> list[str]:
        """The services, where any row is scored by several; else none."""
        is_composed = any(len(recipe) > 1 for recipe in self._recipes.values())
        return (
            list(dict.fromkeys(name for recipe in self._recipes.values() for name in recipe))
            if is_composed
            else []
        )

    @staticmethod
    def _part_scores(
        service: str, rows: int, parts: Sequence[WeightedRows], made: Sequence[FutureBatch]
    ) -> Future[Column]:
        for part, each in zip(parts, made, strict=True):
            if part.service == service:
                return then(each["rewards"], partial(_spread_column, rows, part.rows))
        return FutureBatch.of(scores=np.full(rows, np.nan))["scores"]

    def score_for_eval(self, batch: FutureBatch) -> FutureBatch:
        """rewards, as `compute_reward`; not-a-number where a row could not be scored and the config says to drop."""
        if self._failures.policy != "drop_group":
            return self.compute_reward(batch)
        settled = self._settle(batch)
        self._step_of(batch).note("reward/rows_dropped", len(settled.causes))
        verdicts = [
            _unscored(settled) if row in settled.causes else verdict
            for row, verdict in enumerate(settled.verdicts)
        ]
        columns = FutureBatch.of(rewards=_column(verdicts, self._name)).columns
        return FutureBatch(batch.rows, columns, settled.calls, batch.step)

    def _parts(self, batch: FutureBatch) -> list[WeightedRows]:
        """Which service scores which rows, with which weights."""
        recipes = list(self._recipes.values())
        if len(recipes) == 1:
            recipe_of = np.zeros(batch.rows, np.int64)
        else:
            number = {source: i for i, source in enumerate(self._recipes)}
            recipe_of = np.asarray([number[source] for source in _texts(batch, "source")])
        services = list(dict.fromkeys(service for recipe in recipes for service in recipe))
        parts = []
        for service in services:
            weights = np.asarray([recipe.get(service, np.nan) for recipe in recipes])[recipe_of]
            rows = np.flatnonzero(~np.isnan(weights))
            if len(rows):
                parts.append(WeightedRows(service, self._groups[service], rows, weights[rows]))
        return parts

    def _combined(self, rows: int, parts: Sequence[WeightedRows], columns: Sequence[Column]) -> list[Verdict]:
        """Weighted sum of what the services said about each row."""
        totals: list[Verdict | None] = [None] * rows
        for part, column in zip(parts, columns, strict=True):
            for row, weight, verdict in zip(part.rows, part.weights, verdicts_of(column), strict=True):
                totals[row] = add(totals[row], weight * verdict, self._name)
        return [total for total in totals if total is not None]

    def _settle(self, batch: FutureBatch) -> Settled:
        """Waits for the verdict on every row, with retries where the config says so."""
        parts = self._parts(batch)
        # All are asked before the first is waited for.
        tried = [part.group.try_reward(_rows_of(batch, part.rows)) for part in parts]
        totals: list[Verdict | None] = [None] * batch.rows
        scores = {service: np.full(batch.rows, np.nan) for service in self._composed}
        causes: dict[int, str] = {}
        calls: list[Future[CallRecord]] = []
        for part, first in zip(parts, tried, strict=True):
            one = self._retried(part, batch, first)
            calls += one.calls
            for row, weight, verdict in zip(part.rows.tolist(), part.weights, one.verdicts, strict=True):
                totals[row] = add(totals[row], weight * verdict, self._name)
            causes |= {int(part.rows[place]): cause for place, cause in one.causes.items()}
            if part.service in scores:
                scores[part.service] = _spread(batch.rows, part.rows, one.verdicts)
        verdicts = [0.0 if total is None else total for total in totals]
        return Settled(verdicts, causes, tuple(calls), scores)

    def _retried(self, part: WeightedRows, batch: FutureBatch, first: FutureBatch) -> Settled:
        settled = Settled.of(first)
        for _ in range(self._failures.retries if self._failures.policy == "retry" else 0):
            if not settled.causes:
                break
            failed = np.asarray(sorted(settled.causes))
            self._step_of(batch).note("reward/rows_retried", len(failed))
            again = Settled.of(part.group.try_reward(batch.take(part.rows[failed])))
            settled = settled.replaced(failed, again)
        return settled


@dataclass(frozen=True)
class Settled:
    """Verdicts about rows.

    Attributes:
        verdicts: One per row; of a row that failed it means nothing.
        causes: By row that failed, why.
        calls: That it took.
        parts: Of a reward made of several services, the score of each [rows]; see `Reward.score`.
    """

    verdicts: list[Verdict]
    causes: Mapping[int, str]
    calls: tuple[Future[CallRecord], ...]
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def of(tried: FutureBatch) -> Settled:
        """Waits for what `RewardGroup.try_reward` was asked for."""
        found = tried.result(["rewards", "reward_errors"])
        errors = found["reward_errors"]
        assert isinstance(errors, LocalColumn), "verdicts come in the response itself"
        causes = {row: cause for row, cause in enumerate(errors.texts) if cause}
        return Settled(verdicts_of(found["rewards"]), causes, tried.calls)

    def replaced(self, rows: np.ndarray, again: Settled) -> Settled:
        """With what was said about some rows when they were asked for again."""
        verdicts = list(self.verdicts)
        for row, verdict in zip(rows, again.verdicts, strict=True):
            verdicts[row] = verdict
        causes = {int(rows[place]): cause for place, cause in again.causes.items()}
        return Settled(verdicts, causes, (*self.calls, *again.calls))

    def repeated(self, times: int) -> Settled:
        """Verdicts with each row repeated `times` times, side by side."""
        verdicts = [verdict for verdict in self.verdicts for _ in range(times)]
        causes = {row * times + i: cause for row, cause in self.causes.items() for i in range(times)}
        parts = {service: np.repeat(scores, times) for service, scores in self.parts.items()}
        return Settled(verdicts, causes, self.calls, parts)

    def error(self, name: str) -> RewardFailed:
        row, cause = next(iter(self.causes.items()))
        return RewardFailed(
            f"{name}: {len(self.causes)} of {len(self.verdicts)} rows could not be scored; row {row}: {cause}"
        )


def rows_to_keep(failed: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Rows [n] of the groups in which no row failed.

    Args:
        failed: Rows that could not be scored.
        group: Group of each row [rows].
    """
    return np.flatnonzero(~np.isin(group, group[failed]))


def verdicts_of(column: Column) -> list[Verdict]:
    """The rows of column "rewards"."""
    assert isinstance(column, LocalColumn), "verdicts come in the response itself"
    values = column.values
    if isinstance(values, Jagged):
        return [values.row(row) for row in range(values.rows)]
    return list(np.asarray(values, np.float64))


def add(total: Verdict | None, verdict: Verdict, name: str) -> Verdict:
    """The sum of two verdicts on a response, both of the same kind.

    Raises:
        RewardFailed: One is a score of the response and the other one per token, or of another number of tokens.
    """
    if total is None:
        return verdict
    if np.shape(total) != np.shape(verdict):
        raise RewardFailed(
            f"{name}: the services give a row scores of {np.shape(total)} and {np.shape(verdict)}"
        )
    return total + verdict


def _column(verdicts: Sequence[Verdict], name: str) -> np.ndarray | Jagged[np.ndarray]:
    per_token = [isinstance(verdict, np.ndarray) and verdict.ndim == 1 for verdict in verdicts]
    if not any(per_token):
        return np.asarray(verdicts, np.float64)
    if not all(per_token):
        raise RewardFailed(f"{name}: some rows have one score and others a score per token")
    rows = [np.asarray(verdict) for verdict in verdicts]
    return Jagged(np.concatenate(rows), np.asarray([len(row) for row in rows], np.int64))


def _spread_column(rows: int, numbers: np.ndarray, column: Column) -> Column:
    return LocalColumn(_spread(rows, numbers, verdicts_of(column)))


def _spread(rows: int, numbers: np.ndarray, verdicts: Sequence[Verdict]) -> np.ndarray:
    """Scores of whole responses [rows], from the verdicts on some of them; not a number for the others."""
    scores = np.full(rows, np.nan)
    scores[numbers] = [float(np.sum(verdict)) for verdict in verdicts]
    return scores


def _unscored(settled: Settled) -> Verdict:
    """Not a number, in the form of the other rows' verdicts."""
    scored = (v for row, v in enumerate(settled.verdicts) if row not in settled.causes)
    is_per_token = np.ndim(next(scored, 0.0)) == 1
    return np.asarray([np.nan]) if is_per_token else float("nan")


def _groups_of(batch: FutureBatch) -> np.ndarray:
    if "group" not in batch:
        return np.arange(batch.rows)
    column = batch.result(["group"])["group"]
    assert isinstance(column, LocalColumn)
    return np.asarray(column.values)


def _rows_of(batch: FutureBatch, rows: np.ndarray) -> FutureBatch:
    return batch if len(rows) == batch.rows else batch.take(rows)


def _texts(batch: FutureBatch, name: str) -> list[str]:
    if name not in batch:
        raise InvalidRequest(
            f"rows of several sources need column {name!r}; the batch has {sorted(batch.columns)}"
        )
    column = batch.result([name])[name]
    assert isinstance(column, LocalColumn)
    return column.texts
