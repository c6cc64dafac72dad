"""The interface of transports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from nccl_transfer.refs.ranges import ByteRange
from nccl_transfer.refs.shards import Endpoint


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


class Reader(ABC):
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
