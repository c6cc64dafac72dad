"""The contract of a transport."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from nccl_transfer.arena import ArenaReader, ByteRange
from nccl_transfer.batch import Endpoint
from rlhf.errors import DeadlineExceeded


def _copied() -> None:
    """Nothing to verify: the bytes were copied while their shards were there."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a read gave.

    Attributes:
        views: One per range, writable; nobody else sees what is written into them.
        verify: Call it when done with views that are not copies. Raises Refused where a shard was released
            since the read, and its bytes may have been overwritten meanwhile.
    """

    views: Sequence[memoryview]
    verify: Callable[[], None] = _copied


def read_in_place(reader: ArenaReader, ranges: Sequence[ByteRange]) -> Reading:
    """Views of an arena, its headers checked now and again by `verify`.

    Raises:
        Refused: A shard was released.
    """
    check = partial(reader.check, [r.shard for r in ranges])
    check()
    return Reading(reader.views(ranges), check)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one transport moved into this process: bytes, seconds spent, number of reads."""

    bytes: int = 0
    seconds: float = 0.0
    transfers: int = 0


class Transport(ABC):
    """Reads byte ranges of shards of other ranks. Thread-safe; connections are opened once and kept.

    Attributes:
        name: The name in configs and in traffic counts.
    """

    name: ClassVar[str]

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
