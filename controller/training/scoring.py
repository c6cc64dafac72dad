"""Verdicts of rewards on rows: a score per response or per token, and the cause for rows that could not be scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from controller.role_groups.dataflow import CallRecord, FutureBatch
from controller.role_groups.verdicts import MIXED, not_scored
from nccl_transfer.refs.batch import Column, LocalColumn
from nccl_transfer.refs.columns import Jagged
from rlhf.errors import RewardFailed

Verdict = float | np.ndarray
"""Verdict on a row: one score for the response, or one per response token [tokens]."""

FIRST_LONE_GROUP = np.uint64(1 << 63)
"""Number of the first group of a batch whose rows are groups of their own, above all numbers of prompts."""


@dataclass(frozen=True)
class Settled:
    """Verdicts on the rows of a batch.

    Attributes:
        verdicts: One verdict per row; that of a failed row is undefined.
        causes: Cause for each row that could not be scored, by index of the row.
        calls: Futures of the records of the calls that made the verdicts.
        parts: For a composed reward, the scores of each service [rows], by name; see `Reward.score`.
    """

    verdicts: list[Verdict]
    causes: Mapping[int, str]
    calls: tuple[Future[CallRecord], ...]
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def of(tried: FutureBatch) -> Settled:
        """Waits for the columns of `RewardGroup.try_reward` and makes verdicts of them."""
        found = tried.result(["rewards", "reward_errors"])
        errors = found["reward_errors"]
        assert isinstance(errors, LocalColumn), "verdicts are in the response itself"
        causes = {row: cause for row, cause in enumerate(errors.texts) if cause}
        return Settled(verdicts_of(found["rewards"]), causes, tried.calls)

    def replaced(self, rows: np.ndarray, again: Settled) -> Settled:
        """Returns these verdicts with those on `rows` [n], among them all that had failed, replaced by the n verdicts
        of a later attempt. Only failures of that attempt remain; the calls of both are kept, and `parts` is empty."""
        verdicts = list(self.verdicts)
        for row, verdict in zip(rows, again.verdicts, strict=True):
            verdicts[row] = verdict
        causes = {int(rows[place]): cause for place, cause in again.causes.items()}
        return Settled(verdicts, causes, (*self.calls, *again.calls))

    def repeated(self, times: int) -> Settled:
        """Returns the verdicts with each row repeated `times` times; its copies are neighbours."""
        verdicts = [verdict for verdict in self.verdicts for _ in range(times)]
        causes = {row * times + i: cause for row, cause in self.causes.items() for i in range(times)}
        parts = {service: np.repeat(scores, times) for service, scores in self.parts.items()}
        return Settled(verdicts, causes, self.calls, parts)

    def error(self, name: str) -> RewardFailed:
        """Returns, and does not raise, the error of reward `name`; see `not_scored`. There must be a failed row."""
        return not_scored(name, self.causes, len(self.verdicts))


def rows_to_keep(failed: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Returns the indices of the rows of groups in which every row was scored [n] int64.

    Args:
        failed: Indices of the rows that could not be scored.
        group: Number of each row's group [rows] int64.
    """
    return np.delete(np.arange(len(group)), rows_of_groups(failed, group))


def rows_of_groups(rows: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Returns the indices of all rows of the groups of some rows [n] int64.

    Args:
        rows: Indices of rows.
        group: Number of each row's group [rows].
    """
    return np.flatnonzero(np.isin(group, group[rows]))


def with_groups(batch: FutureBatch) -> FutureBatch:
    """Returns a batch with column "group", which numbers the responses to one prompt alike for services that score
    groups. It is the batch's own column "group", else its column "prompt_number", which the prompts of a step have;
    with neither, each row is a group, numbered from `FIRST_LONE_GROUP`."""
    if "group" in batch:
        return batch
    if "prompt_number" in batch:
        return replace(batch, columns={**batch.columns, "group": batch["prompt_number"]})
    return batch | FutureBatch.of(group=np.arange(batch.rows, dtype=np.uint64) + FIRST_LONE_GROUP)


def groups_of(batch: FutureBatch) -> np.ndarray:
    """Returns the number of each row's group [rows]; see `with_groups`. Waits for the column that has them only where
    it is not there, as that of a step's prompts is."""
    grouped = with_groups(batch)
    column = grouped["group"]
    values = column.result() if column.done() else grouped.result(["group"])["group"]
    assert isinstance(values, LocalColumn), "the controller numbers prompts"
    return np.asarray(values.values)


def verdicts_of(column: Column) -> list[Verdict]:
    """Returns the verdicts in a local column "rewards", one per row: a score, or an array of one score per token."""
    assert isinstance(column, LocalColumn), "verdicts are in the response itself"
    values = column.values
    if isinstance(values, Jagged):
        return [values.row(row) for row in range(values.rows)]
    return list(np.asarray(values, np.float64))


def add(total: Verdict | None, verdict: Verdict, name: str, service: str) -> Verdict:
    """Returns the sum of two verdicts on a row; `verdict` itself where `total` is None. `name` of the reward and
    `service`, which gave `verdict`, are for the message of an error.

    Raises:
        RewardFailed: The verdicts differ in shape: a score of the response and one per token, or other token counts.
    """
    if total is None:
        return verdict
    if np.shape(total) != np.shape(verdict):
        raise RewardFailed(
            f"{name}: services.{service} gives a response {_form(verdict)}, and the services before it in the reward "
            f"{_form(total)}; they have to be of one kind to be added"
        )
    return total + verdict


def _form(verdict: Verdict) -> str:
    return f"a score for each of {len(verdict)} tokens" if isinstance(verdict, np.ndarray) else "one score"


def column_of(verdicts: Sequence[Verdict], name: str) -> np.ndarray | Jagged[np.ndarray]:
    """Makes a column of verdicts: scores [rows] float64, or one per response token (jagged).

    Raises:
        RewardFailed: Some rows have one score and others a score per token.
    """
    per_token = [isinstance(verdict, np.ndarray) and verdict.ndim == 1 for verdict in verdicts]
    if not any(per_token):
        return np.asarray(verdicts, np.float64)
    if not all(per_token):
        raise RewardFailed(f"{name}: {MIXED}")
    rows = [np.asarray(verdict) for verdict in verdicts]
    return Jagged(np.concatenate(rows), np.asarray([len(row) for row in rows], np.int64))


def spread(rows: int, numbers: np.ndarray, verdicts: Sequence[Verdict]) -> np.ndarray:
    """Returns one score per response [rows] float64; scores per token are summed.

    Args:
        rows: Number of rows.
        numbers: Indices of the rows that have a verdict.
        verdicts: Verdicts on these rows; the others get NaN.
    """
    scores = np.full(rows, np.nan)
    scores[numbers] = [float(np.sum(verdict)) for verdict in verdicts]
    return scores


def unscored(settled: Settled) -> Verdict:
    """Returns NaN as a verdict of the same kind as those of scored rows: a float, which is also the case where no row
    was scored, or an array with one NaN where the scores are per token."""
    scored = (v for row, v in enumerate(settled.verdicts) if row not in settled.causes)
    is_per_token = np.ndim(next(scored, 0.0)) == 1
    return np.asarray([np.nan]) if is_per_token else float("nan")
