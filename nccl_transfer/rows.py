"""Batches by value, put together from the bytes that were read."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged, decode_texts
from nccl_transfer.refs.dtypes import CARRIERS, TEXT
from nccl_transfer.refs.plans import position
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, ShardRun
from nccl_transfer.transports import Reading
from rlhf.errors import TransferError

Values = np.ndarray | Jagged[np.ndarray] | list[str]


@dataclass(frozen=True, eq=False)
class FetchedRows:
    """A batch by value.

    Attributes:
        rows: Number of rows.
        values: Columns by name: [rows, ...] or jagged arrays of carriers, or strings.
        dtypes: Element type by name of every column that is not text.
        fetched_bytes: Bytes that came from other ranks.
    """

    rows: int
    values: Mapping[str, Values]
    dtypes: Mapping[str, str]
    fetched_bytes: int
    _readings: Sequence[Reading] = field(default=(), repr=False)

    def __getitem__(self, name: str) -> Values:
        return self.values[name]

    def verify(self) -> None:
        """Verifies that the rows were valid until now; called before results computed from them leave the rank.

        Raises:
            Refused: A shard that was read in place has been released since the fetch.
        """
        for reading in self._readings:
            reading.verify()


@dataclass(frozen=True, eq=False)
class ReadRanges:
    """Ranges of one rank's shards, in order and disjoint, and the bytes read from each."""

    ranges: Sequence[ByteRange]
    reading: Reading

    def view(self, run: ShardRun) -> memoryview:
        """The bytes of a run that lies within one of the ranges."""
        number = bisect.bisect(self.ranges, position(run), key=position) - 1
        first = run.start - self.ranges[number].start
        return self.reading.views[number][first : first + run.nbytes]

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self.ranges)


def assemble(
    batch: Batch, read: Mapping[Endpoint, ReadRanges], own: Endpoint | None, writable: bool
) -> FetchedRows:
    """The batch by value.

    Args:
        batch: Rows by reference, by value or mixed.
        read: The bytes of the rows that are by reference, by the rank that holds them.
        own: The rank of this process, whose bytes are not counted as fetched.
        writable: Whether columns by reference are arrays that may be written to; else they are read-only.

    Raises:
        TransferError: A text is not UTF-8.
    """
    values: dict[str, Values] = {}
    for name, column in batch.columns.items():
        if isinstance(column, RemoteColumn):
            runs = [run for run in column.runs if run.nbytes]
            values[name] = _column(column, [read[r.shard.endpoint].view(r) for r in runs], writable)
        else:
            values[name] = column.values
    fetched_bytes = sum(part.nbytes for source, part in read.items() if source != own)
    readings = tuple(part.reading for part in read.values())
    return FetchedRows(batch.rows, values, _dtypes(batch), fetched_bytes, readings)


def _dtypes(batch: Batch) -> dict[str, str]:
    dtypes = {}
    for name, column in batch.columns.items():
        if isinstance(column, RemoteColumn):
            if column.dtype != TEXT:
                dtypes[name] = column.dtype
        elif isinstance(column.values, Jagged):
            dtypes[name] = str(column.values.values.dtype)
        elif isinstance(column.values, np.ndarray):
            dtypes[name] = str(column.values.dtype)
    return dtypes


def _column(column: RemoteColumn, views: Sequence[memoryview], writable: bool) -> Values:
    """Builds a column from the bytes of its runs: a view of a single run, a copy of several."""
    if column.dtype == TEXT:
        try:
            return decode_texts(Jagged(np.frombuffer(b"".join(views), np.uint8), column.elements))
        except UnicodeDecodeError as error:
            raise TransferError(f"a text that was fetched is not UTF-8: {error}") from None
    carrier = CARRIERS[column.dtype]
    parts = [np.frombuffer(view, carrier) for view in views]
    flat = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, carrier), *parts])
    if writable and not flat.flags.writeable:  # the transport offers no writable views
        flat = flat.copy()
    flat.flags.writeable = writable
    array = flat.reshape(column.num_elements, *column.row_shape)
    return array if column.lengths is None else Jagged(array, column.lengths)
