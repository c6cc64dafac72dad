"""The contract of a transport."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint
from nccl_transfer.store.arena import ArenaReader, align
from nccl_transfer.store.store import TensorStore
from rlhf.errors import DeadlineExceeded, Refused, ServiceLost
from rlhf.v1 import transfer_pb2 as pb

ATTEMPTS = 3
"""Attempts at a stream that breaks, the first included."""


def _copied() -> None:
    """Verifies nothing: the bytes were copied while their shards were valid."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of a read.

    Attributes:
        views: One per range, read-only: they may be memory of the rank that holds the rows.
        verify: Called after the last use of views. Raises Refused if a shard was released since the read, so that
            its bytes may have been overwritten.
        remap: Returns writable, private views of the same bytes; None if `views` are private.
    """

    views: Sequence[memoryview]
    verify: Callable[[], None] = _copied
    remap: Callable[[], Sequence[memoryview]] | None = None

    def writable(self) -> Reading:
        """The same bytes as writable views, private to the caller."""
        return self if self.remap is None else Reading(self.remap(), self.verify)


def read_in_place(reader: ArenaReader, ranges: Sequence[ByteRange]) -> Reading:
    """Views of an arena; headers are checked now, and again by `verify`.

    Raises:
        Refused: A shard was released.
        TransferError: A shard was marked corrupt.
    """
    check = partial(reader.check, [r.shard for r in ranges])
    check()
    return Reading(reader.views(ranges), check, partial(reader.private_views, ranges))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of one transport into this process: bytes, seconds, number of reads."""

    bytes: int = 0
    seconds: float = 0.0
    transfers: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes + other.bytes, self.seconds + other.seconds, self.transfers + other.transfers
        )

    @property
    def gb_per_s(self) -> float:
        """1e9 bytes per second; 0 without traffic. For mapped memory this is the rate of mapping, not of reading."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


class Transport(ABC):
    """Reads byte ranges of shards of other ranks. Thread-safe; connections are kept between reads.

    Attributes:
        name: The name in configs and in traffic counts.
    """

    name: ClassVar[str]

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this process cannot use the transport for any source; None if it can."""
        return None

    @abstractmethod
    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        """Why a process on host `host_id` cannot read from `source` by this transport; None if it can."""

    @abstractmethod
    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        """Reads bytes of shards of one rank; views are in the order of `ranges`.

        Args:
            source: The rank that holds the shards.
            ranges: The bytes to read.
            deadline: Latest end, as of `time.monotonic`.

        Raises:
            DeadlineExceeded: The rank did not answer in time.
            ServiceLost: The rank has ended, or cannot be reached.
            Refused: The rank is of another epoch, or a shard was released.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes all connections. Views stay valid."""


def remaining_s(deadline: float, source: Endpoint) -> float:
    """Seconds until the deadline, more than 0.

    Raises:
        DeadlineExceeded: The deadline has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(f"{source}: nothing received by the deadline")
    return left


def with_retries(stream: Callable[[], None]) -> None:
    """Calls `stream`, which resumes where the previous call broke, up to ATTEMPTS times.

    Raises:
        ServiceLost: Every attempt broke.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return stream()
        except ServiceLost:
            if attempt == ATTEMPTS:
                raise


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Aligned offsets of items of these sizes in one buffer, and the size of the buffer. Both sides of a transfer use
    it."""
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += align(size)
    return offsets, total


def check_request(store: TensorStore, request: pb.FetchRequest) -> None:
    """Checks a whole request before the first byte is sent: a reader takes the first byte as a sign that all exist.

    Raises:
        Refused: The request is of another epoch, or a shard was released.
        TransferError: A range reaches beyond its shard.
    """
    check_epoch(store, request.epoch)
    for wanted in request.ranges:
        store.check_range(wanted.shard, wanted.start, wanted.nbytes)


def check_epoch(store: TensorStore, epoch: int) -> None:
    """Raises Refused if a request is for another epoch of the service; epoch 0 stands for any."""
    assert store.endpoint is not None
    if epoch not in (0, store.endpoint.epoch):
        raise Refused(f"the epoch is {store.endpoint.epoch}, the rows are of epoch {epoch}")
