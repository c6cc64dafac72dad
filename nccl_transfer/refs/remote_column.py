"""Columns by reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nccl_transfer.refs.dtypes import ELEMENT_BYTES
from nccl_transfer.refs.shards import Endpoint, Scattered, Shard, ShardRun


class JaggedSpan(NamedTuple):
    """Consecutive rows of a jagged column: their `lengths` [rows] int64, the number of entries `before` them, and their
    own number of `entries`."""

    lengths: np.ndarray
    before: int
    entries: int

    @staticmethod
    def of(lengths: np.ndarray, start: int, stop: int) -> JaggedSpan:
        taken = lengths[start:stop]
        return JaggedSpan(taken, int(lengths[:start].sum()), int(taken.sum()))


@dataclass(frozen=True, eq=False)
class RemoteColumn:
    """Rows by reference.

    Attributes:
        dtype: Name of the element type.
        row_shape: Shape of a row where fixed, of one entry of a row where jagged.
        lengths: Entries per row [rows] int64 where jagged, else None.
        place: One contiguous run, the usual case, or a place per row.
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
        return ELEMENT_BYTES[self.dtype] * math.prod(self.row_shape)

    @property
    def elements(self) -> np.ndarray:
        """Elements per row, [rows] int64."""
        return np.ones(self.rows, np.int64) if self.lengths is None else self.lengths

    @property
    def num_elements(self) -> int:
        """Total elements of all rows."""
        if self.lengths is None:
            return self.rows
        if isinstance(self.place, ShardRun) and self.element_bytes:
            return self.place.nbytes // self.element_bytes
        return int(self.lengths.sum())

    @property
    def nbytes(self) -> int:
        """Total bytes of all rows."""
        return self.num_elements * self.element_bytes

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards that hold the rows."""
        return (self.place.shard,) if isinstance(self.place, ShardRun) else self.place.shards

    def take(self, rows: np.ndarray | slice, span: JaggedSpan | None = None) -> RemoteColumn:
        """Selects rows, in the order given. `span` may pass the known span of consecutive rows of a jagged column."""
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
        lengths, before, elements = None, start, stop - start
        if self.lengths is not None:
            lengths, before, elements = span or JaggedSpan.of(self.lengths, start, stop)
        size = self.element_bytes
        place = ShardRun(run.shard, stop - start, run.start + before * size, elements * size)
        return RemoteColumn(self.dtype, self.row_shape, lengths, place)

    @functools.cached_property
    def scattered(self) -> Scattered:
        """The place of each row."""
        if isinstance(self.place, Scattered):
            return self.place
        elements, first = self.elements, self.place.start // max(self.element_bytes, 1)
        shard = np.zeros(self.rows, np.int64)
        return Scattered((self.place.shard,), shard, elements.cumsum() - elements + first)

    @property
    def runs(self) -> tuple[ShardRun, ...]:
        """Maximal runs, in row order. An empty row joins the run around it."""
        if self.rows == 0:
            return ()
        return (self.place,) if isinstance(self.place, ShardRun) else self._found_runs

    @functools.cached_property
    def _found_runs(self) -> tuple[ShardRun, ...]:
        return tuple(self._find_runs())

    def _find_runs(self) -> Iterator[ShardRun]:
        shards, size = self.scattered.shards, self.element_bytes
        totals = np.add.reduceat(self.elements, self._run_starts)
        for (shard, rows, first), total in zip(self.run_places, totals.tolist(), strict=True):
            yield ShardRun(shards[shard], rows, first * size, total * size)

    @functools.cached_property
    def _run_starts(self) -> np.ndarray:
        """First row of each run; the column must have rows."""
        place = self.scattered
        parts = place.element[1:] != (place.element + self.elements)[:-1]
        if len(place.shards) > 1:
            parts |= place.shard[1:] != place.shard[:-1]
        return np.concatenate(([0], parts.nonzero()[0] + 1))

    @property
    def run_places(self) -> list[tuple[int, int, int]]:
        """Maximal runs, in row order, as arguments of `of_runs`: index into `shards`, rows, first element."""
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
        """Endpoints of the ranks that hold bytes of the rows."""
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
        """A column of contiguous rows; `elements` may pass their known total number of elements."""
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
        """A column from its runs: index into `shards`, rows (at least 1) and first element of each."""
        shard, rows, first = np.array(runs, np.int64).reshape(-1, 3).T
        before = np.arange(rows.sum()) if lengths is None else lengths.cumsum() - lengths
        offset = first - before[rows.cumsum() - rows]
        place = Scattered(shards, shard.repeat(rows), offset.repeat(rows) + before)
        return RemoteColumn(dtype, row_shape, lengths, place)

    @staticmethod
    def of_shard(
        dtype: str, row_shape: tuple[int, ...], lengths_or_rows: np.ndarray | int, shard: Shard
    ) -> RemoteColumn:
        """A column whose rows fill one shard: jagged from an array of lengths, fixed from a number of rows."""
        if isinstance(lengths_or_rows, np.ndarray):
            lengths = lengths_or_rows.astype(np.int64)
            return RemoteColumn.of_run(dtype, row_shape, lengths, shard, len(lengths))
        return RemoteColumn.of_run(dtype, row_shape, None, shard, lengths_or_rows)
