"""Mini-batches hold the same rows whatever rank has them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.errors import InvalidRequest
from services.roles.minibatch import MAX_STEPS, check_schedule, deal


@given(
    parts=st.integers(1, 8),
    blocks=st.integers(1, 20),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_the_cut_over_ranks_changes_no_mini_batch(parts: int, blocks: int, ranks: int, seed: int) -> None:
    rows = np.arange(parts * blocks)
    whole = [set(rows[part].tolist()) for part in deal(rows, parts, (seed,))]
    cut: list[set[int]] = [set() for _ in range(parts)]
    for mine in np.array_split(rows, ranks):
        for number, part in enumerate(deal(mine, parts, (seed,))):
            cut[number] |= set(mine[part].tolist())
    assert cut == whole
    assert sorted(row for part in whole for row in part) == rows.tolist()
    assert {len(part) for part in whole} == {blocks}


def test_the_order_is_drawn_from_the_key() -> None:
    rows = np.arange(64)
    first, again, other = (deal(rows, 4, key) for key in ((0, 1, 0, 0), (0, 1, 0, 0), (0, 1, 0, 1)))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_rank_without_rows_has_empty_mini_batches() -> None:
    assert [len(part) for part in deal(np.empty(0, np.int64), 3, (0,))] == [0, 0, 0]


@pytest.mark.parametrize("steps", [(0, 1), (1, 0), (2**32 - 1, 1), (1, 2**32 - 1), (257, 256)])
def test_steps_that_are_none_or_too_many_are_refused_before_they_are_dealt_out(
    steps: tuple[int, int],
) -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MAX_STEPS}"):
        check_schedule(*steps)
    check_schedule(256, 256)
