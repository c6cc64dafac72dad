"""The memory of one rank's store: a sealed memfd that other processes of the host can map.

Every allocation is preceded by a header that is zeroed when the allocation is freed. Readers take no lock: they check
the header before they read bytes and again after they have used them, so a read of freed bytes raises an error.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import psutil

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Shard
from rlhf.errors import OutOfSpace, Refused, TransferError

ALIGNMENT = 64
"""Alignment in bytes: headers and the data of shards begin at multiples of it."""

COPIED_BYTES = 2 << 20
"""Writable reads of at most this many bytes are copied, which is faster than mapping and faulting them in."""

NONCE_BYTES = 16
_HEADER = struct.Struct(f"<{NONCE_BYTES}sQQQ")  # nonce, number, bytes, 1 where corrupt
_PLACE = struct.Struct("<QQ")
"""Follows `_HEADER` in the header of a shard on a GPU: its offset there, and the number of its event + 1."""
CORRUPT = "shard {} is marked bad: bytes of it did not match their checksum"
"""Error message of reads of a corrupt shard, a format string with the id of the shard."""

_F_SEAL_FUTURE_WRITE = 0x0010  # not in the fcntl module before Python 3.12


def align(nbytes: int) -> int:
    """Rounds a size up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def mib(nbytes: int) -> str:
    """Formats a size in bytes as MiB, for messages."""
    return f"{nbytes / (1 << 20):,.1f} MiB"


class DevicePlace(NamedTuple):
    """Place of a shard in the arena of a GPU.

    Attributes:
        offset: Position in that arena, in bytes.
        event: Number of the event that is complete once the bytes are there; None while they are not yet enqueued.
    """

    offset: int
    event: int | None


class ArenaReader:
    """Reads an arena through its descriptor, in the owning process or another one.

    Args:
        fd: Descriptor of the memfd. The reader owns it: `close` closes it, or else the reader's garbage collection.
        nbytes: Size of the arena in bytes.
        nonce: Random id of the arena, NONCE_BYTES long, which each of its headers contains.
    """

    def __init__(self, fd: int, nbytes: int, nonce: bytes) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.nonce = nonce
        self._close_fd = weakref.finalize(self, os.close, fd)

    @staticmethod
    def of_peer(fd: int, nbytes: int, nonce: bytes) -> ArenaReader:
        """Creates a reader of another process's arena, after a check that it is safe to map. Arguments as in the
        constructor; the descriptor is closed if the check fails.

        Raises:
            TransferError: The descriptor is not a memfd of at least `nbytes` bytes that is sealed against shrinking.
                Its owner could truncate it, and a read beyond its end would kill this process (SIGBUS).
        """
        if reason := _why_unsafe(fd, nbytes):
            os.close(fd)
            raise TransferError(f"an arena was handed out that cannot be read safely: {reason}")
        return ArenaReader(fd, nbytes, nonce)

    def close(self) -> None:
        """Closes the descriptor and the mapping. Views that were returned stay valid; later calls of `check` and
        `views` raise Refused."""
        self._close_fd()
        self.__dict__.pop("_memory", None)

    @functools.cached_property
    def _memory(self) -> memoryview:
        """Read-only mapping of the whole arena; mapped once, so that each page is faulted in once."""
        if not self._close_fd.alive:
            raise Refused("the arena was closed")
        return memoryview(mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ))

    def check(self, shards: Iterable[Shard]) -> None:
        """Checks the current headers of shards, once per shard.

        Raises:
            Refused: A shard was released, or the reader was closed.
            TransferError: A shard was marked corrupt.
        """
        memory = self._memory
        for shard in dict.fromkeys(shards):
            position = shard.offset - ALIGNMENT
            found = memory[position : position + _HEADER.size] if position >= 0 else b""
            if found == _HEADER.pack(self.nonce, shard.id, shard.nbytes, False):
                continue
            if found == _HEADER.pack(self.nonce, shard.id, shard.nbytes, True):
                raise TransferError(f"{shard.endpoint}: {CORRUPT.format(shard.id)}")
            raise Refused(f"{shard.endpoint}: shard {shard.id} was released")

    def device_place(self, shard: Shard) -> DevicePlace:
        """Returns the place of a shard on its owner's GPU. The caller checks the header before and after its use."""
        begin = shard.offset - ALIGNMENT + _HEADER.size
        offset, event = _PLACE.unpack(self._memory[begin : begin + _PLACE.size])
        return DevicePlace(offset, event - 1 if event else None)

    def views(self, ranges: Sequence[ByteRange]) -> list[memoryview]:
        """Returns the bytes of each range as read-only views of the arena. Does not check the headers."""
        memory = self._memory
        return [memory[(begin := r.shard.offset + r.start) : begin + r.nbytes] for r in ranges]

    def private_views(self, ranges: Sequence[ByteRange]) -> list[memoryview]:
        """Returns the bytes of each range as writable, private views: writes change neither the arena nor other
        views. Does not check the headers.

        Up to COPIED_BYTES bytes in total are copied; more are mapped copy-on-write. Every call creates a new mapping,
        which lives as long as the last of its views.
        """
        if sum(r.nbytes for r in ranges) <= COPIED_BYTES:
            return [memoryview(bytearray(view)) for view in self.views(ranges)]
        begins = [r.shard.offset + r.start for r in ranges]
        first = (min(begins) - ALIGNMENT) // mmap.PAGESIZE * mmap.PAGESIZE
        last = max(begin + r.nbytes for begin, r in zip(begins, ranges, strict=True))
        access = mmap.PROT_READ | mmap.PROT_WRITE
        memory = memoryview(mmap.mmap(self.fd, last - first, mmap.MAP_PRIVATE, access, offset=first))
        return [memory[b - first : b - first + r.nbytes] for b, r in zip(begins, ranges, strict=True)]


