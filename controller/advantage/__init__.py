"""`compute_advantage`: from scores, values and log-probabilities to advantages and returns, in numpy.

Everything is a function of jagged columns of response tokens [sum(lengths)]; there is no padding and no mask.
Sums run in float64 in the order of the rows, so equal columns give equal bits; columns come back as float32,
the type in which they travel.
"""

from controller.advantage.columns import Advantage, FloatColumn, Scores, sequence_scores, spread, whiten
from controller.advantage.gae import (
    discounted_returns,
    gae,
    penalized_rewards,
    ppo_advantage,
    token_rewards,
)
from controller.advantage.kl import AdaptiveKL, FixedKL, KlController, kl_controller, kl_estimate, steer

__all__ = [
    "AdaptiveKL",
    "Advantage",
    "FixedKL",
    "FloatColumn",
    "KlController",
    "Scores",
    "discounted_returns",
    "gae",
    "kl_controller",
    "kl_estimate",
    "penalized_rewards",
    "ppo_advantage",
    "sequence_scores",
    "spread",
    "steer",
    "token_rewards",
    "whiten",
]
