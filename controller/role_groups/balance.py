"""Distribution of rows over data ranks so that each part has the same estimated cost, instead of the same number of
tokens or rows, or so that groups of rows stay whole; pure functions of sequence lengths and of group numbers."""

from __future__ import annotations

import numpy as np

LINEAR_TOKENS = 24_576
"""Sequence length, in tokens, at which attention costs as much as the matrix products of the layers: 6 times the
hidden size (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", equation 3), here 4,096."""


def deal(lengths: np.ndarray, parts: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders the rows of a batch so that cutting them into equal parts gives parts of equal cost, and numbers them by
    cost: number 0 is the most expensive row.

    The numbers do not depend on the mesh, and each part has whole blocks of consecutive numbers. A mini-batch takes
    one row of each block; so every mini-batch has sequences of all lengths, and every data rank an equal share of it.

    Args:
        lengths: Tokens of each row, prompt and response together [rows] int64.
        parts: Number of parts, one for each data rank.
        block: Size of a block, which is the number of mini-batches.

    Returns:
        Indices of the rows in the order in which they are cut into parts, and the number of each row in this order,
        both [rows] int64.
    """
    costs = cost_of(lengths)
    by_cost = ranked(costs)
    # Within a part rows keep their order: neighbours of one shard are read in one piece.
    numbers = np.concatenate(
        [part[np.argsort(by_cost[part])] for part in dealt(costs[by_cost], parts, block)]
    )
    return by_cost[numbers], numbers


def by_groups(group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Orders the rows of a batch so that those of a group are neighbours. Groups are in the order of their first rows,
    and the rows of a group keep their order.

    Args:
        group: Number of each row's group [rows].

    Returns:
        Indices of the rows in the new order [rows] int64, and the number of rows of each group in it [groups] int64.
    """
    _, first, member, sizes = np.unique(group, return_index=True, return_inverse=True, return_counts=True)
    return np.argsort(first[member], kind="stable"), sizes[np.argsort(first)]


def cost_of(lengths: np.ndarray) -> np.ndarray:
    """Estimates the cost of computing each sequence [rows]: length * (1 + length / LINEAR_TOKENS), since layers are
    linear in the length and attention is quadratic. The unit is the cost of a token in a short sequence."""
    return lengths * (1 + lengths / LINEAR_TOKENS)


def ranked(costs: np.ndarray) -> np.ndarray:
    """Returns the indices of rows from the most to the least expensive [rows] int64; the sort is stable."""
    return np.argsort(-costs, kind="stable")


def dealt(costs: np.ndarray, parts: int, block: int = 1) -> list[np.ndarray]:
    """Divides rows into parts of about equal cost, whose sizes differ by at most one, the larger parts first.

    Blocks of rows are assigned in rounds, one block to each part: the most expensive block to the part with the
    lowest cost so far. So the costs of parts never differ by more than those of the blocks of one round. Rounds of
    rows of equal cost are merged so that each part gets neighbouring blocks, since neighbours often share a prompt
    and are read in one piece. Rows that do not fill a round are assigned one by one.

    Args:
        costs: Cost of each row, in descending order [rows].
        parts: Number of parts.
        block: Number of neighbouring rows that stay together; a mini-batch has one row of each block.

    Returns:
        Indices of the rows of each part, ascending: a list of `parts` arrays.
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
