"""Turns batches by reference into batches by value."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

import numpy as np

from nccl_transfer.arena import ByteRange
from nccl_transfer.batch import ITEM_BYTES, Batch, Endpoint, RemoteColumn
from nccl_transfer.columns import Jagged
from nccl_transfer.store import TensorStore
from nccl_transfer.transports import Reading, Traffic, Transport
from nccl_transfer.transports.base import read_in_place
from rlhf.errors import TransferError

CARRIERS: Mapping[str, np.dtype] = {
    name: np.dtype({"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}.get(name, name))
    for name in ITEM_BYTES
}
"""The numpy dtype that carries each element type: itself, or unsigned integers of its size where numpy lacks it."""

Values = np.ndarray | Jagged[np.ndarray] | list[str]


@dataclass(frozen=True, eq=False)
class Rows:
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
        """Tells whether the rows were good until now; call it before results computed from them leave the rank.

        Raises:
            Refused: Rows that were read in place have been released since they were fetched.
        """
        for reading in self._readings:
            reading.verify()


def union(wanted: Iterable[ByteRange]) -> list[ByteRange]:
    """The same bytes of one rank's shards, each of them once: ranges that overlap or touch become one.

    So rows that are repeated travel once, and rows that were shuffled travel in one piece.
    """
    merged: list[ByteRange] = []
    for r in sorted(wanted, key=_position):
        last = merged[-1] if merged else None
        if last is not None and last.shard.id == r.shard.id and r.start <= last.start + last.nbytes:
            stop = max(last.start + last.nbytes, r.start + r.nbytes)
            merged[-1] = ByteRange(last.shard, last.start, stop - last.start)
        else:
            merged.append(r)
    return merged


def _position(r: ByteRange) -> tuple[int, int]:
    return r.shard.id, r.start


@dataclass(frozen=True, eq=False)
class _Found:
    """What was read from one rank: a union of ranges, and its bytes."""

    ranges: Sequence[ByteRange]
    reading: Reading

    def view(self, wanted: ByteRange) -> memoryview:
        """The bytes of a range that went into the union."""
        number = bisect.bisect(self.ranges, _position(wanted), key=_position) - 1
        first = wanted.start - self.ranges[number].start
        return self.reading.views[number][first : first + wanted.nbytes]

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self.ranges)


class Fetcher:
    """Fetches the rows of batches: one read per rank that holds some, different ranks side by side. Thread-safe.

    Args:
        host_id: Where this process runs, as of `transports.host_id`.
        transports: In order of preference; the first that reaches a rank is used. Closed with the fetcher.
        store: This rank's own store, whose shards are read in place.
        max_sources: Most ranks that are read from at the same time.
    """

    def __init__(
        self,
        host_id: str,
        transports: Sequence[Transport],
        store: TensorStore | None = None,
        max_sources: int = 16,
    ) -> None:
        self._host_id = host_id
        self._transports = tuple(transports)
        self._store = store
        self._pool = ThreadPoolExecutor(max_sources, thread_name_prefix="fetch")
        self._traffic: dict[str, Traffic] = {}
        self._lock = threading.Lock()

    def fetch(self, batch: Batch, deadline: float) -> Rows:
        """The batch by value. Columns whose rows lie side by side in a shard on this host are not copied.

        Fetched arrays may be written to, which the rank they came from does not see; columns that name the same
        bytes may be the same memory.

        Args:
            batch: Rows by reference, by value or mixed.
            deadline: Latest end, as of `time.monotonic`.

        Raises:
            TransferError: No transport reaches a rank; the text says why not, for each.
            DeadlineExceeded, ServiceLost, Refused: As in `Transport.read`.
        """
        runs: dict[str, list[ByteRange]] = {}
        wanted: dict[Endpoint, list[ByteRange]] = {}
        for name, column in batch.columns.items():
            if isinstance(column, RemoteColumn):
                runs[name] = [
                    ByteRange(run.shard, run.start, run.nbytes) for run in column.runs() if run.nbytes
                ]
                for r in runs[name]:
                    wanted.setdefault(r.shard.endpoint, []).append(r)
        found = self._read_all(wanted, deadline)
        values: dict[str, Values] = {}
        for name, column in batch.columns.items():
            if isinstance(column, RemoteColumn):
                values[name] = _assemble(column, [found[r.shard.endpoint].view(r) for r in runs[name]])
            else:
                values[name] = column.values
        own = self._store.endpoint if self._store is not None else None
        fetched_bytes = sum(part.nbytes for source, part in found.items() if source != own)
        readings = tuple(part.reading for part in found.values())
        return Rows(batch.rows, values, _dtypes(batch), fetched_bytes, readings)

    def traffic(self) -> dict[str, Traffic]:
        """What each transport has moved since the start."""
        with self._lock:
            return dict(self._traffic)

    def close(self) -> None:
        """Closes the transports; rows fetched stay good."""
        for transport in self._transports:
            transport.close()
        self._pool.shutdown()

    def _read_all(
        self, wanted: Mapping[Endpoint, Sequence[ByteRange]], deadline: float
    ) -> dict[Endpoint, _Found]:
        if len(wanted) <= 1:
            return {source: self._read(source, ranges, deadline) for source, ranges in wanted.items()}
        futures = {
            source: self._pool.submit(self._read, source, ranges, deadline)
            for source, ranges in wanted.items()
        }
        for future in as_completed(futures.values()):
            future.result()  # the first failure ends the fetch; reads still under way end by the deadline
        return {source: future.result() for source, future in futures.items()}

    def _read(self, source: Endpoint, wanted: Sequence[ByteRange], deadline: float) -> _Found:
        ranges = union(wanted)
        if self._store is not None and source == self._store.endpoint:
            return _Found(ranges, read_in_place(self._store.reader, ranges))
        transport = self._transport_to(source)
        start = time.perf_counter()
        found = _Found(ranges, transport.read(source, ranges, deadline))
        self._count(transport.name, found.nbytes, time.perf_counter() - start)
        return found

    def _transport_to(self, source: Endpoint) -> Transport:
        reasons = []
        for transport in self._transports:
            reason = transport.why_not(source, self._host_id)
            if reason is None:
                return transport
            reasons.append(f"{transport.name}: {reason}")
        raise TransferError(f"no transport reaches {source} ({'; '.join(reasons)})")

    def _count(self, transport: str, nbytes: int, seconds: float) -> None:
        with self._lock:
            moved = self._traffic.get(transport, Traffic())
            self._traffic[transport] = Traffic(
                moved.bytes + nbytes, moved.seconds + seconds, moved.transfers + 1
            )


def _dtypes(batch: Batch) -> dict[str, str]:
    dtypes = {}
    for name, column in batch.columns.items():
        if isinstance(column, RemoteColumn):
            dtypes[name] = column.dtype
        elif isinstance(column.values, Jagged):
            dtypes[name] = str(column.values.values.dtype)
        elif isinstance(column.values, np.ndarray):
            dtypes[name] = str(column.values.dtype)
    return dtypes


def _assemble(column: RemoteColumn, views: Sequence[memoryview]) -> np.ndarray | Jagged[np.ndarray]:
    """The column's rows out of their runs: the run itself where there is one, else one copy of all."""
    carrier = CARRIERS[column.dtype]
    parts = [np.frombuffer(view, carrier) for view in views]
    flat = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, carrier), *parts])
    array = flat.reshape(int(column.elements.sum()), *column.row_shape)
    return array if column.lengths is None else Jagged(array, column.lengths)
