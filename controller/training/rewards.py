"""Rewards and costs as algorithms call them: one service, a weighted sum of several, or a different one per source of
the rows.

Rows that could not be scored stop the run, are sent again, or are dropped with their group. They never count as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np

from client.session import StepContext
from controller.config.algorithm import AlgorithmTable
from controller.role_groups.chunks import made_of
from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.futures import all_of, then
from controller.role_groups.roles import RewardGroup
from controller.training.columns import texts_of
from controller.training.episodes import ERRORS
from controller.training.scoring import (
    Settled,
    Verdict,
    add,
    column_of,
    groups_of,
    rows_of_groups,
    rows_to_keep,
    spread,
    unscored,
    verdicts_of,
    with_groups,
)
from nccl_transfer.refs.batch import Column, LocalColumn
from rlhf.errors import InvalidRequest

Recipe = Mapping[str, float]
"""Weight of each service of a reward, by name."""


@dataclass(frozen=True)
class Failures:
    """Settings of a `Reward` for rows that could not be scored.

    Attributes:
        policy: "stop", "retry" or "drop_group"; see `algorithm.on_failed_reward`.
        retries: Maximum number of times that a row is sent again with policy retry.
    """

    policy: str = "stop"
    retries: int = 0

    @classmethod
    def of(cls, table: AlgorithmTable) -> Self:
        """Returns those of a configuration."""
        return cls(table.on_failed_reward, table.reward_retries)


@dataclass(frozen=True)
class WeightedRows:
    """The rows of a batch that one service scores: their indices `rows` [n] int64, and a weight for each [n]."""

    service: str
    group: RewardGroup
    rows: np.ndarray
    weights: np.ndarray


class Reward:
    """A reward or cost, as an algorithm calls it.

    Args:
        name: Name of the reward in the algorithm.
        groups: Role groups of its services, by name.
        recipes: Weight of each service by name, for each source of rows by its label.
        failures: Settings of what is done with rows that could not be scored.
        step_of: Function that returns the step of a batch; that step's metrics count the rows sent again or dropped.
        trained: Labels of the sources with rows to train on; the recipes of others have no part in batches of such
            rows. Default: all.
    """

    def __init__(
        self,
        name: str,
        groups: Mapping[str, RewardGroup],
        recipes: Mapping[str, Recipe],
        failures: Failures,
        step_of: Callable[[FutureBatch], StepContext],
        trained: Collection[str] = (),
    ) -> None:
        self._name = name
        self._groups = groups
        self._recipes = recipes
        self._trained = {source: recipes[source] for source in trained or recipes}
        self._failures = failures
        self._step_of = step_of

    def score(self, batch: FutureBatch, column: str = "rewards", **others: FutureBatch) -> FutureBatch:
        """Scores a batch and returns it with its rewards; waits for the verdicts unless the policy is stop. With policy
        drop_group, groups with a row that could not be scored are left out; see `with_groups` for the group of a row.

        A composed reward also adds the scores of its services, unweighted and summed over the response, as columns
        "rewards/SERVICE" [rows] float64, with NaN where the service does not score the row.

        Services that score groups get the rows of a group together; see `with_groups`.

        Args:
            batch: Rows to score.
            column: Name of the column of rewards.
            others: Further batches to score, by the name of the column of their rewards: each of their rows belongs to
                one row of the batch, or to an equal number of neighbouring rows.

        Raises:
            RewardFailed: Rows could not be scored, or, with drop_group, every group has such a row. With policy stop,
                it is raised where the rewards are read; with the others, here.
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
        kept = rows_to_keep(np.asarray(sorted(set(failed)), np.int64), groups_of(batch))
        self._step_of(batch).note("reward/rows_dropped", batch.rows - len(kept))
        if not len(kept):
            raise next(each for each in settled.values() if each.causes).error(self._name)
        scored = batch.take(kept)
        for name, each in settled.items():
            columns = {name: column_of([each.verdicts[row] for row in kept], self._name)}
            columns |= {f"{name}/{service}": scores[kept] for service, scores in each.parts.items()}
            scored |= FutureBatch(len(kept), FutureBatch.of(**columns).columns, each.calls)
        return scored

    def compute_reward(self, batch: FutureBatch) -> FutureBatch:
        """Scores rows; waits for the verdicts only with policy retry. Returns column rewards, one per row [rows]
        float64 or one per response token (jagged), and for a composed reward the columns "rewards/SERVICE" of `score`.

        Raises:
            RewardFailed: Rows could not be scored; the text has the cause of the first. With policy retry, it is
                raised here; with the others, where the rewards are read.
        """
        if self._failures.policy == "retry":
            settled = self._settle(batch)
            if settled.causes:
                raise settled.error(self._name)
            parts_of = {f"rewards/{service}": scores for service, scores in settled.parts.items()}
            columns = FutureBatch.of(rewards=column_of(settled.verdicts, self._name), **parts_of).columns
            return FutureBatch(batch.rows, columns, settled.calls, batch.step)
        batch = with_groups(batch)
        recipes = self._recipes_of(batch)
        parts, composed = self._parts(batch, recipes), _composed(recipes)
        made = [part.group.compute_reward(_rows_of(batch, part.rows)) for part in parts]
        if not composed and len(parts) == 1 and np.all(parts[0].weights == 1):
            return made[0]
        scores = [each["rewards"] for each in made]
        if all(len(part.rows) == batch.rows and np.ptp(part.weights) == 0 for part in parts):
            # All services score all rows, each with one weight, so that a chunk is combined as the whole is.
            rewards = made_of(scores, partial(self._combined, parts))
        else:
            rewards = then(all_of(scores), partial(self._combined, parts, rows=batch.rows))
        calls = tuple(call for each in made for call in each.calls)
        columns = {"rewards": rewards}
        for service in composed:
            columns[f"rewards/{service}"] = self._part_scores(service, batch.rows, parts, made)
        return FutureBatch(batch.rows, columns, calls, batch.step)

    @staticmethod
    def _part_scores(
        service: str, rows: int, parts: Sequence[WeightedRows], made: Sequence[FutureBatch]
    ) -> Future[Column]:
        for part, each in zip(parts, made, strict=True):
            if part.service == service:
                return then(each["rewards"], partial(_spread_column, rows, part.rows))
        return FutureBatch.of(scores=np.full(rows, np.nan))["scores"]

    def score_for_eval(self, batch: FutureBatch) -> FutureBatch:
        """Scores rows for an evaluation. Returns and raises as `compute_reward`, except with policy drop_group: then
        waits, and returns only column rewards, in which a row that could not be scored has NaN."""
        if self._failures.policy != "drop_group":
            return self.compute_reward(batch)
        settled = self._settle(batch)
        verdicts = [
            unscored(settled) if row in settled.causes else verdict
            for row, verdict in enumerate(settled.verdicts)
        ]
        columns = FutureBatch.of(rewards=column_of(verdicts, self._name)).columns
        return FutureBatch(batch.rows, columns, settled.calls, batch.step)

    def _recipes_of(self, batch: FutureBatch) -> Mapping[str, Recipe]:
        """Returns the recipes of rows by source: of all sources to train on, whichever a step has drawn rows of, or of
        all where a row is of another."""
        if len(self._trained) == len(self._recipes) or self._trained.keys() >= set(_texts(batch, "source")):
            return self._trained
        return self._recipes

    def _parts(self, batch: FutureBatch, of_source: Mapping[str, Recipe]) -> list[WeightedRows]:
        """Returns for each service the rows that it scores, with their weights, by the source of each row."""
        recipes = list(of_source.values())
        if len(recipes) == 1:
            recipe_of = np.zeros(batch.rows, np.int64)
        else:
            number = {source: i for i, source in enumerate(of_source)}
            recipe_of = np.asarray([number[source] for source in _texts(batch, "source")])
        services = list(dict.fromkeys(service for recipe in recipes for service in recipe))
        parts = []
        for service in services:
            weights = np.asarray([recipe.get(service, np.nan) for recipe in recipes])[recipe_of]
            rows = np.flatnonzero(~np.isnan(weights))
            if len(rows):
                parts.append(WeightedRows(service, self._groups[service], rows, weights[rows]))
        return parts

    def _combined(self, parts: Sequence[WeightedRows], columns: Sequence[Column], rows: int = 0) -> Column:
        """Returns the weighted sum of the services' verdicts on each of `rows` rows; where that is 0, on as many as
        the columns have, which may be those of a chunk."""
        verdicts = [verdicts_of(column) for column in columns]
        totals: list[Verdict | None] = [None] * (rows or max(map(len, verdicts), default=0))
        for part, given in zip(parts, verdicts, strict=True):
            for row, weight, verdict in zip(part.rows, part.weights, given, strict=rows > 0):
                totals[row] = add(totals[row], weight * verdict, self._name, part.service)
        return LocalColumn(column_of([total for total in totals if total is not None], self._name))

    def _settle(self, batch: FutureBatch) -> Settled:
        """Waits for the verdict on each row: the weighted sum over the services that score it. With policy retry, sends
        failed rows again, up to `retries` times; to a service that scores groups, with all rows of their groups. Rows
        that still fail are in `causes` of the result; they raise no error."""
        batch = with_groups(batch)
        recipes = self._recipes_of(batch)
        parts = self._parts(batch, recipes)
        # All services are called before the first is waited for.
        tried = [part.group.try_reward(_rows_of(batch, part.rows)) for part in parts]
        totals: list[Verdict | None] = [None] * batch.rows
        scores = {service: np.full(batch.rows, np.nan) for service in _composed(recipes)}
        causes: dict[int, str] = {}
        calls: list[Future[CallRecord]] = []
        for part, first in zip(parts, tried, strict=True):
            one = self._retried(part, batch, first)
            calls += one.calls
            for place, (row, weight) in enumerate(zip(part.rows.tolist(), part.weights, strict=True)):
                if place not in one.causes:
                    totals[row] = add(totals[row], weight * one.verdicts[place], self._name, part.service)
            causes |= {int(part.rows[place]): cause for place, cause in one.causes.items()}
            if part.service in scores:
                scores[part.service] = spread(batch.rows, part.rows, one.verdicts)
        verdicts = [0.0 if total is None else total for total in totals]
        return Settled(verdicts, causes, tuple(calls), scores)

    def _retried(self, part: WeightedRows, batch: FutureBatch, first: FutureBatch) -> Settled:
        settled, lost = Settled.of(first), _rows_of_failed_episodes(batch, part.rows)
        for _ in range(self._failures.retries if self._failures.policy == "retry" else 0):
            failed = np.asarray(sorted(settled.causes.keys() - lost))
            if not len(failed):
                break
            if part.group.scores_groups:
                failed = rows_of_groups(failed, groups_of(batch)[part.rows])
            self._step_of(batch).note("reward/rows_retried", len(failed))
            again = Settled.of(part.group.try_reward(batch.take(part.rows[failed])))
            settled = settled.replaced(failed, again)
        return settled


def _composed(recipes: Mapping[str, Recipe]) -> list[str]:
    """Returns the names of the services of all sources, where the reward of any source is composed of several; else
    none."""
    if all(len(recipe) == 1 for recipe in recipes.values()):
        return []
    return list(dict.fromkeys(name for recipe in recipes.values() for name in recipe))


def _spread_column(rows: int, numbers: np.ndarray, column: Column) -> Column:
    return LocalColumn(spread(rows, numbers, verdicts_of(column)))


def _rows_of_failed_episodes(batch: FutureBatch, rows: np.ndarray) -> set[int]:
    """Returns the places in `rows` of rows whose environment has failed, so that no retry scores them."""
    if ERRORS not in batch:
        return set()
    errors = texts_of(batch.select([ERRORS]), ERRORS)
    return {place for place, row in enumerate(rows.tolist()) if errors[row]}


def _rows_of(batch: FutureBatch, rows: np.ndarray) -> FutureBatch:
    return batch if len(rows) == batch.rows else batch.take(rows)


def _texts(batch: FutureBatch, name: str) -> list[str]:
    if name not in batch:
        raise InvalidRequest(
            f"rows of several sources need column {name!r}; the batch has {sorted(batch.columns)}"
        )
    return texts_of(batch, name)
