"""Rows dealt to ranks by their cost instead of by their count; pure functions of sequence lengths."""

from __future__ import annotations

import numpy as np

LINEAR_TOKENS = 24_576
"""Length at which attention costs as much as the matrix products of the layers: 6 times the hidden size (Narayanan et
al. 2021, "Efficient Large-Scale Language Model Training", equation 3), for a hidden size of 4,096."""


def deal(lengths: np.ndarray, parts: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a batch in the order in which they are cut into parts, and their numbers, which are ranks by cost.

    Numbers do not depend on the mesh, and each part has whole blocks of them: so every mini-batch, which has one row of
    each block, has sequences of all lengths, and every data rank an equal share of it.

    Args:
        lengths: Tokens of each row [rows] int64.
        parts: Number of parts.
        block: Neighbouring numbers that stay in one part.

    Returns:
        Order and numbers, both [rows] int64.
    """
    costs = cost_of(lengths)
    by_cost = ranked(costs)
    # Within a part rows keep their order: neighbours of one shard are read in one piece.
    numbers = np.concatenate(
        [part[np.argsort(by_cost[part])] for part in dealt(costs[by_cost], parts, block)]
    )
    return by_cost[numbers], numbers


def cost_of(lengths: np.ndarray) -> np.ndarray:
    """Cost of sequences, in tokens of a short one: layers are linear in the length, attention is quadratic."""
    return lengths * (1 + lengths / LINEAR_TOKENS)


def ranked(costs: np.ndarray) -> np.ndarray:
    """Rows from the most to the least expensive, [rows] int64."""
    return np.argsort(-costs, kind="stable")


def dealt(costs: np.ndarray, parts: int, block: int = 1) -> list[np.ndarray]:
    """Deals rows to parts of equal cost, whose sizes differ by at most one, the larger ones first.

    Blocks of rows are dealt in rounds, one block to each part: the most expensive to the part with the lowest cost so
    far. So the costs of parts never differ by more than those of the blocks of one round. Rounds of rows of equal cost
    are dealt at once, each part's blocks side by side: neighbours often share a prompt and are read in one piece. Rows
    that do not fill a round are dealt one by one.

    Args:
        costs: Costs of the rows, not increasing, [rows].
        block: Neighbouring rows that stay together; a mini-batch has one row of each block.

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
