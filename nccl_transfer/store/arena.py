"""The memory of one rank's store: a sealed memfd that other processes of the host can map.

Every allocation is preceded by a header that is zeroed when the allocation is freed. A reader checks the header before
it returns bytes and again after their use, so a reference to freed bytes is an error, never garbage.
"""

from __future__ import annotations

import bisect
import fcntl
import functools
import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Shard
from rlhf.errors import OutOfSpace, Refused, TransferError

ALIGNMENT = 64
"""Bytes; data and headers begin at multiples of ALIGNMENT."""

COPIED_BYTES = 2 << 20
"""Writable reads of up to so many bytes are copied, which is faster than mapping and faulting them in."""

NONCE_BYTES = 16
_HEADER = struct.Struct(f"<{NONCE_BYTES}sQQQ")  # nonce, number, bytes, 1 where corrupt
CORRUPT = "shard {} is marked bad: bytes of it did not match their checksum"
"""Message of every read of a shard after one read found it corrupt."""

_F_SEAL_FUTURE_WRITE = 0x0010  # not in the fcntl module before Python 3.12


def align(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def mib(nbytes: int) -> str:
    """Formats a size for messages."""
    return f"{nbytes / (1 << 20):,.1f} MiB"


class FreeList:
    """First-fit allocator of a span of bytes. Prefers low offsets, so that warm pages are reused. Not thread-safe.

    Args:
        nbytes: Size of the span.
    """

    def __init__(self, nbytes: int) -> None:
        self._offsets = [0]
        self._sizes = [nbytes]

    def allocate(self, nbytes: int) -> int | None:
        """Allocates `nbytes` (at least 1) bytes; returns their offset, or None if no gap is large enough."""
        for index, size in enumerate(self._sizes):
            if size >= nbytes:
                offset = self._offsets[index]
                if size == nbytes:
                    del self._offsets[index], self._sizes[index]
                else:
                    self._offsets[index] += nbytes
                    self._sizes[index] -= nbytes
                return offset
        return None

    def free(self, offset: int, nbytes: int) -> None:
        """Frees the result of `allocate(nbytes)`, and merges it with adjacent gaps."""
        index = bisect.bisect(self._offsets, offset)
        if index < len(self._offsets) and offset + nbytes == self._offsets[index]:
            nbytes += self._sizes[index]
            del self._offsets[index], self._sizes[index]
        if index > 0 and self._offsets[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += nbytes
        else:
            self._offsets.insert(index, offset)
            self._sizes.insert(index, nbytes)

    @property
    def largest(self) -> int:
        """Bytes of the largest gap."""
        return max(self._sizes, default=0)


class ArenaReader:
    """Reads an arena through its descriptor, in the owning process or another one.

    Args:
        fd: Descriptor of the memfd; the reader owns it, and closes it in `close` or with its last reference.
        nbytes: Size of the arena.
        nonce: Random name of the arena, repeated in each of its headers.
    """

    def __init__(self, fd: int, nbytes: int, nonce: bytes) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.nonce = nonce
        self._close_fd = weakref.finalize(self, os.close, fd)

    @staticmethod
    def of_peer(fd: int, nbytes: int, nonce: bytes) -> ArenaReader:
        """A reader of another process's arena; arguments as in the constructor.

        Raises:
            TransferError: The descriptor is not a sealed memfd of at least `nbytes` bytes: its owner could truncate it,
                and a read beyond its end would kill this process (SIGBUS).
        """
        if reason := _why_unsafe(fd, nbytes):
            os.close(fd)
            raise TransferError(f"an arena was handed out that cannot be read safely: {reason}")
        return ArenaReader(fd, nbytes, nonce)

    def close(self) -> None:
        """Closes descriptor and mapping. Returned views stay valid, but can no longer be verified."""
        self._close_fd()
        self.__dict__.pop("_memory", None)

    @functools.cached_property
    def _memory(self) -> memoryview:
        """The whole arena, mapped once, so that pages are faulted in once."""
        if not self._close_fd.alive:
            raise Refused("the arena was closed")
        return memoryview(mmap.mmap(self.fd, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ))

    def check(self, shards: Iterable[Shard]) -> None:
        """Checks the current headers of shards.

        Raises:
            Refused: A shard was released.
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

    def views(self, ranges: Sequence[ByteRange]) -> list[memoryview]:
        """The bytes of each range, read-only and without a copy."""
        memory = self._memory
        return [memory[(begin := r.shard.offset + r.start) : begin + r.nbytes] for r in ranges]

    def private_views(self, ranges: Sequence[ByteRange]) -> list[memoryview]:
        """The bytes of each range, writable and private: writes reach neither the owner nor any other view.

        More than COPIED_BYTES bytes are mapped copy-on-write instead of copied. Every call maps and faults in anew; the
        mapping lives as long as the last of its views.
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
    """Why mapping the descriptor of an arena is unsafe; None if it is safe."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return "it is no memfd"
    if not seals & fcntl.F_SEAL_SHRINK:
        return "it is not sealed against shrinking"
    size = os.fstat(fd).st_size
    return f"it has {size} bytes, and was said to have {nbytes}" if not 0 < nbytes <= size else None


class Arena:
    """An arena in its owning process: the only writable mapping, and the headers.

    The constructor reserves the whole size, so that running out of memory is an error there and not a SIGBUS later.
    Pages are faulted in at their first write: faulting in advance costs as much (0.3 to 0.7 GB/s where measured), also
    for pages that are never used.

    Raises:
        OutOfSpace: The host has less memory than `nbytes` available.
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
        """Writes the header of shard `shard_id`: `nbytes` bytes from `offset` on."""
        _HEADER.pack_into(self.memory, offset - ALIGNMENT, self.reader.nonce, shard_id, nbytes, is_corrupt)

    def close(self) -> None:
        """Closes mapping and descriptor; returned views stay valid."""
        self.memory.release()
        self.reader.close()

    def clear_header(self, offset: int) -> None:
        """Makes every reference to the shard at `offset` stale."""
        self.memory[offset - ALIGNMENT : offset] = bytes(ALIGNMENT)


def _reserve(nbytes: int) -> int:
    available = _available_bytes()
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


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OutOfSpace("/proc/meminfo does not say how much memory is available")
