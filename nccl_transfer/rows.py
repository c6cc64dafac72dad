"""Batches by value, put together from the bytes that were read."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged, decode_texts
from nccl_transfer.refs.dtypes import CARRIERS, TEXT
from nccl_transfer.refs.plans import position
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, ShardRun
from nccl_transfer.transports import Reading, Traffic
from rlhf.errors import TransferError

Values = np.ndarray | Jagged[np.ndarray] | list[str]
"""Values of a column in host memory, as all are, unless the caller of a fetch has named columns for the GPU."""


@dataclass(frozen=True, eq=False)
class FetchedRows:
    """The result of a fetch: a batch by value.

    Attributes:
        rows: Number of rows.
        values: Columns by name: a numpy array [rows, ...] or jagged array in the carrier of its element type (see
            `nccl_transfer.refs.dtypes.CARRIERS`), or a list of strings. Of columns that were asked for on the GPU and
            lie there, a `DeviceArray` or a jagged one.
        dtypes: Name of the element type by column name, for every column that is not text.
        fetched_bytes: Number of bytes that came from other ranks.
        traffic: Traffic of the fetch, by name of transport.
    """

    rows: int
    values: Mapping[str, Values]
    dtypes: Mapping[str, str]
    fetched_bytes: int
    traffic: Mapping[str, Traffic] = field(default_factory=dict)
    _verify: Sequence[Callable[[], None]] = field(default=(), repr=False)

    def __getitem__(self, name: str) -> Values:
        return self.values[name]

    def verify(self) -> None:
        """Checks that no shard read in place was released since the fetch. Call it before results that were computed
        from the rows leave the rank.

        Raises:
            Refused: A shard was released, so its bytes may have been overwritten.
            TransferError: A shard was marked corrupt.
        """
        for verify in self._verify:
            verify()


@dataclass(frozen=True, eq=False)
class ReadRanges:
    """Disjoint ranges of one rank's shards, ordered by shard and position, and the bytes that were read from them."""

    ranges: Sequence[ByteRange]
    reading: Reading

    def view(self, run: ShardRun) -> memoryview:
        """Returns the bytes of a run of rows, without a copy. The run must lie within one of the ranges."""
        number = bisect.bisect(self.ranges, position(run), key=position) - 1
        first = run.start - self.ranges[number].start
        return self.reading.views[number][first : first + run.nbytes]

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self.ranges)


def assemble(
    batch: Batch, read: Mapping[Endpoint, ReadRanges], own: Endpoint | None, writable: bool
) -> FetchedRows:
    """Builds the batch by value from the bytes that were read; columns by value are passed on unchanged. The result has
    no `traffic`.

    Args:
        batch: Rows by reference, by value or mixed.
        read: The bytes of the rows by reference, by the rank that holds them.
        own: Endpoint of this process, whose bytes do not count as fetched; None if it has no store.
        writable: Whether columns by reference become writable arrays; else they are read-only.

    Raises:
        TransferError: A text that was read is not UTF-8.
    """
    values: dict[str, Values] = {}
    for name, column in batch.columns.items():
        if isinstance(column, RemoteColumn):
            runs = [run for run in column.runs if run.nbytes]
            values[name] = _column(column, [read[r.shard.endpoint].view(r) for r in runs], writable)
        else:
            values[name] = column.values
    fetched_bytes = sum(part.nbytes for source, part in read.items() if source != own)
    verify = tuple(part.reading.verify for part in read.values())
    return FetchedRows(batch.rows, values, _dtypes(batch), fetched_bytes, _verify=verify)


def _dtypes(batch: Batch) -> dict[str, str]:
    """Returns the name of the element type of each column that is not text, by column name."""
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
    """Builds a column from the bytes of its runs: a list of strings for text; else an array, which is a view if there
    is one run, and a copy if there are several or if the view is read-only and `writable` is set."""
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
