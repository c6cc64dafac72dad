"""References to memory: endpoints of ranks, shards in their arenas, and the places of rows in shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a rank, host:port, with the adverts by which transports read its memory, by name of the transport. The
    comments of the message rlhf.v1.Endpoint describe the fields."""

    address: str
    host_id: str = field(default="", hash=False)
    epoch: int = 0
    service: str = field(default="", hash=False)
    rank: int = field(default=0, hash=False)
    adverts: Mapping[str, bytes] = field(default_factory=dict, hash=False, repr=False)

    def __str__(self) -> str:
        return f"{self.service or 'service'} rank {self.rank} at {self.address}"


class Space(StrEnum):
    """Memory in which rows lie."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Shard:
    """A block of memory that contains rows of one column.

    Attributes:
        endpoint: The rank whose arena contains the shard.
        id: Number of the shard, unique within the rank's store.
        offset: Position in the arena of host memory, in bytes: of the shard's bytes, or, where these lie on a GPU, of
            the end of the header that says where.
        nbytes: Size in bytes.
        checksums: Checksum of each block (see `nccl_transfer.refs.checksums`). Default: empty; the rank computes
            none.
        space: Memory that contains the shard. Default: HOST.
    """

    endpoint: Endpoint
    id: int
    offset: int = field(hash=False)
    nbytes: int = field(hash=False)
    checksums: tuple[int, ...] = field(default=(), hash=False, repr=False)
    space: Space = field(default=Space.HOST, hash=False)


class ShardRun(NamedTuple):
    """Contiguous rows of a shard: `rows` rows in `nbytes` bytes, from byte `start` of the shard on."""

    shard: Shard
    rows: int
    start: int
    nbytes: int


class Scattered(NamedTuple):
    """Place of each row of a column whose rows need not be contiguous.

    Attributes:
        shards: Shards that contain the rows.
        shard: Index into `shards` of each row, [rows] int64.
        element: Index in its shard of each row's first element, [rows] int64. An element is a row of a fixed column,
            or an entry of a jagged one.
    """

    shards: tuple[Shard, ...]
    shard: np.ndarray
    element: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.shard)
