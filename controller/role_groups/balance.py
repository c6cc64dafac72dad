"""Rows dealt out to ranks by what they cost, not by how many they are; pure functions of their lengths."""

from __future__ import annotations

import numpy as np

LINEAR_TOKENS = 24_576
"""Length at which attention costs as much as the matrix products of the layers: 6 times the hidden size (Narayanan et
al. 2021, "Efficient Large-Scale Language Model Training", equation 3), for one of 4,096."""


def cost_of(lengths: np.ndarray) -> np.ndarray:
    """Cost of sequences, in tokens of a short one: layers are linear in the length, attention is quadratic."""
    return lengths * (1 + lengths / LINEAR_TOKENS)


def ranked(costs: np.ndarray) -> np.ndarray:
    """Rows from the most to the least expensive, [rows] int64."""
    return np.argsort(-costs, kind="stable")


def dealt(costs: np.ndarray, parts: int, block: int = 1) -> list[np.ndarray]:
    """Deal rows out to parts of equal cost, whose sizes differ by at most one, the larger ones first.

    Blocks of rows are dealt in rounds, one block to each part: the most expensive to the part that has cost least so
    far. So the costs of parts never differ by more than those of the blocks of one round. Of rounds in which all rows
    cost the same each part has its blocks side by side: neighbours often have a prompt in common, and are read in one
    piece. Rows that do not fill a round are dealt one by one.

    Args:
        costs: of the rows, not increasing, [rows].
        block: so many neighbouring rows stay together, as a mini-batch has one of each block.

    Returns:
        The rows of each part, in order.
    """
    owner = np.empty(len(costs), dtype=np.int64)
    sums = np.zeros(parts)
    whole = len(costs) - len(costs) % (parts * block)
    first = 0
    while first < len(costs):
        size = block if first < whole else 1
        end = int(np.searchsorted(-costs, -costs[first], side="right"))  # of those that cost the same
        size *= max(1, (min(end, whole) - first) // (parts * size))
        blocks = [
            np.arange(start, start + size)
            for start in range(first, min(first + parts * size, len(costs)), size)
        ]
        for part, rows in zip(np.argsort(sums, kind="stable"), blocks, strict=False):
            owner[rows] = part
            sums[part] += costs[rows].sum()
        first += parts * size
    mine = [np.flatnonzero(owner == part) for part in range(parts)]
    return sorted(mine, key=len, reverse=True)
