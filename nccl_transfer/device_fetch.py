"""Reads of columns that stay on the GPU."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nccl_transfer.choice import NoTransport, ReaderChoice
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.columns import Jagged
from nccl_transfer.refs.dtypes import CARRIERS
from nccl_transfer.refs.plans import position
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, ShardRun, Space
from nccl_transfer.rows import FetchedRows
from nccl_transfer.store.device_arrays import DeviceArray, Pin, PinnedBytes
from nccl_transfer.store.device_shards import DeviceShards
from nccl_transfer.transports import Reader, Reading
from nccl_transfer.transports.base import DEVICE_TO_DEVICE
from nccl_transfer.transports.common import layout
from rlhf.errors import OutOfSpace

HostRead = Callable[[Endpoint, Sequence[ByteRange]], Reading]
"""Reads ranges of one rank into host memory, of shards on its GPU too."""

Count = Callable[[str, Sequence[ByteRange], float], None]
"""Counts a read: name of the transport, ranges, and its start on the clock of `time.perf_counter`."""


@dataclass(frozen=True, eq=False)
class PlacedRanges:
    """Disjoint ranges of one rank's shards, ordered by shard and position, and the bytes of each: on this process's
    GPU, or in host memory where there was no way to it.

    Attributes:
        ranges: The ranges.
        parts: The bytes of each.
        verify: To be called after the last use of those in host memory; see `Reading.verify`.
    """

    ranges: Sequence[ByteRange]
    parts: Sequence[PinnedBytes | memoryview]
    verify: Callable[[], None]

    def part(self, run: ShardRun, carrier: np.dtype) -> PinnedBytes | np.ndarray:
        """Returns the bytes of a run of rows, which must lie within one of the ranges; those in host memory as a flat
        array."""
        number = bisect.bisect(self.ranges, position(run), key=position) - 1
        first, part = run.start - self.ranges[number].start, self.parts[number]
        if isinstance(part, PinnedBytes):
            return PinnedBytes(part.pin, part.start + first, run.nbytes)
        return np.frombuffer(part[first : first + run.nbytes], carrier)


class DeviceReader:
    """Reads bytes that lie on GPUs into this rank's GPU: those of its own shards in place, those of other ranks by the
    first reader with a route. Bytes without a route go by the host. Thread-safe.

    Args:
        device: The rank's shards on its GPU.
        choice: Chooses the reader.
    """

    def __init__(self, device: DeviceShards, choice: ReaderChoice) -> None:
        self._device = device
        self._choice = choice
        self._has_warned = False

    def read(
        self,
        source: Endpoint,
        ranges: Sequence[ByteRange],
        is_own: bool,
        deadline: float,
        count: Count,
        read_on_host: HostRead,
    ) -> PlacedRanges:
        """Reads ranges of one rank; blocks until all bytes are there, but for those of own shards.

        Args:
            source: The rank.
            ranges: The ranges, disjoint and ordered, of shards in host memory and on its GPU.
            is_own: Whether the rank is this one.
            deadline: Time on the clock of `time.monotonic`, in seconds.
            count: Called after a read from another rank's GPU.
            read_on_host: Reads the other ranges.

        Raises:
            RlhfError: The bytes could not be read; see `Reader.read`.
        """
        there = [r for r in ranges if r.shard.space is Space.DEVICE]
        placed = self._pin(there) if is_own else self._receive(source, there, deadline, count)
        rest = [r for r in ranges if r not in placed]
        reading = read_on_host(source, rest) if rest else Reading([])
        parts = {**placed, **dict(zip(rest, reading.views, strict=True))}
        return PlacedRanges(ranges, [parts[r] for r in ranges], reading.verify)

    def _pin(self, ranges: Sequence[ByteRange]) -> Mapping[ByteRange, PinnedBytes | memoryview]:
        """Pins ranges of own shards; returns their bytes."""
        return {
            r: PinnedBytes(self._device.pin(r.shard.id, r.start, r.nbytes), r.start, r.nbytes) for r in ranges
        }

    def _receive(
        self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float, count: Count
    ) -> Mapping[ByteRange, PinnedBytes | memoryview]:
        """Reads ranges from another rank's GPU; returns their bytes, or nothing where no reader could."""
        if not ranges:
            return {}
        offsets, total = layout(r.nbytes for r in ranges)

        def receive(reader: Reader) -> Pin:
            memory = self._device.borrow(total)
            reader.receive(source, ranges, memory, offsets, deadline)
            return memory

        start = time.perf_counter()
        try:
            name, memory = self._choice.use(source, DEVICE_TO_DEVICE, receive, otherwise="its host memory")
        except NoTransport:
            return {}  # by the host
        except OutOfSpace as error:
            self._warn(source, error)
            return {}
        count(name, ranges, start)
        return {r: PinnedBytes(memory, o, r.nbytes) for r, o in zip(ranges, offsets, strict=True)}

    def _warn(self, source: Endpoint, error: OutOfSpace) -> None:
        """Logs that an arena is full, once."""
        if not self._has_warned:
            logging.warning("%s: %s; such rows go by the host", source, error)
        self._has_warned = True

    def add(
        self, rows: FetchedRows, stays: Batch, placed: Mapping[Endpoint, PlacedRanges], own: Endpoint | None
    ) -> FetchedRows:
        """Returns rows with the columns of `stays`, which are all by reference, added from the bytes that were read.

        Args:
            rows: The other columns.
            stays: The columns.
            placed: Their bytes, by the rank that holds them.
            own: Endpoint of this rank, whose bytes do not count as fetched.
        """
        values: dict[str, Any] = dict(rows.values)
        dtypes = dict(rows.dtypes)
        for name, column in stays.columns.items():
            assert isinstance(column, RemoteColumn)
            values[name], dtypes[name] = self._column(column, placed), column.dtype
        moved = sum(r.nbytes for source, part in placed.items() if source != own for r in part.ranges)
        return replace(
            rows,
            values=values,
            dtypes=dtypes,
            fetched_bytes=rows.fetched_bytes + moved,
            _verify=(*rows._verify, *(part.verify for part in placed.values())),
        )

    def _column(
        self, column: RemoteColumn, placed: Mapping[Endpoint, PlacedRanges]
    ) -> DeviceArray | Jagged[DeviceArray]:
        carrier, parts = CARRIERS[column.dtype], []
        for run in column.runs:
            if run.nbytes:
                part = placed[run.shard.endpoint].part(run, carrier)
                parts.append(part.reshape(-1, *column.row_shape) if isinstance(part, np.ndarray) else part)
        shape = (column.num_elements, *column.row_shape)
        array = DeviceArray(column.dtype, shape, parts, self._device.tensors)
        return array if column.lengths is None else Jagged(array, column.lengths)


def staying(batch: Batch, names: Collection[str]) -> Batch:
    """Returns the columns of a batch, of those named, that have bytes on a GPU."""
    columns = {
        name: column
        for name, column in batch.columns.items()
        if name in names
        and isinstance(column, RemoteColumn)
        and any(shard.space is Space.DEVICE for shard in column.shards)
    }
    return Batch(batch.rows, columns)
