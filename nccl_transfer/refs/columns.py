"""Jagged arrays, whose rows have different lengths, and texts as jagged arrays of bytes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np


class _Array(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


A = TypeVar("A", bound=_Array)


@dataclass(frozen=True, eq=False)
class Jagged(Generic[A]):
    """An array whose rows have different lengths.

    Attributes:
        values: Concatenation of the rows, [sum(lengths), ...]: a numpy array or a tensor.
        lengths: Length of each row, [rows] numpy int64. A row may be empty.

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

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """Row boundaries, [rows + 1] int64, read-only: row i is `values[offsets[i]:offsets[i + 1]]`."""
        offsets = np.concatenate(([0], np.cumsum(self.lengths)))
        offsets.flags.writeable = False
        return offsets

    def row(self, index: int) -> A:
        """Returns row `index`, [lengths[index], ...], as a view."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def tolist(self) -> list[list[Any]]:
        """Returns every row of a numpy array or tensor as a list."""
        values: Any = self.values
        numbers, offsets = values.tolist(), self.offsets.tolist()
        return [numbers[start:stop] for start, stop in itertools.pairwise(offsets)]


def encode_texts(texts: Sequence[str]) -> Jagged[np.ndarray]:
    """Encodes texts as a jagged uint8 array: each row is the UTF-8 bytes of a text."""
    encoded = [text.encode() for text in texts]
    return Jagged(np.frombuffer(b"".join(encoded), np.uint8), np.array([*map(len, encoded)], np.int64))


def decode_texts(column: Jagged[np.ndarray]) -> list[str]:
    """Decodes a jagged uint8 array, as returned by `encode_texts`, to texts.

    Raises:
        UnicodeDecodeError: The bytes of a row are not UTF-8.
    """
    data, offsets = column.values.tobytes(), column.offsets.tolist()
    return [data[start:stop].decode() for start, stop in itertools.pairwise(offsets)]
