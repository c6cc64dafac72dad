"""Byte ranges of shards, and their cut into chunks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nccl_transfer.refs import checksums
from nccl_transfer.refs.dtypes import ELEMENT_BYTES
from nccl_transfer.refs.shards import Shard
from rlhf.errors import TransferError


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`nbytes` bytes of a shard, from byte `start` of the shard on. `column`, `dtype` and `row_shape` are for messages
    and manifests; empty where unknown.

    Raises:
        TransferError: The range reaches beyond the shard.
    """

    shard: Shard
    start: int
    nbytes: int
    column: str = field(default="", compare=False)
    dtype: str = field(default="", compare=False)
    row_shape: tuple[int, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.start < 0 or self.nbytes < 0 or self.start + self.nbytes > self.shard.nbytes:
            raise TransferError(
                f"{self.shard.endpoint}: bytes {self.start} to {self.start + self.nbytes} reach beyond "
                f"shard {self.shard.id} of {self.shard.nbytes} bytes"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """(elements, *row_shape) if the range holds whole elements of known type, else empty."""
        size = ELEMENT_BYTES.get(self.dtype, 0) * math.prod(self.row_shape)
        if not size or self.start % size or self.nbytes % size:
            return ()
        return (self.nbytes // size, *self.row_shape)

    def whole_blocks(self) -> ByteRange:
        """Widens the range to whole blocks if the shard has checksums."""
        if not self.shard.checksums or not self.nbytes:
            return self
        start, nbytes = checksums.whole_blocks(self.start, self.nbytes, self.shard.nbytes)
        return replace(self, start=start, nbytes=nbytes)


class ChunkPiece(NamedTuple):
    """`nbytes` bytes of item number `item`, from its byte `start` on."""

    item: int
    start: int
    nbytes: int


def cut_chunks(
    sizes: Iterable[int], chunk_bytes: int, max_pieces: int | None = None
) -> Iterator[list[ChunkPiece]]:
    """Cuts the concatenation of items into chunks of `chunk_bytes` bytes; the last chunk may be shorter.

    Args:
        sizes: Bytes of each item; empty items yield no piece.
        chunk_bytes: Bytes of a chunk, at least 1.
        max_pieces: Most pieces of a chunk; a chunk of so many pieces may be shorter.
    """
    pieces: list[ChunkPiece] = []
    room = chunk_bytes
    for item, nbytes in enumerate(sizes):
        start = 0
        while start < nbytes:
            count = min(nbytes - start, room)
            pieces.append(ChunkPiece(item, start, count))
            start, room = start + count, room - count
            if room == 0 or len(pieces) == max_pieces:
                yield pieces
                pieces, room = [], chunk_bytes
    if pieces:
        yield pieces
