"""Batches: rows x named columns, mostly by reference. Operations on a batch edit references and copy no remote bytes.

A column is one of

- `RemoteColumn`: rows in the arenas of other ranks, fixed or jagged;
- `LocalColumn`: rows in this process, as a numpy array, a `Jagged` array, or a list of strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.remote_column import JaggedSpan, RemoteColumn
from nccl_transfer.refs.shards import Scattered, Shard
from rlhf.errors import InvalidRequest


@dataclass(frozen=True, eq=False)
class LocalColumn:
    """A column by value: `values` is an array [rows, ...], a `Jagged` array, or a list of one string per row."""

    values: np.ndarray | Jagged[np.ndarray] | list[str]

    @property
    def rows(self) -> int:
        return self.values.rows if isinstance(self.values, Jagged) else len(self.values)

    @property
    def texts(self) -> list[str]:
        """The strings of a text column, one per row.

        Raises:
            InvalidRequest: The column contains numbers.
        """
        if not isinstance(self.values, list):
            raise InvalidRequest("the column holds numbers, not text")
        return self.values

    @property
    def nbytes(self) -> int:
        """Size of all rows in bytes; text counts as UTF-8."""
        if isinstance(self.values, list):
            return sum(len(text.encode()) for text in self.values)
        array = self.values.values if isinstance(self.values, Jagged) else self.values
        return array.nbytes

    def take(self, rows: np.ndarray | slice) -> LocalColumn:
        """Returns a column of the selected rows, in the order given: views for a slice, copies for row numbers."""
        if isinstance(self.values, list):
            return LocalColumn(
                self.values[rows] if isinstance(rows, slice) else [self.values[row] for row in rows.tolist()]
            )
        if isinstance(self.values, Jagged):
            return LocalColumn(take_jagged(self.values, rows))
        return LocalColumn(self.values[rows])


Column = RemoteColumn | LocalColumn


def lengths_of(column: Column) -> np.ndarray:
    """Returns the number of entries of each row of a jagged column [rows] int64. Does not fetch the values.

    Raises:
        InvalidRequest: The rows have a fixed shape.
    """
    values = column.values if isinstance(column, LocalColumn) else column
    lengths = getattr(values, "lengths", None)
    if lengths is None:
        raise InvalidRequest("the column has rows of a fixed shape, which have no lengths")
    return lengths


def _as_slice(rows: np.ndarray) -> np.ndarray | slice:
    """Converts consecutive row numbers to a slice, which numpy indexes without a copy; returns others as they are."""
    if not len(rows) or rows[-1] - rows[0] != len(rows) - 1 or (rows[1:] - rows[:-1] != 1).any():
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1)


def take_jagged(jagged: Jagged[np.ndarray], rows: np.ndarray | slice) -> Jagged[np.ndarray]:
    """Returns a jagged array of the selected rows, in the order given: a copy if `rows` are numbers, a view if they are
    a slice, which must have no step."""
    lengths = jagged.lengths[rows]
    if isinstance(rows, slice):
        first = int(jagged.lengths[: rows.start].sum())
        return Jagged(jagged.values[first : first + int(lengths.sum())], lengths)
    first = np.repeat(jagged.offsets[:-1][rows] - (np.cumsum(lengths) - lengths), lengths)
    return Jagged(jagged.values[first + np.arange(lengths.sum())], lengths)


def concat_columns(columns: Sequence[Column]) -> Column:
    """Concatenates the rows of one or more columns. Local rows are copied, unless there is one column.

    Raises:
        InvalidRequest: The columns differ in kind (remote, local numbers or text), dtype, row shape or jaggedness.
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
    """Returns a key that is equal for columns that can be concatenated."""
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
    """Rows x named columns. Immutable; every operation returns a new batch, reads no remote bytes, and copies rows of
    local columns only where they are not consecutive or are concatenated.

    Attributes:
        rows: Number of rows.
        columns: Columns by name, each of `rows` rows.

    Raises:
        InvalidRequest: The number of rows of a column differs from `rows`.
    """

    rows: int
    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if column.rows != self.rows:
                raise InvalidRequest(f"column {name!r} has {column.rows} rows in a batch of {self.rows}")

    @staticmethod
    def of(**values: np.ndarray | Jagged[np.ndarray] | list[str]) -> Batch:
        """Creates a batch of columns by value from keyword arguments, at least one."""
        columns = {name: LocalColumn(value) for name, value in values.items()}
        return Batch(next(iter(columns.values())).rows, columns)

    def __getitem__(self, name: str) -> Column:
        if name not in self.columns:
            raise InvalidRequest(f"the batch has no column {name!r}; it has {sorted(self.columns)}")
        return self.columns[name]

    def __or__(self, other: Batch) -> Batch:
        """Returns a batch with the columns of both; where names are equal, with `other`'s column. Raises
        InvalidRequest where the batches differ in their number of rows."""
        if other.rows != self.rows:
            raise InvalidRequest(f"batches of {self.rows} and {other.rows} rows cannot be joined")
        return Batch(self.rows, {**self.columns, **other.columns})

    def select(self, names: Iterable[str]) -> Batch:
        """Returns a batch of the named columns.

        Raises:
            InvalidRequest: The batch has no column of a name.
        """
        return Batch(self.rows, {name: self[name] for name in names})

    def take(self, rows: np.ndarray) -> Batch:
        """Returns a batch of the rows with these numbers ([n] int64), in the order given; a number may occur several
        times."""
        taken, spans = _as_slice(rows), dict[int, JaggedSpan]()

        def take(column: Column) -> Column:
            if isinstance(column, LocalColumn) or column.lengths is None:
                return column.take(taken)
            if isinstance(column.place, Scattered) or not isinstance(taken, slice):
                return column.take(taken)
            key = id(column.lengths)  # most columns of a fresh batch share their lengths
            if key not in spans:
                spans[key] = JaggedSpan.of(column.lengths, *taken.indices(self.rows)[:2])
            return column.take(taken, spans[key])

        return Batch(len(rows), {name: take(column) for name, column in self.columns.items()})

    def repeat(self, times: int) -> Batch:
        """Returns a batch that repeats every row `times` times, as `np.repeat` does: 0, 0, 1, 1, ..."""
        return self.take(np.repeat(np.arange(self.rows), times))

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Concatenates the rows of one or more batches; drops columns that are not in all of them. Raises
        InvalidRequest as `concat_columns` does."""
        names = [name for name in batches[0].columns if all(name in batch.columns for batch in batches)]
        columns = {name: concat_columns([batch[name] for batch in batches]) for name in names}
        return Batch(sum(batch.rows for batch in batches), columns)

    @property
    def nbytes(self) -> int:
        """Size of all columns in bytes, local and remote."""
        return sum(column.nbytes for column in self.columns.values())
