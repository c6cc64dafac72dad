"""Checks, sums and statistics of jagged columns of response tokens, which all advantages are computed from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from nccl_transfer.refs.columns import Jagged

FloatColumn = Jagged[np.ndarray]
Scores = np.ndarray | FloatColumn
"""Scores of a batch: an array with one score per response [rows], or a jagged column with one per response token."""

A = TypeVar("A", FloatColumn, np.ndarray)

EPS = 1e-8


@dataclass(frozen=True)
class Advantage(Generic[A]):
    """Advantages of a batch for an update, and metrics about them.

    Attributes:
        advantages: One advantage per response token (jagged), or one per response [rows], which applies to all of its
            tokens.
        metrics: Metrics of the step by name.
    """

    advantages: A
    metrics: dict[str, float]

    @property
    def columns(self) -> dict[str, FloatColumn | np.ndarray]:
        """The columns for the update by name, rounded to float32: all fields except `metrics`. Raises ValueError where
        one has a value that is not finite."""
        names = [field.name for field in fields(self) if field.name != "metrics"]
        with np.errstate(over="ignore"):  # becomes infinite, which is refused
            columns = {name: _float32(getattr(self, name)) for name in names}
        for name, column in columns.items():
            require_finite(column, name)
        return columns


@dataclass(frozen=True)
class CriticAdvantage(Advantage[FloatColumn]):
    """Advantages and the returns that the critic is trained on, both with one value per response token."""

    returns: FloatColumn


def _float32(x: FloatColumn | np.ndarray) -> FloatColumn | np.ndarray:
    return (
        Jagged(x.values.astype(np.float32), x.lengths) if isinstance(x, Jagged) else np.array(x, np.float32)
    )


def whiten(x: FloatColumn) -> FloatColumn:
    """Normalizes a column to mean 0 and standard deviation 1 over all tokens of the batch:
    (x - mean) / sqrt(var + 1e-8), with the unbiased variance.

    Values that are all equal become 0: the epsilon bounds rounding errors.

    Raises:
        ValueError: The column has fewer than 2 tokens, so that there is no variance.
    """
    tokens = float64(x)
    if tokens.size < 2:
        raise ValueError(f"whitening needs at least 2 tokens, got {tokens.size}")
    return make_column((tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + EPS), x.lengths)


def spread(values: np.ndarray, lengths: np.ndarray) -> FloatColumn:
    """Repeats one value per response [rows] at every token of the response; returns a jagged float64 column.

    Args:
        values: One value per response [rows].
        lengths: Tokens per response [rows] int64.
    """
    return make_column(np.repeat(values, lengths), lengths)


def sequence_scores(scores: Scores) -> np.ndarray:
    """Returns one score per response [rows] float64; scores per token are summed over the response.

    Raises:
        ValueError: A score is not finite, as that of a failed reward, which must not be trained on.
    """
    require_finite(scores)
    return row_sums(scores) if isinstance(scores, Jagged) else scores.astype(np.float64)


def row_sums(x: FloatColumn) -> np.ndarray:
    """Returns the sum of each row's values [rows] float64, added from left to right."""
    row_of_token = np.repeat(np.arange(len(x.lengths)), x.lengths)
    return np.bincount(row_of_token, weights=x.values, minlength=len(x.lengths))


def float64(x: FloatColumn) -> np.ndarray:
    """Returns the values of a column as a float64 array [tokens]; all advantages are computed in float64."""
    return x.values.astype(np.float64)


def make_column(values: np.ndarray, lengths: np.ndarray) -> FloatColumn:
    """Makes a jagged float64 column of `values` [tokens] with `lengths` [rows] tokens in each row."""
    return Jagged(values.astype(np.float64), lengths)


def last_tokens(lengths: np.ndarray) -> np.ndarray:
    """Returns the index, in the values of a jagged column with rows of `lengths` tokens, of the last token of each row
    that is not empty [n] int64."""
    return np.cumsum(lengths)[lengths > 0] - 1


def mean(x: np.ndarray) -> float:
    """Returns the mean of an array; 0 where it is empty."""
    return float(x.sum() / max(x.size, 1))


def std(x: np.ndarray) -> float:
    """Returns the unbiased standard deviation of an array; 0 where it has fewer than two numbers."""
    return float(x.std(ddof=1)) if x.size > 1 else 0.0


def advantage_metrics(advantages: FloatColumn) -> dict[str, float]:
    """Returns the metrics `advantage/mean` and `advantage/std`, taken over all tokens of the batch."""
    tokens = float64(advantages)
    return {"advantage/mean": mean(tokens), "advantage/std": std(tokens)}


def require_finite(scores: Scores, name: str = "scores") -> None:
    """Raises ValueError where a score is not finite, as that of a failed reward, which must not be trained on. `name`:
    what the scores are called in the message."""
    finite = np.isfinite(scores.values if isinstance(scores, Jagged) else scores)
    if not finite.all():
        unit = "token" if isinstance(scores, Jagged) else "response"
        bad = np.flatnonzero(~finite)
        raise ValueError(f"{bad.size} of {finite.size} {name} are not finite, the first at {unit} {bad[0]}")


def require_lengths(lengths: np.ndarray, **columns: FloatColumn) -> None:
    """Raises ValueError where the rows of one of the columns, given as NAME=COLUMN, do not have `lengths` [rows] tokens
    each."""
    for name, column in columns.items():
        if not np.array_equal(column.lengths, lengths):
            raise ValueError(
                f"{name} does not fit the responses row by row: "
                f"{len(column.values)} tokens in {column.rows} rows against {lengths.sum()} in {len(lengths)}"
            )


def require_equal_lengths(**columns: FloatColumn) -> None:
    """Raises ValueError where two of the columns, given as NAME=COLUMN, have different numbers of tokens in a row."""
    first = next(iter(columns.values()))
    require_lengths(first.lengths, **columns)
