"""Batches: rows x named columns, mostly by reference. All algebra edits references and moves no byte.

A column is one of

- `RemoteColumn`: rows in the arenas of other ranks, fixed or jagged;
- `LocalColumn`: rows held here, as a numpy array, a `Jagged` one, or a list of strings.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from nccl_transfer.refs.columns import Jagged
from rlhf.errors import InvalidRequest

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Size in bytes of an element, by dtype name (torch's and numpy's)."""

TEXT = "utf8"
"""Element type of a jagged column whose rows are texts: an element is a byte of UTF-8."""

ELEMENT_BYTES: Mapping[str, int] = {**ITEM_BYTES, TEXT: 1}
"""Size in bytes of an element of a column by reference."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rank serves, and how its memory is reached; as in rlhf.v1.Endpoint."""

    address: str
    host_id: str = field(default="", hash=False)
    memfd_socket: str = field(default="", hash=False)
    epoch: int = 0
    service: str = field(default="", hash=False)
    rank: int = field(default=0, hash=False)
    device_uuid: str = field(default="", hash=False)
    data_port: int = field(default=0, hash=False)
    data_key: str = field(default="", hash=False, repr=False)
    nccl_version: int = field(default=0, hash=False)

    def __str__(self) -> str:
        return f"{self.service or 'service'} rank {self.rank} at {self.address}"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of one column in the arena of one rank: `nbytes` bytes from byte `offset` on, and their checksums where
    the rank computes them (see `nccl_transfer.refs.checksums`)."""

    endpoint: Endpoint
    id: int
    offset: int = field(hash=False)
    nbytes: int = field(hash=False)
    checksums: tuple[int, ...] = field(default=(), hash=False, repr=False)


class ShardRun(NamedTuple):
    """`rows` consecutive rows that lie side by side in `shard`: `nbytes` bytes from byte `start` of the shard on."""

    shard: Shard
    rows: int
    start: int
    nbytes: int


class Scattered(NamedTuple):
    """Rows that lie anywhere.

    Attributes:
        shards: The shards the rows are in.
        shard: Index into `shards` per row [rows] int64.
        element: Index within the shard of the row's first element [rows] int64; an element is a row where
            fixed, an entry where jagged.
    """

    shards: tuple[Shard, ...]
    shard: np.ndarray
    element: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.shard)


class JaggedSpan(NamedTuple):
    """Consecutive rows of a jagged column: `lengths` [rows] int64 of them, `before` entries before them, and
    `entries` in them."""

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
        place: Where the rows are: all side by side, as they mostly are, or anywhere.
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
        """Elements of all rows."""
        if self.lengths is None:
            return self.rows
        if isinstance(self.place, ShardRun) and self.element_bytes:
            return self.place.nbytes // self.element_bytes
        return int(self.lengths.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.num_elements * self.element_bytes

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards the rows are in."""
        return (self.place.shard,) if isinstance(self.place, ShardRun) else self.place.shards

    def take(self, rows: np.ndarray | slice, span: JaggedSpan | None = None) -> RemoteColumn:
        """These rows in this order; `span`, where it is known, of consecutive rows of a jagged column."""
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
        """Where each row is."""
        if isinstance(self.place, Scattered):
            return self.place
        elements, first = self.elements, self.place.start // max(self.element_bytes, 1)
        shard = np.zeros(self.rows, np.int64)
        return Scattered((self.place.shard,), shard, elements.cumsum() - elements + first)

    @property
    def runs(self) -> tuple[ShardRun, ...]:
        """Maximal runs, in row order. Empty rows join the run they stand in."""
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
        """The first row of each run, of a column that has rows."""
        place = self.scattered
        parts = place.element[1:] != (place.element + self.elements)[:-1]
        if len(place.shards) > 1:
            parts |= place.shard[1:] != place.shard[:-1]
        return np.concatenate(([0], parts.nonzero()[0] + 1))

    @property
    def run_places(self) -> list[tuple[int, int, int]]:
        """Maximal runs, in row order, as `of_runs` takes them: index into `shards`, rows, first element of each."""
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
        """The ranks that hold bytes of the rows."""
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
        """A column whose rows lie side by side; `elements`, where it is known, is how many they have together."""
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
        """A column by its runs: index into `shards`, rows (at least 1), and first element of each."""
        shard, rows, first = np.array(runs, np.int64).reshape(-1, 3).T
        before = np.arange(rows.sum()) if lengths is None else lengths.cumsum() - lengths
        offset = first - before[rows.cumsum() - rows]
        place = Scattered(shards, shard.repeat(rows), offset.repeat(rows) + before)
        return RemoteColumn(dtype, row_shape, lengths, place)

    @staticmethod
    def of_shard(
        dtype: str, row_shape: tuple[int, ...], lengths_or_rows: np.ndarray | int, shard: Shard
    ) -> RemoteColumn:
        """A column whose rows fill one shard: jagged where lengths are given, else that many fixed rows."""
        if isinstance(lengths_or_rows, np.ndarray):
            lengths = lengths_or_rows.astype(np.int64)
            return RemoteColumn.of_run(dtype, row_shape, lengths, shard, len(lengths))
        return RemoteColumn.of_run(dtype, row_shape, None, shard, lengths_or_rows)


