"""From scores to returns and advantages over the tokens of a response: KL in the reward, discounting, GAE."""

from __future__ import annotations

import numpy as np

from controller.advantage.columns import (
    EPS,
    CriticAdvantage,
    FloatColumn,
    Scores,
    advantage_metrics,
    float64,
    last_tokens,
    make_column,
    mean,
    require_equal_lengths,
    require_finite,
    require_lengths,
    row_sums,
    sequence_scores,
    std,
    whiten,
)
from controller.advantage.kl import kl_estimate
from nccl_transfer.refs.columns import Jagged


def token_rewards(
    scores: Scores,
    lengths: np.ndarray,
    kl: FloatColumn | None = None,
    beta: float = 0.0,
) -> FloatColumn:
    """Computes the reward of every response token: its score minus `beta` times its KL (Ouyang et al. 2022, eq. 2).

    Args:
        scores: One score per response [rows], which becomes the score of its last token (that of an empty response is
            dropped), or one per token (jagged).
        lengths: Tokens per response [rows] int64.
        kl: KL to the reference policy at each token, in nats; None without a reference policy.
        beta: KL penalty, in units of reward per nat.

    Returns:
        The rewards, a jagged float64 column.

    Raises:
        ValueError: A score is not finite, `beta` is not 0 and `kl` is None, or columns have different lengths.
    """
    require_finite(scores)
    if isinstance(scores, Jagged):
        require_lengths(lengths, scores=scores)
        rewards = float64(scores)
    else:
        rewards = _on_last_tokens(scores, lengths)
    if kl is not None:
        require_lengths(lengths, kl=kl)
        rewards = rewards - beta * float64(kl)
    elif beta != 0:
        raise ValueError(f"a KL penalty of {beta} in the reward needs a reference policy")
    return make_column(rewards, lengths)


def penalized_rewards(
    scores: Scores,
    log_probs: FloatColumn,
    ref_log_probs: FloatColumn | None,
    *,
    beta: float,
    kl_kind: str = "k1",
) -> tuple[FloatColumn, dict[str, float]]:
    """Computes token rewards as `token_rewards` does, with the KL estimated from log-probabilities.

    Args:
        scores: One score per response [rows] or per token (jagged); see `token_rewards`.
        log_probs: Log-probabilities of the response tokens under the policy that sampled them.
        ref_log_probs: The same under the reference policy; None without one, which needs `beta` 0.
        beta: KL penalty, in units of reward per nat.
        kl_kind: Estimator of the KL; see `kl_estimate`.

    Returns:
        The rewards (jagged), and metrics: `score/mean` (per response, before the KL penalty), `reward/mean` (per
        response, after it) and, with a reference policy, `kl/mean` (per token) and `kl/sequence_mean` (per response).

    Raises:
        ValueError: A score is not finite, `beta` is not 0 without a reference policy, `kl_kind` is unknown, or columns
            have different lengths.
    """
    kl = None if ref_log_probs is None else kl_estimate(log_probs, ref_log_probs, kl_kind)
    rewards = token_rewards(scores, log_probs.lengths, kl, beta)
    metrics = {"score/mean": mean(sequence_scores(scores)), "reward/mean": mean(row_sums(rewards))}
    if kl is not None:
        metrics |= {"kl/mean": mean(float64(kl)), "kl/sequence_mean": mean(row_sums(kl))}
    return rewards, metrics


def gae(
    rewards: FloatColumn, values: FloatColumn, gamma: float = 1.0, lam: float = 1.0
) -> tuple[FloatColumn, FloatColumn]:
    """Computes generalized advantage estimates (GAE, Schulman et al. 2016, eq. 16) over each response.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}; past the last token V = A = 0.

    Args:
        rewards: Reward of each response token.
        values: Value V_t of the state before each response token.
        gamma: Discount per token.
        lam: Lambda of GAE: 0 relies on the values (one-step TD), 1 on the rewards (Monte Carlo).

    Returns:
        The advantages A and the returns A + V that the critic is trained on, both per token (jagged float64).

    Raises:
        ValueError: The columns have different lengths.
    """
    require_equal_lengths(rewards=rewards, values=values)
    value = float64(values)
    deltas = float64(rewards) + gamma * _next_in_row(value, values.lengths) - value
    advantages = _discounted_sums(deltas, values.lengths, gamma * lam)
    return make_column(advantages, values.lengths), make_column(advantages + value, values.lengths)


