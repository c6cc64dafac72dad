"""Checksums that travel with the reference and not with the bytes, so that they hold for every transport alike.

The store digests what it was given, in blocks; a reader that wants to verify reads whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

BLOCK_BYTES = 64 << 10
"""Bytes per checksum: a reader of part of a shard reads less than one block too much at either end."""


def num_blocks(nbytes: int) -> int:
    """Number of checksums of `nbytes` bytes."""
    return -(-nbytes // BLOCK_BYTES)


def digests(data: memoryview) -> Iterator[int]:
    """xxh3 (64 bits) of every block of bytes in turn, the last one shorter."""
    for start in range(0, len(data), BLOCK_BYTES):
        yield xxhash.xxh3_64_intdigest(data[start : start + BLOCK_BYTES])


def whole_blocks(start: int, nbytes: int, total: int) -> tuple[int, int]:
    """(start, bytes) of the blocks that cover a range of something of `total` bytes."""
    first = start // BLOCK_BYTES * BLOCK_BYTES
    stop = min(num_blocks(start + nbytes) * BLOCK_BYTES, total)
    return first, stop - first


def first_mismatch(data: memoryview, start: int, expected: tuple[int, ...]) -> int | None:
    """Where the first block begins whose bytes are not those that were stored, or None.

    Args:
        data: Whole blocks.
        start: Where they begin in the shard.
        expected: Checksums of all blocks of the shard.
    """
    for number, digest in enumerate(digests(data), start // BLOCK_BYTES):
        if digest != expected[number]:
            return number * BLOCK_BYTES
    return None
