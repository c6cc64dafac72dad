"""Advantages, rewards and KL on the controller equal loops written from the formulas, in Python floats."""

import math
import statistics
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.advantage import (
    AdaptiveKL,
    Advantage,
    FixedKL,
    FloatColumn,
    gae,
    kl_estimate,
    ppo_advantage,
    token_rewards,
    whiten,
)
from nccl_transfer.refs.columns import Jagged

RTOL, ATOL = 1e-9, 1e-9  # all stages compute in float64

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=7)
SEEDS = st.integers(0, 2**32 - 1)
UNIT = st.floats(0, 1)


def jagged(rows: list[list[float]]) -> FloatColumn:
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return Jagged(np.array([x for row in rows for x in row], dtype=np.float32), lengths)


def random_jagged(rng: np.random.Generator, lengths: list[int], scale: float = 1.0) -> FloatColumn:
    values = rng.normal(scale=scale, size=sum(lengths)).astype(np.float32)
    return Jagged(values, np.array(lengths, dtype=np.int64))


def rows_of(x: FloatColumn) -> list[list[float]]:
    """Rows as Python floats."""
    ends = np.cumsum(x.lengths).tolist()
    values = x.values.tolist()
    return [values[end - length : end] for end, length in zip(ends, x.lengths.tolist(), strict=True)]


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]


def assert_rows(actual: FloatColumn, expected: list[list[float]]) -> None:
    assert actual.values.dtype == np.float64
    assert actual.lengths.tolist() == [len(row) for row in expected]
    np.testing.assert_allclose(actual.values, flat(expected), rtol=RTOL, atol=ATOL)


