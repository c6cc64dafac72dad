"""GRPO, Dr. GRPO, RLOO and DAPO: advantages equal loops written from the papers, whatever the groups."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.rows import FLOAT32_TOLERANCE, LENGTHS, SEEDS, penalized, random_column, rows_of

from controller.advantage import Advantage
from controller.advantage.groups import (
    centred,
    differs_within,
    group_advantage,
    leave_one_out,
    standardized,
)
from controller.advantage.lengths import overlong_penalty
from controller.algorithms.dapo import dapo_advantage
from controller.algorithms.rloo import rloo_advantage
from controller.training.sampling import rows_to_learn_from


def lengths_array(lengths: list[int]) -> np.ndarray:
    return np.array(lengths, dtype=np.int64)


def random_groups(rng: np.random.Generator, rows: int) -> list[int]:
    """Groups of any size, one among them often, and not side by side."""
    return [int(number) for number in rng.integers(0, max(rows // 2, 1), rows) * 7]


def others_in(group: list[int], row: int, scores: list[float]) -> list[float]:
    return [s for i, s in enumerate(scores) if group[i] == group[row] and i != row]


def grpo_loop(scores: list[float], group: list[int], *, with_std: bool) -> list[float]:
    """A_i = (s_i - mean) / (std + 1e-6) over the group; a response alone in it has mean 0 and std 1."""
    advantages = []
    for row, score in enumerate(scores):
        members = [*others_in(group, row, scores), score]
        mean = statistics.fmean(members) if len(members) > 1 else 0.0
        std = statistics.stdev(members) if len(members) > 1 else 1.0
        advantages.append((score - mean) / (std + 1e-6) if with_std else score - mean)
    return advantages


def rloo_loop(scores: list[float], group: list[int]) -> list[float]:
    """A_i = s_i - mean of the others."""
    return [
        score - (statistics.fmean(others) if (others := others_in(group, row, scores)) else 0.0)
        for row, score in enumerate(scores)
    ]


def test_grpo_of_a_hand_worked_example() -> None:
    # Group 0: 1, 0, 0, 1: mean 1/2, std sqrt(4 * 1/4 / 3) = 0.57735. Group 5: 2 and 4: mean 3, std sqrt(2).
    scores, group = np.array([1.0, 2.0, 0.0, 0.0, 4.0, 1.0]), np.array([0, 5, 0, 0, 5, 0])
    expected = [0.866024, -0.707106, -0.866024, -0.866024, 0.707106, 0.866024]
    np.testing.assert_allclose(standardized(scores, group), expected, atol=1e-6)


def test_dr_grpo_of_a_hand_worked_example() -> None:
    scores, group = np.array([1.0, 2.0, 0.0, 0.0, 4.0, 1.0]), np.array([0, 5, 0, 0, 5, 0])
    assert centred(scores, group).tolist() == [0.5, -1.0, -0.5, -0.5, 1.0, 0.5]


def test_rloo_of_a_hand_worked_example() -> None:
    # Against the others: 6 - (3 + 0) / 2, 3 - (6 + 0) / 2, 0 - (6 + 3) / 2; alone: itself.
    found = leave_one_out(np.array([6.0, 3.0, 0.0, 5.0]), np.array([1, 1, 1, 2]))
    np.testing.assert_allclose(found, [4.5, 0.0, -4.5, 5.0])


def test_overlong_punishment_of_a_hand_worked_example() -> None:
    # 10 tokens at most, the last 4 count: nothing up to 6, then a quarter for each, and all of it at 10.
    lengths = lengths_array([0, 6, 7, 8, 9, 10, 11])
    assert overlong_penalty(lengths, 10, 4).tolist() == [0, 0, -0.25, -0.5, -0.75, -1, -1]


def assert_per_row(found: Advantage, expected: Sequence[float] | np.ndarray) -> None:
    """Group algorithms have one number per response, which travels as float32."""
    sent = found.columns["advantages"]
    assert isinstance(sent, np.ndarray)
    assert sent.dtype == np.float32
    np.testing.assert_allclose(sent, expected, rtol=FLOAT32_TOLERANCE, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("with_std", [True, False], ids=["grpo", "dr_grpo"])
@settings(deadline=None)
@given(lengths=LENGTHS, seed=SEEDS)
def test_group_advantages_equal_the_loop(with_std: bool, lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, group = rng.normal(size=len(lengths)).round(1), random_groups(rng, len(lengths))
    found = group_advantage(scores, lengths_array(lengths), np.array(group), normalize_std=with_std)
    expected = grpo_loop(scores.tolist(), group, with_std=with_std)
    assert_per_row(found, expected)


@settings(deadline=None)
@given(lengths=LENGTHS, seed=SEEDS)
def test_rewards_of_tokens_count_by_their_sum(lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, group = random_column(rng, lengths), np.array(random_groups(rng, len(lengths)))
    sums = np.array([sum(row) for row in rows_of(tokens)])
    found = group_advantage(tokens, tokens.lengths, group)
    assert_per_row(found, group_advantage(sums, tokens.lengths, group).advantages)


def test_equal_scores_teach_nothing_and_are_told() -> None:
    scores = np.array([0.1, 0.1, 0.1, 1.0, 2.0])
    found = group_advantage(scores, lengths_array([2, 1, 1, 1, 1]), np.array([0, 0, 0, 1, 1]))
    assert found.advantages[:3].tolist() == [0, 0, 0]
    assert found.metrics["group/same_score"] == pytest.approx(3 / 5)


@given(score=st.floats(-1e9, 1e9), rows=st.integers(2, 64))
def test_the_mean_of_equal_scores_has_no_rounding_error_to_learn_from(score: float, rows: int) -> None:
    scores, group = np.full(rows, score), np.zeros(rows, np.int64)
    for advantages in (standardized, centred, leave_one_out):
        assert not advantages(scores, group).any()


@settings(deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, beta=st.floats(0, 1))
def test_rloo_equals_the_loop(lengths: list[int], seed: int, beta: float) -> None:
    rng = np.random.default_rng(seed)
    log_probs, ref = random_column(rng, lengths), random_column(rng, lengths)
    scores, group = rng.normal(size=len(lengths)), random_groups(rng, len(lengths))
    rows = zip(scores.tolist(), rows_of(log_probs), rows_of(ref), strict=True)
    sums = [sum(penalized(score, p, q, beta)) for score, p, q in rows]
    found = rloo_advantage(log_probs, ref, scores, np.array(group), beta=beta)
    assert_per_row(found, rloo_loop(sums, group))


@settings(deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, buffer=st.integers(1, 9))
def test_dapo_equals_the_loop(lengths: list[int], seed: int, buffer: int) -> None:
    rng = np.random.default_rng(seed)
    scores, group = rng.integers(0, 2, len(lengths)).astype(float), random_groups(rng, len(lengths))
    punished = []
    for score, length in zip(scores.tolist(), lengths, strict=True):
        start = 9 - buffer
        share = 0.0 if length <= start else (start - length) / buffer if length <= 9 else -1.0
        punished.append(score + 0.5 * share)
    found = dapo_advantage(
        scores, lengths_array(lengths), np.array(group), max_length=9, buffer=buffer, penalty=0.5
    )
    expected = grpo_loop(punished, group, with_std=True)
    # Scores that differ by rounding alone are blown up by the small std; they do not occur with these numbers.
    assert_per_row(found, expected)
    assert found.metrics["score/mean"] == pytest.approx(float(scores.mean()))


def test_without_a_buffer_dapo_punishes_no_length() -> None:
    scores, lengths, group = np.array([1.0, 0.0]), lengths_array([9, 1]), np.array([0, 0])
    found = dapo_advantage(scores, lengths, group, max_length=9, buffer=0, penalty=1.0)
    assert_per_row(found, group_advantage(scores, lengths, group).advantages)


@settings(deadline=None)
@given(seed=SEEDS, most=st.integers(1, 5))
def test_dynamic_sampling_takes_the_first_groups_whose_scores_differ(seed: int, most: int) -> None:
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(6), rng.integers(1, 4, 6))
    scores = rng.integers(0, 2, len(group)).astype(float)
    mixed = [number for number in range(6) if len(set(scores[group == number].tolist())) > 1]
    expected = [row for row, number in enumerate(group) if number in mixed[:most]]
    assert rows_to_learn_from(scores, group, most).tolist() == expected
    assert differs_within(scores, group).tolist() == [number in mixed for number in group]


def test_a_score_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantage(np.array([1.0, np.nan]), lengths_array([1, 1]), np.array([0, 0]))


def test_one_score_for_each_response_is_asked_for() -> None:
    with pytest.raises(ValueError, match="one scores for each of 3 responses"):
        group_advantage(np.array([1.0, 2.0]), lengths_array([1, 1, 1]), np.array([0, 0, 0]))


@pytest.mark.parametrize("buffer", [0, 11])
def test_an_overlong_buffer_beyond_the_response_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 10"):
        overlong_penalty(lengths_array([1]), 10, buffer)


def test_empty_responses_have_no_tokens_to_teach() -> None:
    found = group_advantage(
        np.array([1.0, 0.0]), lengths_array([0, 2]), np.array([0, 0]), normalize_std=False
    )
    assert_per_row(found, [0.5, -0.5])
    assert found.metrics["advantage/mean"] == -0.5
