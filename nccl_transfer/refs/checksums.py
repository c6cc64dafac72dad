"""Checksums of shards. They are sent with the references and not with the bytes, so they cover every transport.

The store computes one checksum per block; a reader verifies whole blocks, so it reads whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

BLOCK_BYTES = 64 << 10
"""Bytes per block. A reader of part of a shard reads less than one extra block at either end."""


def num_blocks(nbytes: int) -> int:
    """Returns the number of blocks, and so of checksums, of a shard of `nbytes` bytes."""
    return -(-nbytes // BLOCK_BYTES)


def digests(data: memoryview) -> Iterator[int]:
    """Yields the checksum of each block of `data`, its 64-bit xxh3; the last block may be shorter."""
    for start in range(0, len(data), BLOCK_BYTES):
        yield xxhash.xxh3_64_intdigest(data[start : start + BLOCK_BYTES])


class RunningDigests:
    """Checksums of the blocks of `data`, each computed as soon as the block has been written: while it is still in the
    processor's cache.

    Attributes:
        values: Checksums of the blocks so far, in order.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._written = 0
        self.values: list[int] = []

    def advance(self, stop: int) -> None:
        """Notes that the bytes before `stop` have been written; computes the checksums of the blocks among them."""
        if stop < len(self._data):
            stop = stop // BLOCK_BYTES * BLOCK_BYTES
        self.values += digests(self._data[self._written : stop])
        self._written = stop


def whole_blocks(start: int, nbytes: int, total: int) -> tuple[int, int]:
    """Returns (start, nbytes) of the blocks that cover bytes `start` to `start + nbytes` of a shard of `total`
    bytes."""
    first = start // BLOCK_BYTES * BLOCK_BYTES
    stop = min(num_blocks(start + nbytes) * BLOCK_BYTES, total)
    return first, stop - first


def first_mismatch(data: memoryview, start: int, expected: tuple[int, ...]) -> int | None:
    """Returns the byte position in the shard of the first block that does not match its checksum; None if all match.

    Args:
        data: Whole blocks of a shard.
        start: Position of `data` in the shard, in bytes; a multiple of BLOCK_BYTES.
        expected: Checksums of all blocks of the shard.
    """
    for number, digest in enumerate(digests(data), start // BLOCK_BYTES):
        if digest != expected[number]:
            return number * BLOCK_BYTES
    return None
