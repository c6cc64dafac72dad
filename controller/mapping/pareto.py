"""Rows of costs of which none is dominated."""

from __future__ import annotations

import numpy as np


def not_dominated_rows(costs: np.ndarray) -> np.ndarray:
    """Returns the indices [n] int64 of the rows of `costs` [rows, columns] than which no other row is at most as large
    in every column; of equal rows the first in lexical order."""
    if not len(costs):
        return np.zeros(0, np.int64)
    order = np.lexsort(costs.T[::-1])
    rows, kept = costs[order], []
    alive = np.ones(len(rows), bool)
    for number in range(len(rows)):
        if alive[number]:
            kept.append(number)
            alive[number + 1 :] &= (rows[number + 1 :] < rows[number]).any(axis=1)
    return order[kept]
