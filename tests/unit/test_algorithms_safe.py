"""Safe-RLHF: the multiplier and the advantage equal loops written from the paper."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.rows import LENGTHS, SEEDS, Rows, assert_rows, gae_row, jagged, random_column, rows_of, whitened

from controller.advantage.safe import Multiplier, safe_advantage


def test_the_multiplier_of_a_hand_worked_example() -> None:
    multiplier = Multiplier()
    # J_C = 3/4, d = 1/4, lambda 1: log lambda = 0.1 * 1 * 1/2.
    assert multiplier.update([1.0, 0.5], limit=0.25) == 0.75
    assert multiplier.log_lambda == pytest.approx(0.05)
    # J_C = 1/2 of four: log lambda += 0.1 * exp(0.05) * 1/4.
    assert multiplier.update([0.0, 0.5], limit=0.25) == 0.5
    assert multiplier.log_lambda == pytest.approx(0.05 + 0.1 * math.exp(0.05) * 0.25)


@settings(deadline=None)
@given(seed=SEEDS, limit=st.floats(-1, 1), rate=st.floats(0, 2), episodes=st.integers(1, 9))
def test_the_multiplier_equals_the_loop(seed: int, limit: float, rate: float, episodes: int) -> None:
    rng = np.random.default_rng(seed)
    multiplier, log_lambda, seen = Multiplier(), 0.0, []
    for _ in range(6):
        costs = rng.normal(size=rng.integers(1, 6)).tolist()
        multiplier.update(costs, limit=limit, learning_rate=rate, largest=5.0, episodes=episodes)
        seen += costs
        recent = statistics.fmean(seen[-episodes:])
        log_lambda = min(log_lambda + rate * math.exp(log_lambda) * (recent - limit), math.log(5.0))
        assert multiplier.log_lambda == pytest.approx(log_lambda, rel=1e-9, abs=1e-12)
        assert 0 < multiplier.value <= 5.0 * (1 + 1e-12)


def test_a_cost_above_the_limit_raises_the_multiplier_up_to_its_bound_and_one_below_lowers_it() -> None:
    multiplier = Multiplier()
    for _ in range(100):
        multiplier.update([1.0], limit=0.0, learning_rate=1.0, largest=3.0)
    assert multiplier.value == pytest.approx(3.0)
    multiplier.update([0.0] * 128, limit=0.5, learning_rate=1.0, largest=3.0)
    assert multiplier.value < 3.0


def test_the_state_of_the_multiplier_is_plain_and_bounded() -> None:
    multiplier = Multiplier()
    multiplier.update(np.arange(1000, dtype=np.float32), limit=0.0)
    assert multiplier.costs == [float(cost) for cost in range(872, 1000)]
    assert {type(cost) for cost in multiplier.costs} == {float}


def safe_loop(
    columns: tuple[Rows, Rows, Rows, Rows],
    scores: list[float],
    costs: list[float],
    multiplier: float,
    beta: float,
    clip: float,
) -> tuple[Rows, Rows, Rows]:
    """Advantages, returns, cost returns; gamma 1, lambda of GAE 0.95."""
    advantages, returns, cost_returns = [], [], []
    for p, q, value, cost_value, score, cost in zip(*columns, scores, costs, strict=True):
        kl = [a - b for a, b in zip(p, q, strict=True)]
        reward_row, cost_row = [-beta * x for x in kl], [beta * x for x in kl]
        if kl:
            reward_row[-1] += score
            cost_row[-1] += cost
        reward_row = [min(max(x, -clip), clip) for x in reward_row]
        cost_row = [min(max(x, -clip), clip) for x in cost_row]
        a_r, a_c = gae_row(reward_row, value, 1.0, 0.95), gae_row(cost_row, cost_value, 1.0, 0.95)
        advantages.append([(r - multiplier * c) / (1 + multiplier) for r, c in zip(a_r, a_c, strict=True)])
        returns.append([a + v for a, v in zip(a_r, value, strict=True)])
        cost_returns.append([a + v for a, v in zip(a_c, cost_value, strict=True)])
    return advantages, returns, cost_returns


@pytest.mark.parametrize("whitens", [False, True])
@settings(deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, multiplier=st.floats(0, 5), beta=st.floats(0, 1))
def test_the_safe_advantage_equals_the_loop(
    whitens: bool, lengths: list[int], seed: int, multiplier: float, beta: float
) -> None:
    rng = np.random.default_rng(seed)
    log_probs, ref, values, cost_values = (random_column(rng, lengths) for _ in range(4))
    scores, costs = rng.normal(size=len(lengths), scale=3), rng.normal(size=len(lengths), scale=3)
    rows = rows_of(log_probs), rows_of(ref), rows_of(values), rows_of(cost_values)
    advantages, returns, cost_returns = safe_loop(
        rows,
        scores.tolist(),
        costs.tolist(),
        multiplier,
        beta,
        clip=2.0,
    )
    found = safe_advantage(
        log_probs,
        ref,
        values,
        cost_values,
        scores,
        costs,
        multiplier=multiplier,
        beta=beta,
        clip=2.0,
        whiten_advantages=whitens,
    )
    assert set(found.columns) == {"advantages", "returns", "cost_returns"}
    assert_rows(found.advantages, whitened(advantages) if whitens else advantages)
    assert_rows(found.returns, returns)
    assert_rows(found.cost_returns, cost_returns)


def test_the_safe_advantage_of_a_hand_worked_example() -> None:
    # One token each, no KL: A_R = 4 - 1, A_C = 2 - 0; with lambda 2: (3 - 2 * 2) / 3.
    zero = jagged([[0.0]])
    found = safe_advantage(
        zero, zero, jagged([[1.0]]), zero, np.array([4.0]), np.array([2.0]), multiplier=2.0, beta=0.02
    )
    assert_rows(found.advantages, [[-1 / 3]])
    assert_rows(found.returns, [[4.0]])
    assert found.metrics["cost/mean"] == 2.0


def test_without_a_multiplier_it_is_ppo() -> None:
    zero, one = jagged([[0.0, 0.0]]), jagged([[1.0, 1.0]])
    safe = safe_advantage(zero, zero, one, one, np.array([4.0]), np.array([9.0]), multiplier=0.0, beta=0.0)
    assert_rows(safe.advantages, [gae_row([0.0, 4.0], [1.0, 1.0], 1.0, 0.95)])
