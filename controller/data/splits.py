"""Rows of a source that are held out of its training: a fixed random choice of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from controller.data.loader import shuffled
from controller.data.readers import RowReader
from controller.data.text_files import Row
from rlhf.errors import ConfigError


def split_off(rows: RowReader, count: int, key: str) -> tuple[RowReader, RowReader]:
    """Returns readers of the rows that are left for training, and of the `count` that are held out, both in the order
    of the source. Which rows these are is a function of `count` and of the number of all rows.

    Args:
        rows: Reader of all rows.
        count: Number of rows to hold out.
        key: Config key of the number, for messages.

    Raises:
        ConfigError: There are not more than `count` rows.
    """
    if count >= len(rows):
        raise ConfigError(
            f"{key}: {count} of the {len(rows)} rows cannot be held out, since none would be left for training"
        )
    chosen = np.sort(shuffled(np.arange(count), len(rows), "heldout"))
    return _Remaining(rows, chosen), _Chosen(rows, chosen)


def some_of(rows: RowReader, count: int) -> RowReader:
    """Returns a reader of `count` of the rows, in the order of the source; the rows themselves where `count` is 0 or
    there are no more. Which rows these are is a function of `count` and of the number of all rows."""
    if not 0 < count < len(rows):
        return rows
    return _Chosen(rows, np.sort(shuffled(np.arange(count), len(rows), "evaluated")))


class _Chosen:
    """Reader of rows of these numbers, ascending [n] int64."""

    def __init__(self, rows: RowReader, numbers: np.ndarray) -> None:
        self._rows = rows
        self.fills_nulls = rows.fills_nulls
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, row: int, /) -> Row:
        return self._rows[int(self._numbers[row])]

    def __iter__(self) -> Iterator[Row]:
        return (self[row] for row in range(len(self)))

    def fingerprint(self) -> str:
        """Returns the fingerprint of all rows of the source."""
        return self._rows.fingerprint()

    def where(self, row: int) -> str:
        """Returns the place of a row in its file or dataset, for messages."""
        return self._rows.where(int(self._numbers[row]))


class _Remaining:
    """Reader of all rows but those of these numbers, ascending [n] int64."""

    def __init__(self, rows: RowReader, without: np.ndarray) -> None:
        self._rows = rows
        self.fills_nulls = rows.fills_nulls
        self._without = without
        # Number of remaining rows before each of those that are left out.
        self._before = without - np.arange(len(without))

    def __len__(self) -> int:
        return len(self._rows) - len(self._without)

    def __getitem__(self, row: int, /) -> Row:
        return self._rows[self._number(row)]

    def __iter__(self) -> Iterator[Row]:
        left_out = iter(self._without)
        following = next(left_out, -1)
        for number, row in enumerate(self._rows):
            if number == following:
                following = next(left_out, -1)
            else:
                yield row

    def fingerprint(self) -> str:
        """Returns the fingerprint of all rows of the source."""
        return self._rows.fingerprint()

    def where(self, row: int) -> str:
        """Returns the place of a row in its file or dataset, for messages."""
        return self._rows.where(self._number(row))

    def _number(self, row: int) -> int:
        return row + int(np.searchsorted(self._before, row, side="right"))