def discounted_returns(rewards: FloatColumn, gamma: float = 1.0) -> FloatColumn:
    """Computes at every response token the discounted sum of its own and all later rewards of the response:
    G_t = r_t + gamma G_{t+1} (Williams 1992)."""
    return make_column(_discounted_sums(float64(rewards), rewards.lengths, gamma), rewards.lengths)


def ppo_advantage(
    log_probs: FloatColumn,
    ref_log_probs: FloatColumn | None,
    values: FloatColumn,
    scores: Scores,
    *,
    beta: float,
    kl_kind: str = "k1",
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten_advantages: bool = True,
) -> CriticAdvantage:
    """Computes the advantages and returns of PPO: KL-penalised token rewards, GAE and whitening.

    Args:
        log_probs: Log-probabilities of the response tokens under the policy that sampled them.
        ref_log_probs: The same under the reference policy; None where the reward has no KL penalty (`beta` 0).
        values: Values of the critic, before each response token.
        scores: One score per response [rows] or per token (jagged); see `token_rewards`.
        beta: KL penalty, in units of reward per nat.
        kl_kind: Estimator of the KL; see `kl_estimate`.
        gamma: Discount per token; see `gae`.
        lam: Lambda of GAE; see `gae`.
        whiten_advantages: Whether to whiten the advantages over all tokens of the batch. Returns are never whitened.

    Returns:
        Advantages and returns, and as metrics, beside those of `penalized_rewards`: `advantage/mean` and
        `advantage/std` (per token, before whitening), `returns/mean` (per token) and `value/explained_variance`
        (1: perfect, 0: no better than a constant).

    Raises:
        ValueError: Columns have different lengths, a score is not finite, `beta` is not 0 without `ref_log_probs`,
            `kl_kind` is unknown, or fewer than 2 tokens are to be whitened.
    """
    require_equal_lengths(values=values, log_probs=log_probs)
    rewards, metrics = penalized_rewards(scores, log_probs, ref_log_probs, beta=beta, kl_kind=kl_kind)
    advantages, returns = gae(rewards, values, gamma, lam)
    metrics |= advantage_metrics(advantages)
    metrics |= value_metrics(values, returns)
    return CriticAdvantage(whiten(advantages) if whiten_advantages else advantages, metrics, returns)


def value_metrics(values: FloatColumn, returns: FloatColumn) -> dict[str, float]:
    """Returns the metrics `returns/mean` (per token) and `value/explained_variance`, which is
    1 - Var(returns - values) / Var(returns), or 0 where the returns do not vary."""
    value, target = float64(values), float64(returns)
    variance = std(target) ** 2
    explained = 1 - std(target - value) ** 2 / variance if variance > EPS else 0.0
    return {"returns/mean": mean(target), "value/explained_variance": explained}


def _on_last_tokens(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    if scores.shape != lengths.shape:
        raise ValueError(f"expected one score for each of {len(lengths)} responses, got shape {scores.shape}")
    rewards = np.zeros(lengths.sum())
    rewards[last_tokens(lengths)] = scores[lengths > 0]
    return rewards


def _next_in_row(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns x_{t+1} at each token t, and 0 at the last token of each row."""
    shifted = np.zeros_like(values)
    shifted[:-1] = values[1:]
    shifted[last_tokens(lengths)] = 0
    return shifted


def _discounted_sums(values: np.ndarray, lengths: np.ndarray, discount: float) -> np.ndarray:
    """Computes y_t = x_t + discount y_{t+1} within every row.

    The loop goes over token positions from right to left, vectorized over all rows that are long enough. Sorted by
    length, these are a prefix, so that a few long rows cost no padding.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    starts = (np.cumsum(lengths) - lengths)[longest_first]
    times = np.arange(lengths.max(initial=0))
    num_reaching = len(lengths) - np.searchsorted(np.sort(lengths), times, side="right")
    sums = np.empty_like(values)
    carry = np.zeros(len(lengths))
    for t in reversed(times):
        active = carry[: num_reaching[t]]
        tokens = starts[: num_reaching[t]] + t
        active *= discount
        active += values[tokens]
        sums[tokens] = active
    return sums
