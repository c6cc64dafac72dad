"""ReMax and REINFORCE++: advantages equal loops written from the papers."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.rows import (
    LENGTHS,
    SEEDS,
    assert_rows,
    at_every_token,
    discounted,
    jagged,
    penalized,
    random_column,
    rows_of,
    whitened,
)

from controller.advantage import discounted_returns
from controller.algorithms.reinforce_pp import reinforce_pp_advantage
from controller.algorithms.remax import remax_advantage
from nccl_transfer.refs.columns import Jagged

UNIT = st.floats(0, 1)


def test_remax_of_a_hand_worked_example() -> None:
    # KL per token 1, -1 | 2; beta 1/2: rewards -1/2, 1/2 + 3 | -1 + 1; sums from each token on 3, 3.5 | 0;
    # the greedy responses have 1 and 2.
    found = remax_advantage(
        jagged([[1, -1], [2]]),
        jagged([[0, 0], [0]]),
        np.array([3.0, 1.0]),
        np.array([1.0, 2.0]),
        beta=0.5,
    )
    assert found.advantages.values.tolist() == [2.0, 2.5, -2.0]
    assert found.metrics["baseline/mean"] == 1.5


def test_reinforce_pp_of_a_hand_worked_example() -> None:
    # Returns 1, 1 and 4; mean 2, variance (1 + 1 + 4) / 2 = 3.
    columns = jagged([[0, 0], [0]]), jagged([[0, 0], [0]])
    found = reinforce_pp_advantage(
        *columns, np.array([1.0, 4.0]), np.array([0, 1]), baseline="batch", beta=0.0
    )
    np.testing.assert_allclose(found.advantages.values, np.array([-1, -1, 2]) / 3**0.5, rtol=1e-6)


def test_reinforce_pp_with_groups_of_a_hand_worked_example() -> None:
    # Scores 1 and 3 of one group: -1 at two tokens and 1 at one; mean -1/3, variance (2 * 4/9 + 16/9) / 2 = 4/3.
    columns = jagged([[0, 0], [0]]), jagged([[0, 0], [0]])
    found = reinforce_pp_advantage(
        *columns, np.array([1.0, 3.0]), np.array([0, 0]), baseline="group", beta=0.0
    )
    expected = np.array([-2 / 3, -2 / 3, 4 / 3]) / (4 / 3) ** 0.5
    np.testing.assert_allclose(found.advantages.values, expected, rtol=1e-6)


@settings(deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, gamma=UNIT)
def test_discounted_returns_equal_the_sums_written_out(lengths: list[int], seed: int, gamma: float) -> None:
    rewards = random_column(np.random.default_rng(seed), lengths)
    assert_rows(discounted_returns(rewards, gamma), [discounted(row, gamma) for row in rows_of(rewards)])


@settings(deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, beta=UNIT)
def test_remax_equals_the_loop(lengths: list[int], seed: int, beta: float) -> None:
    rng = np.random.default_rng(seed)
    log_probs, ref = random_column(rng, lengths), random_column(rng, lengths)
    scores, baselines = rng.normal(size=len(lengths)), rng.normal(size=len(lengths))
    expected = [
        [later - baseline for later in discounted(penalized(score, p, q, beta), 1.0)]
        for score, baseline, p, q in zip(
            scores.tolist(), baselines.tolist(), rows_of(log_probs), rows_of(ref), strict=True
        )
    ]
    assert_rows(remax_advantage(log_probs, ref, scores, baselines, beta=beta).advantages, expected)


@settings(deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, beta=UNIT, gamma=UNIT)
def test_reinforce_pp_equals_the_loop(lengths: list[int], seed: int, beta: float, gamma: float) -> None:
    rng = np.random.default_rng(seed)
    log_probs, ref = random_column(rng, lengths), random_column(rng, lengths)
    scores = rng.normal(size=len(lengths))
    rows = zip(scores.tolist(), rows_of(log_probs), rows_of(ref), strict=True)
    expected = whitened([discounted(penalized(score, p, q, beta), gamma) for score, p, q in rows])
    found = reinforce_pp_advantage(
        log_probs, ref, scores, np.zeros(len(lengths), int), baseline="batch", beta=beta, gamma=gamma
    )
    assert_rows(found.advantages, expected)


@pytest.mark.parametrize("offset", [1e4, 1e6])
@pytest.mark.parametrize("baseline", ["batch", "group"])
def test_reinforce_pp_does_not_depend_on_a_constant_in_the_scores(baseline: str, offset: float) -> None:
    rng = np.random.default_rng(0)
    lengths = [7, 1, 3, 12, 5, 5]
    log_probs, ref = random_column(rng, lengths), random_column(rng, lengths)
    scores, group = rng.normal(size=len(lengths)), np.array([0, 0, 0, 1, 1, 1])
    near, far = (
        reinforce_pp_advantage(log_probs, ref, scores + c, group, baseline=baseline, beta=0.1).columns
        for c in (0.0, offset)
    )
    sent, expected = far["advantages"], near["advantages"]
    assert isinstance(sent, Jagged)
    assert isinstance(expected, Jagged)
    assert sent.values.dtype == np.float32
    np.testing.assert_allclose(sent.values, expected.values, rtol=1e-5, atol=1e-6)


@settings(deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, beta=UNIT)
def test_reinforce_pp_with_groups_equals_the_loop(lengths: list[int], seed: int, beta: float) -> None:
    rng = np.random.default_rng(seed)
    log_probs, ref = random_column(rng, lengths), random_column(rng, lengths)
    scores, group = rng.normal(size=len(lengths)), rng.integers(0, 3, len(lengths))
    rows = zip(scores.tolist(), rows_of(log_probs), rows_of(ref), strict=True)
    sums = [sum(penalized(score, p, q, beta)) for score, p, q in rows]
    centred = []
    for number, own in zip(group, sums, strict=True):
        members = [s for other, s in zip(group, sums, strict=True) if other == number]
        centred.append(own - statistics.fmean(members) if len(members) > 1 else own)
    found = reinforce_pp_advantage(log_probs, ref, scores, group, baseline="group", beta=beta)
    assert_rows(found.advantages, whitened(at_every_token(centred, lengths)))


def test_a_baseline_without_a_number_is_refused() -> None:
    column = jagged([[0.0]])
    with pytest.raises(ValueError, match="not finite"):
        remax_advantage(column, column, np.array([1.0]), np.array([np.nan]), beta=0.0)
