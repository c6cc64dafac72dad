"""Memory into which a stream of bytes is received."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.store.arena import mib
from rlhf.errors import OutOfSpace
from rlhf.v1 import transfer_pb2 as pb

MAX_PIECES = 512
"""Maximum number of buffers in one system call; the kernel's limit is 1,024."""

Pieces = list[memoryview]


class Sink:
    """Receives the bytes of one read, range by range in order, and tracks which bytes are missing.

    The memory of a range is allocated when its first bytes arrive. A source checks all ranges of a request before it
    sends a byte, so no memory is allocated for ranges that do not exist, whatever size a message claims.
    """

    def __init__(self, ranges: Sequence[ByteRange]) -> None:
        self._ranges = ranges
        self._memory: list[memoryview] = []
        self._range = 0
        self._filled = 0
        self._skip_full()
        self._confirmed = self._range, self._filled

    @property
    def views(self) -> list[memoryview]:
        """The bytes of each range, complete once `missing` returns no ranges."""
        self._allocate(len(self._ranges))
        return self._memory

    def missing(self) -> list[pb.ByteRange]:
        """Returns the parts of the ranges that have not arrived yet, in order."""
        rest = []
        for number in range(self._range, len(self._ranges)):
            wanted, done = self._ranges[number], self._filled if number == self._range else 0
            if done < wanted.nbytes:
                start, nbytes = wanted.start + done, wanted.nbytes - done
                rest.append(pb.ByteRange(shard=wanted.shard.id, start=start, nbytes=nbytes))
        return rest

    def room(self, nbytes: int) -> Pieces:
        """Returns memory for the next `nbytes` bytes of the stream, in pieces; less memory after MAX_PIECES pieces or
        at the end of the last range, and none after it. `advance` then moves the position in the stream.

        Raises:
            OutOfSpace: This process has no memory for a range.
        """
        pieces: Pieces = []
        number, filled = self._range, self._filled
        while nbytes and number < len(self._ranges) and len(pieces) < MAX_PIECES:
            self._allocate(number + 1)
            piece = self._memory[number][filled : filled + nbytes]
            if len(piece):
                pieces.append(piece)
            nbytes -= len(piece)
            number, filled = number + 1, 0
        return pieces

    def advance(self, nbytes: int) -> None:
        """Counts `nbytes` bytes, which the caller has written into the memory that `room` returned, as received."""
        while nbytes:
            count = min(nbytes, self._ranges[self._range].nbytes - self._filled)
            self._filled += count
            nbytes -= count
            self._skip_full()

    def confirm(self) -> None:
        """Marks all bytes received so far as valid, so that `roll_back` keeps them."""
        self._confirmed = self._range, self._filled

    def roll_back(self) -> None:
        """Discards the bytes received since the last `confirm`."""
        self._range, self._filled = self._confirmed

    def _skip_full(self) -> None:
        """Moves the position from the end of a range to the start of the next range that is not empty."""
        while self._range < len(self._ranges) and self._filled == self._ranges[self._range].nbytes:
            self._range, self._filled = self._range + 1, 0

    def _allocate(self, count: int) -> None:
        """Allocates memory for the first `count` ranges."""
        for r in self._ranges[len(self._memory) : count]:
            try:
                self._memory.append(np.empty(r.nbytes, np.uint8).data)
            except MemoryError:
                raise OutOfSpace(
                    f"{r.shard.endpoint}: no memory here for {mib(r.nbytes)} of shard {r.shard.id}"
                ) from None
