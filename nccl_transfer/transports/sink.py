"""Memory that a stream is received into."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.store.arena import mib
from rlhf.errors import OutOfSpace
from rlhf.v1 import transfer_pb2 as pb

MAX_PIECES = 512
"""Most buffers in one system call; the kernel's limit is 1,024."""

Pieces = list[memoryview]


class Sink:
    """Receives the ranges of one read in order, and tracks the bytes that are missing.

    Memory is allocated per range as bytes arrive. A source checks all ranges of a request before it sends a byte, so a
    range that does not exist allocates nothing, whatever size a message claims.
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
        """The bytes of each range; valid once nothing is missing."""
        self._allocate(len(self._ranges))
        return self._memory

    def missing(self) -> list[pb.ByteRange]:
        """Ranges that have not arrived, in order, cut to their missing bytes."""
        rest = []
        for number in range(self._range, len(self._ranges)):
            wanted, done = self._ranges[number], self._filled if number == self._range else 0
            if done < wanted.nbytes:
                start, nbytes = wanted.start + done, wanted.nbytes - done
                rest.append(pb.ByteRange(shard=wanted.shard.id, start=start, nbytes=nbytes))
        return rest

    def room(self, nbytes: int) -> Pieces:
        """Memory for the next bytes of the stream: `nbytes` bytes, or fewer at MAX_PIECES pieces or the end of the last
        range.

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
        """Counts `nbytes` bytes that were written into `room`."""
        while nbytes:
            count = min(nbytes, self._ranges[self._range].nbytes - self._filled)
            self._filled += count
            nbytes -= count
            self._skip_full()

    def confirm(self) -> None:
        """Marks all received bytes as valid."""
        self._confirmed = self._range, self._filled

    def roll_back(self) -> None:
        """Discards the bytes received since the last `confirm`."""
        self._range, self._filled = self._confirmed

    def _skip_full(self) -> None:
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
