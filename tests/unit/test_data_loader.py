"""The loader: where it stands is a plain value, and sources come in proportion."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.data import PromptData
from controller.loader import Loader, Position, in_proportion
from rlhf.errors import ConfigError


def test_one_source_is_read_as_by_step() -> None:
    data = PromptData([f"p{i}" for i in range(11)], [""] * 11, ["{}"] * 11)
    loader = Loader([11], [1.0], seed=5)
    for step in range(1, 8):
        assert loader.take(4).tolist() == data.rows_of_step(step, 4, 5).tolist()


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    before=st.integers(0, 40),
    count=st.integers(1, 20),
    seed=st.integers(0, 3),
)
def test_a_loader_goes_on_from_a_position_as_the_one_that_had_it(
    sizes: list[int], before: int, count: int, seed: int
) -> None:
    weights = [1.0 + i for i in range(len(sizes))]
    first, second = Loader(sizes, weights, seed), Loader(sizes, weights, seed)
    first.take(before)
    second.restore([Position(**asdict(position)) for position in first.position])
    assert first.take(count).tolist() == second.take(count).tolist()


def test_the_position_counts_passes_and_rows() -> None:
    loader = Loader([4], [1.0], seed=0)
    loader.take(6)
    assert loader.position == (Position(epoch=1, index=2),)


def test_every_pass_over_a_source_has_every_row_once() -> None:
    loader = Loader([3, 5], [1.0, 2.0], seed=0)
    rows = loader.take(60)
    for first, size in ((0, 3), (3, 5)):
        mine = rows[(rows >= first) & (rows < first + size)]
        for start in range(0, len(mine) - size + 1, size):
            assert sorted(mine[start : start + size]) == list(range(first, first + size))


@given(weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5), count=st.integers(1, 200))
def test_sources_come_in_proportion_in_every_stretch(weights: list[float], count: int) -> None:
    owners = in_proportion(np.asarray(weights), [0] * len(weights), count)
    shares = np.asarray(weights) / sum(weights)
    for stop in range(1, count + 1):
        given_rows = np.bincount(owners[:stop], minlength=len(weights))
        assert np.all(np.abs(given_rows - stop * shares) <= len(weights))


def test_three_to_one_by_hand() -> None:
    # (n + 1/2) / weight: 1/6 1/2, 1/2 1/2, 5/6 1/2 -> first, first, second; then 5/6 3/2 -> first; and again.
    assert in_proportion(np.array([3.0, 1.0]), [0, 0], 8).tolist() == [0, 0, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("position", [(), (Position(), Position(), Position()), (Position(0, 3), Position())])
def test_a_position_of_other_data_is_refused(position: tuple[Position, ...]) -> None:
    with pytest.raises(ConfigError, match="no position in sources of"):
        Loader([3, 5], [1.0, 1.0], seed=0).restore(position)
