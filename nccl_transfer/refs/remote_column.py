"""Columns by reference: rows in the arenas of other ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nccl_transfer.refs.dtypes import ELEMENT_BYTES
from nccl_transfer.refs.shards import Endpoint, Scattered, Shard, ShardRun


class JaggedSpan(NamedTuple):
    """Position of consecutive rows of a jagged column.

    Attributes:
        lengths: Number of entries of each of the rows, [rows] int64.
        before: Number of entries of the column before the first of the rows.
        entries: Total number of entries of the rows.
    """

    lengths: np.ndarray
    before: int
    entries: int

    @staticmethod
    def of(lengths: np.ndarray, start: int, stop: int) -> JaggedSpan:
        """Returns the span of rows `start` to `stop`, exclusive, of a column with `lengths`."""
        taken = lengths[start:stop]
        return JaggedSpan(taken, int(lengths[:start].sum()), int(taken.sum()))


@dataclass(frozen=True, eq=False)
class RemoteColumn:
    """A column by reference. A column is fixed (all rows have one shape) or jagged (a row is a list of entries). An
    element is a row of a fixed column, or an entry of a jagged one.

    Attributes:
        dtype: Name of the element type, a key of `nccl_transfer.refs.dtypes.ELEMENT_BYTES`.
        row_shape: Shape of a row if fixed, of one entry if jagged.
        lengths: Number of entries of each row, [rows] int64, if jagged; None if fixed.
        place: One contiguous run of rows, the usual case, or a place for each row.
    """

    dtype: str
    row_shape: tuple[int, ...]
    lengths: np.ndarray | None
    place: ShardRun | Scattered

    @property
    def rows(self) -> int:
        return self.place.rows

    @property
    def element_bytes(self) -> int:
        """Size in bytes of an element: a row if fixed, an entry if jagged."""
        return ELEMENT_BYTES[self.dtype] * math.prod(self.row_shape)

    @property
    def elements(self) -> np.ndarray:
        """Number of elements of each row, [rows] int64: `lengths` if jagged, ones if fixed."""
        return np.ones(self.rows, np.int64) if self.lengths is None else self.lengths

    @property
    def num_elements(self) -> int:
        """Number of elements of all rows."""
        if self.lengths is None:
            return self.rows
        if isinstance(self.place, ShardRun) and self.element_bytes:
            return self.place.nbytes // self.element_bytes
        return int(self.lengths.sum())

    @property
    def nbytes(self) -> int:
        """Size of all rows in bytes."""
        return self.num_elements * self.element_bytes

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Shards that contain the rows."""
        return (self.place.shard,) if isinstance(self.place, ShardRun) else self.place.shards

    def take(self, rows: np.ndarray | slice, span: JaggedSpan | None = None) -> RemoteColumn:
        """Returns a column of the selected rows, in the order given.

        Args:
            rows: Row numbers [n] int64, or a slice.
            span: For a slice of a jagged column, the span of its rows if it is known. Default: computed.
        """
        if isinstance(rows, slice) and isinstance(self.place, ShardRun):
            start, stop, step = rows.indices(self.rows)
            if step == 1 and start <= stop:
                return self._between(self.place, start, stop, span)
        lengths = None if self.lengths is None else self.lengths[rows]
        shards, shard, element = self.scattered
        return RemoteColumn(
            self.dtype, self.row_shape, lengths, Scattered(shards, shard[rows], element[rows])
        )

    def _between(self, run: ShardRun, start: int, stop: int, span: JaggedSpan | None) -> RemoteColumn:
        """Returns the column of rows `start` to `stop`, exclusive, of a column whose place is `run`."""
        lengths, before, elements = None, start, stop - start
        if self.lengths is not None:
            lengths, before, elements = span or JaggedSpan.of(self.lengths, start, stop)
        size = self.element_bytes
        place = ShardRun(run.shard, stop - start, run.start + before * size, elements * size)
        return RemoteColumn(self.dtype, self.row_shape, lengths, place)

    @functools.cached_property
    def scattered(self) -> Scattered:
        """Place of each row, whether or not the rows are contiguous."""
        if isinstance(self.place, Scattered):
            return self.place
        elements, first = self.elements, self.place.start // max(self.element_bytes, 1)
        shard = np.zeros(self.rows, np.int64)
        return Scattered((self.place.shard,), shard, elements.cumsum() - elements + first)

    @property
    def runs(self) -> tuple[ShardRun, ...]:
        """Maximal contiguous runs of the rows, in row order. An empty row belongs to the run around it."""
        if self.rows == 0:
            return ()
        return (self.place,) if isinstance(self.place, ShardRun) else self._found_runs

    @functools.cached_property
    def _found_runs(self) -> tuple[ShardRun, ...]:
        shards, size = self.scattered.shards, self.element_bytes
        totals = np.add.reduceat(self.elements, self._run_starts)
        return tuple(
            ShardRun(shards[shard], rows, first * size, total * size)
            for (shard, rows, first), total in zip(self.run_places, totals.tolist(), strict=True)
        )

    @functools.cached_property
    def _run_starts(self) -> np.ndarray:
        """Number of the first row of each run, [runs] int64; the column must have rows."""
        place = self.scattered
        parts = place.element[1:] != (place.element + self.elements)[:-1]
        if len(place.shards) > 1:
            parts |= place.shard[1:] != place.shard[:-1]
        return np.concatenate(([0], parts.nonzero()[0] + 1))

    @property
    def run_places(self) -> list[tuple[int, int, int]]:
        """Maximal contiguous runs in row order, as `of_runs` takes them: (index into `shards`, rows, first
        element)."""
        if self.rows == 0:
            return []
        if isinstance(self.place, ShardRun):
            return [(0, self.rows, self.place.start // max(self.element_bytes, 1))]
        place, starts = self.scattered, self._run_starts
        rows = np.diff(starts, append=self.rows)
        columns = (place.shard[starts], rows, place.element[starts])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    @property
    def holders(self) -> list[Endpoint]:
        """Endpoints of the ranks that hold bytes of the rows, each once."""
        if not self.nbytes:
            return []
        if isinstance(self.place, ShardRun):
            return [self.place.shard.endpoint]
        used = np.unique(self.place.shard[self.elements > 0]).tolist()
        return list(dict.fromkeys(self.place.shards[number].endpoint for number in used))

    @staticmethod
    def of_run(
        dtype: str,
        row_shape: tuple[int, ...],
        lengths: np.ndarray | None,
        shard: Shard,
        rows: int,
        first_element: int = 0,
        elements: int | None = None,
    ) -> RemoteColumn:
        """Creates a column of contiguous rows of one shard.

        Args:
            dtype, row_shape, lengths: As the attributes.
            shard: Shard that contains the rows.
            rows: Number of rows.
            first_element: Index in the shard of the first row's first element. Default: 0.
            elements: Number of elements of all rows, if known. Default: computed.
        """
        size = ELEMENT_BYTES[dtype] * math.prod(row_shape)
        if elements is None:
            elements = rows if lengths is None else int(lengths.sum())
        return RemoteColumn(
            dtype, row_shape, lengths, ShardRun(shard, rows, first_element * size, elements * size)
        )

    @staticmethod
    def of_runs(
        dtype: str,
        row_shape: tuple[int, ...],
        lengths: np.ndarray | None,
        shards: tuple[Shard, ...],
        runs: Sequence[tuple[int, int, int]],
    ) -> RemoteColumn:
        """Creates a column from its runs, each as (index into `shards`, number of rows, at least 1, first
        element)."""
        shard, rows, first = np.array(runs, np.int64).reshape(-1, 3).T
        before = np.arange(rows.sum()) if lengths is None else lengths.cumsum() - lengths
        offset = first - before[rows.cumsum() - rows]
        place = Scattered(shards, shard.repeat(rows), offset.repeat(rows) + before)
        return RemoteColumn(dtype, row_shape, lengths, place)

    @staticmethod
    def of_shard(
        dtype: str, row_shape: tuple[int, ...], lengths_or_rows: np.ndarray | int, shard: Shard
    ) -> RemoteColumn:
        """Creates a column whose rows fill one shard: a jagged one from an array of lengths, a fixed one from a
        number of rows."""
        if isinstance(lengths_or_rows, np.ndarray):
            lengths = lengths_or_rows.astype(np.int64)
            return RemoteColumn.of_run(dtype, row_shape, lengths, shard, len(lengths))
        return RemoteColumn.of_run(dtype, row_shape, None, shard, lengths_or_rows)
