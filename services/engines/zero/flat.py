"""Intervals of flattened tensors, into which ZeRO partitions weights, and the boxes (hyperrectangles) of the
unflattened tensors that cover them, which checkpoints contain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FlatPiece:
    """Interval of a flattened tensor that is on a rank: elements `first` up to and excluding `last`, at offset `at`
    of the rank's partition."""

    first: int
    last: int
    at: int


def cut_together(numels: Mapping[str, int], size: int, rank: int) -> dict[str, FlatPiece]:
    """Returns a rank's pieces of tensors that are concatenated and then cut into partitions of equal size.

    Args:
        numels: number of elements of each tensor, by name, in order.
        size: elements of a partition.
        rank: number of the partition.

    Returns:
        Pieces by name; a tensor of which the rank has nothing is absent.
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
    """Returns a rank's pieces of tensors that are each cut into one part of equal size per rank, the last one padded.

    Args:
        numels: number of elements of each tensor, by name, in order.
        num_ranks: number of parts.
        rank: number of the part.

    Returns:
        Pieces by name; a tensor of which the rank has only padding is absent.
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
"""(offsets, sizes) of a hyperrectangle in a tensor, one number per dimension each."""


def boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """Yields boxes of a tensor of the given shape that together contain exactly the elements `first` up to and
    excluding `last` of the flattened tensor; as few as possible, in row-major order."""
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
    """Yields the boxes of the interval `first` to `last`, as `boxes`, where all of its elements have the given index
    in the first dimension."""
    begin = index * math.prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], first - begin, last - begin):
        yield (index, *offsets), (1, *sizes)
