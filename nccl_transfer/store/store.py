"""The tensor store of a rank: shards in one arena, each of which lives as long as its lease."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from nccl_transfer.devices.tensors import DeviceTensors
from nccl_transfer.refs.checksums import digests
from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint, Shard, Space
from nccl_transfer.store.arena import ALIGNMENT, CORRUPT, Arena, ArenaReader, DevicePlace, align, mib
from nccl_transfer.store.columns import ColumnStore, Write
from nccl_transfer.store.device_arena import DeviceArena
from nccl_transfer.store.device_shards import DeviceShards
from nccl_transfer.store.free_list import FreeList
from nccl_transfer.store.leases import Lease
from nccl_transfer.store.stat import StoreStat
from rlhf.errors import OutOfSpace, Refused, TransferError

T = TypeVar("T")

REMEMBERED_SESSIONS = 64
"""Maximum number of ended sessions that the store remembers; it exceeds the number that can still have running
calls."""


@dataclass(slots=True)
class _Allocation:
    shard: Shard
    lease: Lease
    writing: bool = True
    released: bool = False
    is_corrupt: bool = False
    free_device: Callable[[int], None] | None = None

    @property
    def block(self) -> tuple[int, int]:
        """(offset, nbytes) in the arena of the header, and of the shard and its padding unless it is on a GPU."""
        nbytes = self.shard.nbytes if self.shard.space is Space.HOST else 0
        return self.shard.offset - ALIGNMENT, ALIGNMENT + align(nbytes)


class TensorStore(ColumnStore):
    """The shards of one rank, in one arena of host memory and perhaps one on its GPU. Thread-safe.

    Args:
        arena_bytes: Size of the arena in bytes, rounded up to whole pages (config key `arena_mb`).
        checksums: Whether to compute checksums of shards (config key `checksums`). Default: False.
        device: Arena on the rank's GPU and what makes tensors of its bytes. Default: none; all shards are in host
            memory.

    Attributes:
        endpoint: Endpoint of this rank, which every shard contains; None until the service sets it, which must
            precede the first shard.
        device: The shards on the GPU; None where there is no arena.

    Raises:
        OutOfSpace: The host has less than `arena_bytes` bytes of memory available.
    """

    def __init__(
        self,
        arena_bytes: int,
        checksums: bool = False,
        device: tuple[DeviceArena, DeviceTensors] | None = None,
    ) -> None:
        self.endpoint: Endpoint | None = None
        self.device = DeviceShards(*device, self) if device is not None else None
        self.checksums = checksums
        self._arena = Arena(arena_bytes)
        self._free = FreeList(self._arena.nbytes)
        self._allocations: dict[int, _Allocation] = {}
        self._ended: dict[str, None] = {}
        self._ids = itertools.count(1)
        self._used = self._peak = 0
        self._lock = threading.Lock()

    @property
    def reader(self) -> ArenaReader:
        """Reader of the arena in this process."""
        return self._arena.reader

    def fill(self, nbytes: int, lease: Lease, write: Write) -> Shard:
        """Creates a shard of `nbytes` bytes and returns it after `write`, which is called with its writable memory. If
        `write` raises, the shard is freed and the error passed on. The shard has the checksums that `write` returns;
        where it returns None, those that the store computes, if it does.

        Raises:
            OutOfSpace: No gap of the arena is large enough; the store is unchanged.
            Refused: The lease was released while `write` ran, or its session has ended.
        """
        allocation = self._allocate(nbytes, lease)
        memory, shard = self._memory(allocation.shard), allocation.shard
        try:
            checksums = write(memory)
            if checksums is None and self.checksums:
                checksums = digests(memory)
            shard = replace(shard, checksums=tuple(checksums or ()))
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

    def read_bytes(self, shard_id: int, start: int, nbytes: int) -> bytes:
        """Returns a copy of `nbytes` bytes of a shard from byte `start` on. Copies without a lock and checks
        afterwards that the shard was not released meanwhile.

        Raises:
            Refused: The shard was released, before or during the copy.
            TransferError: The range reaches beyond the shard, or the shard was marked corrupt.
        """
        return self.copy(shard_id, start, nbytes, bytes)

    def copy(self, shard_id: int, start: int, nbytes: int, copy: Callable[[memoryview], T]) -> T:
        """Returns `copy(view)`, where `view` is of `nbytes` bytes of a shard from byte `start` on, and checks
        afterwards that the shard was not released meanwhile. Raises as `read_bytes` does."""
        wanted = ByteRange(self._shard(shard_id), start, nbytes)
        copied = copy(self._memory(wanted.shard)[start : start + nbytes])
        self._shard(shard_id)
        return copied

    def view(self, shard_id: int, start: int, nbytes: int) -> memoryview:
        """Returns a view of bytes of a shard, for immediate use by this process. The caller has to call `check` after
        the use, since the shard may be released at any time. Raises as `read_bytes` does."""
        wanted = ByteRange(self._shard(shard_id), start, nbytes)
        return self._memory(wanted.shard)[start : start + nbytes]

    def check(self, shard_ids: Iterable[int]) -> None:
        """Checks that shards exist.

        Raises:
            Refused: A shard was released.
            TransferError: A shard was marked corrupt.
        """
        for shard_id in shard_ids:
            self._shard(shard_id)

    def check_range(self, shard_id: int, start: int, nbytes: int) -> None:
        """Checks that a range of a shard can be read, without a copy. Raises as `read_bytes` does."""
        ByteRange(self._shard(shard_id), start, nbytes)

    def mark_corrupt(self, shard_id: int) -> bool:
        """Marks a shard corrupt, so that every later read of it raises TransferError, in every process. Returns True,
        or False if the shard was released before."""
        with self._lock:
            allocation = self._allocations.get(shard_id)
            if allocation is None:
                return False
            allocation.is_corrupt = True
            shard = allocation.shard
            self._arena.write_header(shard.offset, shard.id, shard.nbytes, is_corrupt=True)
            return True

    def release(self, session: str, steps: Collection[int] | None = None) -> int:
        """Releases the shards of a session: those of `steps`, by default those of all its steps. Returns the number of
        bytes freed, headers and padding included; shards that are being written are freed later."""
        with self._lock:
            before = self._used
            for allocation in list(self._allocations.values()):
                lease = allocation.lease
                if lease.session == session and (steps is None or lease.step in steps):
                    self._release(allocation)
            return before - self._used

    def drop(self, shard: Shard) -> None:
        """Releases one shard before its lease ends. Has no effect on a shard that was released."""
        with self._lock:
            allocation = self._allocations.get(shard.id)
            if allocation is not None:
                self._release(allocation)

    def begin(self, session: str) -> None:
        """Allows shards of a session, also if one of this name has ended before (`end`)."""
        with self._lock:
            self._ended.pop(session, None)

    def end(self, session: str) -> None:
        """Releases all shards of a session. Later calls that create shards for it raise Refused, since outputs of its
        last calls have no reader, until `begin`, or until REMEMBERED_SESSIONS more sessions have ended."""
        with self._lock:
            self._ended[session] = None
            while len(self._ended) > REMEMBERED_SESSIONS:
                del self._ended[next(iter(self._ended))]
        self.release(session)

    def add_device_shard(self, nbytes: int, lease: Lease, free: Callable[[int], None]) -> Shard:
        """Creates the header of a shard of `nbytes` bytes on the GPU. `free` is called with its number when the shard
        is released. Raises as `fill` does."""
        allocation = self._allocate(nbytes, lease, Space.DEVICE)
        with self._lock:
            allocation.writing = False
            if allocation.released:
                self._reclaim(allocation)
                raise Refused(f"{lease} was released while a shard of it was made")
            allocation.free_device = free
        return allocation.shard

    def set_place(self, shard: Shard, place: DevicePlace) -> None:
        """Writes the place on the GPU into the header of a shard, unless the shard was released."""
        with self._lock:
            if shard.id in self._allocations:
                self._arena.write_place(shard.offset, place)

    def stat(self) -> StoreStat:
        with self._lock:
            stat = StoreStat(self._arena.nbytes, self._used, self._peak, len(self._allocations))
        if self.device is None:
            return stat
        return replace(
            stat,
            device_arena_bytes=self.device.arena.nbytes,
            device_used_bytes=self.device.arena.used_bytes,
            spilled_bytes=self.device.spilled_bytes,
            host_copied_bytes=self.device.host_copied_bytes,
        )

    def close(self) -> None:
        """Closes the arena, and releases the shards on the GPU. Processes that have mapped the arena read its other
        shards as before; the kernel frees its memory with the last mapping."""
        with self._lock:
            for allocation in list(self._allocations.values()):
                # A cleared header would tell a reader that its rows were released too early.
                if allocation.shard.space is Space.DEVICE:
                    self._release(allocation)
            self._arena.close()
        if self.device is not None:
            self.device.arena.close()

    def _allocate(self, nbytes: int, lease: Lease, space: Space = Space.HOST) -> _Allocation:
        assert self.endpoint is not None, "the store's endpoint must be set before anything is put into it"
        size = ALIGNMENT + (align(nbytes) if space is Space.HOST else 0)
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
            shard = Shard(self.endpoint, next(self._ids), offset + ALIGNMENT, nbytes, space=space)
            self._arena.write_header(shard.offset, shard.id, nbytes)
            allocation = self._allocations[shard.id] = _Allocation(shard, lease)
            self._used += size
            self._peak = max(self._peak, self._used)
        return allocation

    def _release(self, allocation: _Allocation) -> None:
        """Invalidates a shard and frees its bytes; if it is being written, its writer frees them when it has
        finished."""
        del self._allocations[allocation.shard.id]
        self._arena.clear_header(allocation.shard.offset)
        allocation.released = True
        if allocation.free_device is not None:
            allocation.free_device(allocation.shard.id)
        if not allocation.writing:
            self._reclaim(allocation)

    def _reclaim(self, allocation: _Allocation) -> None:
        offset, size = allocation.block
        self._free.free(offset, size)
        self._used -= size

    def _shard(self, shard_id: int) -> Shard:
        """Returns a shard by its id. Raises Refused if it was released, TransferError if it was marked corrupt."""
        with self._lock:
            allocation = self._allocations.get(shard_id)
            if allocation is None:
                raise Refused(f"shard {shard_id} was released")
            if allocation.is_corrupt:
                raise TransferError(CORRUPT.format(shard_id))
            return allocation.shard

    def _memory(self, shard: Shard) -> memoryview:
        """Returns the bytes of a shard. Raises Refused if they are on a GPU."""
        if shard.space is not Space.HOST:
            raise Refused(f"shard {shard.id} is on a GPU; TransferService.Spill copies it to the host")
        return self._arena.memory[shard.offset : shard.offset + shard.nbytes]