def _why_unsafe(fd: int, nbytes: int) -> str | None:
    """Returns the reason why mapping `nbytes` bytes of a descriptor is unsafe, or None if it is safe."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return "it is no memfd"
    if not seals & fcntl.F_SEAL_SHRINK:
        return "it is not sealed against shrinking"
    size = os.fstat(fd).st_size
    return f"it has {size} bytes, and was said to have {nbytes}" if not 0 < nbytes <= size else None


class Arena:
    """An arena in its owning process, which has the only writable mapping and writes the headers.

    The constructor reserves the memory, so that a lack of memory raises an error there instead of a SIGBUS later.
    Pages are faulted in at their first write: faulting in advance costs as much (measured: 0.3 to 0.7 GB/s), also for
    pages that are never used.

    Args:
        nbytes: Size in bytes, rounded up to whole pages.

    Attributes:
        reader: Reader of the arena in this process.
        memory: Writable view of the whole arena.

    Raises:
        OutOfSpace: The host has less than `nbytes` bytes of memory available.
    """

    def __init__(self, nbytes: int) -> None:
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = _reserve(nbytes)
        self.reader = ArenaReader(fd, nbytes, secrets.token_bytes(NONCE_BYTES))
        self.memory = memoryview(mmap.mmap(fd, nbytes, mmap.MAP_SHARED))
        self.reader._memory = self.memory.toreadonly()  # reuses the mapping
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)

    @property
    def nbytes(self) -> int:
        return self.reader.nbytes

    def write_header(self, offset: int, shard_id: int, nbytes: int, is_corrupt: bool = False) -> None:
        """Writes the header of shard `shard_id`, whose `nbytes` bytes of data begin at `offset`."""
        _HEADER.pack_into(self.memory, offset - ALIGNMENT, self.reader.nonce, shard_id, nbytes, is_corrupt)

    def write_place(self, offset: int, place: DevicePlace) -> None:
        """Adds the place on the GPU to the header of the shard whose header ends at `offset`."""
        event = 0 if place.event is None else place.event + 1
        _PLACE.pack_into(self.memory, offset - ALIGNMENT + _HEADER.size, place.offset, event)

    def close(self) -> None:
        """Closes the mapping and the descriptor. Views that readers returned stay valid."""
        self.memory.release()
        self.reader.close()

    def clear_header(self, offset: int) -> None:
        """Zeroes the header of the shard whose data begins at `offset`, so that every later check of the shard
        fails."""
        self.memory[offset - ALIGNMENT : offset] = bytes(ALIGNMENT)


def _reserve(nbytes: int) -> int:
    """Creates a memfd of `nbytes` bytes of reserved memory and returns its descriptor. Raises OutOfSpace."""
    available = psutil.virtual_memory().available
    if nbytes > available:
        raise OutOfSpace(
            f"an arena of {mib(nbytes)} does not fit into {mib(available)} of memory: lower arena_mb"
        )
    fd = os.memfd_create("rlhf-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        raise OutOfSpace(
            f"no memory for an arena of {mib(nbytes)} ({error.strerror}): lower arena_mb"
        ) from error
    return fd
