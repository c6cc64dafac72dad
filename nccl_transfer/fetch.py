"""Turns batches by reference into batches by value."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.checksums import first_mismatch
from nccl_transfer.refs.columns import Jagged, decode_texts
from nccl_transfer.refs.dtypes import ITEM_BYTES, TEXT
from nccl_transfer.refs.plans import Ranges, Relay, needed, position
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard, ShardRun
from nccl_transfer.relay import RelayBoard, RelayRequest, RelayTaker
from nccl_transfer.store.arena import CORRUPT
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.transports import Reading, Traffic, Transport
from nccl_transfer.transports.base import read_in_place
from nccl_transfer.transports.grpc_stream import mark_corrupt
from rlhf.errors import TransferError

CARRIERS: Mapping[str, np.dtype] = {
    name: np.dtype({"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}.get(name, name))
    for name in ITEM_BYTES
}
"""The numpy dtype that carries each element type: itself, or unsigned integers of its size where numpy lacks it."""

Values = np.ndarray | Jagged[np.ndarray] | list[str]

NO_RELAYS = RelayRequest("", Lease("", 0))

T = TypeVar("T")


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
        """Tells whether the rows were good until now; call it before results computed from them leave the rank.

        Raises:
            Refused: Rows that were read in place have been released since they were fetched.
        """
        for reading in self._readings:
            reading.verify()


@dataclass(frozen=True, eq=False)
class _Found:
    """Ranges read from one rank's shards, in order and disjoint, and the bytes of each."""

    ranges: Sequence[ByteRange]
    reading: Reading

    def view(self, run: ShardRun) -> memoryview:
        """The bytes of a run, which lies within one of the ranges."""
        number = bisect.bisect(self.ranges, position(run), key=position) - 1
        first = run.start - self.ranges[number].start
        return self.reading.views[number][first : first + run.nbytes]

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
        self._board = RelayBoard(store) if store is not None else None
        self._taker = RelayTaker()
        self._pool = ThreadPoolExecutor(max_sources, thread_name_prefix="fetch")
        self._traffic: dict[str, Traffic] = {}
        self._corrupt: set[tuple[Endpoint, int]] = set()
        self._lock = threading.Lock()

    def fetch(
        self,
        batch: Batch,
        deadline: float,
        relay_request: RelayRequest = NO_RELAYS,
        *,
        writable: bool = False,
    ) -> FetchedRows:
        """The batch by value. Columns whose rows lie side by side in a shard on this host are not copied; columns that
        name the same bytes may be the same memory.

        Args:
            batch: Rows by reference, by value or mixed.
            deadline: Latest end, as of `time.monotonic`.
            relay_request: The call's relays: what to keep for ranks of this host, and what to take from them.
            writable: Whether what the batch has by reference comes as arrays that may be written to, which the rank
                they came from does not see; else they are read-only. Memory of this host is then mapped anew each
                time, and its pages are faulted in anew.

        Raises:
            TransferError: No transport reaches a rank; the text says why not, for each. Or bytes do not match their
                checksums: the text names source, shard and column, and from then on nobody can read the shard.
            DeadlineExceeded, ServiceLost, Refused: As in `Transport.read`.
        """
        try:
            wanted = needed(batch)
            self._check_corrupt(wanted)
            found = self._read_all(wanted, relay_request, deadline, writable)
            self._verify_checksums(found)
        except BaseException as error:
            self._tell_neighbours(relay_request, error)
            raise
        values: dict[str, Values] = {}
        for name, column in batch.columns.items():
            if isinstance(column, RemoteColumn):
                runs = [run for run in column.runs if run.nbytes]
                values[name] = _assemble(column, [found[r.shard.endpoint].view(r) for r in runs], writable)
            else:
                values[name] = column.values
        own = self._store.endpoint if self._store is not None else None
        fetched_bytes = sum(part.nbytes for source, part in found.items() if source != own)
        readings = tuple(part.reading for part in found.values())
        return FetchedRows(batch.rows, values, _dtypes(batch), fetched_bytes, readings)

    @property
    def relays(self) -> RelayBoard:
        """Shards that this rank has read on behalf of its neighbours; requires a store."""
        assert self._board is not None, "a process without a store keeps nothing for others"
        return self._board

    def traffic(self) -> dict[str, Traffic]:
        """Traffic of each transport since the start."""
        with self._lock:
            return dict(self._traffic)

    def close(self) -> None:
        """Closes the transports; rows fetched stay good."""
        for transport in self._transports:
            transport.close()
        self._taker.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read_all(
        self, wanted: Ranges, relay_request: RelayRequest, deadline: float, writable: bool
    ) -> dict[Endpoint, _Found]:
        own = self._store.endpoint if self._store is not None else None
        keeps, takes = relay_request.kept_by(own), relay_request.taken_by(own, self._host_id)
        # Reads first: they wait for no other rank, so ranks that take from each other do not block one another.
        first = [source for source in wanted if source not in takes]
        second = [source for source in wanted if source in takes]
        jobs = [
            *(
                partial(self._read, source, wanted[source], keeps.get(source), relay_request, deadline)
                for source in first
            ),
            *(
                partial(self._take, takes[source], wanted[source], relay_request, deadline)
                for source in second
            ),
        ]
        readings = self._run_all(jobs)
        return {
            source: _Found(wanted[source], reading.writable() if writable else reading)
            for source, reading in zip([*first, *second], readings, strict=True)
        }

    def _run_all(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        if len(jobs) <= 1:
            return [job() for job in jobs]
        futures = [self._pool.submit(job) for job in jobs]
        try:
            for future in as_completed(futures):
                future.result()  # the first failure ends the fetch; reads that have begun end by the deadline
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]

    def _read(
        self,
        source: Endpoint,
        ranges: Sequence[ByteRange],
        keep: Relay | None,
        relay_request: RelayRequest,
        deadline: float,
    ) -> Reading:
        if self._store is not None and source == self._store.endpoint:
            return read_in_place(self._store.reader, ranges)
        transport = self._transport_to(source)
        start = time.perf_counter()
        reading = transport.read(source, ranges, deadline)
        self._count(transport.name, sum(r.nbytes for r in ranges), time.perf_counter() - start)
        if keep is not None:
            self.relays.keep(keep, ranges, reading.views, relay_request)
        return reading

    def _tell_neighbours(self, relay_request: RelayRequest, error: BaseException) -> None:
        """Those that wait for what this rank was to read for them hear why it does not come."""
        own = self._store.endpoint if self._store is not None else None
        for relay in relay_request.kept_by(own).values():
            self.relays.fail(relay, error, relay_request.call_id)

    def _take(
        self, relay: Relay, ranges: Sequence[ByteRange], relay_request: RelayRequest, deadline: float
    ) -> Reading:
        start = time.perf_counter()
        reading = self._taker.take(relay, ranges, relay_request.call_id, deadline)
        self._count("relay", sum(r.nbytes for r in ranges), time.perf_counter() - start)
        return reading

    def _check_corrupt(self, wanted: Ranges) -> None:
        """Raises for shards that were found corrupt before, even if the owner could not be notified."""
        for source, ranges in wanted.items() if self._corrupt else ():
            for r in ranges:
                if (source, r.shard.id) in self._corrupt:
                    raise TransferError(f"{source}: {CORRUPT.format(r.shard.id)} (column {r.column!r})")

    def _verify_checksums(self, found: Mapping[Endpoint, _Found]) -> None:
        for source, part in found.items():
            for r, view in zip(part.ranges, part.reading.views, strict=True):
                wrong = first_mismatch(view, r.start, r.shard.checksums) if r.shard.checksums else None
                if wrong is not None:
                    reason = (
                        f"column {r.column!r}, shard {r.shard.id}: the bytes from {wrong} on do not match their "
                        "checksum; the shard is marked bad"
                    )
                    self._mark_corrupt(r.shard, reason)
                    raise TransferError(f"{source}: {reason}")

    def _mark_corrupt(self, shard: Shard, reason: str) -> None:
        self._corrupt.add((shard.endpoint, shard.id))
        if self._store is not None and shard.endpoint == self._store.endpoint:
            self._store.mark_corrupt(shard.id)
        else:
            mark_corrupt(shard, reason)

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
            if column.dtype != TEXT:
                dtypes[name] = column.dtype
        elif isinstance(column.values, Jagged):
            dtypes[name] = str(column.values.values.dtype)
        elif isinstance(column.values, np.ndarray):
            dtypes[name] = str(column.values.dtype)
    return dtypes


def _assemble(column: RemoteColumn, views: Sequence[memoryview], writable: bool) -> Values:
    """The column's rows out of their runs: the run itself where there is one, else one copy of all."""
    if column.dtype == TEXT:
        try:
            return decode_texts(Jagged(np.frombuffer(b"".join(views), np.uint8), column.elements))
        except UnicodeDecodeError as error:
            raise TransferError(f"a text that was fetched is not UTF-8: {error}") from None
    carrier = CARRIERS[column.dtype]
    parts = [np.frombuffer(view, carrier) for view in views]
    flat = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, carrier), *parts])
    if writable and not flat.flags.writeable:  # a transport that has no other views
        flat = flat.copy()
    flat.flags.writeable = writable
    array = flat.reshape(column.num_elements, *column.row_shape)
    return array if column.lengths is None else Jagged(array, column.lengths)
