"""The contract of a transport."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""How often a broken stream is taken up, the first time included."""


def _copied() -> None:
    """Nothing to verify: the bytes were copied while their shards were there."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Result of a read.

    Attributes:
        views: One per range, to be read: they may lie in memory of the rank that holds the rows.
        verify: Call it when done with views that are not copies. Raises Refused where a shard was released
            since the read, and its bytes may have been overwritten meanwhile.
        remap: Views of the same bytes that may be written to; None where `views` may be.
    """

    views: Sequence[memoryview]
    verify: Callable[[], None] = _copied
    remap: Callable[[], Sequence[memoryview]] | None = None

    def writable(self) -> Reading:
        """The same with views that may be written to, which nobody else sees."""
        return self if self.remap is None else Reading(self.remap(), self.verify)


def read_in_place(reader: ArenaReader, ranges: Sequence[ByteRange]) -> Reading:
    """Views of an arena, its headers checked now and again by `verify`.

    Raises:
        Refused: A shard was released.
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

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.bytes - other.bytes, self.seconds - other.seconds, self.transfers - other.transfers
        )

    @property
    def gb_per_s(self) -> float:
        """Bytes over seconds, in 1e9 bytes per second; 0 where nothing was moved. Of memory that is mapped and not
        copied, this tells how fast it is handed over, not how fast it is read."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


def traffic_since(now: Mapping[str, Traffic], before: Mapping[str, Traffic]) -> dict[str, Traffic]:
    """Difference of two traffic counts, by transport; transports that moved nothing are left out."""
    moved = {name: count - before.get(name, Traffic()) for name, count in now.items()}
    return {name: count for name, count in moved.items() if count.transfers}


class Transport(ABC):
    """Reads byte ranges of shards of other ranks. Thread-safe; connections are opened once and kept.

    Attributes:
        name: The name in configs and in traffic counts.
    """

    name: ClassVar[str]

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this process cannot use the transport at all, whatever the source; None where it can."""
        return None

    @abstractmethod
    def why_not(self, source: Endpoint, host_id: str) -> str | None:
        """Why a process on host `host_id` cannot read from `source` this way; None where it can."""

    @abstractmethod
    def read(self, source: Endpoint, ranges: Sequence[ByteRange], deadline: float) -> Reading:
        """Bytes of shards of one rank; the views are in the order of `ranges`.

        Args:
            source: The rank that holds the shards.
            ranges: What to read.
            deadline: Latest end, as of `time.monotonic`.

        Raises:
            DeadlineExceeded: The rank did not answer in time.
            ServiceLost: The rank is gone.
            Refused: The rank is of another epoch, or a shard was released.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes all connections. Views stay good."""


def remaining_s(deadline: float, source: Endpoint) -> float:
    """Seconds left, more than 0.

    Raises:
        DeadlineExceeded: There are none.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded(f"{source}: nothing received by the deadline")
    return left


def persist(stream: Callable[[], None]) -> None:
    """Runs a stream that goes on where it was, and again where it broke: ATTEMPTS times in all.

    Raises:
        ServiceLost: It broke each time.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return stream()
        except ServiceLost:
            if attempt == ATTEMPTS:
                raise


def layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where things of these sizes begin in a buffer that holds them all, and the size of the buffer. The same on
    both sides of a transfer."""
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += align(size)
    return offsets, total


def check_request(store: TensorStore, request: pb.FetchRequest) -> None:
    """Looks at a whole request before the first byte is sent: a reader takes the first for a sign that all are there.

    Raises:
        Refused: The request is of another epoch, or a shard was released.
        TransferError: A range reaches beyond its shard.
    """
    check_epoch(store, request.epoch)
    for wanted in request.ranges:
        store.check_range(wanted.shard, wanted.start, wanted.nbytes)


def check_epoch(store: TensorStore, epoch: int) -> None:
    """Raises Refused where a request is for another epoch of the service than the store's; 0 is any."""
    assert store.endpoint is not None
    if epoch not in (0, store.endpoint.epoch):
        raise Refused(f"the epoch is {store.endpoint.epoch}, the rows are of epoch {epoch}")
