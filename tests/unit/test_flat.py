"""Intervals of flattened tensors: every element has one owner, and boxes hold an interval's elements in order."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engines.zero.flat import FlatPiece, boxes, cut_each, cut_together

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)
NUMELS = st.lists(st.integers(1, 30), min_size=1, max_size=6).map(
    lambda sizes: {f"w{i}": n for i, n in enumerate(sizes)}
)
RANKS = st.integers(1, 5)


@given(SHAPES, st.data())
def test_boxes_hold_the_elements_of_the_interval_in_order(shape: tuple[int, ...], data: st.DataObject):
    numel = math.prod(shape)
    first = data.draw(st.integers(0, numel))
    last = data.draw(st.integers(first, numel))
    elements = np.arange(numel).reshape(shape)
    taken = [
        elements[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].ravel()
        for offsets, sizes in boxes(shape, first, last)
    ]
    assert [x for part in taken for x in part] == list(range(first, last))


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (0, 12, [((0, 0), (3, 4))]),
        (4, 8, [((1, 0), (1, 4))]),
        (5, 7, [((1, 1), (1, 2))]),
        (2, 10, [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 2))]),
        (3, 3, []),
    ],
)
def test_a_matrix_takes_three_boxes_at_most(first: int, last: int, expected: list):
    assert list(boxes((3, 4), first, last)) == expected


@given(NUMELS, RANKS)
def test_tensors_laid_end_to_end_are_cut_without_gap_or_overlap(numels: dict[str, int], num_ranks: int):
    size = -(-sum(numels.values()) // num_ranks)
    flat = [(name, element) for name, numel in numels.items() for element in range(numel)]
    seen = []
    for rank in range(num_ranks):
        mine = flat[rank * size : (rank + 1) * size]
        for name, piece in cut_together(numels, size, rank).items():
            there = mine[piece.at : piece.at + piece.last - piece.first]
            assert there == [(name, element) for element in range(piece.first, piece.last)]
            seen += there
    assert seen == flat


@given(NUMELS, RANKS)
def test_tensors_are_cut_one_by_one_without_gap_or_overlap(numels: dict[str, int], num_ranks: int):
    pieces = [cut_each(numels, num_ranks, rank) for rank in range(num_ranks)]
    for name, numel in numels.items():
        bounds = [(piece.first, piece.last) for each in pieces if (piece := each.get(name))]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == numel
        assert all(a[1] == b[0] for a, b in pairwise(bounds))


def test_parts_of_one_size_follow_each_other_in_a_partition():
    assert cut_each({"a": 5, "b": 2, "c": 1}, 2, 0) == {
        "a": FlatPiece(0, 3, 0), "b": FlatPiece(0, 1, 3), "c": FlatPiece(0, 1, 4),
    }  # fmt: skip
    assert cut_each({"a": 5, "b": 2, "c": 1}, 2, 1) == {"a": FlatPiece(3, 5, 0), "b": FlatPiece(1, 2, 3)}
