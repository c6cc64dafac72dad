"""Figures of a store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreStat:
    """Memory use of a store.

    Attributes:
        arena_bytes: Size of the arena.
        used_bytes: Bytes of all shards, their headers and padding included.
        peak_bytes: Maximum of `used_bytes` since the store was created.
        shards: Number of shards, those on the GPU included.
        device_arena_bytes: Size of the arena on the GPU; 0: there is none.
        device_used_bytes: Bytes in use there.
        spilled_bytes: Bytes that were put into host memory, since that arena was full.
        host_copied_bytes: Bytes that were copied from there to host memory, for readers without a route to the GPU.
    """

    arena_bytes: int
    used_bytes: int
    peak_bytes: int
    shards: int
    device_arena_bytes: int = 0
    device_used_bytes: int = 0
    spilled_bytes: int = 0
    host_copied_bytes: int = 0