@dataclass(frozen=True, eq=False)
class LocalColumn:
    """Rows by value: [rows, ...] array, `Jagged` array, or one string per row."""

    values: np.ndarray | Jagged[np.ndarray] | list[str]

    @property
    def rows(self) -> int:
        return self.values.rows if isinstance(self.values, Jagged) else len(self.values)

    @property
    def texts(self) -> list[str]:
        """The rows of a text column.

        Raises:
            InvalidRequest: It is not one.
        """
        if not isinstance(self.values, list):
            raise InvalidRequest("the column holds numbers, not text")
        return self.values

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, text as UTF-8."""
        if isinstance(self.values, list):
            return sum(len(text.encode()) for text in self.values)
        array = self.values.values if isinstance(self.values, Jagged) else self.values
        return array.nbytes

    def take(self, rows: np.ndarray | slice) -> LocalColumn:
        if isinstance(self.values, list):
            return LocalColumn(
                self.values[rows] if isinstance(rows, slice) else [self.values[row] for row in rows.tolist()]
            )
        if isinstance(self.values, Jagged):
            return LocalColumn(take_jagged(self.values, rows))
        return LocalColumn(self.values[rows])


Column = RemoteColumn | LocalColumn


def _as_slice(rows: np.ndarray) -> np.ndarray | slice:
    """Rows that follow each other as a slice, which numpy takes without a copy."""
    if not len(rows) or rows[-1] - rows[0] != len(rows) - 1 or (rows[1:] - rows[:-1] != 1).any():
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1)


def take_jagged(jagged: Jagged[np.ndarray], rows: np.ndarray | slice) -> Jagged[np.ndarray]:
    """Rows of a jagged array, in the order given."""
    lengths = jagged.lengths[rows]
    if isinstance(rows, slice):
        first = int(jagged.lengths[: rows.start].sum())
        return Jagged(jagged.values[first : first + int(lengths.sum())], lengths)
    first = np.repeat(jagged.offsets[:-1][rows] - (np.cumsum(lengths) - lengths), lengths)
    return Jagged(jagged.values[first + np.arange(lengths.sum())], lengths)


def concat_columns(columns: Sequence[Column]) -> Column:
    """One column of the rows of all, in order.

    Raises:
        InvalidRequest: The columns differ in kind, dtype, row shape or jaggedness.
    """
    if len(columns) == 1:
        return columns[0]
    kinds = {_kind(column) for column in columns}
    if len(kinds) != 1:
        raise InvalidRequest(f"columns of different kinds cannot be put together: {sorted(map(str, kinds))}")
    if all(isinstance(column, RemoteColumn) for column in columns):
        return _concat_remote([column for column in columns if isinstance(column, RemoteColumn)])
    values = [column.values for column in columns if isinstance(column, LocalColumn)]
    if isinstance(values[0], list):
        return LocalColumn([text for rows in values for text in rows])  # type: ignore[union-attr]
    if isinstance(values[0], Jagged):
        jagged = [value for value in values if isinstance(value, Jagged)]
        return LocalColumn(
            Jagged(np.concatenate([j.values for j in jagged]), np.concatenate([j.lengths for j in jagged]))
        )
    return LocalColumn(np.concatenate(values))  # type: ignore[arg-type]


def _kind(column: Column) -> tuple[object, ...]:
    if isinstance(column, RemoteColumn):
        return ("remote", column.dtype, column.row_shape, column.lengths is not None)
    if isinstance(column.values, list):
        return ("text",)
    array = column.values.values if isinstance(column.values, Jagged) else column.values
    return ("local", str(array.dtype), array.shape[1:], isinstance(column.values, Jagged))


def _concat_remote(columns: list[RemoteColumn]) -> RemoteColumn:
    index: dict[Shard, int] = {}
    owners = []
    for column in columns:
        numbers = [index.setdefault(shard, len(index)) for shard in column.shards]
        owners.append(np.asarray(numbers, np.int64)[column.scattered.shard])
    first = columns[0]
    lengths = None
    if first.lengths is not None:
        lengths = np.concatenate([column.elements for column in columns])
    element = np.concatenate([column.scattered.element for column in columns])
    place = Scattered(tuple(index), np.concatenate(owners), element)
    return RemoteColumn(first.dtype, first.row_shape, lengths, place)


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows x named columns. Immutable; every operation returns a new batch that shares the columns' bytes.

    Raises:
        InvalidRequest: A column has another number of rows than the batch.
    """

    rows: int
    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if column.rows != self.rows:
                raise InvalidRequest(f"column {name!r} has {column.rows} rows in a batch of {self.rows}")

    @staticmethod
    def of(**values: np.ndarray | Jagged[np.ndarray] | list[str]) -> Batch:
        """A batch of columns held here; at least one."""
        columns = {name: LocalColumn(value) for name, value in values.items()}
        return Batch(next(iter(columns.values())).rows, columns)

    def __getitem__(self, name: str) -> Column:
        if name not in self.columns:
            raise InvalidRequest(f"the batch has no column {name!r}; it has {sorted(self.columns)}")
        return self.columns[name]

    def __or__(self, other: Batch) -> Batch:
        """The columns of both; where both have a name, the right one's."""
        if other.rows != self.rows:
            raise InvalidRequest(f"batches of {self.rows} and {other.rows} rows cannot be joined")
        return Batch(self.rows, {**self.columns, **other.columns})

    def select(self, names: Iterable[str]) -> Batch:
        """Only these columns."""
        return Batch(self.rows, {name: self[name] for name in names})

    def take(self, rows: np.ndarray) -> Batch:
        """These rows in this order; a row may be taken several times."""
        taken, spans = _as_slice(rows), dict[int, JaggedSpan]()

        def take(column: Column) -> Column:
            if isinstance(column, LocalColumn) or column.lengths is None:
                return column.take(taken)
            if isinstance(column.place, Scattered) or not isinstance(taken, slice):
                return column.take(taken)
            key = id(column.lengths)  # most columns of a batch that was just made have the same lengths
            if key not in spans:
                spans[key] = JaggedSpan.of(column.lengths, *taken.indices(self.rows)[:2])
            return column.take(taken, spans[key])

        return Batch(len(rows), {name: take(column) for name, column in self.columns.items()})

    def repeat(self, times: int) -> Batch:
        """Every row `times` times, side by side."""
        return self.take(np.repeat(np.arange(self.rows), times))

    def split(self, parts: int) -> list[Batch]:
        """`parts` batches of consecutive rows, whose sizes differ by at most one."""
        return [self.take(rows) for rows in np.array_split(np.arange(self.rows), parts)]

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """The rows of all batches in order; only the columns that all of them have."""
        names = [name for name in batches[0].columns if all(name in batch.columns for batch in batches)]
        columns = {name: concat_columns([batch[name] for batch in batches]) for name in names}
        return Batch(sum(batch.rows for batch in batches), columns)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns, wherever they are."""
        return sum(column.nbytes for column in self.columns.values())
