"""Checksums of shards. They travel with references, apart from the bytes, so they hold for every transport.

The store computes them per block; a reader that verifies reads whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

BLOCK_BYTES = 64 << 10
"""Bytes per checksum. A reader of part of a shard reads less than one extra block at either end."""


def num_blocks(nbytes: int) -> int:
    """Number of checksums of `nbytes` bytes."""
    return -(-nbytes // BLOCK_BYTES)


def digests(data: memoryview) -> Iterator[int]:
    """Yields the 64-bit xxh3 of each block; the last block may be shorter."""
    for start in range(0, len(data), BLOCK_BYTES):
        yield xxhash.xxh3_64_intdigest(data[start : start + BLOCK_BYTES])


def whole_blocks(start: int, nbytes: int, total: int) -> tuple[int, int]:
    """(start, bytes) of the blocks that cover a range of a shard of `total` bytes."""
    first = start // BLOCK_BYTES * BLOCK_BYTES
    stop = min(num_blocks(start + nbytes) * BLOCK_BYTES, total)
    return first, stop - first


def first_mismatch(data: memoryview, start: int, expected: tuple[int, ...]) -> int | None:
    """First byte of the first block that does not match its checksum, or None.

    Args:
        data: Whole blocks.
        start: Their first byte in the shard.
        expected: Checksums of all blocks of the shard.
    """
    for number, digest in enumerate(digests(data), start // BLOCK_BYTES):
        if digest != expected[number]:
            return number * BLOCK_BYTES
    return None
