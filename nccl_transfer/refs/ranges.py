"""Byte ranges of shards, and a function that cuts them into chunks."""

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
    """A range of a shard: `nbytes` bytes from byte `start` of the shard on.

    `column`, `dtype` and `row_shape` describe the column that the bytes belong to, for error messages and manifests;
    they are empty where unknown.

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
        """(elements, *row_shape) if the range consists of whole elements of known type, else an empty tuple."""
        size = ELEMENT_BYTES.get(self.dtype, 0) * math.prod(self.row_shape)
        if not size or self.start % size or self.nbytes % size:
            return ()
        return (self.nbytes // size, *self.row_shape)

    def whole_blocks(self) -> ByteRange:
        """Returns the range widened to whole checksum blocks; unchanged if the shard has no checksums or the range is
        empty."""
        if not self.shard.checksums or not self.nbytes:
            return self
        start, nbytes = checksums.whole_blocks(self.start, self.nbytes, self.shard.nbytes)
        return replace(self, start=start, nbytes=nbytes)


class ChunkPiece(NamedTuple):
    """Part of a chunk: `nbytes` bytes of item number `item`, from byte `start` of the item on."""

    item: int
    start: int
    nbytes: int


def cut_chunks(
    sizes: Iterable[int], chunk_bytes: int, max_pieces: int | None = None
) -> Iterator[list[ChunkPiece]]:
    """Cuts the concatenation of items into chunks, and yields each chunk as a list of pieces of items.

    Args:
        sizes: Size of each item in bytes; empty items yield no piece.
        chunk_bytes: Size of a chunk in bytes, at least 1; the last chunk may be shorter.
        max_pieces: Maximum number of pieces of a chunk, which may then be shorter. Default: no limit.
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