def gae_row(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The exponentially weighted sum of TD errors, term by term (not the recursion)."""
    next_values = [*values[1:], 0.0]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, next_values, strict=False)]
    return [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[start:]))
        for start in range(len(deltas))
    ]


def kl_token(log_prob: float, ref_log_prob: float, kind: str) -> float:
    d = log_prob - ref_log_prob
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    x = min(max(-d, -20.0), 20.0)
    return min(max(math.exp(x) - x - 1, -10.0), 10.0)


def whitened(rows: list[list[float]]) -> list[list[float]]:
    mean, variance = statistics.fmean(flat(rows)), statistics.variance(flat(rows))
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


def test_gae_of_a_hand_worked_example():
    # deltas: 0 + .5*2 - 1 = 0, 0 + .5*3 - 2 = -.5, 4 + 0 - 3 = 1; discount .5 * .5 = .25
    advantages, returns = gae(jagged([[0, 0, 4]]), jagged([[1, 2, 3]]), gamma=0.5, lam=0.5)
    assert advantages.values.tolist() == [-0.0625, -0.25, 1.0]
    assert returns.values.tolist() == [0.9375, 1.75, 4.0]


@settings(deadline=None)
@given(LENGTHS, SEEDS, UNIT, UNIT)
def test_gae_equals_the_sum_of_discounted_td_errors(lengths, seed, gamma, lam):
    rng = np.random.default_rng(seed)
    rewards, values = random_jagged(rng, lengths), random_jagged(rng, lengths)
    expected = [gae_row(r, v, gamma, lam) for r, v in zip(rows_of(rewards), rows_of(values), strict=True)]
    advantages, returns = gae(rewards, values, gamma, lam)
    assert_rows(advantages, expected)
    assert_rows(
        returns,
        [[a + v for a, v in zip(*row, strict=True)] for row in zip(expected, rows_of(values), strict=True)],
    )


def test_gae_without_discount_returns_the_reward_to_go():
    _, returns = gae(jagged([[1, 2, 3], [], [5]]), jagged([[9, -7, 4], [], [2]]))
    np.testing.assert_allclose(returns.values, [6, 5, 3, 5])


def test_gae_of_no_rows_is_no_rows():
    advantages, returns = gae(jagged([]), jagged([]))
    assert advantages.values.size == returns.values.size == 0


def test_gae_is_fast_enough_for_the_batch_of_the_paper():
    x = random_jagged(np.random.default_rng(0), [1024] * 1024)
    start = time.perf_counter()
    gae(x, x, 0.99, 0.95)
    assert time.perf_counter() - start < 1.0


def test_gae_refuses_columns_of_different_lengths():
    with pytest.raises(ValueError, match="values does not fit"):
        gae(jagged([[1], [1, 2]]), jagged([[1, 2], [1]]))


@settings(deadline=None)
@given(LENGTHS.filter(lambda lengths: sum(lengths) >= 2), SEEDS)
def test_whitening_equals_the_formula(lengths, seed):
    x = random_jagged(np.random.default_rng(seed), lengths, scale=3.0)
    assert_rows(whiten(x), whitened(rows_of(x)))


def test_whitening_ignores_a_shift_far_larger_than_the_spread():
    x = jagged([[4096.0, 4096.5], [4097.0]])
    assert_rows(whiten(x), whitened([[0.0, 0.5], [1.0]]))


def test_whitening_equal_tokens_gives_zeros():
    assert_rows(whiten(jagged([[0.1] * 3, [0.1] * 4])), [[0.0] * 3, [0.0] * 4])


@pytest.mark.parametrize("rows", [[[]], [[1.0], []]])
def test_whitening_refuses_fewer_than_two_tokens(rows):
    with pytest.raises(ValueError, match="at least 2 tokens"):
        whiten(jagged(rows))


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@settings(deadline=None)
@given(lengths=LENGTHS, seed=SEEDS, scale=st.sampled_from([0.01, 1.0, 30.0]))
def test_kl_estimate_equals_the_formula(kind, lengths, seed, scale):
    rng = np.random.default_rng(seed)
    log_probs, ref = random_jagged(rng, lengths, scale), random_jagged(rng, lengths, scale)
    expected = [
        [kl_token(p, q, kind) for p, q in zip(*row, strict=True)]
        for row in zip(rows_of(log_probs), rows_of(ref), strict=True)
    ]
    assert_rows(kl_estimate(log_probs, ref, kind), expected)


def test_unknown_kl_estimator_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match="'k4'; known: k1, k2, k3"):
        kl_estimate(jagged([[0]]), jagged([[0]]), "k4")


def test_sample_scores_go_to_the_last_token_and_empty_responses_carry_none():
    kl = jagged([[1, 2, 3], [], [4]])
    rewards = token_rewards(np.array([10.0, 20.0, 30.0]), kl.lengths, kl, beta=0.5)
    assert_rows(rewards, [[-0.5, -1.0, 8.5], [], [28.0]])


def test_token_scores_stay_on_their_tokens():
    scores = jagged([[1, 2], [], [3]])
    assert_rows(
        token_rewards(scores, scores.lengths, jagged([[1, 1], [], [1]]), 2.0), [[-1.0, 0.0], [], [1.0]]
    )


def test_rewards_without_a_reference_are_the_scores():
    assert_rows(token_rewards(np.array([1.0, 2.0]), np.array([2, 1])), [[0.0, 1.0], [2.0]])


def test_a_kl_penalty_needs_a_reference():
    with pytest.raises(ValueError, match="reference policy"):
        token_rewards(np.array([1.0]), np.array([1]), None, 0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_an_error(bad):
    with pytest.raises(ValueError, match="1 of 2 scores are not finite, the first at response 1"):
        token_rewards(np.array([1.0, bad]), np.array([1, 1]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e39])
def test_advantages_that_are_not_finite_in_float32_do_not_reach_an_update(bad: float) -> None:
    with pytest.raises(ValueError, match="1 of 2 advantages are not finite, the first at response 1"):
        _ = Advantage(np.array([0.5, bad]), {}).columns
    with pytest.raises(ValueError, match="1 of 3 advantages are not finite, the first at token 2"):
        _ = Advantage(Jagged(np.array([0.5, 1.0, bad]), np.array([1, 2])), {}).columns


def test_one_score_per_response_is_required():
    with pytest.raises(ValueError, match="one score for each of 2 responses"):
        token_rewards(np.array([1.0]), np.array([1, 1]))


@settings(deadline=None)
@given(LENGTHS.filter(lambda lengths: sum(lengths) >= 2), SEEDS, st.sampled_from(["k1", "k2", "k3"]))
def test_ppo_advantage_equals_the_whole_formula(lengths, seed, kl_kind):
    rng = np.random.default_rng(seed)
    log_probs, ref, values = (random_jagged(rng, lengths) for _ in range(3))
    scores = rng.normal(size=len(lengths)).astype(np.float32)
    beta, gamma, lam = 0.3, 0.9, 0.8

    advantages, returns = [], []
    for p_row, q_row, v_row, score in zip(
        rows_of(log_probs), rows_of(ref), rows_of(values), scores.tolist(), strict=True
    ):
        rewards = [-beta * kl_token(p, q, kl_kind) for p, q in zip(p_row, q_row, strict=True)]
        if rewards:
            rewards[-1] += score
        advantages.append(gae_row(rewards, v_row, gamma, lam))
        returns.append([a + v for a, v in zip(advantages[-1], v_row, strict=True)])

    settings_ = {"beta": beta, "kl_kind": kl_kind, "gamma": gamma, "lam": lam}
    plain = ppo_advantage(log_probs, ref, values, scores, **settings_, whiten_advantages=False)
    assert_rows(plain.advantages, advantages)
    assert_rows(plain.returns, returns)
    white = ppo_advantage(log_probs, ref, values, scores, **settings_)
    # The tolerance of what is whitened is divided by its spread.
    spread = statistics.stdev(flat(advantages))
    np.testing.assert_allclose(
        white.advantages.values, flat(whitened(advantages)), atol=1e-5 / min(spread, 1)
    )
    assert_rows(white.returns, returns)


def test_ppo_metrics_of_a_hand_worked_example():
    # k1 = [.5, .5], [1]; rewards = [-.25, 2 - .25], [4 - .5], with a third, empty response of score 6.
    result = ppo_advantage(
        log_probs=jagged([[-1.0, -1.0], [-1.0], []]),
        ref_log_probs=jagged([[-1.5, -1.5], [-2.0], []]),
        values=jagged([[1.0, 1.0], [3.0], []]),
        scores=np.array([2.0, 4.0, 6.0]),
        beta=0.5,
    )
    # returns = [1.5, 1.75], [3.5]; advantages = [.5, .75], [.5]
    assert result.metrics == pytest.approx(
        {
            "kl/mean": 2 / 3,
            "kl/sequence_mean": 2 / 3,
            "score/mean": 4.0,
            "reward/mean": (1.5 + 3.5) / 3,
            "advantage/mean": 1.75 / 3,
            "advantage/std": statistics.stdev([0.5, 0.75, 0.5]),
            "returns/mean": 2.25,
            "value/explained_variance": 1
            - statistics.variance([0.5, 0.75, 0.5]) / statistics.variance([1.5, 1.75, 3.5]),
        },
        rel=1e-6,
    )


def test_kl_metrics_are_per_token_and_per_sequence():
    log_probs, ref = jagged([[0.0, 0.0, 0.0], [0.0]]), jagged([[-1.0, -2.0, -3.0], [-2.0]])
    metrics = ppo_advantage(log_probs, ref, log_probs, np.zeros(2), beta=0.0).metrics
    assert metrics["kl/mean"] == pytest.approx(2.0)
    assert metrics["kl/sequence_mean"] == pytest.approx(4.0)


def test_without_a_reference_there_are_no_kl_metrics():
    x = jagged([[1.0, 2.0]])
    assert not [
        name for name in ppo_advantage(x, None, x, np.ones(1), beta=0.0).metrics if name.startswith("kl/")
    ]


def test_metrics_stay_finite_where_nothing_varies_or_nothing_is_there():
    for rows in ([[], []], [[1.0], []]):
        x = jagged(rows)
        metrics = ppo_advantage(x, x, x, np.zeros(2), beta=0.1, whiten_advantages=False).metrics
        assert all(math.isfinite(value) for value in metrics.values())


def test_equal_columns_give_equal_bits():
    rng = np.random.default_rng(0)
    log_probs, ref, values = (random_jagged(rng, [50, 0, 31, 200]) for _ in range(3))
    scores = rng.normal(size=4)
    first, second = (ppo_advantage(log_probs, ref, values, scores, beta=0.1) for _ in range(2))
    assert first.advantages.values.tobytes() == second.advantages.values.tobytes()
    assert first.metrics == second.metrics


def test_a_fixed_kl_price_stays():
    kl = FixedKL(0.02)
    kl.update(100.0, 512)
    assert kl.beta == 0.02


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.1, 1.0),
        (0.11, 1 + 0.1 * 500 / 10_000),
        (5.0, 1 + 0.2 * 500 / 10_000),
        (0.0, 1 - 0.2 * 500 / 10_000),
    ],
)
def test_an_adaptive_kl_price_follows_the_clipped_error(kl, factor):
    controller = AdaptiveKL(beta=0.05, target=0.1, horizon=10_000)
    controller.update(kl, 500)
    assert controller.beta == pytest.approx(0.05 * factor)


def test_an_adaptive_kl_price_refuses_to_turn_negative():
    with pytest.raises(ValueError, match="too many for a KL horizon of 100"):
        AdaptiveKL(horizon=100).update(0.0, 500)


@pytest.mark.parametrize("name", ["beta", "target", "horizon"])
def test_an_adaptive_kl_price_needs_positive_settings(name):
    with pytest.raises(ValueError, match=f"{name} of an adaptive KL must be above 0"):
        AdaptiveKL(**{name: 0})
