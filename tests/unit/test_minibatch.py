"""Mini-batches hold the same rows whatever rank has them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.minibatch import deal


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
