"""Jagged columns of response tokens, the operands of every advantage: checks, sums and statistics."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from nccl_transfer.refs.columns import Jagged

FloatColumn = Jagged[np.ndarray]
Scores = np.ndarray | FloatColumn
"""Scores of a reward: one per response [rows], or jagged, one per response token."""

A = TypeVar("A", FloatColumn, np.ndarray)

EPS = 1e-8


@dataclass(frozen=True)
class Advantage(Generic[A]):
    """Advantages for an update, and metrics about them.

    Attributes:
        advantages: One per response token; or one per response [rows] for all of its tokens.
        metrics: Metrics by name.
    """

    advantages: A
    metrics: dict[str, float]

    @property
    def columns(self) -> dict[str, FloatColumn | np.ndarray]:
        """Every column by its name, in float32, in which it is sent."""
        names = [field.name for field in fields(self) if field.name != "metrics"]
        return {name: _float32(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class CriticAdvantage(Advantage[FloatColumn]):
    """An advantage with the returns that a critic regresses to, one per response token."""

    returns: FloatColumn


def _float32(x: FloatColumn | np.ndarray) -> FloatColumn | np.ndarray:
    return Jagged(x.values.astype(np.float32), x.lengths) if isinstance(x, Jagged) else x.astype(np.float32)


def whiten(x: FloatColumn) -> FloatColumn:
    """Normalizes all tokens to mean 0 and standard deviation 1: (x - mean) / sqrt(var + 1e-8), var unbiased.

    Tokens that are all equal become 0: the epsilon bounds rounding errors.

    Raises:
        ValueError: fewer than 2 tokens, which have no variance.
    """
    tokens = float64(x)
    if tokens.size < 2:
        raise ValueError(f"whitening needs at least 2 tokens, got {tokens.size}")
    return make_column((tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + EPS), x.lengths)


def spread(values: np.ndarray, lengths: np.ndarray) -> FloatColumn:
    """One number per response [rows], repeated at every token of the response."""
    return make_column(np.repeat(values, lengths), lengths)


def sequence_scores(scores: Scores) -> np.ndarray:
    """One score per response [rows] float64; scores of tokens are summed.

    Raises:
        ValueError: A score is not finite: a failed reward must not train anything.
    """
    require_finite(scores)
    return row_sums(scores) if isinstance(scores, Jagged) else scores.astype(np.float64)


def row_sums(x: FloatColumn) -> np.ndarray:
    """Sums of the rows [rows] float64, from left to right."""
    row_of_token = np.repeat(np.arange(len(x.lengths)), x.lengths)
    return np.bincount(row_of_token, weights=x.values, minlength=len(x.lengths))


def float64(x: FloatColumn) -> np.ndarray:
    """The values in float64, in which all stages compute."""
    return x.values.astype(np.float64)


def make_column(values: np.ndarray, lengths: np.ndarray) -> FloatColumn:
    """A column of float64 values."""
    return Jagged(values.astype(np.float64), lengths)


def last_tokens(lengths: np.ndarray) -> np.ndarray:
    """Index of the last token of every row that is not empty."""
    return np.cumsum(lengths)[lengths > 0] - 1


def mean(x: np.ndarray) -> float:
    """Mean of all numbers; 0 of none."""
    return float(x.sum() / max(x.size, 1))


def std(x: np.ndarray) -> float:
    """Unbiased standard deviation; 0 of fewer than two numbers."""
    return float(x.std(ddof=1)) if x.size > 1 else 0.0


def advantage_metrics(advantages: FloatColumn) -> dict[str, float]:
    """`advantage/mean` and `advantage/std`, over all tokens."""
    tokens = float64(advantages)
    return {"advantage/mean": mean(tokens), "advantage/std": std(tokens)}


def require_finite(scores: Scores) -> None:
    """Raises ValueError where a score is not finite: a failed reward must not train anything."""
    finite = np.isfinite(scores.values if isinstance(scores, Jagged) else scores)
    if not finite.all():
        unit = "token" if isinstance(scores, Jagged) else "response"
        bad = np.flatnonzero(~finite)
        raise ValueError(f"{bad.size} of {finite.size} scores are not finite, the first at {unit} {bad[0]}")


def require_lengths(lengths: np.ndarray, **columns: FloatColumn) -> None:
    """Raises ValueError where a column has other lengths than `lengths`."""
    for name, column in columns.items():
        if not np.array_equal(column.lengths, lengths):
            raise ValueError(
                f"{name} does not fit the responses row by row: "
                f"{len(column.values)} tokens in {column.rows} rows against {lengths.sum()} in {len(lengths)}"
            )


def require_equal_lengths(**columns: FloatColumn) -> None:
    """Raises ValueError where columns differ in the number of tokens of a row."""
    first = next(iter(columns.values()))
    require_lengths(first.lengths, **columns)
