"""The memory of one rank's store on its GPU: one allocation, made at start and divided into blocks.

Work on a GPU runs later than the host enqueues it, so a block is given out again only in the order of streams. A use of
a block pins it, and unpins it on the streams of the use. Work on a new owner's stream then waits, on the GPU, for the
positions that these streams had.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from nccl_transfer.devices.cuda import Cuda, Event
from nccl_transfer.store.arena import mib
from nccl_transfer.store.free_list import FreeList
from rlhf.errors import OutOfSpace

BLOCK_BYTES = 256
"""Blocks begin at multiples of it, and are multiples of it, in bytes."""

READY_EVENTS = 64
"""Number of events of readiness, each of which is complete once the bytes of a shard are there. They are used in turn:
a reader of an older shard of the same event waits for the newer shard, so it may wait longer, but never too short."""


@dataclass(eq=False, slots=True)
class Block:
    """A block of the arena.

    Attributes:
        offset, nbytes: Its place in the arena, in bytes.
        pins: Number of pins.
        is_free: Whether its owner has freed it; it is given out again once there are no pins.
    """

    offset: int
    nbytes: int
    pins: int = 1
    is_free: bool = False


@dataclass(frozen=True, slots=True)
class _Use:
    """Bytes of the arena, and an event that is complete once their last use is."""

    start: int
    stop: int
    event: Event


class DeviceArena:
    """One allocation on a GPU. Thread-safe; never blocks on the GPU.

    Args:
        cuda: The GPU.
        nbytes: Size in bytes, rounded up to a multiple of BLOCK_BYTES (config key `arena_device_mb`).

    Attributes:
        cuda: The GPU.
        nbytes: Size in bytes.
        pointer: Address of the first byte.
        ready: Events of readiness, by number.

    Raises:
        OutOfSpace: The GPU has too little free memory.
    """

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        self.cuda = cuda
        self.nbytes = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        try:
            self.pointer = cuda.malloc(self.nbytes)
        except OutOfSpace as error:
            raise OutOfSpace(
                f"an arena of {mib(self.nbytes)} on the GPU: {error}; lower arena_device_mb"
            ) from error
        self.ready = tuple(cuda.event() for _ in range(READY_EVENTS))
        self._free = FreeList(self.nbytes)
        self._uses: list[_Use] = []
        self._idle: list[Event] = []
        self._dropped: deque[tuple[Block, Collection[int | None]]] = deque()
        self._next_ready = self._used = 0
        self._lock = threading.Lock()

    def allocate(self, nbytes: int, stream: int | None = None) -> Block:
        """Gives out a block of at least `nbytes` bytes, pinned once.

        Args:
            nbytes: Size in bytes.
            stream: Stream whose later work may write the block: it waits, on the GPU, for earlier uses of the block.
                Default: the private stream of `cuda`.

        Raises:
            OutOfSpace: No gap is large enough.
        """
        size = max(-(-nbytes // BLOCK_BYTES), 1) * BLOCK_BYTES
        with self._lock:
            self._settle()
            offset = self._free.allocate(size)
            if offset is None:
                raise OutOfSpace(
                    f"{mib(nbytes)} do not fit into the arena of {mib(self.nbytes)} on the GPU, of which "
                    f"{mib(self._used)} are in use: raise arena_device_mb"
                )
            self._used += size
            for use in self._uses:
                if use.start < offset + size and offset < use.stop:
                    use.event.wait(stream)
            return Block(offset, size)

    def record_ready(self, stream: int) -> int:
        """Records the work enqueued so far on a stream with the next event of readiness; returns its number."""
        with self._lock:
            number = self._next_ready
            self._next_ready = (number + 1) % READY_EVENTS
            self.ready[number].record(stream)
            return number

    def pin(self, block: Block) -> None:
        """Keeps a block that is not freed as it is until `unpin` or `drop`."""
        with self._lock:
            assert not block.is_free, "a freed block cannot be pinned"
            block.pins += 1

    def unpin(self, block: Block, streams: Collection[int | None] = ()) -> None:
        """Ends a pin.

        Args:
            block: The block.
            streams: Streams on which work with the block is enqueued that may not be complete. Default: none.
        """
        with self._lock:
            self._unpin(block, streams)

    def drop(self, block: Block, streams: Collection[int | None]) -> None:
        """Ends a pin as `unpin` does, with the next `allocate` or `settle`. Takes no lock and calls no CUDA, so it
        may be called while objects are garbage-collected."""
        self._dropped.append((block, streams))

    def free(self, block: Block) -> None:
        """Gives a block back. It is given out again once it has no pins. Calls no CUDA. Idempotent."""
        with self._lock:
            if not block.is_free:
                block.is_free = True
                self._reclaim(block)

    def settle(self) -> None:
        """Ends the pins that were dropped."""
        with self._lock:
            self._settle()

    @property
    def used_bytes(self) -> int:
        """Bytes in use, freed blocks with pins included. Calls no CUDA."""
        with self._lock:
            return self._used

    def close(self) -> None:
        """Frees the memory. No other process may have it open, and no tensor of it may be in use."""
        self.cuda.synchronize()
        with self._lock:
            events = [*self.ready, *self._idle, *(use.event for use in self._uses)]
            self._uses, self._idle = [], []
        for event in dict.fromkeys(events):
            event.close()
        self.cuda.free(self.pointer)

    def _unpin(self, block: Block, streams: Collection[int | None]) -> None:
        for stream in streams:
            event = self._idle.pop() if self._idle else self.cuda.event()
            event.record(stream)
            self._uses.append(_Use(block.offset, block.offset + block.nbytes, event))
        block.pins -= 1
        self._reclaim(block)

    def _reclaim(self, block: Block) -> None:
        if block.is_free and not block.pins:
            self._free.free(block.offset, block.nbytes)
            self._used -= block.nbytes

    def _settle(self) -> None:
        """Ends the pins that were dropped, and forgets uses that are complete. The caller holds the lock."""
        while self._dropped:
            self._unpin(*self._dropped.popleft())
        open_uses = []
        for use in self._uses:
            if use.event.done():
                self._idle.append(use.event)
            else:
                open_uses.append(use)
        self._uses = open_uses
