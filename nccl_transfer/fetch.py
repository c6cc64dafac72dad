"""Fetches the rows of batches by reference, which turns them into batches by value."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from nccl_transfer.choice import ReaderChoice
from nccl_transfer.device_fetch import DeviceReader, PlacedRanges, staying
from nccl_transfer.refs.batch import Batch
from nccl_transfer.refs.plans import Ranges, Relay, needed
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.registry import memory_reader
from nccl_transfer.relay import RelayBoard, RelayRequest, RelayTaker
from nccl_transfer.rows import FetchedRows, ReadRanges, assemble
from nccl_transfer.spill import Spiller
from nccl_transfer.store.store import Lease, TensorStore
from nccl_transfer.threads import Threads
from nccl_transfer.transports import Reader, Reading, Traffic
from nccl_transfer.transports.common import read_in_place
from nccl_transfer.verification import ChecksumVerifier

NO_RELAYS = RelayRequest("", Lease("", 0))

MAX_SOURCES = 16
"""Maximum number of ranks that a fetch reads from in parallel."""


@dataclass(frozen=True, eq=False)
class _Fetch:
    """A fetch that is under way: its deadline and relays, and its traffic so far, by transport name."""

    deadline: float
    relay_request: RelayRequest = NO_RELAYS
    traffic: dict[str, Traffic] = field(default_factory=dict)


class Fetcher:
    """Fetches the rows of batches: one read per rank that holds rows, different ranks in parallel. Thread-safe.

    Args:
        host_id: Id of this process's host, from `transports.host_id()`.
        readers: Readers of transports in order of preference; each rank is read by the first that reaches it and could
            be set up with it (`ReaderChoice`). `close` closes them.
        store: This rank's own store, whose shards are read in place. Default: none; the process is a client only.

    Attributes:
        verifier: Verifies checksums. `fetch` has it verify all bytes; after `read` that is up to the caller.
    """

    def __init__(self, host_id: str, readers: Sequence[Reader], store: TensorStore | None = None) -> None:
        self._host_id = host_id
        self._choice = ReaderChoice(host_id, readers)
        self._store = store
        self._board = RelayBoard(store) if store is not None else None
        self._taker = RelayTaker(memory_reader())
        self._threads = Threads("fetch")
        self._traffic: dict[str, Traffic] = {}
        self.verifier = ChecksumVerifier(store)
        self._spiller = Spiller(store)
        device = store.device if store is not None else None
        self._device = DeviceReader(device, self._choice) if device is not None else None
        self._lock = threading.Lock()

    def fetch(
        self,
        batch: Batch,
        deadline: float,
        relay_request: RelayRequest = NO_RELAYS,
        *,
        writable: bool = False,
        on_device: Collection[str] = (),
    ) -> FetchedRows:
        """Reads the rows of a batch; blocks until all are read. A column whose rows are contiguous in one shard on this
        host is not copied; columns that refer to the same bytes may share memory. Where the fetch fails, ranks that
        wait for bytes that this rank was to relay get its error.

        Rows on GPUs come to host memory by way of the host memory of the ranks that hold them, except those of columns
        in `on_device`: these come to this rank's GPU, if it has an arena there.

        Args:
            batch: Rows by reference, by value or mixed.
            deadline: Time at which the fetch fails, on the clock of `time.monotonic`, in seconds.
            relay_request: The call's relays: the bytes that this rank keeps for other ranks of its host, and those
                that it takes from them. Default: no relays.
            writable: Whether columns by reference become writable arrays, private to the caller; else they are
                read-only. Writable memory of this host is mapped anew, with new page faults, by every fetch.
            on_device: Names of columns that may stay on the GPU; they become `DeviceArray` if any of their bytes is
                on one.

        Raises:
            TransferError: No transport reaches a rank (the message gives the reason of each transport), or bytes do
                not match their checksums (the message names source, shard and column; every later read of the shard
                fails).
            DeadlineExceeded, ServiceLost, Refused: The deadline passed, a rank that holds rows cannot be reached, or a
                shard was released.
        """
        stays = staying(batch, on_device) if self._device is not None else Batch(batch.rows, {})
        others = Batch(batch.rows, {n: c for n, c in batch.columns.items() if n not in stays.columns})
        try:
            wanted = needed(others)
            self.verifier.check(wanted)
            fetch = _Fetch(deadline, relay_request)
            read, placed = self._read_all(wanted, needed(stays), fetch, writable=writable)
            self.verifier.verify(read)
        except BaseException as error:
            self._fail_relays(relay_request, error)
            raise
        rows = replace(assemble(others, read, self._own, writable), traffic=fetch.traffic)
        return rows if self._device is None else self._device.add(rows, stays, placed, self._own)

    def read(self, wanted: ByteRange, deadline: float) -> Reading:
        """Reads a range of a shard of another rank into host memory, without verifying checksums; its
        memory may be that of the other rank. Blocks until it is read.

        Args:
            wanted: The range; its `column` names it in errors.
            deadline: Time at which the read fails, on the clock of `time.monotonic`, in seconds.

        Raises:
            RlhfError: As for `fetch`, but for checksums.
        """
        return self._read(wanted.shard.endpoint, [wanted], _Fetch(deadline))

    def shares_memory(self, source: Endpoint) -> bool:
        """Returns whether this process maps the memory of a rank to read from it."""
        return self._choice.shares_memory(source)

    def check_adverts(self, adverts: Mapping[str, bytes]) -> None:
        """Checks the adverts of an endpoint that a client has passed on; those that no reader here uses are ignored.

        Raises:
            ValueError: An advert is invalid for its transport; the message names the transport and the reason.
        """
        self._choice.check_adverts(adverts)

    def failures(self) -> dict[str, str]:
        """As `ReaderChoice.failures`."""
        return self._choice.failures()

    @property
    def relays(self) -> RelayBoard:
        """Board of the shards that this rank has read for other ranks of its host. Requires a store."""
        assert self._board is not None, "a process without a store keeps no relayed shards"
        return self._board

    def forget(self, source: Endpoint) -> None:
        """Closes connections and mappings to a rank whose rows no call can refer to any longer. Returns at once; a
        running fetch from it over tcp or grpc ends with Refused, and a later fetch connects again."""
        self._choice.forget(source)
        self._taker.forget(source)
        self._spiller.forget(source)

    def traffic(self) -> dict[str, Traffic]:
        """Returns the traffic of all fetches so far, by transport name; "relay" counts bytes that other ranks of this
        host read and this rank mapped. Reads of this rank's own shards are not counted. Includes that of `note`."""
        with self._lock:
            return dict(self._traffic)

    def note(self, transport: str, moved: Traffic) -> None:
        """Adds reads to the traffic that were made without this fetcher."""
        with self._lock:
            self._traffic[transport] = self._traffic.get(transport, Traffic()) + moved

    def close(self) -> None:
        """Closes the readers. Rows that were fetched stay valid."""
        self._choice.close()
        self._taker.close()
        self._spiller.close()
        self._threads.close()

    @property
    def _own(self) -> Endpoint | None:
        return self._store.endpoint if self._store is not None else None

    def _read_all(
        self, wanted: Ranges, stays: Ranges, fetch: _Fetch, *, writable: bool
    ) -> tuple[dict[Endpoint, ReadRanges], dict[Endpoint, PlacedRanges]]:
        """Reads ranges into host memory, and those of `stays` into the memory of this rank's GPU."""
        keeps = fetch.relay_request.kept_by(self._own)
        takes = fetch.relay_request.taken_by(self._own, self._host_id)
        # Reads are queued before relays: a read waits for no other rank, so ranks that relay to each other do not
        # block one another.
        first = [source for source in wanted if source not in takes]
        second = [source for source in wanted if source in takes]
        jobs: list[Callable[[], Any]] = [
            partial(self._read, source, wanted[source], fetch, keeps.get(source)) for source in first
        ]
        jobs += [partial(self._take, takes[source], wanted[source], fetch) for source in second]
        jobs += [partial(self._place, source, stays[source], fetch) for source in stays]
        done = self._threads.run_all(jobs, MAX_SOURCES)
        readings, placed = done[: len(wanted)], done[len(wanted) :]
        read = {
            source: ReadRanges(wanted[source], reading.writable() if writable else reading)
            for source, reading in zip([*first, *second], readings, strict=True)
        }
        return read, dict(zip(stays, placed, strict=True))

    def _place(self, source: Endpoint, ranges: Sequence[ByteRange], fetch: _Fetch) -> PlacedRanges:
        """Reads ranges that may stay on the GPU."""
        assert self._device is not None, "columns stay only where there is an arena on the GPU"
        count, read_on_host = partial(self._count, fetch), partial(self._read_verified, fetch)
        return self._device.read(source, ranges, source == self._own, fetch.deadline, count, read_on_host)

    def _read_verified(self, fetch: _Fetch, source: Endpoint, ranges: Sequence[ByteRange]) -> Reading:
        """Reads ranges of one rank into host memory, and verifies their checksums."""
        self.verifier.check({source: ranges})
        reading = self._read(source, ranges, fetch)
        self.verifier.verify({source: ReadRanges(ranges, reading)})
        return reading

    def _read(
        self, source: Endpoint, ranges: Sequence[ByteRange], fetch: _Fetch, keep: Relay | None = None
    ) -> Reading:
        ranges = self._spiller.on_host(source, ranges, fetch.deadline)
        if self._store is not None and source == self._store.endpoint:
            return read_in_place(self._store.reader, ranges)
        start = time.perf_counter()
        name, reading = self._choice.read(source, ranges, fetch.deadline)
        self._count(fetch, name, ranges, start)
        if keep is not None:
            self.relays.keep(keep, ranges, reading.views, fetch.relay_request)
        return reading

    def _take(self, relay: Relay, ranges: Sequence[ByteRange], fetch: _Fetch) -> Reading:
        ranges = self._spiller.on_host(relay.source, ranges, fetch.deadline)
        start = time.perf_counter()
        reading = self._taker.take(relay, ranges, fetch.relay_request.call_id, fetch.deadline)
        self._count(fetch, "relay", ranges, start)
        return reading

    def _fail_relays(self, relay_request: RelayRequest, error: BaseException) -> None:
        """Passes the error to the other ranks that wait for bytes that this rank was to read."""
        for relay in relay_request.kept_by(self._own).values():
            self.relays.fail(relay, error, relay_request.call_id)

    def _count(self, fetch: _Fetch, transport: str, ranges: Sequence[ByteRange], start: float) -> None:
        """Adds a read that began at `start` (`time.perf_counter`) to the traffic of its fetch and of all fetches."""
        moved = Traffic(sum(r.nbytes for r in ranges), time.perf_counter() - start, 1)
        with self._lock:
            fetch.traffic[transport] = fetch.traffic.get(transport, Traffic()) + moved
        self.note(transport, moved)
