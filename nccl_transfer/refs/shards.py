"""Endpoints of ranks, shards in their arenas, and the places of rows in shards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a rank, and the ways to reach its memory; fields as in rlhf.v1.Endpoint."""

    address: str
    host_id: str = field(default="", hash=False)
    memfd_socket: str = field(default="", hash=False)
    epoch: int = 0
    service: str = field(default="", hash=False)
    rank: int = field(default=0, hash=False)
    device_uuid: str = field(default="", hash=False)
    data_port: int = field(default=0, hash=False)
    data_key: str = field(default="", hash=False, repr=False)
    nccl_version: int = field(default=0, hash=False)

    def __str__(self) -> str:
        return f"{self.service or 'service'} rank {self.rank} at {self.address}"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows of one column in the arena of one rank: `nbytes` bytes from byte `offset` on. `checksums` is empty unless
    the rank computes them (see `nccl_transfer.refs.checksums`)."""

    endpoint: Endpoint
    id: int
    offset: int = field(hash=False)
    nbytes: int = field(hash=False)
    checksums: tuple[int, ...] = field(default=(), hash=False, repr=False)


class ShardRun(NamedTuple):
    """`rows` contiguous rows in `shard`: `nbytes` bytes from byte `start` of the shard on."""

    shard: Shard
    rows: int
    start: int
    nbytes: int


class Scattered(NamedTuple):
    """Rows at arbitrary places.

    Attributes:
        shards: The shards that hold the rows.
        shard: Index into `shards` per row [rows] int64.
        element: Index within the shard of the row's first element [rows] int64; an element is a row where
            fixed, an entry where jagged.
    """

    shards: tuple[Shard, ...]
    shard: np.ndarray
    element: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.shard)
