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

from nccl_transfer.columns import Jagged
from rlhf.errors import InvalidRequest

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Size in bytes of an element, by dtype name (torch's and numpy's)."""


_START = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rank serves, and how its memory is reached; as in rlhf.v1.Endpoint."""

    address: str
    host_id: str = ""
    memfd_socket: str = ""
    epoch: int = 0
    service: str = ""
    rank: int = 0
    device_uuid: str = ""
    data_port: int = 0
    data_key: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.service or 'service'} rank {self.rank} at {self.address}"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of one column in the arena of one rank: `nbytes` bytes from byte `offset` on, and their checksums where
    the rank computes them (see `nccl_transfer.checksums`)."""

    endpoint: Endpoint
    id: int
    offset: int
    nbytes: int
    checksums: tuple[int, ...] = field(default=(), hash=False, repr=False)


class Run(NamedTuple):
    """`rows` consecutive rows that lie side by side in `shard`, from byte `start` of the shard on."""

    shard: Shard
    rows: int
    start: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class RemoteColumn:
    """Rows by reference.

    Attributes:
        dtype: Name of the element type.
        row_shape: Shape of a row where fixed, of one entry of a row where jagged.
        lengths: Entries per row [rows] int64 where jagged, else None.
        shards: The shards the rows are in.
        shard: Index into `shards` per row [rows] int64.
        element: Index within the shard of the row's first element [rows] int64; an element is a row where
            fixed, an entry where jagged.
    """

    dtype: str
    row_shape: tuple[int, ...]
    lengths: np.ndarray | None
    shards: tuple[Shard, ...]
    shard: np.ndarray
    element: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.shard)

    @property
    def element_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.row_shape)

    @property
    def elements(self) -> np.ndarray:
        """Elements per row, [rows] int64."""
        return np.ones(self.rows, np.int64) if self.lengths is None else self.lengths

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return int(self.elements.sum()) * self.element_bytes

    def take(self, rows: np.ndarray | slice) -> RemoteColumn:
        lengths = None if self.lengths is None else self.lengths[rows]
        return RemoteColumn(
            self.dtype, self.row_shape, lengths, self.shards, self.shard[rows], self.element[rows]
        )

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        """Maximal runs, in row order. Empty rows join the run they stand in."""
        return tuple(self._runs())

    def _runs(self) -> Iterator[Run]:
        if self.rows == 0:
            return
        elements, size = self.elements, self.element_bytes
        parts = self.element[1:] != (self.element + elements)[:-1]
        if len(self.shards) > 1:
            parts |= self.shard[1:] != self.shard[:-1]
        breaks = parts.nonzero()[0]
        starts = np.concatenate(([0], breaks + 1)) if len(breaks) else _START
        stops = [*breaks.tolist(), self.rows - 1]
        totals = np.add.reduceat(elements, starts)
        for start, stop, total in zip(starts.tolist(), stops, totals.tolist(), strict=True):
            shard = self.shards[int(self.shard[start])]
            yield Run(shard, stop + 1 - start, int(self.element[start]) * size, total * size)

    @staticmethod
    def of_runs(
        dtype: str,
        row_shape: tuple[int, ...],
        lengths: np.ndarray | None,
        shards: tuple[Shard, ...],
        runs: Sequence[tuple[int, int, int]],
    ) -> RemoteColumn:
        """A column by its runs: index into `shards`, rows (at least 1), and first element of each."""
        if len(runs) == 1:
            return RemoteColumn._of_run(dtype, row_shape, lengths, shards, *runs[0])
        shard, rows, first = np.array(runs, np.int64).reshape(-1, 3).T
        before = np.arange(rows.sum()) if lengths is None else lengths.cumsum() - lengths
        offset = first - before[rows.cumsum() - rows]
        return RemoteColumn(
            dtype, row_shape, lengths, shards, shard.repeat(rows), offset.repeat(rows) + before
        )

    @staticmethod
    def _of_run(
        dtype: str,
        row_shape: tuple[int, ...],
        lengths: np.ndarray | None,
        shards: tuple[Shard, ...],
        shard: int,
        rows: int,
        first: int,
    ) -> RemoteColumn:
        """The usual case. Its run is known, and need not be found again."""
        stops = np.arange(1, rows + 1) if lengths is None else lengths.cumsum()
        element = stops + (first - 1) if lengths is None else stops - lengths + first
        column = RemoteColumn(dtype, row_shape, lengths, shards, np.full(rows, shard), element)
        size, total = column.element_bytes, int(stops[-1])
        column.__dict__["runs"] = (Run(shards[shard], rows, first * size, total * size),)
        return column

    @staticmethod
    def of_shard(
        dtype: str, row_shape: tuple[int, ...], lengths_or_rows: np.ndarray | int, shard: Shard
    ) -> RemoteColumn:
        """A column whose rows fill one shard: jagged where lengths are given, else that many fixed rows."""
        if isinstance(lengths_or_rows, np.ndarray):
            lengths = lengths_or_rows.astype(np.int64)
            element = np.cumsum(lengths) - lengths
        else:
            lengths, element = None, np.arange(lengths_or_rows, dtype=np.int64)
        return RemoteColumn(dtype, row_shape, lengths, (shard,), np.zeros(len(element), np.int64), element)


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
        owners.append(np.asarray(numbers, np.int64)[column.shard])
    first = columns[0]
    lengths = None
    if first.lengths is not None:
        lengths = np.concatenate([column.elements for column in columns])
    element = np.concatenate([column.element for column in columns])
    return RemoteColumn(first.dtype, first.row_shape, lengths, tuple(index), np.concatenate(owners), element)


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
        taken = _as_slice(rows)
        return Batch(len(rows), {name: column.take(taken) for name, column in self.columns.items()})

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
