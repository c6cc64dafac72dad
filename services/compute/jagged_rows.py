"""Selects rows of jagged columns, and joins selected rows to a column again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged


def take(column: Jagged[Tensor], rows: np.ndarray) -> Tensor:
    """Returns the values of the given rows of a column, concatenated in the order of `rows`."""
    return column.values[positions(column.lengths, rows).to(column.values.device)]


def assemble(parts: Sequence[np.ndarray], values: Sequence[Tensor], lengths: np.ndarray) -> Jagged[Tensor]:
    """Joins parts of a column; the inverse of `take` for several parts.

    Args:
        parts: row numbers of each part, which together contain every row once; at least one part.
        values: concatenated values of the rows of each part.
        lengths: number of values of each row of the column, [rows] int64.
    """
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(lengths))), "each row is in one part"
    whole = torch.empty_like(torch.cat(list(values)))
    for rows, part in zip(parts, values, strict=True):
        whole[positions(lengths, rows).to(whole.device)] = part
    return Jagged(whole, lengths)


def first_equal_rows(column: Jagged[Tensor], rows: np.ndarray) -> np.ndarray:
    """Returns, for each element of `rows`, the index within `rows` of the first row with the same values, [len(rows)]
    int64."""
    firsts: dict[bytes, int] = {}
    starts = np.cumsum(column.lengths) - column.lengths
    values = column.values.cpu().numpy()
    keys = (values[starts[row] : starts[row] + column.lengths[row]].tobytes() for row in rows)
    return np.array([firsts.setdefault(key, index) for index, key in enumerate(keys)], dtype=np.int64)


def counts(mask: Jagged[Tensor]) -> np.ndarray:
    """Returns the number of true values in each row of a column of bool in host memory, [rows] int64."""
    row_of_value = np.repeat(np.arange(mask.rows), mask.lengths)
    return np.bincount(row_of_value[mask.values.numpy()], minlength=mask.rows)


def positions(lengths: np.ndarray, rows: np.ndarray) -> Tensor:
    """Returns the indices of the values of `rows` within the values of a jagged column, row after row, int64."""
    counts = lengths[rows]
    starts = (np.cumsum(lengths) - lengths)[rows]
    before = np.cumsum(counts) - counts
    return torch.from_numpy(np.repeat(starts - before, counts) + np.arange(counts.sum()))
