"""Rows are dealt out evenly by cost: each once, as many to each part, and no part much more expensive."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.role_groups.balance import LINEAR_TOKENS, cost_of, dealt, ranked

lengths_of_rows = st.lists(st.integers(1, 5000), max_size=80)


def costs_of(lengths: list[int]) -> np.ndarray:
    return np.sort(cost_of(np.array(lengths, dtype=np.int64)))[::-1]


@given(lengths=lengths_of_rows, parts=st.integers(1, 6), block=st.integers(1, 5))
def test_every_row_is_in_one_part_and_parts_are_as_large_as_protocols_make_them(
    lengths: list[int], parts: int, block: int
):
    mine = dealt(costs_of(lengths), parts, block)
    assert sorted(row for rows in mine for row in rows) == list(range(len(lengths)))
    assert [len(rows) for rows in mine] == [
        len(rows) for rows in np.array_split(np.arange(len(lengths)), parts)
    ]


@given(lengths=lengths_of_rows, parts=st.integers(1, 6))
def test_costs_of_parts_differ_by_less_than_the_most_expensive_row(lengths: list[int], parts: int):
    costs = costs_of(lengths)
    sums = [costs[rows].sum() for rows in dealt(costs, parts)]
    assert max(sums) - min(sums) <= costs.max(initial=0) * (1 + 1e-9)


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    parts=st.integers(1, 4),
    block=st.integers(1, 5),
)
def test_parts_have_whole_blocks_where_these_divide(lengths: list[int], parts: int, block: int):
    costs = costs_of(lengths * parts * block)
    for rows in dealt(costs, parts, block):
        starts = rows.reshape(-1, block)
        assert (starts[:, 0] % block == 0).all()
        assert (starts == starts[:, :1] + np.arange(block)).all()


@pytest.mark.parametrize("block", [1, 2])
def test_rows_of_one_cost_stay_side_by_side(block: int):
    costs = np.repeat([9.0, 5.0, 1.0], [4, 12, 3])
    assert [rows.tolist() for rows in dealt(costs, 2, block)] == [
        [0, 1, 4, 5, 6, 7, 8, 9, 16, 18],
        [2, 3, 10, 11, 12, 13, 14, 15, 17],
    ]


def test_long_rows_are_spread_where_dealing_by_count_would_put_them_together():
    costs = cost_of(np.array([4000, 4000, 10, 10, 10, 10]))
    assert [sorted(costs[rows]) for rows in dealt(costs, 2)] == [sorted(costs[[0, 2, 4]])] * 2


def test_attention_costs_as_much_as_the_layers_at_one_length():
    assert cost_of(np.array([LINEAR_TOKENS]))[0] == pytest.approx(2 * LINEAR_TOKENS)


def test_rows_are_ranked_by_cost_and_equals_keep_their_order():
    assert ranked(np.array([2.0, 5.0, 2.0, 7.0])).tolist() == [3, 1, 0, 2]
