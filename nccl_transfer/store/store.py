"""The tensor store of a rank: shards in one arena, each kept by a lease."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from nccl_transfer.refs.batch import Batch, Column
from nccl_transfer.refs.checksums import digests
from nccl_transfer.refs.columns import Jagged, encode_texts
from nccl_transfer.refs.dtypes import TEXT
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.remote_column import RemoteColumn
from nccl_transfer.refs.shards import Endpoint, Shard
from nccl_transfer.store.arena import ALIGNMENT, CORRUPT, Arena, ArenaReader, FreeList, align, mib
from rlhf.errors import InvalidRequest, OutOfSpace, Refused, TransferError

T = TypeVar("T")

REMEMBERED_SESSIONS = 64
"""Most ended sessions that the store remembers; more than can have running calls."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A step of a controller's session. Its shards are released with the step or the session."""

    session: str
    step: int


@dataclass(frozen=True, slots=True)
class StoreStat:
    """Sizes of a store, in bytes. Used bytes include headers and padding of shards."""

    arena_bytes: int
    used_bytes: int
    peak_bytes: int
    shards: int


@dataclass(slots=True)
class _Allocation:
    shard: Shard
    lease: Lease
    writing: bool = True
    released: bool = False
    is_corrupt: bool = False

    @property
    def block(self) -> tuple[int, int]:
        """(offset, bytes) of shard and header."""
        return self.shard.offset - ALIGNMENT, ALIGNMENT + align(self.shard.nbytes)


