"""Jagged columns as lists of Python floats, in which the oracles of the algorithms are written."""

from __future__ import annotations

import math
import statistics

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from controller.advantage import FloatColumn
from nccl_transfer.refs.columns import Jagged

RTOL, ATOL = 1e-9, 1e-9  # columns are computed in float64
FLOAT32_TOLERANCE = 1e-6  # of columns as they are sent

Rows = list[list[float]]

SEEDS = st.integers(0, 2**32 - 1)
LENGTHS = st.lists(st.integers(0, 9), min_size=2, max_size=9).filter(lambda lengths: sum(lengths) >= 2)


def jagged(rows: Rows) -> FloatColumn:
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return Jagged(np.array([x for row in rows for x in row], dtype=np.float32), lengths)


def random_column(rng: np.random.Generator, lengths: list[int], scale: float = 1.0) -> FloatColumn:
    values = rng.normal(scale=scale, size=sum(lengths)).astype(np.float32)
    return Jagged(values, np.array(lengths, dtype=np.int64))


def rows_of(column: FloatColumn) -> Rows:
    ends = np.cumsum(column.lengths).tolist()
    values = column.values.tolist()
    return [values[end - length : end] for end, length in zip(ends, column.lengths.tolist(), strict=True)]


def assert_rows(actual: FloatColumn, expected: Rows) -> None:
    assert actual.values.dtype == np.float64
    assert actual.lengths.tolist() == [len(row) for row in expected]
    np.testing.assert_allclose(actual.values, [x for row in expected for x in row], rtol=RTOL, atol=ATOL)


def at_every_token(values: list[float], lengths: list[int]) -> Rows:
    return [[value] * length for value, length in zip(values, lengths, strict=True)]


def penalized(score: float, log_probs: list[float], ref_log_probs: list[float], beta: float) -> list[float]:
    """-beta (log p - log p_ref) at every token, and the score at the last."""
    rewards = [-beta * (p - q) for p, q in zip(log_probs, ref_log_probs, strict=True)]
    if rewards:
        rewards[-1] += score
    return rewards


def discounted(rewards: list[float], gamma: float) -> list[float]:
    """Every sum written out."""
    return [
        sum(gamma**k * reward for k, reward in enumerate(rewards[start:])) for start in range(len(rewards))
    ]


def gae_row(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The exponentially weighted sum of TD errors, term by term."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, following, strict=False)]
    return discounted(deltas, gamma * lam)


def whitened(rows: Rows) -> Rows:
    """Whitening divides by the spread, so what is all but equal is left to other tests: it would show nothing but how
    its inputs were rounded."""
    tokens = [x for row in rows for x in row]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    assume(variance > 0.1)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]
