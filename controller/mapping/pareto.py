"""Rows of costs of which none is dominated."""

from __future__ import annotations

import numpy as np


def not_dominated_rows(costs: np.ndarray) -> np.ndarray:
    """Returns the indices [n] int64 of the rows of `costs` [rows, columns] than which no other row is at most as large
    in every column; of equal rows the first in lexical order."""
    if not len(costs):
        return np.zeros(0, np.int64)
    order = np.lexsort(costs.T[::-1])
    columns, kept = np.ascontiguousarray(costs[order].T), []
    while len(order):
        kept.append(order[0])
        is_smaller = (columns[:, 1:] < columns[:, :1]).any(axis=0)
        order, columns = order[1:][is_smaller], columns[:, 1:][:, is_smaller]
    return np.array(kept, np.int64)
