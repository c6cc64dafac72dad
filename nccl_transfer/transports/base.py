"""The interface of a transport, and functions that several transports share."""

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
"""Maximum number of attempts at a stream that breaks, the first included."""


def _copied() -> None:
    """The `verify` of copied bytes: does nothing, since they were copied while their shards were valid."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of a read.

    Attributes:
        views: The bytes of each range, which must not be modified: they may be memory of the rank that holds the
            rows.
        verify: To be called after the last use of the views. Raises Refused if a shard was released since the read,
            so that its bytes may have been overwritten, and TransferError if one was marked corrupt. Default: does
            nothing, for copied bytes.
        remap: Returns writable, private views of the same bytes. Default None: `views` are private already.
    """

    views: Sequence[memoryview]
    verify: Callable[[], None] = _copied
    remap: Callable[[], Sequence[memoryview]] | None = None

    def writable(self) -> Reading:
        """Returns a reading of the same bytes whose views are private to the caller and may be modified."""
        return self if self.remap is None else Reading(self.remap(), self.verify)


def read_in_place(reader: ArenaReader, ranges: Sequence[ByteRange]) -> Reading:
    """Returns a reading of views of an arena, without a copy. The headers of the shards are checked now, and again by
    `Reading.verify`.

    Raises:
        Refused: A shard was released.
        TransferError: A shard was marked corrupt.
    """
    check = partial(reader.check, [r.shard for r in ranges])
    check()
    return Reading(reader.views(ranges), check, partial(reader.private_views, ranges))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of one transport into this process.

    Attributes:
        bytes: Number of bytes read.
        seconds: Time of all reads, summed also where reads overlap.
        transfers: Number of reads.
    """

    bytes: int = 0
    seconds: float = 0.0
    transfers: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes + other.bytes, self.seconds + other.seconds, self.transfers + other.transfers
        )

    @property
    def gb_per_s(self) -> float:
        """Average rate of a read, in 1e9 bytes per second; 0 without traffic. Of mapped memory, the rate of mapping
        it."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


class Transport(ABC):
    """Reads byte ranges of shards of other ranks. Thread-safe; connections are kept between reads.

    Attributes:
        name: Name of the transport in configs and in traffic counts.
    """

    name: ClassVar[str]

    @classmethod
    def unavailable(cls) -> str | None:
        """Returns the reason why this process cannot use the transport at all, or None if it can. Default: None."""
        return None

    @abstractmethod
    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        """Returns the reason why this process, on host `host_id`, cannot read from `source` by this transport, or
        None if it can."""

    @abstractmethod
    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        """Reads bytes of shards of one rank; blocks until they are read.

        Args:
            source: Endpoint of the rank that holds the shards.
            ranges: The bytes to read; the views of the result are in the same order.
            deadline: Time at which the read fails, on the clock of `time.monotonic`, in seconds.

        Raises:
            DeadlineExceeded: The bytes did not arrive by the deadline.
            ServiceLost: The rank has ended, or cannot be reached.
            Refused: The service has another epoch than `source`, or a shard was released.
            TransferError: A shard was marked corrupt, or the bytes are not those that were asked for.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes all connections. Views that were returned stay valid."""


def remaining_s(deadline: float, source: Endpoint) -> float:
    """Returns the seconds until `deadline` (`time.monotonic`), more than 0.

    Raises:
        DeadlineExceeded: The deadline has passed; the message names `source`.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(f"{source}: nothing received by the deadline")
    return left


def with_retries(stream: Callable[[], None]) -> None:
    """Calls `stream` until it succeeds, at most ATTEMPTS times; each call resumes where the previous one broke.

    Raises:
        ServiceLost: Every attempt raised ServiceLost. Other errors are raised at once.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return stream()
        except ServiceLost:
            if attempt == ATTEMPTS:
                raise


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Returns the aligned offset of each item in one buffer, and the size of the buffer, in bytes. Both sides of a
    transfer lay out their buffers by it."""
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += align(size)
    return offsets, total


def check_request(store: TensorStore, request: pb.FetchRequest) -> None:
    """Checks all ranges of a request before the first byte is sent. A reader allocates memory for all ranges when the
    first bytes arrive, so every range must exist by then.

    Raises:
        Refused: The request is for another epoch of the service, or a shard was released.
        TransferError: A range reaches beyond its shard, or a shard was marked corrupt.
    """
    check_epoch(store, request.epoch)
    for wanted in request.ranges:
        store.check_range(wanted.shard, wanted.start, wanted.nbytes)


def check_epoch(store: TensorStore, epoch: int) -> None:
    """Checks that a request is for the current epoch of the service; epoch 0 stands for any.

    Raises:
        Refused: The request is for another epoch.
    """
    assert store.endpoint is not None
    if epoch not in (0, store.endpoint.epoch):
        raise Refused(f"the epoch is {store.endpoint.epoch}, the rows are of epoch {epoch}")
