"""Intervals of flattened tensors, as ZeRO partitions them, and the boxes of them that checkpoints hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FlatPiece:
    """Elements `first` to `last` of a flattened tensor, at offset `at` of the rank's partition."""

    first: int
    last: int
    at: int


def cut_together(numels: Mapping[str, int], size: int, rank: int) -> dict[str, FlatPiece]:
    """A rank's pieces of tensors that are concatenated and cut into partitions of `size` elements.

    Args:
        numels: elements of each tensor, in order.
    """
    pieces, begin = {}, rank * size
    offset = 0
    for name, numel in numels.items():
        first, last = max(begin - offset, 0), min(begin + size - offset, numel)
        if first < last:
            pieces[name] = FlatPiece(first, last, offset + first - begin)
        offset += numel
    return pieces


def cut_each(numels: Mapping[str, int], num_ranks: int, rank: int) -> dict[str, FlatPiece]:
    """A rank's pieces of tensors that are each cut into one equal part per rank, the last one padded.

    Args:
        numels: elements of each tensor, in order.
    """
    pieces, at = {}, 0
    for name, numel in numels.items():
        size = -(-numel // num_ranks)
        first, last = rank * size, min((rank + 1) * size, numel)
        if first < last:
            pieces[name] = FlatPiece(first, last, at)
        at += size
    return pieces


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, one per dimension."""


def boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """The fewest boxes, in order, that cover elements `first` to `last` of a flattened tensor of this shape."""
    if first >= last:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), last // row
    if top > bottom:
        yield from _within(shape, bottom, first, last)
        return
    yield from _within(shape, top - 1, first, top * row)
    if top < bottom:
        yield (top, *(0 for _ in shape[1:])), (bottom - top, *shape[1:])
    yield from _within(shape, bottom, bottom * row, last)


def _within(shape: tuple[int, ...], index: int, first: int, last: int) -> Iterator[Box]:
    """Boxes of an interval within one index of the first dimension."""
    begin = index * math.prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], first - begin, last - begin):
        yield (index, *offsets), (1, *sizes)
