"""What a column of a batch holds: here, rows of different lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np


class _Array(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


A = TypeVar("A", bound=_Array)


@dataclass(frozen=True, eq=False)
class Jagged(Generic[A]):
    """Rows of different lengths: `values` [sum(lengths), ...] holds them end to end, `lengths` cuts them.

    `values` is a numpy array or a tensor, `lengths` [rows] always numpy int64. A row may be empty.

    Raises:
        ValueError: `lengths` is not a vector of non-negative int64, or does not add up to `len(values)`.
    """

    values: A
    lengths: np.ndarray

    def __post_init__(self) -> None:
        if self.lengths.ndim != 1 or self.lengths.dtype != np.int64 or self.lengths.min(initial=0) < 0:
            raise ValueError(
                "lengths must be a vector of non-negative int64, "
                f"got shape {self.lengths.shape} of {self.lengths.dtype}"
            )
        if self.lengths.sum() != len(self.values):
            raise ValueError(
                f"lengths add up to {self.lengths.sum()}, but there are {len(self.values)} values"
            )

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> np.ndarray:
        """Where rows begin and end, [rows + 1] int64: row i is `values[offsets[i]:offsets[i + 1]]`."""
        return np.concatenate(([0], np.cumsum(self.lengths)))

    def row(self, index: int) -> A:
        offsets = self.offsets
        return self.values[offsets[index] : offsets[index + 1]]
