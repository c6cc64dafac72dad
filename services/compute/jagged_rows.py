"""Rows of jagged columns: selected, and put back in order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nccl_transfer.refs.columns import Jagged


def take(column: Jagged[Tensor], rows: np.ndarray) -> Tensor:
    """The values of `rows`, concatenated in that order."""
    return column.values[_positions(column.lengths, rows).to(column.values.device)]


def assemble(parts: Sequence[np.ndarray], values: Sequence[Tensor], lengths: np.ndarray) -> Jagged[Tensor]:
    """A column from its parts: the inverse of `take` for each of them.

    Args:
        parts: rows of each part, at least one part; together every row once.
        values: concatenated values of each part's rows.
        lengths: values per row, [rows] int64.
    """
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(lengths))), "each row is in one part"
    whole = torch.empty_like(torch.cat(list(values)))
    for rows, part in zip(parts, values, strict=True):
        whole[_positions(lengths, rows).to(whole.device)] = part
    return Jagged(whole, lengths)


def first_equal_rows(column: Jagged[Tensor], rows: np.ndarray) -> np.ndarray:
    """For each of `rows`, the index within `rows` of the first one with the same values, [len(rows)] int64."""
    firsts: dict[bytes, int] = {}
    starts = np.cumsum(column.lengths) - column.lengths
    values = column.values.cpu().numpy()
    keys = (values[starts[row] : starts[row] + column.lengths[row]].tobytes() for row in rows)
    return np.array([firsts.setdefault(key, index) for index, key in enumerate(keys)], dtype=np.int64)


def _positions(lengths: np.ndarray, rows: np.ndarray) -> Tensor:
    """Indices of the values of `rows` in a jagged column, row after row."""
    counts = lengths[rows]
    starts = (np.cumsum(lengths) - lengths)[rows]
    before = np.cumsum(counts) - counts
    return torch.from_numpy(np.repeat(starts - before, counts) + np.arange(counts.sum()))
