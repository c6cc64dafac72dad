"""The loader: where it stands is a plain value, and sources come in proportion."""

from __future__ import annotations

import itertools
import json
import time
import tracemalloc
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.data.loader import Loader, NothingKept, Position, State, in_proportion, permuted, shuffled
from rlhf.errors import ConfigError


def test_one_source_is_read_as_by_step() -> None:
    loader = Loader([11], [1.0], seed=5)
    for step in range(1, 8):
        assert loader.take(4).tolist() == shuffled(np.arange(4 * step - 4, 4 * step), 11, "data/5").tolist()


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    before=st.integers(0, 40),
    count=st.integers(1, 20),
    seed=st.integers(0, 3),
    long=st.integers(2, 5),
)
def test_a_loader_goes_on_from_a_state_as_the_one_that_had_it(
    sizes: list[int], before: int, count: int, seed: int, long: int
) -> None:
    weights = [1.0 + i for i in range(len(sizes))]
    first, second = Loader(sizes, weights, seed), Loader(sizes, weights, seed)
    starts = np.cumsum([0, *sizes[:-1]])

    def keeps(rows: np.ndarray) -> np.ndarray:
        return (rows % long != 0) | np.isin(rows, starts)

    first.take(before, keeps)
    state = json.loads(json.dumps(asdict(first.state)))
    positions = tuple(Position(**position) for position in state["positions"])
    second.restore(State(state["seed"], tuple(state["sizes"]), positions))
    assert first.take(count, keeps).tolist() == second.take(count, keeps).tolist()


def test_rows_come_in_their_order_without_a_shuffle() -> None:
    loader = Loader([4, 3], [2.0, 1.0], seed=5, shuffles=False)
    rows = np.concatenate([loader.take(6), loader.take(12)])
    assert rows[rows < 4].tolist() == [0, 1, 2, 3] * 3
    assert rows[rows >= 4].tolist() == [4, 5, 6] * 2
    going_on = Loader([4, 3], [2.0, 1.0], seed=5, shuffles=False)
    going_on.restore(loader.state)
    assert sorted(going_on.take(3).tolist()) == sorted(loader.take(3).tolist()) == [0, 1, 4]
    odd = Loader([5], [1.0], seed=5, shuffles=False).take(4, lambda rows: rows % 2 == 1)
    assert odd.tolist() == [1, 3, 1, 3]


def test_the_state_counts_passes_rows_and_those_left_out() -> None:
    loader = Loader([4], [1.0], seed=0)
    loader.take(6)
    assert loader.state == State(0, (4,), (Position(epoch=1, index=2),))
    assert 3 not in loader.take(5, lambda rows: rows != 3)
    (position,) = loader.state.positions
    assert 4 * position.epoch + position.index == 6 + 5 + position.left_out
    assert position.left_out in (1, 2)


def test_rows_left_out_change_no_share_and_no_order() -> None:
    kept = Loader([5, 6], [1.0, 3.0], seed=2).take(400, lambda rows: rows % 2 == 0)
    assert np.all(kept % 2 == 0)
    assert abs(np.mean(kept < 5) - 1 / 4) < 0.01
    of_first = Loader([5], [1.0], seed=2).take(200)
    assert kept[kept < 5].tolist() == of_first[of_first % 2 == 0][: np.sum(kept < 5)].tolist()


@given(
    count=st.integers(1, 40),
    kept=st.lists(st.booleans(), min_size=1, max_size=30).filter(any),
    takes=st.integers(1, 3),
)
def test_rows_come_one_after_the_other_without_those_left_out(
    count: int, kept: list[bool], takes: int
) -> None:
    loader, size, total = Loader([len(kept)], [1.0], seed=4), len(kept), count * takes
    rows = shuffled(np.arange(size * total), size, "data/4")  # a pass has at least one row that is kept
    places = np.flatnonzero(np.asarray(kept)[rows])[:total]
    taken = [loader.take(count, lambda rows: np.asarray(kept)[rows]).tolist() for _ in range(takes)]
    assert list(itertools.chain(*taken)) == rows[places].tolist()
    place = int(places[-1]) + 1
    assert loader.state.positions == (Position(*divmod(place, size), place - total),)


def test_a_source_without_a_row_to_keep_is_found_out_in_few_looks() -> None:
    looks: list[int] = []

    def keeps(rows: np.ndarray) -> np.ndarray:
        looks.append(len(rows))
        return np.zeros(len(rows), bool)

    with pytest.raises(NothingKept):
        Loader([3000], [1.0], seed=0).take(1, keeps)
    assert len(looks) < 40
    assert max(looks) <= 256


def test_a_source_of_which_no_row_is_kept_is_an_error() -> None:
    with pytest.raises(NothingKept, match="every row of source 2 is left out"):
        Loader([3, 5], [1.0, 1.0], seed=0).take(4, lambda rows: rows < 3)


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


@pytest.mark.parametrize(
    "state",
    [
        State(0, (3,), (Position(),)),
        State(0, (3, 5), (Position(), Position(), Position())),
        State(0, (3, 5), (Position(0, 3), Position())),
        State(0, (3, 5), (Position(0, 1, 2), Position())),
    ],
)
def test_a_state_of_other_data_is_refused(state: State) -> None:
    with pytest.raises(ConfigError, match="not a valid position in sources of"):
        Loader([3, 5], [1.0, 1.0], seed=0).restore(state)


def test_a_state_of_another_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.seed: 1 draws other rows than 0"):
        Loader([3], [1.0], seed=1).restore(Loader([3], [1.0], seed=0).state)


@given(size=st.integers(1, 200), key=st.text(max_size=8))
def test_a_shuffled_pass_is_a_permutation(size: int, key: str) -> None:
    assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size))


def test_every_permutation_is_as_likely() -> None:
    drawn = Counter(tuple(permuted(np.arange(4), 4, f"key {i}").tolist()) for i in range(1200))
    permutations = list(itertools.permutations(range(4)))
    expected = 1200 / len(permutations)
    chi_squared = sum((drawn[each] - expected) ** 2 / expected for each in permutations)
    # Five standard deviations above the mean of chi squared with as many degrees of freedom.
    freedom = len(permutations) - 1
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def test_neighbours_of_a_large_pass_are_unrelated() -> None:
    rows = permuted(np.arange(20_000), 10_000_000, "data/0/0") / 10_000_000
    deviation = 1 / np.sqrt(len(rows))
    assert abs(np.corrcoef(rows[1:], rows[:-1])[0, 1]) < 5 * deviation
    assert abs(rows.mean() - 0.5) < 5 * deviation * np.sqrt(1 / 12)


def test_drawing_from_ten_million_rows_costs_no_more_than_from_ten_thousand() -> None:
    few, many = Loader([10_000], [1.0], 0), Loader([10_000_000], [1.0], 0)

    def seconds(loader: Loader) -> float:
        started = time.perf_counter()
        loader.take(512)
        return time.perf_counter() - started

    # Taken in turns, so that both see the same load of the machine.
    times = [(seconds(few), seconds(many)) for _ in range(15)]
    of_few, of_many = (min(column) for column in zip(*times, strict=True))
    assert of_many <= 1.5 * of_few
    tracemalloc.start()
    many.take(512)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
