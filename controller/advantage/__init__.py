"""`compute_advantage`: from scores, values and log-probabilities to advantages and returns, in numpy.

Everything is a function of jagged columns of response tokens [sum(lengths)]; there is no padding and no mask.
All stages compute in float64, sums in the order of the rows, so equal columns give equal bits. What an update trains on
is rounded once, to float32, when it is sent (`Advantage.columns`): differences of large scores lose nothing before.
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
