"""Columns as shards of a store in host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import numpy as np

from nccl_transfer.refs.batch import Batch, Column
from nccl_transfer.refs.columns import Jagged, encode_texts
from nccl_transfer.refs.dtypes import TEXT
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Shard
from nccl_transfer.store.leases import Lease
from rlhf.errors import InvalidRequest

Write = Callable[[memoryview], Iterable[int] | None]
"""Fills the memory of a shard, and returns the checksums of its blocks where it computes them itself."""


class ColumnStore(ABC):
    """A store into which arrays are copied."""

    @abstractmethod
    def fill(self, nbytes: int, lease: Lease, write: Write) -> Shard:
        """Creates a shard; see `TensorStore.fill`."""

    def put(self, array: np.ndarray, lease: Lease) -> Shard:
        """Copies an array into a new shard, row-major and little-endian. The array need not be contiguous.

        Raises:
            OutOfSpace: No gap of the arena is large enough; the store is unchanged.
            Refused: The lease was released during the copy, or its session has ended.
            InvalidRequest: The dtype is not boolean, integer or floating point.
        """
        if array.dtype.kind not in "biuf":
            raise InvalidRequest(f"arrays of {array.dtype} cannot be stored; only numbers can")
        little_endian = array.dtype.newbyteorder("<")

        def write(memory: memoryview) -> None:
            np.copyto(np.frombuffer(memory, little_endian).reshape(array.shape), array)

        return self.fill(array.nbytes, lease, write)

    def put_column(self, values: np.ndarray | Jagged[np.ndarray], dtype: str, lease: Lease) -> RemoteColumn:
        """Copies a column into a shard and returns the column by reference. Raises as `put` does.

        Args:
            values: Array [rows, ...] or jagged array, in the carrier of `dtype`
                (`nccl_transfer.refs.dtypes.CARRIERS`).
            dtype: Name of the element type.
            lease: Lease of the shard.
        """
        if isinstance(values, Jagged):
            shard = self.put(values.values, lease)
            return RemoteColumn.of_shard(dtype, values.values.shape[1:], values.lengths, shard)
        return RemoteColumn.of_shard(dtype, values.shape[1:], len(values), self.put(values, lease))

    def put_batch(self, batch: Batch, lease: Lease) -> Batch:
        """Copies the local columns of a batch into shards; returns the batch by reference, remote columns as they were.
        Raises as `put` does; columns copied before the error stay until their lease is released."""
        columns: dict[str, Column] = {}
        for name, column in batch.columns.items():
            if isinstance(column, RemoteColumn):
                columns[name] = column
            elif isinstance(column.values, list):
                columns[name] = self.put_column(encode_texts(column.values), TEXT, lease)
            else:
                array = column.values.values if isinstance(column.values, Jagged) else column.values
                columns[name] = self.put_column(column.values, str(array.dtype), lease)
        return Batch(batch.rows, columns)
