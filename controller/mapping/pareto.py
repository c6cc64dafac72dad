"""Pareto-optimal rows of a cost matrix."""

from __future__ import annotations

import numpy as np


def not_dominated_rows(costs: np.ndarray) -> np.ndarray:
    """Returns the Pareto front of `costs` [rows, columns]: the indices [n] int64 of the rows that no other row
    dominates (is at most as large in every column); of equal rows the first in lexical order."""
    if not len(costs):
        return np.zeros(0, np.int64)
    # A row has a larger sum than those that dominate it; or, if rounding makes the sums equal, it comes after them.
    order = np.lexsort((*costs.T[::-1], costs.sum(axis=1)))
    columns = np.ascontiguousarray(costs[order].T)
    place = 0
    while place < len(order) - 1:
        is_smaller = columns[0, place + 1 :] < columns[0, place]
        for column in columns[1:]:
            is_smaller |= column[place + 1 :] < column[place]
        place += 1
        if not is_smaller.all():
            order = np.concatenate((order[:place], order[place:][is_smaller]))
            columns = np.concatenate((columns[:, :place], columns[:, place:][:, is_smaller]), axis=1)
    return order


def merged_rows(front: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Returns the indices [n] int64 of the rows of `front` followed by `more`, each [rows, columns], that no other row
    dominates; of equal rows the first. No row of `front` dominates another of it, nor one of `more` another."""
    if not len(front) or not len(more):
        return np.arange(len(front) + len(more))
    is_new = ~np.any(np.all(front[None] <= more[:, None], axis=2), axis=1)
    stays = ~np.any(np.all(more[is_new][None] <= front[:, None], axis=2), axis=1)
    return np.flatnonzero(np.concatenate((stays, is_new)))
