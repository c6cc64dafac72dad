"""Reward under a limit on cost: Safe-RLHF (Dai et al. 2024, arXiv 2310.12773), as in its authors' code."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from controller.advantage.columns import (
    CriticAdvantage,
    FloatColumn,
    Scores,
    advantage_metrics,
    float64,
    make_column,
    mean,
    sequence_scores,
    whiten,
)
from controller.advantage.gae import gae, penalized_rewards, token_rewards, value_metrics
from controller.advantage.kl import kl_estimate


@dataclass
class Multiplier:
    """Lagrange multiplier lambda of the cost constraint; the fields are its whole state.

    Attributes:
        log_lambda: Natural logarithm of lambda.
        costs: Costs of the newest responses, over which the mean cost is taken, oldest first.
    """

    log_lambda: float = 0.0
    costs: list[float] = field(default_factory=list)

    @property
    def value(self) -> float:
        """Current value of lambda: the weight of a unit of cost, in units of reward."""
        return math.exp(self.log_lambda)

    def update(
        self,
        costs: Iterable[float],
        *,
        limit: float,
        learning_rate: float = 0.1,
        largest: float = 5.0,
        episodes: int = 128,
    ) -> float:
        """Makes one step of gradient ascent on lambda (J_C - d) with respect to log lambda (section 3.3):
        log_lambda += learning_rate lambda (J_C - d), at most log(largest).

        Args:
            costs: Cost of each response of this step, in order.
            limit: Limit d of the mean cost.
            learning_rate: Step size.
            largest: Upper bound of lambda.
            episodes: Number of newest responses whose mean cost is J_C; all responses while there are fewer.

        Returns:
            The mean cost J_C.
        """
        self.costs = [*self.costs, *map(float, costs)][-episodes:]
        mean_cost = math.fsum(self.costs) / len(self.costs)
        step = learning_rate * self.value * (mean_cost - limit)
        self.log_lambda = min(self.log_lambda + step, math.log(largest))
        return mean_cost


@dataclass(frozen=True)
class SafeAdvantage(CriticAdvantage):
    """Advantages, and the returns that the critic and the cost critic are trained on, one of each per response
    token."""

    cost_returns: FloatColumn


def safe_advantage(
    log_probs: FloatColumn,
    ref_log_probs: FloatColumn,
    values: FloatColumn,
    cost_values: FloatColumn,
    scores: Scores,
    costs: Scores,
    *,
    multiplier: float,
    beta: float,
    kl_kind: str = "k1",
    gamma: float = 1.0,
    lam: float = 0.95,
    clip: float = 50.0,
    whiten_advantages: bool = False,
) -> SafeAdvantage:
    """Computes the advantages and returns of Safe-RLHF (section 3.3 and appendix B).

    Per token r = -beta KL + R at the last token and c = beta KL + C at the last token, both clipped to +-clip;
    A_R and A_C by GAE from the critic's and the cost critic's values; A = (A_R - lambda A_C) / (1 + lambda).

    Args:
        log_probs, ref_log_probs: Log-probabilities of the response tokens under the policy that sampled them, and
            under the reference policy.
        values, cost_values: Values of the critic and of the cost critic, before each response token.
        scores, costs: Rewards R and costs C, per response [rows] or per token (jagged); see `token_rewards`.
        multiplier: Lagrange multiplier lambda.
        beta: KL penalty, in units of reward per nat.
        kl_kind: Estimator of the KL; see `kl_estimate`.
        gamma, lam: Discount and lambda of GAE; see `gae`.
        clip: Bound of the absolute reward and cost of a token.
        whiten_advantages: Whether to whiten A over all tokens of the batch.

    Returns:
        Advantages, returns and cost returns, and as metrics those of `ppo_advantage`, `cost/mean` (per response, before
        clipping) and `cost_value/explained_variance`.

    Raises:
        ValueError: Columns have different lengths, a score or cost is not finite, `kl_kind` is unknown, or fewer than 2
            tokens are to be whitened.
    """
    rewards, metrics = penalized_rewards(scores, log_probs, ref_log_probs, beta=beta, kl_kind=kl_kind)
    kl = kl_estimate(log_probs, ref_log_probs, kl_kind)
    # A policy close to the reference counts as safe too: the KL penalty is added to the costs.
    token_costs = token_rewards(costs, log_probs.lengths, kl, -beta)
    reward_advantages, returns = gae(_clipped(rewards, clip), values, gamma, lam)
    cost_advantages, cost_returns = gae(_clipped(token_costs, clip), cost_values, gamma, lam)
    combined = (float64(reward_advantages) - multiplier * float64(cost_advantages)) / (1 + multiplier)
    advantages = make_column(combined, values.lengths)
    metrics |= advantage_metrics(advantages) | value_metrics(values, returns)
    metrics |= {
        "cost/mean": mean(sequence_scores(costs)),
        "cost_value/explained_variance": value_metrics(cost_values, cost_returns)["value/explained_variance"],
    }
    if whiten_advantages:
        advantages = whiten(advantages)
    return SafeAdvantage(advantages, metrics, returns, cost_returns)


def _clipped(x: FloatColumn, bound: float) -> FloatColumn:
    return make_column(np.clip(float64(x), -bound, bound), x.lengths)