class TensorStore:
    """Shards in one arena. Thread-safe.

    Args:
        arena_bytes: Size of the arena, rounded up to pages; the config key is `arena_mb`.
        checksums: Whether to compute checksums of shards; the config key is `checksums`.

    Attributes:
        endpoint: Endpoint of this rank, part of every shard; set before the first `put`.

    Raises:
        OutOfSpace: The host has less memory available.
    """

    def __init__(self, arena_bytes: int, checksums: bool = False) -> None:
        self.endpoint: Endpoint | None = None
        self._checksums = checksums
        self._arena = Arena(arena_bytes)
        self._free = FreeList(self._arena.nbytes)
        self._allocations: dict[int, _Allocation] = {}
        self._ended: dict[str, None] = {}
        self._ids = itertools.count(1)
        self._used = self._peak = 0
        self._lock = threading.Lock()

    @property
    def reader(self) -> ArenaReader:
        """Reader of the arena."""
        return self._arena.reader

    def put(self, array: np.ndarray, lease: Lease) -> Shard:
        """Copies an array of numbers, contiguous or not, row-major and little-endian, into a new shard.

        Raises:
            OutOfSpace: No gap is large enough; the store is unchanged.
            Refused: The lease was released during the copy, or its session has ended.
            InvalidRequest: The dtype is not numeric.
        """
        if array.dtype.kind not in "biuf":
            raise InvalidRequest(f"arrays of {array.dtype} cannot be stored; only numbers can")
        little_endian = array.dtype.newbyteorder("<")

        def write(memory: memoryview) -> None:
            np.copyto(np.frombuffer(memory, little_endian).reshape(array.shape), array)

        return self.fill(array.nbytes, lease, write)

    def fill(self, nbytes: int, lease: Lease, write: Callable[[memoryview], None]) -> Shard:
        """Creates a shard of `nbytes` bytes, filled by `write`.

        Raises:
            OutOfSpace: No gap is large enough; the store is unchanged.
            Refused: The lease was released while `write` ran, or its session has ended.
        """
        allocation = self._allocate(nbytes, lease)
        memory, shard = self._memory(allocation.shard), allocation.shard
        try:
            write(memory)
            if self._checksums:
                shard = replace(shard, checksums=tuple(digests(memory)))
        except BaseException:
            with self._lock:
                allocation.writing = False
                self._reclaim(allocation) if allocation.released else self._release(allocation)
            raise
        with self._lock:
            allocation.writing = False
            if allocation.released:
                self._reclaim(allocation)
                raise Refused(f"{lease} was released while a shard of it was written")
        return shard

    def put_column(self, values: np.ndarray | Jagged[np.ndarray], dtype: str, lease: Lease) -> RemoteColumn:
        """Copies a column into a shard and returns the reference; `dtype` names the element type that
        `values` carries (see `nccl_transfer.refs.dtypes.CARRIERS`). Errors as in `put`."""
        if isinstance(values, Jagged):
            shard = self.put(values.values, lease)
            return RemoteColumn.of_shard(dtype, values.values.shape[1:], values.lengths, shard)
        return RemoteColumn.of_shard(dtype, values.shape[1:], len(values), self.put(values, lease))

    def put_batch(self, batch: Batch, lease: Lease) -> Batch:
        """Copies local columns into shards; returns the same rows, all by reference. Errors as in `put`."""
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

    def read_bytes(self, shard_id: int, start: int, nbytes: int) -> bytes:
        """Copies bytes of a shard without locking it, and verifies afterwards that the shard was valid.

        Raises:
            Refused: The shard was released, before or during the copy.
            TransferError: The range reaches beyond the shard, or the shard was marked corrupt.
        """
        return self.copy(shard_id, start, nbytes, bytes)

    def copy(self, shard_id: int, start: int, nbytes: int, copy: Callable[[memoryview], T]) -> T:
        """Returns `copy(bytes of a shard)` and verifies that the shard was valid. Errors as in `read_bytes`."""
        wanted = ByteRange(self._shard(shard_id), start, nbytes)
        copied = copy(self._memory(wanted.shard)[start : start + nbytes])
        self._shard(shard_id)
        return copied

    def view(self, shard_id: int, start: int, nbytes: int) -> memoryview:
        """Bytes of a shard in place, for immediate use by this process; verify afterwards with `check`. Errors as in
        `read_bytes`."""
        wanted = ByteRange(self._shard(shard_id), start, nbytes)
        return self._memory(wanted.shard)[start : start + nbytes]

    def check(self, shard_ids: Iterable[int]) -> None:
        """Raises Refused if a shard was released, TransferError if one was marked corrupt."""
        for shard_id in shard_ids:
            self._shard(shard_id)

    def check_range(self, shard_id: int, start: int, nbytes: int) -> None:
        """Raises as `read_bytes` if the range cannot be read."""
        ByteRange(self._shard(shard_id), start, nbytes)

    def mark_corrupt(self, shard_id: int) -> bool:
        """Makes every later read of a shard an error, in every process; False if the shard was released before."""
        with self._lock:
            allocation = self._allocations.get(shard_id)
            if allocation is None:
                return False
            allocation.is_corrupt = True
            shard = allocation.shard
            self._arena.write_header(shard.offset, shard.id, shard.nbytes, is_corrupt=True)
            return True

    def release(self, session: str, steps: Collection[int] | None = None) -> int:
        """Frees the shards of a session, of all its steps or of `steps`.

        Returns:
            Bytes freed, headers and padding included.
        """
        with self._lock:
            before = self._used
            for allocation in list(self._allocations.values()):
                lease = allocation.lease
                if lease.session == session and (steps is None or lease.step in steps):
                    self._release(allocation)
            return before - self._used

    def end(self, session: str) -> None:
        """Frees the shards of a session and refuses later ones: outputs of its last calls have no reader."""
        with self._lock:
            self._ended[session] = None
            while len(self._ended) > REMEMBERED_SESSIONS:
                del self._ended[next(iter(self._ended))]
        self.release(session)

    def stat(self) -> StoreStat:
        with self._lock:
            return StoreStat(self._arena.nbytes, self._used, self._peak, len(self._allocations))

    def close(self) -> None:
        """Releases every shard. The kernel frees the memory with the last view of it, in any process."""
        with self._lock:
            for allocation in list(self._allocations.values()):
                self._release(allocation)
            self._arena.close()

    def _allocate(self, nbytes: int, lease: Lease) -> _Allocation:
        assert self.endpoint is not None, "the store's endpoint must be set before anything is put into it"
        size = ALIGNMENT + align(nbytes)
        with self._lock:
            if lease.session in self._ended:
                raise Refused(
                    f"rows of step {lease.step} were not stored: the session has ended, or was superseded"
                )
            offset = self._free.allocate(size)
            if offset is None:
                raise OutOfSpace(
                    f"{self.endpoint}: {mib(nbytes)} do not fit into the arena of {mib(self._arena.nbytes)}, of which "
                    f"{mib(self._used)} are in use and {mib(self._free.largest)} are free in one piece: raise arena_mb"
                )
            shard = Shard(self.endpoint, next(self._ids), offset + ALIGNMENT, nbytes)
            self._arena.write_header(shard.offset, shard.id, nbytes)
            allocation = self._allocations[shard.id] = _Allocation(shard, lease)
            self._used += size
            self._peak = max(self._peak, self._used)
        return allocation

    def _release(self, allocation: _Allocation) -> None:
        """Invalidates a shard; its bytes are reclaimed at once, or by its writer if it is being written."""
        del self._allocations[allocation.shard.id]
        self._arena.clear_header(allocation.shard.offset)
        allocation.released = True
        if not allocation.writing:
            self._reclaim(allocation)

    def _reclaim(self, allocation: _Allocation) -> None:
        offset, size = allocation.block
        self._free.free(offset, size)
        self._used -= size

    def _shard(self, shard_id: int) -> Shard:
        with self._lock:
            allocation = self._allocations.get(shard_id)
            if allocation is None:
                raise Refused(f"shard {shard_id} was released")
            if allocation.is_corrupt:
                raise TransferError(CORRUPT.format(shard_id))
            return allocation.shard

    def _memory(self, shard: Shard) -> memoryview:
        return self._arena.memory[shard.offset : shard.offset + shard.nbytes]
